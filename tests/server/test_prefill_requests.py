"""Requests of routers: the part for a prefill server, and the object that goes to a decode server.

The bodies are those of vllm-router and of llm-d's sidecar.
"""

from __future__ import annotations

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from nanovllm.config import load_config
from nanovllm.server.asgi import ClientLeftError
from nanovllm.server.errors import shutting_down
from nanovllm.server.large import (
    LARGE_BYTES,
    MANY_MESSAGES,
    RefusedBody,
    answered,
    transfer_of,
)
from nanovllm.server.orders import generates
from nanovllm.server.protocol import parse_request
from nanovllm.server.ranges import ranges
from nanovllm.server.served import Served
from nanovllm.server.template import Prompt
from nanovllm.transfer.params import PLAIN, TransferParams, params_in
from nanovllm.wire import Refusal, RefusalKind
from tests.server.fake_engine import READY, queue_full
from tests.server.serving import Api, body, eventually, serving
from tests.server.test_large import large_processes

ASKED = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
OBJECT = {"do_remote_prefill": True, "nanovllm_ticket": "abc", "remote_num_tokens": 32}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "integer"}}}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 3, "min_tokens": 1},
        {"min_tokens": 40, "stop": ["x"], "logprobs": True, "top_logprobs": 2},
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": [TOOL | {"function": TOOL["function"] | {"strict": True}}]},  # type: ignore[operator]
        {"response_format": SCHEMA, "max_completion_tokens": 1},
        {"structured_outputs": {"regex": "a+"}, "no_stop_trim": False, "stream_reasoning": True},
    ],
)
def test_a_prefill_request_computes_one_token(api, more) -> None:
    api.engine.answer = "some words of an answer"
    api.engine.handover = json.dumps(OBJECT)
    response = api.chat("hello", max_tokens=1, kv_transfer_params=ASKED, **more)
    assert response.status_code == 200, response.text
    assert response.json()["kv_transfer_params"] == OBJECT
    assert len(response.json()["choices"]) == 1
    (sent,) = api.engine.generates
    assert sent.lends and not sent.ticket and not sent.grammar
    assert sent.max_new == 1 and sent.sampling.min_tokens == 0


def test_a_prompt_is_aborted_when_the_router_leaves(api) -> None:
    """vllm-router closes its connection to the prefill server as soon as the client leaves."""
    api.engine.is_stuck = True
    with pytest.raises(httpx.ReadTimeout):
        leg = body(max_tokens=1, min_tokens=1, stream=False, kv_transfer_params=ASKED)
        api.http.post("/v1/chat/completions", json=leg, timeout=0.2)
    (sent,) = api.engine.generates
    assert sent.lends
    eventually(lambda: api.engine.aborts == [sent.request_id])


def test_without_a_lease_the_answer_has_no_object(api) -> None:
    response = api.chat("hello", max_tokens=1, kv_transfer_params=ASKED)
    assert response.status_code == 200 and "kv_transfer_params" not in response.json()


def test_a_stream_lends_no_pages(api) -> None:
    """It has no place for the object, so the pages would be held until the lease expires."""
    events = api.events("hello", max_tokens=1, kv_transfer_params=ASKED)
    assert events[-1] == "[DONE]" and len(events) == 4
    assert [sent.lends for sent in api.engine.generates] == [False]


def is_left_to_decode(response: httpx.Response) -> bool:
    """Return True for an answer with which routers go on to a decode server."""
    answer = response.json()
    return (
        response.status_code == 200
        and "kv_transfer_params" not in answer
        and [choice["message"]["content"] for choice in answer["choices"]] == [""]
        and answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        and "retry-after" not in response.headers
    )


@pytest.mark.parametrize(
    ("refused", "code"),
    [
        (queue_full(), "queue_full"),
        (Refusal(0, RefusalKind.TOO_LONG, "too long"), "context_length_exceeded"),
        (Refusal(0, RefusalKind.NO_ADAPTER, "no adapter"), "model_not_found"),
        (Refusal(0, RefusalKind.FAILED, "it failed"), "admission_failed"),
        (None, "corrupted_output"),
    ],
)
def test_what_the_engine_refuses_is_left_to_the_decode_server(api, refused, code) -> None:
    """Routers would relay an error to the client, and would not try the decode server."""
    api.engine.handover = json.dumps(OBJECT)
    api.engine.refuse, api.engine.corrupt_after = refused, 0
    before = number_of(api, code)
    response = api.chat("hello", max_tokens=1, kv_transfer_params=ASKED)
    assert is_left_to_decode(response), response.text
    assert number_of(api, code) == before + 1
    assert api.chat("hello").status_code >= 400
    api.engine.refuse, api.engine.corrupt_after = None, -1
    answered = api.chat("hello", max_tokens=1, kv_transfer_params=ASKED)
    assert answered.json()["kv_transfer_params"] == OBJECT


