"""One API process with several engines: destinations of requests, and the return of an engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from nanovllm.config import DEMO, load_config
from nanovllm.ipc.client import EngineClient
from nanovllm.server.engines import Engines, Replicas, Route, reusable_pages
from nanovllm.server.protocol import ChatRequest
from nanovllm.server.template import Prompt
from nanovllm.wire import Beat, Generate, Sampling, Started, Stats, StepOutput
from tests.server.fake_engine import READY, FakeEngine

RECIPE = load_config(None, ["parallel.dp=2", "parallel.load_weight=20"]).recipe
PROMPT = Prompt(list(range(100, 180)), "")  # 4 full pages of 16, and a rest


class Notes:
    """A sink, which is also its own group."""

    def __init__(self) -> None:
        self.was_lost = False
        self.num_cached: int | None = None

    def lost(self) -> None:
        self.was_lost = True

    def started(self, start: Started) -> None:
        self.num_cached = start.num_cached

    def flush(self) -> None: ...


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[list[FakeEngine]]:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    fakes = [FakeEngine(str(tmp_path / f"{at}.sock"), tokenizer) for at in range(2)]
    for fake in fakes:
        fake.is_stuck = True
        fake.start()
    yield fakes
    for fake in fakes:
        fake.die()


def request(**fields: object) -> ChatRequest:
    return msgspec.convert({"messages": [], **fields}, ChatRequest)


def at_of(engines: Engines, route: Route) -> int:
    return engines.clients.index(route.client)


def send(route: Route, sink: Any) -> None:
    message = Generate(route.client.new_id(), b"\0\0\0\0", 9, [], Sampling())
    route.client.submit(message, sink, sink)
    route.sent()


def run(fakes: list[FakeEngine], main: Any) -> None:
    async def whole() -> None:
        engines = await Engines.connect([fake.path for fake in fakes], RECIPE)
        try:
            await main(engines)
        finally:
            if isinstance(engines, Replicas):  # a pending reconnect must close its socket
                await asyncio.wait_for(asyncio.gather(*engines._connecting), 5)
            for client in engines.clients:
                client._on_lost = lambda: None
                client.close()
            await asyncio.sleep(0)

    asyncio.run(whole())


async def eventually(check: Any) -> None:
    async with asyncio.timeout(30):
        while not check():
            await asyncio.sleep(0.005)


def test_requests_in_flight_and_prefixes_decide(fakes: list[FakeEngine]) -> None:
    async def main(engines: Engines) -> None:
        first, sink = engines.route(request(), PROMPT), Notes()
        send(first, sink)
        here = at_of(engines, first)
        other = engines.route(request(), Prompt([7] * 80, ""))
        assert at_of(engines, other) == 1 - here and other.metrics is engines.metrics[1 - here]
        # 64 cached tokens, half shared with a request in flight, outweigh one request of 20.
        assert at_of(engines, engines.route(request(), PROMPT)) == here
        await eventually(lambda: sink.num_cached is not None)
        first.done(sink.num_cached)
        send(engines.route(request(), PROMPT), Notes())
        assert first.client.num_open == 2
        others = [request(), request(cache_salt="x")]
        assert [at_of(engines, engines.route(one, PROMPT)) for one in others] == [1 - here] * 2

    run(fakes, main)


def test_the_router_counts_pages_of_all_tiers() -> None:
    """With those of the device alone, it forgets conversations that host memory still has."""
    assert reusable_pages(replace(READY, num_pages=64, tier_pages=100)) == 164
    both = [replace(READY, num_pages=3, tier_pages=tiers) for tiers in (0, 9)]

    async def made() -> Replicas:
        return Replicas([EngineClient.absent(ready) for ready in both], ["0", "1"], RECIPE)

    engines = asyncio.run(made())
    assert engines._router._limits == [3, 12]


def test_streams_end_with_the_word_that_an_engine_was_lost(fakes: list[FakeEngine]) -> None:
    """Streams end when an engine is reported lost, even if its socket stays open."""

    async def main(engines: Engines) -> None:
        sinks = [Notes(), Notes()]
        for at, sink in enumerate(sinks):
            send(Route(engines.clients[at], engines.metrics[at]), sink)
        before = engines.clients[1]
        engines.end(1, before.ready_at)  # a late report about the engine before it
        await asyncio.sleep(0.05)
        assert not before.is_lost
        engines.end(1, time.monotonic())
        await eventually(lambda: sinks[1].was_lost)
        assert before.is_lost and not sinks[0].was_lost

    run(fakes, main)


def test_what_other_api_processes_sent_counts(fakes: list[FakeEngine]) -> None:
    async def main(engines: Engines) -> None:
        assert isinstance(engines, Replicas)
        for client, num_running in zip(engines.clients, (5, 3), strict=True):
            client._received([StepOutput(stats=Stats(num_running=num_running, num_waiting=1))])
        assert [engines._load(at) for at in range(2)] == [6, 4]
        for _ in range(4):  # our own requests count at once, without a report
            send(engines.route(request(), Prompt([1], "")), Notes())
        assert [engines._load(at) for at in range(2)] == [7, 7]
        engines.clients[1]._received([StepOutput(stats=Stats(num_running=3))])
        assert [engines._load(at) for at in range(2)] == [7, 3]

    run(fakes, main)


class Clients:
    """Views of two engines by four API processes, whose streams of 256 tokens end together."""

    def __init__(self) -> None:
        self.ends: list[list[tuple[int, int]]] = [[], []]  # of an engine: step, process
        self.views = [[self.client() for _ in range(2)] for _ in range(4)]
        self.loads = [SimpleNamespace(clients=view, _num_workers=4) for view in self.views]

    @staticmethod
    def client() -> Any:
        return SimpleNamespace(stats=Stats(), num_open=0, num_open_then=0)

    def send(self, process: int, step: int) -> None:
        view, load = self.views[process], self.loads[process]
        at = min(range(2), key=lambda at: Replicas._load(load, at))  # type: ignore[arg-type]
        view[at].num_open += 1
        self.ends[at].append((step + 256, process))

    def ended(self, step: int) -> list[int]:
        """Return the processes whose streams end in this step."""
        gone = []
        for at, ends in enumerate(self.ends):
            done = [process for end, process in ends if end == step]
            ends[:] = [each for each in ends if each[0] != step]
            for process in done:
                self.views[process][at].num_open -= 1
            gone += done
        return gone

    def count(self) -> None:
        """Update the stats of both engines in every process."""
        for view in self.views:
            for client, ends in zip(view, self.ends, strict=True):
                client.stats = Stats(num_running=len(ends))
                client.num_open_then = client.num_open


def test_streams_that_end_together_spread_again() -> None:
    """With counts every 20 steps, the estimate for other processes keeps the loads even."""
    world, due, most = Clients(), [(nth % 30, nth % 4) for nth in range(512)], 0
    for step in range(1500):
        due += [(step + 1, process) for process in world.ended(step)]
        if step % 20 == 0:
            world.count()
        for at, process in [each for each in due if each[0] <= step]:
            world.send(process, step)
            due.remove((at, process))
        if step > 30:
            most = max(most, abs(len(world.ends[0]) - len(world.ends[1])))
    assert most <= 16  # without the estimate: over 250


def test_one_engine_that_goes_loses_its_requests_and_comes_back(fakes: list[FakeEngine]) -> None:
    async def main(engines: Engines) -> None:
        sinks = [Notes() for _ in range(6)]
        for sink in sinks:
            send(engines.route(request(), Prompt([1], "")), sink)
        gone = engines.clients[0]
        path = Path(fakes[0].path)
        path.rename(f"{path}-away")
        assert gone.num_open == 3
        fakes[0].die()
        await eventually(lambda: gone.is_lost)
        assert sorted(sink.was_lost for sink in sinks) == [False] * 3 + [True] * 3
        assert engines.problem() is None
        assert [seen.stats is not None for seen in engines.seen()] == [False, True]
        assert {at_of(engines, engines.route(request(), PROMPT)) for _ in range(4)} == {1}
        fakes[0].running.clear()  # as after a restart
        Path(f"{path}-away").rename(path)
        await eventually(lambda: engines.clients[0] is not gone)
        assert [seen.stats is not None for seen in engines.seen()] == [True, True]
        assert at_of(engines, engines.route(request(), PROMPT)) == 0  # which is idle
        second = engines.clients[1]
        fakes[1].die()
        await eventually(lambda: second.is_lost and engines.clients[1] is not second)

    run(fakes, main)


def test_when_none_is_left_that_is_said(fakes: list[FakeEngine]) -> None:
    async def main(engines: Engines) -> None:
        for client in engines.clients:
            client.is_lost = True
        problem = engines.problem()
        assert problem is not None and (problem.status, problem.code) == (503, "unhealthy")
        assert engines.route(request(), PROMPT).client.is_lost
        engines.clients[0].is_lost = False
        engines.clients[0]._received([Beat(30.0, 20.0)])  # its step hangs
        problem = engines.problem()
        assert problem is not None and problem.code == "stalled"
        lives = engines.clients[0]
        again = engines.clients[0] = await EngineClient.connect(fakes[0].path)  # after a reconnect
        again._received([Beat(30.0, 20.0)])
        assert engines.route(request(), PROMPT).client is again  # which hangs but is not lost
        again.close()
        engines.clients[0] = lives
        engines.clients[1].is_lost = False
        assert engines.problem() is None
        assert {at_of(engines, engines.route(request(), PROMPT)) for _ in range(4)} == {1}

    run(fakes, main)


def test_the_shortest_context_holds_for_all(fakes: list[FakeEngine]) -> None:
    async def main(engines: Engines) -> None:
        client = engines.clients[1]
        client.ready = replace(client.ready, max_model_tokens=99)
        assert engines.ready.max_model_tokens == 99

    run(fakes, main)


def test_with_one_engine_nothing_is_chosen(fakes: list[FakeEngine]) -> None:
    async def main(engines: Engines) -> None:
        assert type(engines) is Engines
        route = engines.route(request(user="me"), PROMPT)
        assert route is engines.route(request(), PROMPT) and type(route) is Route
        route.sent()
        route.done(None)

    run(fakes[:1], main)
