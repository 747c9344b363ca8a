"""The API process: connect to the engine, serve HTTP, drain on SIGTERM.

Knows neither who started it nor what the routes are.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nanovllm.config import Config, Server as ServerConfig
from nanovllm.ipc.client import EngineClient
from nanovllm.log import fields
from nanovllm.server.app import App
from nanovllm.server.asgi import EXTENSION
from nanovllm.server.served import Served

log = logging.getLogger("server")
NUM_THREADS = 4  # prompts rendered and tokenised at once
BACKLOG = 2048
KEEP_ALIVE_S = 75  # idle connections; above the minute for which proxies keep theirs
LAST_WRITES_S = 1  # for what is still in socket buffers at the very end
NO_LIMIT = 2**31 - 1


def run(
    config: Config,
    engine_path: str,
    worker: int,
    sock: socket.socket | None = None,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGTERM or SIGINT. `sock`: listens already; None binds server.host and port.

    `ready` is called once requests are accepted. Raises ConfigError if the model's files are
    broken, EngineLostError if the engine dies before it is ready.
    """

    async def serve() -> None:
        client = await EngineClient.connect(engine_path, lambda: log.error("the engine is gone"))
        served = Served(config, client.ready)
        with ThreadPoolExecutor(NUM_THREADS, "prompt") as threads:
            app = App(client, served, config.recipe.server, threads)
            gc.collect()
            gc.freeze()  # the vocabulary's objects are never garbage; do not visit them again
            server = DrainingServer(app, config.recipe.server, ready)
            log.info("ready %s", fields(worker=worker, model=served.name))
            await server.serve(None if sock is None else [sock])
            log.info("stopped %s", fields(worker=worker))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


class Protocol(HttpToolsProtocol):
    """Never asks a writer to wait, and hands the connection to the application: asgi.Writer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.set_write_buffer_limits(high=NO_LIMIT)
        super().connection_made(transport)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: {"transport": self.transport}}


class DrainingServer(uvicorn.Server):
    """A signal ends the intake; the server goes when the last request has, or time is up."""

    def __init__(self, app: App, settings: ServerConfig, ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                backlog=BACKLOG,
                http=Protocol,
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
        self._deadline: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Repeated signals change nothing: a terminal's Ctrl-C and the supervisor both send one."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._shutdown_s
            self._app.is_draining = True

    async def on_tick(self, counter: int) -> bool:
        """uvicorn asks ten times a second whether to stop."""
        if self._deadline is not None:
            is_late = time.monotonic() >= self._deadline
            if is_late:
                self._app.end_replies()
            if is_late or not self._app.replies:
                return True
        return await super().on_tick(counter)
