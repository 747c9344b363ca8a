"""The client gets the same message however an output is split, streamed or not."""

from __future__ import annotations

import functools
from random import Random

import msgspec
import pytest
from hypothesis import settings
from tokenizers import AddedToken

from nanovllm.server.answers import ChunkWriter, WholeWriter
from nanovllm.server.detokenize import Detokenizer, Vocabulary
from nanovllm.server.parsers import PARSERS
from nanovllm.server.parsers.base import CallPart, CallStart, Reasoning
from nanovllm.server.parsers.machine import OutputParser
from tests.server.parsers.generated_outputs import (
    SCHEMAS,
    Mark,
    Message,
    cut_short,
    damaged,
    family_of,
    generated,
    json_or_none,
    marks_of,
)
from tests.server.tiny_tokenizer import tiny_tokenizer

NUM_OUTPUTS = 15 * settings().max_examples


def machine(name: str, marks: dict[str, str], in_reasoning: bool, schemas) -> OutputParser:
    return OutputParser(family_of(name), marks, "<think>\n" if in_reasoning else "", schemas)


def message_of(parser: OutputParser, parts: list[str]) -> Message:
    message = Message()
    calls: list[list[str]] = []
    events = [event for part in parts for event in parser.feed(part)] + parser.finish()
    for event in events:
        if isinstance(event, CallStart):
            calls.append([event.name, ""])
            continue
        assert event.text, "an event that says nothing"
        if isinstance(event, CallPart):
            calls[-1][1] += event.text
        elif isinstance(event, Reasoning):
            message.reasoning += event.text
        else:
            message.content += event.text
    message.calls = [(name, arguments) for name, arguments in calls]
    return message


def cut(rng: Random, text: str) -> list[str]:
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def streamed(parser: OutputParser, parts: list[str]) -> Message:
    """Return the message joined from the chunks, as a client does."""
    out: list[bytes] = []
    writer = ChunkWriter(b'data: {"choices":[', 0, out, reasoning_content=True)
    writer.begin([])
    for events in (*map(parser.feed, parts), parser.finish()):
        for event in events:
            writer.write(event, None)
    message = Message()
    calls: list[list[str]] = []
    for data in out:
        delta = msgspec.json.decode(data.removeprefix(b"data: "))["choices"][0]["delta"]
        message.content += delta.get("content", "")
        message.reasoning += delta.get("reasoning", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls) and call["type"] == "function"
                assert call["function"]["arguments"] == ""
                calls.append([call["function"]["name"], ""])
            else:
                assert call.keys() == {"index", "function"}
                assert call["index"] == len(calls) - 1 and call["function"].keys() == {"arguments"}
                calls[-1][1] += call["function"]["arguments"]
    message.calls = [(name, arguments) for name, arguments in calls]
    return message


def whole(parser: OutputParser, text: str) -> Message:
    writer = WholeWriter(0)
    for event in parser.feed(text) + parser.finish():
        writer.write(event, None)
    answer = writer.choice(with_logprobs=False).message
    calls = [(call.function.name, call.function.arguments) for call in answer.tool_calls or ()]
    reasoning = answer.reasoning if isinstance(answer.reasoning, str) else ""
    return Message(reasoning, answer.content or "", calls)


@pytest.mark.parametrize("name", PARSERS)
def test_the_grouping_of_tokens_changes_nothing(name) -> None:
    """Token ids, with markers as tokens or typed, give the message in any grouping."""
    rng = Random(name)
    tokenizer = tiny_tokenizer()
    markers = family_of(name).markers
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in markers])
    vocabulary = Vocabulary(tokenizer, markers)
    assert vocabulary.marks == marks_of(name, as_tokens=True)
    ids_of = functools.cache(lambda character: tokenizer.encode(character).ids)
    for _ in range(NUM_OUTPUTS // 4):
        output = generated(rng, name)
        ids: list[int] = []
        for piece in output.pieces:
            is_mark = isinstance(piece, Mark)
            ids += ids_of(piece) if is_mark else [i for c in piece for i in ids_of(c)]
        parts, end = [], 0
        detokenizer = Detokenizer(vocabulary, skip_special=True)
        while end < len(ids):
            begin, end = end, end + rng.choice([1, 1, 2, 3, 20])
            parts.append("".join(map(detokenizer.feed, ids[begin:end])))
        parts.append(detokenizer.finish())
        ways = (vocabulary.marks, output.in_reasoning, SCHEMAS)
        got = streamed(machine(name, *ways), parts)
        assert got == whole(machine(name, *ways), output.text(vocabulary.marks)), ids


@pytest.mark.parametrize("name", PARSERS)
def test_cuts_and_streaming_change_nothing(name) -> None:
    rng = Random(name)
    num_called = 0
    for number in range(NUM_OUTPUTS):
        output = generated(rng, name)
        as_tokens = rng.random() < 0.6
        marks = marks_of(name, as_tokens=as_tokens)
        text = output.text(marks)
        is_good = number % 2 == 0
        if not is_good:
            text = damaged(rng, text)
        ways = (marks, output.in_reasoning, SCHEMAS if number % 7 else None)
        expected = whole(machine(name, *ways), text)
        assert streamed(machine(name, *ways), cut(rng, text)) == expected, text
        assert message_of(machine(name, *ways), list(text)) == expected, text
        if number % 100 == 0:
            for at in range(len(text)):
                assert message_of(machine(name, *ways), [text[:at], text[at:]]) == expected, text
        read = [(called, json_or_none(arguments)) for called, arguments in expected.calls]
        assert all(type(arguments) in (dict, type(None)) for _, arguments in read)
        num_called += len(read)
        if is_good and ways[2] and (as_tokens or not output.has_typed):
            assert Message(expected.reasoning, expected.content, read) == output.message, text
    assert num_called > NUM_OUTPUTS / 4 or name in ("plain", "thinking")


@pytest.mark.parametrize("name", [name for name in PARSERS if name not in ("plain", "thinking")])
def test_a_cut_call_is_never_a_valid_one_that_lacks_something(name) -> None:
    """A truncated output has complete calls, and at most a last one that is not valid JSON."""
    rng = Random(name)
    num_open = 0
    for _ in range(NUM_OUTPUTS // 20):
        output = generated(rng, name)
        ways = (marks_of(name, as_tokens=True), output.in_reasoning, SCHEMAS)
        text = output.text(ways[0])
        for _ in range(20):
            begun = cut_short(rng, text)
            if begun.rstrip().endswith("</function>"):
                continue  # may end a call without its other end tags
            found = whole(machine(name, *ways), begun).calls
            for at, (called, arguments) in enumerate(found):
                read = json_or_none(arguments)
                assert (called, read) == output.message.calls[at] or (
                    read is None and at == len(found) - 1
                ), (text, arguments)
                num_open += read is None
    assert num_open > NUM_OUTPUTS // 20
