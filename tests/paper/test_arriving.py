"""Requests whose pages arrive from host memory: late, never, shared, aborted and preempted."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from random import Random
from typing import Any

import pytest

from nanovllm.kv.costs import TransferCosts
from nanovllm.kv.hybrid import HybridMemory
from nanovllm.kv.keys import PageKeys
from nanovllm.kv.tiers import HostTier
from nanovllm.sched.request import State
from nanovllm.wire import Abort, FinishReason
from tests.paper.conversations import by_chance
from tests.paper.engine import PAGE, PaperEngine, generate
from tests.paper.gpu import POISON, solo_run
from tests.paper.test_random_batches import NUM_ENGINES, converse, sizes_of_engines

A, B = (
    [1, 2, 3] * 9,
    [4, 5, 6] * 9,
)  # 27 tokens: six full pages and a part, which two new tokens fill


def small_caches(rng: Random) -> dict[str, Any]:
    sizes, page = sizes_of_engines(rng), rng.choice([1, 2, 3])
    disk = rng.choice([False, True])
    return sizes | dict(
        page=page,
        num_pages=rng.randint(20, 36) // page,
        prefix=rng.randint(0, 9) > 0,
        disk=disk,
        host=rng.choice([2, 6, 9, 14] if disk else [2, 6, 40, 40, 40]),
        host_cost=rng.choice([0.0, 0.0, 0.0, 2.0]),
        most_storing=rng.choice([1, 3, 8]),
        most_polls=rng.choice([0, 1, 4, 20]),
        fail_every=rng.choice([0, 0, 1, 3]),
        transfers=rng.randint(0, 1000),
        ahead=rng.choice([None, 1, 3, 20]),
    )


def test_transfers_never_change_the_text() -> None:
    by_chance(lambda rng: converse(rng, small_caches), NUM_ENGINES // 7)


def engine_of(num_pages: int = 9, polls: int = 0, **sizes: Any) -> PaperEngine:
    """Return an engine that has computed A, then B, and evicted most of A's pages."""
    sizes = dict(num_slots=4, budget=64, host=40, depth=1) | sizes
    engine = PaperEngine(num_pages=num_pages, **sizes)
    for name, prompt in ((100, A), (101, B)):
        engine.say(generate(name, prompt, 2))
        engine.finish_all()
    engine.transfers.polls = polls
    return engine


def states(engine: PaperEngine) -> dict[int, State]:
    return {name: one.state for name, one in engine.scheduler.queue.by_id.items()}


def tiers(engine: PaperEngine) -> dict[str, float]:
    return engine.scheduler.stats().tiers


def right(engine: PaperEngine, name: int, prompt: list[int], max_new: int) -> bool:
    recurrent = engine.gpu.recurrent
    return engine.text[name] == solo_run(prompt, max_new, [], recurrent=recurrent)


def test_an_evicted_prompt_comes_back() -> None:
    engine = engine_of()
    assert tiers(engine)["host.stored"] == 14
    engine.say(generate(0, A, 3))
    engine.finish_all()
    assert engine.cached[0] == 24 and right(engine, 0, A, 3)
    assert tiers(engine)["host.hit_tokens"] == 4 * tiers(engine)["host.loaded"] > 0
    assert sum(fed for _, fed in engine.gpu.fed) == 27 + 27 + 3


def test_an_arriving_request_is_not_planned_and_delays_no_other() -> None:
    engine = engine_of(num_pages=16, polls=1000, num_slots=3)
    engine.say(generate(2, [9] * 29, 2))  # evicts A
    engine.finish_all(most_steps=1100)
    engine.say(generate(1, [7] * 3, 12))
    engine.say(generate(0, A, 3))
    num_plans = len(engine.plans)
    for _ in range(10):
        engine.step()
    assert states(engine) == {0: State.ARRIVING, 1: State.DECODING}
    assert len(engine.plans) == num_plans + 10 and len(engine.text[1]) == 9
    assert 0 not in engine.cached and tiers(engine)["arriving"] == 1
    engine.finish_all()
    assert right(engine, 0, A, 3) and right(engine, 1, [7] * 3, 12)


