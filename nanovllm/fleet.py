"""Groups of processes that are restarted one by one: the engines of a server, its API processes.

While one member is down the others serve. Callers supply the function that spawns a member.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.process import BaseProcess

from nanovllm.watch import Child, StartingChildren, WatchedRanks, ending

log = logging.getLogger("serve")
WINDOW_S = 3600.0  # restarts are counted within this
MOST_WAIT_S = 60.0  # longest delay before a restart
STEADY_S = 60.0  # a member that was ready for this long restarts with the shortest delay
UNKILLABLE_S = 60.0  # time after SIGKILL after which a process is given up


class Member:
    """One engine or API process, including its restarts. It is lost when one of its ranks is.

    Restarts are delayed by 1, 2, 4 ... MOST_WAIT_S seconds. An exception while spawning (no memory,
    no file descriptors, no folder) counts as a failed restart.
    """

    def __init__(
        self,
        start: Callable[[], list[Child]],
        restarts: int,
        on_lost: Callable[[], None],
        alone_s: float = math.inf,
    ) -> None:
        """`start` spawns the ranks. `restarts` is the maximum number within WINDOW_S.

        `on_lost` is called after the ranks have been killed. `alone_s` is that of WatchedRanks.
        """
        self.children = start()
        self.name = self.children[0][0].name
        self._on_lost = on_lost
        self._start = start
        self._restarts = restarts
        self._restarted: list[float] = []  # monotonic times of restarts
        self._alone_s = alone_s
        self._ranks: WatchedRanks | None = WatchedRanks(self.children, alone_s)
        self._starting: StartingChildren | None = None  # restarted ranks until all are ready
        self._ready_at = -math.inf  # monotonic time of the latest restart's readiness
        self._num_failures = 0  # consecutive failures; the next delay is 2 ** this
        self._due = 0.0  # monotonic time of the next start
        self._why = ""  # reason of the loss, while the member is down

    def lost(self, restarts: bool) -> str:
        """Return the reason if the member is down and will not be restarted, or "".

        The result is "" while it lives, is being started, or waits for its restart.
        """
        if not self._why and (why := self._trouble()):
            for process, _ in self.children:  # ranks live or die together; streams end now
                process.kill()
            self._on_lost()
            self._schedule(why, restarts)  # without restarts its end may be intended
        if self._why and restarts and self._may_start():
            self._start_again()
        waits_in_vain = time.monotonic() > self._due + UNKILLABLE_S and not self._has_ended()
        will_start = restarts and self._num_left() > 0 and not waits_in_vain
        return "" if will_start else self._why

    def _trouble(self) -> str:
        """Return the reason why the member cannot continue, or ""."""
        if self._ranks is not None:
            return self._ranks.lost()
        assert self._starting is not None
        for process, message in self._starting.outcomes():
            if message != "ready":
                process.join(0.0 if message else 1.0)
                return message or ending(process)
        if not self._starting.waiting:
            self._ranks = WatchedRanks(self.children, self._alone_s)
            self._ready_at = time.monotonic()
            log.info("%s is ready again", self.name)
        return self._starting.trouble()

    def _schedule(self, why: str, restarts: bool) -> None:
        """Record a loss, and schedule the restart."""
        now = time.monotonic()
        was_steady = self._ranks is not None and now - self._ready_at > STEADY_S
        self._num_failures = 0 if was_steady else self._num_failures
        wait_s = min(2.0**self._num_failures, MOST_WAIT_S)
        self._why, self._due = why, now + wait_s
        self._num_failures = min(self._num_failures + 1, 16)
        if restarts and self._restarts:
            left = self._num_left()
            again = f"starting it again in {wait_s:.0f} s, {left - 1} more left"
            then = again if left else "no restarts left for it"
            log.error("%s; %s (parallel.restarts %d)", why, then, self._restarts)

    def _num_left(self) -> int:
        """Return the number of restarts left now."""
        since = time.monotonic() - WINDOW_S
        self._restarted = [when for when in self._restarted if when > since]
        return self._restarts - len(self._restarted)

    def _has_ended(self) -> bool:
        return all(process.exitcode is not None for process, _ in self.children)

    def _may_start(self) -> bool:
        """Return True if the delay is over and all processes have ended, so the device is free."""
        return time.monotonic() >= self._due and self._has_ended() and self._num_left() > 0

    def _start_again(self) -> None:
        self._restarted.append(time.monotonic())
        try:
            children = self._start()
        except Exception as error:  # must not affect other members
            reason = str(error) or type(error).__name__
            self._ranks = None
            self._schedule(f"{self.name} cannot be started: {reason}", restarts=True)
            return
        self.children, self._starting = children, StartingChildren(children)
        self._ranks, self._why = None, ""


class Fleet:
    """All engines of a server, or all its API processes, watched after they first became ready."""

    def __init__(
        self,
        starts: Sequence[Callable[[], list[Child]]],
        restarts: int,
        *,
        alone_s: float = math.inf,
        even_one: bool = False,
    ) -> None:
        """A single member is not restarted and may be silent, unless `even_one`.

        `alone_s` is that of WatchedRanks.
        """
        self._members: list[Member] = []
        self._starts = starts
        is_watched = even_one or len(starts) > 1
        self._restarts = restarts if is_watched else 0
        self._alone_s = alone_s if is_watched else math.inf
        self.on_lost: Callable[[int], None] = lambda _: None  # called with a member's number

    def start(self) -> None:
        for at, start in enumerate(self._starts):
            lost = partial(self._lost, at)
            self._members.append(Member(start, self._restarts, lost, self._alone_s))

    def _lost(self, at: int) -> None:
        self.on_lost(at)

    @property
    def children(self) -> list[Child]:
        """Return the latest processes of all members, with their pipes."""
        return [child for member in self._members for child in member.children]

    @property
    def processes(self) -> list[BaseProcess]:
        """Return the processes of `children`."""
        return [process for process, _ in self.children]

    def lost(self, restarts: bool = True) -> str:
        """Return the reasons if no member is left; "" while one lives or will be restarted.

        Must be called every TICK_S. Without `restarts`, lost members are not restarted.
        """
        reasons = [member.lost(restarts) for member in self._members]
        return ", ".join(reasons) if all(reasons) else ""
