"""Recorder of the functions that a process enters while a window is open.

The window is the first byte of the file `window` in the folder, mapped into every process:
0 closed, 1 open. A process writes what it recorded to `PID.json` when it ends.
"""

from __future__ import annotations

import atexit
import json
import mmap
import os
import sys
import threading
from multiprocessing import current_process
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = f"{Path(__file__).parents[3] / 'nanovllm'}{os.sep}"
NOT_FUNCTIONS = ("<module>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>")


class Recorder:
    """Functions of nanovllm in the order of their first call. Lambdas and the like do not count."""

    def __init__(self, folder: str) -> None:
        with open(Path(folder, "window"), "rb") as file:
            self._window = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
        self._path = Path(folder, f"{os.getpid()}.json")
        self._is_ours: dict[CodeType, bool] = {}
        self._functions: dict[str, None] = {}

    def on_call(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if code not in self._is_ours:
            self._is_ours[code] = code.co_filename.startswith(PACKAGE)
        if not self._is_ours[code]:
            return
        if self._window[0]:
            name = code.co_qualname
            if not name.endswith(NOT_FUNCTIONS):
                file = code.co_filename.removeprefix(PACKAGE)
                self._functions.setdefault(f"{file}:{name}")

    def write(self) -> None:
        if self._functions:
            found = {
                "process": current_process().name,
                "functions": list(self._functions),
            }
            self._path.write_text(json.dumps(found))


def record_this_process(folder: str) -> None:
    """Trace all threads from now on. The record is written at exit, also at `os._exit`."""
    recorder = Recorder(folder)
    threading.settrace(recorder.on_call)
    sys.settrace(recorder.on_call)
    atexit.register(recorder.write)
    exit_at_once = os._exit

    def write_and_exit(code: int) -> None:
        recorder.write()
        exit_at_once(code)

    os._exit = write_and_exit  # type: ignore[assignment]
