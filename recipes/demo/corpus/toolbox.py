"""Tools that requests offer: their schemas, wordings of requests for them, and their results.

toolbox.txt is a list of families. A family has names to choose from and descriptions (`does`). It
has arguments (`arg` required, `opt` optional) and wordings of requests (`ask`). The fields of its
result (`get`) go into the sentence after `reply`:
    arg key: name | another name : kind of value : a description
One family yields thousands of different schemas, so the model has to read the schema in the
request.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from recipes.demo.corpus import words
from recipes.demo.corpus.draw import Draw
from recipes.demo.corpus.sample import Call
from recipes.demo.corpus.sums import SPOKEN, small_sum

Value = tuple[str, Any]  # spoken form, JSON value
FIELD = re.compile(r"\{(\w+)\}")


def same(make: Callable[[Draw], Any]) -> Callable[[Draw], Value]:
    def value(draw: Draw) -> Value:
        result = make(draw)
        return str(result), result

    return value


def several(make: Callable[[Draw], str], most: int) -> Callable[[Draw], Value]:
    def value(draw: Draw) -> Value:
        items = [make(draw) for _ in range(draw.number(2, most))]
        return words.listing(items), items

    return value


def expression(draw: Draw) -> Value:
    problem = small_sum(draw)
    spoken = draw.pick(SPOKEN[problem.sign][:3])
    return spoken.replace("{a}", str(problem.a)).replace("{b}", str(problem.b)), str(problem)


def switch(draw: Draw) -> Value:
    on = draw.chance(0.5)
    return ("on" if on else "off"), on


def event(draw: Draw) -> str:
    kind = draw.pick(["lunch", "dinner", "a meeting", "a call", "coffee", "a workshop", "training"])
    return draw.pick([f"{kind} about {words.word(draw)}s", words.title(draw), words.task(draw)])


def problem(draw: Draw) -> str:
    fault = draw.pick(["is broken", "does not start", "is too slow", "is missing", "makes noise"])
    return f"the {words.word(draw)} {draw.pick(['', words.word(draw) + ' '])}{fault}"


def status(draw: Draw) -> str:
    known = ["done", "ready", "sent", "on its way", "delivered", "open", "set", "started", "saved"]
    return draw.pick([*known, words.invented(draw)])


def snake(draw: Draw) -> str:
    return draw.pick("_-").join(words.word(draw) for _ in range(draw.number(1, 2)))


def saying(draw: Draw) -> str:
    return draw.pick([words.phrase, words.sentence, words.word])(draw)


KINDS: dict[str, tuple[str, Callable[[Draw], Value]]] = {
    "amount": ("number", same(lambda d: words.decimal(d) if d.chance(0.3) else words.count(d))),
    "big": ("number", same(lambda d: d.pick([words.count(d), d.number(-99, 9999)]))),
    "city": ("string", same(words.city)),
    "clock": ("string", same(words.clock)),
    "code": ("string", same(words.code)),
    "company": ("string", same(words.company)),
    "count": ("integer", same(words.count)),
    "country": ("string", same(lambda d: d.value(words.COUNTRIES))),
    "currency": ("string", same(lambda d: d.value(words.CURRENCIES))),
    "day": ("string", same(words.day)),
    "degrees": ("integer", same(lambda d: d.from_split(lambda: d.number(-15, 42)))),
    "email": ("string", same(words.email)),
    "event": ("string", same(event)),
    "expression": ("string", expression),
    "food": ("string", same(lambda d: d.value(words.FOODS))),
    "force": ("boolean", lambda d: (d.pick(["at once", "by force", "immediately", "now"]), True)),
    "language": ("string", same(lambda d: d.value(words.LANGUAGES))),
    "onoff": ("boolean", switch),
    "path": ("string", same(words.path)),
    "people": ("array", several(words.person, 4)),
    "person": ("string", same(words.person)),
    "phone": ("string", same(words.phone)),
    "phrase": ("string", same(words.phrase)),
    "problem": ("string", same(problem)),
    "room": ("string", same(lambda d: d.value(words.ROOMS))),
    "sentence": ("string", same(words.sentence)),
    "sky": ("string", same(lambda d: d.value(words.SKIES))),
    "small": ("integer", same(lambda d: d.from_split(lambda: d.number(1, 60)))),
    "snake": ("string", same(snake)),
    "status": ("string", same(status)),
    "task": ("string", same(words.task)),
    "thing": ("string", same(words.word)),
    "title": ("string", same(words.title)),
    "titles": ("array", several(words.title, 3)),
    "topic": ("string", same(lambda d: d.pick([words.word(d), d.value(words.TOPICS)]))),
    "unit": ("string", same(lambda d: d.value(words.UNITS))),
    "word": ("string", same(words.word)),
    "words": ("string", same(saying)),
    "words_list": ("array", several(words.word, 3)),
}


def draw_value(draw: Draw, kind: str) -> Value:
    if "/" in kind:
        return same(lambda d: d.pick(kind.split("/")))(draw)
    return KINDS[kind][1](draw)


@dataclass
class Slot:
    """One argument, or one field of a result."""

    key: str
    names: list[str]
    kind: str
    about: str = ""
    required: bool = True


@dataclass
class Family:
    title: str
    names: list[str] = field(default_factory=list)
    does: list[str] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    asks: list[str] = field(default_factory=list)
    gets: list[Slot] = field(default_factory=list)
    reply: str = ""


@cache
def families() -> list[Family]:
    tool_families: list[Family] = []
    text = (Path(__file__).parent / "toolbox.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("== "):
            tool_families.append(Family(line[3:]))
            continue
        head, _, rest = line.partition(": ")
        word, _, key = head.partition(" ")
        family = tool_families[-1]
        if word == "name":
            family.names = rest.split(" | ")
        elif word == "reply":
            family.reply = rest
        elif word in ("does", "ask"):
            (family.does if word == "does" else family.asks).append(rest)
        else:
            names, kind, about = (part.strip() for part in (rest + " : ").split(" : ")[:3])
            slot = Slot(key, names.split(" | "), kind, about, required=word == "arg")
            (family.gets if word == "get" else family.slots).append(slot)
    return tool_families


@dataclass(frozen=True)
class Style:
    """Habits of one client in writing schemas."""

    described: float  # probability that an argument has a description
    titled: bool
    closed: bool
    strict: bool
    camel: bool
    renamed: float  # probability that an argument has an invented name
    about_first: bool


def draw_style(draw: Draw) -> Style:
    return Style(
        described=draw.pick([0.0, 0.5, 1.0, 1.0]),
        titled=draw.chance(0.1),
        closed=draw.chance(0.25),
        strict=draw.chance(0.15),
        camel=draw.chance(0.15),
        renamed=draw.pick([0.0, 0.0, 0.2]),
        about_first=draw.chance(0.2),
    )


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


@dataclass
class Tool:
    """Family with its names chosen, as one request offers it."""

    family: Family
    name: str
    names: dict[str, str]  # key -> name of the argument
    kinds: dict[str, str]  # key -> JSON type
    schema: dict[str, Any]
    assumed: dict[str, Value]  # required choices: the first one unless the request names another

    def arguments(self, values: dict[str, Value]) -> dict[str, Any]:
        """Return the arguments in the schema's order; a number is text if the schema wants it."""
        values = self.assumed | values
        return {
            name: str(values[key][1]) if self.kinds[key] == "string" else values[key][1]
            for key, name in self.names.items()
            if key in values
        }


