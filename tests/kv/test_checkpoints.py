"""Eviction order of checkpoints, and their lookup compared with a simple model."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from hypothesis import given, strategies as st

from nanovllm.kv.checkpoints import Checkpoints
from nanovllm.kv.keys import PageKeys
from tests.kv.states import check_states

PAGE = 4
Name = tuple[str, tuple[int, ...]]  # salt and tokens
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
    # Counted as saving only 4 tokens, it would have been evicted first.
    assert lengths(states, keys) == [44]


def test_a_state_that_comes_between_two_is_before_the_later() -> None:
    states, keys, other = Checkpoints(5, PAGE), keys_of([1] * 100), keys_of([1] * 30 + [2] * 70)
    for text, num_tokens in ((keys, 8), (keys, 80), (other, 60), (keys, 24), (keys, 40)):
        keep(states, text, num_tokens)
    costs = {one.num_tokens: states._costs_C[one.id] for one in states._by_key.values()}
    assert costs == {8: 8, 24: 16, 40: 16, 80: 40, 60: 36}


def test_without_places_nothing_is_kept() -> None:
    states = Checkpoints(0, PAGE)
    assert keep(states, keys_of([1] * 9), 9) == -1
    assert states.sizes == {"places": 0, "kept": 0}


@given(st.lists(st.tuples(few_pages, st.sampled_from(["", "a"]), st.booleans()), max_size=40))
def test_what_is_found_along_a_text_are_its_own_beginnings(actions) -> None:
    """A lookup finds all kept prefixes of a text with their places, after any order of changes."""
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


@dataclass
class Naive:
    """Model of Checkpoints that stores names only and always looks at all of them."""

    count: int
    kept: dict[int, Name] = field(default_factory=dict)  # by place
    used: dict[int, int] = field(default_factory=dict)
    now: int = 0

    def __post_init__(self) -> None:
        self.blank = list(range(self.count))[::-1]

    def starts(self, name: Name) -> list[int]:
        """Return the places of kept prefixes of the text, the longest last."""
        salt, tokens = name
        found = [at for at, one in self.kept.items() if one == (salt, tokens[: len(one[1])])]
        return sorted(found, key=lambda at: len(self.kept[at][1]))

    def before(self, place: int) -> int:
        return [-1, *self.starts(self.kept[place])][-2]

    def cost(self, place: int) -> int:
        return len(self.kept[place][1]) - len(self.kept.get(self.before(place), ("", ()))[1])

    def beyond(self, name: Name) -> set[int]:
        """Return the places of the shortest kept texts that extend this one."""
        size = len(name[1])
        of_it = {
            at
            for at, (salt, tokens) in self.kept.items()
            if len(tokens) > size and (salt, tokens[:size]) == name
        }
        return {at for at in of_it if self.before(at) not in of_it}

    def take(self, spared: int) -> int:
        self.now += 1
        if not self.blank:
            values = {at: self.cost(at) / (self.now - self.used[at] + 1) for at in self.kept}
            worst = min(sorted(values), key=values.__getitem__)
            if values[worst] >= spared:
                return -1
            self.remove(worst)
        return self.blank.pop()

    def put(self, place: int, name: Name) -> None:
        if name in self.kept.values():
            self.blank.append(place)
        else:
            self.kept[place], self.used[place] = name, self.now

    def restore(self, place: int) -> None:
        self.now += 1
        self.used[place] = self.now

    def remove(self, place: int) -> None:
        del self.kept[place]
        self.blank.append(place)


some_pages = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=7)
act = st.tuples(some_pages, st.sampled_from(["", "", "a"]), st.integers(1, 7), st.integers(0, 9))


@given(st.lists(act, max_size=60), st.integers(1, 9))
def test_all_answers_are_those_of_looking_at_all_states(actions, count) -> None:
    """Texts continue after their saved states, and end inside pages."""
    states, naive = Checkpoints(count, PAGE), Naive(count)
    for pages, salt, num_pages, what in actions:
        tokens = [token for token in pages for _ in range(PAGE)]
        keys, most = keys_of([*tokens, 0], salt), min(num_pages, len(pages)) * PAGE
        state, there = states.longest(keys, most), naive.starts((salt, tuple(tokens[:most])))
        assert (-1 if state is None else state.id) == [-1, *there][-1]
        if what < 2 and state is not None:
            states.remove(state)
            naive.remove(state.id)
        elif what < 4 and state is not None:
            states.restore(state)
            naive.restore(state.id)
        else:
            place = states.take(spared=what)
            assert place == naive.take(spared=what)
            if place >= 0:
                states.put(place, keys, most)
                naive.put(place, (salt, tuple(tokens[:most])))
        check_states(states)
        assert states._blank == naive.blank
        assert {one.id: one.num_tokens for one in states._by_key.values()} == {
            at: len(tokens) for at, (_, tokens) in naive.kept.items()
        }
        assert all(states._costs_C[at] == naive.cost(at) for at in naive.kept)
        for num_tokens in range(PAGE, len(tokens) + 1, PAGE):
            start = states.longest(keys, num_tokens)
            if start is None or start.num_tokens < num_tokens:
                found = {one.id for one in states.beyond(start, keys, num_tokens)}
                assert found == naive.beyond((salt, tuple(tokens[:num_tokens])))
        assert len(keys.computed) <= len(pages)