def number_of(api: Api, code: str) -> int:
    """Return the number of requests that were refused with a code so far."""
    page = api.http.get("/metrics").text
    return sum(map(int, re.findall(rf'vllm:admission_rejections_total.*"{code}".* (\d+)', page)))


@pytest.mark.parametrize(
    "more",
    [
        {"model": "an adapter"},
        {"messages": [{"role": "user", "content": "x " * 600}]},
        {"messages": [{"role": "user", "content": "x " * 40_000}]},
        {"messages": [{"role": "user", "content": "x " * 80_000}]},  # a large body
    ],
)
def test_limits_of_this_server_are_left_to_the_decode_server(api, more) -> None:
    response = api.chat("hello", kv_transfer_params=ASKED, **more)
    assert is_left_to_decode(response), response.text
    assert api.chat("hello", **more).status_code in (400, 404)
    assert api.chat("hello", kv_transfer_params=ASKED, temperature=-1).status_code == 400
    path = "/v1/chat/completions/render"
    rendered = api.http.post(path, json=body(kv_transfer_params=ASKED, **more))
    assert "choices" not in rendered.json()
    assert not api.engine.generates


def test_prompts_are_left_to_the_decode_server_at_the_shutdown(tmp_path: Path) -> None:
    role = ("transfer.role=prefill", "transfer.listen=127.0.0.1:5600", "server.shutdown_s=20")
    with serving(tmp_path, *role) as api:
        api.engine.is_stuck = True
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(api.chat, "hello", kv_transfer_params=ASKED)
            eventually(lambda: len(api.engine.generates) == 1)
            api.process.terminate()
            eventually(lambda: httpx.get(f"{api.url}/ready").status_code == 503)
            url = f"{api.url}/v1/chat/completions"
            for more in ({}, {"padding": "x" * LARGE_BYTES}):
                late = httpx.post(url, json=body(kv_transfer_params=ASKED, **more), timeout=20)
                assert is_left_to_decode(late) and late.headers["connection"] == "close"
                refused = httpx.post(url, json=body(**more))
                assert refused.json()["error"]["code"] == "shutting_down"
            api.engine.die()
            assert is_left_to_decode(running.result(10))
        assert len(api.engine.generates) == 1


def test_the_object_of_a_decode_request(api) -> None:
    api.engine.handover = ""
    params = OBJECT | {"remote_host": "attacker", "remote_block_ids": [[1]], "unknown": 1}
    response = api.chat("hello", n=2, kv_transfer_params=params)
    assert response.status_code == 200 and "kv_transfer_params" not in response.json()
    assert [(sent.ticket, sent.lends) for sent in api.engine.generates] == [
        ("abc", False),
        ("", False),  # shares the pages of the first choice
    ]


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": -1},
        {"logit_bias": "x"},
        {"model": "missing"},
        {"messages": [{"role": "user", "content": "x " * 600}]},
        {"messages": [{"role": "user", "content": "x " * 40_000}]},
        {"messages": [{"role": "user", "content": "x " * 80_000}]},  # a large body
        {"temperature": -1, "padding": "x" * LARGE_BYTES},
        {"messages": [{"role": "nobody", "content": "x"}]},
        {"structured_outputs": {"regex": "("}},
        {"allowed_token_ids": [7], "bad_words": ["("]},
    ],
)
def test_the_ticket_of_a_refused_request_is_declined(api, more) -> None:
    """The prefill server otherwise holds its pages until the lease expires."""
    response = api.chat("hello", kv_transfer_params=OBJECT, **more)
    assert response.status_code == 400 + 4 * ("model" in more), response.text
    assert not api.engine.generates
    eventually(lambda: api.engine.unwanted == ["abc"])


def test_other_refused_requests_decline_nothing(api) -> None:
    """Without a ticket, as a prefill, or with an object that cannot be read."""
    wrong = (None, ASKED, OBJECT | {"do_remote_prefill": 1}, OBJECT | {"nanovllm_ticket": 1}, [])
    for params in wrong:
        assert api.chat("hello", temperature=-1, kv_transfer_params=params).status_code == 400
    assert api.chat("hello", temperature=-1, kv_transfer_params=OBJECT).status_code == 400
    eventually(lambda: api.engine.unwanted == ["abc"])


