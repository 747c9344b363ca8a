"""Pages below host memory: what reaches the disk, what comes back, and what leaves it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import pytest

from nanovllm.kv.costs import TransferCosts
from nanovllm.kv.hybrid import HybridMemory
from nanovllm.kv.keys import PageKeys
from nanovllm.kv.tier_counts import COUNTERS
from nanovllm.kv.tiered import TieredMemory
from nanovllm.kv.tiers import HostTier
from nanovllm.plan import Availability, Moved
from nanovllm.wire import Abort, FinishReason
from tests.paper.engine import PaperEngine, generate
from tests.paper.gpu import POISON
from tests.paper.test_arriving import A, AllBelow, B, engine_of, right, tiers


def test_pages_come_back_from_disk() -> None:
    engine = engine_of(disk=True, host=9)
    engine.say(generate(9, [9] * 27, 1))  # with B, it leaves little of A in host memory
    engine.finish_all()
    assert len(engine.transfers.disk) >= 7 + 7 + 6
    for name in range(2):
        engine.say(generate(name, A, 3))
        engine.finish_all()
        assert engine.cached[name] >= 24 and right(engine, name, A, 3)
    assert tiers(engine)["disk.hit_tokens"] == 4 * tiers(engine)["disk.loaded"] > 0
    assert tiers(engine)["disk.loaded"] + tiers(engine)["host.loaded"] <= 6  # the rest is found


def test_states_come_back_from_disk_with_their_pages() -> None:
    """The pages, the state and its two parts are read by one load."""
    engine = engine_of(num_pages=10, checkpoints=2, disk=True, host=9)
    for name, text in enumerate(([9] * 27, [8] * 27)):  # these take both checkpoints
        engine.say(generate(name, text, 1))
        engine.finish_all()
    assert sum(key.startswith(b"part 1 ") for key in engine.transfers.disk) >= 4
    before = tiers(engine)["disk.loaded"]
    engine.say(generate(2, A, 3))
    engine.finish_all()
    assert engine.cached[2] == 24 and right(engine, 2, A, 3)
    assert tiers(engine)["disk.loaded"] == before + 6 and tiers(engine)["disk.failed"] == 0


class TwoParts:
    """An empty disk. A state has two parts."""

    has_peers = False
    can_write = True
    availability = Availability()

    @property
    def writable(self) -> TwoParts:
        return self

    def has_remote(self, keys: Iterable[bytes]) -> bool:
        return False

    def holds(self, key: bytes) -> bool:
        return False

    def is_listed(self, key: bytes) -> bool:
        return False

    def note_rank(self, rank: int, availability: Availability) -> None:
        raise AssertionError("there is one rank")

    def page_counts(self) -> dict[str, float]:
        return {}

    def keys_of_parts(self, key: bytes) -> list[bytes]:
        return [b"0" + key, b"1" + key]

    def state_keys(self, key: bytes) -> list[bytes]:
        return []


class EvictedMeanwhile(TwoParts):
    """A disk with all pages, and a state that another thread evicts after it was found."""

    num_found = 0

    def holds(self, key: bytes) -> bool:
        return True

    def state_keys(self, key: bytes) -> list[bytes]:
        self.num_found += 1
        return self.keys_of_parts(key) if self.num_found == 1 else []


@pytest.mark.parametrize("on_device", [0, 2])
def test_a_state_that_is_evicted_during_an_admission_fails_its_load(on_device: int) -> None:
    """A checkpoint that no part of a state was copied to must not be found."""
    costs = TransferCosts(page_s=0, disk_page_s=0, start_s=0)
    memory = HybridMemory(8, 4, 1, tier=HostTier(8, below=EvictedMeanwhile(), costs=costs))
    keys = PageKeys(array("i", range(9)), "", 4)
    pages = memory.pool.take(on_device)
    assert pages is not None
    for index, page in enumerate(pages):
        memory._name(keys.full(index), page)
    memory._drop(pages)
    found = memory.admit(1, keys, 0, 0, may_load=True)
    assert found is not None and found.ticket == 1
    moves = memory.taken_moves()
    assert moves is not None
    parts = [key for key, _ in moves.loads[0].state_fetches]
    assert parts == [b"0" + keys.full(1), b"1" + keys.full(1)]
    memory.moved(Moved(1, ok=False))
    assert memory.arrived(1) is None and memory.states.get(keys.full(1)) is None


def test_a_place_is_not_given_away_during_the_store_of_its_state() -> None:
    """The state's parts take the slot of its page, so that the state itself is removed."""
    tier = HostTier(2, below=TwoParts())
    memory = HybridMemory(4, 4, 1, tier=tier)
    keys, states = PageKeys(array("i", range(9)), "", 4), memory.states
    states.put(states.take(4), keys, 4)
    tier.start_store({keys.full(0): 1}, set())
    tier.end_store(1, ok=True)
    memory._to_store[keys.full(0)] = None
    moves = memory.taken_moves()
    assert moves is not None and [one.state_to for one in moves.stores] == [-1, 0]
    assert states.get(keys.full(0)) is None and states.take(100) == -1
    memory.moved(Moved(2))
    assert states.take(100) == 0


