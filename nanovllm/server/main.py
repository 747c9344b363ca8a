"""The API process: connect to the engine, serve HTTP, drain on SIGTERM.

Knows neither who started it nor what the routes are.
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
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn
import uvloop

from nanovllm.config import Config, Server as ServerConfig
from nanovllm.log import fields
from nanovllm.server.access import Access
from nanovllm.server.app import App
from nanovllm.server.connection import Connection
from nanovllm.server.cors import Cors
from nanovllm.server.engines import Engines
from nanovllm.server.large import LargeBodies
from nanovllm.server.metrics import HttpCounts
from nanovllm.server.metrics_page import MetricsPage
from nanovllm.server.served import Served

log = logging.getLogger("server")
SWITCH_S = 0.001  # how long a thread that renders may keep the event loop waiting
NUM_THREADS = 4  # prompts rendered and tokenised at once
BACKLOG = 2048
MOST_FILES = 65_536  # open at once, which connections are, if the system allows so many
KEEP_ALIVE_S = 75  # idle connections; above the minute for which proxies keep theirs
LAST_WRITES_S = 1  # for what is still in socket buffers at the very end
SAME_SIGNAL_S = 0.5  # one that goes to a whole group comes again from the supervisor


def run(
    config: Config,
    engine_paths: Sequence[str],
    worker: int,
    sock: socket.socket,
    ready: Callable[[], None],
    hear: Callable[[Callable[[int, float], object]], None] = lambda _: None,
    first_life: bool = True,
) -> None:
    """Serve until SIGTERM or SIGINT. `sock`: listens already.

    `ready` is called once requests are accepted, `hear` with what is to be called, from any
    thread, with the number of an engine that was lost, and when (monotonic). `first_life`: as of
    Engines.connect. Raises ConfigError if the model's files are broken, EngineLostError if an
    engine dies before all are ready.
    """

    async def serve() -> None:
        engines = await Engines.connect(engine_paths, config.recipe, first_life)
        loop = asyncio.get_running_loop()
        hear(lambda *lost: loop.call_soon_threadsafe(engines.end, *lost))
        sys.setswitchinterval(SWITCH_S)
        served, counts = Served(config, engines.ready), HttpCounts()
        for warning in served.warnings() if worker == 0 else ():
            log.warning(warning)
        with (
            ThreadPoolExecutor(NUM_THREADS, "prompt") as threads,
            LargeBodies(config, engines.ready) as large,
        ):
            folder, settings = Path(engine_paths[0]).parent, config.recipe.server
            metrics = MetricsPage(engines, counts, folder, worker, settings.workers)
            await metrics.listen()
            access = Access(settings, bound=sock.getsockname()[0])
            app = App(engines, served, settings, counts, metrics, threads, large, access)
            gc.collect()
            gc.freeze()  # the vocabulary's objects are never garbage; do not visit them again
            server = DrainingServer(app, settings, counts, ready)
            log.info("ready %s", fields(worker=worker, model=served.name))
            await server.serve([sock])
            level = logging.WARNING if server.num_cut else logging.INFO
            log.log(level, "stopped %s", fields(worker=worker, cut=server.num_cut))

    with suppress(ValueError, OSError):  # most shells say 1,024: who comes beyond is hung up on
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MOST_FILES)), hard))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


class DrainingServer(uvicorn.Server):
    """A signal ends the intake; the server ends after the last request, or after server.shutdown_s.

    A second signal ends that time. `num_cut` counts the answers that were ended early.
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
        self._is_logged = False  # that it drains
        self.num_cut = 0  # requests whose answers were ended before they were whole

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Those that whoever started us did not make us ignore."""
        kinds = (signal.SIGTERM, signal.SIGINT)
        heard = [kind for kind in kinds if signal.getsignal(kind) is not signal.SIG_IGN]
        before = {kind: signal.signal(kind, self.handle_exit) for kind in heard}
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
        """Answers uvicorn, which asks ten times a second whether to stop."""
        now = time.monotonic()
        for connection in list(self.server_state.connections):
            cast(Connection, connection).look_after(now)
        if self._deadline is not None:
            if not self._is_logged:
                self._is_logged = True
                log.info("draining %s", fields(open=self._app.num_open, limit_s=self._shutdown_s))
            if is_late := now >= self._deadline:
                self.num_cut += self._app.end_all()
                await asyncio.sleep(0)  # they answer now
            if is_late or self._app.is_idle:
                return True
        return await super().on_tick(counter)