def test_observers_see_arrivals_and_their_tokens() -> None:
    engine = engine_of(num_pages=16, polls=1000, num_slots=3)
    engine.say(generate(2, [9] * 29, 2))  # evicts A
    engine.finish_all(most_steps=1100)
    engine.say(generate(0, A, 3))
    engine.step()
    now = engine.loop.recent.since(0)
    ((request, since),) = now.arriving
    assert request == 0 in array("q", now.slots) and not now.queue
    assert 0 < since <= now.now_s
    engine.finish_all(most_steps=1100)
    now = engine.loop.recent.since(0)
    admitted = [one for step in now.steps for one in step.admitted]
    assert [(one.request, one.loaded > 0) for one in admitted] == [
        (100, False), (101, False), (2, False), (0, True),
    ]  # fmt: skip
    (last,) = (one for one in admitted if one.loaded)
    assert last.loaded == tiers(engine)["host.hit_tokens"] and last.cached == 24
    assert last.came_s <= last.arriving_s == since and now.arriving == []


def test_the_loop_is_blocked_while_only_transfers_are_left() -> None:
    engine = engine_of(polls=5)
    engine.say(generate(0, A, 1))
    engine.step()
    num_plans = len(engine.plans)
    for _ in range(4):
        assert engine.loop.is_blocked and not engine.loop.idle
        engine.step()
    assert len(engine.plans) == num_plans
    engine.step()
    engine.step()
    assert not engine.loop.is_blocked and len(engine.plans) > num_plans
    engine.finish_all()
    assert not engine.loop.is_blocked and engine.loop.idle


def test_pages_of_an_aborted_load_are_in_quarantine_until_it_ends() -> None:
    engine = engine_of(polls=6)
    engine.say(generate(0, A, 1))
    engine.step()
    (load,) = engine.memory.tier.loads.values()
    engine.say(Abort(0))
    assert engine.finish[0] == FinishReason.ABORT and not states(engine)
    pool = engine.memory.pool
    assert pool.num_free == pool.num_pages - len(load.pages)
    engine.say(generate(1, [8] * 20, 3))  # would need pages of the load
    engine.step()
    assert pool.held >= set(load.pages)
    engine.finish_all()
    assert pool.num_free == pool.num_pages and right(engine, 1, [8] * 20, 3)


def test_what_an_aborted_load_brought_is_found() -> None:
    engine = engine_of(polls=2)
    engine.say(generate(0, A, 1))
    engine.step()
    engine.say(Abort(0))
    for _ in range(5):
        engine.step()
    engine.say(generate(1, A, 1))
    engine.finish_all()
    assert engine.cached[1] == 24 and engine.transfers.num_loads == 1


def test_all_that_share_a_prefix_wait_for_one_load() -> None:
    engine = engine_of(num_pages=30, polls=8, host=60)
    engine.say(generate(9, [9] * 110, 1))  # evicts A
    engine.finish_all()
    for name in range(3):
        engine.say(generate(name, A, 2))
    for _ in range(4):
        engine.step()
    assert states(engine) == {0: State.ARRIVING, 1: State.WAITING, 2: State.WAITING}
    engine.finish_all()
    assert engine.transfers.num_loads == 1
    assert engine.cached[0] == 24 and engine.cached[1] >= 24 and engine.cached[2] >= 24
    assert all(right(engine, name, A, 2) for name in range(3))


def test_after_a_failed_load_all_compute() -> None:
    engine = engine_of(num_pages=24, polls=3, fail_every=1)
    engine.say(generate(9, [9] * 90, 1))
    engine.finish_all()
    for name in range(3):
        engine.say(generate(name, A, 2))
    engine.finish_all(most_steps=20)
    assert engine.transfers.num_loads == 1 and tiers(engine)["host.failed"] == 1
    assert engine.cached[0] == 0
    assert all(right(engine, name, A, 2) for name in range(3))


