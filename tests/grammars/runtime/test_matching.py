"""Masks of bounded text equal the exact grammar's, without tokens that are too long."""

from __future__ import annotations

import json
from functools import cache
from random import Random

import numpy as np
import pytest
import torch
import xgrammar

from nanovllm.config import DEMO
from nanovllm.grammars.runtime.compiler import Compiler, token_table
from nanovllm.grammars.runtime.matching import Matcher, without_limits
from nanovllm.grammars.schema import compiled

VOCAB, END, END_THINK = 2048, 2041, 2043
LONG = {"type": "string", "maxLength": 40}
SHAPES = {
    "alone": LONG,
    "two": {"type": "array", "items": LONG},
    "least": {"type": "string", "minLength": 25, "maxLength": 30},
    "apart": {"anyOf": [{"type": "string", "maxLength": 30}, {"enum": ["a" * 60, "b"]}]},
    "either": {
        "anyOf": [
            {"type": "array", "items": {"type": "string", "maxLength": 26}, "maxItems": 1},
            {"type": "array", "items": {"type": "string", "maxLength": 33}, "minItems": 2},
        ]
    },
    "email": {"type": "string", "format": "email"},
    "hostname": {"type": "string", "format": "hostname"},
    "pattern": {"type": "string", "pattern": "^[a-z]{2,90}$"},
    "share": {"type": "string", "pattern": "^[a-z]+:[a-z]+$", "maxLength": 70},
}


@cache
def compiler() -> Compiler:
    made = Compiler(DEMO, VOCAB, [END])
    made.prepare()
    return made


@cache
def exact_of(tag: str) -> xgrammar.CompiledGrammar:
    """Return the unchanged grammar, compiled over all tokens."""
    made = xgrammar.GrammarCompiler(token_table(DEMO, VOCAB, [END]), cache_enabled=False)
    return made.compile_structural_tag(tag)


def tag_of(schema: object) -> str:
    form = {"type": "grammar", "grammar": compiled(schema, "x", exact=True)}
    return json.dumps({"type": "structural_tag", "format": form})


def exact_mask(matcher: xgrammar.GrammarMatcher) -> np.ndarray:
    mask = np.zeros((1, VOCAB // 32), np.int32)
    matcher.fill_next_token_bitmask(torch.from_numpy(mask))
    return mask[0]


def tokens_of(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def test_nothing_is_printed_for_a_token_after_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    """A line of xgrammar on stderr is no JSON, which a log in JSON must be."""
    matcher = Matcher(compiler().build(tag_of({"const": 1})))
    (one,) = (token for token, text in enumerate(compiler().texts.spelled) if text == b"1")
    assert [matcher.accept_token(token) for token in (one, END, one, END)] == [
        True, True, False, False,
    ]  # fmt: skip
    assert matcher.is_terminated() and capfd.readouterr() == ("", "")


def check_walk(tag: str, seed: int, steps: int) -> int:
    """Compare with the exact matcher on random text. Return the number of masks near a limit."""
    pair, rng, num_near = compiler().build(tag), Random(seed), 0
    assert pair.free is not None
    chars = pair.free.texts.chars
    matcher, exact = Matcher(pair), xgrammar.GrammarMatcher(exact_of(tag))
    for _ in range(steps):
        mask, right = np.zeros(VOCAB // 32, np.int32), exact_mask(exact)
        matcher.fill(mask)
        allowed, expected = tokens_of(mask), tokens_of(right)
        assert allowed and set(allowed) <= set(expected)
        # Single-character tokens are allowed, so every text can still be written.
        assert {t for t in expected if chars[t] <= 1} <= set(allowed)
        num_near += 0 < matcher._look().first_limit - matcher._look().num_chars < 6
        inner = [t for t in allowed if 0 < chars[t] < 9 and t < END]
        token = rng.choice(inner if inner and rng.random() < 0.9 else allowed)
        if rng.random() < 0.2:  # roll back a draft
            assert matcher.accept_token(token)
            matcher.rollback(1)
        assert matcher.accept_token(token) and exact.accept_token(token)
        if matcher.is_terminated():
            break
    return num_near


@pytest.mark.parametrize("name", SHAPES)
def test_masks_are_those_of_the_exact_grammar_but_for_overlong_tokens(name: str) -> None:
    tag = tag_of(SHAPES[name])
    assert sum(check_walk(tag, seed, 60) for seed in range(10)) > 0


def test_after_a_limit_the_exact_grammar_decides_until_both_agree() -> None:
    """The free grammar would allow letters in place of the last x after the limit."""
    rules = 'root ::= body "xx" more\nbody[max_chars=30] ::= [a-z]*\nmore ::= "1" | more "2"'
    form = {"type": "grammar", "grammar": rules}
    tag = json.dumps({"type": "structural_tag", "format": form})
    for seed in range(10):
        check_walk(tag, seed, 60)


def test_a_limit_of_thinking_and_one_of_text_hold_together() -> None:
    think = {"type": "any_text", "max_tokens": 5}
    end = {"type": "token", "token": END_THINK}
    thinking = {"type": "tag", "begin": "", "content": think, "end": end}
    answer = {"type": "grammar", "grammar": compiled(LONG, "x", exact=True)}
    whole = {"type": "sequence", "elements": [thinking, answer]}
    tag = json.dumps({"type": "structural_tag", "format": whole})
    for seed in range(5):
        check_walk(tag, seed, 60)


def test_what_has_no_limit_or_too_small_a_one_is_compiled_once() -> None:
    for schema in ({"type": "string"}, {"type": "string", "maxLength": 9}, {"type": "integer"}):
        assert without_limits(tag_of(schema)) is None
    few = {"type": "any_text", "max_chars": 3}
    assert without_limits(json.dumps({"type": "structural_tag", "format": few})) is None
    named = 'root ::= "[max_chars=50] ::= " x\nx[max_chars=50] ::= [a-z]*'
    form = {"type": "grammar", "grammar": named}
    assert without_limits(json.dumps({"type": "structural_tag", "format": form})) is None
    free, least = without_limits(tag_of(LONG)) or ("", 0)
    assert least == 40 and "max_chars" not in free
    assert compiler().build(tag_of(LONG)).memory_size_bytes > 0
