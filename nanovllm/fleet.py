"""The engines of one server: of several, one that was lost is started again.

While it is away the others serve. Knows neither what an engine does nor how its ranks are spawned.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.process import BaseProcess

from nanovllm.watch import Child, WatchedRanks, ending, endings, word_on

log = logging.getLogger("serve")
WINDOW_S = 3600.0  # restarts are counted within this


class Replica:
    """One engine through all its lives. It ends by itself, or with a rank of it."""

    def __init__(
        self, start: Callable[[], list[Child]], restarts: int, on_lost: Callable[[], None]
    ) -> None:
        """`start` spawns its ranks. `restarts`: how often within WINDOW_S it is started again.
        `on_lost` is called once its ranks have been killed."""
        self.children = start()
        self._on_lost = on_lost
        self._start = start
        self._restarts = restarts
        self._restarted: list[float] = []  # when (monotonic)
        self._waiting: list[Child] = []  # ranks of a later life that are not ready yet
        # None until all of a later life are ready.
        self._ranks: WatchedRanks | None = WatchedRanks(self.children)
        self._why = ""  # it is lost

    def lost(self, restarts: bool) -> str:
        """Why it is away; empty while it lives or is being started."""
        if not self._why:
            self._why = self._trouble() if self._ranks is None else self._ranks.lost()
            if self._why:
                for process, _ in self.children:  # all live or none, and streams end now
                    process.kill()
                self._on_lost()
                if restarts:  # else its end may have been asked for
                    self._say()
        if self._why and restarts and self._may_start():
            self._restarted.append(time.monotonic())
            self.children = self._start()
            self._waiting, self._ranks, self._why = list(self.children), None, ""
        return self._why

    def _trouble(self) -> str:
        """Why a later life will never be ready; empty while it may be."""
        for process, word in list(self._waiting):
            if word.poll():
                said = word_on(word)
                if said == "ready":
                    self._waiting.remove((process, word))
                    continue
                process.join(0.0 if said else 1.0)
                return said or ending(process)
        if not self._waiting:
            self._ranks = WatchedRanks(self.children)
        return endings(process for process, _ in self.children)  # of who was ready already

    def _num_left(self) -> int:
        """How often it may be started again by now."""
        since = time.monotonic() - WINDOW_S
        self._restarted = [when for when in self._restarted if when > since]
        return self._restarts - len(self._restarted)

    def _may_start(self) -> bool:
        """Its device is free once all processes have ended: nobody waits for one that does not."""
        has_ended = all(process.exitcode is not None for process, _ in self.children)
        return has_ended and self._num_left() > 0

    def _say(self) -> None:
        if self._restarts:
            left = self._num_left()
            then = f"starting it again, {left - 1} more left" if left else "no restarts left for it"
            log.error("%s; %s (parallel.restarts %d)", self._why, then, self._restarts)


class Fleet:
    """All engines of a server, to be watched once their first lives are ready."""

    def __init__(self, starts: Sequence[Callable[[], list[Child]]], restarts: int) -> None:
        """With one engine there is nobody who would serve meanwhile, so it is not started again."""
        self._engines: list[Replica] = []
        self._starts = starts
        self._restarts = restarts if len(starts) > 1 else 0
        self.on_lost: Callable[[int], None] = lambda _: None  # is told an engine's number

    def start(self) -> None:
        for at, start in enumerate(self._starts):
            self._engines.append(Replica(start, self._restarts, partial(self._lost, at)))

    def _lost(self, at: int) -> None:
        self.on_lost(at)

    @property
    def children(self) -> list[Child]:
        """All ranks of the newest lives."""
        return [child for engine in self._engines for child in engine.children]

    @property
    def processes(self) -> list[BaseProcess]:
        """Those of `children`."""
        return [process for process, _ in self.children]

    def lost(self, restarts: bool = True) -> str:
        """Why no engine is left; empty while one lives or is being started.

        To be asked every TICK_S. Without `restarts` those that are away stay away.
        """
        reasons = [engine.lost(restarts) for engine in self._engines]
        return ", ".join(reasons) if all(reasons) else ""
