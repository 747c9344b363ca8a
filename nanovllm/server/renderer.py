"""Client of the subprocess in `rendering.py`, for the threads that render prompts."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import weakref
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec

from nanovllm.server.render_task import Rendered, Task

MAX_WALL_S = 60.0  # seconds for one prompt on a busy machine
COMMAND = (
    "import sys; sys.path[:] = {path!r}; "
    "from nanovllm.server.rendering import work; work({descriptor})"
)


class Renderer:
    """Renderer of one prompt at a time. The subprocess starts on demand, again after it exited.

    Safe for concurrent use by threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def render(self, task: Task) -> Rendered:
        """Return the prompt or an error. Block until then."""
        body = msgspec.json.encode(task)
        with self._lock:
            for _ in range(2):
                child = self._child or _Child()
                self._child = child
                answer = child.answer(body, task.max_s)
                if answer is None or answer.error == "limit":
                    self._child = None
                    child.close()
                if answer is not None:
                    return answer
        return Rendered("the process that renders it exited", "limit")

    def close(self) -> None:
        """End the subprocess. The next prompt starts a new one."""
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.close()


class _Child:
    """A subprocess. It ends when its pipe is closed, and so with this process."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        descriptor = theirs.fileno()
        code = COMMAND.format(path=sys.path, descriptor=descriptor)
        command = [sys.executable, "-I", "-c", code]
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[descriptor]
            )
        self.close = weakref.finalize(self, _end, self._process, self._pipe)

    def answer(self, body: bytes, max_s: float) -> Rendered | None:
        """Return the answer, None if the subprocess ended for a reason that may not recur."""
        try:
            self._pipe.send_bytes(body)
            if not self._pipe.poll(MAX_WALL_S):
                return Rendered(f"it takes longer than {MAX_WALL_S:g} s", "limit")
            return msgspec.msgpack.decode(self._pipe.recv_bytes(), type=Rendered)
        except (EOFError, OSError):
            self._process.kill()
            if self._process.wait() == -signal.SIGXCPU:
                return Rendered(f"it takes longer than {max_s:g} s", "limit")
            return None


def _end(process: subprocess.Popen[bytes], pipe: Connection) -> None:
    pipe.close()
    process.kill()
    process.wait()
