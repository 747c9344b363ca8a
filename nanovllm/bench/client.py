"""Client process of a benchmark: send chat requests over HTTP/1.1 and stamp each chunk of streams.

Decision: the client is an asyncio protocol on top of httptools instead of an HTTP library, because
it must never be the bottleneck. It took 5 us of CPU per chunk at 64 streams, 7 us if each read
has only one chunk. httpx with aiter_lines took 19 us. One process read 180,000 chunks per second.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from typing import Annotated, Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop
from msgspec import Meta, Struct

from nanovllm.bench.measure import Sample
from nanovllm.bench.workload import Conversation
from nanovllm.typed_yaml import NOT_JSON

REQUEST_TIMEOUT_S = 600.0
NOT_SENT = "not sent, because an earlier request of the conversation failed"
READY_S = 60.0  # timeout to start client processes


class Share(Struct, frozen=True):
    """One client process's share of a run."""

    url: str
    api_key: str | None
    conversations: list[Conversation]
    due_s: list[float]  # start times of conversations; empty: each lane starts the next when free
    num_lanes: int  # closed loop: conversations that this process holds at a time
    prefill_url: str = ""  # of a server that gets each request first; "": none


class Done(Struct):
    samples: list[Sample]
    busy: float  # CPU time / wall time of this process, or of the busiest one


class RunState:
    """State shared by all client processes of a run."""

    def __init__(self, context: SpawnContext, num_clients: int) -> None:
        self.all_ready = context.Barrier(num_clients + 1)  # including the parent
        self.counts = context.Array("q", 3)  # conversations taken, requests finished, their tokens

    def take(self) -> int:
        """Return 0, 1, 2, ..., each to one caller only."""
        with self.counts.get_lock():
            self.counts[0] += 1
            return int(self.counts[0]) - 1

    def finished(self, num_tokens: int) -> None:
        with self.counts.get_lock():
            self.counts[1] += 1
            self.counts[2] += num_tokens


Count = Annotated[int, Meta(ge=0, le=1 << 40)]


class _PromptDetails(Struct):
    cached_tokens: Count | None = None


class TokenCounts(Struct):
    """The tokens of an answer, as the server counts them."""

    prompt_tokens: Count
    completion_tokens: Count
    prompt_tokens_details: _PromptDetails | None = None