def test_a_state_that_the_present_plan_saves_is_not_stored() -> None:
    """The store would begin before the plan, and read the place's former content."""
    for is_issued in (False, True):
        memory = HybridMemory(4, 4, 1, tier=HostTier(4, below=TwoParts()))
        keys = PageKeys(array("i", range(9)), "", 4)
        memory._unpublished[keys.full(0)] = memory.states.take(4), keys, 4
        memory.publish()
        if is_issued:
            assert memory.taken_moves() is None
        memory._to_store[keys.full(0)] = None
        assert (memory.taken_moves() is not None) is is_issued


def test_a_state_that_cannot_be_read_is_computed() -> None:
    engine = engine_of(num_pages=10, checkpoints=2, disk=True, host=9, fail_every=1)
    for name, text in enumerate(([9] * 27, [8] * 27, A)):
        engine.say(generate(name, text, 3))
        engine.finish_all()
        assert right(engine, name, text, 3)
    assert tiers(engine)["disk.failed"] == 1 and engine.cached[2] == 0


def test_a_state_whose_parts_are_not_all_there_is_no_hit() -> None:
    engine = engine_of(num_pages=10, checkpoints=2, disk=True, host=9)
    for name, text in enumerate(([9] * 27, [8] * 27)):
        engine.say(generate(name, text, 1))
        engine.finish_all()
    for key in [key for key in engine.transfers.disk if key.startswith(b"part 1 ")]:
        del engine.transfers.disk[key]
    engine.say(generate(2, A, 3))
    engine.finish_all()
    assert engine.cached[2] == 0 and right(engine, 2, A, 3)


def test_a_fetch_takes_no_slot_of_its_own_load() -> None:
    engine = engine_of(disk=True, host=5, polls=4)
    engine.say(generate(9, [9] * 27, 1))
    engine.finish_all()
    for name, text in enumerate((A, B, [9] * 27, A)):
        engine.say(generate(name, text, 1))
        engine.finish_all()
        assert right(engine, name, text, 1)
    assert tiers(engine)["disk.loaded"] >= 8


def test_a_page_that_cannot_be_read_is_computed() -> None:
    engine = engine_of(disk=True, host=9, fail_every=1)
    engine.say(generate(9, [9] * 27, 1))
    engine.finish_all()
    for name, text in enumerate((A, [7] * 27, A)):
        engine.say(generate(name, text, 3))
        engine.finish_all()
        assert right(engine, name, text, 3)
        assert tiers(engine)["disk.failed"] == 1
        engine.transfers.fail_every = 0
    assert engine.cached[0] < 24 <= engine.cached[2]


