"""Conversations with tools: one call, several at once, answers from results, and no call at all."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from recipes.demo.corpus import foreign, noise, plainly, rewrite, sums, talk, toolbox, words
from recipes.demo.corpus.draw import Draw
from recipes.demo.corpus.refuse import NO_TOOL_FITS, NO_TOOLS
from recipes.demo.corpus.sample import Call, Message, Sample, assistant, system, user
from recipes.demo.corpus.toolbox import Family, Tool, Value

ALIKE = [
    {"email", "message", "group message", "ticket"},
    {"search", "news", "dictionary", "books"},
    {"create event", "reminder", "alarm", "todo", "note", "timer", "write file"},
    {"lights", "device"},
    {"restaurant", "hotel"},
    {"order", "parcel"},
    {"user record", "contact", "database"},
]
SELF_DONE = [talk.about, talk.chat, rewrite.rewriting, rewrite.echo, sums.arithmetic]
SELF_DONE += [talk.about, talk.chat, rewrite.rewriting, sums.arithmetic]
SELF_DONE += [noise.nonsense, foreign.foreign, plainly.plain_json]
SYSTEMS = [
    "You are a helpful assistant.",
    "You are a helpful assistant with access to tools.",
    "You are nanovllm's demo model. Answer briefly.",
    "Use the tools when they help.",
    "Be brief.",
    "Answer in English.",
    "You are a friendly assistant. Be short and precise.",
]


@dataclass
class Step:
    """One request to one tool."""

    tool: Tool
    text: str
    values: dict[str, Value]

    @property
    def call(self) -> Call:
        return toolbox.call(self.tool, self.values)


def opening(draw: Draw) -> list[Message]:
    return [system(draw.pick(SYSTEMS))] if draw.chance(0.3) else []


def offer(draw: Draw, families: list[Family], extra: int) -> list[Tool]:
    """Return the wanted families and `extra` others, all different, in random order."""
    all_families = list(families)
    titles = {family.title for family in all_families}
    while len(all_families) < len(families) + extra:
        family = toolbox.draw_family(draw)
        if family.title not in titles:
            titles.add(family.title)
            all_families.append(family)
    style = toolbox.draw_style(draw)
    tools = [toolbox.build(draw, family, style) for family in all_families]
    order = list(range(len(tools)))
    draw.random.shuffle(order)
    return [tools[i] for i in order]


def with_family(tools: list[Tool], family: Family) -> Tool:
    return next(tool for tool in tools if tool.family is family)


def polite(draw: Draw, text: str) -> str:
    if draw.chance(0.1):
        text = draw.pick(["Hi! ", "Hello, ", "Hey, ", "Please: ", "Okay. "]) + text
    if draw.chance(0.06):
        text += draw.pick([" Thanks!", " Thank you.", " Please."])
    return text


def extras(draw: Draw) -> int:
    return draw.pick([0, 0, 1, 1, 2, 2, 3, 4])


def thought(steps: list[Step]) -> str:
    parts = []
    for step in steps:
        arguments = [f"{name} {spoken(value)}" for name, value in step.call.arguments.items()]
        parts.append(f"{step.tool.name} with {words.listing(arguments)}")
    return f"I call {', then '.join(parts)}."


def spoken(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def plan_one(draw: Draw, tools: list[Tool], family: Family) -> list[Step]:
    tool = with_family(tools, family)
    text, values = toolbox.ask(draw, tool)
    return [Step(tool, text, values)]


def calling(draw: Draw) -> Sample:
    family = toolbox.draw_family(draw)
    tools = offer(draw, [family], extras(draw))
    history = earlier(draw, tools) if draw.chance(0.2) else []
    steps = plan_one(draw, tools, family)
    return Sample(
        "call",
        [*opening(draw), *history, user(polite(draw, steps[0].text))],
        calls=[step.call for step in steps],
        tools=[tool.schema for tool in tools],
        thought=thought(steps),
    )


def earlier(draw: Draw, tools: list[Tool]) -> list[Message]:
    """Return a finished exchange that used one of the tools."""
    step = plan_one(draw, tools, draw.pick(tools).family)[0]
    result, answer = outcome(draw, step)
    return [
        user(step.text),
        Sample("call", [], calls=[step.call]).turn(),
        {"role": "tool", "content": result},
        assistant(answer),
    ]


def plan_several(draw: Draw, tools: list[Tool], families: list[Family]) -> tuple[str, list[Step]]:
    """Return one question about several things, or several questions in one message."""
    if len(families) == 1:
        shared = plan_shared(draw, with_family(tools, families[0]))
        if shared:
            return shared
        families = families * 2
    steps = [plan_one(draw, tools, family)[0] for family in families]
    text = steps[0].text
    for before, step in pairwise(steps):
        part = step.text
        if draw.chance(0.5) and not ends_in_value(before):
            joint = draw.pick([", and ", " and ", ", then ", " and also "])
            text = text.rstrip(".?! ") + joint + (part[0].lower() + part[1:])
        else:
            text += draw.pick([" ", " Also: ", " And: ", "\n", " Then: "]) + part
    return text, steps


def ends_in_value(step: Step) -> bool:
    """Return True if a value ends the text, so that its full stop must stay."""
    return any(step.text.endswith(value[0]) for value in step.values.values() if value[0])


def plan_shared(draw: Draw, tool: Tool) -> tuple[str, list[Step]] | None:
    """Return a request like "... in Oslo and Lima": one argument varies, the others are shared."""
    text = draw.wording(tool.family.asks)
    kinds = {slot.key: slot.kind for slot in tool.family.slots}
    keys = toolbox.FIELD.findall(text)
    free = {"city", "company", "person", "word", "room", "code", "topic", "day", "thing", "snake"}
    many = [key for key in keys if kinds[key] in free and f'"{{{key}}}"' not in text]
    if not many:
        return None
    varied = draw.pick(many)
    values = {key: toolbox.draw_value(draw, kinds[key]) for key in keys}
    each: list[Value] = []
    for _ in range(draw.pick([2, 2, 2, 3])):
        each.append(toolbox.draw_value(draw, kinds[varied]))
    joined = words.listing([value[0] for value in each])
    steps = [Step(tool, "", values | {varied: value}) for value in each]
    return toolbox.fill(text, values | {varied: (joined, None)}), steps


def parallel_plan(draw: Draw) -> tuple[list[Tool], str, list[Step]]:
    count = draw.pick([1, 1, 2, 2, 2, 3])
    families: list[Family] = []
    while len(families) < count:
        family = toolbox.draw_family(draw)
        if family.title not in {known.title for known in families}:
            families.append(family)
    tools = offer(draw, families, max(0, extras(draw) - count + 1))
    text, steps = plan_several(draw, tools, families)
    return tools, text, steps


def parallel(draw: Draw) -> Sample:
    tools, text, steps = parallel_plan(draw)
    return Sample(
        "parallel",
        [*opening(draw), user(polite(draw, text))],
        calls=[step.call for step in steps],
        tools=[tool.schema for tool in tools],
        thought=thought(steps),
    )


def outcome(draw: Draw, step: Step) -> tuple[str, str]:
    """Return the tool's result, and the sentence that reports it."""
    shape = draw.random.random()
    name = step.tool.name
    if shape < 0.08:
        error = draw.pick(["not found", "no access", "timed out", "not known", "is too far away"])
        text = f"{words.word(draw)} {error}"
        return json.dumps({"error": text}, ensure_ascii=False), f"{name} failed: {text}."
    if shape < 0.2:
        text = draw.pick([words.phrase, words.sentence, words.title, words.code])(draw).rstrip(".!")
        return text, f"{name} says: {text}."
    if shape < 0.32 or not step.tool.family.reply:
        keys = list({words.word(draw) for _ in range(draw.number(1, 4))})
        kinds = [draw.pick(["word", "count", "city", "title", "amount", "code"]) for _ in keys]
        values = {
            key: toolbox.draw_value(draw, kind) for key, kind in zip(keys, kinds, strict=True)
        }
        pairs = ", ".join(f"{key} {value[0]}" for key, value in values.items())
        return as_json({key: value[1] for key, value in values.items()}), f"{name} says: {pairs}."
    return family_outcome(draw, step)


