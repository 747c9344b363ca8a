"""Random outputs of every model family, with the message that each represents."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random

from nanovllm.registry import resolve
from nanovllm.server.parsers import PARSERS
from nanovllm.server.parsers.base import Family
from nanovllm.server.parsers.markers import (
    CALL,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    END_THINK,
    SEPARATOR,
    THINK,
)

SCHEMA = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "n": {"type": "number"},
        "b": {"type": "boolean"},
        "o": {"type": "object"},
        "l": {"$ref": "#/$defs/list"},
        "ns": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "is": {"type": ["integer", "string"]},
        "e": {"enum": ["none", "null and void"]},
    },
    "$defs": {"list": {"type": "array"}},
}
SCHEMAS = {"f": SCHEMA, "get_weather": None}
NAMES = ["f", "f", "get_weather", "unknown-tool", "a.b"]
WORDS = [
    *(
        "plain",
        "words ",
        "a<b",
        "<",
        "</",
        "</thi",
        "<tool",
        "é😀",
        "日本",
        "none",
        "{",
        "}",
        "```",
    ),
    *(
        "\n",
        "  ",
        '"quoted"',
        "\\",
        "<\uff5c",
        "e.g. ",
        "x</parameter>y",
        "<function",
        "1.",
        "\u00a0z",
    ),
]
TYPED = [THINK, END_THINK, "<tool_call>", "</tool_call>", "</minimax:tool_call>", CALLS_END]
SPACES = ["", "", "\n", " ", "\n\n"]


class Mark(str):
    """A marker written as a marker, not as ordinary text."""

    __slots__ = ()


@dataclass
class Message:
    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, object]] = field(default_factory=list)


@dataclass
class Output:
    pieces: list[str]
    message: Message
    in_reasoning: bool
    has_typed: bool  # has a marker as ordinary text, which differs only if markers are tokens

    def text(self, marks: dict[str, str]) -> str:
        return "".join(marks[p] if isinstance(p, Mark) else p for p in self.pieces)


def family_of(name: str) -> Family:
    return resolve(PARSERS, name)


def marks_of(name: str, *, as_tokens: bool) -> dict[str, str]:
    markers = family_of(name).markers
    return {m: chr(0xD800 + i) if as_tokens else m for i, m in enumerate(markers)}


def json_or_none(text: str) -> object:
    """Return the parsed JSON, None if it is truncated or malformed."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def prose(rng: Random, typed: list[str]) -> str:
    """Return a text that is not empty and has no white space at its ends."""
    words = WORDS + typed
    text = "".join(rng.choice(words) for _ in range(rng.randint(1, 8))).strip()
    return text or "ok"


def json_value(rng: Random, typed: list[str], depth: int = 0) -> object:
    kind = rng.randrange(7 if depth < 2 else 5)
    if kind <= 1:
        return prose(rng, typed) + rng.choice(["", "\n", "\t", "\x01"])
    if kind == 2:
        return rng.choice([0, -1, 12345678901234567890, 3.5, -2e-7])
    if kind in (3, 4):
        return rng.choice([True, False, None, ""])
    if kind == 5:
        return [json_value(rng, typed, depth + 1) for _ in range(rng.randrange(3))]
    return json_object(rng, typed, depth + 1)


def json_object(rng: Random, typed: list[str], depth: int = 0) -> dict[str, object]:
    keys = rng.sample(["city", "name", "arguments", "x y", "ключ", "s"], rng.randrange(4))
    return {key: json_value(rng, typed, depth) for key in keys}


def dumped(rng: Random, value: object) -> str:
    style = rng.randrange(4)
    if style == 0:
        return json.dumps(value, indent=2)
    separators = (",", ":") if style == 1 else (", ", ": ")
    return json.dumps(value, ensure_ascii=style == 2, separators=separators)


def tagged(rng: Random, typed: list[str]) -> tuple[list[str], list[tuple[str, object]]]:
    name, arguments = rng.choice(NAMES), json_object(rng, typed)
    entries = [f'"name": {json.dumps(name)}', f'"arguments":{dumped(rng, arguments)}']
    if rng.random() < 0.1:
        entries.append('"id": {"a": [1, "}"]}')  # not part of the call
    if not arguments and rng.random() < 0.5:
        entries = entries[:1]
    if rng.random() < 0.3:
        rng.shuffle(entries)
    body = rng.choice(["{", "{ "]) + ", ".join(entries) + rng.choice(["}", "\n}"])
    gap = rng.choice(SPACES)
    return [Mark("<tool_call>"), gap + body + gap, Mark("</tool_call>")], [(name, arguments)]


