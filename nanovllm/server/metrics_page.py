"""GET /metrics: what all API processes of a server have counted, whichever of them is asked.

Each tells the others on a Unix socket beside the engines'. Who scrapes a server may meet another
process each time: counters that were one process's would seem to fall.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import msgspec

from nanovllm.server.asgi import Scope, Writer
from nanovllm.server.engines import Engines
from nanovllm.server.metrics import HttpCounts, Samples, counted, render

METRICS_TEXT = b"text/plain; version=0.0.4; charset=utf-8"
ANSWER_S = 1.0  # what another process may take; then what it told last has to do


class MetricsPage:
    def __init__(
        self, engines: Engines, counts: HttpCounts, folder: Path, worker: int, num_workers: int
    ) -> None:
        """`folder`: where the server's sockets are."""
        self._engines = engines
        self._counts = counts
        self._paths = [folder / f"{at}.api" for at in range(num_workers)]
        self._worker = worker
        self._server: asyncio.Server | None = None  # of the other processes
        self._told: dict[int, Samples] = {}  # by the other processes' numbers, what each told last

    async def listen(self) -> None:
        """Answer the other processes from now on, if there are any."""
        if len(self._paths) > 1:
            self._server = await asyncio.start_unix_server(self._tell, self._paths[self._worker])

    async def __call__(self, scope: Scope, writer: Writer) -> None:
        others = (at for at in range(len(self._paths)) if at != self._worker)
        await asyncio.gather(*map(self._ask, others))
        page = render(self._engines.seen(), [self._counted(), *self._told.values()])
        writer.respond(200, METRICS_TEXT, page, [])

    def _counted(self) -> Samples:
        worker = f'worker="{self._worker}"' if len(self._paths) > 1 else ""
        num_tasks = len(asyncio.all_tasks())
        return counted(self._engines.seen(), self._counts, num_tasks, worker)

    async def _tell(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(msgspec.msgpack.encode(self._counted()))
        writer.close()

    async def _ask(self, worker: int) -> None:
        with suppress(OSError, TimeoutError, msgspec.DecodeError):
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(self._paths[worker])
                try:
                    heard = await reader.read()
                finally:
                    writer.close()
                self._told[worker] = msgspec.msgpack.decode(heard, type=Samples)
