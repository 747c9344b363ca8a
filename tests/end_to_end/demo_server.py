"""`nanovllm serve` as a separate process."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from tests.forks import with_server_packages

if TYPE_CHECKING:
    import openai  # which may be missing on machines with GPUs

THINK = {"chat_template_kwargs": {"enable_thinking": True}}


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)  # of its output

    def client(self) -> openai.OpenAI:
        import openai

        return openai.OpenAI(**self._client_options())

    def async_client(self) -> openai.AsyncOpenAI:
        import openai

        return openai.AsyncOpenAI(**self._client_options())

    def _client_options(self) -> dict[str, Any]:
        return dict(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics").text
        found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
        assert found, f"no metric {name}"
        return float(found.group(1))

    def children(self) -> dict[int, str]:
        listing = subprocess.run(
            ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(self.process.pid)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        return {int(line.split()[0]): line for line in listing.splitlines()}

    def engine_pid(self) -> int:
        """Return the id of the first engine of a server that is ready."""
        return min(pid for pid in self.children() if name_of(pid).startswith("nanovllm-engin"))

    def stop(self) -> int:
        """Terminate the server and return its exit code."""
        self.process.terminate()
        return self.process.wait(30)

    def abort(self) -> None:
        """Abort all processes of the server, which print the stacks of their threads to `lines`."""
        with suppress(ProcessLookupError):
            for pid in [*self.children(), self.process.pid]:
                resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
                os.kill(pid, signal.SIGABRT)


def name_of(pid: int) -> str:
    """Return the name of a process that `ps` shows, or "" if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def has_left(pid: int) -> bool:
    """Return True if a process has ended. It may not have been reaped, if its parent ended."""
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


def asked(text: str, **more: Any) -> dict[str, Any]:
    """Return the arguments of a chat completion for the openai client."""
    return {"model": "demo", "messages": [{"role": "user", "content": text}], **more}


def command_of(*arguments: str, constants: dict[str, float] | None = None) -> list[str]:
    """Return the command of a server on a free port. `constants`: those changed, by full name."""
    changed = ["nanovllm"]
    if constants:
        changed = ["tests.end_to_end.with_constants", json.dumps(constants)]
    return [sys.executable, "-m", *changed, "serve", "--port", "0", *arguments]


def start(
    *arguments: str,
    limit_s: float = 300.0,
    environment: dict[str, str] | None = None,
    constants: dict[str, float] | None = None,
    is_fork: bool = True,
) -> Server:
    """Start `nanovllm serve` and wait until it is ready.

    It starts as it does for a user, but for `is_fork`: its processes then have third-party packages
    imported (`tests.forks`), which saves 4 of 6 s.

    Raise AssertionError, with the log, if it exits or is not ready in time.
    """
    command = command_of(*arguments, constants=constants)
    variables = {**os.environ, "PYTHONFAULTHANDLER": "1", **(environment or {})}
    popen = with_server_packages().popen if is_fork else subprocess.Popen
    process = popen(
        command, stdout=subprocess.PIPE, text=True, stderr=subprocess.STDOUT, env=variables
    )
    assert process.stdout is not None
    server = Server(process)
    late = threading.Timer(limit_s, server.abort)
    late.start()
    for line in process.stdout:
        server.lines.append(line)
        if found := re.search(r"is served at (http://\S+)", line):
            late.cancel()
            # Go on reading, or its last lines would wait a second for a reader.
            rest = threading.Thread(target=server.lines.extend, args=(process.stdout,), daemon=True)
            rest.start()
            server.url = found.group(1)
            return server
    late.cancel()
    raise AssertionError(f"no server: {''.join(server.lines)}")
