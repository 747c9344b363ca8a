"""Connections to all engines of one API process: choice of an engine, and health.

With one engine there is no choice and no bookkeeping. With several, a lost engine is reconnected at
the same path as soon as it is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from msgspec.structs import replace

from nanovllm.config import Recipe
from nanovllm.ipc.client import EngineClient, EngineLostError
from nanovllm.log import fields
from nanovllm.server.errors import ApiError
from nanovllm.server.metrics import Metrics, Seen
from nanovllm.server.protocol import ChatRequest
from nanovllm.server.router import RequestRouter, Routed
from nanovllm.server.template import Prompt
from nanovllm.wire import LoadAdapter, Ready, UnloadAdapter

log = logging.getLogger("server")
RETRY_S = 0.2
SETTLE_S = 2.0  # seconds that a restarted API process waits for further engines after the first
CHANGED = (
    "its files are not those that another engine has read; load it again, or restart the server"
)
SILENT_S = 2.0  # seconds without a sign of life after which other engines are preferred


class Route:
    """Destination of one request, and the metrics that count it."""

    def __init__(self, client: EngineClient, metrics: Metrics) -> None:
        self.client = client
        self.metrics = metrics

    def sent(self) -> None:
        """Record that the engine has the request."""

    def done(self, num_cached: int | None) -> None:
        """Record that the request is over. `num_cached` is None if it never started."""


class ChosenRoute(Route):
    """Route to one of several engines. Reports the request's progress to the router."""

    def __init__(
        self, client: EngineClient, metrics: Metrics, router: RequestRouter, routed: Routed
    ) -> None:
        super().__init__(client, metrics)
        self._router = router
        self._routed = routed

    def sent(self) -> None:
        self._router.sent(self._routed)

    def done(self, num_cached: int | None) -> None:
        self._router.done(self._routed, num_cached)


class Engines:
    """All engines; connected from the start."""

    def __init__(self, clients: Sequence[EngineClient], stall_s: float) -> None:
        """`stall_s` limits silence, and how much longer than any earlier step a step may take."""
        self.clients = list(clients)
        self.metrics = [Metrics() for _ in clients]
        self.adapters: dict[str, str] = {}  # which an engine that restarts must load
        self._stall_s = stall_s
        self._route = Route(self.clients[0], self.metrics[0])

    @classmethod
    async def connect(
        cls, paths: Sequence[str], recipe: Recipe, first_life: bool = True
    ) -> Engines:
        """Connect to all engines and wait until they are ready.

        A restarted API process (`first_life` False) waits for one engine only, since others may be
        down. Raise EngineLostError if an engine exits before it is ready.
        """
        if len(paths) > 1:
            return await Replicas.connect(paths, recipe, first_life)
        gone = partial(log.error, "lost the connection to the engine")
        return cls([await EngineClient.connect(paths[0], gone)], recipe.server.stall_s)

    @property
    def ready(self) -> Ready:
        """The properties that hold for every engine."""
        readies = [client.ready for client in self.clients]
        return replace(readies[0], max_model_tokens=min(r.max_model_tokens for r in readies))

    def route(self, request: ChatRequest, prompt: Prompt, adapter: str = "") -> Route:
        """Return the engine for a request. The caller reports `sent` and `done` to it."""
        return self._route

    def decline(self, ticket: str) -> None:
        """Let the prefill server release the pages of a ticket that no engine will receive.

        Each engine of a decode server is connected to all prefill servers, so one suffices.
        """
        client = next((client for client in self.clients if not client.is_lost), self.clients[0])
        client.decline(ticket)

    def end(self, at: int, when: float) -> None:
        """Close the connection to engine `at`, which was lost at the time `when` (monotonic).

        A late report of an earlier loss does not affect an engine that became ready after `when`.
        """
        if not self.clients[at].is_lost and self.clients[at].ready_at < when:
            self.clients[at].cut()

    def problem(self) -> ApiError | None:
        """Return the reason why no engine can take a request, None if one can."""
        problems = [problem_of(client, self._stall_s) for client in self.clients]
        return None if None in problems else problems[0]

    def seen(self) -> list[Seen]:
        return [
            Seen(
                ready=client.ready,
                stats=None if client.is_lost else client.stats,
                metrics=metrics,
                step_age_s=client.step_age_s,
                num_open=client.num_open,
            )
            for client, metrics in zip(self.clients, self.metrics, strict=True)
        ]


