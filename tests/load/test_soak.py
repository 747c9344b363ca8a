"""Comparison of answers and of resource use in a soak test."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from nanovllm.server.protocol import parse_request
from tests.load.soak.questions import Answer, Choice, RefusedError, add, count, folded, questions
from tests.load.soak.state import (
    AS_BEFORE,
    CACHE,
    MIB,
    NOTHING_HELD,
    Held,
    State,
    held_by,
    slope_mib_per_hour,
)

GAUGES = dict.fromkeys(NOTHING_HELD, 0.0) | dict.fromkeys(AS_BEFORE, 5.0) | {CACHE: 0.0}
ENGINE = Held(1, 13, 8, 500.0)
REST = State({"nanovllm-engine": ENGINE}, GAUGES)


def test_questions_are_valid_and_have_one_answer_each() -> None:
    made = questions()
    assert 60 <= len(made) <= 75 and len({json.dumps(body) for body in made}) == len(made)
    for body in made:
        parse_request(json.dumps(body).encode(), model="demo", vocab_size=2048)
        assert body["temperature"] == 0 or "seed" in body
    assert sum("stream" in body for body in made) == len(made) // 2


def stream(*chunks: object) -> list[str]:
    return [f"data: {json.dumps(chunk)}" for chunk in chunks] + ["", "data: [DONE]"]


def chunk(reason: str | None = None, **delta: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}], "usage": None}


def call(name: str | None, arguments: str) -> dict[str, object]:
    return {"index": 0, "function": {"name": name, "arguments": arguments}}


def test_a_stream_and_a_whole_answer_are_compared_alike() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 9, "prompt_tokens_details": {"x": 1}}
    parts = [
        chunk(reasoning="hm"),
        chunk(content="a"),
        chunk(content="b", tool_calls=[call("f", "")]),
        chunk(tool_calls=[call(None, '{"x"')]),
        chunk("tool_calls", tool_calls=[call(None, ": 1}")]),
        {"choices": [], "usage": usage},
    ]
    whole = Answer()
    called = {"id": "any", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = {"content": "ab", "reasoning": "hm", "tool_calls": [called]}
    add(whole, {"index": 0, "finish_reason": "tool_calls"}, message)
    count(whole, usage)
    assert folded(stream(*parts)).differs_from(whole) == ""
    assert "usage (0, 0), quiet (7, 9)" in folded(stream(*parts[:-1])).differs_from(whole)
    differs = folded(stream(*parts[1:])).differs_from(whole)
    assert differs == "choice 0: reasoning '', quiet 'hm'"
    with pytest.raises(ValueError, match="ends in"):
        folded(stream(*parts)[:-1])
    with pytest.raises(RefusedError, match="gone"):
        folded(stream(parts[0], {"error": {"message": "gone"}}))


def test_the_last_digits_of_logprobs_may_differ() -> None:
    quiet = Answer({0: Choice(tokens=["a"], logprobs=[-0.5])})
    assert Answer({0: Choice(tokens=["a"], logprobs=[-0.5001])}).differs_from(quiet) == ""
    assert "logprobs" in Answer({0: Choice(tokens=["a"], logprobs=[-0.6])}).differs_from(quiet)
    assert "logprobs" in Answer({0: Choice(tokens=["a"])}).differs_from(quiet)
    assert "tokens" in Answer({0: Choice(tokens=["b"], logprobs=[-0.5])}).differs_from(quiet)


def test_what_is_held_beyond_before_is_named() -> None:
    assert REST.not_back(REST) == []
    for name in NOTHING_HELD:
        left = replace(REST, gauges=GAUGES | {name: 2.0})
        assert left.not_back(REST) == [f"{name} is 2"]
        assert left.not_back(left) == [f"{name} is 2"], "it must be nothing, whatever was before"
    for name in AS_BEFORE:
        left = replace(REST, gauges=GAUGES | {name: 6.0})
        assert left.not_back(REST) == [f"{name} is 6, was 5"]
        assert REST.not_back(left) == []
    for what in ("processes", "descriptors", "threads"):
        more = getattr(ENGINE, what) + 1
        left = replace(REST, held={"nanovllm-engine": replace(ENGINE, **{what: more})})
        assert left.not_back(REST) == [f"nanovllm-engine has {more} {what}, had {more - 1}"]
    found = replace(REST, held={"nanovllm-trials": Held(1, 0, 1, 1.0)}).not_back(REST)
    assert found == [
        "nanovllm-trials has 1 processes, had 0",
        "nanovllm-trials has 1 threads, had 0",
    ]


def test_memory_may_grow_by_so_much_and_by_the_cache_of_grammars() -> None:
    def grown(mib: float, cached: float = 0.0) -> list[str]:
        held = {"nanovllm-engine": replace(ENGINE, rss_mib=500 + mib)}
        return State(held, GAUGES | {CACHE: cached * MIB}).not_back(REST)

    assert grown(99) == [] == grown(199, cached=100)
    assert grown(101) == ["nanovllm-engine has 601 MiB, had 500"]
    assert grown(201, cached=100) == ["nanovllm-engine has 701 MiB, had 500"]


def test_processes_are_counted_by_name() -> None:
    name = Path("/proc/self/comm").read_text().strip()
    before = held_by(os.getpid())[name]
    with Path("/dev/null").open(), Path("/dev/null").open():
        now = held_by(os.getpid())[name]
    assert now.descriptors == before.descriptors + 2
    assert now.processes >= 1 and now.threads >= 1 and 10 < now.rss_mib < 100_000


def test_the_slope_is_that_of_the_last_two_thirds() -> None:
    steady = [(float(at), 100.0 if at >= 30 else float(at)) for at in range(0, 90, 10)]
    assert slope_mib_per_hour(steady) == 0
    rising = [(float(at), 5.0 + at / 10) for at in range(0, 90, 10)]
    assert slope_mib_per_hour(rising) == pytest.approx(360)
    assert slope_mib_per_hour(rising[:1]) == 0
