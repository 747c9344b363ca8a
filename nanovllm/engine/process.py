"""The engine process: build, report ready, run the step loop, shut down.

Contains no scheduling policy.
"""

from __future__ import annotations

import gc
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from nanovllm.config import Config, Recipe
from nanovllm.engine import paper
from nanovllm.engine.adapters import AdapterChanges, ReadAdapter
from nanovllm.engine.events import page_log_of
from nanovllm.engine.executor import Executor
from nanovllm.engine.loop import EngineLoop
from nanovllm.engine.pace import PaceKeeper, pace_of
from nanovllm.engine.tickets import Tickets, TransferCounts, tickets_of
from nanovllm.grammars.runtime.masks import Grammars
from nanovllm.grammars.runtime.queue import CompileOutcome, Failure
from nanovllm.ipc.channel import BlockingConnection, Listener
from nanovllm.kv.hybrid import memory_of
from nanovllm.kv.layout import CacheLayout
from nanovllm.kv.memory import KVMemory
from nanovllm.kv.page_log import PageLog
from nanovllm.log import fields
from nanovllm.look import Look
from nanovllm.parallel.places import Place
from nanovllm.roles import hidden
from nanovllm.sched.adapters import adapter_slots
from nanovllm.sched.lanes import planner_of
from nanovllm.sched.planner import Planner
from nanovllm.sched.scheduler import Scheduler
from nanovllm.schedule import given_or
from nanovllm.transfer.leases import Lease
from nanovllm.wire import (
    WORKER_BITS,
    Abort,
    Beat,
    FromEngine,
    Generate,
    LoadAdapter,
    Ready,
    Stats,
    StepOutput,
    ToEngine,
    UnloadAdapter,
    Unwanted,
)

log = logging.getLogger("engine")
STATS_EVERY_S = 0.2
BEAT_EVERY_S = 0.5
RETRY_S = 0.2  # delay after a failed accept
MOST_WORKERS = 1 << (63 - WORKER_BITS)  # number of distinct worker numbers
Waited = tuple[Generate, CompileOutcome]  # request whose grammar has been compiled


class Joined(NamedTuple):
    """A new connection and its worker number, unique while its requests run."""

    worker: int
    connection: BlockingConnection


class Left(NamedTuple):
    """A connection that has ended."""

    worker: int


Mail = ToEngine | Waited | Joined | Left | Lease | ReadAdapter | None


class Supervised(Protocol):
    """The engine's view of its supervisor."""

    def on_leave(self, leave: Callable[[], object]) -> None:
        """Call `leave` when no further API process will connect."""
        ...

    def watch_steps(self, late_s: Callable[[], float]) -> None:
        """Replace the engine if `late_s`, of the step in flight, is far greater than 0."""
        ...


def main(
    config: Config,
    place: Place,
    listener: Listener,
    ready: Callable[[], None],
    supervisor: Supervised,
) -> None:
    """Serve API processes, which connect and disconnect at any time.

    The engine ends when none is left after the supervisor has called `leave`. Raise ConfigError if
    the recipe cannot be served.
    """
    gc.disable()  # objects built at startup are never garbage
    executor, recipe, vocab_size, layout = build(config, place)
    page_log = page_log_of(config, recipe, layout, place)
    scheduler = scheduler_of(recipe, layout, place, executor, page_log=page_log)
    grammars = grammars_of(config, recipe, vocab_size)
    gc.collect()
    gc.freeze()  # later collections skip these objects
    gc.enable()
    ready()
    message = ready_message(recipe, config.served_name, vocab_size, place.lanes)
    tier_pages = int(scheduler.stats().tiers.get("host.pages", 0))
    message = msgspec.structs.replace(message, tier_pages=tier_pages)
    engine = Engine(
        scheduler=scheduler,
        executor=executor,
        grammars=grammars,
        depth=recipe.schedule.depth,
        pace=pace_of(recipe.schedule, recipe.device),
        max_queue=recipe.schedule.max_queue,
        tickets=tickets_of(executor, recipe),
        page_log=page_log,
    )
    engine.adapters.folders |= message.adapters
    if executor.lender is not None:
        executor.lender.call_when_ended(engine.lease_ended)
    supervisor.watch_steps(engine.loop.progress.late_s)
    supervisor.on_leave(engine.leave)
    accepting = partial(
        accept_all,
        listener=listener,
        ready=lambda: msgspec.structs.replace(
            message, adapters=dict(engine.adapters.folders), digests=engine.adapters.digests
        ),
        join=engine.join,
    )
    threading.Thread(target=accepting, daemon=True).start()
    engine.run()


