"""One chat request: its choices, its answer, and when parts of the answer are written.

1. The constructor makes one `Choice` for each of `n`; `open` submits them to the engine.
2. The engine's client passes results to the choices, which turn them into text.
3. The client calls `flush` once for all results that arrived together. It writes what is new.
4. The stream ends with all choices, with the first failure, or when the client leaves.

Headers wait for the first event, so that a refusal by the engine gets its own HTTP status.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import msgspec
from msgspec import UNSET

from nanovllm.ipc.client import EngineClient, EngineLostError
from nanovllm.log import fields
from nanovllm.server.answers import (
    DONE,
    KEEP_ALIVE,
    ChunkWriter,
    Counts,
    Tally,
    WholeWriter,
    chunk_head,
    error_event,
    usage_chunk,
)
from nanovllm.server.asgi import JSON, Header, Receive, Writer, start
from nanovllm.server.choice import CORRUPTED, Choice
from nanovllm.server.errors import ApiError
from nanovllm.server.handover import answer_without_pages, is_left_to_decode, kept_headers
from nanovllm.server.metrics import Metrics
from nanovllm.server.orders import generates
from nanovllm.server.protocol import ChatRequest, StreamOptions
from nanovllm.server.served import Served
from nanovllm.server.shapes import ChatCompletion
from nanovllm.server.template import Prompt
from nanovllm.wire import Generate

EVENT_STREAM = b"text/event-stream; charset=utf-8"
CLIENT_LEFT = 499  # status for the log; the connection is gone


class Stream:
    """A chat request that the engine serves, whether its answer is sent in parts or whole.

    An answer in parts grows in `_out` until the next flush.
    """

    def __init__(
        self,
        request: ChatRequest,
        prompt: Prompt,
        served: Served,
        client: EngineClient,
        *,
        writer: Writer,
        metrics: Metrics,
        request_id: str,
        seed: int,
        quiet_s: float,
        begun: float | None = None,
    ) -> None:
        """`seed` serves a request without one. Raise ApiError if the prompt does not fit.

        `quiet_s` is the time without events after which a stream gets a comment. `begun` is the
        monotonic time at which the request came; None means now.
        """
        self.is_over = False
        self.summary = ""  # log fields, set at the end
        self.failure: ApiError | None = None  # the first one
        self.num_tokens = 0  # of all choices, at the last flush
        self.begun = time.monotonic() if begun is None else begun
        self._started = self._first = self._last = self.begun
        self._request = request
        self._client = client
        self._metrics = metrics
        self._request_id = request_id
        self._id_header = (b"x-request-id", request_id.encode())
        self._writer = writer
        self._quiet_s = quiet_s
        self._is_quiet = False  # nothing was written since the last tick
        self._timer: asyncio.TimerHandle | None = None
        self._is_started = False
        self._is_done = False  # all choices have ended
        self._prompt_ids = prompt.ids if request.return_token_ids else []
        self._response_id = f"chatcmpl-{request_id}"
        self._created = int(time.time())
        self._model = request.model or served.name
        self._head = chunk_head(self._response_id, self._created, self._model)
        self._options = request.stream_options or StreamOptions()
        self._out: list[bytes] = []
        self._counted: list[ChunkWriter] = []  # those of chunks that carry the usage
        self._whole: list[WholeWriter] = []  # those of an answer that is not streamed
        ids = [client.new_id() for _ in range(request.n or 1)]
        messages = generates(request, prompt, served, seed=seed, ids=ids)
        self.tally = Tally(len(prompt.ids), [Counts() for _ in messages])
        self.choices: list[Choice] = []
        for message in messages:
            self._add_choice(message, prompt, served)

    def _add_choice(self, message: Generate, prompt: Prompt, served: Served) -> None:
        index, twice = len(self.choices), served.reasoning_content
        writer: ChunkWriter | WholeWriter
        if not self._request.stream:
            writer = WholeWriter(index, reasoning_content=twice)
            self._whole.append(writer)
        elif self._options.continuous_usage_stats:
            writer = ChunkWriter(
                self._head, index, self._out, tally=self.tally, reasoning_content=twice
            )
            self._counted.append(writer)
        else:
            writer = ChunkWriter(self._head, index, self._out, reasoning_content=twice)
        choice = Choice(
            self._request,
            prompt,
            served,
            message,
            writer=writer,
            tally=self.tally,
            index=index,
        )
        self.choices.append(choice)

    def open(self) -> None:
        """Submit to the engine. Raise ApiError if the engine is gone."""
        try:
            for choice in self.choices:
                self._client.submit(choice.message, choice, self)
        except Exception as error:
            self._abort()  # those submitted before
            if isinstance(error, EngineLostError):
                raise ApiError(
                    503, "the server has lost its engine", code="engine_failed"
                ) from None
            raise
        self._metrics.prompt_tokens.observe(self.tally.num_prompt)
        self._metrics.params_n.observe(len(self.choices))
        self._metrics.params_max_tokens.observe(self.choices[0].message.max_new)
        if self._request.stream:
            self._tick()

    async def run(self, receive: Receive) -> None:
        """Wait for the end of the response or a disconnect; `receive` reports both the same way."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self.is_over:
            self._abort()
            self._over(CLIENT_LEFT)

    def lost(self) -> None:
        text = "the engine failed before this request was finished"
        self.failure = self.failure or ApiError(503, text, code="engine_failed")

    def flush(self) -> None:
        """Write what is new since the last flush."""
        if self.is_over:
            return
        if not self._is_started and self.tally.num_cached is not None:
            self._is_started = True
            self._started = self._client.step_time
        num_tokens, num_open = 0, 0
        for choice, counts in zip(self.choices, self.tally.choices, strict=True):
            num_tokens += counts.tokens
            num_open += not choice.reason
            self.failure = self.failure or choice.failure
        if num_tokens != self.num_tokens:
            self._measure(num_tokens)
        for writer in self._counted:
            writer.flush()
        self._is_done = not num_open and self.failure is None
        if self._is_done and self._request.stream:
            if self._options.include_usage:
                self._out.append(usage_chunk(self._head, self.tally.usage()))
            self._out.append(DONE)
        if self.failure is not None:
            self.fail(self.failure)
        elif self._out:
            self._write(b"".join(self._out), is_last=self._is_done)
            self._out.clear()
        elif self._is_done:
            self._answer(200, self._body())

    def fail(self, failure: ApiError) -> None:
        """End with an error: as an event if headers were sent, otherwise as an HTTP response.

        A prefill request that a decode server may serve gets an answer without pages instead.
        """
        if self.is_over:
            return
        self._abort()
        self._metrics.rejected[failure.code or "error"] += 1
        self._metrics.corrupted_requests += failure.code == CORRUPTED
        if self._writer.status:  # headers were sent
            events = (*self._out, error_event(failure.body()), DONE)
            self._write(b"".join(events), is_last=True)
        elif self._request.transfer.role == "prefill" and is_left_to_decode(failure):
            body = answer_without_pages(self._request_id, self._model)
            self._answer(200, body, kept_headers(failure))
        else:
            self._answer(failure.status, failure.body(), failure.headers)

    def _abort(self) -> None:
        """Abort the choices that have not ended."""
        for choice in self.choices:
            if not choice.reason:
                self._client.abort(choice.message.request_id)

    def _body(self) -> bytes:
        wants_logprobs = bool(self._request.logprobs)
        handover = self.choices[0].handover
        completion = ChatCompletion(
            id=self._response_id,
            created=self._created,
            model=self._model,
            choices=[writer.choice(with_logprobs=wants_logprobs) for writer in self._whole],
            usage=self.tally.usage(),
            prompt_token_ids=self._prompt_ids or UNSET,
            kv_transfer_params=msgspec.Raw(handover.encode()) if handover else UNSET,
        )
        return msgspec.json.encode(completion)

    def _measure(self, num_tokens: int) -> None:
        """Observe the times of new tokens, of which there are `num_tokens` in all."""
        now, metrics = self._client.step_time, self._metrics
        if self.num_tokens:
            # Tokens of a step share the time since the step before; choices run in parallel.
            num_new = num_tokens - self.num_tokens
            num_per_choice = max(1.0, num_new / len(self.choices))
            metrics.inter_token_s.observe((now - self._last) / num_per_choice, num_new)
        else:
            self._first = now
            metrics.time_to_first_token_s.observe(now - self.begun)
            metrics.queue_s.observe(self._started - self.begun)
            metrics.prefill_s.observe(now - self._started)
            computed = self.tally.num_prompt - (self.tally.num_cached or 0)
            metrics.computed_prompt_tokens.observe(computed)
        self._last = now
        self.num_tokens = num_tokens

    def _write(self, data: bytes, *, is_last: bool = False) -> None:
        self._is_quiet = False
        if not self._writer.status:
            headers = [self._id_header, (b"cache-control", b"no-cache")]
            self._writer.put(start(200, EVENT_STREAM, headers))
        if is_last:
            self._over(200)
            self._writer.put({"type": "http.response.body", "body": data})
        else:
            self._writer.chunk(data)

    def _answer(self, status: int, body: bytes, headers: Iterable[Header] = ()) -> None:
        self._over(status)
        self._writer.respond(status, JSON, body, [self._id_header, *headers])

    def _tick(self) -> None:
        """Write a comment if nothing was sent since the last tick, and schedule the next one."""
        if self._is_quiet:
            self._write(KEEP_ALIVE)
        self._is_quiet = True
        self._timer = asyncio.get_running_loop().call_later(self._quiet_s, self._tick)

    def _over(self, status: int) -> None:
        """End the stream: observe its times, and make the summary."""
        self.is_over = True
        if self._timer is not None:
            self._timer.cancel()
        tally, metrics = self.tally, self._metrics
        if self._is_done:
            metrics.e2e_s.observe(self._last - self.begun)
            metrics.inference_s.observe(self._last - self._started)
            metrics.decode_s.observe(self._last - self._first)
            metrics.generation_tokens.observe(self.num_tokens)
            if self.num_tokens > 1:
                per_token = (self._last - self._first) / (self.num_tokens - 1)
                metrics.time_per_output_token_s.observe(per_token)
        for choice in self.choices:
            if choice.reason or status == CLIENT_LEFT:
                metrics.finished[choice.reason or "abort"] += 1
        reasons = {choice.reason for choice in self.choices if choice.reason}
        otherwise = "abort" if status == CLIENT_LEFT else "error"
        self.summary = fields(
            id=self._request_id,
            status=status,
            prompt=tally.num_prompt,
            cached=tally.num_cached or 0,
            loaded=tally.num_loaded or None,
            completion=self.num_tokens,
            ttft=self._first - self.begun if self.num_tokens else None,
            e2e=time.monotonic() - self.begun,
            finish=",".join(sorted(reasons)) or otherwise,
        )
