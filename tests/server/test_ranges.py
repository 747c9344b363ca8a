"""Every number in a request is refused by its field's name, or accepted by the sampler."""

from __future__ import annotations

import json
import re
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from nanovllm.config import load_config
from nanovllm.parallel.mesh import Mesh
from nanovllm.plan import Admit
from nanovllm.sampling.base import SampleRows
from nanovllm.sampling.sampler import Sampler
from nanovllm.sampling.shards import Shard
from nanovllm.sampling.vetting import Vetting
from nanovllm.server.errors import ApiError
from nanovllm.server.orders import generates
from nanovllm.server.protocol import ChatRequest, parse_request
from nanovllm.server.ranges import ranges
from nanovllm.server.served import Served
from nanovllm.server.template import Prompt
from nanovllm.server.unsupported import DEFAULTS
from nanovllm.wire import Generate, Sampling
from tests.server.fake_engine import READY

CONTEXT, VOCAB = 64, 50
NUMBERS = tuple(ranges(CONTEXT, raise_priority=False))
LISTS = ("stop_token_ids", "allowed_token_ids", "logit_bias")  # of ids: checked one by one
ANYTHING = {"response_format", "tools", "tool_choice", "structured_outputs", "chat_template_kwargs"}
SERVED = Served(load_config(None), replace(READY, max_model_tokens=CONTEXT, vocab_size=VOCAB))
PROMPT = Prompt([1, 2, 3])
# JSON texts, to include numbers that Python would round or refuse to write.
EXTREMES = [
    *("0", "-0", "1", "-1", "2", "-2", "63", "64", "65", "49", "50", "51", "-100", "-101", "100"),
    *(str(base + more) for base in (2**15, 2**31, 2**32, 2**63, 2**64) for more in (-1, 0, 1)),
    *(str(-base + more) for base in (2**31, 2**63, 2**64) for more in (-1, 0, 1)),
    *(str(2**70), "9" * 400, "9" * 5000, "-" + "9" * 5000),
    *("0.0", "-0.0", "1.0", "0.5", "1e0", "1.5", "2.0", "1e-400", "5e-324", "1e-45", "1e-30"),
    *("1e30", "1e308", "1.7976931348623157e308", "1e400", "-1e400", "NaN", "Infinity", "-Infinity"),
    *("true", "false", '"1"', "[1]", "{}", "[]", '""'),
]
FIELDS = (*NUMBERS, *LISTS)


def holds(annotation: object, kinds: set[object]) -> bool:
    return annotation in kinds or any(holds(inner, kinds) for inner in get_args(annotation))


def test_every_field_that_may_hold_a_number_has_a_range() -> None:
    """A new field fails here until it has a range."""
    hints = get_type_hints(ChatRequest)
    numeric = {name for name, hint in hints.items() if holds(hint, {int, float})}
    anything = {name for name, hint in hints.items() if holds(hint, {Any})}
    assert numeric == set(NUMBERS) | {"stop_token_ids", "allowed_token_ids"}
    assert anything == ANYTHING | {"logit_bias", "kv_transfer_params"} | set(DEFAULTS)
    for struct in (hints["messages"], hints["stream_options"]):
        (inner,) = [arg for arg in get_args(struct) if arg is not type(None)]
        assert not any(holds(hint, {int, float}) for hint in get_type_hints(inner).values())


def body(fields: dict[str, str]) -> bytes:
    given = "".join(f', "{name}": {text}' for name, text in fields.items())
    return f'{{"messages": [{{"role": "user", "content": "x"}}]{given}}}'.encode()


def ordered(fields: dict[str, str], *, raise_priority: bool = False) -> list[Generate]:
    """Return the engine requests after encoding and decoding. Raise ApiError."""
    request = parse_request(
        body(fields),
        model="demo",
        vocab_size=VOCAB,
        allowed=ranges(CONTEXT, raise_priority=raise_priority),
    )
    made = generates(request, PROMPT, SERVED, seed=7, ids=range(request.n or 1))
    return [
        msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Generate) for message in made
    ]


def as_written(field: str, text: str) -> str:
    if field == "logit_bias":
        key = text if text.lstrip("-").isdigit() else "5"
        return f'{{"{key}": {text}}}'
    return f"[{text}]" if field.endswith("_ids") else text


VETTING = Vetting(VOCAB)


