"""An exception during the admission of a request ends only that request.

Checked in the engine, in the engine's client and in the answer: nothing of the request remains, and
other requests are not affected.
"""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from nanovllm.config import load_config
from nanovllm.ipc.channel import frame
from nanovllm.ipc.client import EngineClient, EngineLostError
from nanovllm.plan import Admit
from nanovllm.sampling import PROCESSORS
from nanovllm.server.errors import ApiError
from nanovllm.server.metrics import Metrics
from nanovllm.server.served import Served
from nanovllm.wire import (
    Abort,
    Finish,
    FinishReason,
    Generate,
    Refusal,
    RefusalKind,
    Sampling,
    Started,
    StepOutput,
)
from tests.paper.engine import PaperEngine, generate
from tests.paper.gpu import solo_run
from tests.server import test_stream
from tests.server.fake_engine import READY
from tests.whole_engine import WholeEngine

CURSED = 40  # a token that makes the processor below raise


class Curse:
    """A processor that raises for requests with a certain bias, and otherwise does nothing."""

    FIELDS = ()

    def __init__(self, per_slot) -> None: ...

    def admit(self, admits: Sequence[Admit]) -> None:
        if any(CURSED in admit.sampling.logit_bias for admit in admits):
            raise RuntimeError("cursed")

    def wanted(self, host_slots):
        return host_slots < 0

    def apply(self, logits_SV, rows) -> None: ...


@pytest.fixture
def engine(monkeypatch) -> WholeEngine:
    cursed = {**PROCESSORS, "curse": f"{__name__}:Curse"}
    monkeypatch.setattr("nanovllm.sampling.sampler.PROCESSORS", cursed)
    return WholeEngine(load_config(None, ["device=cpu"]), slots=2, pages=60)


def test_an_engine_refuses_what_it_cannot_admit_and_goes_on(engine, caplog) -> None:
    refused: list[Refusal] = []
    collect = engine.collect

    def publish(out: StepOutput) -> None:
        refused.extend(out.refused)
        collect(out)

    engine.loop.publish = publish
    engine.submit(1, [5, 6, 7], 8)
    engine.run()
    quiet = dict(engine.text)
    free = engine.memory.pool.num_free
    engine.submit(2, [5, 6, 8], 30)
    engine.loop.step()
    with caplog.at_level(logging.ERROR, "engine"):
        for request_id in range(10, 20):
            engine.submit(request_id, [9], 5, Sampling(logit_bias={CURSED: 1.0}))
            engine.loop.step()
        engine.submit(20, [9], 5, Sampling(min_tokens=2**31 - 1))
        engine.submit(21, [engine.vocab_size], 5)
        engine.loop.handle(Generate(22, b"\0" * 5, 5, [], Sampling()))
    engine.loop.handle(Abort(10))  # its client may still leave
    engine.submit(3, [5, 6, 7], 8)
    engine.run()
    assert [(r.request_id, r.kind) for r in refused] == [
        (request_id, RefusalKind.FAILED) for request_id in (*range(10, 20), 20, 21, 22)
    ]
    assert {r.message for r in refused} == {"the engine failed to admit this request; see its log"}
    assert len(caplog.records) == 13 and all(record.exc_info for record in caplog.records)
    assert "cursed" in caplog.text and "request 10 cannot be admitted" in caplog.text
    assert engine.text[3] == quiet[1] and len(engine.text[2]) == 30
    assert set(engine.text) == {1, 2, 3}
    assert engine.memory.pool.num_free == free
    assert not engine.scheduler.has_work and engine.loop.idle


def test_whatever_the_scheduler_raises_is_one_requests_refusal() -> None:
    engine = PaperEngine(num_pages=20, num_slots=2, budget=16)
    add = engine.scheduler.add

    def adding(spec: Generate, *more: object) -> None:
        if spec.request_id == 2:
            raise ZeroDivisionError
        add(spec, *more)

    engine.scheduler.add = adding
    for request_id in (1, 2, 3):
        engine.say(generate(request_id, [1, 2, 3], 5))
    engine.finish_all()
    assert engine.refused == {2: RefusalKind.FAILED}
    alone = solo_run([1, 2, 3], 5, [], recurrent=False)
    assert engine.text == {1: alone, 3: alone}


# -- the API process -------------------------------------------------------------------------------


class Sink:
    def __init__(self, *, breaks: bool = False) -> None:
        self.breaks = breaks
        self.heard: list[str] = []

    def started(self, start: Started) -> None:
        self.heard.append("started")

    def logprobs(self, entry) -> None: ...

    def tokens(self, token_ids) -> None:
        self.heard.append(f"{len(token_ids)} tokens")

    def finish(self, finish) -> None: ...

    def refused(self, refusal) -> None:
        self.heard.append("refused")

    def lost(self) -> None:
        self.heard.append("lost")
        self.breaks = False

    def flush(self) -> None:
        if self.breaks:
            raise RuntimeError("no room to write")
        self.heard.append("flush")


