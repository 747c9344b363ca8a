"""Server of a model with recurrent states, with few pages and few places for states.

An answer has the same tokens as alone, even if other requests come, leave or are preempted.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from nanovllm.config import DEMO
from tests.end_to_end.demo_server import Server, start
from tests.models.tiny import CASES, make_tiny
from tests.server.serving import eventually

CHAT = "/v1/chat/completions"
SMALL = ("--set", "cache.pages=56", "--set", "cache.page_tokens=8", "--set", "schedule.slots=7",
         "--set", "schedule.step_tokens=72", "--set", "server.max_model_tokens=400",
         "--set", "cache.checkpoints=3", "--device", "cpu")  # fmt: skip
NGRAM = ("--set", "speculate={method: ngram, tokens: 3, min_match: 1, max_match: 4}")
TWO_LAYERS = dict(num_hidden_layers=2, full_attention_interval=2)  # one of each kind
SERVERS = {"plain": ("qwen3_next", ()), "drafts": ("qwen3_next that repeats itself", NGRAM)}
NOTES = "These are the notes of the day; read them, all of them, with care. "
ITEM = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["age"], "additionalProperties": False}  # fmt: skip
Body = dict[str, Any]


class Answer(NamedTuple):
    tokens: dict[int, list[int]]  # by choice
    text: str  # of the first one
    cached: int


class Asked:
    """Client of one server, with each request's answer when alone and without cached state."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.alone: dict[str, Answer] = {}
        self.num_compared = 0

    async def expect(self, http: httpx.AsyncClient, body: Body) -> Answer:
        key = json.dumps(body)
        if key not in self.alone:
            salted = {**body, "cache_salt": f"alone {len(self.alone)}"}
            self.alone[key] = await answer(http, salted)
            assert self.alone[key].cached == 0
        return self.alone[key]

    async def compare(self, http: httpx.AsyncClient, body: Body, leave_after: int = -1) -> None:
        """Compare an answer with the one alone.

        Disconnect after `leave_after` tokens unless negative.
        """
        streams = leave_after >= 0 or len(json.dumps(body)) % 2 == 0
        found = await (streamed if streams else answer)(http, body, *[leave_after][:streams])
        wanted = self.alone[json.dumps(body)].tokens
        if leave_after >= 0:
            for index, tokens in found.tokens.items():
                assert tokens == wanted[index][: len(tokens)], body
        else:
            assert found.tokens == wanted, body
        self.num_compared += 1


async def answer(http: httpx.AsyncClient, body: Body) -> Answer:
    response = await http.post(CHAT, json={**body, "return_token_ids": True})
    assert response.status_code == 200, response.text
    said = response.json()
    tokens = {choice["index"]: choice["token_ids"] for choice in said["choices"]}
    text = said["choices"][0]["message"]["content"] or ""
    return Answer(tokens, text, said["usage"]["prompt_tokens_details"]["cached_tokens"])


async def streamed(http: httpx.AsyncClient, body: Body, leave_after: int = -1) -> Answer:
    asked = {**body, "return_token_ids": True, "stream": True}
    tokens: dict[int, list[int]] = {}
    async with http.stream("POST", CHAT, json=asked) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                tokens.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
            if 0 <= leave_after <= sum(map(len, tokens.values())):
                break
    return Answer(tokens, "", 0)


def asked(*turns: str, **more: Any) -> Body:
    roles = ["user", "assistant"] * len(turns)
    messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
    return {"messages": messages, "temperature": 0, "max_tokens": 20, "ignore_eos": True, **more}


