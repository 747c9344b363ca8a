"""Frames survive any split, both ends agree on messages, and a lost peer is noticed at once."""

from __future__ import annotations

import asyncio
import threading
from array import array
from pathlib import Path

import msgspec
import pytest
import uvloop
from hypothesis import given, strategies as st
from msgspec.structs import replace

from nanovllm.ipc.channel import BlockingConnection, Frames, Listener, frame
from nanovllm.ipc.client import EngineClient, EngineLostError
from nanovllm.wire import (
    WORKER_BITS,
    Abort,
    Finish,
    FinishReason,
    Generate,
    Refusal,
    RefusalKind,
    Sampling,
    Started,
    Stats,
    StepOutput,
    ToEngine,
    TokenLogprobs,
)
from tests.server.fake_engine import READY

THIRD = replace(READY, worker=3)


def generate(request_id: int, prompt=(1, 2)) -> Generate:
    packed = array("i", prompt).tobytes()
    return Generate(request_id, packed, 5, [7], Sampling(logit_bias={3: -1.5}, seed=-1))


messages = st.lists(
    st.builds(generate, st.integers(0, 2**62), st.lists(st.integers(0, 2**31 - 1), max_size=300))
    | st.builds(Abort, st.integers(0, 2**62)),
    max_size=6,
)


