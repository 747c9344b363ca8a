"""Regular expressions of adapters: the matches of Python's re, in bounded time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from nanovllm.adapters import patterns
from nanovllm.adapters.patterns import MOST_STEPS, ExpressionError, Patterns
from nanovllm.config import ConfigError
from nanovllm.runner.build import build
from tests.adapters.peft_adapters import config_with
from tests.adapters.test_refused import write
from tests.models.tiny import make_tiny

NAMES = ("model.layers.11.mlp.q_proj", "q_proj", "aab", "a.b", "ab.a")
ATOMS = (*"ab.^$", "\\.", "[^a.]", "[a-q_]", "\\d", "\\W", "q_proj", "\\b", "\\B", "\\Z")
EXPRESSIONS = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"({two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+?", "?", "{2}", "{1,3}"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        ),
        st.tuples(st.sampled_from(["?=", "?!"]), inner).map(lambda two: f"({two[0]}{two[1]})"),
        st.sampled_from(["(?<=a)", "(?<!b.)"]),
    ),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(EXPRESSIONS)
def test_matches_are_those_of_re(expression: str) -> None:
    for name in NAMES:
        one = Patterns()
        assert one.is_whole(expression, name) == (re.fullmatch(expression, name) is not None)
        is_end = re.match(rf"(.*\.)?({expression})$", name) is not None
        assert one.is_end(expression, name) == is_end, name


@pytest.mark.parametrize(
    "expression",
    [
        "(a+)+$",
        "(a|a)*b",
        "(.*a){40}b",
        "a?" * 60 + "a" * 60 + "b",
        "(" * 30 + "a*" + ")*" * 30 + "b",
        "(?=.*" * 30 + "b" + ")" * 30,
        "(a{1000}){1000}",
        "((a{0,3}|aa){2,9}){1,300}" * 50,
    ],
)
def test_no_expression_takes_exponential_time(expression: str) -> None:
    one = Patterns()
    assert not one.is_whole(expression, "a" * 59 + "!")
    assert MOST_STEPS - one.left < 150_000


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        (r"(a)\1", "groupref"),
        ("(?i)a", "flags"),
        ("(?i:a)", "flags"),
        ("(?>a*)", "atomic_group"),
        ("a" * 10_001, "more than 10000 characters"),
        ("(" * 5_000 + ")" * 5_000, "recursion"),
    ],
)
def test_other_expressions_are_refused(expression: str, words: str) -> None:
    with pytest.raises(ExpressionError, match=words):
        Patterns().is_end(expression, "a")


def test_an_adapter_with_too_many_steps_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "MOST_STEPS", 2_000)
    make_tiny(tmp_path / "model", "qwen3")
    keys = {f"({'.*a' * 30}{at})+": 2 for at in range(40)}
    write(tmp_path / "adapters" / "slow", rank_pattern=keys)
    with pytest.raises(ConfigError) as refused:
        build(config_with(tmp_path / "model", tmp_path / "adapters"))
    assert str(refused.value).startswith("adapter slow: adapter_config.json: its regular")
    assert "take too long to match; write them without nested repetitions" in str(refused.value)