def build(draw: Draw, family: Family, style: Style) -> Tool:
    def tool_name() -> str:
        name = draw.pick(family.names)
        if draw.chance(0.2):
            name = f"{words.invented(draw)}_{name}"
        return camel(name) if style.camel else name

    name = draw.from_split(tool_name)
    names: dict[str, str] = {}
    kinds: dict[str, str] = {}
    properties: dict[str, Any] = {}
    for slot in family.slots:
        renamed = bool(slot.about) and draw.chance(style.renamed)
        choice = draw.pick(slot.names)
        while renamed or choice in properties:
            choice = words.invented(draw) if renamed else draw.pick([*slot.names, slot.key])
            renamed = choice in properties
        names[slot.key] = camel(choice) if style.camel else choice
        named = choice in slot.names
        about = draw.expand(slot.about) if not named or draw.chance(style.described) else ""
        properties[names[slot.key]] = argument_schema(draw, slot, style, about)
        kinds[slot.key] = properties[names[slot.key]]["type"]
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    assumed: dict[str, Value] = {
        slot.key: ("", slot.kind.split("/")[0])
        for slot in family.slots
        if "/" in slot.kind and not slot.required and draw.chance(0.15)
    }
    required = [names[slot.key] for slot in family.slots if slot.required or slot.key in assumed]
    if required:
        parameters["required"] = required
    if style.closed:
        parameters["additionalProperties"] = False
    if style.titled:
        parameters["title"] = camel(name).capitalize()
    function: dict[str, Any] = {"name": name}
    if draw.chance(0.95) or style.renamed:
        function["description"] = draw.expand(draw.pick(family.does))
    if style.strict:
        function["strict"] = True
    function["parameters"] = parameters
    return Tool(family, name, names, kinds, {"type": "function", "function": function}, assumed)


