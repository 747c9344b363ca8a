"""Responses of /v1/chat/completions, over real HTTP."""

from __future__ import annotations

import asyncio
import math
from array import array
from itertools import pairwise

import httpx
import pytest

from tests.server.fake_engine import READY
from tests.server.serving import body, content, eventually, parsed_events

UNICODE = "Grüße, 日本語 😀👩‍👩‍👧 and some plain words to finish with"


def test_a_whole_answer(api) -> None:
    api.engine.num_cached = 3
    response = api.chat("Hello there!", model="demo")
    assert response.status_code == 200
    answer = response.json()
    (sent,) = api.engine.generates
    num_prompt, num_out = len(sent.prompt) // 4, len(api.engine.output_of(sent))
    assert answer == {
        "id": f"chatcmpl-{response.headers['x-request-id']}",
        "object": "chat.completion",
        "created": answer["created"],
        "model": "demo",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello there!"},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_out,  # includes the end token
            "total_tokens": num_prompt + num_out,
            "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }
    rendered = "<|im_start|>user\nHello there!<|im_end|>\n<|im_start|>assistant\n"
    prompt = list(array("i", sent.prompt))
    assert api.engine.tokenizer.decode(prompt, skip_special_tokens=False) == rendered


@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_a_stream(api, tokens_per_step) -> None:
    api.engine.tokens_per_step = tokens_per_step
    *chunks, usage, done = api.events(UNICODE, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert content([*chunks, done]) == UNICODE
    last = chunks.pop()
    (end,) = last["choices"]
    assert end == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert choice["finish_reason"] is None and "\ufffd" not in str(choice)
        assert chunk["object"] == "chat.completion.chunk" and chunk["id"] == last["id"]
        assert "usage" not in chunk
    assert usage["choices"] == []
    (sent,) = api.engine.generates
    assert usage["usage"]["completion_tokens"] == len(api.engine.output_of(sent))
    assert usage["usage"]["prompt_tokens"] == len(sent.prompt) // 4


@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_usage_with_every_chunk_counts_up(api, tokens_per_step) -> None:
    api.engine.tokens_per_step = tokens_per_step
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, usage, _ = api.events("one two three four", stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0  # the role comes before any token
    assert all(later > earlier for earlier, later in pairwise(counts))
    (sent,) = api.engine.generates
    assert counts[-1] == usage["usage"]["completion_tokens"] == len(api.engine.output_of(sent))


def test_32_clients_at_once_each_get_their_own_answer(api) -> None:
    texts = [f"{UNICODE} number {i} " + "word " * i for i in range(32)]

    async def streamed(client, text) -> str:
        stream = await client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": text}], stream=True
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def whole(client, text) -> str:
        answer = await client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": text}]
        )
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + (
            answer.usage.completion_tokens
        )
        return answer.choices[0].message.content

    async def main() -> list[str]:
        async with api.openai() as client:
            return await asyncio.gather(
                *((streamed if i % 2 else whole)(client, text) for i, text in enumerate(texts))
            )

    assert asyncio.run(main()) == texts
    assert not api.engine.aborts and not api.engine.running


def test_what_the_request_says_reaches_the_engine(api) -> None:
    api.chat(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        seed=-5,
        logit_bias={"7": -2},
        min_tokens=2,
        max_tokens=50,
        stop_token_ids=[9],
        priority=3,
        cache_salt="tenant",
        bad_words=["a"],
    )
    (sent,) = api.engine.generates
    said = sent.sampling
    assert (said.temperature, said.top_p, said.top_k, said.min_p) == (0.5, 0.9, 40, 0.1)
    assert (said.repetition_penalty, said.presence_penalty) == (1.1, 0.2)
    assert (said.frequency_penalty, said.seed, said.logit_bias) == (0.3, -5, {7: -2.0})
    assert (said.min_tokens, said.logprobs, sent.max_new) == (2, -1, 50)
    assert (sent.priority, sent.salt) == (3, "tenant")
    assert said.bad_words == [api.engine.tokenizer.encode(text).ids for text in ("a", " a")]
    assert {9} < set(sent.stop_ids)


def test_what_it_does_not_say_is_the_models_default(api) -> None:
    api.chat()
    api.chat(max_tokens=512, ignore_eos=True, top_k=-1, max_completion_tokens=None)
    first, second = api.engine.generates
    room = READY.max_model_tokens - len(first.prompt) // 4
    eos = api.engine.tokenizer.token_to_id("<|im_end|>")
    assert first.max_new == second.max_new == room
    assert first.sampling.temperature == 0.0  # the demo's generation_config.json
    assert eos in first.stop_ids and second.stop_ids == []
    assert first.sampling.seed != second.sampling.seed  # drawn


def test_length_ends_an_answer(api) -> None:
    answer = api.chat("one two three four five six", max_tokens=2).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 2
    assert "one two three".startswith(answer["choices"][0]["message"]["content"])


def test_n_choices_have_different_seeds_and_interleave(api) -> None:
    api.engine.step_s = 0.02  # otherwise the first may end before the second is submitted
    *chunks, _ = api.events("two answers please", n=2, seed=41)
    assert [sent.sampling.seed for sent in api.engine.generates] == [41, 42]
    assert len({sent.request_id for sent in api.engine.generates}) == 2
    indexes = [chunk["choices"][0]["index"] for chunk in chunks]
    assert indexes != sorted(indexes)
    for index in (0, 1):
        assert content([*chunks, None], index) == "two answers please"
    answer = api.chat("hi", n=3).json()
    assert [c["message"]["content"] for c in answer["choices"]] == ["hi"] * 3
    assert answer["usage"]["completion_tokens"] == 3 * len(
        api.engine.output_of(api.engine.generates[-1])
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_per_step", [1, 4])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_several_tokens(api, stream, tokens_per_step, include) -> None:
    api.engine.tokens_per_step = tokens_per_step
    text, stop = "Count: one, two, three, four, five, six", "o, thr"
    options = {"stop": ["never", stop], "include_stop_str_in_output": include}
    expected = "Count: one, tw" + (stop if include else "")
    ids = api.engine.tokenizer.encode(text, add_special_tokens=False).ids
    assert len(api.engine.tokenizer.encode(stop, add_special_tokens=False).ids) > 1
    if stream:
        events = api.events(text, **options)
        assert content(events) == expected
        assert events[-2]["choices"][0]["finish_reason"] == "stop"
    else:
        answer = api.chat(text, **options).json()
        assert answer["choices"][0]["message"]["content"] == expected
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] < len(ids)
    (sent,) = api.engine.generates
    eventually(lambda: api.engine.aborts == [sent.request_id])


def test_what_only_resembled_a_stop_string_is_delivered(api) -> None:
    text = "ends with the start of a STO"
    assert content(api.events(text, stop="STOP")) == text


def test_stop_tokens_show_only_when_asked_for(api) -> None:
    (x,) = api.engine.tokenizer.encode("x", add_special_tokens=False).ids
    api.engine.answer_ids = [*api.engine.tokenizer.encode("ab").ids, x]
    for include, expected in ((False, "ab"), (True, "abx")):
        answer = api.chat(stop_token_ids=[x], include_stop_str_in_output=include).json()
        assert answer["choices"][0]["message"]["content"] == expected
        assert answer["choices"][0]["finish_reason"] == "stop"


def test_special_tokens_show_only_when_asked_for(api) -> None:
    assert api.chat("a").json()["choices"][0]["message"]["content"] == "a"
    options = {"ignore_eos": True, "max_tokens": 3, "skip_special_tokens": False}
    answer = api.chat("a", **options).json()
    assert answer["choices"][0]["message"]["content"] == "a<|im_end|>x"


def test_logprobs_have_the_true_bytes(api) -> None:
    def check(entries) -> None:
        assert len(entries) == len(api.engine.output_of(api.engine.generates[-1]))
        shown = [entry for entry in entries if entry["token"] != "<|im_end|>"]
        assert b"".join(bytes(entry["bytes"]) for entry in shown) == UNICODE.encode()
        for entry in entries:
            assert math.isclose(entry["logprob"], -0.5)
            assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -1.5]
            assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]

    answer = api.chat(UNICODE, logprobs=True, top_logprobs=2).json()
    check(answer["choices"][0]["logprobs"]["content"])
    *chunks, _ = api.events(UNICODE, logprobs=True, top_logprobs=2)
    choices = [chunk["choices"][0] for chunk in chunks]
    check(
        [
            entry
            for choice in choices
            for entry in (choice["logprobs"] or {"content": []})["content"]
        ]
    )
    assert content([*chunks, None]) == UNICODE


