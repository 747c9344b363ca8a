"""An answer does not depend on the grouping of its tokens, streamed or not."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from nanovllm.config import load_config
from nanovllm.server.errors import ApiError
from nanovllm.server.metrics import Metrics
from nanovllm.server.orders import wrapped
from nanovllm.server.protocol import ChatRequest
from nanovllm.server.served import Served
from nanovllm.server.stream import Stream
from nanovllm.server.template import Prompt
from nanovllm.wire import Finish, FinishReason, Started, TokenLogprobs
from tests.server.fake_engine import READY
from tests.server.serving import parsed_events
from tests.server.test_stream import Client, Engine

CONTEXT = 400
ENGINE = replace(READY, max_model_tokens=CONTEXT)
SERVED = Served(load_config(None), ENGINE)
TOKENIZER = SERVED.template.tokenizer
END = TOKENIZER.token_to_id("<|im_end|>")
METRICS = Metrics()
TOOL = {"type": "function", "function": {"name": "f"}}


class Made(Stream):
    """A stream with a client and an engine of its own. The choices have the ids from 1 on."""

    def __init__(self, request: ChatRequest, prompt: Prompt, served: Served) -> None:
        self.engine, self.peer = Engine(), Client()
        super().__init__(
            request,
            prompt,
            served,
            self.engine,
            writer=self.peer.writer(),
            metrics=METRICS,
            request_id="r",
            seed=7,
            quiet_s=1,
        )
        self.request = request
        self.is_aborted = False

    @property
    def text(self) -> str:
        self.flush()
        return self.peer.text

    @property
    def body(self) -> dict:
        return json.loads(self.text)


def opened(turn="", num_prompt=5, served=SERVED, **fields) -> Made:
    raw = {"messages": [{"role": "user", "content": "x"}], **fields}
    return Made(msgspec.convert(raw, ChatRequest), Prompt([1] * num_prompt, turn), served)


def answered(steps, *, reason=FinishReason.STOP, **fields) -> Made:
    """Return a stream whose only choice received these token ids, one list per step."""
    session = opened(**fields)
    (choice,) = session.choices
    for ids in steps:
        if session.request.logprobs:
            for token_id in ids:
                choice.logprobs(TokenLogprobs(1, token_id, -1.0, [], []))
        session.is_aborted = choice.tokens(ids)
        session.flush()
        if session.is_aborted:
            return session
    choice.finish(Finish(1, reason))
    session.flush()
    return session


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_the_engine_gave_up_is_a_500(stream) -> None:
    session = answered([[5], [6]], reason=FinishReason.FAILED, stream=stream)
    assert (session.failure.status, session.failure.code) == (500, "internal_error")
    assert "the engine failed while computing this answer" in session.failure.message


def message_of(session: Made) -> dict[str, object]:
    """Return the message, in the same form for a whole answer and for a joined stream."""
    if not session.request.stream:
        (choice,) = session.body["choices"]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls", [])]
        found = (message["content"] or "", message.get("reasoning", ""), calls)
        listed = choice["logprobs"]
        return (*found, choice["finish_reason"], len(listed["content"]) if listed else 0)
    *events, done = parsed_events(session.text)
    assert done == "[DONE]"
    choices = [event["choices"][0] for event in events]
    deltas = [choice["delta"] for choice in choices]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    joined: list[dict[str, str]] = []
    for call in calls:
        if "id" in call:
            assert call["index"] == len(joined)
            joined.append(call["function"])
        else:
            joined[call["index"]]["arguments"] += call["function"]["arguments"]
    return (
        "".join(delta.get("content", "") for delta in deltas),
        "".join(delta.get("reasoning", "") for delta in deltas),
        joined,
        choices[-1]["finish_reason"],
        sum(len(choice["logprobs"]["content"]) for choice in choices if choice["logprobs"]),
    )


fragments = st.sampled_from(
    [
        *("<think>", "</think>", "\n", " plain words", "日本", "é😀", "STOP", "ST", "a<b"),
        *('<tool_call>{"name": "f"}</tool_call>', "<tool_call>", "</tool_call>", "{"),
    ]
)
texts = st.lists(fragments, max_size=10).map("".join)
options = st.fixed_dictionaries(
    {},
    optional={
        "stop": st.sampled_from(["STOP", ["OPa", "b", "本"]]),
        "tools": st.just([TOOL]),
        "logprobs": st.just(True),
        "include_stop_str_in_output": st.booleans(),
        "include_reasoning": st.booleans(),
        "stream_interval": st.integers(1, 5),
        "min_tokens": st.integers(0, 3),
        "turn": st.sampled_from(["", "<think>\n", "<think>\n\n</think>\n\n"]),
    },
)


@given(texts, options, st.data())
def test_grouping_and_streaming_change_nothing(text, options, data) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    cuts = sorted(set(data.draw(st.lists(st.integers(0, len(ids)), max_size=6))))
    groups = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True) if a < b]
    single = [[token_id] for token_id in ids]
    by_token = answered([*single, [END]], stream=True, **options)
    whole = message_of(answered([*single, [END]], **options))
    assert message_of(by_token) == whole
    grouped = answered(
        [*groups[:-1], [*(groups[-1] if groups else []), END]], stream=True, **options
    )
    assert message_of(grouped) == whole
    assert grouped.tally.usage() == by_token.tally.usage()
    assert grouped.is_aborted == by_token.is_aborted
    if not by_token.is_aborted:
        assert by_token.num_tokens == len(ids) + 1
    if options.get("logprobs") and options.get("include_reasoning") is not False:
        assert whole[4] == by_token.num_tokens


def test_reasoning_tokens_are_those_fed_inside_a_thought() -> None:
    ids = TOKENIZER.encode("<think>hm</think>yes").ids
    session = answered([[token_id] for token_id in [*ids, END]])
    inside = ids[1 : ids.index(TOKENIZER.token_to_id("</think>")) + 1]
    assert session.tally.usage().completion_tokens_details.reasoning_tokens == len(inside)


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_held_back_comes_at_the_end(stream) -> None:
    held = [*TOKENIZER.encode("a <tool_c").ids]
    session = answered([[i] for i in held], stream=stream, tools=[TOOL], stop="callback")
    assert message_of(session)[0] == "a <tool_c"
    half = TOKENIZER.encode("\N{SNOWMAN}").ids[:1]
    assert TOKENIZER.decode(half) == "\ufffd"
    session = answered([half], reason=FinishReason.LENGTH, stream=stream)
    assert message_of(session)[0] == "\ufffd"


def test_cached_tokens_are_those_of_the_choice_that_started_first() -> None:
    session = opened(n=2)  # the second finds the first one's pages
    session.choices[0].started(Started(0, 16, 8))
    session.choices[1].started(Started(1, 0))
    session.choices[1].started(Started(1, 32))
    assert session.tally.usage().prompt_tokens_details.cached_tokens == 16
    assert session.tally.num_loaded == 8


def test_stop_strings_count_only_after_min_tokens() -> None:
    steps = [[token_id] for token_id in TOKENIZER.encode("b b b b").ids]
    assert len(steps) >= 4
    first = message_of(answered(steps, stop="b"))
    later = message_of(answered(steps, stop="b", min_tokens=2))
    assert (first[0], first[3]) == ("", "stop")
    text = TOKENIZER.decode([ids[0] for ids in steps[:2]])
    assert later[0].startswith(text) and later[3] == "stop"


TOGETHER = {"stream": True, "stream_options": {"continuous_usage_stats": True}}


@pytest.mark.parametrize("form", [{}, {"stream": True}, TOGETHER])
@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        ("one two three", {"stop": ["three", "wo"]}, ("stop", "wo")),
        ("one two three", {"stop": "wo", "include_stop_str_in_output": True}, ("stop", "wo")),
        ("one</think>two", {"stop": ["</think>"]}, ("stop", "</think>")),
        ("one two", {"stop": ["three"]}, ("stop", None)),
        ("one<|im_end|>", {"stop_token_ids": [END]}, ("stop", END)),
        ("one<|im_end|>", {"stop_token_ids": [5]}, ("stop", None)),
        ("one", {"stop_token_ids": [END]}, ("length", None)),
        ('<tool_call>{"name": "f"}</tool_call>x', {"stop": ["x"]}, ("tool_calls", "x")),
    ],
)
def test_an_answer_names_the_stop_that_ended_it(text, fields, expected, form) -> None:
    ids = TOKENIZER.encode(text).ids
    reason = FinishReason.LENGTH if expected[0] == "length" else FinishReason.STOP
    session = answered([[i] for i in ids], reason=reason, tools=[TOOL], **fields, **form)
    if not form:
        choices = session.body["choices"]
    else:
        choices = [event["choices"][0] for event in parsed_events(session.text)[:-1]]
        assert not any("stop_reason" in choice for choice in choices[:-1])
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == expected


def test_length_is_never_hidden_by_a_call() -> None:
    ids = TOKENIZER.encode('<tool_call>{"name": "f"}</tool_call>').ids
    session = answered([ids], reason=FinishReason.LENGTH, tools=[TOOL])
    assert message_of(session)[2:4] == ([{"name": "f", "arguments": "{}"}], "length")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_cut_by_the_limit_keeps_its_arguments_open(stream) -> None:
    ids = TOKENIZER.encode('<tool_call>{"name": "f", "arguments": {"a": 2, "b": 111').ids
    steps = [[token_id] for token_id in ids]
    session = answered(steps, reason=FinishReason.LENGTH, tools=[TOOL], stream=stream)
    expected = [{"name": "f", "arguments": '{"a": 2, "b": 111'}]
    assert message_of(session)[2:4] == (expected, "length")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "arguments", "reason"),
    [
        ('"unit"', '{"city": "Paris", ', "stop"),  # as written, not closed
        ("ris", '{"city": "Pa', "stop"),
        ("}", '{"city": "Paris", "unit": "c"', "stop"),
        ("</tool_call>", '{"city": "Paris", "unit": "c"}', "tool_calls"),
        ("Done", '{"city": "Paris", "unit": "c"}', "tool_calls"),
        ("else", '{"city": "Paris", "unit": "c"}', "tool_calls"),
    ],
)
def test_a_stop_string_amid_a_call_is_not_hidden(stop, arguments, reason, stream) -> None:
    call = '{"name": "f", "arguments": {"city": "Paris", "unit": "c"}}'
    ids = TOKENIZER.encode(f"<tool_call>\n{call}\n</tool_call>\nDone").ids
    session = answered([[i] for i in ids], tools=[TOOL], stop=[stop], stream=stream)
    assert message_of(session)[2:4] == ([{"name": "f", "arguments": arguments}], reason)


def test_tools_alone_are_no_tool_calls() -> None:
    ids = TOKENIZER.encode("Use <tool_call> for it.").ids
    assert message_of(answered([ids], tools=[TOOL]))[1:4] == ("", [], "stop")


def test_seeds_of_choices_stay_within_64_bits() -> None:
    session = opened(n=2, seed=2**63 - 1)
    assert [choice.message.sampling.seed for choice in session.choices] == [2**63 - 1, -(2**63)]
    assert wrapped(-(2**63) - 1) == 2**63 - 1


def test_a_prompt_must_leave_room_for_one_token() -> None:
    (choice,) = opened(num_prompt=CONTEXT - 1).choices
    assert choice.message.max_new == 1
    with pytest.raises(ApiError, match=f"at most {CONTEXT - 1} "):
        opened(num_prompt=CONTEXT)


def test_forbidden_tokens_have_a_finite_logprob() -> None:
    session = opened(logprobs=True, top_logprobs=1)
    (choice,) = session.choices
    infinite = float("-inf")
    choice.logprobs(TokenLogprobs(1, 9, infinite, [9], [infinite]))
    choice.tokens([9])
    choice.finish(Finish(1, FinishReason.LENGTH))
    (entry,) = session.body["choices"][0]["logprobs"]["content"]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_can_be_left_out_with_its_logprobs_and_ids(stream) -> None:
    ids = TOKENIZER.encode("<think>hm</think>yes").ids
    wanted = {"include_reasoning": False, "logprobs": True, "return_token_ids": True}
    for steps in ([[token_id] for token_id in ids], [ids]):
        session = answered(steps, stream=stream, **wanted)
        found = message_of(session)
        assert found[:2] == ("yes", "")
        tail = ids[ids.index(TOKENIZER.token_to_id("</think>")) :]
        assert found[4] == len(tail)
        assert "hm" not in session.text
        shown = chunks_of(session) if stream else [session.body]
        assert [i for c in shown for i in c["choices"][0].get("token_ids", [])] == tail


def test_a_call_the_client_has_named_ends_with_stop(monkeypatch) -> None:
    monkeypatch.setattr("nanovllm.server.orders.structural_tag", lambda *_: "")
    ids = TOKENIZER.encode('<tool_call>{"name": "f"}</tool_call>').ids
    for choice, expected in ((TOOL, "stop"), ("required", "tool_calls"), ("auto", "tool_calls")):
        session = answered([ids], tools=[TOOL], tool_choice=choice)
        assert message_of(session)[2:4] == ([{"name": "f", "arguments": "{}"}], expected)


def test_an_interval_writes_less_often() -> None:
    steps = [[token_id] for token_id in TOKENIZER.encode("b b b b b b b b").ids]
    every = answered(steps, stream=True)
    rare = answered(steps, stream=True, stream_interval=4)
    assert message_of(rare) == message_of(every)
    texts = [event["choices"][0]["delta"].get("content") for event in chunks_of(rare)]
    assert len([text for text in texts if text]) == 1 + -(-(len(steps) - 1) // 4)
    assert len(chunks_of(every)) - len(chunks_of(rare)) >= len(steps) // 2


def chunks_of(session: Made) -> list[dict]:
    return parsed_events(session.text)[:-1]


def test_token_ids_are_returned_when_asked_for() -> None:
    ids = TOKENIZER.encode("<think>hm</think>yes").ids
    wanted = {"return_token_ids": True, "num_prompt": 3}
    body = answered([ids, [END]], **wanted).body
    assert body["prompt_token_ids"] == [1, 1, 1]
    assert body["choices"][0]["token_ids"] == [*ids, END]
    first, *rest = chunks_of(answered([ids, [END]], stream=True, **wanted))
    assert first["prompt_token_ids"] == [1, 1, 1]
    assert [i for c in rest for i in c["choices"][0].get("token_ids", [])] == [*ids, END]
    assert "token_ids" not in answered([ids, [END]], logprobs=True).text


def test_a_stop_string_may_name_a_marker() -> None:
    ids = TOKENIZER.encode("<think>hm</think>yes").ids
    assert message_of(answered([ids], stop="</think>"))[:2] == ("", "hm")
    typed = [i for c in "a</think>yes" for i in TOKENIZER.encode(c).ids]
    assert message_of(answered([typed], stop="</think>"))[0] == "a"


def test_reasoning_is_named_twice_where_the_recipe_says_so() -> None:
    served = Served(load_config(None, ["server.reasoning_content=true"]), ENGINE)
    ids = TOKENIZER.encode("<think>hm</think>").ids
    body = answered([ids], served=served).body
    message = body["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "hm"
    events = chunks_of(answered([ids], served=served, stream=True))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert [d for d in deltas if "reasoning" in d] == [
        {"reasoning": "hm", "reasoning_content": "hm"}
    ]
    message = answered([ids[:1]], served=served).body["choices"][0]["message"]
    assert message == {"role": "assistant", "content": ""}


def test_allowed_tokens_are_the_engines_to_keep() -> None:
    session = opened(allowed_token_ids=[5, 6], logit_bias={"5": 2}, repetition_penalty=1.2)
    sampling = session.choices[0].message.sampling
    assert (sampling.allowed_tokens, sampling.logit_bias) == ([5, 6], {5: 2.0})
    assert sampling.repetition_penalty == 1.2


def test_an_output_that_must_not_end_needs_tokens_that_do_not_end_it() -> None:
    ends = sorted(SERVED.eos_ids)
    with pytest.raises(ApiError, match="min_tokens leaves no token") as caught:
        opened(allowed_token_ids=[*ends, 5], stop_token_ids=[5], min_tokens=1)
    assert (caught.value.status, caught.value.param) == (400, "min_tokens")
    for more in ({}, {"min_tokens": 1, "ignore_eos": True}):
        message = opened(allowed_token_ids=ends, **more).choices[0].message
        assert message.sampling.allowed_tokens == ends


def test_bad_words_are_forbidden_at_the_start_of_a_text_and_after_a_space() -> None:
    ids = {text: TOKENIZER.encode(text).ids for text in ("a", " a", "xylophone", " xylophone")}
    assert len(ids["xylophone"]) > 1 and ids["a"] != ids[" a"]
    session = opened(bad_words=["a", " xylophone", "a"])
    assert session.choices[0].message.sampling.bad_words == list(ids.values())
    with pytest.raises(ApiError, match=r"bad_words\[1\] must be at most 32 tokens") as caught:
        opened(bad_words=["a", "\N{SNOWMAN}" * 40])
    assert caught.value.param == "bad_words[1]"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_more_tokens_than_are_left_are_cut(field) -> None:
    assert opened(**{field: CONTEXT}).choices[0].message.max_new == CONTEXT - 5


@pytest.mark.parametrize(
    ("fields", "most"), [({}, CONTEXT - 5), ({"max_tokens": CONTEXT}, CONTEXT - 5)]
)
def test_min_tokens_are_at_most_what_can_be_generated(fields, most) -> None:
    assert opened(min_tokens=most, **fields).choices[0].message.sampling.min_tokens == most
    with pytest.raises(ApiError, match=f"min_tokens must be at most {most}, ") as caught:
        opened(min_tokens=most + 1, **fields)
    assert caught.value.param == "min_tokens" and "max_tokens" in caught.value.message


@pytest.mark.parametrize(
    ("given", "meant"),
    [(-1, 0), (0, 0), (1, 1), (READY.vocab_size - 1,) * 2, (READY.vocab_size, 0), (2**31 - 1, 0)],
)
def test_top_k_is_off_where_it_leaves_nothing_out(given, meant) -> None:
    assert opened(top_k=given).choices[0].message.sampling.top_k == meant
