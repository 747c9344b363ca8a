"""`nanovllm serve --dp 2`: engines behind one server, and what one's end is to the others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from nanovllm.bench.report import by_label, samples_of
from tests.end_to_end.demo_server import Server, asked, start
from tests.server.serving import eventually

ROOT = Path(__file__).parents[2]
PAPER = str(ROOT / "recipes" / "paper.yaml")
SMALL = ("--device", "cpu", "--set", "cache.cpu_gib=0.2", "--set", "cpu_threads=1")


@pytest.fixture
def paper() -> Iterator[Server]:
    server = start(PAPER, "--dp", "2", "--set", "server.workers=2")
    yield server
    server.process.kill()
    server.process.wait()


def gained(server: Server, name: str, *labels: str) -> dict[str, float]:
    page = httpx.get(f"{server.url}/metrics").text
    return by_label(samples_of(page), name, *labels)


async def texts(server: Server, count: int, **more: object) -> list[str | None]:
    async with server.async_client() as client:
        calls = (
            client.chat.completions.create(**asked(f"Tell me of {at}.", **more))
            for at in range(count)
        )
        return [one.choices[0].message.content for one in await asyncio.gather(*calls)]


def test_two_paper_engines_share_requests_and_metrics_tell_them_apart(paper: Server) -> None:
    answers = asyncio.run(texts(paper, 32, max_tokens=20))
    assert len(set(answers)) == 1 and answers[0]
    tokens = gained(paper, "vllm:generation_tokens_total", "engine")
    assert set(tokens) == {"0", "1"} and sum(tokens.values()) >= 31 * 20
    assert min(tokens.values()) >= 12 * 20
    assert gained(paper, "nanovllm:engine_up", "engine") == {"0": 1, "1": 1}
    (model,) = httpx.get(f"{paper.url}/v1/models").json()["data"]
    assert model["id"] == "demo"
    children = paper.children()
    assert paper.stop() == 0
    eventually(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in children), 5)


def test_two_engines_say_what_one_says() -> None:
    alone = start(*SMALL)
    expected = asyncio.run(texts(alone, 6, temperature=0, max_tokens=24))
    assert alone.stop() == 0
    server = start(*SMALL, "--dp", "2")
    assert asyncio.run(texts(server, 6, temperature=0, max_tokens=24)) == expected
    assert min(gained(server, "vllm:generation_tokens_total", "engine").values()) > 24
    assert server.stop() == 0