def test_reasoning_is_told_apart(api) -> None:
    api.engine.answer = "<think>\nhm, well\n</think>\n\nSure."
    answer = api.chat().json()
    message = answer["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Sure.", "reasoning": "hm, well"}
    thought = api.engine.tokenizer.encode("\nhm, well\n</think>").ids
    details = answer["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == len(thought)

    api.engine.answer = "hm\n</think>\n\nSure."
    *chunks, _ = api.events(chat_template_kwargs={"enable_thinking": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "Sure."


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_tool_calls(api) -> None:
    api.engine.answer = (
        'Now:\n<tool_call>\n{"name": "add", "arguments": {"a": "ü"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>'
    )
    choice = api.chat(tools=[TOOL]).json()["choices"][0]
    calls = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Now:"
    assert [call["function"] for call in calls] == [
        {"name": "add", "arguments": '{"a": "ü"}'},
        {"name": "sub", "arguments": "{}"},
    ]
    assert len({call["id"] for call in calls}) == 2
    assert {call["type"] for call in calls} == {"function"}
    prompt = api.engine.tokenizer.decode(array("i", api.engine.generates[0].prompt))
    assert '"name": "add"' in prompt

    *chunks, _ = api.events(tools=[TOOL])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    streamed = [call for delta in deltas for call in delta.get("tool_calls", ())]
    begun = [call for call in streamed if "id" in call]
    assert [(call["index"], call["function"]) for call in begun] == [
        (0, {"name": "add", "arguments": ""}),
        (1, {"name": "sub", "arguments": ""}),
    ]
    parts = [call for call in streamed if "id" not in call]
    assert [call.keys() for call in parts] == [{"index", "function"}] * len(parts)
    assert len([call for call in parts if call["index"] == 0]) > 2
    joined = ["".join(c["function"]["arguments"] for c in parts if c["index"] == i) for i in (0, 1)]
    assert joined == ['{"a": "ü"}', "{}"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"

    choice = api.chat(tools=[TOOL], tool_choice="none").json()["choices"][0]
    assert choice["message"]["content"] == api.engine.answer
    assert choice["finish_reason"] == "stop"


def test_the_openai_client_puts_streamed_calls_together(api) -> None:
    api.engine.answer = (
        "<think>hm</think>Now:\n"
        '<tool_call>\n{"arguments": {"a": "</tool_call>", "b": [1]}, "name": "add"}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": "\\u00fc"}}\n</tool_call>\n'
    )
    api.engine.tokens_per_step = 3

    async def main() -> None:
        async with (
            api.openai() as client,
            client.chat.completions.stream(
                model="demo", messages=[{"role": "user", "content": "?"}], tools=[TOOL]
            ) as stream,
        ):
            answer = (await stream.get_final_completion()).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.content == "Now:"
        found = [(c.function.name, c.function.arguments) for c in answer.message.tool_calls]
        assert found == [
            ("add", '{"a": "</tool_call>", "b": [1]}'),
            ("add", '{"a": "\\u00fc"}'),
        ]

    asyncio.run(main())


def test_a_call_alone_has_no_content(api) -> None:
    api.engine.answer = '<tool_call>{"name": "add"}</tool_call>'
    message = api.chat(tools=[TOOL]).json()["choices"][0]["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 1


def test_the_openai_client_understands_calls_reasoning_and_logprobs(api) -> None:
    api.engine.answer = "<think>hm</think>Sure: 日本"

    async def main() -> None:
        async with api.openai() as client:
            answer = await client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": "?"}],
                logprobs=True,
                top_logprobs=1,
                extra_body={"top_k": 5},
                extra_headers={"X-Request-Id": "mine-7"},
            )
            assert answer._request_id == "mine-7" and answer.id == "chatcmpl-mine-7"
            choice = answer.choices[0]
            assert choice.message.content == "Sure: 日本"
            assert choice.message.reasoning == "hm"
            assert choice.logprobs.content[0].top_logprobs[0].token == "<think>"
            models = await client.models.list()
            assert [model.id for model in models.data] == ["demo"]

    asyncio.run(main())
    assert api.engine.generates[0].sampling.top_k == 5


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_aborted_at_once(api, stream) -> None:
    api.engine.is_stuck = not stream
    api.engine.step_s = 0.01
    with httpx.Client(base_url=api.url, trust_env=False, timeout=0.5) as client:
        if stream:
            request = body("word " * 200, stream=True)
            with client.stream("POST", "/v1/chat/completions", json=request) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/chat/completions", json=body(n=2))
    ids = [sent.request_id for sent in api.engine.generates]
    assert len(ids) == (1 if stream else 2)
    eventually(lambda: api.engine.aborts == ids)
    assert not api.engine.running


def test_a_client_that_reads_slowly_loses_nothing_and_holds_up_nobody(api) -> None:
    api.engine.answer = "word " * 200
    # Less than server.max_unread_bytes, above which it would be dropped: test_slow_readers.py
    request = body(stream=True, n=8)
    with api.http.stream("POST", "/v1/chat/completions", json=request) as response:
        eventually(lambda: len(api.engine.generates) == 8)
        eventually(lambda: not api.engine.running, timeout_s=20)
        api.engine.answer = "quick"
        assert httpx.post(f"{api.url}/v1/chat/completions", json=body(), trust_env=False).json()[
            "choices"
        ][0]["message"] == {"role": "assistant", "content": "quick"}
        text = response.read().decode()
    events = parsed_events(text)
    assert 300_000 < len(text) < 1_000_000
    assert events[-1] == "[DONE]"
    assert [content(events, index) for index in range(8)] == ["word " * 200] * 8
