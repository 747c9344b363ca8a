"""Times at which a stream writes: headers late, comments while quiet, and no data lost."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from typing import Any

import msgspec
import pytest

from nanovllm.config import load_config
from nanovllm.server.asgi import EXTENSION, Writer, start
from nanovllm.server.metrics import Metrics
from nanovllm.server.protocol import ChatRequest
from nanovllm.server.served import Served
from nanovllm.server.stream import Stream
from nanovllm.wire import Finish, FinishReason, Generate, Refusal, RefusalKind, Started
from tests.server.fake_engine import READY
from tests.times import run_virtually


class Client:
    """A client, which is connection and `send` in one. Collects the text that arrived."""

    def __init__(self) -> None:
        self.status = 0
        self.text = ""
        self.num_writes = 0
        self.is_complete = False
        self.has_left = False

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.num_writes += 1
            self.text += message["body"].decode()
            self.is_complete = not message.get("more_body", False)

    def write(self, data: bytes) -> None:
        size, _, rest = data.partition(b"\r\n")
        assert len(rest) == int(size, 16) + 2 and rest.endswith(b"\r\n")
        assert self.status and not self.is_complete and not self.has_left
        self.num_writes += 1
        self.text += rest[:-2].decode()

    def is_closing(self) -> bool:
        return self.has_left

    def writer(self) -> Writer:
        return Writer({"extensions": {EXTENSION: {"transport": self}}}, self.send)


def body(text: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": more}


def test_writes_are_done_in_order_when_they_return() -> None:
    client = Client()
    writer = client.writer()
    writer.put(start(200, b"text/plain", []))
    writer.chunk(b"first chunk, ")
    writer.chunk(b"second")
    assert (client.status, client.text, client.is_complete) == (200, "first chunk, second", False)
    writer.put(body(b"."))
    assert (client.text, client.is_complete) == ("first chunk, second.", True)


def test_nothing_is_written_to_a_client_that_has_left() -> None:
    client = Client()
    writer = client.writer()
    writer.put(start(200, b"text/plain", []))
    client.has_left = True
    writer.chunk(b"lost")
    assert client.text == ""


def test_what_goes_wrong_with_a_write_reaches_the_caller() -> None:
    async def broken(message: dict[str, Any]) -> None:
        raise ValueError("no")

    async def waits(message: dict[str, Any]) -> None:
        await asyncio.sleep(0)

    scope = {"extensions": {EXTENSION: {"transport": Client()}}}
    with pytest.raises(ValueError, match="no"):
        Writer(scope, broken).put(body(b""))
    with pytest.raises(RuntimeError, match="made a write wait"):
        Writer(scope, waits).put(body(b""))


class Engine:
    """The part of EngineClient that a stream uses."""

    def __init__(self) -> None:
        self.step_time = 0.0
        self.num_ids = 0
        self.sinks: dict[int, Any] = {}
        self.aborted: list[int] = []
        self.abort = self.aborted.append

    def new_id(self) -> int:
        self.num_ids += 1
        return self.num_ids

    def submit(self, message: Generate, sink: Any, stream: Stream) -> None:
        self.sinks[message.request_id] = sink


@pytest.fixture(scope="module")
def served() -> Served:
    return Served(load_config(None), READY)


def made(engine: Engine, client: Client, metrics: Metrics, served: Served, **fields) -> Stream:
    message = {"role": "user", "content": "hi"}
    request = msgspec.convert({"messages": [message], **fields}, ChatRequest)
    return Stream(
        request,
        served.template.prompt(request),
        served,
        engine,
        writer=client.writer(),
        metrics=metrics,
        request_id="id",
        seed=1,
        quiet_s=0.05,
    )


def opened(served, **fields: object) -> tuple[Engine, Client, Stream, Metrics]:
    engine, client, metrics = Engine(), Client(), Metrics()
    stream = made(engine, client, metrics, served, **fields)
    stream.open()
    return engine, client, stream, metrics


def test_a_stream_that_waits_gets_comments_then_its_events(served) -> None:
    async def main() -> None:
        engine, client, stream, _ = opened(served, stream=True)
        assert client.status == 0
        await asyncio.sleep(0.13)
        assert (client.status, client.text) == (200, ": keep-alive\n\n" * 2)
        sink = engine.sinks[1]
        sink.tokens(served.template.tokenizer.encode("hello").ids)
        sink.finish(Finish(1, FinishReason.LENGTH))
        stream.flush()
        assert client.text.endswith("data: [DONE]\n\n") and client.is_complete and stream.is_over
        text = client.text
        await asyncio.sleep(0.1)
        stream.flush()
        assert client.text == text

    run_virtually(main())


def test_a_stream_with_events_gets_no_comments(served) -> None:
    async def main() -> None:
        engine, client, stream, _ = opened(served, stream=True)
        for _ in range(6):
            await asyncio.sleep(0.02)
            engine.sinks[1].tokens(served.template.tokenizer.encode("a").ids)
            stream.flush()
        assert client.text.count("data: ") == 7 and "keep-alive" not in client.text

    run_virtually(main())


def test_a_refusal_after_a_comment_is_an_event(served) -> None:
    async def main() -> None:
        engine, client, stream, metrics = opened(served, stream=True, n=2)
        await asyncio.sleep(0.07)
        engine.sinks[1].refused(Refusal(1, RefusalKind.QUEUE_FULL, "full"))
        stream.flush()
        assert client.status == 200 and client.is_complete
        assert '"code":"queue_full"' in client.text and client.text.endswith("data: [DONE]\n\n")
        assert 2 in engine.aborted
        assert metrics.rejected["queue_full"] == 1

    run_virtually(main())


def test_one_write_a_step_however_many_choices_and_tokens(served) -> None:
    async def main() -> None:
        engine, client, stream, _ = opened(served, stream=True, n=3)
        for num_steps in (1, 2):
            for sink in engine.sinks.values():
                sink.tokens(served.template.tokenizer.encode("a b").ids)
            stream.flush()
            assert client.num_writes == num_steps
        assert client.text.count("data: ") == 3 + 2 * 3

    run_virtually(main())


def test_tokens_of_one_step_share_the_time_since_the_step_before(served) -> None:
    """Each token after the first step's is one observation."""

    async def main() -> None:
        engine, _, stream, metrics = opened(served)
        sink = engine.sinks[1]
        (token,) = served.template.tokenizer.encode("a").ids
        for when, num_tokens in ((1.0, 1), (2.17, 3), (2.35, 1)):
            engine.step_time = stream.begun + when
            sink.tokens([token] * num_tokens)
            stream.flush()
        found = metrics.inter_token_s
        assert (sum(found.counts), found.total) == (4, pytest.approx(1.35))
        assert found.counts[bisect_left(found.bounds, 0.39)] == 3  # 1.17 s for three of them
        assert found.counts[bisect_left(found.bounds, 0.18)] == 1

    run_virtually(main())