def grammars_of(config: Config, recipe: Recipe, vocab_size: int) -> Grammars:
    """Return the grammars of requests, with what their compiler needs imported."""
    grammars = Grammars(
        tokenizer_dir=Path(config.tokenizer_dir),
        vocab_size=vocab_size,
        stop_ids=[token_id for token_id in config.eos_ids or () if token_id < vocab_size],
        compile_s=recipe.structured_outputs.compile_s,
    )
    if recipe.engine == "model":  # the paper engine stays free of torch, which xgrammar imports
        with suppress(Exception):  # requests with a grammar are then refused with this reason
            grammars.queue.prepare()
    return grammars


def scheduler_of(
    recipe: Recipe,
    layout: CacheLayout,
    place: Place,
    executor: Executor,
    *,
    page_log: PageLog | None = None,
) -> Planner:
    """Return the scheduler of a resolved recipe, with one part per lane."""
    schedule = recipe.schedule
    make = partial(
        Scheduler,
        num_slots=int(schedule.slots),
        step_tokens=int(schedule.step_tokens),
        mixed_step_tokens=given_or(schedule.mixed_step_tokens, int(schedule.step_tokens)),
        max_model_tokens=int(recipe.server.max_model_tokens),
        drafts=recipe.drafts,
        ageing_s=schedule.ageing_s,
        overtake_steps=schedule.overtake_steps,
        adapters=partial(adapter_slots, recipe.adapters, executor.first_adapters),
        lender=executor.lender,
    )

    def memory() -> KVMemory:
        kv_memory = memory_of(layout, recipe.cache, executor.disk)
        kv_memory.log = page_log
        return kv_memory

    return planner_of(make, memory, place.lanes, recipe.parallel)


def ready_message(recipe: Recipe, served_name: str, vocab_size: int, lanes: int) -> Ready:
    """Return the engine's first message, for worker 0. `recipe` is resolved."""
    shown = msgspec.structs.replace(recipe, transfer=hidden(recipe.transfer))
    return Ready(
        worker=0,
        model=served_name,
        max_model_tokens=int(recipe.server.max_model_tokens),
        vocab_size=vocab_size,
        num_pages=int(recipe.cache.pages) * lanes,
        page_tokens=int(recipe.cache.page_tokens),
        num_slots=int(recipe.schedule.slots) * lanes,
        recipe=msgspec.json.encode(shown).decode(),
        adapters={} if recipe.adapters is None else {name: name for name in recipe.adapters.names},
    )


def accepted(listener: Listener, ready: Ready, worker: int) -> Joined:
    """Accept an API process. The beat lets it notice an engine that hangs before its next one."""
    connection = listener.accept()
    connection.send(msgspec.structs.replace(ready, worker=worker))
    connection.send(Beat(0.0, 0.0))
    return Joined(worker, connection)


def accept_all(
    listener: Listener, ready: Callable[[], Ready], join: Callable[[Joined], object]
) -> None:
    """Accept API processes forever, in a thread. A restarted one connects late."""
    numbers = count()
    while True:
        try:
            join(accepted(listener, ready(), next(numbers) % MOST_WORKERS))
        except OSError:  # the peer disconnected, or there is no free file descriptor
            time.sleep(RETRY_S)


def build(config: Config, place: Place) -> tuple[Executor, Recipe, int, CacheLayout]:
    """Return the executor, the resolved recipe, the vocabulary size and the cache layout."""
    if config.recipe.engine == "paper":
        return paper.build(config)
    log.info("importing torch")  # takes seconds
    from nanovllm.engine import ranks

    return ranks.build(config, place)