class _Delta(Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Chunk(Struct):
    choices: list[_Choice] = []
    usage: TokenCounts | None = None
    error: Any = None  # an object or a text


_decode = msgspec.json.Decoder(_Chunk).decode


class Channel(asyncio.Protocol):
    """One connection, at most one request at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self._sample = Sample(sent=0.0, stamps=[])
        self._over: asyncio.Future[None] | None = None
        self._rest = b""  # bytes of an unfinished event, or the body of an error
        self._now = 0.0
        self._is_complete = False  # True after the stream's [DONE]

    async def ask(self, request: bytes) -> Sample:
        """Send a request and return its sample, which also has errors."""
        self._parser = httptools.HttpResponseParser(self)
        self._rest, self._is_complete = b"", False
        self._over = asyncio.get_running_loop().create_future()
        self._sample = sample = Sample(sent=time.perf_counter(), stamps=[])
        self._transport.write(request)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await self._over
        except TimeoutError:
            sample.error = f"no end within {REQUEST_TIMEOUT_S:.0f} s"
            self._transport.abort()
        return sample

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self.is_open = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._end("the server closed the connection")

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"bad response: {error.__context__ or error}")  # the context is of `on_body`
            self._transport.abort()

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._rest += body
            return
        *events, self._rest = (self._rest + body).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):  # others are comments, or fields such as `event`
                if line.startswith(b"data:"):
                    self._event(line[5:].lstrip())

    def on_message_complete(self) -> None:
        sample, status = self._sample, self._parser.get_status_code()
        error = "" if sample.output_tokens else "the stream has no usage"
        if status != 200:
            error = f"HTTP {status}: {self._rest[:200].decode(errors='replace')}"
        elif not self._is_complete:
            error = "the stream ended early"
        self._end(error)

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._is_complete = True
            if not self._sample.stamps:  # tokens without text: stamp the end instead
                self._sample.stamps.append(self._now)
            return
        chunk, sample = _decode(data), self._sample
        for choice in chunk.choices:
            delta = choice.delta
            if delta.content or delta.reasoning or delta.reasoning_content:
                sample.stamps.append(self._now)
                if chunk.usage is not None:
                    sample.counts.append(chunk.usage.completion_tokens)
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details or _PromptDetails()
            sample.input_tokens = chunk.usage.prompt_tokens
            sample.output_tokens = chunk.usage.completion_tokens
            sample.cached_tokens = details.cached_tokens or 0
        if chunk.error is not None:
            sample.error = str(chunk.error)[:200]

    def _end(self, error: str) -> None:
        if self._over is not None and not self._over.done():
            self._sample.error = self._sample.error or error
            self._over.set_result(None)


class PrefillChannel(Channel):
    """A connection to a prefill server, whose answers are JSON."""

    @property
    def answer(self) -> bytes:
        return self._rest

    def on_body(self, body: bytes) -> None:
        self._rest += body

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        text = self._rest[:200].decode(errors="replace")
        self._end("" if status == 200 else f"prefill server: HTTP {status}: {text}")


class _Handover(Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


def prefill_leg(body: bytes) -> bytes:
    """Return the request to a prefill server, as routers send it."""
    fields = msgspec.json.decode(body)
    fields.pop("stream_options", None)
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    return msgspec.json.encode(
        {**fields, "stream": False, "max_tokens": 1, "kv_transfer_params": params}
    )


def decode_leg(body: bytes, answer: bytes) -> bytes:
    """Return the request to a decode server, with the object of the prefill server's answer."""
    params = msgspec.json.decode(answer, type=_Handover).kv_transfer_params
    return body.rstrip()[:-1] + b',"kv_transfer_params":' + bytes(params) + b"}"


class _Connections:
    """Connections to one server, which are used again."""

    def __init__(self, url: str, api_key: str | None, kind: type[Channel] = Channel) -> None:
        self._kind = kind
        self._idle: list[Channel] = []
        self._url = urlsplit(url)
        auth = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        host = self._url.netloc.rpartition("@")[2]
        self._head = (
            f"POST {self._url.path}/v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n{auth}"
            "Content-Type: application/json\r\nContent-Length:"
        )

    async def ask(self, body: bytes) -> tuple[Sample, Channel | None]:
        """Send a request. Return its sample, and the connection unless there is none."""
        while self._idle and not self._idle[-1].is_open:
            self._idle.pop()
        try:
            channel = self._idle.pop() if self._idle else await self._connect()
        except OSError as error:
            return Sample(time.perf_counter(), [], error=f"cannot connect: {error}"), None
        sample = await channel.ask(f"{self._head} {len(body)}\r\n\r\n".encode() + body)
        if channel.is_open:
            self._idle.append(channel)
        return sample, channel

    async def _connect(self) -> Channel:
        host, loop = self._url.hostname or "", asyncio.get_running_loop()
        tls, port = (True, 443) if self._url.scheme == "https" else (None, 80)
        port = self._url.port or port
        _, channel = await loop.create_connection(self._kind, host, port, ssl=tls)
        return channel


class _Driver:
    """Runner of one share of requests. Samples of finished ones are in `samples`."""

    def __init__(self, share: Share, shared: RunState) -> None:
        self.samples: list[Sample] = []
        self._share, self._shared = share, shared
        self._start = time.perf_counter()
        self._server = _Connections(share.url, share.api_key)
        self._prefill: _Connections | None = None
        if share.prefill_url:
            self._prefill = _Connections(share.prefill_url, share.api_key, PrefillChannel)

    async def run(self) -> Done:
        cpu = time.process_time()
        due_s = self._share.due_s
        if due_s:
            await asyncio.gather(*map(self._one, self._share.conversations, due_s))
        else:
            await asyncio.gather(*(self._lane() for _ in range(self._share.num_lanes)))
        wall = time.perf_counter() - self._start
        return Done(self.samples, (time.process_time() - cpu) / max(wall, 1e-9))

    async def _lane(self) -> None:
        while (at := self._shared.take()) < len(self._share.conversations):
            await self._hold(self._share.conversations[at])

    async def _one(self, conversation: Conversation, due_s: float) -> None:
        await asyncio.sleep(self._start + due_s - time.perf_counter())
        await self._hold(conversation, due_s)

    async def _hold(self, conversation: Conversation, due_s: float | None = None) -> None:
        """Send the requests of a conversation, one after another, until one fails.

        The requests after a failed one are not sent, but count as failed.
        """
        error = ""
        for at, turn in enumerate(conversation.turns):
            if error:
                sample = Sample(time.perf_counter(), [], error=NOT_SENT)
            else:
                if turn.pause_s:
                    await asyncio.sleep(turn.pause_s)
                sample = await self._send(conversation.body(at))
                error = sample.error
            if due_s is not None and at == 0:
                sample.late_s = sample.sent - self._start - due_s
            sample.session, sample.turn = conversation.session, at
            sample.reusable_tokens = turn.reusable
            self.samples.append(sample)
            self._shared.finished(sample.output_tokens)

    async def _send(self, body: bytes) -> Sample:
        if self._prefill is None:
            sample, _ = await self._server.ask(body)
            return sample
        first, channel = await self._prefill.ask(prefill_leg(body))
        if first.error or not isinstance(channel, PrefillChannel):
            return first
        try:
            second = decode_leg(body, channel.answer)
        except NOT_JSON as error:
            first.error = f"prefill server: bad response: {error}"
            return first
        sample, _ = await self._server.ask(second)
        sample.sent = first.sent  # the client waits for both
        return sample


def main(share: Share, shared: RunState, pipe: Connection) -> None:
    """Run a client process: wait until all are ready, run the share, and send the `Done`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    gc.disable()  # there are no cycles, and a pause would count as the server's
    shared.all_ready.wait(READY_S)
    pipe.send_bytes(msgspec.msgpack.encode(uvloop.run(_Driver(share, shared).run())))
