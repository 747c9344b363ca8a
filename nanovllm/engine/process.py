"""The engine process: build, report ready, run the step loop, shut down. Knows no policies."""

from __future__ import annotations

import gc
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from nanovllm.config import Config, Recipe, given_or
from nanovllm.engine import paper
from nanovllm.engine.executor import Executor
from nanovllm.engine.grammar_queue import CompileOutcome, Failure
from nanovllm.engine.grammars import Grammars
from nanovllm.engine.loop import EngineLoop
from nanovllm.engine.pace import PaceKeeper, pace_of
from nanovllm.ipc.channel import BlockingConnection, Listener
from nanovllm.kv.hybrid import memory_of
from nanovllm.kv.layout import CacheLayout
from nanovllm.log import fields
from nanovllm.look import Look
from nanovllm.parallel.places import Place
from nanovllm.sched.lanes import Planner, planner_of
from nanovllm.sched.scheduler import Scheduler
from nanovllm.wire import (
    WORKER_BITS,
    Abort,
    Beat,
    FromEngine,
    Generate,
    Ready,
    RefusalKind,
    Stats,
    StepOutput,
    ToEngine,
)

log = logging.getLogger("engine")
STATS_EVERY_S = 0.2
BEAT_EVERY_S = 0.5
Waited = tuple[Generate, CompileOutcome]  # for its grammar


def main(
    config: Config, place: Place, listener: Listener, num_workers: int, ready: Callable[[], None]
) -> None:
    """Serve until every API process has gone. Raises ConfigError if the recipe cannot be served."""
    gc.disable()  # nothing that is built is garbage
    executor, recipe, vocab_size, layout = build(config, place)
    schedule, cache = recipe.schedule, recipe.cache
    make = partial(
        Scheduler,
        num_slots=int(schedule.slots),
        step_tokens=int(schedule.step_tokens),
        mixed_step_tokens=given_or(schedule.mixed_step_tokens, int(schedule.step_tokens)),
        max_model_tokens=int(recipe.server.max_model_tokens),
        num_drafts=recipe.speculate.tokens if recipe.speculate is not None else 0,
        max_queue=schedule.max_queue,
        ageing_s=schedule.ageing_s,
        overtake_steps=schedule.overtake_steps,
    )
    scheduler = planner_of(make, partial(memory_of, layout, cache), place.lanes, recipe.parallel)
    stop_ids = [token_id for token_id in config.eos_ids or () if token_id < vocab_size]
    tokens = Path(config.tokenizer_dir), vocab_size, stop_ids
    grammars = Grammars(*tokens, recipe.structured_outputs.compile_s)
    with suppress(Exception):  # requests with a grammar are then refused with the reason
        grammars.queue.prepare()
    gc.collect()
    gc.freeze()  # do not visit it again
    gc.enable()
    ready()
    connections = [listener.accept() for _ in range(num_workers)]
    for worker, connection in enumerate(connections):
        connection.send(
            Ready(
                worker=worker,
                model=config.served_name,
                max_model_tokens=int(recipe.server.max_model_tokens),
                vocab_size=vocab_size,
                num_pages=int(cache.pages) * place.lanes,
                page_tokens=int(cache.page_tokens),
                num_slots=int(schedule.slots) * place.lanes,
                recipe=msgspec.json.encode(recipe).decode(),
            )
        )
    pace = pace_of(schedule, recipe.device)
    Engine(scheduler, executor, grammars, connections, schedule.depth, pace).run()


def build(config: Config, place: Place) -> tuple[Executor, Recipe, int, CacheLayout]:
    """What runs plans, the recipe as Ready tells it, the size of the vocabulary, and the layout of
    the caches."""
    if config.recipe.engine == "paper":
        return paper.build(config)
    log.info("importing torch")  # takes seconds
    from nanovllm.engine import ranks

    return ranks.build(config, place)