def admitted(messages: list[Generate]) -> np.ndarray:
    """Return the tokens of a step in which all requests are sampled, from plausible logits."""
    num_slots = len(messages)
    sampler = Sampler(
        num_slots=num_slots,
        shard=Shard(Mesh(), VOCAB),
        device=torch.device("cpu"),
        tokens_NL=torch.ones(num_slots + 1, CONTEXT + 1, dtype=torch.int32),
        prompt_lengths_N=torch.full((num_slots + 1,), 3, dtype=torch.int32),
        kernel="torch",
    )
    for slot, message in enumerate(messages):
        VETTING.vet(message)
        sampler.admit([Admit(slot, message.prompt, 3, 0, [], message.sampling, message.stop_ids)])
    slots = torch.arange(num_slots)
    logits = torch.randn(num_slots, VOCAB, generator=torch.Generator().manual_seed(1)) * 20
    rows = SampleRows(slots, torch.full_like(slots, 4), slots.numpy().astype(np.int32))
    sampled = sampler.sample(logits, rows)
    if sampled.logprobs is not None:
        assert sampled.logprobs.chosen_W.isfinite().all()
    return sampled.tokens_S.numpy()


@pytest.mark.parametrize(
    ("field", "raise_priority"), [*((field, False) for field in FIELDS), ("priority", True)]
)
def test_extremes_are_refused_by_name_or_served(field, raise_priority) -> None:
    outcomes = set()
    for text in EXTREMES:
        with_logprobs = {"logprobs": "true"} if field == "top_logprobs" else {}
        fields = {field: as_written(field, text), **with_logprobs}
        try:
            messages = ordered(fields, raise_priority=raise_priority)
        except ApiError as error:
            assert error.status == 400
            assert len(error.body()) < 5000, "as long as the request chose"
            if error.code != "invalid_json":
                assert (error.param or "").startswith(field), (text, error.param)
                assert field in error.message
            outcomes.add("refused")
            continue
        outcomes.add("served")
        tokens = admitted(messages)
        assert ((tokens >= 0) & (tokens < VOCAB)).all()
    assert outcomes == {"refused", "served"}


def is_served(field: str, text: str) -> bool:
    try:
        ordered({"logprobs": "true", field: as_written(field, text)})
    except ApiError:
        return False
    return True


INSIDE = {field: [text for text in EXTREMES if is_served(field, text)] for field in FIELDS}
extremes = st.fixed_dictionaries(
    {}, optional={field: st.sampled_from(texts) for field, texts in INSIDE.items()}
)


