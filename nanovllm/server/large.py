"""Subprocess that turns large bodies into prompts, one at a time, the smallest first.

Decoding holds the interpreter's lock (0.4 s for 30 MB of short messages), so a large body in this
process would delay small requests. The subprocess has a low priority, starts with the first large
body, and is killed when one takes too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from nanovllm.config import Config
from nanovllm.log import setup
from nanovllm.own_process import set_name
from nanovllm.server.errors import ApiError
from nanovllm.server.protocol import ChatRequest
from nanovllm.server.served import Served
from nanovllm.server.template import Prompt
from nanovllm.transfer.params import PLAIN, TransferParams, params_in, used_ticket
from nanovllm.wire import Ready

log = logging.getLogger("server")
MANY_MESSAGES = 128  # more make a body large: a template takes some 15 us each with the lock held
LARGE_BYTES = 128 * 1024  # bytes of a body; some 30,000 tokens of English
MAX_LEFT_BYTES = 1024 * 1024  # bytes of fields other than messages, which this process decodes too
MAX_S = 30.0  # seconds for one body; other processes may slow the subprocess down
START_S = 120.0
NICENESS = 10
NAME = "nanovllm-large"
Prepared = tuple[ChatRequest, Prompt]


class RefusedBody(Struct, frozen=True, tag=True):
    """Refusal sent by the subprocess: the arguments of an ApiError, and its `transfer`."""

    status: int
    message: str
    param: str | None
    code: str | None
    transfer: TransferParams = PLAIN

    def error(self) -> ApiError:
        error = ApiError(self.status, self.message, param=self.param, code=self.code)
        error.transfer = self.transfer
        return error


class PreparedBody(Struct, frozen=True, tag=True):
    rest: bytes  # JSON, since its numbers may have more digits than msgpack allows
    prompt: Prompt


_decode = msgspec.msgpack.Decoder(PreparedBody | RefusedBody).decode


class Room:
    """Budget of bytes for large bodies that are being read or wait to become prompts."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes

    @contextlib.contextmanager
    def taken(self) -> Iterator[Callable[[int], None]]:
        """Yield a function to call with a body's length as it grows. It raises ApiError if full."""
        held = 0

        def grow(num_bytes: int) -> None:
            nonlocal held
            num_new = num_bytes - held
            if num_bytes <= LARGE_BYTES:
                return
            if num_new > self._left:
                raise ApiError(
                    503, "too many large requests are waiting; retry later", code="overloaded"
                )
            self._left -= num_new
            held = num_bytes

        try:
            yield grow
        finally:
            self._left += held


class LargeBodies:
    """Queue of large bodies and the thread that waits for the subprocess. Leaving the context ends
    both.

    `decline` is called with the ticket of a large body that was cancelled while it was in progress.
    Those of small ones, which have many messages, are read by the caller.

    Decision: no ticket is read from a body that is cancelled while it waits. To decode the body
    takes 13 to 40 ms for 30 MB, with the lock held. So the lease ends by itself.
    """

    def __init__(self, config: Config, ready: Ready) -> None:
        self.decline: Callable[[str], object] = lambda _: None
        self._worker = _Worker(config, ready)
        self._thread = ThreadPoolExecutor(1, "large")
        self._waiting: list[tuple[int, int, bytes, asyncio.Future[Prepared]]] = []
        self._numbers = itertools.count()
        self._is_busy = False

    def name(self, adapters: dict[str, str]) -> None:
        """Accept these adapters as models. Later changes of the dict apply, too."""
        self._worker.adapters = adapters

    def __enter__(self) -> LargeBodies:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.kill()
        self._thread.shutdown()
        self._worker.kill()  # if it was just starting

    async def prepare(self, body: bytes) -> Prepared:
        """Return the checked request without its messages, and its prompt. Raise ApiError.

        Cancellation removes a body from the queue; a body in progress is finished.
        """
        done: asyncio.Future[Prepared] = asyncio.get_running_loop().create_future()
        entry = (len(body), next(self._numbers), body, done)
        heapq.heappush(self._waiting, entry)
        self._start_next()
        try:
            return await done
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)

    def _start_next(self) -> None:
        if self._waiting and not self._is_busy:
            _, _, body, done = heapq.heappop(self._waiting)
            self._is_busy = True
            running = asyncio.get_running_loop().run_in_executor(
                self._thread, self._worker.prepare, body
            )
            running.add_done_callback(partial(self._finished, done, body))

    def _finished(
        self, done: asyncio.Future[Prepared], body: bytes, running: asyncio.Future[Prepared]
    ) -> None:
        self._is_busy = False
        error = running.exception()
        if done.done():  # cancelled
            self._decline_ticket(body, running)
        elif error is not None:
            done.set_exception(error)
        else:
            done.set_result(running.result())
        self._start_next()

    def _decline_ticket(self, body: bytes, running: asyncio.Future[Prepared]) -> None:
        error = running.exception()
        transfer = running.result()[0].transfer if error is None else transfer_of(body, error)
        if len(body) > LARGE_BYTES and (ticket := used_ticket(transfer)):
            self.decline(ticket)