class Wire:
    """The connection of a client; stores the messages sent."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.encoder = msgspec.msgpack.Encoder()

    def send(self, message: object) -> None:
        frame(self.encoder, message)
        self.sent.append(message)


def connected() -> tuple[EngineClient, Wire]:
    client = EngineClient()
    client._connection = wire = Wire()
    client._received([READY])
    return client, wire


def order(request_id: int, **sampling: object) -> Generate:
    return Generate(request_id, array("i", [1]).tobytes(), 5, [], Sampling(**sampling))


def test_a_request_that_cannot_be_sent_leaves_no_sink() -> None:
    async def main() -> None:
        client, wire = connected()
        broken, whole = Sink(), Sink()
        with pytest.raises(OverflowError):
            client.submit(order(1, top_k=2**70), broken, broken)
        client.submit(order(2), whole, whole)
        assert [message.request_id for message in wire.sent] == [2]
        client._received([StepOutput(ids=array("q", [1, 2]).tobytes(), tokens=bytes(8))])
        client._lost()
        assert broken.heard == []
        assert whole.heard == ["1 tokens", "flush", "lost", "flush"]
        with pytest.raises(EngineLostError):
            client.submit(order(3), broken, broken)
        assert broken.heard == []

    asyncio.run(main())


def test_a_sink_that_cannot_write_is_told_and_holds_up_nobody(caplog) -> None:
    async def main() -> None:
        client, _ = connected()
        broken, whole = Sink(breaks=True), Sink()
        client.submit(order(1), broken, broken)
        client.submit(order(2), whole, whole)
        client._received([StepOutput(ids=array("q", [1, 2]).tobytes(), tokens=bytes(8))])
        assert broken.heard == ["1 tokens", "lost", "flush"]
        assert whole.heard == ["1 tokens", "flush"]
        assert "no room to write" in caplog.text

    asyncio.run(main())


@pytest.fixture(scope="module")
def served() -> Served:
    return Served(load_config(None), READY)


class FullEngine(test_stream.Engine):
    """An engine client that accepts two requests and refuses the third."""

    def submit(self, message: Generate, sink: Any, stream: Any) -> None:
        if len(self.sinks) == 2:
            raise OverflowError("too large")
        super().submit(message, sink, stream)


def test_a_choice_that_cannot_be_sent_takes_the_others_along(served) -> None:
    engine, metrics = FullEngine(), Metrics()
    stream = test_stream.made(engine, test_stream.Client(), metrics, served, n=4, stream=True)
    with pytest.raises(OverflowError):
        stream.open()
    assert set(engine.sinks) == {1, 2} <= set(engine.aborted)
    assert not metrics.params_n.total  # it never started


@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_admission_is_a_500(served, stream) -> None:
    async def main() -> None:
        engine, peer, reply, metrics = test_stream.opened(served, stream=stream, n=2)
        for _ in range(2):  # the second choice is refused, too
            engine.sinks[2].refused(Refusal(2, RefusalKind.FAILED, "its log says why"))
            reply.flush()
        reply.fail(ApiError(503, "the server is shutting down", code="shutting_down"))
        check_failed(peer, "admission_failed", "its log says why")
        assert engine.aborted == [1, 2] and reply.is_over
        assert metrics.rejected == {"admission_failed": 1} and not metrics.corrupted_requests

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_one_corrupted_choice_ends_its_request(served, stream) -> None:
    async def main() -> None:
        engine, peer, reply, metrics = test_stream.opened(served, stream=stream, n=3)
        engine.sinks[1].finish(Finish(1, FinishReason.LENGTH))
        engine.sinks[2].finish(Finish(2, FinishReason.ERROR))
        reply.flush()
        text = "the model produced NaN or infinite logits; this answer is invalid"
        check_failed(peer, "corrupted_output", text)
        assert engine.aborted == [3] and reply.is_over
        assert metrics.corrupted_requests == 1
        assert metrics.finished == {"length": 1, "error": 1}
        assert not sum(metrics.e2e_s.counts)

    asyncio.run(main())


def check_failed(peer: test_stream.Client, code: str, message: str) -> None:
    """Check that there was one response only, sent before any part of an answer."""
    assert (peer.status, peer.num_writes, peer.is_complete) == (500, 1, True)
    error = json.loads(peer.text)["error"]
    assert error == {"message": message, "type": "server_error", "param": None, "code": code}
