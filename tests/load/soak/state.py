"""Resources that a server holds, from its metrics and /proc, and a check that they are freed."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import httpx
from msgspec import Struct

from nanovllm.bench.started import descendants

MIB = 2**20
LINE = re.compile(r"^([a-z_:]+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
NOTHING_HELD = (  # gauges that are 0 without requests
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "nanovllm:grammar_compilations_waiting",
    "nanovllm:grammar_matchers",
    "nanovllm:open_choices",
)
AS_BEFORE = ("nanovllm:asyncio_tasks", "process_open_fds")
CACHE = "nanovllm:grammar_cache_bytes"
GROWTH, GROWTH_MIB = 0.15, 100.0  # allowed growth of a process's resident memory; the larger counts


class Held(Struct, frozen=True):
    """Resources of all processes of one name."""

    processes: int
    descriptors: int
    threads: int
    rss_mib: float


class State(Struct, frozen=True):
    held: dict[str, Held]  # by process name; empty without /proc; only the API without a process id
    gauges: dict[str, float]

    def not_back(self, before: State) -> list[str]:
        """Return descriptions of the resources held beyond `before`."""
        found = [f"{name} is {value:g}" for name, value in self.values(NOTHING_HELD) if value]
        for name, value in self.values(AS_BEFORE):
            if value > before.gauges[name]:
                found.append(f"{name} is {value:g}, was {before.gauges[name]:g}")
        # The growth of the grammar cache is bounded and therefore allowed.
        cached = (self.gauges[CACHE] - before.gauges[CACHE]) / MIB
        for name, held in self.held.items():
            was = before.held.get(name, Held(0, 0, 0, 0.0))
            for what in ("processes", "descriptors", "threads"):
                if (now := getattr(held, what)) > getattr(was, what):
                    found.append(f"{name} has {now} {what}, had {getattr(was, what)}")
            most = max((1 + GROWTH) * was.rss_mib, was.rss_mib + GROWTH_MIB)
            if held.rss_mib > most + ("engine" in name) * max(0.0, cached):
                found.append(f"{name} has {held.rss_mib:.0f} MiB, had {was.rss_mib:.0f}")
        return found

    def values(self, names: tuple[str, ...]) -> list[tuple[str, float]]:
        return [(name, self.gauges[name]) for name in names]


async def state(url: str, supervisor: int | None) -> State:
    """Return the server's state. `supervisor` is the process id of `nanovllm serve`.

    With None, use only the metrics. Raise httpx.HTTPError, and KeyError for a missing metric.
    """
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
        page = (await http.get("/metrics")).text
    told = {name: float(value) for name, value in LINE.findall(page)}
    gauges = {name: told[name] for name in (*NOTHING_HELD, *AS_BEFORE, CACHE)}
    if supervisor is None:
        rss_mib = told["process_resident_memory_bytes"] / MIB
        return State({"nanovllm-api": Held(1, int(told["process_open_fds"]), 0, rss_mib)}, gauges)
    return State(held_by(supervisor), gauges)


def held_by(supervisor: int) -> dict[str, Held]:
    """Return the resources of a process and its descendants, by name. Return {} without /proc."""
    found: dict[str, Held] = {}
    for pid in (supervisor, *descendants(supervisor)):
        with suppress(OSError):
            name, one = one_process(Path("/proc", str(pid)))
            was = found.get(name, Held(0, 0, 0, 0.0))
            found[name] = Held(
                was.processes + 1,
                was.descriptors + one.descriptors,
                was.threads + one.threads,
                was.rss_mib + one.rss_mib,
            )
    return found


def one_process(folder: Path) -> tuple[str, Held]:
    """Return the process's name and resources. Raise OSError if it has ended."""
    name = (folder / "comm").read_text().strip()
    pages = int((folder / "statm").read_text().split()[1])
    threads = len(os.listdir(folder / "task"))
    rss_mib = pages * os.sysconf("SC_PAGE_SIZE") / MIB
    return name, Held(1, len(os.listdir(folder / "fd")), threads, rss_mib)


def slope_mib_per_hour(samples: list[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line through the last two thirds of (second, MiB)."""
    late = [(at, size) for at, size in samples if at >= samples[-1][0] / 3]
    mean_at = sum(at for at, _ in late) / len(late)
    mean = sum(size for _, size in late) / len(late)
    spread = sum((at - mean_at) ** 2 for at, _ in late)
    if not spread:
        return 0.0
    return 3600 * sum((at - mean_at) * (size - mean) for at, size in late) / spread
