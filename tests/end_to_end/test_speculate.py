"""Drafts are counted and change no answer, with grammars or without."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.end_to_end import demo_server
from tests.end_to_end.demo_server import THINK, Server, asked
from tests.load.structured import request as structured
from tests.server.serving import eventually

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]
REPEAT = "Repeat these words: red blue green red blue green red blue green."
WEATHER = "What is the weather in Oslo and in Lima?"
DRAFTS = "vllm:spec_decode_num_{}_total"


@pytest.fixture(scope="module", params=["ngram", "draft_model"])
def drafting(request: pytest.FixtureRequest) -> Iterator[Server]:
    speculate = f"speculate={{method: {request.param}, tokens: 4}}"
    settings = ("schedule.slots=32", "cache.cpu_gib=0.5", speculate)
    server = demo_server.start(*(word for text in settings for word in ("--set", text)))
    yield server
    assert server.stop() == 0


def questions() -> list[dict[str, Any]]:
    """Return requests. Half of them follow a grammar; some have reasoning, some with a budget."""
    found = [structured("demo", number, turn) for number in range(0, 100, 24) for turn in range(2)]
    for seed in range(2):
        some = {"seed": seed, "temperature": 0.7 * seed, "max_tokens": 80}
        found += [
            asked(REPEAT, **some),
            asked(REPEAT, **some, frequency_penalty=0.4, top_p=0.9, stop="green."),
            asked(REPEAT, **some, **THINK, thinking_token_budget=3 + seed),
            asked(REPEAT, **some, logprobs=True, top_logprobs=2),
            asked(WEATHER, **some, tools=TOOLS, tool_choice="required"),
            asked(WEATHER, **some, tools=TOOLS, **THINK),
        ]
    return found


def told(server: Server, bodies: list[dict[str, Any]]) -> list[list[Any]]:
    """Return the client's view of the answers."""

    async def one(http: httpx.AsyncClient, turn: asyncio.Semaphore, body: object) -> list[Any]:
        async with turn:
            answer = (await http.post("/v1/chat/completions", json=body)).json()
        (choice,) = answer["choices"]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls", [])]
        answer["usage"].pop("prompt_tokens_details")
        said = [message["content"], message.get("reasoning"), calls]
        listed = (choice["logprobs"] or {}).get("content", [])
        tokens = [(e["token"], [top["token"] for top in e["top_logprobs"]]) for e in listed]
        values = [entry["logprob"] for entry in listed]
        return [said, choice["finish_reason"], answer["usage"], tokens, values]

    async def everyone() -> list[list[Any]]:
        turn = asyncio.Semaphore(8)
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
            return await asyncio.gather(*(one(http, turn, body) for body in bodies))

    return asyncio.run(everyone())


@pytest.fixture(scope="module")
def usual(server: Server) -> list[list[Any]]:
    """Return the answers without drafts."""
    return told(server, questions())


def test_answers_are_the_same_with_drafts(
    server: Server, usual: list[list[Any]], drafting: Server
) -> None:
    bodies = questions()
    drafted = told(drafting, bodies)
    for body, one, other in zip(bodies, usual, drafted, strict=True):
        assert other[:-1] == one[:-1], body
        assert other[-1] == pytest.approx(one[-1], abs=1e-3)  # sums in another order
    eventually(lambda: drafting.metric("vllm:num_requests_running") == 0)
    drafts, tokens, accepted = (
        drafting.metric(DRAFTS.format(part))
        for part in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert 0 < drafts <= tokens <= 4 * drafts and 0.2 * drafts < accepted < tokens
    page = httpx.get(f"{drafting.url}/metrics").text
    assert page.count("vllm:spec_decode_num_accepted_tokens_per_pos_total{") == 4
    assert "spec_decode" not in httpx.get(f"{server.url}/metrics").text
