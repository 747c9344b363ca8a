"""Tests in Triton's interpreter, in a process of their own: TRITON_INTERPRET must be set before
triton is imported, and other tests may have imported it already."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import triton

INTERPRETED: bool = triton.knobs.runtime.interpret


def in_interpreter(test: Callable) -> Callable:
    """Collected in the child process only."""
    test.__test__ = INTERPRETED
    return test


def in_parent(test: Callable) -> Callable:
    """Not collected in the child process."""
    test.__test__ = not INTERPRETED
    return test


def child(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python, without a GPU."""
    variables = [f"{name}={value}" for name, value in environment.items()]
    command = ["env", "CUDA_VISIBLE_DEVICES=", *variables, sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)


def passes(file: str, count: int, *options: str) -> None:
    """So many tests of a file pass in a child process, and none fails."""
    quickly = "-p", "no:cacheprovider", "--disable-plugin-autoload"
    done = child("pytest", *quickly, *options, file, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    last = done.stdout.splitlines()[-1]  # "3 passed, 2 warnings in 1.2s"
    assert last.replace(",", " in").split(" in ")[0] == f"{count} passed", last