def untagged(rng: Random, typed: list[str]) -> tuple[list[str], list[tuple[str, object]]]:
    """Return calls as Llama 3.1 writes them: of the request's functions, by line or in a list."""
    calls = [
        (rng.choice(["f", "get_weather"]), json_object(rng, typed))
        for _ in range(rng.choice([1, 1, 2]))
    ]
    word = rng.choice(["parameters", "arguments"])
    bodies = [
        f'{{"name": "{name}", "{word}": {dumped(rng, arguments)}}}' for name, arguments in calls
    ]
    if rng.random() < 0.2:
        return [f"[{', '.join(bodies)}]"], list(calls)
    return [rng.choice(["\n", "; ", " "]).join(bodies)], list(calls)


def bare_marked(rng: Random, typed: list[str]) -> tuple[list[str], list[tuple[str, object]]]:
    """Return calls as DeepSeek-V3.1 writes them."""
    pieces: list[str] = [Mark(CALLS_BEGIN)]
    calls: list[tuple[str, object]] = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        name, arguments = rng.choice(NAMES), json_object(rng, typed)
        calls.append((name, arguments))
        text = dumped(rng, arguments)
        if rng.random() < 0.1:
            text = json.dumps(text)
        pieces += [Mark(CALL), name, Mark(SEPARATOR), text, Mark(CALL_END)]
    return [*pieces, Mark(CALLS_END)], calls


def fenced(rng: Random, typed: list[str]) -> tuple[list[str], list[tuple[str, object]]]:
    pieces: list[str] = [Mark(CALLS_BEGIN)]
    calls: list[tuple[str, object]] = []
    for at in range(rng.choice([1, 1, 2, 3])):
        name, arguments = rng.choice(NAMES), json_object(rng, typed)
        calls.append((name, arguments))
        pieces += ["\n" if at else "", Mark(CALL), "function", Mark(SEPARATOR)]
        pieces += [f"{name}\n```json\n{dumped(rng, arguments)}\n```", Mark(CALL_END)]
    return [*pieces, Mark(CALLS_END)], calls


def xml_value(rng: Random, key: str, typed: list[str]) -> tuple[str, object]:
    """Return the raw text of a parameter, and its value."""
    if key == "i":
        return rng.choice([("5", 5), ("-70", -70), ("many", "many"), (" 3 ", 3)])
    if key == "n":
        return rng.choice([("5", 5), ("-1.5e3", -1500.0)])
    if key == "b":
        return rng.choice([("true", True), ("False", False), ("yes", "yes")])
    if key in ("o", "l"):
        value = json_object(rng, typed) if key == "o" else [json_value(rng, typed)]
        return json.dumps(value, ensure_ascii=rng.random() < 0.5), value
    if key == "ns" and rng.random() < 0.6:
        return rng.choice(
            [("null", None), ("none", "none"), ("nu", "nu"), ("nullable", "nullable")]
        )
    if key == "is" and rng.random() < 0.6:
        return rng.choice([("17", 17), ("none", "none"), ("null", "null"), ("1 2", "1 2")])
    if key == "e":
        return rng.choice([("none", "none"), ("null and void", "null and void")])
    text = prose(rng, typed) + rng.choice(["", "\n", " ", "</parameter>", "\n</function>"])
    text = rng.choice(["", "\n", " "]) + text if rng.random() < 0.2 else text
    if rng.random() < 0.05:
        text = ""
    return text, text


def xml(rng: Random, typed: list[str], *, minimax: bool) -> tuple[list[str], list]:
    opener = "<minimax:tool_call>" if minimax else "<tool_call>"
    pieces: list[str] = [Mark(opener), "\n"]
    calls: list[tuple[str, object]] = []
    for _ in range(rng.choice([1, 1, 2, 3]) if minimax else 1):
        name = rng.choice(NAMES)
        arguments: dict[str, object] = {}
        pieces.append(f'<invoke name="{name}">\n' if minimax else f"<function={name}>\n")
        for key in rng.sample([*SCHEMA["properties"], "what is this"], rng.randrange(5)):
            raw, value = xml_value(rng, key, typed)
            arguments[key] = value if name == "f" else raw
            if minimax:
                pieces += [f'<parameter name="{key}">{raw}</parameter>', rng.choice(["\n", ""])]
            else:
                pieces += [f"<parameter={key}>\n{raw}\n</parameter>", rng.choice(["\n", ""])]
        pieces.append("</invoke>\n" if minimax else "</function>\n")
        calls.append((name, arguments))
    return [*pieces, Mark(opener.replace("<", "</"))], calls


