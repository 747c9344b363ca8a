"""Requests of a client process, and its reading of streams."""

from __future__ import annotations

import multiprocessing

import pytest

from nanovllm.bench import client
from nanovllm.bench.workload import Workload
from tests.bench.test_online import fake_chat, measure


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
    share = client.Share("http://h:1/at", None, [], [], 1)
    driver = client._Driver(share, client.RunState(multiprocessing.get_context("spawn"), 1))
    assert driver._head.startswith("POST /at/v1/chat/completions HTTP/1.1\r\nHost: h:1\r\n")
