"""Supervision of child processes: exit status, heartbeats and signs of work.

The ranks of one engine live and die together. If one is lost, the others stay in a collective that
never ends. No signal reaches their devices, so the supervisor never waits for them.

A ready rank of several may be without heartbeats and CPU time for LOST_S, a process that is still
loading for STOPPED_S. All loading processes together may send heartbeats without work for IDLE_S.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

Child = tuple[BaseProcess, Pipe]  # the pipe carries "ready" or an error, and heartbeats
TICK_S = 0.2
BEAT_EVERY_S = 0.5
BEAT, STUCK = "alive", "stuck: "  # messages of a child other than the outcome of its start
LOST_S = 3.0
STOPPED_S = 30.0
IDLE_S = 300.0
LEAST_WORK = 0.01  # share of a CPU below which a loading process counts as idle


class Work(NamedTuple):
    """Monotonic counters of a process; all 0 on systems without /proc."""

    cpu_ticks: int = 0  # hundredths of seconds
    page_faults: int = 0  # faults that read from a disk
    bytes_read: int = 0


class LifeSigns:
    """Signs of life of one process, which is examined once per turn.

    Turns are counted instead of seconds, and pending heartbeats are read first. After a pause of
    the supervisor or of the machine, no process therefore counts as lost. A process that computes
    or reads pages from a disk is alive without heartbeats, since a compiler may hold the GIL for
    seconds.
    """

    def __init__(self, process: BaseProcess) -> None:
        self.process = process
        self._seen = Work()
        self._last_work = Work()  # counters when the process last exceeded LEAST_WORK
        self._silent_turns = self._idle_turns = 0

    def turn(self, has_beaten: bool) -> None:
        work = work_of(self.process.pid)
        is_alive = has_beaten or work[:2] != self._seen[:2]
        self._silent_turns = 0 if is_alive else self._silent_turns + 1
        self._seen = work
        self._idle_turns += 1
        least = LEAST_WORK * 100 * IDLE_S
        if work.cpu_ticks - self._last_work.cpu_ticks > least or work[1:] != self._last_work[1:]:
            self._last_work, self._idle_turns = work, 0

    @property
    def silent_s(self) -> float:
        """Return the seconds of turns without any sign of life."""
        return self._silent_turns * TICK_S

    @property
    def idle_s(self) -> float:
        """Return the seconds of turns with less work than LEAST_WORK."""
        return self._idle_turns * TICK_S


class WatchedRanks:
    """The ranks of one engine after all of them have become ready."""

    def __init__(self, children: Sequence[Child], alone_s: float = math.inf) -> None:
        """`alone_s` is the time in seconds that a single rank may be silent.

        By default it may be silent forever, since its streams continue when it does.
        """
        self.processes = [process for process, _ in children]
        self._pipes = [pipe for _, pipe in children]
        self._signs = [LifeSigns(process) for process in self.processes]
        self._most_s = LOST_S if len(children) > 1 else alone_s

    def lost(self) -> str:
        """Return the reason why the engine cannot continue, or "". Must be called every TICK_S."""
        stuck = []
        for signs, pipe in zip(self._signs, self._pipes, strict=True):
            reports = messages(pipe)
            signs.turn(has_beaten=bool(reports))
            if reports and reports[-1].startswith(STUCK):
                stuck.append(f"{signs.process.name} is {reports[-1]}")
        silent = [
            f"{signs.process.name} has been silent for {self._most_s:.0f} s"
            for signs in self._signs
            if signs.silent_s > self._most_s and signs.process.exitcode is None
        ]
        codes = {process.exitcode for process in self.processes}
        if codes == {0, None} and max(one.silent_s for one in self._signs) <= self._most_s:
            return ""  # the other ranks end shortly after rank 0
        return ", ".join(silent) or endings(self.processes) or ", ".join(stuck)


class StartingChildren:
    """Processes of which some are not ready yet."""

    def __init__(self, children: Sequence[Child]) -> None:
        self.children = list(children)
        self.waiting = list(children)
        self._signs = {id(process): LifeSigns(process) for process, _ in children}
        self._has_beaten: set[int] = set()
        self._turn_at = -math.inf  # monotonic

    def outcomes(self) -> list[tuple[BaseProcess, str | None]]:
        """Return the new outcomes. Each process has one: "ready", an error, or None.

        None is the outcome of a process that ended without a message.
        """
        outcomes: list[tuple[BaseProcess, str | None]] = []
        for process, pipe in list(self.waiting):
            while pipe.poll():
                if (report := message(pipe)) == BEAT:
                    self._has_beaten.add(id(process))
                    continue
                self.waiting.remove((process, pipe))
                outcomes.append((process, report))
                break
        return outcomes

    def trouble(self) -> str:
        """Return the reason why the waiting processes will never be ready, or "".

        A process may have ended after it was ready. One may be stopped for STOPPED_S, or all
        waiting ones may be idle for IDLE_S.
        """
        waiting = [process for process, _ in self.waiting]
        ready = [process for process, _ in self.children if process not in waiting]
        if lost := endings(ready):
            return lost
        if (now := time.monotonic()) < self._turn_at + TICK_S / 2:
            return ""
        self._turn_at = now
        signs = [self._signs[id(process)] for process in waiting]
        for one in signs:
            one.turn(has_beaten=id(one.process) in self._has_beaten)
        self._has_beaten.clear()
        stopped = [one.process.name for one in signs if one.silent_s > STOPPED_S]
        if stopped:
            return f"{', '.join(stopped)} stopped while loading: silent for {STOPPED_S:.0f} s"
        if signs and all(one.idle_s > IDLE_S for one in signs):
            names = ", ".join(process.name for process in waiting)
            return f"{names} hung while loading: idle for {IDLE_S:.0f} s"
        return ""


def messages(pipe: Pipe) -> list[str]:
    """Return all pending messages of a child."""
    received: list[str] = []
    with contextlib.suppress(EOFError, OSError):  # the child has ended
        while pipe.poll():
            received.append(str(pipe.recv()))
    return received


def work_of(pid: int | None) -> Work:
    """Return the counters of a process."""
    ticks = faults = read = 0
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks, faults = int(fields[11]) + int(fields[12]), int(fields[9])
        read = int(Path(f"/proc/{pid}/io").read_text().split()[1])
    return Work(ticks, faults, read)


def cpu_ticks(pid: int | None) -> int:
    """Return the CPU time of a process in hundredths of seconds; 0 if unknown."""
    return work_of(pid).cpu_ticks


def endings(processes: Iterable[BaseProcess]) -> str:
    """Return `nanovllm-engine ended by SIGKILL (9); out of memory?` for each that failed.

    Processes ended by a signal come first, because others end as a consequence.
    """
    ended = [process for process in processes if process.exitcode is not None]
    wrong = [process for process in ended if process.exitcode] or ended
    return ", ".join(map(ending, sorted(wrong, key=lambda one: (one.exitcode or 0) >= 0)))


def ending(process: BaseProcess) -> str:
    code = process.exitcode or 0
    if code >= 0:
        return f"{process.name} ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = "signal"
    guess = "; out of memory?" if -code == signal.SIGKILL else ""
    return f"{process.name} ended by {name} ({-code}){guess}"


def message(pipe: Pipe) -> str | None:
    """Return a child's next message; None if it ended without one."""
    with contextlib.suppress(EOFError, OSError):
        return str(pipe.recv())
    return None