def test_pages_reach_the_disk_after_a_token_of_their_request_was_checked() -> None:
    engine = PaperEngine(num_pages=9, num_slots=2, budget=8, host=40, disk=True, depth=0)
    engine.say(generate(0, A, 2))
    engine.step()
    engine.step()
    engine.say(Abort(0))
    engine.finish_all()
    assert tiers(engine)["host.stored"] == 4 and not engine.transfers.disk
    engine.say(generate(1, [*A, POISON], 2))
    engine.finish_all()
    assert engine.finish[1] == FinishReason.ERROR and not engine.transfers.disk
    engine.say(generate(2, B, 2))
    engine.finish_all()
    assert tiers(engine)["disk.stored"] == len(engine.transfers.disk) == 7


def test_pages_of_a_corrupted_request_leave_the_disk() -> None:
    """It used six pages that are on the disk, or on their way there. The seventh has other text."""
    for polls in (0, 9):
        engine = PaperEngine(num_pages=20, num_slots=2, budget=40, host=40, disk=True)
        engine.say(generate(0, A, 2))
        engine.finish_all()
        assert len(engine.transfers.disk) == 7
        engine.say(generate(1, B, 2))
        engine.transfers.polls = polls
        while tiers(engine)["host.stored"] < 13:
            engine.step()
        assert len(engine.transfers.disk) == 7
        engine.say(generate(2, [*(B if polls else A), POISON], 2))
        engine.finish_all()
        assert engine.finish[2] == FinishReason.ERROR
        assert len(engine.transfers.disk) == 8
        assert len(engine.transfers.unwanted) == (6 if polls else 0)
        engine.say(generate(3, B if polls else A, 2))
        engine.finish_all()
        assert engine.cached[3] < 24 and len(engine.transfers.disk) == 14


def test_an_aborted_request_does_not_vouch_for_pages_of_another() -> None:
    """It is aborted before it has a token, and the result of the other one comes later."""
    engine = PaperEngine(num_pages=30, num_slots=2, budget=20, host=40, disk=True)
    engine.transfers.polls = 0
    engine.say(generate(0, [*A, POISON], 2))
    engine.say(generate(1, A[:20] + [9] * 20, 2))
    engine.step()
    engine.step()
    assert engine.cached == {0: 0, 1: 20}
    engine.say(Abort(1))
    engine.finish_all()
    assert engine.finish[0] == FinishReason.ERROR and not engine.transfers.disk
    assert tiers(engine)["disk.stored"] == 0  # nor was there any


class SomeOfPeers(AllBelow):
    """A disk with every page, and other engines that have some of them."""

    def __init__(self, remote: set[bytes]) -> None:
        self.remote = remote

    def has_remote(self, keys: Iterable[bytes]) -> bool:
        return not self.remote.isdisjoint(keys)


def test_pages_of_one_load_are_counted_by_the_tier_of_each() -> None:
    """Of five pages, host memory has one, other engines have two, and the disk has the rest."""
    keys = PageKeys(array("i", range(23)), "", 4)
    tier = HostTier(8, below=SomeOfPeers({keys.full(1), keys.full(3)}))
    tier.start_store({keys.full(0): 1}, set())
    tier.end_store(1, ok=True)
    memory = TieredMemory(9, 4, tier=tier)
    admitted = memory.admit(1, keys, 0, may_load=True)
    assert admitted is not None and memory.moved(Moved(admitted.ticket)) == (1, True)
    memory.started(1, 23, 20, 20)
    counts = {name: tier.counts[name] for name in COUNTERS if tier.counts[name]}
    del counts["asked_tokens"], counts["host.stored"]
    assert counts == {
        "host.loaded": 1, "host.hit_tokens": 4, "disk.loaded": 2, "disk.hit_tokens": 8,
        "peer.loaded": 2, "peer.hit_tokens": 8,
    }  # fmt: skip
