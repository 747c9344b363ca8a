"""An API process's client of the engine: submit and abort requests, route results to their sinks.

Results arrive once per engine step, as packed arrays, and reach each request through plain calls.
Requests may share a stream, which is flushed once after all results that arrived together. There is
no queue, task or future per request, and no code for HTTP or text.
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
    AdapterAnswer,
    Beat,
    Finish,
    FromEngine,
    Generate,
    LoadAdapter,
    Ready,
    Refusal,
    Started,
    Stats,
    StepOutput,
    TokenLogprobs,
    UnloadAdapter,
    Unwanted,
)

log = logging.getLogger("ipc")


class EngineLostError(Exception):
    """The engine process is gone."""


class Sink(Protocol):
    """Receiver of one request's results. Called from the event loop; must not block."""

    def started(self, start: Started) -> None: ...

    def logprobs(self, entry: TokenLogprobs) -> None:
        """Take the log-probabilities of a token, before the `tokens` call with that token."""
        ...

    def tokens(self, token_ids: Sequence[int]) -> bool:
        """Take a step's tokens. Return True if the request is to be aborted."""
        ...

    def finish(self, finish: Finish) -> None: ...

    def refused(self, refusal: Refusal) -> None: ...


class SinkGroup(Protocol):
    """Receiver of the ends of steps, for one or more sinks. The same rules apply as for a sink."""

    def lost(self) -> None:
        """End its requests: the engine is gone, or a method of it or of a sink failed."""
        ...

    def flush(self) -> None:
        """Take the end of the results that arrived together. Called once for all its sinks."""
        ...


Touched = dict[SinkGroup, None]  # streams with new results, in order


