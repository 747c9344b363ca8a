"""Transfers with the disk end once they have on all ranks, and fail if one share does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_struct

from nanovllm.config import Disk, load_config
from nanovllm.engine.transfer_ends import TransferEnds, encode
from nanovllm.parallel.places import Place, RankLostError, places_of
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
    own = [Moved(1, fetch_s=0.1, num_bytes=7), Moved(2), Moved(3)]
    assert ends.taken(own) == [Moved(2)]  # of rank 0 alone
    others[1].reply(encode([Moved(3), Moved(1, fetch_s=0.3)]))
    eventually(lambda: len(woken) == 1)
    assert ends.taken([]) == []
    others[0].reply(encode([Moved(3)]))
    eventually(lambda: len(woken) == 2)
    assert ends.taken([]) == [Moved(3)]
    others[0].reply(encode([Moved(1, ok=False, lost=(b"a",))]))
    eventually(lambda: len(woken) == 3)
    expected = Moved(1, ok=False, fetch_s=0.3, num_bytes=7, lost=(b"a",))
    assert ends.taken([]) == [expected] and ends.taken([]) == []


def test_reports_may_come_before_rank_0_has_ended(places: list[Place]) -> None:
    first, *others = places
    ends, woken = TransferEnds(first), []
    ends.wake = lambda: woken.append(1)
    ends.start(Moves([], [], [], [Write(4, 9, b"b")]))
    for place in others:
        place.reply(encode([replace(Moved(4), ok=place.rank == 1)]))
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
