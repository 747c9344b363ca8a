"""Messages of any length pass a ring unchanged, and a dead peer is an error."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from nanovllm.parallel.ring import HEADER, PIPE_BYTES, RING_BYTES, RingReader, RingWriter, ring
from nanovllm.watch import cpu_ticks

SMALL = 1 << 16
MOST = SMALL // 4 - HEADER.size  # bytes in one part
SPAWN = multiprocessing.get_context("spawn")


@contextmanager
def open_ring(num_readers: int, size: int = SMALL) -> Iterator[tuple[RingWriter, list[RingReader]]]:
    writer, readers = ring(num_readers, size)
    try:
        yield writer, readers
    finally:
        for end in (writer, *readers):
            end.close()


def message(at: int, length: int) -> bytes:
    """Return a different message for each `at`, so that stale bytes are noticed."""
    return np.random.default_rng(at).bytes(length)


def heard_by(reader: RingReader, pause_s: float = 0.0) -> list[bytes]:
    """Return all messages until the writer closes."""
    heard = []
    while (one := reader.recv()) is not None:
        heard.append(one)
        time.sleep(pause_s)
    return heard


class Reading(threading.Thread):
    def __init__(self, reader: RingReader, pause_s: float = 0.0) -> None:
        super().__init__()
        self.reader, self.pause_s = reader, pause_s
        self.heard: list[bytes] = []
        self.start()

    def run(self) -> None:
        self.heard = heard_by(self.reader, self.pause_s)


LENGTHS = st.one_of(
    st.integers(0, 300), st.integers(0, 3 * SMALL), st.sampled_from([MOST, MOST + 1])
)


@settings(max_examples=60, deadline=None)
@given(st.lists(LENGTHS, max_size=40), st.integers(1, 3))
def test_every_reader_gets_what_was_sent(lengths: list[int], num_readers: int) -> None:
    sent = [message(at, length) for at, length in enumerate(lengths)]
    with open_ring(num_readers) as (writer, readers):
        threads = [Reading(reader) for reader in readers]
        for one in sent:
            writer.send(one)
        writer.close()
        for thread in threads:
            thread.join(20)
            assert thread.heard == sent


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, MOST)), max_size=200))
def test_it_is_a_queue(steps: list[tuple[bool, int]]) -> None:
    """A message is sent if one fits; otherwise one is received. A list is the reference."""
    waiting: list[bytes] = []
    with open_ring(1) as (writer, (reader,)):
        for at, (sends, length) in enumerate(steps):
            if sends and len(waiting) < 2:
                waiting.append(message(at, length))
                writer.send(waiting[-1])
            elif waiting:
                assert reader.recv() == waiting.pop(0)
        writer.close()
        assert heard_by(reader) == waiting


@pytest.mark.parametrize("length", [1, MOST - 1, MOST, MOST + 1, SMALL - HEADER.size, SMALL])
def test_messages_go_round_the_end(length: int) -> None:
    """Start offsets vary, so headers and data cross the ring's end in every way."""
    with open_ring(1) as (writer, (reader,)):
        thread = Reading(reader)
        sent = [message(at, length + 16 * (at % 7)) for at in range(300)]
        for one in sent:
            writer.send(one)
        writer.close()
        thread.join(20)
        assert thread.heard == sent
        assert writer.at > 4 * SMALL or length == 1


def test_the_bell_holds_whatever_the_ring_holds() -> None:
    """The bell holds a byte for each of the shortest messages, so a writer never blocks on it."""
    with open_ring(1) as (writer, (reader,)):
        room = (SMALL - writer.most) // writer.grain
        assert room <= PIPE_BYTES
        for at in range(room):
            writer.send(bytes([at % 256]))
        assert [reader.recv() for _ in range(room)] == [bytes([at % 256]) for at in range(room)]