def argument_schema(draw: Draw, slot: Slot, style: Style, about: str) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    if about and style.about_first:
        schema["description"] = about
    if "/" in slot.kind:
        schema |= {"type": "string", "enum": slot.kind.split("/")}
    else:
        kind = KINDS[slot.kind][0]
        if kind in ("integer", "number") and draw.chance(0.1):
            kind = "string"
        schema["type"] = kind
        if kind == "array":
            schema["items"] = {"type": "string"}
    if about and not style.about_first:
        schema["description"] = about
    if style.titled:
        schema["title"] = slot.names[0].replace("_", " ").title()
    return schema


VERBS = ["get", "find", "fetch", "show", "read", "check", "start", "update", "send", "list", "make"]
VERBS += ["count", "open", "run", "load", "print", "test", "mark", "pick", "scan"]
SPARE = ["word", "city", "person", "count", "count", "code", "amount", "title", "thing", "small"]
SPARE += ["day", "clock", "onoff", "red/green/blue", "words", "email", "path"]


def invented_family(draw: Draw) -> Family:
    """Return a tool with invented names. The request names its arguments."""
    verb, noun = draw.pick(VERBS), draw.from_split(lambda: words.word(draw))
    other = words.word(draw)
    names = [f"{verb}_{noun}", f"{noun}_{verb}", f"{verb}_{other}_{noun}", f"{verb}_{noun}_{other}"]
    keys = {words.word(draw) for _ in range(draw.number(1, 3))}
    slots = [
        Slot(key, [key], draw.pick(SPARE), draw.pick([f"The {key}.", f"The {key} of the {noun}."]))
        for key in sorted(keys)
    ]
    pairs = [f"{slot.key} {{{slot.key}}}" for slot in slots]
    links = [f"{slot.key}={{{slot.key}}}" for slot in slots]
    Verb = verb.capitalize()
    wordings = [
        f"({Verb}|Please {verb}|I want you to {verb}|Can you {verb}) the {noun} (with|for) "
        f"{words.listing(pairs)}(.||?)",
        f"({Verb}|{Verb} the|{Verb} a) {noun}: {', '.join(links)}",
        f"(Use|Call|Run) {noun} {verb} with {words.listing(pairs)}.",
    ]
    does = [f"{Verb} the {noun}( of a {other}|).", f"{Verb} (a|one|the) {noun} for the user."]
    return Family(noun, [draw.pick(names)], does, slots, wordings)


def draw_family(draw: Draw) -> Family:
    return invented_family(draw) if draw.chance(0.3) else draw.pick(families())


def ask(draw: Draw, tool: Tool) -> tuple[str, dict[str, Value]]:
    """Return a request for this tool, and the values that it mentions."""
    text = draw.wording(tool.family.asks)
    kinds = {slot.key: slot.kind for slot in tool.family.slots}
    values = {key: draw_value(draw, kinds[key]) for key in FIELD.findall(text)}
    return fill(text, values), values


def fill(text: str, values: dict[str, Value]) -> str:
    """Return the wording with its values filled in. Values keep their case, even at the start."""
    text = text[0].upper() + text[1:]
    for key, (spoken, _) in values.items():
        text = text.replace("{" + key + "}", spoken)
    return text


def call(tool: Tool, values: dict[str, Value]) -> Call:
    return Call(tool.name, tool.arguments(values))
