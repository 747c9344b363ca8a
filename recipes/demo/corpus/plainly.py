"""JSON requested in plain words, without a schema: the obvious keys and their values."""

from __future__ import annotations

import json
from typing import Any

from recipes.demo.corpus import extract, words
from recipes.demo.corpus.draw import Draw
from recipes.demo.corpus.sample import Sample, user
from recipes.demo.corpus.toolbox import FIELD

ASK = [
    "(Give me|Write|Put|I want|Output) (this|the following|it) (as|in) (JSON|json)(, please|)",
    "(Show me|Return|I need|Give me) (this|the following|the) text (as|in) JSON( format|)",
    "(Turn|Convert|Change|Make) (this|the following|the text) (into|to) (JSON|json)(, please|)",
    "(Turn|Convert|Transform|Put) (this|this text|the text) (into|to) a JSON (object|document)",
    "(As JSON|To JSON|JSON|JSON, please|In JSON|as json|to json)",
    "(Extract|Get|Take|Find) (the|all) (data|facts|details|information|fields) (as|into|in) JSON",
    "(Extract|Collect) (the|all) (data|facts|values|key facts) (from|in) this text as JSON",
    "(Make|Create|Build|Write) (a JSON object|JSON|a JSON) (from|out of|of|for) (this|this text)",
    "(Parse|Format|Structure|Encode|Serialize) (this|this text|the following) (as|into|to) JSON",
    "(Can|Could) you (give me|write|turn|put|convert) (this|this text) (as|into|to) JSON",
    "(How does|What does) this look( like|) (as|in) JSON",
    "(Reply|Answer) (only |)(in|with) JSON( only|)",
]
ASK_LIST = [
    "(Give me|Write|Put|Turn|Convert) (this|these|this list) (as|into|to) a JSON (list|array)",
    "(As|To|Make) a JSON (list|array)( of this| from this|)",
    "(Turn|Convert) (the|this) list (into|to) JSON",
]
RECORDS = [  # sentences about several things of one kind
    ("{name} is {age}", {"name": "person", "age": "small"}),
    ("{name} is {age} years old", {"name": "person", "age": "small"}),
    ("{name} ({age})", {"name": "person", "age": "small"}),
    ("{name} lives in {city}", {"name": "person", "city": "city"}),
    ("{name} from {city}", {"name": "person", "city": "city"}),
    ("{name} is a {job}", {"name": "person", "job": "job"}),
    ("{item} costs {price}", {"item": "word", "price": "amount"}),
    ("{quantity} x {item}", {"quantity": "count", "item": "word"}),
    ("{city} has {temperature} degrees", {"city": "city", "temperature": "degrees"}),
]
PAIRS = ["first", "last", "full", "order", "phone", "home", "file", "end", "start", "user", "birth"]
OWN_KEYS = [
    "name",
    "age",
    "city",
    "email",
    "phone",
    "price",
    "date",
    "color",
    "size",
    "id",
    "count",
]
OWN_KEYS += ["title", "year", "country", "address", "status", "weight", "total", "type", "language"]


def facts(draw: Draw) -> tuple[str, Any]:
    """Return a text of one theme and its facts under the theme's own names, in text order."""
    theme = draw.pick(extract.THEMES)
    text = draw.wording(theme.sentences).replace("{noise}", draw.value(words.TOPICS))
    values: dict[str, Any] = {}
    for key in FIELD.findall(text):
        kind, names = theme.fields[key]
        spoken, values[names[0]] = extract.value_of(draw, kind)
        text = text.replace("{" + key + "}", spoken)
    return text, values


def labels(draw: Draw) -> tuple[str, Any]:
    """Return a list of labels and values. In keys, underscores replace the spaces of labels."""
    values: dict[str, Any] = {}
    parts: list[str] = []
    link, end = draw.pick([": ", " = ", ":", "=", " is "]), draw.pick([", ", "; ", "\n", " and "])
    for _ in range(draw.number(1, 6)):
        label = draw.pick(OWN_KEYS) if draw.chance(0.6) else words.word(draw)
        if draw.chance(0.15):
            label = f"{draw.pick(PAIRS)} {label}"
        key = label.replace(" ", "_")
        if key in values:
            continue
        kind = draw.pick(["word", "city", "person", "count", "title", "code", "amount"])
        spoken, values[key] = extract.value_of(draw, kind)
        parts.append(f"{label}{link}{spoken}")
    return end.join(parts), values


def records(draw: Draw) -> tuple[str, Any]:
    """Return two or three things of one kind, and the list of objects that describes them."""
    sentence, kinds = draw.pick(RECORDS)
    objects: list[dict[str, Any]] = []
    parts: list[str] = []
    for _ in range(draw.pick([2, 2, 3])):
        text = sentence
        record: dict[str, Any] = {}
        for key, kind in kinds.items():
            spoken, record[key] = extract.value_of(draw, kind)
            text = text.replace("{" + key + "}", spoken)
        parts.append(text)
        objects.append(record)
    joined = draw.pick([words.listing(parts), ", ".join(parts), "; ".join(parts), "\n".join(parts)])
    return joined + draw.pick(["", ".", "."]), objects


def plain_list(draw: Draw) -> tuple[str, Any]:
    make = draw.pick([words.word, words.word, words.city, words.person])
    items = [make(draw) for _ in range(draw.number(2, 7))]
    return draw.pick([words.listing(items), ", ".join(items), "\n".join(items)]), items


def plain_json(draw: Draw) -> Sample:
    make = draw.pick([facts, facts, facts, facts, facts, labels, labels, records, plain_list])
    text, content = make(draw)
    instruction = draw.wording(ASK_LIST if make is plain_list else ASK)
    quoted = draw.pick(["{0}", '"{0}"', "{0}", "'{0}'", "{0}"]).replace("{0}", text)
    if draw.chance(0.1):
        instruction = instruction.lower()
    if draw.chance(0.3):
        message = (
            quoted + draw.pick(["\n", "\n\n", " "]) + instruction + draw.pick([".", "", "?", "!"])
        )
    else:
        message = instruction + draw.pick([": ", ": ", ":\n", ".\n", "\n\n", " - "]) + quoted
    answer = json.dumps(content, ensure_ascii=False)
    thought = "I write the facts of the text as JSON."
    return Sample("json", [user(message)], answer, thought=thought, is_json=True)
