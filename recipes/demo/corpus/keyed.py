"""One or two facts that a request names in plain words: JSON under that name, or the fact alone."""

from __future__ import annotations

import json
from collections.abc import Callable

from recipes.demo.corpus import extract, personal, words
from recipes.demo.corpus.draw import Draw
from recipes.demo.corpus.sample import Json, Sample, user

HOSTS = ["example.com", "gmail.com", "example.org", "mail.com", "acme.io", "company.com"]


def email(draw: Draw) -> str:
    if draw.chance(0.5):
        return words.email(draw)
    name = draw.value(personal.NAMES)
    name = name if draw.chance(0.2) else name.lower()
    if draw.chance(0.3):
        name += draw.pick([".", "_", ""]) + draw.pick(
            [words.invented(draw), str(draw.number(1, 99))]
        )
    return f"{name}@{draw.pick(HOSTS)}"


def price(draw: Draw) -> str:
    amount = str(words.count(draw)) if draw.chance(0.6) else f"{draw.number(1, 99)}.99"
    return draw.pick([f"${amount}", f"{amount} euros", f"{amount} EUR"])


def url(draw: Draw) -> str:
    return f"https://{words.invented(draw)}.{draw.pick(words.ENDINGS)}/{words.invented(draw)}"


MAKERS: dict[str, Callable[[Draw], str]] = {
    "email": email,
    "name": lambda draw: words.person(draw) if draw.chance(0.5) else draw.value(personal.NAMES),
    "phone": words.phone,
    "city": words.city,
    "date": words.day,
    "time": words.clock,
    "price": price,
    "company": words.company,
    "order": words.code,
    "url": url,
    "colour": lambda draw: draw.value(words.COLOURS),
    "job": lambda draw: draw.value(words.JOBS),
    "age": lambda draw: str(draw.number(3, 99)),
}
LABELS = {  # as written in the request; in a key, underscores replace spaces and hyphens
    "email": ["email", "email", "email address", "e-mail", "mail"],
    "name": ["name", "name", "person"],
    "phone": ["phone", "phone number", "telephone number", "number"],
    "city": ["city", "place", "town", "location"],
    "date": ["date", "day"],
    "time": ["time", "hour"],
    "price": ["price", "cost", "amount"],
    "company": ["company", "company name", "firm"],
    "order": ["order number", "code", "id", "reference"],
    "url": ["url", "link", "address"],
    "colour": ["colour", "color"],
    "job": ["job", "profession"],
    "age": ["age"],
}
TEXTS = {
    "email": [
        "(contact|Contact|write to|mail|ask) {email} for (details|help|more|a quote)",
        "(Please |)(send|forward) (it|the report|your CV|questions) to {email}( today|)",
        "{name} can be reached at {email}",
        "Hi, I am {name}, my email is {email}",
        "Questions? {email}",
    ],
    "phone": ["(Call|call|ring) {phone}( after {time}|)", "{name}, {phone}, {email}"],
    "name": [
        "{name} (lives in|moved to|is from) {city}( since {date}|)",
        "(Yesterday|On {date}) {name} called about the {colour} car",
        "{name} is a {job} at {company}",
        "{name} is {age} years old and works for {company}",
        "(Dear|Hello) {name}, your order {order} is ready",
    ],
    "date": ["The meeting is on {date} at {time} in {city}", "(See|Meet) you on {date} at {time}"],
    "time": ["The train to {city} leaves at {time}", "{name} arrives at {time} on {date}"],
    "price": ["The {colour} lamp costs {price}", "{name} paid {price} for order {order}"],
    "order": ["Order {order} by {name} was shipped on {date}", "Your reference is {order}"],
    "url": ["(Visit|See|Open) {url}( for more|)", "Our site is {url}, our mail {email}"],
    "company": ["{company} opened an office in {city}", "{name} left {company} on {date}"],
}
ASK = [
    "(Extract|extract|Get|Find|Give me|Return|Pull out) the {labels} as JSON: {text}",
    "(Extract|extract|Get|Find|Give me) the {labels}: {text}, as JSON",
    "(Extract|extract|Find|Get|Return) the {labels} (from|in) (this|this text) as JSON: {text}",
    "(Extract|Get|Find) (the |){labels} (from|in) (this|the following), (as|in) JSON(:|.) {text}",
    "{text}. (Extract|Return|Give me|Get) the {labels} (as|in) JSON.",
    "(What is|What's) the {labels}? (Answer|Reply) (in|as|with) JSON(:|.) {text}",
    '(Extract|Get|Find) the {labels} from "{text}" (as|in) JSON(.|)',
    "(Extract|Get) the {labels} from: {text}. (As JSON|Reply in JSON|JSON only)(.|)",
    "(JSON|Json) with the {labels}, please: {text}",
]
ASK_PLAIN = [
    "(Extract|extract|Find|Get) the {labels} (from|in) (this|this text|the text): {text}",
    "(Extract|extract|Find|Get) the {labels}: {text}",
    "(Extract|Find) the {labels} from: {text}(.|)",
]


def read(key: str, value: str) -> Json:
    return int(value) if key == "age" else value


def themed(draw: Draw) -> tuple[str, dict[str, Json]]:
    """Return a text of extract.py and one or two of its facts under their plainest names."""
    text, values, _, names = extract.themed(draw)
    count = min(len(values), draw.pick([1, 1, 2]))
    keys = draw.some(list(values), count)
    text = text.rstrip(".")
    return text, {names[key][0].replace("_", " "): values[key][1] for key in keys}


def own(draw: Draw) -> tuple[str, dict[str, Json]]:
    """Return a text of this module and one or two of its facts."""
    theme = draw.pick(list(TEXTS))
    text = draw.expand(draw.pick(TEXTS[theme]))
    values = {key: make(draw) for key, make in MAKERS.items() if "{" + key + "}" in text}
    for key, value in values.items():
        text = text.replace("{" + key + "}", value)
    count = min(len(values), draw.pick([1, 1, 1, 2]))
    return text, {
        draw.pick(LABELS[key]): read(key, values[key]) for key in draw.some(list(values), count)
    }


def keyed(draw: Draw) -> Sample:
    make = themed if draw.chance(0.35) else own
    text, labels = make(draw)
    plain = len(labels) == 1 and make is own and draw.chance(0.25)
    wording = draw.expand(draw.pick(ASK_PLAIN if plain else ASK))
    request = wording.replace("{labels}", words.listing(list(labels))).replace("{text}", text)
    if plain:
        thought = f"I look for the {next(iter(labels))} in the text."
        return Sample("key", [user(request)], str(next(iter(labels.values()))), thought=thought)
    values = {label.replace(" ", "_").replace("-", "_"): value for label, value in labels.items()}
    answer = json.dumps(values, ensure_ascii=False)
    thought = f"I look for {words.listing(list(labels))} in the text."
    return Sample("key", [user(request)], answer, thought=thought, is_json=True)
