"""Automata give the same results as Python's own search and arithmetic."""

from __future__ import annotations

import itertools
import random
import re
from fractions import Fraction

import pytest

from nanovllm.grammars import numbers, regexes
from nanovllm.grammars.automata import (
    MAX_EXPLORED,
    TooLargeError,
    difference,
    intersection,
    lengths,
    other_than,
    union,
    words,
)
from nanovllm.grammars.facts import Number, String
from nanovllm.grammars.regexes import found, loosened, whole
from nanovllm.grammars.texts import loose, weighed

TEXTS = ["".join(letters) for n in range(5) for letters in itertools.product("abx1", repeat=n)]


def random_pattern(rng, depth) -> str:
    def part() -> str:
        inner = rng.choice(["a", "b", "x", "[ab]", "[^a]", r"\d", r"\W", "[a-c]", "^", "$"])
        if depth and rng.random() < 0.5:
            inner = f"({random_pattern(rng, depth - 1)})"
        elif inner in "^$":
            return inner
        return inner + rng.choice(["", "", "?", "*", "+", "{2}", "{0,2}", "{1,3}", "{2,}"])

    return "|".join(
        "".join(part() for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(1, 2))
    )


def test_expressions_and_what_they_have_in_common() -> None:
    rng = random.Random(3)
    for _ in range(60):
        one, other = random_pattern(rng, 2), random_pattern(rng, 1)
        a, b = found(one), found(other)
        search = [re.compile(p.replace("$", r"\Z")).search for p in (one, other)]
        both, either, first = intersection(a, b), union(a, b), difference(a, b)
        for text in rng.sample(TEXTS, 60):
            in_one, in_other = bool(search[0](text)), bool(search[1](text))
            assert a.accepts(text) == in_one, (one, text)
            assert both.accepts(text) == (in_one and in_other), (one, other, text)
            assert either.accepts(text) == (in_one or in_other), (one, other, text)
            assert first.accepts(text) == (in_one and not in_other), (one, other, text)


def test_words_lengths_and_all_others() -> None:
    some = ["ab", "abx", "x", ""]
    few, others = words(some), other_than(some, 1000)
    for text in TEXTS:
        assert few.accepts(text) == (text in some)
        assert others.accepts(text) == (text not in some)
        assert lengths(1, 2).accepts(text) == (1 <= len(text) <= 2)
        assert lengths(2, None).accepts(text) == (len(text) >= 2)
    narrow = other_than(some, 3)  # few states also exclude similar beginnings
    assert not any(narrow.accepts(text) for text in some)
    assert narrow.accepts("b1") and not narrow.accepts("ab1")
    assert few.few(10) == sorted(some) and found("^a").few(10) is None


def test_one_large_count_is_a_limit_of_the_length() -> None:
    dfa, high = loosened("^x[a-z]{2,300}y$")
    assert high == 302 and len(dfa.edges) < 10
    assert dfa.accepts("xaby") and not dfa.accepts("xay")
    assert loosened("^[a-z]{2,20}$")[1] is None and loosened("[a-z]{2,300}")[1] is None
    assert loose(String(patterns=(("^[a-z]{2,300}$", True),), high=100))[1] == 100
    counted, high = loose(String(patterns=(("^a+b$", True),), high=30))  # may not end everywhere
    assert high is None and counted.accepts("a" * 29 + "b") and not counted.accepts("a" * 30 + "b")


def test_what_takes_too_many_states_is_refused() -> None:
    for pattern in (".*(a|b).{20}$", "(a{300}b){300}"):
        with pytest.raises(TooLargeError):
            found(pattern)
    assert len(whole("a|bc").edges) == 3


def test_where_a_text_may_be_at_once_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building an automaton stops at MAX_MEMBERS members of state sets.

    Without the limit, a request's 40 characters would take a minute: thousands of states, each a
    set of thousands of positions.
    """
    followed: list[int] = []
    edges_of = regexes._Subsets.edges_of

    def noting(self: regexes._Subsets, at: tuple[bool, regexes.StateSet]) -> object:
        followed.append(len(at[1]))
        return edges_of(self, at)

    monkeypatch.setattr(regexes._Subsets, "edges_of", noting)
    for pattern in ("^([a-z]{1,200}|[0-9]{3,90}){1,40}$", "a.{0,300}b"):
        followed.clear()
        assert weighed(pattern) == (True, MAX_EXPLORED)
        assert 0.9 * regexes.MAX_MEMBERS < sum(followed) < 1.1 * regexes.MAX_MEMBERS
    assert len(found("^([a-z]{1,100}){1,4}$").edges) == 401


def test_numbers() -> None:
    rng = random.Random(1)

    def value() -> Fraction:
        return rng.choice([0, 1, 5, -3, 12, 100, -100]) + Fraction(rng.choice([0, 0, 5, 25]), 100)

    for _ in range(150):
        number = Number(
            rng.random() < 0.5,
            (value(), rng.random() < 0.4) if rng.random() < 0.6 else None,
            (value(), rng.random() < 0.4) if rng.random() < 0.6 else None,
            frozenset([Fraction(rng.choice([1, 2, 3]), rng.choice([1, 1, 10]))])
            if rng.random() < 0.4
            else frozenset(),
            None,
            frozenset([value()]) if rng.random() < 0.3 else frozenset(),
        )
        dfa = numbers.automaton(number)
        for _ in range(80):
            whole_part = rng.choice([0, 1, 2, 3, 5, 11, 12, 13, 99, 100, 101, rng.randint(0, 200)])
            text = (
                f"{rng.choice(['', '-'])}{whole_part}{rng.choice(['', '.5', '.25', '.01', '.50'])}"
            )
            fits = number.has(Fraction(text)) and not (number.is_integer and "." in text)
            if text.startswith("-0"):
                continue
            if fits and number.multiples and len(text.partition(".")[2]) > 1:
                continue  # the grammar omits trailing zeros
            assert dfa.accepts(text) == fits, (number, text)
        for bad in ("", "-", "01", "1.", ".5", "1e5", "--1"):
            assert not dfa.accepts(bad)