def test_choices_run_side_by_side(served) -> None:
    async def main() -> None:
        engine, _, stream, metrics = opened(served, n=3)
        (token,) = served.template.tokenizer.encode("a").ids
        for when in (1.0, 1.45):
            engine.step_time = stream.begun + when
            for sink in engine.sinks.values():
                sink.tokens([token])
            stream.flush()
        found = metrics.inter_token_s
        assert (sum(found.counts), found.total) == (3, pytest.approx(3 * 0.45))

    run_virtually(main())


def test_the_clock_starts_and_stops_where_it_should(served) -> None:
    async def main() -> None:
        engine, client, stream, metrics = opened(served)
        sink = engine.sinks[1]
        (token,) = served.template.tokenizer.encode("a").ids
        for when, call in (
            (1.0, lambda: sink.started(Started(0, 0))),
            (3.0, lambda: sink.tokens([token])),
            (3.5, lambda: sink.tokens([token])),
            (4.5, lambda: (sink.tokens([token]), sink.finish(Finish(1, FinishReason.LENGTH)))),
        ):
            engine.step_time = stream.begun + when
            call()
            stream.flush()
        assert client.status == 200 and client.is_complete
        got = {h.name: h.total for h in metrics.histograms() if sum(h.counts)}
        expected = {
            "vllm:time_to_first_token_seconds": 3.0,
            "vllm:inter_token_latency_seconds": 1.5,
            "vllm:request_time_per_output_token_seconds": 0.75,
            "vllm:e2e_request_latency_seconds": 4.5,
            "vllm:request_queue_time_seconds": 1.0,
            "vllm:request_inference_time_seconds": 3.5,
            "vllm:request_prefill_time_seconds": 2.0,
            "vllm:request_decode_time_seconds": 1.5,
            "vllm:request_generation_tokens": 3.0,
        }
        assert expected == {name: pytest.approx(got[name]) for name in expected}

    run_virtually(main())
