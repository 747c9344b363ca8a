"""`nanovllm serve --dp 2`: several engines in one server, and the loss of one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from nanovllm.bench.report import by_label, samples_of
from tests.end_to_end.demo_server import Server, asked, has_left, start
from tests.server.serving import eventually

ROOT = Path(__file__).parents[2]
LOST = "the engine failed before this request was finished"
PAPER = str(ROOT / "recipes" / "paper.yaml")
SLOW = ("--set", "paper.tokens_per_s=80")  # streams outlast a client that waits for a processor
SMALL = ("--device", "cpu", "--set", "cache.cpu_gib=0.2", "--set", "cpu_threads=1")


@pytest.fixture
def paper() -> Iterator[Server]:
    server = start(PAPER, *SLOW, "--dp", "2", "--set", "server.workers=2")
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
    models = httpx.get(f"{paper.url}/v1/models").json()["data"]
    assert models[0]["id"] == "demo"
    children = paper.children()
    assert paper.stop() == 0
    eventually(lambda: all(map(has_left, children)), 5)


def test_two_engines_say_what_one_says(server: Server) -> None:
    expected = asyncio.run(texts(server, 6, temperature=0, max_tokens=24))
    two = start(*SMALL, "--dp", "2")
    assert asyncio.run(texts(two, 6, temperature=0, max_tokens=24)) == expected
    assert min(gained(two, "vllm:generation_tokens_total", "engine").values()) > 24
    assert two.stop() == 0


# -- ends --------------------------------------------------------------------------------------


def engines_of(server: Server, prefix: str = "nanovllm-engine") -> list[int]:
    """Return the ids of the processes whose names begin with `prefix`, oldest first."""
    found = []
    for pid in server.children():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if Path(f"/proc/{pid}/comm").read_text().startswith(prefix):
                found.append(pid)
    return sorted(found)


def up(server: Server) -> dict[str, float]:
    return gained(server, "nanovllm:engine_up", "engine")


def num_running(server: Server) -> set[float]:
    """Return the numbers of requests on the engines."""
    return set(gained(server, "vllm:num_requests_running", "engine").values())


def health(server: Server) -> int:
    return httpx.get(f"{server.url}/health").status_code


async def streams(
    server: Server, count: int, kill: int, num_tokens: int, number: int = signal.SIGKILL
) -> list[int | str]:
    """Return the tokens of each stream, or the error that ended it.

    Process `kill` gets the signal once all streams have begun.
    """
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
            except (openai.APIError, httpx.HTTPError) as error:
                return str(error)
            assert usage
            return usage.completion_tokens

        tasks = []
        for _ in range(count):  # one by one, or one API process may accept all of them
            tasks.append(asyncio.create_task(one()))
            await asyncio.sleep(0.02)
        while begun < count:
            await asyncio.sleep(0.01)
        os.kill(kill, number)
        return await asyncio.gather(*tasks)


def test_a_killed_engine_ends_its_streams_only_and_comes_back(paper: Server) -> None:
    assert health(paper) == 200
    first, second = engines_of(paper)
    ends = asyncio.run(streams(paper, 12, first, 400))
    failed = [end for end in ends if isinstance(end, str)]
    assert set(failed) == {LOST}
    assert ends.count(400) == 12 - len(failed) and 3 <= len(failed) <= 9
    assert health(paper) == 200
    eventually(lambda: up(paper) == {"0": 1, "1": 1}, 60)
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
    """Every scrape opens a new connection, which either process may accept."""
    name = "vllm:request_success_total"

    def finished() -> float:
        return sum(by_label(samples_of(httpx.get(f"{paper.url}/metrics").text), name).values())

    before = finished()
    asyncio.run(texts(paper, 24, max_tokens=2))
    assert [finished() - before for _ in range(20)] == [24] * 20
    found = samples_of(httpx.get(f"{paper.url}/metrics").text)
    assert set(by_label(found, "process_cpu_seconds_total", "worker")) == {"0", "1"}


def test_counts_survive_the_api_process_that_counted_them(paper: Server) -> None:
    """Counts do not fall when a process restarts: Prometheus would add all of them again."""
    name = "vllm:request_success_total"

    def finished() -> float:
        return sum(by_label(samples_of(httpx.get(f"{paper.url}/metrics").text), name).values())

    asyncio.run(texts(paper, 24, max_tokens=2))
    assert [finished() for _ in range(10)] == [24] * 10  # each has received the other's counts
    for at in range(2):
        os.kill(engines_of(paper, f"nanovllm-api{at}")[0], signal.SIGKILL)
        eventually(lambda at=at: logged(paper, f"nanovllm-api{at} is ready again"), 60)
        asyncio.run(texts(paper, 8, max_tokens=2))
        assert [finished() for _ in range(10)] == [32 + 8 * at] * 10
    assert paper.stop() == 0


def test_without_any_engine_health_says_so_until_one_is_back() -> None:
    server = start(PAPER, "--dp", "2", "--set", "parallel.restarts=1")
    children = set(server.children())
    try:
        engines = engines_of(server)
        os.kill(server.process.pid, signal.SIGSTOP)  # nothing is restarted yet
        for pid in engines:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: health(server) == 503, 5)
        with pytest.raises(openai.InternalServerError, match="has lost its engine"):
            server.client().chat.completions.create(**asked("Hi.", max_tokens=2))
        os.kill(server.process.pid, signal.SIGCONT)
        eventually(lambda: health(server) == 200, 60)
        eventually(lambda: up(server) == {"0": 1, "1": 1}, 60)
        server.client().chat.completions.create(**asked("Hi.", max_tokens=2))
        last, other = engines_of(server)
        os.kill(last, signal.SIGKILL)  # for the second time
        eventually(lambda: len(engines_of(server)) == 1, 10)
        time.sleep(2)
        assert health(server) == 200 and len(engines_of(server)) == 1
        assert sum(up(server).values()) == 1
        children |= set(server.children())
        os.kill(other, signal.SIGKILL)
        assert server.process.wait(30) == 1
        eventually(lambda: all(map(has_left, children)), 15)
    finally:
        server.process.kill()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which a server creates that of its sockets."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def logged(server: Server, text: str) -> bool:
    return any(text in line for line in tuple(server.lines))


def test_a_cleaned_folder_of_sockets_is_no_loss(folder: Path, paper: Server) -> None:
    """An engine and an API process that restart afterwards find all others."""
    (sockets,) = folder.iterdir()
    shutil.rmtree(sockets)
    os.kill(engines_of(paper)[0], signal.SIGKILL)
    os.kill(engines_of(paper, "nanovllm-api0")[0], signal.SIGKILL)
    eventually(lambda: logged(paper, "nanovllm-engine.0 is ready again"), 60)
    eventually(lambda: logged(paper, "nanovllm-api0 is ready again"), 60)
    for _ in range(5):  # of either API process
        eventually(lambda: up(paper) == {"0": 1, "1": 1}, 30)
    assert len(asyncio.run(texts(paper, 16, max_tokens=2))) == 16
    assert sockets.stat().st_mode & 0o777 == 0o700
    assert paper.stop() == 0
    assert list(folder.iterdir()) == []


def test_a_supervisor_without_descriptors_goes_on_and_tries_again(paper: Server) -> None:
    supervisor = paper.process.pid
    _, most = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (3, most))  # it has more already
    os.kill(engines_of(paper)[0], signal.SIGKILL)
    said = "nanovllm-engine.0 cannot be started: "
    eventually(lambda: logged(paper, said) and logged(paper, "Too many open files"), 30)
    assert health(paper) == 200
    assert len(asyncio.run(texts(paper, 8, max_tokens=2))) == 8
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (most, most))
    eventually(lambda: up(paper) == {"0": 1, "1": 1}, 60)
    assert paper.stop() == 0


def test_a_hung_engine_ends_its_streams_and_is_replaced() -> None:
    server = start(PAPER, *SLOW, "--dp", "2", "--set", "server.stall_s=2")
    try:
        first, second = engines_of(server)
        ends = asyncio.run(streams(server, 8, first, 360, signal.SIGSTOP))
        failed = [end for end in ends if isinstance(end, str)]
        assert set(failed) == {LOST} and ends.count(360) == 8 - len(failed)
        assert 2 <= len(failed) <= 6
        assert logged(server, "nanovllm-engine.0 has been silent for 2 s; starting it again in 1 s")
        eventually(lambda: up(server) == {"0": 1, "1": 1}, 60)
        assert second in engines_of(server) and first not in engines_of(server)
        assert server.stop() == 0
    finally:
        server.process.kill()


def test_a_lost_api_process_ends_its_streams_only_and_comes_back(paper: Server) -> None:
    """The engines stay, and drop the requests of the lost process."""
    engines = engines_of(paper)
    lost = engines_of(paper, "nanovllm-api1")[0]
    ends = asyncio.run(streams(paper, 16, lost, 400))
    assert ends.count(400) == len([end for end in ends if isinstance(end, int)]) >= 1
    assert all("connection" in end.lower() or "peer" in end.lower() for end in ends if end != 400)
    eventually(lambda: logged(paper, "nanovllm-api1 is ready again"), 60)
    assert engines_of(paper) == engines and lost not in paper.children()
    for _ in range(10):
        assert health(paper) == 200
    asyncio.run(texts(paper, 16, max_tokens=5))
    eventually(lambda: num_running(paper) == {0}, 30)
    assert paper.stop() == 0


def test_one_lost_api_process_comes_back_to_the_engine_that_stayed() -> None:
    server = start(PAPER, *SLOW)
    try:
        engines = engines_of(server)
        for life in range(2):
            (lost,) = engines_of(server, "nanovllm-api0")
            ends = asyncio.run(streams(server, 3, lost, 100_000 // 200))
            assert all(isinstance(end, str) for end in ends)
            # Until the next one is ready, connections wait in the listening socket's queue.
            reply = httpx.get(f"{server.url}/ready", timeout=60)
            assert reply.status_code == 200
            assert asyncio.run(texts(server, 2, max_tokens=3)) and engines_of(server) == engines
            eventually(lambda: num_running(server) == {0}, 30)
            eventually(
                lambda n=life + 1: sum("api0 is ready again" in x for x in server.lines) == n, 30
            )
        assert server.stop() == 0
    finally:
        server.process.kill()


def test_a_restarted_api_process_serves_while_an_engine_is_away(paper: Server) -> None:
    """It waits for one engine, and connects to the other once that is back."""
    (sockets,) = {Path(line.split()[-1]).parent for line in unix_sockets(paper)}
    first = engines_of(paper)[0]
    sockets.joinpath("0.sock").unlink()
    sockets.joinpath("0.sock").mkdir()  # engine 0 cannot restart
    os.kill(first, signal.SIGKILL)
    eventually(lambda: logged(paper, "nanovllm-engine.0 cannot be started: "), 30)
    os.kill(engines_of(paper, "nanovllm-api0")[0], signal.SIGKILL)
    eventually(lambda: logged(paper, "nanovllm-api0 is ready again"), 60)
    for _ in range(10):
        assert len(asyncio.run(texts(paper, 2, max_tokens=2))) == 2
    assert up(paper) == {"0": 0, "1": 1}
    sockets.joinpath("0.sock").rmdir()
    for _ in range(5):
        eventually(lambda: up(paper) == {"0": 1, "1": 1}, 90)
    assert paper.stop() == 0


def unix_sockets(server: Server) -> list[str]:
    """Return the lines of /proc/net/unix for the sockets of the server's engines."""
    inodes = set()
    for pid in engines_of(server):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(link).partition("socket:[")[2].rstrip("]"))
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    return [line for line in lines if line.endswith(".sock") and line.split()[6] in inodes]


def test_sigterm_drains_all_engines(paper: Server) -> None:
    async def drained() -> list[int]:
        async with paper.async_client() as client:
            calls = [
                client.chat.completions.create(
                    **asked("Count.", max_tokens=300), extra_body={"ignore_eos": True}
                )
                for _ in range(8)
            ]
            tasks = [asyncio.create_task(call) for call in calls]
            await asyncio.sleep(1)
            paper.process.terminate()
            return [one.usage.completion_tokens for one in await asyncio.gather(*tasks)]

    assert asyncio.run(drained()) == [300] * 8
    assert paper.process.wait(20) == 0
