"""Pages return once, never while a reader may still be told that they are held."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nanovllm.transfer.leases import HEARTBEAT_S, LEASE_S, MAX_LEASE_S, Leases


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_done_and_not_wanted_return_the_pages_once(clock: Clock) -> None:
    leases = Leases(clock=clock)
    first, second = leases.grant("a", [1, 2]), leases.grant("b", [3])
    assert (first, second, len(leases), leases.num_pages) == (1, 2, 2, 3)
    assert leases.is_held(first) and leases.is_held(second) and not leases.is_held(3)
    ended = leases.finish(first, "done")
    assert ended is not None and ended.pages == (1, 2) and ended.request == "a"
    assert leases.finish(first, "done") is None  # replayed
    assert not leases.is_held(first)
    ended = leases.finish(second, "not wanted")
    assert ended is not None and ended.pages == (3,)
    assert leases.finish(99, "done") is None  # foreign
    assert leases.counts == {"granted": 2, "done": 1, "not wanted": 1, "late": 2}
    assert leases.scan() == [] and len(leases) == 0


def test_a_lease_of_shares_ends_once_all_are_done_or_one_is_not_wanted(clock: Clock) -> None:
    leases = Leases(clock=clock)
    first, second = leases.grant("a", [1]), leases.grant("b", [2])
    assert leases.finish(first, "done", 1, 2) is None
    assert leases.finish(first, "done", 1, 2) is None and leases.is_held(first)
    ended = leases.finish(first, "done", 0, 2)
    assert ended is not None and ended.pages == (1,)
    ended = leases.finish(second, "not wanted", 1, 2)
    assert ended is not None and ended.pages == (2,) and len(leases) == 0
    assert leases.counts == {"granted": 2, "done": 1, "not wanted": 1}


def test_a_generation_is_never_used_again(clock: Clock) -> None:
    leases = Leases(clock=clock)
    old = leases.grant("a", [1])
    leases.finish(old, "done")
    new = leases.grant("b", [1])  # the same page
    assert new != old and not leases.is_held(old) and leases.is_held(new)


def test_an_idle_engine_frees_expired_pages(clock: Clock) -> None:
    leases = Leases(clock=clock)
    leases.grant("a", [1])
    clock.now += 10
    leases.grant("b", [2])
    clock.now = 1000 + LEASE_S - 1
    assert leases.scan() == []
    clock.now += 1
    assert [lease.pages for lease in leases.scan()] == [(1,)]
    clock.now += 9
    assert leases.scan() == []
    clock.now += 1
    assert [lease.pages for lease in leases.scan()] == [(2,)]
    assert leases.counts["expired"] == 2 and len(leases) == 0


def test_an_extended_lease_does_not_hide_expired_ones(clock: Clock) -> None:
    leases = Leases(clock=clock)
    first, *others = (leases.grant(str(i), [i]) for i in range(4))
    clock.now += 20
    assert leases.extend([first, 77]) == [77]
    clock.now += 10
    assert [lease.generation for lease in leases.scan()] == others
    assert leases.is_held(first) and leases.extend([*others, first]) == others


def test_heartbeats_end(clock: Clock) -> None:
    leases = Leases(clock=clock)
    held = leases.grant("a", [1])
    while leases.is_held(held):
        leases.extend([held])
        clock.now += HEARTBEAT_S
    assert MAX_LEASE_S <= clock.now - 1000 <= MAX_LEASE_S + HEARTBEAT_S


def test_expired_but_not_scanned_is_not_held(clock: Clock) -> None:
    leases = Leases(clock=clock)
    held = leases.grant("a", [1])
    clock.now += LEASE_S
    assert not leases.is_held(held) and leases.extend([held]) == [held]
    assert leases.finish(held, "done") is None and len(leases) == 1
    assert [lease.pages for lease in leases.scan()] == [(1,)]


class LeaseLaws(RuleBasedStateMachine):
    """Random grants, reads, messages and pauses, compared with a pool of pages."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.leases = Leases(clock=self.clock)
        self.free = set(range(12))
        self.content: dict[int, str] = {}  # of pages, by the request that computed them
        self.reads: list[tuple[int, str, list[int], list[str]]] = []
        self.granted: list[tuple[int, str, list[int]]] = []

    @precondition(lambda self: len(self.free) >= 2)
    @rule()
    def prefill(self) -> None:
        request = f"r{len(self.granted)}"
        pages = [self.free.pop(), self.free.pop()]
        self.content.update(dict.fromkeys(pages, request))
        self.granted.append((self.leases.grant(request, pages), request, pages))

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """Read pages of any ticket ever granted; the first half before and the rest later."""
        generation, request, pages = data.draw(st.sampled_from(self.granted))
        self.reads.append((generation, request, pages, [self.content[pages[0]]]))

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), end=st.sampled_from(["done", "not wanted", ""]))
    def end_read(self, data: st.DataObject, end: str) -> None:
        generation, request, pages, seen = self.reads.pop(
            data.draw(st.integers(0, len(self.reads) - 1))
        )
        seen.append(self.content[pages[1]])
        if self.leases.is_held(generation):
            assert seen == [request, request], "pages of another request would be committed"
        if end:
            self.release(self.leases.finish(generation, end))  # type: ignore[arg-type]

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def heartbeat(self, data: st.DataObject) -> None:
        self.leases.extend([data.draw(st.sampled_from(self.granted))[0]])

    @rule(seconds=st.sampled_from([1.0, 9.0, 31.0]))
    def pause(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def scan(self) -> None:
        for lease in self.leases.scan():
            self.release(lease)

    def release(self, lease: object) -> None:
        pages = set(getattr(lease, "pages", ()))
        assert not pages & self.free, "returned twice"
        self.free |= pages

    @invariant()
    def no_page_is_lost(self) -> None:
        assert len(self.free) + self.leases.num_pages == 12

    def teardown(self) -> None:
        self.clock.now += 1000
        self.scan()
        assert len(self.free) == 12 and len(self.leases) == 0


TestLeaseLaws = LeaseLaws.TestCase
TestLeaseLaws.settings = settings(max_examples=60, stateful_step_count=40)


@given(st.lists(st.sampled_from(["done", "not wanted"]), max_size=20))
def test_counts_add_up(ends: list[str]) -> None:
    leases = Leases(clock=Clock())
    for end in ends:
        leases.finish(leases.grant("a", [1]), end)  # type: ignore[arg-type]
    assert leases.counts["done"] + leases.counts["not wanted"] == leases.counts["granted"]
