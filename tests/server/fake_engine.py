"""Engine without a model. It speaks the wire protocol and returns the prompt's last words.

A request's output is the text of its last user message, then the end token, so every stream has its
own expected answer. Attributes change the behaviour between requests, from any thread.
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace
from tokenizers import Tokenizer

from nanovllm.experts import ExpertLoad
from nanovllm.ipc.channel import Frames, frame
from nanovllm.look import Look, Steps
from nanovllm.wire import (
    Abort,
    Finish,
    FinishReason,
    Generate,
    Ready,
    Refusal,
    RefusalKind,
    Started,
    Stats,
    StepOutput,
    ToEngine,
    TokenLogprobs,
    Unwanted,
)

USER, END = "<|im_start|>user\n", "<|im_end|>"
READY = Ready(
    worker=0,
    model="demo",
    max_model_tokens=512,
    vocab_size=4096,
    num_pages=64,
    page_tokens=16,
    num_slots=256,
)
NO_STEPS = Steps(1.0, 0, 0, [], b"", [], 0, 64, 0)
FILLER = "x"  # follows the end token if that does not end the request


@dataclass(eq=False)
class Running:
    spec: Generate
    output: list[int]
    num_sent: int = 0
    num_steps: int = 0
    is_started: bool = False


@dataclass(eq=False)
class FakeEngine:
    path: str
    tokenizer: Tokenizer
    tokens_per_step: int = 1
    ragged: tuple[int, ...] = ()  # instead: tokens of each request's steps in turn, repeated
    step_s: float = 0.0
    num_cached: int = 0
    refuse: Refusal | None = None  # refuses every request from now on with this kind and message
    answer: str | None = None  # replaces the last user message
    answer_ids: list[int] | None = None  # the same as ids, with no end token after them
    corrupt_after: int = -1  # a request with this number of tokens ends with an error
    steps: Steps = NO_STEPS  # answers every look
    experts: ExpertLoad | None = None
    handover: str = ""  # of all that finish
    is_stuck: bool = False  # starts requests, but never sends a token
    generates: list[Generate] = field(default_factory=list)
    unwanted: list[str] = field(default_factory=list)  # tickets
    aborts: list[int] = field(default_factory=list)
    running: dict[int, Running] = field(default_factory=dict)

    def start(self) -> None:
        is_up = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._peers: list[asyncio.StreamWriter] = []

        def live() -> None:
            asyncio.set_event_loop(self._loop)
            self._server = self._loop.run_until_complete(
                asyncio.start_unix_server(self._talk, self.path)
            )
            self._loop.call_soon(is_up.set)
            self._loop.run_forever()

        threading.Thread(target=live, daemon=True).start()
        is_up.wait()

    def reset(self) -> None:
        """Restore the initial state, with no request running."""
        fresh = FakeEngine(self.path, self.tokenizer)
        for name in ("tokens_per_step", "step_s", "num_cached", "refuse", "answer", "answer_ids"):
            setattr(self, name, getattr(fresh, name))
        self.ragged = ()
        self.steps = NO_STEPS
        self.experts = None
        self.corrupt_after = -1
        self.handover = ""
        self.is_stuck = False
        for held in (self.generates, self.unwanted, self.aborts, self.running):
            held.clear()

    def die(self) -> None:
        """Close every connection, as a killed process would."""

        def close() -> None:
            for peer in self._peers:
                peer.transport.abort()

        self._loop.call_soon_threadsafe(close)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker = len(self._peers)
        self._peers.append(writer)
        encoder = msgspec.msgpack.Encoder()
        writer.write(frame(encoder, replace(READY, worker=worker)))
        frames = Frames(msgspec.msgpack.Decoder[ToEngine](ToEngine))
        stepping = asyncio.create_task(self._step_forever(writer, encoder))
        while data := await reader.read(65536):
            for message in frames.feed(data):
                if isinstance(message, Abort):
                    self.aborts.append(message.request_id)
                    self.running.pop(message.request_id, None)
                elif isinstance(message, Unwanted):
                    self.unwanted.append(message.ticket)
                elif isinstance(message, Look):
                    writer.write(frame(encoder, self.steps))
                else:
                    self._add(message, writer, encoder)
        stepping.cancel()

    def _add(
        self, message: Generate, writer: asyncio.StreamWriter, encoder: msgspec.msgpack.Encoder
    ) -> None:
        self.generates.append(message)
        if self.refuse is not None:
            refusal = Refusal(message.request_id, self.refuse.kind, self.refuse.message)
            writer.write(frame(encoder, StepOutput(refused=[refusal])))
        else:
            self.running[message.request_id] = Running(message, self.output_of(message))

    def output_of(self, message: Generate) -> list[int]:
        if self.answer_ids is not None:
            return list(self.answer_ids)
        answer = self.answer
        if answer is None:
            prompt = self.tokenizer.decode(array("i", message.prompt), skip_special_tokens=False)
            answer = prompt.rpartition(USER)[2].partition(END)[0]
        return self.tokenizer.encode(answer + END, add_special_tokens=False).ids

    async def _step_forever(
        self, writer: asyncio.StreamWriter, encoder: msgspec.msgpack.Encoder
    ) -> None:
        while True:
            await asyncio.sleep(self.step_s if self.running else 0.001)
            if self.running:
                writer.write(frame(encoder, self._step()))
                await writer.drain()

    def _step(self) -> StepOutput:
        ids, tokens, counts = array("q"), array("i"), array("i")
        started: list[Started] = []
        finished: list[Finish] = []
        logprobs: list[TokenLogprobs] = []
        for request_id, request in list(self.running.items()):
            if not request.is_started:
                request.is_started = True
                started.append(Started(request_id, self.num_cached))
            if self.is_stuck:
                continue
            if request.num_sent == self.corrupt_after:
                finished.append(Finish(request_id, FinishReason.ERROR))
                del self.running[request_id]
                continue
            new = [self._next(request) for _ in range(self._count(request))]
            for at, token in enumerate(new):
                is_stop = token in request.spec.stop_ids
                if is_stop or request.num_sent + at + 1 >= request.spec.max_new:
                    del new[at + 1 :]
                    reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
                    finished.append(Finish(request_id, reason, self.handover))
                    del self.running[request_id]
                    break
            request.num_sent += len(new)
            ids.append(request_id)
            tokens.extend(new)
            counts.append(len(new))
            if (num_tops := request.spec.sampling.logprobs) >= 0:
                for token in new:
                    tops = [token + i for i in range(num_tops)]
                    values = [-0.5 - i for i in range(num_tops)]
                    logprobs.append(TokenLogprobs(request_id, token, -0.5, tops, values))
        one_each = all(count == 1 for count in counts)
        return StepOutput(
            ids=ids.tobytes(),
            tokens=tokens.tobytes(),
            counts=b"" if one_each else counts.tobytes(),
            started=started,
            finished=finished,
            logprobs=logprobs,
            stats=Stats(num_running=len(self.running), kv_usage=0.25, experts=self.experts),
        )

    def _count(self, request: Running) -> int:
        request.num_steps += 1
        if not self.ragged:
            return self.tokens_per_step
        return self.ragged[(request.num_steps + request.spec.request_id) % len(self.ragged)]

    def _next(self, request: Running) -> int:
        if request.output:
            return request.output.pop(0)
        return int(self.tokenizer.token_to_id(FILLER))


def queue_full() -> Refusal:
    return Refusal(0, RefusalKind.QUEUE_FULL, "4096 requests are already waiting")
