"""An API process's view of the engine: submit and abort requests, route results to their sinks.

Results arrive once per engine step, as packed arrays, and reach each request through plain calls:
no queue, task or future per request. Knows nothing about HTTP or text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from nanovllm.ipc.channel import AsyncConnection
from nanovllm.look import Look, Steps
from nanovllm.wire import (
    WORKER_BITS,
    Abort,
    Beat,
    Finish,
    FromEngine,
    Generate,
    Ready,
    Refusal,
    Stats,
    StepOutput,
    TokenLogprobs,
)

log = logging.getLogger("ipc")


class EngineLostError(Exception):
    """The engine process is gone."""


class Sink(Protocol):
    """Where one request's results go. Called from the event loop; must not block."""

    def started(self, num_cached: int) -> None: ...

    def logprobs(self, entry: TokenLogprobs) -> None:
        """Precedes the `tokens` call that brings its token."""
        ...

    def tokens(self, token_ids: Sequence[int]) -> None: ...

    def finish(self, finish: Finish) -> None: ...

    def refused(self, refusal: Refusal) -> None: ...

    def lost(self) -> None:
        """The engine is gone, or this sink raised: nothing more will come."""
        ...

    def flush(self) -> None:
        """Everything a step had for this request was delivered. May be called twice in a step."""
        ...


class EngineClient:
    """One connection to the engine. `step_time` is when the latest results came, `ready_at` when
    it was ready (monotonic)."""

    ready: Ready
    ready_at: float

    def __init__(self, on_lost: Callable[[], None] = lambda: None) -> None:
        self.stats, self.num_open_then = Stats(), 0  # then: requests of ours that these know of
        self.is_lost = False
        self.step_time = 0.0
        self._beat = Beat(0.0, 0.0)
        self._beat_at: float | None = None  # when it came
        self._on_lost = on_lost
        self._sinks: dict[int, Sink] = {}
        self._lookers: deque[Callable[[Steps], object]] = deque()  # in the order of their looks
        self._num_ids = 0
        self._connection: AsyncConnection
        self._is_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect(cls, path: str, on_lost: Callable[[], None] = lambda: None) -> EngineClient:
        """Returns once the engine has said `Ready`. Raises EngineLostError if it dies before."""
        client = cls(on_lost)
        client._connection = await AsyncConnection.connect(path, client._received, client._lost)
        await client._is_ready
        client.ready_at = time.monotonic()
        return client

    @classmethod
    def absent(cls, ready: Ready) -> EngineClient:
        """Return the client of an engine that is away, though others are ready."""
        client = cls()
        client.ready, client.ready_at, client.is_lost = ready, 0.0, True
        return client

    def new_id(self) -> int:
        self._num_ids += 1
        return self.ready.worker << WORKER_BITS | self._num_ids

    def submit(self, request: Generate, sink: Sink) -> None:
        """Raises EngineLostError. Whatever it raises, the sink will hear nothing."""
        if self.is_lost:
            raise EngineLostError
        self._connection.send(request)
        self._sinks[request.request_id] = sink

    def abort(self, request_id: int) -> None:
        """The sink hears nothing more, not even of its end. Unknown ids are fine."""
        if self._sinks.pop(request_id, None) is not None and not self.is_lost:
            self._connection.send(Abort(request_id))

    def look(self, since: int, then: Callable[[Steps], object]) -> None:
        """Call `then` with the engine's newest steps after `since`; never, if it is lost."""
        self._lookers.append(then)
        self._connection.send(Look(since))

    def close(self) -> None:
        self._connection.close()

    def cut(self) -> None:
        """All sinks hear that the engine has gone."""
        self._connection.abort()

    @property
    def num_open(self) -> int:
        """Requests whose results are awaited."""
        return len(self._sinks)

    @property
    def silent_s(self) -> float:
        """Seconds for which the engine process has given no sign of life; 0 before its first."""
        return 0.0 if self._beat_at is None else time.monotonic() - self._beat_at

    @property
    def step_age_s(self) -> float:
        """Seconds since the engine's step loop last got on; 0 while it has nothing to do."""
        return self._beat.step_age_s and self._beat.step_age_s + self.silent_s

    @property
    def late_s(self) -> float:
        """How far the step in flight is beyond what a step may take; 0 or less if it is not."""
        return self._beat.late_s and self._beat.late_s + self.silent_s

    def _received(self, messages: list[FromEngine]) -> None:
        self.step_time = time.monotonic()
        touched: list[Sink] = []
        for message in messages:
            if isinstance(message, StepOutput):
                self._dispatch(message, touched)
            elif isinstance(message, Beat):
                self._beat, self._beat_at = message, self.step_time
            elif isinstance(message, Steps):
                self._lookers.popleft()(message)
            else:
                self.ready = message
                self._is_ready.set_result(None)
        self._flush(touched)

    def _dispatch(self, out: StepOutput, touched: list[Sink]) -> None:
        for start in out.started:
            self._say(start.request_id, "started", start.num_cached, touched)
        for entry in out.logprobs:
            self._say(entry.request_id, "logprobs", entry, touched)
        self._dispatch_tokens(out, touched)
        for finish in out.finished:
            self._say(finish.request_id, "finish", finish, touched)
            self._sinks.pop(finish.request_id, None)
        for refusal in out.refused:
            self._say(refusal.request_id, "refused", refusal, touched)
            self._sinks.pop(refusal.request_id, None)
        if out.stats is not None:  # of after all this
            self.stats, self.num_open_then = out.stats, self.num_open

    def _say(self, request_id: int, word: str, what: object, touched: list[Sink]) -> None:
        """`word`: the method of the request's sink, which may have gone, that is to hear it."""
        if (sink := self._sinks.get(request_id)) is not None:
            touched.append(sink)
            try:
                getattr(sink, word)(what)
            except Exception:
                self._failed(request_id, sink)

    def _dispatch_tokens(self, out: StepOutput, touched: list[Sink]) -> None:
        """The loop that runs once per generated token."""
        sinks = self._sinks
        tokens = memoryview(out.tokens).cast("i")
        counts = memoryview(out.counts).cast("i") if out.counts else None
        end = 0
        for row, request_id in enumerate(memoryview(out.ids).cast("q")):
            begin, end = end, end + (1 if counts is None else counts[row])
            if (sink := sinks.get(request_id)) is None:
                continue  # aborted: the engine had not heard of it yet
            try:
                sink.tokens(tokens[begin:end])
            except Exception:
                self._failed(request_id, sink)
            touched.append(sink)

    def _failed(self, request_id: int, sink: Sink) -> None:
        """One request's text could not be made; the others of the step must not notice."""
        log.exception("request %d failed", request_id)
        self.abort(request_id)
        sink.lost()

    def _lost(self) -> None:
        self.is_lost = True
        if not self._is_ready.done():
            self._is_ready.set_exception(EngineLostError("the engine died while starting"))
            return
        sinks, self._sinks = list(self._sinks.values()), {}
        for sink in sinks:
            sink.lost()
        self._flush(sinks)
        self._on_lost()

    def _flush(self, sinks: list[Sink]) -> None:
        """What one of them raises must not end the connection, and every other request with it."""
        for sink in sinks:
            try:
                sink.flush()
            except Exception:
                log.exception("an answer could not be written")
                with suppress(Exception):  # it may still say so to its client
                    sink.lost()
                    sink.flush()