@given(messages, st.data())
def test_frames_survive_any_cut(sent, data) -> None:
    encoder = msgspec.msgpack.Encoder()
    stream = b"".join(frame(encoder, message) for message in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    frames = Frames(msgspec.msgpack.Decoder[ToEngine](ToEngine))
    got = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += frames.feed(stream[begin:end])
    assert got == sent


class Notes:
    """A sink, and its own stream, that records its calls."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def started(self, start) -> None:
        self.said.append(("started", start.num_cached))

    def logprobs(self, entry) -> None:
        self.said.append(entry)

    def tokens(self, token_ids) -> None:
        if 99 in token_ids:
            raise ValueError("a bug in the making of text")
        self.said.append(list(token_ids))

    def finish(self, finish) -> None:
        self.said.append(finish.reason)

    def refused(self, refusal) -> None:
        self.said.append(refusal.message)

    def lost(self) -> None:
        self.said.append("lost")

    def flush(self) -> None:
        self.said.append("flush")


def step(rows: dict[int, list[int]], **more: object) -> StepOutput:
    counts = [len(tokens) for tokens in rows.values()]
    return StepOutput(
        ids=array("q", rows).tobytes(),
        tokens=array("i", [token for tokens in rows.values() for token in tokens]).tobytes(),
        counts=b"" if set(counts) <= {1} else array("i", counts).tobytes(),
        **more,
    )


class Talk:
    """A real client on one end and a real connection on the other."""

    def __init__(self, tmp_path) -> None:
        self.path = str(tmp_path / "engine.sock")
        self.listener = Listener(self.path)
        self.ends: list[BlockingConnection] = []
        self.client: EngineClient | None = None

    def close(self) -> None:
        for end in (*self.ends, self.listener):
            end.close()

    def run(self, main) -> None:
        async def whole() -> None:
            try:
                await main()
            finally:
                if self.client is not None:
                    self.client.close()

        asyncio.run(whole())

    async def accept(self) -> BlockingConnection:
        end = await asyncio.to_thread(self.listener.accept)
        self.ends.append(end)
        return end

    async def open(self) -> None:
        self.was_lost = False

        def on_lost() -> None:
            self.was_lost = True

        connecting = asyncio.create_task(EngineClient.connect(self.path, on_lost))
        self.engine = await self.accept()
        self.engine.send(THIRD)
        self.client = await connecting

    async def says(self, *outputs: StepOutput) -> None:
        """Send all outputs in one write, so that they are decoded together."""
        encoder = msgspec.msgpack.Encoder()
        self.engine._sock.sendall(b"".join(frame(encoder, output) for output in outputs))
        await asyncio.sleep(0.02)


@pytest.fixture
def talk(tmp_path):
    talk = Talk(tmp_path)
    yield talk
    talk.close()


def test_requests_reach_the_engine_and_ids_carry_the_worker(talk) -> None:
    async def main() -> None:
        await talk.open()
        assert talk.client.ready == THIRD
        first = generate(talk.client.new_id(), range(100_000))
        assert first.request_id == 3 << WORKER_BITS | 1
        assert talk.client.new_id() == 3 << WORKER_BITS | 2
        talk.client.submit(first, Notes(), Notes())
        talk.client.abort(first.request_id)
        talk.client.abort(12345)  # an unknown id is ignored
        assert await asyncio.to_thread(talk.engine.recv) == first
        assert await asyncio.to_thread(talk.engine.recv) == Abort(first.request_id)

    talk.run(main)


def test_a_step_reaches_its_sinks_in_order_and_flushes_once_a_read(talk) -> None:
    async def main() -> None:
        await talk.open()
        one, two, gone = Notes(), Notes(), Notes()
        for request_id, sink in ((1, one), (2, two), (3, gone)):
            talk.client.submit(generate(request_id), sink, sink)
        talk.client.abort(3)
        entry = TokenLogprobs(2, 20, -0.5, [20], [-0.5])
        await talk.says(
            step({1: [10], 3: [30], 2: [20]}, started=[Started(2, 16)], logprobs=[entry]),
            step({2: [21, 22], 1: [11]}, finished=[Finish(1, FinishReason.LENGTH)]),
            step({}, refused=[Refusal(2, RefusalKind.INVALID, "no")], stats=Stats(num_running=9)),
        )
        assert one.said == [[10], [11], FinishReason.LENGTH, "flush"]
        assert two.said == [("started", 16), entry, [20], [21, 22], "no", "flush"]
        assert gone.said == []
        assert talk.client.stats.num_running == 9

    talk.run(main)


def test_a_sink_that_fails_ends_alone(talk) -> None:
    async def main() -> None:
        await talk.open()
        bad, good = Notes(), Notes()
        talk.client.submit(generate(1), bad, bad)
        talk.client.submit(generate(2), good, good)
        await talk.says(step({1: [99], 2: [5]}), step({1: [6], 2: [6]}))
        assert bad.said == ["lost", "flush"]
        assert good.said == [[5], [6], "flush"]
        sent = [await asyncio.to_thread(talk.engine.recv) for _ in range(3)]
        assert sent[2] == Abort(1)

    talk.run(main)


def test_a_dead_engine_ends_every_request(talk) -> None:
    async def main() -> None:
        await talk.open()
        sink = Notes()
        talk.client.submit(generate(1), sink, sink)
        assert await asyncio.to_thread(talk.engine.recv) == generate(1)
        talk.engine.close()
        await asyncio.sleep(0.02)
        assert sink.said == ["lost", "flush"]
        assert talk.was_lost and talk.client.is_lost
        with pytest.raises(EngineLostError):
            talk.client.submit(generate(2), Notes(), Notes())
        talk.client.abort(1)  # without a peer nothing happens

    talk.run(main)


def test_an_engine_that_dies_while_loading_is_an_error(talk) -> None:
    async def main() -> None:
        connecting = asyncio.create_task(EngineClient.connect(talk.path))
        (await talk.accept()).close()
        with pytest.raises(EngineLostError):
            await connecting

    talk.run(main)


async def heard_by(connecting: asyncio.Task[EngineClient], talk: Talk) -> None:
    """Accept the waiting client and send the ready message."""
    (await talk.accept()).send(THIRD)
    client = await connecting
    assert client.ready == THIRD
    client.close()
    talk.close()


def test_the_client_waits_for_an_engine_that_is_not_there_yet(tmp_path) -> None:
    async def main() -> None:
        connecting = asyncio.create_task(EngineClient.connect(str(tmp_path / "engine.sock")))
        await asyncio.sleep(0.1)
        await heard_by(connecting, Talk(tmp_path))

    asyncio.run(main())


def test_an_engine_that_ends_as_it_is_found_is_waited_for_again(tmp_path) -> None:
    """The kernel has queued the connection and resets it before the event loop runs."""

    async def main() -> None:
        gone = Listener(path := str(tmp_path / "engine.sock"))
        connecting = asyncio.create_task(EngineClient.connect(path))
        await asyncio.sleep(0)
        gone.close()
        await asyncio.sleep(0.1)
        assert not connecting.done()
        Path(path).unlink()
        await heard_by(connecting, Talk(tmp_path))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_the_engine_sees_a_client_leave_and_closing_wakes_its_reader(talk) -> None:
    async def main() -> None:
        await talk.open()
        talk.client.close()
        assert await asyncio.to_thread(talk.engine.recv) is None

        await talk.open()
        got: list[object] = []
        reader = threading.Thread(target=lambda: got.append(talk.engine.recv()))
        reader.start()
        talk.engine.close()
        await asyncio.to_thread(reader.join, 5)
        assert got == [None]

    talk.run(main)