def questions() -> list[Body]:
    """Return requests. Most share a prefix; some differ only in their length limit."""
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": ITEM, "strict": True}}
    return [
        asked("Hello!"),
        asked("Hello!", max_tokens=30),
        asked(NOTES * 6 + "What is done?", max_tokens=30),
        asked(NOTES * 6 + "What is left?", max_tokens=15),
        asked(NOTES * 8 + "Which of them are mine?"),
        asked(NOTES * 8 + "Which of them are mine?", max_tokens=1),
        asked(NOTES * 3 + "Who wrote them? " * 5, max_tokens=40),
        asked(NOTES * 4 + "Repeat them.", temperature=0.9, seed=5, max_tokens=25),
        asked(NOTES * 4 + "Repeat them.", temperature=1.1, seed=6, n=3, max_tokens=10),
        asked(NOTES * 2 + "How old is Ada?", response_format=schema, ignore_eos=False),
        asked("one two three four " * 12, max_tokens=32),
        asked("one two three four " * 12, logprobs=True, top_logprobs=3),
    ]


@pytest.fixture(scope="module", params=SERVERS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Asked]:
    folder: Path = tmp_path_factory.mktemp("next")
    case, more = SERVERS[request.param]
    family, overrides = CASES[case]
    make_tiny(
        folder,
        family,
        **{**overrides, **TWO_LAYERS, "vocab_size": 2048, "max_position_embeddings": 512},
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, folder)
    server = start("--set", f"model={folder}", *SMALL, *more)
    yield Asked(server)
    assert server.stop() == 0


def events(server: Server) -> dict[str, float]:
    """Return nanovllm:checkpoints and nanovllm:checkpoint_events_total by their labels."""
    text = httpx.get(f"{server.url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("nanovllm:checkpoint")]
    return {line.split('="')[-1].split('"')[0]: float(line.split()[-1]) for line in lines}


def connection(served: Asked) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=served.server.url, trust_env=False, timeout=120)


def check_idle(server: Server) -> None:
    held = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
    eventually(lambda: not any(map(server.metric, (*held, "nanovllm:open_choices"))), 20)
    found = events(server)
    assert found["kept"] <= found["places"] == 3
    assert found["kept"] <= found["saved"] - found["evicted"]


async def storm(served: Asked, seed: int, count: int) -> None:
    """Run clients that come at random times. Some leave before or during their answer."""
    draw, asks, at_once = random.Random(seed), questions(), asyncio.Semaphore(14)

    async def client(http: httpx.AsyncClient) -> None:
        body, leaves = draw.choice(asks), draw.random()
        async with at_once:
            await asyncio.sleep(draw.random() * 0.1)
            if leaves < 0.2:
                await served.compare(http, body, draw.randrange(30))
            elif leaves < 0.35:
                with suppress(TimeoutError):
                    await asyncio.wait_for(served.compare(http, body), draw.random() * 0.3)
            else:
                await served.compare(http, body)

    async with connection(served) as http:
        for body in asks:
            await served.expect(http, body)
        await asyncio.gather(*(client(http) for _ in range(count)))
        for body in asks[::2]:
            await served.compare(http, body)


def test_answers_beside_others_that_stay_or_leave(served: Asked) -> None:
    before = served.server.metric("vllm:num_preemptions_total")
    asyncio.run(storm(served, 0, 36))
    assert served.num_compared > 30
    check_idle(served.server)
    found = events(served.server)
    assert found["restored"] > 10 and found["evicted"] > 5
    assert served.server.metric("vllm:num_preemptions_total") > before
    assert served.server.metric("vllm:prefix_cache_hits_total") > 500


async def converse(served: Asked, talk: int, is_alone: bool) -> None:
    turns = [NOTES * (talk % 3) + f"Hello from {talk // 2}!"]
    async with connection(served) as http:
        for turn in range(3):
            body = asked(*turns, max_tokens=16 + 4 * (talk % 2))
            said = await served.expect(http, body)
            if not is_alone:
                await served.compare(http, body)
            turns += [said.text, f"Go on, {turn}."]


async def all_converse(served: Asked) -> None:
    for talk in range(4):
        await converse(served, talk, True)
    await asyncio.gather(*(converse(served, talk % 4, False) for talk in range(9)))


def test_conversations_at_once(served: Asked) -> None:
    asyncio.run(all_converse(served))
    check_idle(served.server)
