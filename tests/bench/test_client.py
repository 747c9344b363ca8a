"""Requests of a client process, and its reading of streams."""

from __future__ import annotations

import json

import pytest

from nanovllm.bench import client, online
from nanovllm.bench.workload import Workload
from tests.bench.test_online import fake_chat, measure
from tests.load.pair import silent


def test_a_server_with_drafts_counts_the_tokens_of_each_chunk() -> None:
    """With three tokens per chunk, ITL is a third of the time between chunks."""
    load = Workload(num_prompts=4, input_len=21, output_len=31, concurrency=2)
    with fake_chat("counts") as url:
        found = measure(url, load, warmup=0).record.metrics
    assert (found["output_tokens"], found["output_chunks"]) == (4 * 31, 4 * 11)
    assert 4.0 <= found["icl_mean_ms"] < 40.0
    assert found["itl_mean_ms"] == pytest.approx(found["icl_mean_ms"] / 3)
    assert found["itl_max_ms"] == pytest.approx(found["icl_max_ms"] / 3)


def test_a_server_behind_a_path() -> None:
    connections = client._Connections("http://h:1/at", None)
    assert connections._head.startswith("POST /at/v1/chat/completions HTTP/1.1\r\nHost: h:1\r\n")


def test_the_legs_of_a_prefill_and_a_decode_server() -> None:
    """Those of vLLM's connector, as vllm-router sends them. Without the object, D computes."""
    body = b'{"messages":[],"max_tokens":256,"stream":true,"stream_options":{"include_usage":true}}'
    assert json.loads(client.prefill_leg(body)) == {
        "messages": [], "max_tokens": 1, "stream": False,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }  # fmt: skip
    params = {"do_remote_prefill": True, "nanovllm_ticket": "t", "remote_host": None}
    answer = json.dumps({"choices": [], "kv_transfer_params": params}).encode()
    assert json.loads(client.decode_leg(body, answer)) == json.loads(body) | {
        "kv_transfer_params": params
    }
    assert json.loads(client.decode_leg(body, b"{}"))["kv_transfer_params"] is None


def test_an_error_of_the_prefill_server_is_that_of_the_request() -> None:
    load = Workload(num_prompts=2, input_len=21, output_len=4, concurrency=1)
    with fake_chat() as url, fake_chat("a-key-that-the-client-has-not") as prefill_url:
        found = online.measure_server(
            load, None, url=url, api_key=None, goals_ms={}, warmup=0, processes=1, bar=silent,
            prefill_url=prefill_url,
        )  # fmt: skip
    assert found.record.metrics["failed"] == 2
    (error,) = found.errors
    assert error.startswith("prefill server: HTTP 401: ") and "wrong key" in error
