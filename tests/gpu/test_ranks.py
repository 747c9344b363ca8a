"""`nanovllm serve --tp 2` on two GPUs: the CPU's text, one GPU's log-probabilities, its end."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.end_to_end.demo_server import Server, asked, start

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "people": {"type": "integer"}},
    "required": ["city", "people"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {"65": 2.0}}
QUESTIONS = [
    asked("What is nanovllm?", temperature=0, max_tokens=60),
    asked("Tell me about pages.", temperature=0.8, seed=5, max_tokens=60),
    asked("Name a city.", temperature=0, max_tokens=40, response_format=FORMAT),
    asked("Tell me about graphs.", temperature=0.8, seed=6, top_p=0.9, top_k=20, max_tokens=60),
    asked("Count to ten.", temperature=0, max_tokens=60, **PENALTIES),
]
FLOAT32 = ("--set", "dtype=float32", "--set", "cache.pages=400")
DRAFTS = ("--set", "speculate={method: ngram, tokens: 3, min_match: 1}")
CUDA = ("--device", "cuda", "--tp", "2")
WITHIN = 0.1  # of a log-probability: sums of bfloat16 in another order
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs"),
]


def answers(server: Server, questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    url, found = f"{server.url}/v1/chat/completions", []
    for question in questions:
        answer = httpx.post(url, json=question, timeout=60)
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["choices"][0])
    return found


def texts(*arguments: str) -> list[str]:
    server = start(*arguments)
    try:
        return [choice["message"]["content"] for choice in answers(server, QUESTIONS)]
    finally:
        server.process.kill()


def test_two_gpus_answer_as_a_cpu_does() -> None:
    expected = texts("--device", "cpu")
    assert all(expected)
    assert texts(*CUDA, *FLOAT32) == expected
    assert texts(*CUDA, *FLOAT32, *DRAFTS) == expected


def test_log_probabilities_are_one_gpus() -> None:
    asked_for = [{**question, "logprobs": True, "top_logprobs": 3} for question in QUESTIONS[:1]]
    found = []
    for ranks in ("1", "2"):
        server = start("--device", "cuda", "--tp", ranks, "--set", "cache.pages=400")
        found.append(answers(server, asked_for)[0]["logprobs"]["content"])
        server.process.kill()
    alone, together = found
    assert len(together) == len(alone) > 10
    for one, two in zip(alone, together, strict=True):
        if one["token"] != two["token"]:  # a tie in bfloat16, from which on the texts differ
            gap = one["top_logprobs"][0]["logprob"] - one["top_logprobs"][1]["logprob"]
            assert gap < WITHIN
            return
        assert one["logprob"] == pytest.approx(two["logprob"], abs=WITHIN)


def is_running(pid: int) -> bool:
    """Not if it only waits for somebody to ask how it ended: then it has no command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("stopping", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_streams_and_server(stopping: signal.Signals) -> None:
    server = start(*CUDA, "--set", "cache.pages=400")
    children = server.children()
    names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in children}
    rank = next(pid for pid, name in names.items() if name == "nanovllm-rank1")
    question = {**asked("Count.", max_tokens=3000, stream=True), "ignore_eos": True}
    lines: list[str] = []
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=question) as stream:
        for line in stream.iter_lines():
            lines.append(line)
            if len(lines) == 20:
                os.kill(rank, stopping)
                ended = time.monotonic()
    assert any('"error"' in line for line in lines[-6:]), lines[-6:]  # then [DONE]
    assert time.monotonic() - ended < 5
    assert server.process.wait(15 - (time.monotonic() - ended)) == 1
    while left := [pid for pid in children if is_running(pid)]:
        assert time.monotonic() - ended < 15, left
        time.sleep(0.2)