def reusable_pages(ready: Ready) -> int:
    """Return the number of pages that an engine can keep for later prompts, on all its tiers."""
    return ready.num_pages + ready.tier_pages


class Replicas(Engines):
    """Several engines, each of which may exit and restart."""

    def __init__(
        self, clients: Sequence[EngineClient], paths: Sequence[str], recipe: Recipe
    ) -> None:
        super().__init__(clients, recipe.server.stall_s)
        self._paths = paths
        self._num_workers = recipe.server.workers
        self._connecting: set[asyncio.Task[None]] = set()
        ready = clients[0].ready
        self._router = RequestRouter(
            [reusable_pages(client.ready) if recipe.cache.prefix else 0 for client in clients],
            ready.page_tokens,
            prefill_weight=recipe.parallel.prefill_weight,
            load_weight=recipe.parallel.load_weight,
            first=ready.worker,
        )

    @classmethod
    async def connect(
        cls, paths: Sequence[str], recipe: Recipe, first_life: bool = True
    ) -> Replicas:
        replicas: list[Replicas] = []

        def lost(index: int) -> None:  # during startup the supervisor ends all engines
            if replicas:
                replicas[0].lost(index)

        waiting = [EngineClient.connect(path, partial(lost, at)) for at, path in enumerate(paths)]
        if first_life:
            replicas.append(cls(await asyncio.gather(*waiting), paths, recipe))
            await replicas[0]._compare_adapters()
            return replicas[0]
        tasks = [asyncio.ensure_future(one) for one in waiting]
        clients = await those_ready(tasks)
        ready = next(client for client in clients if client is not None).ready
        placeholders = [client or EngineClient.absent(ready) for client in clients]
        replicas.append(cls(placeholders, paths, recipe))
        await replicas[0]._compare_adapters()
        for at, (client, task) in enumerate(zip(clients, tasks, strict=True)):
            if client is None:
                replicas[0].connect_later(at, task)
            elif client.is_lost:
                replicas[0].lost(at)
        return replicas[0]

    def route(self, request: ChatRequest, prompt: Prompt, adapter: str = "") -> Route:
        loads: list[float | None] = [
            self._load(at) if self._serves(client, adapter) else None
            for at, client in enumerate(self.clients)
        ]
        brisk = [
            None if client.silent_s > SILENT_S else load
            for client, load in zip(self.clients, loads, strict=True)
        ]
        loads = brisk if any(load is not None for load in brisk) else loads
        if not any(load is not None for load in loads):
            return Route(self.clients[0], self.metrics[0])  # none can serve it: an error
        salt = request.cache_salt or ""
        owner = salt or request.user or ""
        routed = self._router.route(
            prompt.ids, salt=salt, owner=owner, loads=loads, adapter=adapter
        )
        at = routed.engine
        return ChosenRoute(self.clients[at], self.metrics[at], self._router, routed)

    def _serves(self, client: EngineClient, adapter: str) -> bool:
        has_adapter = not adapter or adapter in client.digests
        return has_adapter and problem_of(client, self._stall_s) is None

    def _load(self, at: int) -> int:
        """Return requests in flight: the engine's latest counts, corrected by our changes since.

        Decision: other API processes are assumed to have sent and finished since then the same
        number as this one. Otherwise all processes would fill the same gap when streams end
        together: four of them put 489 of 512 streams on one of two engines.
        """
        client = self.clients[at]
        stats = client.stats
        num_reported = stats.num_running + stats.num_waiting + stats.num_compiling
        num_changed = client.num_open - client.num_open_then
        return max(client.num_open, num_reported + self._num_workers * num_changed)

    def lost(self, at: int) -> None:
        log.error("lost the connection to engine %d", at)
        self._router.forget(at)
        again = EngineClient.connect(self._paths[at], partial(self.lost, at))
        self.connect_later(at, asyncio.ensure_future(again))

    def connect_later(self, at: int, connecting: asyncio.Task[EngineClient]) -> None:
        """Send requests to engine `at` once it is connected."""
        task = asyncio.get_running_loop().create_task(self._connect_later(at, connecting))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect_later(self, at: int, connecting: asyncio.Task[EngineClient]) -> None:
        while True:
            try:
                client = await connecting
            except EngineLostError:  # it exited while loading
                await asyncio.sleep(RETRY_S)
                again = EngineClient.connect(self._paths[at], partial(self.lost, at))
                connecting = asyncio.ensure_future(again)
                continue
            try:
                await self._load_adapters(at, client)
                await self._refuse_other_files(at, client)
            except EngineLostError:
                return  # `lost` has begun to connect again
            self.clients[at] = client
            log.info("reconnected to engine %d %s", at, fields(worker=client.ready.worker))
            return

    async def _load_adapters(self, at: int, client: EngineClient) -> None:
        """Give an engine the adapters that the others have now, which may change meanwhile.

        It has started with those of the recipe. Since then, a name may have got another folder.
        """
        has = dict(client.ready.adapters)
        while missing := [item for item in self.adapters.items() if has.get(item[0]) != item[1]]:
            name, folder = missing[0]
            message = LoadAdapter(client.new_id(), name, folder, replaces=True)
            if fault := await client.change(message):
                log.error("engine %d has no adapter %s: %s", at, name, fault)
                await client.change(UnloadAdapter(client.new_id(), name))
            has[name] = folder

    async def _compare_adapters(self) -> None:
        """Let all engines have the same files of each adapter, or not have it."""
        for at, client in enumerate(self.clients):
            with suppress(EngineLostError):
                await self._refuse_other_files(at, client)

    async def _refuse_other_files(self, at: int, client: EngineClient) -> None:
        """Unload adapters from engine `at` whose files are not those that another engine read.

        Files may be replaced while the server runs. Requests then go to the other engines.
        """
        others = [one for one in self.clients if one is not client and not one.is_lost]
        for name, digest in [*client.digests.items()]:
            expected = [one.digests[name] for one in others if name in one.digests]
            if expected and digest != expected[0]:
                log.error("engine %d has no adapter %s: %s", at, name, CHANGED)
                await client.change(UnloadAdapter(client.new_id(), name))


async def those_ready(tasks: Sequence[asyncio.Task[EngineClient]]) -> list[EngineClient | None]:
    """Return the clients of the engines that are ready SETTLE_S after the first, None for the
    others.

    The tasks of those others continue. Raise EngineLostError if all engines exit.
    """
    waiting = set(tasks)
    while waiting and not any(task.done() and not task.exception() for task in tasks):
        _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if waiting:
        await asyncio.wait(waiting, timeout=SETTLE_S)
    clients = [task.result() if task.done() and not task.exception() else None for task in tasks]
    if not any(clients):
        raise EngineLostError("all engines died while starting")
    return clients


def problem_of(client: EngineClient, stall_s: float) -> ApiError | None:
    if client.is_lost:
        return ApiError(503, "the server has lost its engine", code="unhealthy")
    if (silent_s := client.silent_s) > stall_s:
        text = f"the engine has not responded for {silent_s:.0f} s"
        return ApiError(503, text, code="stalled")
    if (late_s := client.late_s) > stall_s:
        text = f"the engine's step takes {late_s:.0f} s longer than any earlier one"
        return ApiError(503, text, code="stalled")
    return None
