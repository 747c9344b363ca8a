"""The counts of continuous_usage_stats rise with every chunk."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from nanovllm.wire import Finish, FinishReason, TokenLogprobs
from tests.server.test_choice import (
    END,
    TOKENIZER,
    TOOL,
    Made,
    answered,
    chunks_of,
    fragments,
    message_of,
    opened,
    options,
)

COUNTED = {
    "stream": True,
    "stream_options": {"continuous_usage_stats": True, "include_usage": True},
}


def counts_of(session: Made) -> list[int]:
    return [chunk["usage"]["completion_tokens"] for chunk in chunks_of(session)]


def fed(session: Made, steps: list[list[list[int]]], reason=FinishReason.LENGTH) -> None:
    """Feed each step's tokens to the choices. The last step ends all, the last choice first."""
    for step in steps:
        for choice, ids in zip(session.choices, step, strict=True):
            if not choice.reason:
                choice.tokens(ids)
        if step is steps[-1]:
            for choice in reversed(session.choices):
                if not choice.reason:
                    choice.finish(Finish(choice.message.request_id, reason))
        session.flush()


def check(session: Made) -> None:
    *counts, total = counts_of(session)
    assert counts[0] == 0 and counts[-1] == total == session.num_tokens
    assert all(a < b for a, b in pairwise(counts)), counts
    chunks = chunks_of(session)
    assert chunks[-1]["choices"] == []
    for chunk in chunks:
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        details = usage["completion_tokens_details"]
        assert details["reasoning_tokens"] <= usage["completion_tokens"]


@pytest.mark.parametrize("per_step", [1, 3])
@pytest.mark.parametrize("ends", [True, False])
def test_counts_rise_with_every_chunk(per_step, ends) -> None:
    """A last token with text at the length limit shares its chunk with the end."""
    ids = TOKENIZER.encode("<think>hm, so</think>one two three four five six seven").ids
    ids = [*ids, END] if ends else ids
    steps = [[ids[at : at + per_step]] for at in range(0, len(ids), per_step)]
    session = opened(**COUNTED)
    fed(session, steps, FinishReason.STOP if ends else FinishReason.LENGTH)
    check(session)
    chunks = chunks_of(session)[:-1]
    assert len(chunks) <= len(steps) + 1
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == ("stop" if ends else "length")
    if not ends:
        assert chunks[-1]["choices"][0]["delta"]["content"]


@given(st.lists(fragments, max_size=10).map("".join), options, st.data())
def test_what_it_says_is_what_other_streams_say(text, options, data) -> None:
    ids = [*TOKENIZER.encode(text, add_special_tokens=False).ids, END]
    cuts = sorted(set(data.draw(st.lists(st.integers(1, len(ids)), max_size=6))) - {len(ids)})
    groups = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    usual = answered(groups, stream=True, **options)
    session = opened(**COUNTED, **options)
    (choice,) = session.choices
    for at, group in enumerate(groups):
        if options.get("logprobs"):
            for token_id in group:
                choice.logprobs(TokenLogprobs(1, token_id, -1.0, [], []))
        if not choice.reason:
            choice.tokens(group)
        if at == len(groups) - 1 and not choice.reason:
            choice.finish(Finish(1, FinishReason.STOP))
        session.flush()
    check(session)
    events = session.text.split("\n\n")
    session.peer.text = "\n\n".join(event for event in events if '"choices":[]' not in event)
    assert message_of(session) == message_of(usual)
    assert session.tally.usage() == usual.tally.usage()


def test_the_choices_of_a_request_count_together() -> None:
    ids = TOKENIZER.encode("one two three four").ids
    session = opened(n=3, **COUNTED)
    fed(session, [[[i]] * 3 for i in ids])
    *counts, total = counts_of(session)
    assert counts == sorted(counts) and counts[-1] == total == 3 * len(ids)
    said = [c for c in chunks_of(session)[:-1] if c["choices"][0]["delta"].get("content")]
    assert all(a < b for a, b in pairwise(c["usage"]["completion_tokens"] for c in said))


def test_a_call_of_one_step_is_one_chunk() -> None:
    ids = TOKENIZER.encode('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>').ids
    session = opened(tools=[TOOL], **COUNTED)
    fed(session, [[ids]], FinishReason.STOP)
    check(session)
    _, chunk, _ = chunks_of(session)
    (choice,) = chunk["choices"]
    (call,) = choice["delta"]["tool_calls"]
    assert call["id"].startswith("call_") and (call["index"], call["type"]) == (0, "function")
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert choice["finish_reason"] == "tool_calls"


def test_tokens_can_be_named_by_their_ids() -> None:
    session = opened(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    (choice,) = session.choices
    half = TOKENIZER.encode("\N{SNOWMAN}").ids[0]
    choice.logprobs(TokenLogprobs(1, half, -1.0, [7], [-0.5]))
    choice.tokens([half])
    choice.finish(Finish(1, FinishReason.LENGTH))
    (entry,) = session.body["choices"][0]["logprobs"]["content"]
    assert entry["token"] == f"token_id:{half}"
    assert entry["top_logprobs"][0]["token"] == "token_id:7"
    assert entry["bytes"] == list("\N{SNOWMAN}".encode())[: len(entry["bytes"])] != []
