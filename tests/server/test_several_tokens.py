"""The number of tokens that a step brings to a request does not change answers.

Over HTTP, including the messages between the processes.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, event, example, given, settings, strategies as st

from tests.server.serving import Api, parsed_events

MOST_TOKENS = 90
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": "b c"}}</tool_call>'
fragments = st.sampled_from(
    ["<think>", "</think>", "\n", " plain words", "日本", "é😀", "STOP", "ST", "a<b", CALL, "{"]
)
answers = st.one_of(
    st.lists(fragments, max_size=6).map("".join),
    st.lists(st.integers(0, 2040), max_size=30),  # ids, which may split characters
)
options = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, MOST_TOKENS)},
    optional={
        "stop": st.sampled_from(["STOP", ["OP", "b", "本"]]),
        "tools": st.just([TOOL]),
        "top_logprobs": st.integers(0, 2),
        "return_token_ids": st.just(True),
        "include_stop_str_in_output": st.just(True),
        "include_reasoning": st.just(False),
        "skip_special_tokens": st.just(False),
        "ignore_eos": st.just(True),
        "stream_interval": st.integers(1, 5),
        "min_tokens": st.just(1),
        "n": st.just(2),
        "thinking_token_budget": st.just(-1),
    },
)
streamed = st.sampled_from([None, {}, {"include_usage": True}, {"continuous_usage_stats": True}])


def normal(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message without values that are random in each call."""
    for call in message.get("tool_calls", []):
        call.pop("id", None)
    return message


def whole(api: Api, **fields: Any) -> dict[str, Any]:
    body = api.chat("x", **fields).json()
    assert body.pop("id") and body.pop("created")
    for choice in body["choices"]:
        normal(choice["message"])
    return body


def put_together(api: Api, stream_options: dict[str, bool], **fields: Any) -> dict[str, Any]:
    """Return a stream joined to the form of a whole body, as far as it has the fields."""
    response = api.chat("x", stream=True, stream_options=stream_options, **fields)
    *chunks, done = parsed_events(response.text)
    assert done == "[DONE]"
    listed = len(chunks[-1]["choices"]) if stream_options.get("include_usage") else None
    assert listed in (0, None)
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(
                part["index"],
                {
                    "content": "",
                    "reasoning": "",
                    "calls": [],
                    "logprobs": [],
                    "ids": [],
                    "ends": [],
                },
            )
            delta = part["delta"]
            choice["content"] += delta.get("content") or ""
            choice["reasoning"] += delta.get("reasoning", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    choice["calls"].append(call["function"])
                else:
                    choice["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            choice["logprobs"] += (part["logprobs"] or {}).get("content", [])
            choice["ids"] += part.get("token_ids", [])
            choice["ends"] += [part["finish_reason"]] if part["finish_reason"] else []
    usage = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    for choice in choices.values():
        choice["logprobs"] = {"content": choice["logprobs"]}
    return {
        "choices": [choices[index] for index in sorted(choices)],
        "usage": usage[-1] if usage else None,
    }


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(answers, options, streamed, st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple))
@example(CALL, {"max_tokens": 90, "tools": [TOOL], "top_logprobs": 0}, {}, (4, 3))
@example("<think>ab</think>c STOP d", {"max_tokens": 30, "stop": "STOP", "n": 2}, None, (4, 1, 3))
def test_answers_are_those_of_one_token_a_step(shared_api, answer, fields, stream, counts) -> None:
    api, fields = shared_api, dict(fields)
    if "top_logprobs" in fields:
        fields["logprobs"] = True
    if fields.get("min_tokens", 0) > fields["max_tokens"]:
        del fields["min_tokens"]
    found = []
    for ragged in ((), counts):
        api.engine.reset()
        api.engine.ragged = ragged
        if isinstance(answer, str):
            api.engine.answer = answer
        else:
            api.engine.answer_ids = answer
        found.append(
            whole(api, **fields) if stream is None else put_together(api, stream, **fields)
        )
    one_each, several = found
    assert several == one_each
    event(str(one_each["choices"][0].get("finish_reason") or one_each["choices"][0]["ends"]))
    count = sum(
        len((choice["logprobs"] or {}).get("content", ())) for choice in one_each["choices"]
    )
    usage = one_each["usage"] or {"completion_tokens": count}
    assert usage["completion_tokens"] <= fields["max_tokens"] * fields.get("n", 1)
    if fields.get("logprobs") and fields.get("include_reasoning") is not False:
        assert count == usage["completion_tokens"] > 0