def test_a_load_that_costs_more_than_computing_is_declined() -> None:
    for cost, num_loads in ((4.1, 0), (3.9, 1)):  # a page has 4 tokens of one second each
        engine = engine_of(host_cost=cost)
        engine.memory.tier.costs = TransferCosts(page_s=cost, token_s=1.0, start_s=0.0)
        engine.say(generate(0, A, 2))
        engine.finish_all()
        assert engine.transfers.num_loads == num_loads and right(engine, 0, A, 2)
        assert tiers(engine)["host.declined"] == 1 - num_loads


def test_tenants_do_not_share_host_memory() -> None:
    engine = engine_of()
    engine.say(generate(0, A, 2, salt="other"))
    engine.finish_all()
    assert engine.cached[0] == 0 and engine.transfers.num_loads == 0


def test_a_preempted_request_comes_back_from_host_memory() -> None:
    engine = PaperEngine(num_pages=8, num_slots=3, budget=32, host=40)
    for i in range(3):
        engine.say(generate(i, [i] * 6, 14))
    engine.finish_all()
    assert engine.scheduler.stats().num_preemptions >= 2
    assert tiers(engine)["host.loaded"] >= 1
    assert tiers(engine)["host.hit_tokens"] == 0  # of prompts, which were all computed
    for i in range(3):
        assert right(engine, i, [i] * 6, 14)


def test_a_preempted_request_is_computed_where_loads_cost_more() -> None:
    engine = PaperEngine(num_pages=8, num_slots=3, budget=32, host=40, host_cost=4.1)
    engine.memory.tier.costs = TransferCosts(page_s=4.1, token_s=1.0, start_s=0.0)
    for i in range(3):
        engine.say(generate(i, [i] * 6, 14))
    engine.finish_all()
    assert engine.scheduler.stats().num_preemptions >= 2
    assert tiers(engine)["host.declined"] > 0 == tiers(engine)["host.hit_tokens"]
    assert all(right(engine, i, [i] * 6, 14) for i in range(3))


def test_an_arriving_request_is_preempted_and_its_pages_are_not_given_away() -> None:
    engine = engine_of(num_pages=9, polls=30, num_slots=2)
    engine.say(generate(1, [7] * 7, 14, priority=-1))
    engine.step()
    engine.say(generate(0, A[:21], 2, priority=1))
    for _ in range(14):
        engine.step()
    assert states(engine).get(0) in (State.WAITING, None) and len(engine.memory.tier.loads) == 1
    engine.finish_all()
    assert engine.scheduler.stats().num_preemptions == 1
    assert right(engine, 0, A[:21], 2) and right(engine, 1, [7] * 7, 14)


def test_pages_of_a_corrupted_request_leave_host_memory() -> None:
    engine = PaperEngine(num_pages=9, num_slots=2, budget=8, host=40)
    engine.say(generate(0, [*A, POISON], 2))
    engine.finish_all()
    assert engine.finish[0] == FinishReason.ERROR
    assert tiers(engine)["host.stored"] > 0 and tiers(engine)["host.pages_used"] == 0


def test_content_that_nobody_checked_is_cleaned_after_a_load() -> None:
    """A prompt with NaN is aborted between its chunks. Its pages go to host memory and back."""
    engine = PaperEngine(num_pages=9, num_slots=2, budget=8, host=40, depth=0)
    bad = [3, POISON, *A]
    engine.say(generate(0, bad, 2))
    for _ in range(3):
        engine.step()
    engine.say(Abort(0))
    engine.finish_all()
    engine.say(generate(1, B + B[:6], 2))  # evicts the pages
    engine.finish_all()
    engine.say(generate(2, bad, 2))
    engine.transfers.polls = 0
    engine.step()
    engine.say(Abort(2))
    engine.finish_all()
    assert engine.transfers.num_loads == 1
    for name, prompt in ((3, B + B[:6]), (4, [8] * 33)):
        engine.say(generate(name, prompt, 2))
        engine.finish_all()
        assert right(engine, name, prompt, 2)


