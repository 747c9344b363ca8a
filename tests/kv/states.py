"""Invariants of checkpoints and of the memory that uses them."""

from __future__ import annotations

from nanovllm.kv.checkpoints import Checkpoints
from nanovllm.kv.hybrid import HybridMemory


def check_memory(memory: HybridMemory) -> None:
    assert not memory._unpublished and set(memory._texts) == set(memory._holdings)
    num_arriving = sum(load.state_to >= 0 for load in memory.tier.loads.values())
    assert num_arriving == len(memory._fetches)
    num_saving = sum(text.place >= 0 for text in memory._texts.values())
    check_states(memory.states, num_saving + num_arriving)
    assert all(key in memory._page_of or key in memory.tier for key in memory.states._by_key), (
        "a state without its page"
    )


def check_states(states: Checkpoints, num_taken: int = 0) -> None:
    """Check the checkpoints. `num_taken` places are reserved and not used yet."""
    num_used = len(states._by_key) + len(states._orphans) + num_taken
    assert len(states._blank) + num_used == states.count, "a place is lost"
    assert all(states._num_holders_C[place] > 0 for place in states._orphans)
    kept = [one for one in states._by_id if one is not None]
    assert len(kept) == len(states._by_key) == states.sizes["kept"]
    assert set(kept) == set(states._by_key.values())
    assert len(set(states._blank)) == len(states._blank)
    assert all(states._by_id[place] is None for place in states._blank)
    for one in kept:
        own, *earlier = states.along(one.keys, one.num_tokens)
        assert own is one and one.parent is (earlier[0] if earlier else None)
        assert one.parent is None or one in one.parent.children
        assert one in states._after[states._page_after(one.parent, one.keys)]
        assert len(one.keys.computed) <= len(one.keys.tokens) // states.page_tokens, "half a page"
        spared = one.num_tokens - (one.parent.num_tokens if one.parent else 0)
        assert states._costs_C[one.id] == spared
    assert sum(len(one.children) for one in kept) == sum(one.parent is not None for one in kept)
    assert sum(map(len, states._after.values())) == len(kept) and all(states._after.values())
