"""`nanovllm serve --dp 2`: engines behind one server, and what one's end is to the others."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from nanovllm.bench.report import by_label, samples_of
from tests.end_to_end.demo_server import Server, asked, start
from tests.server.serving import eventually

ROOT = Path(__file__).parents[2]
LOST = "the engine failed before this request was finished"
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


# -- ends --------------------------------------------------------------------------------------


def engines_of(server: Server, prefix: str = "nanovllm-engine") -> list[int]:
    """The ids of the processes that are named so, oldest first."""
    names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in server.children()}
    return sorted(pid for pid, name in names.items() if name.startswith(prefix))


def up(server: Server) -> dict[str, float]:
    return gained(server, "nanovllm:engine_up", "engine")


def health(server: Server) -> int:
    return httpx.get(f"{server.url}/health").status_code


async def streams(server: Server, count: int, kill: int, num_tokens: int) -> list[int | str]:
    """Of each stream the tokens, or the error that ended it. Kills once all have begun."""
    begun = 0
    async with server.async_client() as client:

        async def one() -> int | str:
            nonlocal begun
            stream = await client.chat.completions.create(
                **asked("Count.", max_tokens=num_tokens, stream=True),
                extra_body={"ignore_eos": True, "stream_options": {"include_usage": True}},
            )
            usage = None
            try:
                async for chunk in stream:
                    begun += usage is None and chunk.choices != []
                    usage = chunk.usage or usage or False
            except openai.APIError as error:
                return str(error)
            assert usage
            return usage.completion_tokens

        tasks = [asyncio.create_task(one()) for _ in range(count)]
        while begun < count:
            await asyncio.sleep(0.01)
        os.kill(kill, signal.SIGKILL)
        return await asyncio.gather(*tasks)


def test_a_killed_engine_ends_its_streams_only_and_comes_back(paper: Server) -> None:
    assert health(paper) == 200
    first, second = engines_of(paper)
    ends = asyncio.run(streams(paper, 12, first, 750))
    failed = [end for end in ends if isinstance(end, str)]
    assert set(failed) == {LOST}
    assert ends.count(750) == 12 - len(failed) and 3 <= len(failed) <= 9
    assert health(paper) == 200
    eventually(lambda: up(paper) == {"0": 1, "1": 1}, 20)
    assert engines_of(paper)[0] == second and len(engines_of(paper)) == 2
    eventually(lambda: up(paper) == {"0": 1, "1": 1}, 5)  # both API processes have it
    asyncio.run(texts(paper, 16, max_tokens=5))
    eventually(lambda: min(gained(paper, "vllm:generation_tokens_total", "engine").values()) > 9, 5)
    assert paper.stop() == 0


def test_a_killed_rank_takes_its_engine_and_no_other_along() -> None:
    server = start(*SMALL, "--dp", "2", "--tp", "2")
    try:
        ends = asyncio.run(streams(server, 4, engines_of(server, "nanovllm-rank1")[1], 40))
        assert sorted(map(str, ends)) == ["40"] * 2 + [LOST] * 2
        assert health(server) == 200
        eventually(lambda: up(server) == {"0": 1, "1": 1}, 60)
        assert asyncio.run(texts(server, 4, temperature=0, max_tokens=4))
        assert server.stop() == 0
    finally:
        server.process.kill()


def test_while_one_is_away_the_other_has_all(paper: Server) -> None:
    first, _ = engines_of(paper)
    os.kill(first, signal.SIGKILL)
    time.sleep(0.3)
    for _ in range(20):
        answers = asyncio.run(texts(paper, 2, max_tokens=2))
        assert len(answers) == 2
        assert health(paper) == 200


def test_metrics_are_those_of_all_api_processes_whichever_answers(paper: Server) -> None:
    """Every scrape opens a connection of its own, which any of them takes."""
    name = "vllm:request_success_total"

    def finished() -> float:
        return sum(by_label(samples_of(httpx.get(f"{paper.url}/metrics").text), name).values())

    before = finished()
    asyncio.run(texts(paper, 24, max_tokens=2))
    assert [finished() - before for _ in range(20)] == [24] * 20
    found = samples_of(httpx.get(f"{paper.url}/metrics").text)
    assert set(by_label(found, "process_cpu_seconds_total", "worker")) == {"0", "1"}


def test_without_any_engine_health_says_so_until_one_is_back() -> None:
    server = start(PAPER, "--dp", "2", "--set", "parallel.restarts=1")
    children = set(server.children())
    try:
        engines = engines_of(server)
        os.kill(server.process.pid, signal.SIGSTOP)  # nothing is started again yet
        for pid in engines:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: health(server) == 503, 5)
        with pytest.raises(openai.InternalServerError, match="the engine is gone"):
            server.client().chat.completions.create(**asked("Hi.", max_tokens=2))
        os.kill(server.process.pid, signal.SIGCONT)
        eventually(lambda: health(server) == 200, 20)
        eventually(lambda: up(server) == {"0": 1, "1": 1}, 20)
        server.client().chat.completions.create(**asked("Hi.", max_tokens=2))
        last, other = engines_of(server)
        os.kill(last, signal.SIGKILL)  # for the second time
        time.sleep(1)
        assert health(server) == 200 and len(engines_of(server)) == 1
        assert sum(up(server).values()) == 1
        children |= set(server.children())
        os.kill(other, signal.SIGKILL)
        assert server.process.wait(15) == 1
        eventually(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in children), 5)
    finally:
        server.process.kill()


def test_sigterm_drains_all_engines(paper: Server) -> None:
    async def drained() -> list[int]:
        async with paper.async_client() as client:
            calls = [
                client.chat.completions.create(
                    **asked("Count.", max_tokens=500), extra_body={"ignore_eos": True}
                )
                for _ in range(8)
            ]
            tasks = [asyncio.create_task(call) for call in calls]
            await asyncio.sleep(1)
            paper.process.terminate()
            return [one.usage.completion_tokens for one in await asyncio.gather(*tasks)]

    assert asyncio.run(drained()) == [500] * 8
    assert paper.process.wait(20) == 0