@pytest.mark.parametrize(
    ("in_progress", "waiting", "declined"),
    [("large", "large", ["first"]), ("large", "many", ["second", "first"]),
     ("many", "large", ["first"])],
)  # fmt: skip
def test_a_ticket_is_declined_when_the_client_leaves_during_the_work(
    api, in_progress, waiting, declined
) -> None:
    """That of a large body which still waits is not read, since this would hold the event loop."""
    padded: dict[str, Any] = {"padding": "x" * LARGE_BYTES}
    kinds = {"large": body("x", **padded), "many": {"messages": body()["messages"] * 129}}
    assert MANY_MESSAGES < 129 and api.chat("x", **padded).status_code == 200
    (pid,) = large_processes(api)
    os.kill(pid, signal.SIGSTOP)
    try:
        for kind, ticket in ((in_progress, "first"), (waiting, "second")):
            before = api.log().count("status=499")
            given = kinds[kind] | {"kv_transfer_params": OBJECT | {"nanovllm_ticket": ticket}}
            with pytest.raises(httpx.ReadTimeout):
                api.http.post("/v1/chat/completions", json=given, timeout=httpx.Timeout(9, read=1))
            eventually(lambda before=before: api.log().count("status=499") == before + 1)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert api.chat("x", **padded).status_code == 200  # after the body in progress
    eventually(lambda: api.engine.unwanted == declined)


def test_no_large_body_is_decoded_for_its_ticket(monkeypatch) -> None:
    """Decoding takes 13 to 40 ms for 30 MB, in which the event loop would stand still."""
    small = json.dumps(body(kv_transfer_params=OBJECT)).encode()
    large = json.dumps(body(kv_transfer_params=OBJECT, padding="x" * LARGE_BYTES)).encode()
    wanted = TransferParams("decode", "abc")
    decoded: list[int] = []

    def counted(data: bytes) -> TransferParams:
        decoded.append(len(data))
        return params_in(data)

    monkeypatch.setattr("nanovllm.server.large.params_in", counted)
    assert transfer_of(small, ClientLeftError()) == transfer_of(small, shutting_down()) == wanted
    assert transfer_of(large, ClientLeftError()) == transfer_of(large, shutting_down()) == PLAIN
    assert transfer_of(large, shutting_down(wanted)) == wanted
    assert decoded == [len(small)] * 2


def test_the_subprocess_reads_the_ticket_of_what_it_refuses() -> None:
    served = Served(load_config(None), READY)
    for more in ({"temperature": -1}, {"messages": []}, {"model": "missing"}):
        data = json.dumps(body() | more | {"kv_transfer_params": OBJECT}).encode()
        refused = msgspec.msgpack.decode(answered(data, served), type=RefusedBody)
        assert refused.error().transfer == TransferParams("decode", "abc")
    refused = msgspec.msgpack.decode(answered(b'{"messages": []}', served), type=RefusedBody)
    assert refused.transfer == PLAIN


@pytest.mark.parametrize("data", [b"[" * 9, b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b"{}"])
def test_bodies_without_a_ticket(data) -> None:
    assert params_in(data) == PLAIN


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([], "kv_transfer_params must be an object or null"),
        ({"do_remote_decode": 1}, "kv_transfer_params.do_remote_decode must be true, false"),
    ],
)
def test_objects_of_wrong_types(api, params, message) -> None:
    error = api.chat(kv_transfer_params=params).json()["error"]
    assert error["param"] == "kv_transfer_params" and error["message"].startswith(message)
    assert not api.engine.generates


@pytest.mark.parametrize(("params", "lends", "ticket"), [(ASKED, True, ""), (OBJECT, False, "abc")])
@pytest.mark.parametrize("name", ["demo", "pirate"])
def test_prompts_of_adapters_are_handed_over_too(name, params, lends, ticket) -> None:
    """The key of a ticket's last page depends on the files of the adapter."""
    served = Served(load_config(None), replace(READY, adapters={"pirate": "pirate"}))
    body = {"model": name, "messages": [{"role": "user", "content": "x"}]}
    request = parse_request(
        json.dumps(body | {"kv_transfer_params": params}).encode(),
        model="demo",
        vocab_size=served.vocab_size,
        allowed=ranges(64, raise_priority=False),
        adapters=["pirate"],
    )
    (sent,) = generates(request, Prompt([1, 2, 3]), served, seed=7, ids=[1])
    adapter = "pirate" if name == "pirate" else ""
    assert (sent.adapter, sent.lends, sent.ticket) == (adapter, lends, ticket)
