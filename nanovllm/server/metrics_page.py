"""GET /metrics: the counts of all API processes, from any one of them.

Each process sends its counts to the others over a Unix socket next to those of the engines. Each
scrape may reach another process, so the counters of a single one would appear to fall. For the same
reason a restarted process continues from its earlier counts, which the others remember.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from nanovllm.ipc.channel import make_private
from nanovllm.server.asgi import Scope, Writer
from nanovllm.server.engines import Engines
from nanovllm.server.metrics import HttpCounts, Samples, counted, render

METRICS_TEXT = b"text/plain; version=0.0.4; charset=utf-8"
ANSWER_S = 1.0  # seconds for another process to answer; then its previous answer is used
CHECK_EVERY_S = 1.0  # seconds between checks for the socket's file, which /tmp cleaners may remove
Known = tuple[Samples, dict[int, Samples]]  # counts of a process, and those it has of the others


class MetricsPage:
    def __init__(
        self,
        engines: Engines,
        counts: HttpCounts,
        folder: Path,
        worker: int,
        num_workers: int,
        summed: Callable[[Scope], bool] = lambda _: False,
    ) -> None:
        """`folder` contains the server's sockets.

        Where `summed` returns True for a request, some gauges are sums over engines.
        """
        self._summed = summed
        self._engines = engines
        self._counts = counts
        self._paths = [folder / f"{at}.api" for at in range(num_workers)]
        self._worker = worker
        self._server: asyncio.Server | None = None  # for the other processes
        self._counts_of: dict[
            int, Samples
        ] = {}  # the latest counts of the other processes, by number
        self._before: Samples = {}  # counters of earlier lives of this process
        self._watching: asyncio.Task[None] | None = None

    async def listen(self) -> None:
        """Start to answer the other processes, if there are any."""
        if len(self._paths) > 1:
            known = await asyncio.gather(*map(self._fetch, self._others()))
            for former in known:
                add_most(self._before, counters(former.get(self._worker, {})))
            await self._bind()
            self._watching = asyncio.get_running_loop().create_task(self._watch_file())

    async def _bind(self) -> None:
        self._server = await asyncio.start_unix_server(self._answer, self._paths[self._worker])

    async def _watch_file(self) -> None:
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            if not self._paths[self._worker].exists():
                with suppress(OSError):  # retried a second later
                    make_private(str(self._paths[self._worker].parent))
                    await self._bind()

    def _others(self) -> list[int]:
        return [at for at in range(len(self._paths)) if at != self._worker]

    async def __call__(self, scope: Scope, writer: Writer) -> None:
        await asyncio.gather(*map(self._fetch, self._others()))
        processes = [self._counted(), *self._counts_of.values()]
        page = render(self._engines.seen(), processes, summed=self._summed(scope))
        writer.respond(200, METRICS_TEXT, page, [])

    def _counted(self) -> Samples:
        worker = f'worker="{self._worker}"' if len(self._paths) > 1 else ""
        num_tasks = len(asyncio.all_tasks())
        samples = counted(self._engines.seen(), self._counts, num_tasks, worker)
        for name, values in self._before.items():
            series = samples.setdefault(name, {})
            series.update({key: series.get(key, 0) + value for key, value in values.items()})
        return samples

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(msgspec.msgpack.encode((self._counted(), self._counts_of)))
        writer.close()

    async def _fetch(self, worker: int) -> dict[int, Samples]:
        """Fetch the counts of another process, and return those it has of the others."""
        known: dict[int, Samples] = {}
        with suppress(OSError, TimeoutError, msgspec.DecodeError):
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(self._paths[worker])
                try:
                    answer = await reader.read()
                finally:
                    writer.close()
                self._counts_of[worker], known = msgspec.msgpack.decode(answer, type=Known)
        return known


def counters(samples: Samples) -> Samples:
    """Return counters and histograms, without those that the system keeps for a process."""
    return {
        name: values
        for name, values in samples.items()
        if not name.startswith("process_")
        and (name.endswith("_total") or next(iter(values), "").startswith("_bucket"))
    }


def add_most(samples: Samples, more: Samples) -> None:
    """Take the greater of two values for each series. Counters only rise: it is the later one."""
    for name, values in more.items():
        series = samples.setdefault(name, {})
        series.update({key: max(series.get(key, 0), value) for key, value in values.items()})