class EngineClient:
    """One connection to the engine.

    `step_time` is the monotonic time of the latest results, `ready_at` that of `Ready`.
    """

    ready: Ready
    ready_at: float

    def __init__(self, on_lost: Callable[[], None] = lambda: None) -> None:
        self.stats, self.num_open_then = Stats(), 0  # latest stats; open requests at that time
        self.is_lost = False
        self.digests: dict[str, bytes] = {}  # of the files of the loaded adapters, by name
        self.step_time = 0.0
        self._beat = Beat(0.0, 0.0)
        self._beat_at: float | None = None  # arrival time of the beat
        self._on_lost = on_lost
        self._sinks: dict[int, tuple[Sink, SinkGroup]] = {}
        self._lookers: deque[Callable[[Steps], object]] = deque()  # callbacks in order of Looks
        self._changes: dict[int, asyncio.Future[AdapterAnswer]] = {}  # by number of the message
        self._num_ids = 0
        self._connection: AsyncConnection
        self._is_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect(cls, path: str, on_lost: Callable[[], None] = lambda: None) -> EngineClient:
        """Connect and wait for the engine's `Ready`. Raise EngineLostError if it dies first."""
        client = cls(on_lost)
        client._connection = await AsyncConnection.connect(path, client._received, client._lost)
        await client._is_ready
        client.ready_at = time.monotonic()
        return client

    @classmethod
    def absent(cls, ready: Ready) -> EngineClient:
        """Return the client of a lost engine while other engines are ready."""
        client = cls()
        client.ready, client.ready_at, client.is_lost = ready, 0.0, True
        return client

    def new_id(self) -> int:
        self._num_ids += 1
        return self.ready.worker << WORKER_BITS | self._num_ids

    def decline(self, ticket: str) -> None:
        """Send the ticket of a request that is not submitted. Do nothing if the engine is gone."""
        if not self.is_lost:
            self._connection.send(Unwanted(ticket))

    def submit(self, request: Generate, sink: Sink, stream: SinkGroup) -> None:
        """Submit a request. Raise EngineLostError if the engine is gone.

        After any exception, no method of the sink is called.
        """
        if self.is_lost:
            raise EngineLostError
        self._connection.send(request)
        self._sinks[request.request_id] = sink, stream

    def abort(self, request_id: int) -> None:
        """Abort a request. Its sink is not called again. Unknown ids are ignored."""
        if self._sinks.pop(request_id, None) is not None and not self.is_lost:
            self._connection.send(Abort(request_id))

    def look(self, since: int, then: Callable[[Steps], object]) -> None:
        """Call `then` with the engine's latest steps after `since`; never if the engine is lost."""
        self._lookers.append(then)
        self._connection.send(Look(since))

    async def change(self, message: LoadAdapter | UnloadAdapter) -> str:
        """Change the engine's adapters. Return the reason why that failed, or an empty text.

        Raise EngineLostError if the engine is gone.
        """
        if self.is_lost:
            raise EngineLostError
        answer = self._changes[message.number] = asyncio.get_running_loop().create_future()
        self._connection.send(message)
        result: AdapterAnswer = await answer
        if isinstance(message, UnloadAdapter):
            self.digests.pop(message.name, None)
        elif not result.error:
            self.digests[message.name] = result.digest
        return result.error

    def close(self) -> None:
        self._connection.close()

    def cut(self) -> None:
        """Drop the connection. `lost` of all streams is then called."""
        self._connection.abort()

    @property
    def num_open(self) -> int:
        """Return the number of unfinished requests."""
        return len(self._sinks)

    @property
    def silent_s(self) -> float:
        """Return the seconds since the engine's latest beat; 0 before the first."""
        return 0.0 if self._beat_at is None else time.monotonic() - self._beat_at

    @property
    def step_age_s(self) -> float:
        """Return the seconds since the engine's step loop last made progress; 0 if it is idle."""
        return self._beat.step_age_s and self._beat.step_age_s + self.silent_s

    @property
    def late_s(self) -> float:
        """Return the seconds of the step in flight beyond its limit; 0 or less if it is in time."""
        return self._beat.late_s and self._beat.late_s + self.silent_s

    def _received(self, messages: list[FromEngine]) -> None:
        self.step_time = time.monotonic()
        touched: Touched = {}
        for message in messages:
            if isinstance(message, StepOutput):
                self._dispatch(message, touched)
            elif isinstance(message, Beat):
                self._beat, self._beat_at = message, self.step_time
            elif isinstance(message, AdapterAnswer):
                if not (answer := self._changes.pop(message.number)).done():
                    answer.set_result(message)
            elif isinstance(message, Steps):
                self._lookers.popleft()(message)
            else:
                self.ready, self.digests = message, dict(message.digests)
                self._is_ready.set_result(None)
        self._flush(touched)

    def _dispatch(self, out: StepOutput, touched: Touched) -> None:
        for start in out.started:
            self._call(start.request_id, "started", start, touched)
        for entry in out.logprobs:
            self._call(entry.request_id, "logprobs", entry, touched)
        self._dispatch_tokens(out, touched)
        for finish in out.finished:
            self._call(finish.request_id, "finish", finish, touched)
            self._sinks.pop(finish.request_id, None)
        for refusal in out.refused:
            self._call(refusal.request_id, "refused", refusal, touched)
            self._sinks.pop(refusal.request_id, None)
        if out.stats is not None:  # taken after all the above
            self.stats, self.num_open_then = out.stats, self.num_open

    def _call(self, request_id: int, method: str, result: object, touched: Touched) -> None:
        """Call a method of the request's sink, if the request is still open."""
        if (receivers := self._sinks.get(request_id)) is not None:
            sink, stream = receivers
            touched[stream] = None
            try:
                getattr(sink, method)(result)
            except Exception:
                self._failed(request_id, stream)

    def _dispatch_tokens(self, out: StepOutput, touched: Touched) -> None:
        """Call `tokens` of all sinks. The loop runs once per row, so it must be cheap."""
        sinks = self._sinks
        tokens = memoryview(out.tokens).cast("i")
        counts = memoryview(out.counts).cast("i") if out.counts else None
        end = 0
        for row, request_id in enumerate(memoryview(out.ids).cast("q")):
            begin, end = end, end + (1 if counts is None else counts[row])
            if (receivers := sinks.get(request_id)) is None:
                continue  # aborted, but the engine has not received the abort yet
            sink, stream = receivers
            try:
                if sink.tokens(tokens[begin:end]):
                    self.abort(request_id)
            except Exception:
                self._failed(request_id, stream)
            touched[stream] = None

    def _failed(self, request_id: int, stream: SinkGroup) -> None:
        """Abort a request whose sink raised an exception. Other streams are unaffected."""
        log.exception("request %d failed", request_id)
        self.abort(request_id)
        stream.lost()

    def _lost(self) -> None:
        self.is_lost = True
        if not self._is_ready.done():
            self._is_ready.set_exception(EngineLostError("the engine died while starting"))
            return
        for answer in self._changes.values():
            if not answer.done():
                answer.set_exception(EngineLostError())
        streams = {stream: None for _, stream in self._sinks.values()}
        self._sinks = {}
        for stream in streams:
            stream.lost()
        self._flush(streams)
        self._on_lost()

    def _flush(self, streams: Touched) -> None:
        """Flush streams. An exception of one must not end the connection and its other requests."""
        for stream in streams:
            try:
                stream.flush()
            except Exception:
                log.exception("writing an answer failed")
                with suppress(Exception):  # the stream may still report the error to its client
                    stream.lost()
                    stream.flush()
