"""Queue and cache of grammar compilations.

There are two workers, however long the queue is. A grammar is first tried in a process that can be
ended (trials.py). The worker then compiles it again, which takes no longer than the trial.

Decision: compiled grammars do not travel between processes. A schema of 200 objects takes 0.05 s to
compile, but xgrammar 0.2.8 writes the result as 209 MB in 14 s.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol, TypeAlias

from nanovllm.grammars.runtime.matching import CompiledPair
from nanovllm.grammars.runtime.trials import (
    WALL_FACTOR,
    CpuTimeError,
    Trial,
    TrialDiedError,
    Trials,
)
from nanovllm.wire import RefusalKind

log = logging.getLogger("engine")
WORKERS = 2
AGEING_BYTES = 16 << 10  # bytes that each second of waiting subtracts from a grammar's size
QUEUE_BYTES = 64 << 20  # of all different grammars that requests wait for
CACHE_BYTES = 256 << 20
ENTRY_BYTES = 1000  # the cache's own overhead per grammar
TIMEOUT_KEPT_S = 60.0  # not forever, since CPU time also grows somewhat with the machine's load
WARM_TAG = '{"type":"structural_tag","format":{"type":"const_string","value":"warm"}}'


class Failure(NamedTuple):
    """Reason for which there is no grammar."""

    kind: RefusalKind
    reason: str
    kept_s: float = inf  # seconds for which equal requests get the same failure


class Builder(Protocol):
    """Compiler of a grammar that has passed its trial. Two threads may call it at once."""

    def prepare(self) -> None:
        """Get ready. Called before each `build`, during the trial. The first call takes seconds."""
        ...

    def build(self, tag: str) -> CompiledPair: ...


CompileOutcome: TypeAlias = CompiledPair | Failure
OnCompiled: TypeAlias = Callable[[CompileOutcome], None]  # called once, from any thread


@dataclass(eq=False)
class PendingGrammar:
    """A grammar that requests wait for."""

    tag: str
    order: float  # the smallest is compiled next
    waiting: dict[int, OnCompiled] = field(default_factory=dict)  # callbacks by request
    trial: Trial | None = None  # the running trial, if any


class CachedGrammar(NamedTuple):
    outcome: CompileOutcome
    num_bytes: int
    until: float  # monotonic time


class GrammarQueue:
    """Queue of grammars, smallest first.

    Requests for the same grammar share its compilation. A grammar is dropped, and its trial ended,
    once no request waits for it.
    """

    def __init__(self, trials: Trials, builder: Builder, compile_s: float) -> None:
        """`compile_s`: CPU seconds that a trial may take."""
        self.failures = Counter(invalid=0, timeout=0, died=0)
        self._trials = trials
        self._builder = builder
        self._compile_s = compile_s
        self._changed = threading.Condition()  # guards all fields below
        self._is_closed = False
        self._workers: list[threading.Thread] = []
        self._jobs: dict[str, PendingGrammar] = {}  # waiting and running ones, by grammar
        self._queued: list[PendingGrammar] = []
        self._job_of: dict[int, PendingGrammar] = {}  # by request
        self._kept: OrderedDict[str, CachedGrammar] = OrderedDict()  # least recently used first
        self.num_kept_bytes = 0

    def prepare(self) -> None:
        """Make the compiler and the trials' process ready, and compile one grammar in both.

        The first grammar would otherwise take seconds, and delay every running request by half a
        second. Raise the errors of both.
        """
        trial = self._trials.begin()  # its process starts while the compiler is made
        try:
            self._builder.prepare()
            trial.result(WARM_TAG, self._compile_s)
        finally:
            trial.close()
        self._builder.build(WARM_TAG)

    def submit(self, request_id: int, tag: str, on_compiled: OnCompiled) -> None:
        """Call `on_compiled` with the grammar once it is compiled, possibly at once.

        It is not called if the request leaves first.
        """
        with self._changed:
            entry = self._kept.get(tag)
            if entry is not None and entry.until > time.monotonic():
                self._kept.move_to_end(tag)
                outcome = entry.outcome
            elif tag in self._jobs or sum(map(len, self._jobs)) + len(tag) <= QUEUE_BYTES:
                self._wait(request_id, tag, on_compiled)
                return
            else:
                reason = f"{QUEUE_BYTES} bytes of grammars are waiting already"
                outcome = Failure(RefusalKind.QUEUE_FULL, reason)
        on_compiled(outcome)

    def _wait(self, request_id: int, tag: str, on_compiled: OnCompiled) -> None:
        job = self._jobs.get(tag)
        if job is None:
            job = self._jobs[tag] = PendingGrammar(tag, len(tag) + AGEING_BYTES * time.monotonic())
            self._queued.append(job)
            self._changed.notify()
        job.waiting[request_id] = on_compiled
        self._job_of[request_id] = job
        while len(self._workers) < WORKERS:
            self._workers.append(threading.Thread(target=self._work, daemon=True))
            self._workers[-1].start()

    def leave(self, request_id: int) -> None:
        """Cancel a request. Unknown ids are ignored."""
        with self._changed:
            if (job := self._job_of.pop(request_id, None)) is None:
                return
            del job.waiting[request_id]
            if job.waiting:
                return
            del self._jobs[job.tag]  # a later request for this grammar starts anew
            if job in self._queued:
                self._queued.remove(job)
            if job.trial is not None:
                job.trial.cancel()

    def close(self) -> None:
        """End the workers after their current compilation."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # -- workers ----------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                outcome = self._compile(job)
            except Exception:
                log.exception("a grammar failed")
                outcome = Failure(RefusalKind.FAILED, "the grammar could not be compiled", 0.0)
            self._finish(job, outcome)

    def _next(self) -> PendingGrammar | None:
        with self._changed:
            while not self._queued and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            job = min(self._queued, key=lambda job: job.order)
            self._queued.remove(job)
            return job

    def _compile(self, job: PendingGrammar) -> CompileOutcome | None:
        """Return the outcome, or None if all requests for the grammar have left."""
        try:
            reason = self._tried(job)
        except CpuTimeError:
            reason = f"the grammar takes more than {self._compile_s:g} s of CPU time to compile"
            return self._failed("timeout", Failure(RefusalKind.INVALID, reason, TIMEOUT_KEPT_S))
        except TimeoutError:
            wall_s = WALL_FACTOR * self._compile_s
            reason = f"the grammar was not compiled within {wall_s:g} s: the machine is busy"
            return self._failed("busy", Failure(RefusalKind.BUSY, reason, 0.0))
        except (TrialDiedError, OSError) as error:
            if not job.waiting:
                return None
            log.warning("a grammar of %d bytes was given up: %s", len(job.tag), error)
            reason = "the grammar's compiler has died"
            return self._failed("died", Failure(RefusalKind.FAILED, reason, 0.0))
        if reason:
            return self._failed("invalid", Failure(RefusalKind.INVALID, reason))
        return self._builder.build(job.tag) if job.waiting else None

    def _tried(self, job: PendingGrammar) -> str:
        """Return the reason to refuse the grammar, or "" if its trial succeeded.

        A process may die for another reason than its grammar, so the trial is repeated once. Raise
        the errors of `Trial.result`, and OSError if no process can be started.
        """
        try:
            return self._attempt(job)
        except TimeoutError:  # also an OSError
            raise
        except (TrialDiedError, OSError) as error:
            if not job.waiting:
                raise
            log.warning("a grammar of %d bytes is tried once more: %s", len(job.tag), error)
        return self._attempt(job)

    def _attempt(self, job: PendingGrammar) -> str:
        trial = self._trials.begin()
        with self._changed:
            job.trial = trial
            if not job.waiting:
                trial.cancel()
        self._builder.prepare()
        return trial.result(job.tag, self._compile_s)

    def _failed(self, how: str, failure: Failure) -> Failure:
        with self._changed:
            self.failures[how] += 1
        return failure

    def _finish(self, job: PendingGrammar, outcome: CompileOutcome | None) -> None:
        with self._changed:
            if outcome is not None:
                self._keep(job.tag, outcome)
            if self._jobs.get(job.tag) is job:
                del self._jobs[job.tag]
            for request_id in job.waiting:
                del self._job_of[request_id]
        if outcome is not None:
            for on_compiled in job.waiting.values():
                on_compiled(outcome)

    def _keep(self, tag: str, outcome: CompileOutcome) -> None:
        if isinstance(outcome, Failure):
            num_bytes, kept_s = len(outcome.reason), outcome.kept_s
        else:
            num_bytes, kept_s = outcome.memory_size_bytes, inf
        self._forget(tag)
        entry = CachedGrammar(
            outcome, num_bytes + len(tag) + ENTRY_BYTES, time.monotonic() + kept_s
        )
        self._kept[tag] = entry
        self.num_kept_bytes += entry.num_bytes
        while self.num_kept_bytes > CACHE_BYTES:
            self._forget(next(iter(self._kept)))

    def _forget(self, tag: str) -> None:
        if (entry := self._kept.pop(tag, None)) is not None:
            self.num_kept_bytes -= entry.num_bytes