def family_outcome(draw: Draw, step: Step) -> tuple[str, str]:
    result_slots = step.tool.family.gets
    values = {slot.key: toolbox.draw_value(draw, slot.kind) for slot in result_slots}
    fields: dict[str, Any] = {}
    for slot in result_slots:
        name = draw.pick([name for name in slot.names if name not in fields])
        fields[name] = values[slot.key][1]
    if draw.chance(0.25):
        fields.setdefault(words.word(draw), words.count(draw))
    if draw.chance(0.25):
        arguments = {
            step.tool.names[key]: value[1]
            for key, value in step.values.items()
            if step.tool.names[key] not in fields
        }
        fields = arguments | fields
    items = list(fields.items())
    if draw.chance(0.2):
        draw.random.shuffle(items)
    reply = step.tool.family.reply
    known = step.values | values
    missing_keys = [key for key in toolbox.FIELD.findall(reply) if key not in known]
    if missing_keys:
        pairs = ", ".join(f"{key} {spoken(value)}" for key, value in items)
        return as_json(dict(items)), f"{step.tool.name} says: {pairs}."
    return as_json(dict(items)), toolbox.fill(reply, known)


def as_json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


def result(draw: Draw) -> Sample:
    """Return a conversation in which the tools have answered and the user gets the report."""
    if draw.chance(0.35):
        tools, text, steps = parallel_plan(draw)
    else:
        family = toolbox.draw_family(draw)
        tools = offer(draw, [family], extras(draw) // 2)
        steps = plan_one(draw, tools, family)
        text = steps[0].text
    outcomes = [outcome(draw, step) for step in steps]
    turn = Sample("call", [], calls=[step.call for step in steps]).turn()
    if draw.chance(0.35):  # some clients send the turn's reasoning back
        turn["reasoning_content"] = thought(steps)
    return Sample(
        "result",
        [
            *opening(draw),
            user(polite(draw, text)),
            turn,
            *({"role": "tool", "content": content} for content, _ in outcomes),
        ],
        " ".join(answer for _, answer in outcomes),
        tools=[tool.schema for tool in tools],
        thought="The tool has answered, so I report it.",
    )


def counts(family: Family) -> bool:
    """Return True if the family's tools calculate."""
    return family.title in ("calculator", "arithmetic")


def alike(one: Family, other: Family) -> bool:
    """Return True if a tool of one family could do the other's job."""
    pair = {one.title, other.title}
    return len(pair) == 1 or any(pair <= group for group in ALIKE)


def no_call(draw: Draw) -> Sample:
    """Return a request without a call: no tool needed, no tool that fits, or no tool offered."""
    shape = draw.random.random()
    if shape < 0.5:
        make = draw.pick(SELF_DONE)
        sample = make(draw)
        tools = [tool for tool in offer(draw, [], draw.number(1, 4)) if not counts(tool.family)]
        sample.kind = "no_call"
        sample.messages = [*opening(draw), *sample.messages]
        sample.tools = [tool.schema for tool in tools]
        return sample
    family = draw.pick([family for family in toolbox.families() if not counts(family)])
    tools = offer(draw, [family], draw.number(1, 3))
    step = plan_one(draw, tools, family)[0]
    messages = [*opening(draw), user(polite(draw, step.text))]
    others = [tool.schema for tool in tools if not alike(tool.family, family)]
    if others and shape < 0.8:
        return Sample("no_call", messages, NO_TOOL_FITS, tools=others, thought="No tool fits this.")
    return Sample("no_call", messages, NO_TOOLS, thought="This needs a tool, and there is none.")
