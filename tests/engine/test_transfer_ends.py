"""Transfers with the disk end once they have on all ranks, and fail if one share does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_struct

from nanovllm.config import Disk, load_config
from nanovllm.engine.transfer_ends import EndReporter, Report, TransferEnds, encode
from nanovllm.parallel.places import Place, RankLostError, places_of
from nanovllm.parallel.ring import RingWriter
from nanovllm.plan import Copies, Moved, Moves, Write
from tests.kv.disk.stores import eventually


@pytest.fixture
def places(tmp_path: Path) -> Iterator[list[Place]]:
    """Three ranks with a disk."""
    config = load_config(None, ["device=cpu", "parallel.tp=3", "cache.host_gib=1"])
    cache = replace_struct(config.recipe.cache, disk=Disk(path=str(tmp_path)))
    places = places_of(
        replace_struct(config, recipe=replace_struct(config.recipe, cache=cache)), ""
    )
    yield places
    for place in places:
        place.close()


def test_the_slowest_rank_ends_a_transfer_and_any_rank_fails_it(places: list[Place]) -> None:
    first, *others = places
    assert first.lanes == 1
    ends, woken = TransferEnds(first), []
    ends.wake = lambda: woken.append(1)
    load = Copies(1, [(5, 6)], fetches=[(b"a", 5)])
    plain = Copies(2, [(7, 8)])
    ends.start(Moves([], [], [load, plain], [Write(3, 9, b"b")]))
    own = [Moved(1, fetch_s=0.1, num_bytes=7, blank=frozenset({5})), Moved(2), Moved(3)]
    assert ends.taken(own) == [Moved(2)]  # of rank 0 alone
    others[1].reply(encode(Report([Moved(3), Moved(1, fetch_s=0.3, blank=frozenset({4}))])))
    eventually(lambda: len(woken) == 1)
    assert ends.taken([]) == []
    others[0].reply(encode(Report([Moved(3)])))
    eventually(lambda: len(woken) == 2)
    assert ends.taken([]) == [Moved(3)]
    others[0].reply(encode(Report([Moved(1, ok=False, lost=(b"a",))])))
    eventually(lambda: len(woken) == 3)
    blank = frozenset({4, 5})  # slots that any rank has not filled
    expected = Moved(1, ok=False, fetch_s=0.3, num_bytes=7, blank=blank, lost=(b"a",))
    assert ends.taken([]) == [expected] and ends.taken([]) == []


def test_reports_may_come_before_rank_0_has_ended(places: list[Place]) -> None:
    first, *others = places
    ends, woken = TransferEnds(first), []
    ends.wake = lambda: woken.append(1)
    ends.start(Moves([], [], [], [Write(4, 9, b"b")]))
    for place in others:
        place.reply(encode(Report([replace(Moved(4), ok=place.rank == 1)])))
    eventually(lambda: len(woken) == 2)
    assert ends.taken([]) == []
    assert ends.taken([Moved(4)]) == [Moved(4, ok=False)]


def test_a_rank_that_has_gone_is_an_error(places: list[Place]) -> None:
    ends, woken = TransferEnds(places[0]), []
    ends.wake = lambda: woken.append(1)
    places[2].close()
    eventually(lambda: len(woken) == 1)
    with pytest.raises(RankLostError, match="no longer reports the ends of transfers"):
        ends.taken([])


def test_a_report_that_cannot_be_read_is_an_error(
    places: list[Place], caplog: pytest.LogCaptureFixture
) -> None:
    ends, woken = TransferEnds(places[0]), []
    ends.wake = lambda: woken.append(1)
    places[1].reply(b"\xc1")
    eventually(lambda: len(woken) == 1)
    assert caplog.messages == ["the reports of rank 1 cannot be read"]
    with pytest.raises(RankLostError, match="no longer reports the ends of transfers"):
        ends.taken([])


class Ending:
    """Executor of a rank whose transfers end at once."""

    disk = None

    def __init__(self) -> None:
        self.tickets: list[int] = []
        self.wake: Callable[[], object] = lambda: None

    def call_when_moved(self, wake: Callable[[], object]) -> None:
        self.wake = wake

    def move(self, moves: Moves) -> None:
        self.tickets += [write.ticket for write in moves.writes]
        self.tickets += [store.ticket for store in moves.stores]

    def moved(self) -> list[Moved]:
        found, self.tickets = self.tickets, []
        return [Moved(ticket) for ticket in found]


def test_a_rank_that_cannot_report_is_an_error(places: list[Place]) -> None:
    """Rank 0 has read nothing for long. The rank may not wait, nor leave out a report."""
    ends, woken, rank = TransferEnds(places[0]), [], Ending()
    ends.wake = lambda: woken.append(1)
    reporter = EndReporter(rank, places[1])  # type: ignore[arg-type]
    first, second = (Moves([], [Copies(n + 5, [])], [], [Write(n, 9, b"b")]) for n in (1, 2))
    ends.start(first)
    reporter.move(first)
    eventually(lambda: len(woken) == 1)
    assert ends.taken([Moved(1)]) == []
    places[2].reply(encode(Report([Moved(1)])))
    eventually(lambda: len(woken) == 2)
    assert ends.taken([]) == [Moved(1)]
    back = places[1].back
    assert isinstance(back, RingWriter)

    def fail(message: bytes) -> None:
        raise TimeoutError("reader 1 has not read for 30.0 s")

    back.send = fail  # type: ignore[method-assign]
    ends.start(second)
    reporter.move(second)
    eventually(lambda: len(woken) == 3)
    with pytest.raises(RankLostError, match="no longer reports the ends of transfers"):
        ends.taken([])
