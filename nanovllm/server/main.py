"""API process: connect to the engines, serve HTTP, drain on SIGTERM.

Independent of the parent process and of the routes.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn
import uvloop

from nanovllm.config import Config, Server as ServerConfig
from nanovllm.log import fields
from nanovllm.own_process import set_limit
from nanovllm.server.access import Access
from nanovllm.server.adapters import RuntimeAdapters
from nanovllm.server.app import App
from nanovllm.server.connection import Connection
from nanovllm.server.cors import Cors
from nanovllm.server.engines import Engines
from nanovllm.server.large import LargeBodies
from nanovllm.server.metrics import HttpCounts
from nanovllm.server.metrics_page import MetricsPage
from nanovllm.server.served import Served

log = logging.getLogger("server")
SWITCH_S = 0.001  # longest time that a rendering thread may block the event loop, in seconds
NUM_THREADS = 4  # prompts rendered and tokenised at once
BACKLOG = 2048
MOST_FILES = 65_536  # open files, which include connections; capped by the system's hard limit
KEEP_ALIVE_S = 75  # seconds for idle connections; more than the minute that is usual for proxies
LAST_WRITES_S = 1  # seconds to flush socket buffers at the end
SAME_SIGNAL_S = 0.5  # seconds; the supervisor forwards a signal that the whole group gets, too


def run(
    config: Config,
    engine_paths: Sequence[str],
    worker: int,
    socks: Sequence[socket.socket],
    ready: Callable[[], None],
    on_engine_lost: Callable[[Callable[[int, float], object]], None] = lambda _: None,
    first_life: bool = True,
) -> None:
    """Serve until SIGTERM or SIGINT on listening sockets: that of the API, then that of metrics.

    `ready` is called once requests are accepted. `on_engine_lost` registers a callback, which gets
    the number of a lost engine and the monotonic time of the loss, from any thread. `first_life` is
    explained at `Engines.connect`. Raise ConfigError if the model's files are broken, and
    EngineLostError if an engine exits before all are ready.
    """

    async def serve() -> None:
        engines = await Engines.connect(engine_paths, config.recipe, first_life)
        event_loop = cast(Any, asyncio.get_running_loop())
        on_engine_lost(partial(event_loop.call_soon_threadsafe, engines.end))
        sys.setswitchinterval(SWITCH_S)
        served, counts = served_model(config, engines, worker), HttpCounts()
        with (
            ThreadPoolExecutor(NUM_THREADS, "prompt") as threads,
            LargeBodies(config, engines.ready) as large,
        ):
            settings = config.recipe.server
            access = access_of(settings, socks)
            metrics = MetricsPage(
                engines=engines,
                counts=counts,
                folder=Path(engine_paths[0]).parent,
                worker=worker,
                num_workers=settings.workers,
                summed=access.opens_metrics,
            )
            await metrics.listen()
            app = App(
                engines=engines,
                served=served,
                config=settings,
                counts=counts,
                metrics=metrics,
                threads=threads,
                large=large,
                adapters=runtime_adapters(config, engines, served, large),
                access=access,
            )
            gc.collect()
            gc.freeze()  # the vocabulary's objects are never garbage
            server = DrainingServer(app, settings, counts, ready)
            log.info("ready %s", fields(worker=worker, model=served.name))
            await server.serve(list(socks))
            level = logging.WARNING if server.num_cut else logging.INFO
            log.log(level, "stopped %s", fields(worker=worker, cut=server.num_cut))

    _raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


def served_model(config: Config, engines: Engines, worker: int) -> Served:
    """Return what is served. The first API process also logs the warnings about it."""
    served = Served(config, engines.ready)
    for warning in served.warnings() if worker == 0 else ():
        log.warning(warning)
    return served


def access_of(settings: ServerConfig, socks: Sequence[socket.socket]) -> Access:
    """Return the checks of a server that listens on one socket, or on two."""
    bound, *further = [sock.getsockname() for sock in socks]
    return Access(settings, bound[0], further[0][1] if further else None)


def runtime_adapters(
    config: Config, engines: Engines, served: Served, large: LargeBodies
) -> RuntimeAdapters | None:
    """Return the changes of adapters, or None if the recipe does not allow them.

    The adapters of `served`, which change, are also those of engines and large bodies.
    """
    large.name(served.adapters)
    engines.adapters = served.adapters
    options = config.recipe.adapters
    if options is None or not options.runtime:
        return None
    return RuntimeAdapters(options, engines, served)


def _raise_file_limit() -> None:
    """Allow `MOST_FILES` open files, since the usual 1,024 would limit connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        set_limit(resource.RLIMIT_NOFILE, max(soft, MOST_FILES))


class DrainingServer(uvicorn.Server):
    """Server that stops accepting requests on a signal and exits after the last answer.

    It exits at the latest `server.shutdown_s` after the signal, or at a second signal.
    """

    def __init__(
        self, app: App, settings: ServerConfig, counts: HttpCounts, ready: Callable[[], None]
    ) -> None:
        super().__init__(
            uvicorn.Config(
                Cors(app, app.access),
                backlog=BACKLOG,
                http=cast(Any, partial(Connection, settings, counts, app.refusals)),
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                log_level="warning",
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=LAST_WRITES_S,
            )
        )
        self._app = app
        self._shutdown_s = settings.shutdown_s
        self._ready = ready
        self._signalled = 0.0
        self._deadline: float | None = None
        self._is_logged = False  # the log line about draining has been written
        self.num_cut = 0  # requests whose answers were cut off

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT, except those that the parent process set to be ignored."""
        kinds = (signal.SIGTERM, signal.SIGINT)
        handled = [kind for kind in kinds if signal.getsignal(kind) is not signal.SIG_IGN]
        before = {kind: signal.signal(kind, self.handle_exit) for kind in handled}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._deadline is None:
            self._signalled = now
            self._deadline = now + self._shutdown_s
            self._app.is_draining = True
        elif now > self._signalled + SAME_SIGNAL_S:
            self._deadline = now
            self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Return True if the server must stop. uvicorn calls this ten times a second."""
        now = time.monotonic()
        for connection in list(self.server_state.connections):
            cast(Connection, connection).enforce_limits(now)
        if self._deadline is not None:
            if not self._is_logged:
                self._is_logged = True
                log.info("draining %s", fields(open=self._app.num_open, limit_s=self._shutdown_s))
            if is_late := now >= self._deadline:
                self.num_cut += self._app.end_all()
                await asyncio.sleep(0)  # lets the ended requests write their answers
            if is_late or self._app.is_idle:
                return True
        return await super().on_tick(counter)
