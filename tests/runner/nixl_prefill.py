"""A prefill engine as a process of its own, which tests freeze and kill.

The argument is the model's folder. The first line of its input is the port to listen on, and it
writes READY with the port. For each further line, a prompt in JSON, it writes TICKET and a ticket.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

from tests.models.tiny import config_of
from tests.runner.test_roles import spec_of, with_role
from tests.whole_engine import WholeEngine

ROOT = Path(__file__).parents[2]
SIZES = dict(slots=4, step_tokens=24, max_tokens=90)


class PrefillProcess:
    """The other process, as a test drives it."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.runner.nixl_prefill", str(folder)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def listen(self, port: int = 0) -> int:
        """Start the engine. Return the port on which it listens."""
        self._write(str(port))
        return int(self._answer("READY"))

    def ticket(self, prompt: list[int]) -> str:
        self._write(json.dumps(prompt))
        return self._answer("TICKET")

    def freeze(self) -> None:
        """Stop all threads of the process, and wait until they have stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _write(self, line: str) -> None:
        stdin: IO[str] | None = self.process.stdin
        assert stdin is not None
        stdin.write(line + "\n")
        stdin.flush()

    def _answer(self, kind: str) -> str:
        """Return the next line of a kind. Libraries may write lines of their own."""
        stdout: IO[str] | None = self.process.stdout
        assert stdout is not None
        for line in stdout:
            if line.startswith(kind):
                return line.split()[1]
        raise AssertionError(f"the prefill process has ended: {self.process.wait()}")


def main(folder: str) -> None:
    port = int(sys.stdin.readline())
    config = with_role(config_of(Path(folder)), "prefill", f"127.0.0.1:{port}", backend="nixl")
    p = WholeEngine(config, pages=64, **SIZES)
    lender = p.runner.lender
    assert lender is not None
    write("READY", lender.server.address[1])
    for i, line in enumerate(sys.stdin):
        p.loop.handle(spec_of(i, json.loads(line), 1, lends=True))
        p.run()
        write("TICKET", json.loads(p.handovers[i])["nanovllm_ticket"])


def write(kind: str, value: object) -> None:
    sys.stdout.write(f"{kind} {value}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
