"""What a supervisor knows of the processes it started: who ended and how, who is silent.

The ranks of one engine live and die together. A rank that was lost leaves others in a collective
that never ends, on a device that no signal reaches, so nobody waits for them.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path

Child = tuple[BaseProcess, Pipe]  # and where it says that it is ready, and then that it is alive
TICK_S = 0.2
BEAT_EVERY_S = 0.5
LOST_S = 3.0  # without a sign of life


class WatchedRanks:
    """The ranks of one engine, all of which have said that they are ready."""

    def __init__(self, children: Sequence[Child]) -> None:
        self.processes = [process for process, _ in children]
        self._words = [word for _, word in children]
        self._ticks = [0] * len(children)  # of CPU time, at the last turn
        self._silent = [0] * len(children)  # for how many turns

    def lost(self) -> str:
        """Why the engine cannot go on; empty if it can.

        To be asked every TICK_S. Turns are counted instead of seconds, and what came meanwhile is
        heard first: a supervisor that was stopped itself, or a machine that slept, has lost nobody.
        A rank that computes is alive: a compiler may keep Python, and so the beats, for seconds.
        One without others may be silent: its streams go on when it does.
        """
        for rank, process in enumerate(self.processes):
            before, self._ticks[rank] = self._ticks[rank], cpu_ticks(process.pid)
            is_alive = heard(self._words[rank]) or self._ticks[rank] > before
            self._silent[rank] = 0 if is_alive else self._silent[rank] + 1
        silent = [
            f"{process.name} has been silent for {LOST_S:.0f} s"
            for process, turns in zip(self.processes, self._silent, strict=True)
            if turns * TICK_S > LOST_S and len(self.processes) > 1 and process.exitcode is None
        ]
        codes = {process.exitcode for process in self.processes}
        if codes == {0, None} and max(self._silent) * TICK_S <= LOST_S:
            return ""  # those that follow rank 0 end a moment after it
        return ", ".join(silent) or endings(self.processes)


def heard(word: Pipe) -> bool:
    """Whether a child has said anything since the last time."""
    said = False
    with contextlib.suppress(EOFError, OSError):  # it has ended
        while word.poll():
            word.recv()
            said = True
    return said


def cpu_ticks(pid: int | None) -> int:
    """Hundredths of seconds that a process has computed; 0 where the system does not say."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return 0


def endings(processes: Iterable[BaseProcess]) -> str:
    """`nanovllm-engine ended by SIGKILL (9); out of memory?`, for each that went wrong.

    Those that a signal ended come first: others end because they miss them.
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


def word_on(pipe: Pipe) -> str | None:
    """What a child said; None if it ended without a word."""
    with contextlib.suppress(EOFError):
        return str(pipe.recv())
    return None
