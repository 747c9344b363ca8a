"""Which states go first, and that what is kept is what was put there."""

from __future__ import annotations

from array import array

from hypothesis import given, strategies as st

from nanovllm.kv.checkpoints import Checkpoints
from nanovllm.kv.keys import PageKeys
from tests.kv.states import check_states

PAGE = 4
few_pages = st.lists(st.integers(0, 1), min_size=1, max_size=5)


def keys_of(tokens: list[int], salt: str = "") -> PageKeys:
    return PageKeys(array("i", tokens), salt, PAGE)


def keep(states: Checkpoints, keys: PageKeys, num_tokens: int, spared: int | None = None) -> int:
    place = states.take(num_tokens if spared is None else spared)
    if place >= 0:
        states.put(place, keys, num_tokens)
    check_states(states)
    return place


def lengths(states: Checkpoints, keys: PageKeys) -> list[int]:
    return [one.num_tokens for one in states.along(keys, len(keys.tokens))][::-1]


def test_a_long_text_is_thinned_out_evenly() -> None:
    states, keys = Checkpoints(4, PAGE), keys_of(list(range(330)))
    for num_tokens in range(20, 321, 20):
        keep(states, keys, num_tokens, spared=20)
    found = lengths(states, keys)
    gaps = [b - a for a, b in zip([0, *found], found, strict=False)]
    assert found[-1] == 320 and max(gaps) <= 160 and len(found) == 4


def test_the_fork_that_all_share_outlives_many_ends() -> None:
    states, stem = Checkpoints(4, PAGE), list(range(60))
    keep(states, keys_of(stem), 60)
    for i in range(40):
        keys = keys_of([*stem, *[100 + i] * 20])
        found = states.longest(keys, 79)
        assert found is not None and found.num_tokens == 60
        states.restore(found)
        assert keep(states, keys, 76, spared=16) >= 0
    assert states.events == {"saved": 41, "restored": 40, "evicted": 37}
    assert states.sizes == {"places": 4, "kept": 4}


def test_of_equal_ones_that_goes_which_nobody_used_longest() -> None:
    states, texts = Checkpoints(3, PAGE), [keys_of([i] * 30) for i in range(5)]
    for keys in texts[:3]:
        keep(states, keys, 28)
    states.restore(next(states.along(texts[0], 30)))
    keep(states, texts[3], 28)
    keep(states, texts[4], 28)
    assert [bool(lengths(states, keys)) for keys in texts] == [True, False, False, True, True]


def test_none_goes_for_one_that_is_worth_less() -> None:
    states = Checkpoints(1, PAGE)
    keep(states, keys_of([1] * 100), 100)
    assert [keep(states, keys_of([2] * 32), 32) >= 0 for _ in range(3)] == [False, False, True]


def test_what_is_behind_a_lost_state_costs_more() -> None:
    states, keys = Checkpoints(3, PAGE), keys_of([1] * 100)
    keep(states, keys, 40)
    keep(states, keys, 44, spared=4)
    states.remove(next(states.along(keys, 40)))
    for token in (2, 3, 4):
        keep(states, keys_of([token] * 32), 32)
    assert lengths(states, keys) == [44]  # of 4 tokens more it would have been the first to go


def test_without_places_nothing_is_kept() -> None:
    states = Checkpoints(0, PAGE)
    assert keep(states, keys_of([1] * 9), 9) == -1
    assert states.sizes == {"places": 0, "kept": 0}


@given(st.lists(st.tuples(few_pages, st.sampled_from(["", "a"]), st.booleans()), max_size=40))
def test_what_is_found_along_a_text_are_its_own_beginnings(actions) -> None:
    """As many as fit, each with its place, whatever order they come and go in."""
    states = Checkpoints(6, PAGE)
    kept: dict[tuple[str, tuple[int, ...]], int] = {}
    for pages, salt, goes in actions:
        tokens = [token for token in pages for _ in range(PAGE)]
        keys, name = keys_of(tokens, salt), (salt, tuple(tokens))
        if goes and name in kept:
            states.remove(next(one for one in states.along(keys, 99) if one.id == kept[name]))
            del kept[name]
        elif len(kept) < 6:
            place = states.take(1)
            states.put(place, keys, len(tokens))
            kept.setdefault(name, place)
        check_states(states)
        found = [(one.num_tokens, one.id) for one in states.along(keys, len(tokens))]
        assert found == [
            (n, kept[salt, tuple(tokens[:n])])
            for n in range(len(tokens), 0, -1)
            if (salt, tuple(tokens[:n])) in kept
        ]
