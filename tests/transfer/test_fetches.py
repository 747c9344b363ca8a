"""A fetch reaches only the engine of its ticket, and ends once."""

from __future__ import annotations

from nanovllm.transfer.fetches import Fetch, Fetches, FetchResults
from nanovllm.transfer.tickets import VERSION, Ticket


def fetch_of(number: int, engine: str = "p1", generation: int = 1) -> Fetch:
    ticket = Ticket(
        version=VERSION, engine=engine, generation=generation, request="r", pages=(1,),
        text=b"", num_tokens=1, expires_at=0.0, layout=b"", identity=b"",
    )  # fmt: skip
    return Fetch(number, ticket, [memoryview(bytearray(4))])


def test_a_ticket_of_another_start_of_the_engine_is_refused() -> None:
    results = FetchResults(lambda: None)
    fetches = Fetches(results)
    assert not fetches.add(fetch_of(1))  # not connected
    fetches.open("p1")
    assert fetches.add(fetch_of(2)) and not fetches.add(fetch_of(3, engine="p2"))
    fetches.fail_all()
    assert results.poll() == [(2, False)] and not fetches.add(fetch_of(4))
    fetches.open("p2")
    assert not fetches.add(fetch_of(5)) and fetches.take(0) is None
    fetches.close()
    fetches.open("p2")
    assert not fetches.add(fetch_of(6, engine="p2"))


def test_states_and_results() -> None:
    woken: list[int] = []
    results = FetchResults(lambda: woken.append(1))
    fetches = Fetches(results)
    fetches.open("p1")
    first, second = fetch_of(1), fetch_of(2, generation=7)
    assert fetches.add(first) and fetches.add(second)
    assert not fetches.copy(first, 0, memoryview(b"data"))  # only queued
    assert fetches.take(0) is first and fetches.generations() == [7, 1]
    assert fetches.copy(first, 0, memoryview(b"data")) and first.buffers[0] == b"data"
    fetches.cancel(second)
    assert fetches.generations() == [1]
    fetches.finish(first, True)
    fetches.finish(first, False)
    assert fetches.take(0) is second and not fetches.is_running(second)
    fetches.finish(second, False)
    assert results.poll() == [(1, True)] and woken == [1] and not results.wait(0.01)
