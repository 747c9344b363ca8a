"""A server for one run, started like by a user, and the processes below it.

The names of processes are those given by launch.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from msgspec import Struct

from nanovllm.config import ConfigError

POLL_S = 0.05
READY_S = 3600.0  # the largest checkpoints load for many minutes
STOP_S = 60.0
KINDS = {"Server": "nanovllm-api", "Engine": "nanovllm-engine"}
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class NotStarted(ConfigError):
    """The server ended before it was ready."""


class LiveServer(Struct, frozen=True):
    pid: int
    ready_s: float  # from start to ready


class Process(Struct, frozen=True):
    """One process below a supervisor."""

    name: str
    branch: str  # name of the supervisor's child that it descends from, or is
    cpu_s: float


@contextmanager
def started(command: Sequence[str], url: str) -> Iterator[LiveServer]:
    """Run a server until the block ends.

    Raise NotStarted with the server's last lines if it does not start.
    """
    # One client for all polls, since each new one reads all certificates for 50 ms of CPU time. It
    # keeps no connection to the server during the measurement.
    limits = httpx.Limits(max_keepalive_connections=0)
    with (
        httpx.Client(timeout=5.0, trust_env=False, limits=limits) as http,
        tempfile.TemporaryFile("w+", errors="replace") as output,
    ):
        if _is_healthy(http, url):
            raise ConfigError(
                f"another server already listens at {url}; stop it, or set server.port"
            )
        begin = time.perf_counter()
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while not _is_healthy(http, url):
                if server.poll() is not None or time.perf_counter() - begin > READY_S:
                    output.seek(0)
                    tail = "".join(output.readlines()[-5:]).strip()
                    raise NotStarted(f"the server did not come up: {tail}")
                time.sleep(POLL_S)
            yield LiveServer(server.pid, time.perf_counter() - begin)
        finally:
            stop(server)


def stop(server: subprocess.Popen[bytes]) -> None:
    """Terminate a server; kill it if it does not end within STOP_S."""
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(STOP_S)
    server.kill()
    server.wait()


def descendants(supervisor: int) -> dict[int, Process]:
    """Return the processes that a process started, by process id; {} without /proc."""
    processes: dict[int, tuple[int, str, int]] = {}  # parent, name and ticks by process id
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            head, _, tail = path.read_text().rpartition(") ")
            state = tail.split()  # from the third field of proc(5) on
            name = head.partition("(")[2]
            processes[int(path.parent.name)] = int(state[1]), name, int(state[11]) + int(state[12])
    below: dict[int, Process] = {}
    for pid, (parent, name, ticks) in processes.items():
        branch = name
        while parent != supervisor and parent in processes:
            parent, branch, _ = processes[parent]
        if parent == supervisor:
            below[pid] = Process(name, branch, ticks / TICKS_PER_S)
    return below


def cpu_s(supervisor: int) -> dict[str, float]:
    """Return the CPU time of a supervisor's descendants by kind; {} without /proc."""
    used: dict[str, float] = {}
    for process in descendants(supervisor).values():
        for kind, prefix in KINDS.items():
            if process.branch.startswith(prefix):
                used[kind] = used.get(kind, 0.0) + process.cpu_s
    return used


def cpu_facts(
    before: Mapping[str, float], after: Mapping[str, float], tokens: int
) -> dict[str, float]:
    """Return the table's lines of CPU time per token of a run."""
    return {
        f"{kind} CPU us per token": 1e6 * (seconds - before.get(kind, 0.0)) / tokens
        for kind, seconds in after.items()
        if tokens
    }


def _is_healthy(http: httpx.Client, url: str) -> bool:
    try:
        return http.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False