def glm(rng: Random, typed: list[str]) -> tuple[list[str], list]:
    name = rng.choice(NAMES)
    arguments: dict[str, object] = {}
    pieces: list[str] = [Mark("<tool_call>"), name, rng.choice(["\n", ""])]
    for key in rng.sample([*SCHEMA["properties"], "what is this"], rng.randrange(5)):
        raw, value = xml_value(rng, key, typed)
        arguments[key] = value if name == "f" else raw
        pieces += [Mark("<arg_key>"), key, Mark("</arg_key>"), rng.choice(["\n", ""])]
        pieces += [Mark("<arg_value>"), raw, Mark("</arg_value>"), rng.choice(["\n", ""])]
    return [*pieces, Mark("</tool_call>")], [(name, arguments)]


def glm_call(*parameters: tuple[str, str]) -> str:
    body = "".join(
        f"<arg_key>{name}</arg_key><arg_value>{value}</arg_value>" for name, value in parameters
    )
    return f"<tool_call>f{body}</tool_call>"


CALLS = {
    "qwen3": tagged,
    "glm4_7": glm,
    "qwen3_coder": lambda rng, typed: xml(rng, typed, minimax=False),
    "minimax_m2": lambda rng, typed: xml(rng, typed, minimax=True),
    "deepseek_r1": fenced,
    "deepseek_v3_1": bare_marked,
    "llama3": untagged,
}


def generated(rng: Random, name: str) -> Output:
    """Return a well-formed output, or one truncated in its reasoning."""
    has_typed = rng.random() < 0.3
    if name == "plain":
        text = prose(rng, TYPED)
        return Output([text], Message(content=text), False, has_typed)
    if name == "llama3":
        return generated_by_llama(rng)
    said = [
        family_of(name).opener or "ok",
        *(TYPED if has_typed else []),
    ]  # without a call's opener it is text
    message = Message()
    pieces: list[str] = []
    in_reasoning = rng.random() < 0.4
    thinks = in_reasoning or rng.random() < 0.4
    if thinks:
        if not in_reasoning:
            pieces += [rng.choice(["", "\n"]), Mark(THINK)]
        message.reasoning = prose(rng, said) if rng.random() < 0.9 else ""
        space = rng.choice(SPACES)
        pieces += [rng.choice(SPACES), message.reasoning, space]
        if rng.random() < 0.1:
            message.reasoning += space if message.reasoning else ""
            return Output(pieces, message, in_reasoning, has_typed)
    text_is_next = rng.random() < 0.6
    num_parts = rng.randint(1 if thinks else 0, 4)
    if name not in CALLS:
        num_parts, text_is_next = 1, True
    if thinks and (text_is_next or rng.random() < 0.7):
        pieces += [Mark(END_THINK), rng.choice(SPACES)]  # otherwise a call ends the reasoning
    gap, ends_with_text = "", False
    for _ in range(num_parts):
        if text_is_next:
            text = prose(rng, said)
            pieces.append(text)
            message.content += (gap if message.content else "") + text
            gap, text_is_next, ends_with_text = "", False, True
        else:
            written, calls = CALLS[name](rng, rng.choice([[], TYPED]))
            message.calls += calls
            pieces += written
            text_is_next, ends_with_text = rng.random() < 0.5, False
        space = rng.choice(SPACES)
        pieces.append(space)
        gap = space or gap
    if ends_with_text:
        message.content += gap
    return Output(pieces, message, in_reasoning, has_typed)


def generated_by_llama(rng: Random) -> Output:
    """Return text, followed by calls that begin a line."""
    message = Message()
    pieces: list[str] = []
    if rng.random() < 0.5:
        words = [word for word in WORDS if word not in ("```", "{", "\n")]
        message.content = f"ok {rng.choice(words)}".strip()
        pieces = [message.content, "\n"]
    if rng.random() < 0.8:
        written, message.calls = untagged(rng, [])
        pieces += [*rng.choice([[], [Mark("<|python_tag|>")]]), *written]
    else:
        message.content += "".join(pieces[1:])
    return Output(pieces, message, False, False)


def damaged(rng: Random, text: str) -> str:
    """Return the text truncated, or with a part missing or repeated."""
    kind = rng.randrange(4)
    at, until = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    if kind <= 1:
        return cut_short(rng, text)
    if kind == 2:
        return text[:at] + text[min(until, at + 3) :]
    return text[:at] + text[until : until + 9] + text[at:]


def cut_short(rng: Random, text: str) -> str:
    return text[: rng.randrange(len(text) + 1)]