def test_stores_are_dropped_first_and_counted() -> None:
    engine = PaperEngine(num_pages=9, num_slots=4, budget=64, host=40, most_storing=1)
    engine.transfers.polls = 20
    for name, prompt in enumerate((A, B, [9] * 27)):
        engine.say(generate(name, prompt, 2))
        for _ in range(6):
            engine.step()
        assert name in engine.finish, "waited for a store"
    engine.finish_all()
    assert tiers(engine)["host.dropped"] + tiers(engine)["host.stored"] == 21
    assert tiers(engine)["host.dropped"] > 0


def test_the_end_of_the_least_recently_used_text_leaves_host_memory_first() -> None:
    engine = engine_of(num_pages=14, host=10)
    assert tiers(engine)["host.evicted"] == 4
    tier = engine.memory.tier
    kept = [
        [PageKeys(array("i", text), "", PAGE).full(i) in tier for i in range(6)] for text in (A, B)
    ]
    # The seventh page of A, which its output filled, was stored after its release.
    assert kept == [[True] * 2 + [False] * 4, [True] * 6]


def test_recurrent_states_and_pages_come_back_together() -> None:
    engine = engine_of(num_pages=10, checkpoints=8)
    engine.say(generate(0, A, 3))
    engine.finish_all()
    assert engine.cached[0] == 24 and right(engine, 0, A, 3)
    assert engine.transfers.num_loads == 1


def test_a_state_that_is_lost_during_the_load_is_computed() -> None:
    engine = engine_of(num_pages=10, checkpoints=8, polls=4)
    engine.say(generate(0, A, 3))
    engine.step()
    assert states(engine) == {0: State.ARRIVING}
    lost = engine.memory.states
    for state in list(lost._by_key.values()):
        lost.remove(state)
    engine.finish_all()
    assert engine.cached[0] == 0 and right(engine, 0, A, 3)


def test_a_state_leaves_with_the_last_copy_of_its_page() -> None:
    engine = engine_of(num_pages=10, checkpoints=8, host=7)
    for name, text in enumerate(([9] * 27, [8] * 27)):
        engine.say(generate(name, text, 2))
        engine.finish_all()
    assert tiers(engine)["host.evicted"] > 6
    engine.say(generate(2, A, 3))
    engine.finish_all()
    assert engine.cached[2] == 0 and right(engine, 2, A, 3)


def test_a_page_with_its_former_text_is_stored_after_it_is_filled() -> None:
    """A queued page is evicted, and gets the same text once more before its store can start."""
    engine = PaperEngine(num_pages=7, num_slots=1, budget=64, host=40, most_storing=1, depth=0)
    engine.transfers.polls = 3
    for name in range(3):
        for text in (A[:24], B[:24]):
            engine.say(generate(10 * name + (text[0] == 4), text, 1))
            for _ in range(2):
                engine.step()
    engine.finish_all()
    assert tiers(engine)["host.dropped"] > 0


def test_a_page_that_was_evicted_before_its_store_is_not_stored() -> None:
    engine = PaperEngine(num_pages=7, num_slots=1, budget=64, host=40, most_storing=2, depth=0)
    engine.transfers.polls = 1
    for name, text in enumerate((A, B, A, B, A, B)):
        engine.say(generate(name, text, 1))
        for _ in range(3):
            engine.step()
    engine.finish_all()
    assert all(right(engine, name, text, 1) for name, text in enumerate((A, B, A, B, A, B)))
    assert tiers(engine)["host.dropped"] > 0 and engine.transfers.num_loads > 0


def test_a_slot_is_not_replaced_while_a_load_reads_it() -> None:
    tier = HostTier(2)
    assert tier.start_store({b"a": 1, b"b": 2}, set()) == [1, 2]
    assert tier.end_store(1, ok=True) == [1, 2]
    assert tier.start_load(7, 0, keys=[b"a", b"b"], pages=[3, 4]) == 2
    assert tier.start_store({b"c": 5}, set()) == [] and tier.counts["host.dropped"] == 1
    tier.invalidate(b"a")
    tier.check()
    assert tier.start_store({b"c": 5}, set()) == []
    load, ok = tier.end_load(2, ok=True)
    assert load.pages == [3, 4] and not ok  # a key was invalidated meanwhile
    assert tier.start_store({b"c": 5}, set()) == [5]
    assert b"a" not in tier and b"b" in tier
    tier.check()


