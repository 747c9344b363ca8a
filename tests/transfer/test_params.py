"""`kv_transfer_params` of vLLM's routers: both forms, nulls, unknown fields, and wrong types."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from nanovllm.transfer.params import TICKET, TransferParams, answer_params, parse_params
from nanovllm.transfer.tickets import MAX_TEXT

PLAIN = TransferParams("plain", None)
TO_P = {  # as vllm-router 0.1.17 and llm-d's sidecar send it
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
OF_VLLM = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]],
    "remote_engine_id": "abc", "remote_request_id": "cmpl-1", "remote_host": "10.0.0.1",
    "remote_port": 5600, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 20,
    "remote_blocks_expiry_time": 1.5, "remote_registration_generation": 0, "transfer_mode": "pull",
}  # fmt: skip
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, PLAIN),
        ({}, PLAIN),
        ({"do_remote_decode": None, "do_remote_prefill": False}, PLAIN),
        (TO_P, TransferParams("prefill", None)),
        ({"do_remote_decode": True}, TransferParams("prefill", None)),
        (OF_VLLM, TransferParams("decode", None)),  # of an engine that we cannot read
        ({**OF_VLLM, TICKET: "t"}, TransferParams("decode", "t")),
        ({**TO_P, **OF_VLLM, "do_remote_decode": True}, TransferParams("decode", None)),
        ({**TO_P, TICKET: "t"}, TransferParams("prefill", None)),
        ({TICKET: "t"}, PLAIN),
    ],
)
def test_roles(value: object, expected: TransferParams) -> None:
    assert parse_params(value) == expected


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ([], "kv_transfer_params must be an object"),
        ("x", "kv_transfer_params must be an object"),
        ({"do_remote_decode": "yes"}, "do_remote_decode must be true, false or null"),
        ({"do_remote_prefill": 1}, "do_remote_prefill must be true, false or null"),
        ({TICKET: 5}, "nanovllm_ticket must be a text"),
        ({TICKET: "x" * (MAX_TEXT + 1)}, "nanovllm_ticket must be a text of at most 1048576"),
    ],
)
def test_wrong_types_are_named(value: object, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        parse_params(value)


@settings(max_examples=40)
@given(st.dictionaries(st.text() | st.sampled_from(sorted(OF_VLLM)), json_values))
def test_other_fields_are_ignored(extra: dict[str, object]) -> None:
    known = {"do_remote_decode", "do_remote_prefill", TICKET}
    others = {name: value for name, value in extra.items() if name not in known}
    assert parse_params({**others, **TO_P}) == TransferParams("prefill", None)
    flags = {"do_remote_prefill": True, TICKET: "t"}
    assert parse_params({**others, **flags}) == TransferParams("decode", "t")


@settings(max_examples=40)
@given(json_values)
def test_any_json_is_parsed_or_refused(value: object) -> None:
    try:
        assert parse_params(value).role in ("plain", "prefill", "decode")
    except ValueError as error:
        assert str(error).startswith("kv_transfer_params")


def test_the_answer_of_p_is_a_request_to_d() -> None:
    answer = json.loads(json.dumps(answer_params("t", "engine", "id:1", 300)))
    assert parse_params(answer) == TransferParams("decode", "t")
    # A router of production-stack overwrites the host; D does not read it.
    assert parse_params({**answer, "remote_host": "evil"}) == parse_params(answer)
    assert answer["remote_host"] is answer["remote_port"] is answer["remote_block_ids"] is None
