"""Stores to host memory shortly before pages are evicted from the device."""

from __future__ import annotations

from array import array

from nanovllm.kv.keys import PageKeys
from tests.paper.engine import PAGE, PaperEngine, generate
from tests.paper.test_arriving import A, B, engine_of, right, tiers

C = [7, 8, 9] * 9


def compute(engine: PaperEngine, *prompts: list[int]) -> list[int]:
    """Compute prompts in turn. Return the cached tokens of each."""
    first = len(engine.cached)
    for name, prompt in enumerate(prompts, start=first):
        engine.say(generate(name, prompt, 2))
        engine.finish_all()
        assert right(engine, name, prompt, 2)
    return [engine.cached[name] for name in range(first, len(engine.cached))]


def test_pages_are_stored_when_they_are_evicted_soon() -> None:
    """A takes 7 of 16 pages. Of B's 7, none evicts one, and then 3 more should be ready."""
    engine = PaperEngine(num_pages=16, num_slots=4, budget=64, host=40, ahead=5)
    compute(engine, A)
    assert tiers(engine)["host.stored"] == 0
    compute(engine, B)
    assert tiers(engine)["host.stored"] == 3
    pool, tier = engine.memory.pool, engine.memory.tier
    assert (pool.num_ready, len(pool.ready)) == (5, 3)
    keys = PageKeys(array("i", [*A, *engine.text[0]]), "", PAGE)
    assert [keys.full(i) in tier for i in range(7)] == [False] * 4 + [True] * 3
    assert compute(engine, C, A) == [0, 24] and tiers(engine)["host.dropped"] == 0


def test_a_request_waits_for_stores_and_steps_do_not() -> None:
    engine = PaperEngine(num_pages=11, num_slots=4, budget=64, host=40, ahead=1)
    compute(engine, A)
    engine.transfers.polls = 12
    engine.say(generate(10, [5, 5], 14))
    engine.say(generate(11, B, 2))
    for _ in range(10):
        engine.step()
    assert 11 not in engine.cached and len(engine.text[10]) == 9
    assert tiers(engine)["host.stored"] == 0 and engine.memory.tier.num_storing == 4
    engine.finish_all()
    assert right(engine, 10, [5, 5], 14) and right(engine, 11, B, 2)
    assert tiers(engine)["host.dropped"] == 0


def test_host_memory_has_what_the_device_does_not_have() -> None:
    """Three prompts of 7 pages, and 16 pages on the device. Host memory has 20 or 10."""
    hits = {}
    for host, ahead in ((20, None), (20, 1), (10, None), (10, 1)):
        engine = PaperEngine(num_pages=16, num_slots=4, budget=64, host=host, ahead=ahead)
        compute(engine, A, B, C)
        hits[host, ahead] = sum(compute(engine, *[A, B, C] * 5)), tiers(engine)["host.stored"]
    assert hits[20, 1] == (15 * 24, 18) and hits[20, None] == (15 * 20, 51)
    assert hits[10, 1][0] > 4 * hits[10, None][0] > 0


def test_of_two_equal_pages_the_registered_one_is_stored() -> None:
    """The last of 7 full pages is copied, and its last token computed. There are 2 host slots.

    The second page is blank again when its store would start.
    """
    engine = PaperEngine(num_pages=40, num_slots=4, budget=64, host=2)
    for name in range(2):
        engine.say(generate(name, [*A, 1], 1))
        engine.finish_all()
    assert engine.cached == {0: 0, 1: 27}
    assert (tiers(engine)["host.stored"], tiers(engine)["host.dropped"]) == (4, 7)


def test_with_a_disk_each_page_is_stored_at_once() -> None:
    assert tiers(engine_of(num_pages=40))["host.stored"] == 14
    assert tiers(engine_of(num_pages=40, ahead=8))["host.stored"] == 0
