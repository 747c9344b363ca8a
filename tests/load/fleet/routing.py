"""Ways to choose an engine of a fleet: in turn, by load, by an estimate of caches, by exact caches.

The estimate is that of server/router.py, in tokens of sessions instead of keys of pages: what was
sent to an engine is believed to be there, up to the size of its cache. Exact caches are what events
of every cached and evicted page would tell without delay.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from nanovllm.config import Parallel
from tests.load.fleet.engine import Job, PaperEngine

Loads = npt.NDArray[np.int64]


class Policy(Protocol):
    def choose(self, job: Job, loads: Loads) -> int:
        """Return the engine for a request. `loads` has the requests of each engine."""
        ...

    def ended(self, job: Job) -> None:
        """Note the tokens that the request's engine had cached."""
        ...


class InTurn:
    """Round robin."""

    def __init__(self, engines: Sequence[PaperEngine]) -> None:
        self._count, self._turn = len(engines), -1

    def choose(self, job: Job, loads: Loads) -> int:
        self._turn = (self._turn + 1) % self._count
        return self._turn

    def ended(self, job: Job) -> None:
        """Note nothing."""


class LeastLoad:
    """The engine with the fewest requests; equal ones in turn."""

    def __init__(self, engines: Sequence[PaperEngine]) -> None:
        self.engines, self._turn = engines, 0
        self._all = np.arange(len(engines))

    def choose(self, job: Job, loads: Loads) -> int:
        self._turn += 1
        size = len(self._all)
        return int((loads * size + (self._all - self._turn) % size).argmin())

    def ended(self, job: Job) -> None:
        """Note nothing."""


class LeastCost(LeastLoad):
    """The least cost of uncached tokens and load, with the weights of the recipe's defaults.

    Only engines that know the session, and the least loaded one, can be the cheapest.
    """

    def __init__(self, engines: Sequence[PaperEngine]) -> None:
        super().__init__(engines)
        self._weights = Parallel()
        self._places: defaultdict[int, set[int]] = defaultdict(set)  # engines by session

    def choose(self, job: Job, loads: Loads) -> int:
        idle = super().choose(job, loads)
        able = {idle, *(at for at in self._places[job.session] if self.known(at, job))}
        best = min(able, key=lambda at: (self._cost(at, job), at != idle))
        self._places[job.session].add(best)
        job.believed = self.known(best, job)
        return best

    def _cost(self, at: int, job: Job) -> float:
        compute = job.prompt - max(self.known(at, job), job.shared)
        weights = self._weights
        return weights.prefill_weight * compute + weights.load_weight * self.engines[at].load

    def known(self, at: int, job: Job) -> int:
        """Return the tokens of the session's prompt that an engine has."""
        return self.engines[at].known(job.session, job.shared)


class Estimate(LeastCost):
    """Caches as estimated from what was sent."""

    def __init__(self, engines: Sequence[PaperEngine]) -> None:
        super().__init__(engines)
        self._sent: list[OrderedDict[int, int]] = [OrderedDict() for _ in engines]
        self._sizes = [0] * len(engines)

    def known(self, at: int, job: Job) -> int:
        return self._sent[at].get(job.session, 0)

    def choose(self, job: Job, loads: Loads) -> int:
        best = super().choose(job, loads)
        sent = self._sent[best]
        self._sizes[best] += job.prompt - sent.pop(job.session, 0)
        sent[job.session] = job.prompt
        while self._sizes[best] > self.engines[best].capacity + self.engines[best].host:
            self._sizes[best] -= sent.popitem(last=False)[1]
        return best

    def ended(self, job: Job) -> None:
        """Forget a quarter if the engine had less than was believed, as the router does."""
        sent = self._sent[job.engine]
        if job.cached + job.loaded < job.believed:
            for _ in range(len(sent) // 4):
                self._sizes[job.engine] -= sent.popitem(last=False)[1]


POLICIES = {
    "round robin": InTurn,
    "least load": LeastLoad,
    "our estimate": Estimate,
    "exact caches": LeastCost,
}
