"""Reply to one chat request: when to write, and when to give up.

Headers wait for the first event, so that a refusal by the engine gets its own HTTP status. The
session handles tokens and chunks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from nanovllm.ipc.client import EngineClient, EngineLostError
from nanovllm.log import fields
from nanovllm.server.answers import DONE, KEEP_ALIVE, error_event
from nanovllm.server.asgi import JSON, Header, Receive, Writer, start
from nanovllm.server.chat import CORRUPTED, ChatSession
from nanovllm.server.errors import ApiError
from nanovllm.server.metrics import Metrics
from nanovllm.server.protocol import ChatRequest
from nanovllm.server.served import Served
from nanovllm.server.template import Prompt

EVENT_STREAM = b"text/event-stream; charset=utf-8"
CLIENT_LEFT = 499  # status for the log; the connection is gone


class Reply:
    def __init__(
        self,
        client: EngineClient,
        metrics: Metrics,
        request_id: str,
        writer: Writer,
        *,
        quiet_s: float,
        begun: float | None = None,
    ) -> None:
        """`quiet_s` is the time without events after which a stream gets a comment.

        `begun` is the monotonic time at which the request came; None means now.
        """
        self.session: ChatSession
        self.is_over = False
        self.summary = ""  # log fields, set at the end
        self._client = client
        self._metrics = metrics
        self._request_id = request_id
        self._id_header = (b"x-request-id", request_id.encode())
        self._writer = writer
        self._quiet_s = quiet_s
        self._is_quiet = False  # nothing was written since the last tick
        self._timer: asyncio.TimerHandle | None = None
        self._is_started = False
        self._num_seen = 0  # tokens at the last update
        self.begun = time.monotonic() if begun is None else begun
        self._started = self._first = self._last = self.begun

    def open(self, request: ChatRequest, prompt: Prompt, served: Served, seed: int) -> None:
        """Submit to the engine. Raise ApiError if the request cannot be served."""
        self.session = ChatSession(
            request,
            prompt,
            served,
            response_id=f"chatcmpl-{self._request_id}",
            created=int(time.time()),
            seed=seed,
            new_id=self._client.new_id,
            abort=self._client.abort,
            update=self.update,
        )
        try:
            for choice in self.session.choices:
                self._client.submit(choice.message, choice)
        except Exception as error:
            self.session.abort_all()  # those submitted before
            if isinstance(error, EngineLostError):
                raise ApiError(
                    503, "the server has lost its engine", code="engine_failed"
                ) from None
            raise
        self._metrics.prompt_tokens.observe(self.session.num_prompt)
        self._metrics.params_n.observe(request.n or 1)
        self._metrics.params_max_tokens.observe(self.session.choices[0].message.max_new)
        if request.stream:
            self._tick()

    async def run(self, receive: Receive) -> None:
        """Wait for the end of the response or a disconnect; `receive` reports both the same way."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self.is_over:
            self.session.abort_all()
            self._over(CLIENT_LEFT)

    def update(self) -> None:
        """Write the changes of a step. Runs once per stream and step."""
        session = self.session
        if self.is_over:
            return
        if session.is_started and not self._is_started:
            self._is_started = True
            self._started = self._client.step_time
        if session.num_tokens != self._num_seen:
            self._measure()
        if session.failure is not None:
            self.fail(session.failure)
        elif session.out:
            self._write(b"".join(session.out), is_last=session.is_done)
            session.out.clear()
        elif session.is_done:
            self._answer(200, session.body())

    def fail(self, failure: ApiError) -> None:
        """End with an error: as an event if headers were sent, otherwise as an HTTP response."""
        if self.is_over:
            return
        self.session.abort_all()
        self._metrics.rejected[failure.code or "error"] += 1
        self._metrics.corrupted_requests += failure.code == CORRUPTED
        if self._writer.status:  # headers were sent
            events = (*self.session.out, error_event(failure.body()), DONE)
            self._write(b"".join(events), is_last=True)
        else:
            self._answer(failure.status, failure.body(), failure.headers)

    def _measure(self) -> None:
        now, metrics = self._client.step_time, self._metrics
        if self._num_seen:
            # Tokens of a step share the time since the step before; choices run in parallel.
            num_new = self.session.num_tokens - self._num_seen
            num_per_choice = max(1.0, num_new / len(self.session.choices))
            metrics.inter_token_s.observe((now - self._last) / num_per_choice, num_new)
        else:
            self._first = now
            metrics.time_to_first_token_s.observe(now - self.begun)
            metrics.queue_s.observe(self._started - self.begun)
            metrics.prefill_s.observe(now - self._started)
            computed = self.session.num_prompt - self.session.num_cached
            metrics.computed_prompt_tokens.observe(computed)
        self._last = now
        self._num_seen = self.session.num_tokens

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
        self.is_over = True
        if self._timer is not None:
            self._timer.cancel()
        session, metrics = self.session, self._metrics
        if session.is_done:
            self._measure_whole()
        for choice in session.choices:
            if choice.reason or status == CLIENT_LEFT:
                metrics.finished[choice.reason or "abort"] += 1
        self.summary = fields(
            id=self._request_id,
            status=status,
            prompt=session.num_prompt,
            cached=session.num_cached,
            completion=session.num_tokens,
            ttft=self._first - self.begun if session.num_tokens else None,
            e2e=time.monotonic() - self.begun,
            finish=session.finish_reasons or ("abort" if status == CLIENT_LEFT else "error"),
        )

    def _measure_whole(self) -> None:
        session, metrics = self.session, self._metrics
        metrics.e2e_s.observe(self._last - self.begun)
        metrics.inference_s.observe(self._last - self._started)
        metrics.decode_s.observe(self._last - self._first)
        metrics.generation_tokens.observe(session.num_tokens)
        if session.num_tokens > 1:
            per_token = (self._last - self._first) / (session.num_tokens - 1)
            metrics.time_per_output_token_s.observe(per_token)