def test_the_slowest_reader_is_waited_for() -> None:
    with open_ring(2) as (writer, readers):
        threads = [Reading(readers[0]), Reading(readers[1], pause_s=0.01)]
        sent = [message(at, 5_000) for at in range(40)]
        begin = time.monotonic()
        for one in sent:
            writer.send(one)
        assert time.monotonic() - begin > 0.01 * (40 - SMALL // 5_000 - 1)
        writer.close()
        for thread in threads:
            thread.join(20)
            assert thread.heard == sent


def test_a_reader_that_reads_nothing_is_an_error_in_time() -> None:
    with open_ring(2) as (writer, readers):
        writer.patience_s = 0.2
        thread = Reading(readers[0])
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match=r"reader 2 has not read for 0\.2 s"):
            for at in range(100):
                writer.send(message(at, 5_000))
        assert 0.2 <= time.monotonic() - begin < 20
        writer.close()
        thread.join(20)
        assert 8 <= len(thread.heard) < 20  # the number of messages in the ring


def test_a_reader_that_goes_while_the_ring_is_full_is_an_error_at_once() -> None:
    with open_ring(1) as (writer, (reader,)):
        timer = threading.Timer(0.2, reader.close)
        timer.start()
        begin = time.monotonic()
        with pytest.raises(BrokenPipeError):
            writer.send(message(0, 2 * SMALL))
        assert time.monotonic() - begin < 20
        timer.join()


# -- between processes -------------------------------------------------------------------------


def echo(reader: RingReader, out: Pipe) -> None:
    """Child that sends the latency and the length of each message, and its CPU time at the end."""
    while (one := reader.recv()) is not None:
        took_s = (time.monotonic_ns() - int.from_bytes(one[:8], "little")) / 1e9
        out.send((took_s, len(one)))
    times = os.times()
    out.send((times.user + times.system, -1))


@contextmanager
def echoing(size: int = RING_BYTES) -> Iterator[tuple[RingWriter, Pipe, Any]]:
    with open_ring(1, size) as (writer, (reader,)):
        ours, theirs = SPAWN.Pipe(duplex=False)
        process = SPAWN.Process(target=echo, args=(reader, theirs))
        process.start()
        reader.close()
        theirs.close()
        try:
            yield writer, ours, process
        finally:
            process.kill()
            process.join()


def stamped(length: int) -> bytes:
    return time.monotonic_ns().to_bytes(8, "little") + bytes(length - 8)


def test_a_sleeping_reader_wakes_and_an_idle_one_computes_nothing() -> None:
    with echoing() as (writer, ours, process):
        writer.send(stamped(3_000))
        ours.recv()  # the child has started
        ticks = cpu_ticks(process.pid)
        time.sleep(1)
        assert cpu_ticks(process.pid) - ticks <= 1
        took = []
        for _ in range(50):
            writer.send(stamped(3_000))
            took.append(ours.recv())
            time.sleep(0.002)
        assert {length for _, length in took} == {3_000}
        assert sorted(took)[25][0] < 0.005  # some tens of microseconds on an idle machine
        writer.send(stamped(5_000_000))  # masks of 256 rows
        assert ours.recv()[1] == 5_000_000
        writer.close()
        assert ours.recv()[1] == -1
        process.join(10)
        assert process.exitcode == 0


def test_a_killed_reader_is_an_error_at_once() -> None:
    with echoing() as (writer, ours, process):
        writer.send(stamped(100))
        ours.recv()
        process.kill()
        process.join()
        with pytest.raises(BrokenPipeError):
            writer.send(b"too late")


def test_a_stopped_reader_is_an_error_in_time() -> None:
    with echoing(SMALL) as (writer, ours, process):
        writer.send(stamped(100))
        ours.recv()
        writer.patience_s = 0.3
        os.kill(process.pid, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            writer.send(stamped(2 * SMALL))
        assert time.monotonic() - begin < 20


def test_the_memory_has_no_name() -> None:
    with echoing() as (writer, ours, _):
        writer.send(stamped(100))
        ours.recv()
        maps = Path("/proc/self/maps").read_text()
        assert "/memfd:nanovllm-ring (deleted)" in maps