@settings(max_examples=300, deadline=None)
@given(extremes)
def test_extremes_together(fields) -> None:
    """Extreme values that are valid alone are accepted together, or refused by name."""
    written = {name: as_written(name, text) for name, text in fields.items()}
    try:
        messages = ordered({"logprobs": "true", **written})
    except ApiError as error:
        assert error.status == 400
        assert error.code == "invalid_json" or re.split(r"[.\[]", error.param or "")[0] in FIELDS
        return
    tokens = admitted(messages)
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
    allowed = json.loads(written.get("allowed_token_ids", "null"))
    if allowed:
        assert set(tokens.tolist()) <= set(allowed)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 2}, "min_tokens"),
        ({"stop_token_ids": list(range(VOCAB)), "min_tokens": 1}, "min_tokens"),
        ({"allowed_token_ids": [0], "bad_words": ["!"]}, "bad_words"),  # id 0, or 220 and 0
        ({"allowed_token_ids": [0, 0], "bad_words": ["#!"]}, "bad_words"),
        (
            {
                "allowed_token_ids": [0, 7],
                "bad_words": ["!"],
                "stop_token_ids": [7],
                "min_tokens": 2,
            },
            "min_tokens",
        ),
    ],
)
def test_what_may_leave_no_token_is_refused(fields, param) -> None:
    with pytest.raises(ApiError, match=f"{param} leaves no token: each one allowed") as caught:
        ordered({name: json.dumps(value) for name, value in fields.items()})
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "possible"),
    [
        ({"allowed_token_ids": [7], "stop_token_ids": [7]}, {7}),
        ({"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 0}, {7}),
        ({"allowed_token_ids": [7, 8], "stop_token_ids": [7], "min_tokens": 2}, {8}),
        ({"allowed_token_ids": [0, 7], "bad_words": ["!"]}, {7}),
        ({"allowed_token_ids": [7, 7], "frequency_penalty": 2, "logit_bias": {"9": 100}}, {7}),
        ({"allowed_token_ids": [7], "repetition_penalty": 2, "logit_bias": {"7": -100}}, {7}),
    ],
)
def test_what_leaves_a_token_writes_no_other(fields, possible) -> None:
    messages = ordered({"n": "16", **{name: json.dumps(v) for name, v in fields.items()}})
    assert {*admitted(messages).tolist()} == possible


@pytest.mark.parametrize(
    ("text", "param", "words"),
    [
        ('{"abc": 1}', "logit_bias.abc", "keyed by a token id from 0 to 49, not 'abc'"),
        ('{"1.0": 1}', "logit_bias.1.0", "keyed by a token id"),
        ('{"": 1}', "logit_bias.", "keyed by a token id"),
        ('{"3": 1, "50": 1}', "logit_bias.50", "from 0 to 49, not '50'"),
        ('{"-1": 1}', "logit_bias.-1", "from 0 to 49"),
        ('{"3": 101}', "logit_bias.3", "a number between -100 and 100, not 101"),
        ('{"3": "x"}', "logit_bias.3", "a number between -100 and 100, not 'x'"),
        ('{"3": true}', "logit_bias.3", "not True"),
        ('{"3": null}', "logit_bias.3", "is missing or null; it must be a number between"),
        ('{"٣": 1}', "logit_bias.٣", "keyed by a token id"),
        (f'{{"{"7" * 100_000}": 1}}', "logit_bias." + "7" * 40, "keyed by a token id"),
        (json.dumps({str(i): 1 for i in range(1025)}), "logit_bias", "at most 1024 ids, not 1025"),
    ],
    ids=lambda x: x[:20],
)
def test_messages_name_the_key_of_logit_bias(text, param, words) -> None:
    with pytest.raises(ApiError) as caught:
        ordered({"logit_bias": text})
    assert (caught.value.status, caught.value.param) == (400, param)
    assert re.match(rf"{re.escape(param)} (must be|is missing) ", caught.value.message)
    assert words in caught.value.message


@pytest.mark.parametrize("text", ["1e400", "-1e400", "9" * 5000])
@pytest.mark.parametrize("field", ["temperature", "min_tokens", "seed"])
def test_numbers_of_any_length_are_told_the_range(field, text) -> None:
    with pytest.raises(
        ApiError, match=f"{field} must be between .* and .*; the value is far outside"
    ):
        ordered({field: text})


def test_who_may_raise_a_priority() -> None:
    with pytest.raises(ApiError, match=r"priority must be between 0 and 2147483647 .*raise_prior"):
        ordered({"priority": "-1"})
    assert ordered({"priority": "-100"}, raise_priority=True)[0].priority == -100
    with pytest.raises(ApiError, match="priority must be between -100 and 2147483647, not -101"):
        ordered({"priority": "-101"}, raise_priority=True)
    assert ordered({"priority": str(2**31 - 1)})[0].priority == 2**31 - 1


TINY = [
    {"repetition_penalty": "1e-320"},
    {"temperature": "5e-324"},
    {"top_p": "5e-324", "temperature": "1"},
    {"min_p": "1", "temperature": "2"},
    {"min_p": "5e-324", "temperature": "2"},
    {"temperature": "-0.0", "min_p": "-0.0"},
]


@pytest.mark.parametrize("fields", TINY, ids=str)
def test_the_smallest_numbers_draw_the_best_token(fields) -> None:
    """The token with by far the largest logit is sampled for the smallest value of each field."""
    (message,) = ordered(fields)
    sampler = Sampler(
        num_slots=1,
        shard=Shard(Mesh(), VOCAB),
        device=torch.device("cpu"),
        tokens_NL=torch.full((2, CONTEXT + 1), 7, dtype=torch.int32),
        prompt_lengths_N=torch.full((2,), 3, dtype=torch.int32),
        kernel="torch",
    )
    sampler.admit([Admit(0, message.prompt, 3, 0, [], message.sampling, [])])
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 500.0
    one = torch.zeros(1, dtype=torch.int64)
    sampled = sampler.sample(logits, SampleRows(one, one + 4, np.zeros(1, np.int32)))
    assert sampled.tokens_S.tolist() == [7]


def test_a_request_that_the_sampler_cannot_hold_is_found_before_it_is_planned() -> None:
    def asked(prompt: list[int], **fields: object) -> Generate:
        return Generate(1, np.array(prompt, np.int32).tobytes(), 5, [], Sampling(**fields))

    VETTING.vet(asked([1, VOCAB - 1]))
    with pytest.raises(OverflowError):
        VETTING.vet(asked([1], min_tokens=2**31 - 1))
    with pytest.raises(OverflowError):
        VETTING.vet(asked([1], seed=2**63))
    for ids in ([VOCAB], [-1]):
        with pytest.raises(ValueError, match="beyond the vocabulary of 50"):
            VETTING.vet(asked(ids))
    VETTING.vet(asked([1]))  # nothing of these remains
