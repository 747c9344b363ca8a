"""vllm-router as a separate process, started as a user starts it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import IO

import httpx

IS_INSTALLED = find_spec("vllm_router") is not None


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


@dataclass
class Router:
    process: subprocess.Popen[str]
    url: str
    lines: list[str] = field(default_factory=list)  # of its output

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def start_router(*arguments: str, key: str | None = None) -> Router:
    """Start the router and wait until it accepts requests. `key` is that of the servers."""
    port = free_port()
    command = [
        sys.executable, "-m", "vllm_router.launch_router", "--host", "127.0.0.1",
        "--port", str(port), "--prometheus-port", str(free_port()),
        "--worker-startup-check-interval", "1", *arguments,
    ]  # fmt: skip
    variables = {k: v for k, v in os.environ.items() if k != "OPENAI_API_KEY"}
    variables |= {} if key is None else {"OPENAI_API_KEY": key}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables
    )
    router = Router(process, f"http://127.0.0.1:{port}")
    assert process.stdout is not None
    threading.Thread(target=_read, args=(process.stdout, router.lines), daemon=True).start()
    deadline = time.monotonic() + 60
    while True:
        try:
            if httpx.get(f"{router.url}/health", timeout=5).status_code == 200:
                return router
        except httpx.TransportError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"no router: {''.join(router.lines)}")
        time.sleep(0.1)


def _read(output: IO[str], lines: list[str]) -> None:
    for line in output:
        lines.append(line)
