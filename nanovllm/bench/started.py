"""A server of our own for one run, started as a user starts it.

Knows neither what a server does nor what will be asked of it.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx
from msgspec import Struct

from nanovllm.config import ConfigError

POLL_S = 0.05
READY_S = 3600.0  # the largest checkpoints load for many minutes
STOP_S = 60.0


class NotStarted(ConfigError):
    """The server ended before it was ready."""


class Started(Struct, frozen=True):
    pid: int
    ready_s: float  # from start to ready


@contextmanager
def started(command: Sequence[str], url: str) -> Iterator[Started]:
    """Run a server until the block ends.

    Raises NotStarted with the server's last lines when it does not come up.
    """
    if _is_healthy(url):
        raise ConfigError(f"something already listens at {url}; stop it, or set server.port")
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        begin = time.perf_counter()
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while not _is_healthy(url):
                if server.poll() is not None or time.perf_counter() - begin > READY_S:
                    output.seek(0)
                    tail = "".join(output.readlines()[-5:]).strip()
                    raise NotStarted(f"the server did not come up: {tail}")
                time.sleep(POLL_S)
            yield Started(server.pid, time.perf_counter() - begin)
        finally:
            server.terminate()
            try:
                server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
