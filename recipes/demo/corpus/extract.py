"""Texts that contain facts, and requests for some of these facts as JSON.

Each theme has fields and sentences. A request names some of the fields, in its own order and under
its own names. The text contains these facts and others.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from recipes.demo.corpus import words
from recipes.demo.corpus.draw import Draw
from recipes.demo.corpus.sample import Sample, user
from recipes.demo.corpus.toolbox import FIELD, KINDS, Value, draw_value


@dataclass(frozen=True)
class Theme:
    fields: dict[str, tuple[str, list[str]]]  # key -> kind of value, names a request may use
    sentences: list[str]


THEMES = [
    Theme(
        {
            "name": ("person", ["name", "person", "full_name", "who"]),
            "age": ("small", ["age", "years", "age_years"]),
            "city": ("city", ["city", "home", "place", "town", "location", "lives_in"]),
            "job": ("job", ["job", "occupation", "profession", "work", "role"]),
        },
        [
            "{name} is {age} years old, lives in {city} and works as a {job}.",
            "{name}, {age}, (lives|has a house) in {city}. (The|This) {job} likes {noise}.",
            "(My|Our) (neighbour|friend|cousin) {name} from {city} is a {job} and turned {age}.",
            "In {city} I met {name}, a {job} of {age} years.",
            "The {job} {name} ({age}) comes from {city}.",
            "{name} is {age}( years old|).",
            "{name} (lives in|is from|comes from) {city}.",
            "{name} is a {job} (in|from) {city}.",
            "{name} is a {age} year old {job}( from {city}|).",
            "(My name is|I am|I'm) {name}, I am {age} (years old |)and (I |)live in {city}.",
            "(My name is|I am) {name} and I work as a {job}( in {city}|).",
        ],
    ),
    Theme(
        {
            "item": ("word", ["item", "product", "article", "thing", "ordered"]),
            "quantity": ("count", ["quantity", "count", "amount", "number", "pieces"]),
            "price": ("amount", ["price", "cost", "total", "sum"]),
            "customer": ("person", ["customer", "buyer", "name", "client", "ordered_by"]),
        },
        [
            "{customer} ordered {quantity} pieces of {item} for {price} euros.",
            "Order from {customer}: {quantity} x {item}, {price} EUR in total.",
            "We sold {quantity} {item} boxes to {customer}; the price was {price}.",
            "For {price} dollars {customer} gets {quantity} units of {item}.",
            "{customer} (bought|ordered|wants) {quantity} {item}(s|).",
            "(I bought|I ordered|We need) {quantity} {item} for {price} euros.",
            "A {item} costs {price} (euros|dollars).",
        ],
    ),
    Theme(
        {
            "title": ("title", ["title", "event", "name", "what"]),
            "date": ("day", ["date", "day", "when", "on"]),
            "time": ("clock", ["time", "start", "at", "start_time", "hour"]),
            "place": ("city", ["place", "city", "location", "where", "venue"]),
        },
        [
            "{title} takes place on {date} at {time} in {place}.",
            "(Come|You are invited) to {title} in {place}! It starts at {time} on {date}.",
            "On {date}, {place} hosts {title}; doors open at {time}.",
            "(Save the date|Reminder): {title}, {date}, {time}, {place}.",
            "{title} is on {date} at {time}.",
            "{title} (starts|begins) at {time} in {place}.",
        ],
    ),
    Theme(
        {
            "product": ("title", ["product", "name", "item", "title"]),
            "colour": ("colour", ["colour", "color", "shade", "finish"]),
            "price": ("amount", ["price", "cost", "price_eur", "value"]),
            "stock": ("count", ["stock", "available", "in_stock", "left", "quantity"]),
        },
        [
            "The {product} comes in {colour} and costs {price} euros. We have {stock} of them.",
            "{product}, {colour}: {price} EUR ({stock} left).",
            "Only {stock} pieces of the {colour} {product} remain, at {price} each.",
            "For {price} you get the {product} in {colour}; {stock} are in stock.",
        ],
    ),
    Theme(
        {
            "title": ("title", ["title", "book", "name", "work"]),
            "author": ("person", ["author", "writer", "by", "written_by"]),
            "year": ("year", ["year", "published", "date", "year_published"]),
            "pages": ("count", ["pages", "length", "num_pages", "page_count"]),
        },
        [
            "{title} was written by {author} in {year} and has {pages} pages.",
            "In {year} {author} published {title}, a book of {pages} pages.",
            "{author}: {title} ({year}), {pages} pages.",
            "The {pages} pages of {title} made {author} famous in {year}.",
            "{author} wrote {title} in {year}.",
        ],
    ),
    Theme(
        {
            "from": ("city", ["from", "origin", "start", "departure"]),
            "to": ("city", ["to", "destination", "end", "arrival", "goal"]),
            "date": ("day", ["date", "day", "on", "when"]),
            "flight": ("code", ["flight", "number", "flight_number", "code"]),
        },
        [
            "Flight {flight} leaves {from} on {date} and lands in {to}.",
            "On {date} I fly from {from} to {to} with {flight}.",
            "Your flight {flight} from {from} to {to} is booked for {date}.",
            "{flight}: {from} to {to}, {date}.",
        ],
    ),
    Theme(
        {
            "name": ("person", ["name", "contact", "person", "from"]),
            "email": ("email", ["email", "mail", "address", "e_mail"]),
            "phone": ("phone", ["phone", "tel", "number", "phone_number"]),
            "company": ("company", ["company", "firm", "employer", "organisation"]),
        },
        [
            "{name} works at {company}. Write to {email} or call {phone}.",
            "(Contact|Ask|Reach) {name} of {company}: {email}, {phone}.",
            "You can reach {name} by phone ({phone}) or mail ({email}); the company is {company}.",
            "Best regards, {name}, {company}, {phone}, {email}",
        ],
    ),
    Theme(
        {
            "city": ("city", ["city", "place", "location", "where"]),
            "temperature": ("degrees", ["temperature", "degrees", "temp", "celsius"]),
            "sky": ("sky", ["weather", "condition", "sky", "description"]),
            "day": ("day", ["day", "date", "when"]),
        },
        [
            "On {day} it will be {sky} in {city} with {temperature} degrees.",
            "(Weather|Forecast) for {city}, {day}: {sky}, {temperature} degrees.",
            "{city} expects {temperature} degrees on {day}; the sky is {sky}.",
        ],
    ),
    Theme(
        {
            "animal": ("animal", ["animal", "species", "kind", "pet"]),
            "name": ("proper", ["name", "called", "pet_name"]),
            "age": ("small", ["age", "years", "age_years"]),
            "owner": ("person", ["owner", "keeper", "belongs_to", "human"]),
        },
        [
            "{owner} has a {animal} called {name} that is {age} years old.",
            "The {animal} {name} is {age} and belongs to {owner}.",
            "{name}, a {age} year old {animal}, lives with {owner}.",
        ],
    ),
    Theme(
        {
            "people": ("people", ["people", "names", "guests", "members", "attendees"]),
            "things": ("words_list", ["things", "items", "objects", "list"]),
            "place": ("city", ["place", "city", "where", "location"]),
            "date": ("day", ["date", "day", "when"]),
        },
        [
            "{people} meet in {place} on {date} and bring {things}.",
            "On {date} in {place}: {people}. To bring: {things}.",
            "We need {things} for the trip to {place} on {date}. {people} are coming.",
        ],
    ),
    Theme(
        {
            "sender": ("company", ["sender", "from", "company", "seller"]),
            "number": ("code", ["number", "invoice", "id", "invoice_number", "reference"]),
            "amount": ("amount", ["amount", "total", "sum", "price", "due"]),
            "paid": ("yesno", ["paid", "settled", "is_paid", "done"]),
        },
        [
            "Invoice {number} from {sender} over {amount} euros. Paid: {paid}.",
            "{sender} sent invoice {number}, total {amount}. Already paid? {paid}.",
            "Reference {number}, {amount} EUR to {sender}, paid: {paid}",
        ],
    ),
]
EXTRA_KINDS = {
    "job": ("string", words.JOBS),
    "colour": ("string", words.COLOURS),
    "animal": ("string", words.ANIMALS),
}
ASK = [
    "(Extract|Find|Give me|Take) {fields} (from|in) (this|the|the following) text(,|) as JSON",
    "(Extract|Return|Write) (a JSON object|JSON) with (the keys|the fields|the fields|) {fields}",
    "(Turn|Convert) this (text |)into JSON with (the keys|fields) {fields}",
    "(Return|Answer with) only JSON with {fields}( for this text|)",
    "(Read|Parse) the text and (answer|reply) in JSON with (the keys|) {fields}",
]
SHAPE = [
    "(Extract|Return|Write) (JSON|a JSON object) (of|in|with) (this|the) (shape|schema): {shape}",
    "(Answer with|Fill in|Give me) JSON in (this|the) (form|shape|format): {shape}",
    "(Fill|Complete) (this|the) JSON (shape|form|template) (from|with) the text: {shape}",
    "(Use|Follow) the (schema|shape) {shape}( to describe the text|)",
]


def value_of(draw: Draw, kind: str) -> Value:
    if kind in EXTRA_KINDS:
        value = draw.value(EXTRA_KINDS[kind][1])
        return value, value
    if kind == "proper":
        value = words.proper(draw)
        return value, value
    if kind == "year":
        year = draw.from_split(lambda: draw.number(1700, 2030))
        return str(year), year
    if kind == "yesno":
        yes = draw.chance(0.5)
        return ("yes" if yes else "no"), yes
    return draw_value(draw, kind)


def type_of(kind: str) -> str:
    if kind in ("proper", *EXTRA_KINDS):
        return "string"
    if kind in ("year", "yesno"):
        return {"year": "integer", "yesno": "boolean"}[kind]
    return KINDS[kind][0]


def described(draw: Draw, field_types: dict[str, str]) -> str:
    """Return the instruction that lists the fields (name -> JSON type), in one of six notations."""
    style = draw.number(0, 5)
    if style <= 1:
        quote = draw.pick(["", '"', "`"])
        typed = style == 1
        names = [
            f"{quote}{n}{quote}" + (f" ({t})" if typed else "") for n, t in field_types.items()
        ]
        return draw.wording(ASK).replace("{fields}", words.listing(names))
    if style == 2:
        shape = json.dumps(dict(field_types))
    elif style == 3:
        shape = "{" + ", ".join(f'"{name}": ...' for name in field_types) + "}"
    elif style == 4:
        shape = "{" + ", ".join(f"{name}: {kind}" for name, kind in field_types.items()) + "}"
    else:
        properties = {name: {"type": kind} for name, kind in field_types.items()}
        shape = json.dumps({"type": "object", "properties": properties})
    return draw.wording(SHAPE).replace("{shape}", shape)


def labelled(draw: Draw) -> tuple[str, dict[str, Value], dict[str, str]]:
    """Return a text that is a list of labels and values, with its values and JSON types."""
    keys = list(dict.fromkeys(words.word(draw) for _ in range(draw.number(2, 6))))
    kinds = {key: draw.pick(["word", "city", "person", "count", "title", "code"]) for key in keys}
    values = {key: value_of(draw, kind) for key, kind in kinds.items()}
    link, end = draw.pick([": ", " = ", " is ", ":"]), draw.pick([", ", "; ", "\n", ". "])
    text = end.join(f"{key}{link}{value[0]}" for key, value in values.items())
    return text, values, {key: type_of(kind) for key, kind in kinds.items()}


def themed(draw: Draw) -> tuple[str, dict[str, Value], dict[str, str], dict[str, list[str]]]:
    theme = draw.pick(THEMES)
    text = draw.wording(theme.sentences).replace("{noise}", draw.value(words.TOPICS))
    keys = FIELD.findall(text)
    values = {key: value_of(draw, theme.fields[key][0]) for key in keys}
    for key, (spoken, _) in values.items():
        text = text.replace("{" + key + "}", spoken)
    if draw.chance(0.3):
        other = (
            f"The {draw.value(words.ADJECTIVES)} {words.word(draw)} {draw.value(words.VERBS)} it."
        )
        text = draw.pick([f"{text} {other}", f"{other} {text}"])
    types = {key: type_of(theme.fields[key][0]) for key in keys}
    return text, values, types, {key: theme.fields[key][1] for key in keys}


def extraction(draw: Draw) -> Sample:
    if draw.chance(0.2):
        text, values, types = labelled(draw)
        names = {key: [key] for key in values}
    else:
        text, values, types, names = themed(draw)
    keys = draw.some(list(values), draw.number(1, len(values)))
    field_types: dict[str, str] = {}
    answer: dict[str, Any] = {}
    for key in keys:
        name = draw.pick(names[key])
        if name in field_types:
            continue
        field_types[name] = types[key]
        answer[name] = values[key][1]
    instruction = described(draw, field_types)
    quoted = draw.pick(["{0}", '"{0}"', "{0}", "'{0}'"]).replace("{0}", text)
    message = draw.pick([f"{instruction}.\n{quoted}", f"{instruction}: {quoted}"])
    if draw.chance(0.25):
        message = f"{quoted}\n\n{instruction}."
    thought = f"I look for {words.listing(list(field_types))} in the text."
    content = json.dumps(answer, ensure_ascii=False)
    return Sample("extract", [user(message)], content, thought=thought, is_json=True)