class Engine:
    """The loop with its mail: one thread reads each API process, one thread writes to it."""

    def __init__(
        self,
        scheduler: Planner,
        executor: Executor,
        grammars: Grammars,
        connections: list[BlockingConnection],
        depth: int,
        pace: PaceKeeper | None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.grammars = grammars
        self.loop = EngineLoop(scheduler, executor, self.publish, grammars, depth, pace=pace)
        self._compiling: set[int] = set()  # requests that wait for their grammar
        self._inbox: queue.SimpleQueue[ToEngine | Waited | None] = queue.SimpleQueue()
        self._outboxes: list[queue.SimpleQueue[FromEngine]] = []
        self._num_open = len(connections)
        self._stats_due = 0.0
        for connection in connections:
            outbox: queue.SimpleQueue[FromEngine] = queue.SimpleQueue()
            self._outboxes.append(outbox)
            for work in (self._read, self._write):
                threading.Thread(target=work, args=(connection, outbox), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def run(self) -> None:
        while self._num_open:
            self._take_mail()
            self.loop.tell()
            self.loop.step()
        self.grammars.close()
        log.info("stopped %s", fields(steps=self.scheduler.stats().num_steps))

    def _take_mail(self) -> None:
        """Everything that has arrived; waits for something only when there is nothing to run."""
        if self.loop.idle:
            self.publish(StepOutput(stats=self.stats()))
            self._take(self._inbox.get())
        while not self._inbox.empty():
            self._take(self._inbox.get())

    def _take(self, message: ToEngine | Waited | None) -> None:
        match message:
            case None:
                self._num_open -= 1
            case Generate():
                self._receive(message)
            case (request, outcome):
                if request.request_id in self._compiling:  # else it was aborted meanwhile
                    self._compiling.remove(request.request_id)
                    self._start(request, outcome)
            case Abort(request_id) if request_id in self._compiling:
                self._compiling.remove(request_id)
                self.grammars.queue.leave(request_id)
            case _:
                self.loop.handle(message)

    def _receive(self, request: Generate) -> None:
        """Who waits for a grammar counts as waiting, like those who wait for the device."""
        limit = self.scheduler.queue.max_queue
        if len(self._compiling) + len(self.scheduler.queue.waiting) >= limit:
            reason = f"{limit} requests are waiting already"
            self.loop.refuse(request.request_id, RefusalKind.QUEUE_FULL, reason)
        elif request.grammar:
            self._compiling.add(request.request_id)
            self.grammars.queue.ask(
                request.request_id,
                request.grammar,
                lambda outcome: self._inbox.put((request, outcome)),
            )
        else:
            self._start(request)

    def _start(self, request: Generate, grammar: CompileOutcome | None = None) -> None:
        """Whatever goes wrong is this request's error and nobody else's."""
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
        )

    def publish(self, output: StepOutput) -> None:
        """One message a step to each API process that has a part in it."""
        if output.stats is None and time.monotonic() >= self._stats_due:
            self._stats_due = time.monotonic() + STATS_EVERY_S
            output = msgspec.structs.replace(output, stats=self.stats())
        if len(self._outboxes) == 1:
            self._outboxes[0].put(output)
            return
        for worker, outbox in enumerate(self._outboxes):
            if (part := part_of(output, worker)) is not None:
                outbox.put(part)

    def _read(self, connection: BlockingConnection, outbox: queue.SimpleQueue[FromEngine]) -> None:
        while (message := connection.recv()) is not None:
            if isinstance(message, Look):  # which must not cost the loop anything
                outbox.put(self.loop.recent.since(message.since))
            else:
                self._inbox.put(message)
        self._inbox.put(None)

    def _beat(self) -> None:
        progress = self.loop.progress
        while True:
            beat = Beat(progress.age_s(), progress.late_s())
            for outbox in self._outboxes:
                outbox.put(beat)
            time.sleep(BEAT_EVERY_S)

    def _write(self, connection: BlockingConnection, outbox: queue.SimpleQueue[FromEngine]) -> None:
        with suppress(OSError):  # the API process has gone; its reader says so to the loop
            while True:
                connection.send(outbox.get())


def part_of(output: StepOutput, worker: int) -> StepOutput | None:
    """What one API process needs to know of a step; None if nothing."""

    def mine(request_id: int) -> bool:
        return request_id >> WORKER_BITS == worker

    ids = np.frombuffer(output.ids, np.int64)
    chosen = (ids >> WORKER_BITS) == worker
    counts = np.frombuffer(output.counts, np.int32)  # none: one each
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