def test_a_failed_load_is_not_tried_again() -> None:
    engine = engine_of(fail_every=1)
    engine.memory.tier.invalidate = lambda key: None  # what failed stays in host memory
    engine.say(generate(0, A, 2))
    engine.finish_all(most_steps=20)
    assert engine.transfers.num_loads == 1 and right(engine, 0, A, 2)


def test_pages_of_a_failed_load_are_cleaned() -> None:
    engine = engine_of(fail_every=1, polls=3)
    engine.say(generate(0, A, 2))
    engine.step()
    engine.say(Abort(0))
    for _ in range(5):
        engine.step()
    engine.say(generate(1, [8] * 33, 1))
    engine.finish_all()
    assert engine.finish[1] == FinishReason.LENGTH and right(engine, 1, [8] * 33, 1)


def test_nobody_waits_for_a_second_load() -> None:
    engine = engine_of(num_pages=24, polls=3)
    engine.say(generate(9, [9] * 90, 1))
    engine.finish_all()
    engine.say(generate(0, A, 2))
    engine.say(generate(1, A, 2))
    engine.step()
    second = engine.scheduler.queue.by_id[1]
    assert second.awaited > 0
    second.awaited = 1000  # as if that had been another load, which has ended
    second.may_load = False
    engine.step()
    assert second.state is not State.WAITING
    engine.finish_all()
    assert right(engine, 1, A, 2)


def test_loads_in_progress_count() -> None:
    engine = engine_of(num_pages=24, polls=50, host_cost=3.0)
    for name in (8, 9):
        engine.say(generate(name, [name] * 60, 1))
        engine.finish_all(most_steps=200)
    engine.say(generate(0, A, 2))
    engine.say(generate(1, B, 2))
    engine.step()
    engine.step()
    assert states(engine)[0] is State.ARRIVING and states(engine)[1] is not State.ARRIVING
    assert tiers(engine)["host.declined"] > 0


@pytest.mark.parametrize("checkpoints", [None, 6])
def test_a_thousand_aborts_amid_loads_leave_nothing(checkpoints: int | None) -> None:
    sizes = dict(most_polls=3, fail_every=7, disk=True, host=16, checkpoints=checkpoints)
    engine = engine_of(num_pages=20, **sizes)
    engine.transfers.polls = None
    rng = Random(1)
    for name in range(1000, 2000):
        text = [name % 5] * 9 + A
        engine.say(generate(name, text, 3))
        for _ in range(rng.randint(0, 3)):
            engine.step()
        engine.say(Abort(name))
    engine.finish_all()
    assert engine.transfers.num_loads > 100
    pool, tier = engine.memory.pool, engine.memory.tier
    assert pool.num_free == pool.num_pages and not states(engine)
    assert not (tier.loads or tier.stores or engine.transfers.running)
    if isinstance(engine.memory, HybridMemory):
        assert tiers(engine)["disk.loaded"] > 50
        states_of, fetches = engine.memory.states, engine.memory._fetches
        assert states_of.num_held == 0 and not fetches
        assert len(states_of._blank) + states_of.sizes["kept"] == checkpoints
    engine.say(generate(2000, A, 3))
    engine.finish_all()
    assert right(engine, 2000, A, 3)


class AllBelow:
    """A tier below host memory that has every page."""

    has_peers = False

    @property
    def writable(self) -> AllBelow:
        return self

    def has_remote(self, keys: Iterable[bytes]) -> bool:
        return False

    def holds(self, key: bytes) -> bool:
        return True


def test_a_load_never_takes_more_slots_than_there_are() -> None:
    """A page from below needs a slot, and the kept pages of the same load cannot be evicted."""
    keys = PageKeys(array("i", range(24)), "", 4)
    tier = HostTier(3, below=AllBelow())
    tier.start_store({keys.full(i): i for i in (1, 2, 3)}, set())
    tier.end_store(1, ok=True)
    loads = tier.following(keys, 0, 5)
    assert loads == [keys.full(i) for i in range(3)]
    tier.start_load(1, 0, keys=loads, pages=[11, 12, 13])
    tier.check()