class _Worker:
    """Handle of the subprocess, for use by one thread."""

    def __init__(self, config: Config, ready: Ready) -> None:
        self._given = config, ready
        self.adapters = ready.adapters  # those that may be named; changes while the server runs
        self._running: tuple[BaseProcess, Pipe] | None = None

    def prepare(self, body: bytes) -> Prepared:
        """Return the request and its prompt. Block until then. Raise ApiError."""
        try:
            pipe = self._pipe()
            pipe.send_bytes(msgspec.json.encode(self.adapters))
            pipe.send_bytes(body)
            if not pipe.poll(MAX_S):
                text = f"rendering and tokenising the body takes longer than {MAX_S:g} s"
                raise self._failure(400, text, "too_slow", body)
            answer = _decode(pipe.recv_bytes())
        except (EOFError, OSError):
            text = "the process for large requests exited; retry to start a new one"
            raise self._failure(503, text, "large_body_failed", body) from None
        if isinstance(answer, RefusedBody):
            raise answer.error()
        return msgspec.json.decode(answer.rest, type=ChatRequest), answer.prompt

    def _failure(self, status: int, text: str, code: str, body: bytes) -> ApiError:
        """End the subprocess. Failures are rare, so the ticket may be read here."""
        self.kill()
        error = ApiError(status, text, code=code)
        error.transfer = params_in(body)
        return error

    def kill(self) -> None:
        if self._running is not None:
            process, pipe = self._running
            self._running = None
            process.kill()
            pipe.close()

    def _pipe(self) -> Pipe:
        if self._running is None or not self._running[0].is_alive():
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, *self._given), name=NAME)
            process.start()
            theirs.close()
            self._running = process, ours
            if not ours.poll(START_S):
                raise EOFError
            ours.recv_bytes()
        return self._running[1]


def transfer_of(body: bytes, error: BaseException) -> TransferParams:
    """Return the role and ticket of a request that `error` has ended, `PLAIN` if unknown.

    A large body is not decoded here. The subprocess does so if it refuses the body.
    """
    if isinstance(error, ApiError) and error.transfer is not None:
        return error.transfer
    return params_in(body) if len(body) <= LARGE_BYTES else PLAIN


def work(pipe: Pipe, config: Config, ready: Ready) -> None:
    """Main function of the subprocess: answer each body until the pipe is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent process ends it
        signal.signal(number, signal.SIG_IGN)
    set_name(NAME)
    os.nice(NICENESS)
    setup(config.recipe.server.log_format)
    served = Served(config, ready)
    with contextlib.suppress(EOFError, OSError):
        pipe.send_bytes(b"ready")
        while True:
            served.adapters = msgspec.json.decode(pipe.recv_bytes())
            pipe.send_bytes(answered(pipe.recv_bytes(), served))


def answered(body: bytes, served: Served) -> bytes:
    """Return a `PreparedBody` or a `RefusedBody` in msgpack."""
    answer: PreparedBody | RefusedBody
    try:
        request = served.request(body)
        prompt = served.template.prompt(request, served.max_model_tokens)
        rest = msgspec.json.encode(replace(request, messages=[], chat_template_kwargs=None))
        if len(rest) > MAX_LEFT_BYTES:
            text = f"the body must have at most {MAX_LEFT_BYTES} bytes in addition to its messages"
            raise ApiError(400, text, code="body_too_large")
        answer = PreparedBody(rest, prompt)
    except Exception as error:
        if not isinstance(error, ApiError):
            log.exception("processing a large body failed")
            error = ApiError(500, "internal error")
        answer = RefusedBody(
            status=error.status,
            message=error.message,
            param=error.param,
            code=error.code,
            transfer=params_in(body),
        )
    return msgspec.msgpack.encode(answer)
