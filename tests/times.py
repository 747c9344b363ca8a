"""Times that do not depend on other programs: the least of several, and a virtual clock."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine
from typing import TypeVar

MOST = 8
Result = TypeVar("Result")


def least(measure: Callable[[], float], below: float) -> float:
    """Return the least of several measurements; the first one below the limit is the last one.

    Other programs lengthen some measurements, and a fault lengthens all of them.
    """
    found = measure()
    for _ in range(MOST - 1):
        if found < below:
            break
        found = min(found, measure())
    return found


def done_within(limit_s: float, work: Callable[[], Result]) -> Result:
    """Return a call's result. Fail if each of several calls takes that much CPU time."""
    results: list[Result] = []
    assert least(lambda: cpu_s(lambda: results.append(work())), limit_s) < limit_s
    return results[-1]


def cpu_s(work: Callable[[], object]) -> float:
    """Return the CPU time of a call without garbage collection.

    A full collection scans what earlier tests have left, which may take a second or more.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    begun = time.process_time()
    try:
        work()
    finally:
        used = time.process_time() - begun
        if was_enabled:
            gc.enable()
    return used


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock moves only by the waits for timers, which end at once."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def select_at_once(timeout: float | None) -> object:
            self._now += timeout or 0.0
            return select(None if timeout is None else 0)

        self._selector.select = select_at_once  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now


def run_virtually(main: Coroutine[object, object, None]) -> None:
    """Run it like asyncio.run, with a clock that is exact on any machine."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main)