class Engine:
    """The step loop and its connections: one reader and one writer thread per API process."""

    def __init__(
        self,
        scheduler: Planner,
        executor: Executor,
        grammars: Grammars,
        depth: int,
        pace: PaceKeeper | None,
        max_queue: int = 1 << 30,
        tickets: Tickets | None = None,
        page_log: PageLog | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.grammars = grammars
        self.loop = EngineLoop(
            scheduler=scheduler,
            executor=executor,
            publish=self.publish,
            masker=grammars,
            depth=depth,
            pace=pace,
            max_queue=max_queue,
        )
        if scheduler.has_tiers:
            executor.call_when_moved(lambda: self._inbox.put(None))
        self.adapters = AdapterChanges(scheduler, executor, self._deliver)
        self._compiling: set[int] = set()  # ids of requests waiting for their grammar
        self._inbox = queue.SimpleQueue[Mail]()
        self._outboxes: dict[int, queue.SimpleQueue[FromEngine | None]] = {}
        self._stays = True  # until `leave`: further API processes may join
        self._tickets = tickets
        self._transfers = TransferCounts(executor.lender, executor.remote)
        self._page_log = page_log
        self._stats_due = 0.0
        threading.Thread(target=self._beat, daemon=True).start()

    def run(self) -> None:
        while self._outboxes or self._stays:
            self._take_mail()
            self.loop.publish_events()
            self.loop.step()
            if self._page_log is not None:
                self._page_log.flush()
        self.grammars.close()
        if self._page_log is not None:
            self._page_log.close()
        log.info("stopped %s", fields(steps=self.scheduler.stats().num_steps))

    def _deliver(self, message: ReadAdapter) -> None:
        self._inbox.put(message)

    def join(self, joined: Joined) -> None:
        """Serve one more API process. May be called from any thread."""
        self._inbox.put(joined)

    def lease_ended(self, lease: Lease) -> None:
        """Return the pages of a lease to the pool. May be called from any thread."""
        self._inbox.put(lease)

    def leave(self) -> None:
        """End when the last API process has disconnected. May be called from any thread."""
        self._stays = False
        self._inbox.put(None)  # wakes an idle loop

    def _join(self, joined: Joined) -> None:
        outbox = self._outboxes[joined.worker] = queue.SimpleQueue()
        for work in self._read, self._write:
            threading.Thread(target=work, args=(*joined, outbox), daemon=True).start()

    def _drop(self, worker: int) -> None:
        """Remove an API process that has disconnected, and abort its requests."""
        self._outboxes.pop(worker).put(None)
        for request_id in (*self._compiling, *self.scheduler.request_ids()):
            if request_id >> WORKER_BITS == worker:
                self._take(Abort(request_id))

    def _take_mail(self) -> None:
        """Process all received messages. Block for one only if there is nothing to run.

        The end of a transfer sends None.
        """
        if self.loop.idle or self.loop.is_blocked:
            self.publish(StepOutput(stats=self.stats()))
            self._take(self._inbox.get())
        while not self._inbox.empty():
            self._take(self._inbox.get())

    def _take(self, message: Mail) -> None:
        match message:
            case None:
                return
            case Joined():
                self._join(message)
            case Lease():
                self.scheduler.take_back(message.pages, message.state, int(message.request))
            case Left(worker):
                self._drop(worker)
            case Generate():
                self._receive(message)
            case Unwanted(ticket):
                self._decline(ticket)
            case LoadAdapter() | UnloadAdapter() | ReadAdapter():
                self._change(message)
            case (request, outcome):
                if request.request_id in self._compiling:  # otherwise it has been aborted
                    self._compiling.remove(request.request_id)
                    self._start(request, outcome)
            case Abort(request_id) if request_id in self._compiling:
                self._leave_compiling(request_id)
            case _:
                self.loop.handle(message)

    def _leave_compiling(self, request_id: int) -> None:
        self._compiling.remove(request_id)
        if self._tickets is not None:
            self._tickets.pages.settle(request_id)
        self.grammars.queue.leave(request_id)

    def _decline(self, ticket: str) -> None:
        if self._tickets is not None:
            self._tickets.pages.decline(ticket)

    def _change(self, message: LoadAdapter | UnloadAdapter | ReadAdapter) -> None:
        """Change the adapters, and answer the API process."""
        answer = self.adapters.take(message)
        if answer is not None and (outbox := self._outboxes.get(answer.number >> WORKER_BITS)):
            outbox.put(answer)

    def _receive(self, request: Generate) -> None:
        """Refuse, compile or start a request. One whose grammar compiles counts as waiting."""
        if self._tickets is not None and request.ticket:
            self._tickets.offer(request, self.adapters.digest(request.adapter))
        if not self.loop.has_room_for(request, len(self._compiling)):
            return
        if request.grammar:
            self._compiling.add(request.request_id)
            self.grammars.queue.submit(
                request.request_id,
                request.grammar,
                lambda outcome: self._inbox.put((request, outcome)),
            )
        else:
            self._start(request)

    def _start(self, request: Generate, grammar: CompileOutcome | None = None) -> None:
        """Hand a request to the loop. An exception fails only this request."""
        if isinstance(grammar, Failure):
            self.loop.refuse(request.request_id, grammar.kind, grammar.reason)
            return
        try:
            if grammar is not None:
                self.grammars.follow(request, grammar)
        except Exception:
            self.loop.fail(request.request_id)
        else:
            self.loop.handle(request)

    def stats(self) -> Stats:
        clock = self.loop.clock
        return msgspec.structs.replace(
            self.scheduler.stats(),
            host_bubble_s=self.loop.bubble_s,
            host_s=dict(clock.total_s),
            host_step_p50_s=clock.step_p50_s(),
            steps_by_mode=dict(self.executor.steps_by_mode),
            padded_tokens=self.executor.padded_tokens,
            experts=self.executor.expert_load(wait=self.loop.idle),
            num_compiling=len(self._compiling),
            num_matchers=self.grammars.num_followed,
            grammar_cache_bytes=self.grammars.queue.num_kept_bytes,
            grammar_failures=dict(self.grammars.queue.failures),
            transfer=self._transfers.stats(),
        )

    def publish(self, output: StepOutput) -> None:
        """Send each API process its part of a step, in one message, if it has any."""
        if self._tickets is not None:
            self._tickets.published(output)
        if output.stats is None and time.monotonic() >= self._stats_due:
            self._stats_due = time.monotonic() + STATS_EVERY_S
            output = msgspec.structs.replace(output, stats=self.stats())
        if len(self._outboxes) == 1:
            (outbox,) = self._outboxes.values()
            outbox.put(output)
            return
        for worker, outbox in self._outboxes.items():
            if (part := part_of(output, worker)) is not None:
                outbox.put(part)

    def _read(
        self,
        worker: int,
        connection: BlockingConnection,
        outbox: queue.SimpleQueue[FromEngine | None],
    ) -> None:
        while (message := connection.recv()) is not None:
            if isinstance(message, Look):  # answered here, so that it costs the loop no time
                outbox.put(self.loop.recent.since(message.since))
            else:
                self._inbox.put(message)
        self._inbox.put(Left(worker))

    def _beat(self) -> None:
        progress = self.loop.progress
        while True:
            for outbox in tuple(self._outboxes.values()):  # a copy: others may join concurrently
                outbox.put(Beat(progress.age_s(), progress.late_s()))
            time.sleep(BEAT_EVERY_S)

    def _write(
        self,
        _: int,
        connection: BlockingConnection,
        outbox: queue.SimpleQueue[FromEngine | None],
    ) -> None:
        with suppress(OSError):  # the peer disconnected; the reader thread reports it to the loop
            while (message := outbox.get()) is not None:
                connection.send(message)


def part_of(output: StepOutput, worker: int) -> StepOutput | None:
    """Return one API process's part of a step; None if it has none."""

    def mine(request_id: int) -> bool:
        return request_id >> WORKER_BITS == worker

    ids = np.frombuffer(output.ids, np.int64)
    chosen = (ids >> WORKER_BITS) == worker
    counts = np.frombuffer(output.counts, np.int32)  # empty: one token per row
    tokens = np.frombuffer(output.tokens, np.int32)[np.repeat(chosen, counts if len(counts) else 1)]
    part = StepOutput(
        ids=ids[chosen].tobytes(),
        tokens=tokens.tobytes(),
        counts=counts[chosen].tobytes() if len(counts) else b"",
        started=[x for x in output.started if mine(x.request_id)],
        finished=[x for x in output.finished if mine(x.request_id)],
        refused=[x for x in output.refused if mine(x.request_id)],
        logprobs=[x for x in output.logprobs if mine(x.request_id)],
        stats=output.stats,
    )
    return part if part != StepOutput() else None
