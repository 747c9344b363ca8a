"""The publisher with a plain subscriber: gaps, replays, slow readers, ports."""

from __future__ import annotations

import socket
import time
from array import array
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import zmq

from nanovllm.config import ConfigError
from nanovllm.kv.events import EventWriter
from nanovllm.kv.keys import PageKeys
from nanovllm.kv.page_log import Registered
from nanovllm.kv.publisher import EventPublisher
from nanovllm.kv_events import KvEvents
from tests.kv.disk.stores import eventually
from tests.kv.router_index import Subscriber

PAGE = 4


def has_arrived(subscriber: Subscriber, found: list[Any], number: int) -> bool:
    """Collect batches. Return True if the page of this number is the last one."""
    found += subscriber.batches(0.1)
    return bool(found) and found[-1][1][1][0]["token_ids"] == [number] * PAGE


def address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return f"tcp://127.0.0.1:{sock.getsockname()[1]}"


def page(number: int) -> list[Registered]:
    """Return the changes of a step that registers one page."""
    keys = PageKeys(array("i", [number] * PAGE), "", PAGE)
    return [Registered(keys.full(0), keys, 0)]


def started(asked: KvEvents, engine: int = 0) -> EventPublisher:
    return EventPublisher(asked, "kv@pod@demo", engine, EventWriter(PAGE, "full_attention"))


@pytest.fixture
def asked() -> KvEvents:
    return KvEvents(endpoint=address(), replay=address(), buffer_steps=50)


@pytest.fixture
def publisher(asked: KvEvents) -> Iterator[EventPublisher]:
    publisher = started(asked)
    yield publisher
    publisher.close()


def test_a_late_subscriber_asks_for_what_it_missed(
    publisher: EventPublisher, asked: KvEvents
) -> None:
    assert asked.endpoint and asked.replay
    for number in range(1, 4):
        publisher.send(page(number))
    with Subscriber(asked.endpoint, asked.replay) as subscriber:
        while not subscriber.batches(0.1):  # until the subscription has arrived
            publisher.send(page(9))
        batches = subscriber.replayed(0)
        assert [number for number, _ in batches] == list(range(len(batches)))
        (_, first), (_, second) = batches[:2]
        assert first[1] == [{"type": "AllBlocksCleared"}] and first[2] == 0
        assert second[1][0]["token_ids"] == [1] * PAGE
        assert abs(second[0] - time.time()) < 60
        assert subscriber.topics == {"kv@pod@demo"}
        assert [number for number, _ in subscriber.replayed(2)][:2] == [2, 3]
        found = subscriber.batches(0.1)
        for number in range(100, 160):
            publisher.send(page(number))
            if number % 20 == 19:  # the queue of 50 is never full
                eventually(partial(has_arrived, subscriber, found, number))
        last, _ = found[-1]
        assert [number for number, _ in subscriber.replayed(0)] == list(range(last - 49, last + 1))


def test_a_subscriber_that_never_reads_and_a_busy_thread_delay_nobody(
    publisher: EventPublisher, asked: KvEvents, caplog: pytest.LogCaptureFixture
) -> None:
    assert asked.endpoint and asked.replay
    with Subscriber(asked.endpoint, asked.replay) as slow:
        while not slow.batches(0.1):
            publisher.send(page(0))
        slow.sub.setsockopt(zmq.RCVHWM, 1)
        began = time.monotonic()
        for number in range(5000):
            publisher.send(page(number))
        assert time.monotonic() - began < 20
        # The queue of 50 was full, so numbers are missing, and no replay can have them.
        assert "50 batches wait; later ones are dropped" in caplog.text
        publisher.send(page(0))
        deadline = time.monotonic() + 30
        while (numbers := [n for n, _ in slow.replayed(0)])[-1] < 5000:
            assert time.monotonic() < deadline
            time.sleep(0.05)
            publisher.send(page(0))
        assert len(numbers) == 50 and numbers != list(range(numbers[0], numbers[0] + 50))


def test_each_engine_has_its_own_port(asked: KvEvents) -> None:
    assert asked.endpoint
    host, _, port = asked.endpoint.rpartition(":")
    other = KvEvents(endpoint=f"{host}:{int(port) - 3}")
    publisher = started(other, engine=3)
    with Subscriber(asked.endpoint) as subscriber:
        while not (batches := subscriber.batches(0.1)):
            publisher.send(page(0))
        assert batches[0][1][2] == 3
        with pytest.raises(ConfigError, match=rf"kv_events.endpoint: cannot listen on .*:{port}"):
            started(other, engine=3)
    publisher.close()


def test_requests_for_replays_that_are_none(publisher: EventPublisher, asked: KvEvents) -> None:
    assert asked.endpoint and asked.replay
    with Subscriber(asked.endpoint, asked.replay) as subscriber:
        dealer = subscriber.context.socket(zmq.DEALER)
        dealer.connect(asked.replay)
        for frames in ([b""], [b"", b"1"], [b"x" * 9, b"", b""], [b"12345678"]):
            dealer.send_multipart(frames)
        assert [number for number, _ in subscriber.replayed(0)] == [0]
        assert not dealer.poll(0)
