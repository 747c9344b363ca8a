"""A buffer is given back at once, except while it is being copied."""

from __future__ import annotations

import threading

from nanovllm.kv.disk.transfers import Transfers
from tests.kv.disk.stores import eventually


def queues() -> Transfers:
    return Transfers(2, lambda: None)


def test_cancel_waits_for_a_copy_only() -> None:
    transfers = queues()
    queued = transfers.submit("read", b"a", memoryview(b""))
    assert queued is not None
    transfers.cancel(queued)
    running = transfers.submit("read", b"b", memoryview(b""))
    assert running is not None
    found = transfers.take("read")
    assert found is not None and found.ticket == running
    transfers.cancel(running)  # returns although its thread hangs
    assert not transfers.begin_copy(found)
    ticket = transfers.submit("read", b"c", memoryview(b""))
    copying = transfers.take("read")
    assert ticket is not None and copying is not None and transfers.begin_copy(copying)
    cancelled = threading.Event()
    thread = threading.Thread(target=lambda: (transfers.cancel(ticket), cancelled.set()))
    thread.start()
    assert not cancelled.wait(0.1)
    transfers.fail_all()  # a copy is not given up either
    assert not cancelled.wait(0.1)
    transfers.finish(copying, True)
    assert cancelled.wait(10) and transfers.poll() == []
    thread.join()


def test_results_and_keys() -> None:
    transfers = queues()
    tickets = [transfers.submit("write", key, memoryview(b"")) for key in (b"a", b"b", b"c")]
    assert tickets == [1, 2, None] and transfers.is_writing(b"a") and not transfers.is_writing(b"c")
    first = transfers.take("write")
    assert first is not None and transfers.begin_copy(first)
    transfers.finish(first, True)
    transfers.finish(first, False)
    assert transfers.poll() == [(1, True)] and transfers.is_writing(b"a")
    transfers.leave(first)
    assert not transfers.is_writing(b"a")
    transfers.fail_all()
    assert transfers.poll() == [(2, False)] and not transfers.is_writing(b"b")
    assert not transfers.wait(0.01) and transfers.answer(True) == 3 and transfers.wait(10)


def test_only_writes_are_bounded() -> None:
    transfers = queues()
    reads = [transfers.submit("read", b"a", memoryview(b"")) for _ in range(5000)]
    assert reads == list(range(1, 5001))
    writes = [transfers.submit("write", key, memoryview(b"")) for key in (b"a", b"b", b"c")]
    assert writes == [5001, 5002, None]


def test_closing_wakes_all() -> None:
    transfers = queues()
    ended: list[object] = []
    work = [lambda: ended.append(transfers.take("read")),
            lambda: ended.append(transfers.oldest_start(None))]  # fmt: skip
    for target in work:
        threading.Thread(target=target).start()
    transfers.close()
    eventually(lambda: ended == [None, None])
