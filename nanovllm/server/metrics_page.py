"""GET /metrics: the counts of all API processes of a server, whichever of them answers.

Each sends its counts to the others on a Unix socket next to the engines'. Another process may
answer each scrape: counters of one process alone would seem to fall. For the same reason a process
that was restarted goes on with the counts of its former life, as the others know them.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import msgspec

from nanovllm.ipc.channel import make_private
from nanovllm.server.asgi import Scope, Writer
from nanovllm.server.engines import Engines
from nanovllm.server.metrics import HttpCounts, Samples, counted, render

METRICS_TEXT = b"text/plain; version=0.0.4; charset=utf-8"
ANSWER_S = 1.0  # of another process; after that its former answer has to do
CHECK_EVERY_S = 1.0  # whether the socket's file is still there: a cleaner of /tmp may remove it
Known = tuple[Samples, dict[int, Samples]]  # of a process; of the others, as it knows them


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
        self._told: dict[int, Samples] = {}  # the latest counts of the other processes, by number
        self._before: Samples = {}  # counters of this process's former lives
        self._watching: asyncio.Task[None] | None = None

    async def listen(self) -> None:
        """Answer the other processes from now on, if there are any."""
        if len(self._paths) > 1:
            known = await asyncio.gather(*map(self._ask, self._others()))
            for former in known:
                add_most(self._before, counters(former.get(self._worker, {})))
            await self._bind()
            self._watching = asyncio.get_running_loop().create_task(self._watch_file())

    async def _bind(self) -> None:
        self._server = await asyncio.start_unix_server(self._tell, self._paths[self._worker])

    async def _watch_file(self) -> None:
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            if not self._paths[self._worker].exists():
                with suppress(OSError):  # tried again a second later
                    make_private(str(self._paths[self._worker].parent))
                    await self._bind()

    def _others(self) -> list[int]:
        return [at for at in range(len(self._paths)) if at != self._worker]

    async def __call__(self, scope: Scope, writer: Writer) -> None:
        await asyncio.gather(*map(self._ask, self._others()))
        page = render(self._engines.seen(), [self._counted(), *self._told.values()])
        writer.respond(200, METRICS_TEXT, page, [])

    def _counted(self) -> Samples:
        worker = f'worker="{self._worker}"' if len(self._paths) > 1 else ""
        num_tasks = len(asyncio.all_tasks())
        samples = counted(self._engines.seen(), self._counts, num_tasks, worker)
        for name, values in self._before.items():
            series = samples.setdefault(name, {})
            series.update({key: series.get(key, 0) + value for key, value in values.items()})
        return samples

    async def _tell(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(msgspec.msgpack.encode((self._counted(), self._told)))
        writer.close()

    async def _ask(self, worker: int) -> dict[int, Samples]:
        """Take the counts of another process, and return what it knows of others."""
        known: dict[int, Samples] = {}
        with suppress(OSError, TimeoutError, msgspec.DecodeError):
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(self._paths[worker])
                try:
                    heard = await reader.read()
                finally:
                    writer.close()
                self._told[worker], known = msgspec.msgpack.decode(heard, type=Known)
        return known


def counters(samples: Samples) -> Samples:
    """Return the counters and histograms of a process; not what the system counts of it."""
    return {
        name: values
        for name, values in samples.items()
        if not name.startswith("process_")
        and (name.endswith("_total") or next(iter(values), "").startswith("_bucket"))
    }


def add_most(samples: Samples, more: Samples) -> None:
    """Take the greater of each value: of what two processes know, that is the newer."""
    for name, values in more.items():
        series = samples.setdefault(name, {})
        series.update({key: max(series.get(key, 0), value) for key, value in values.items()})
