"""The section `speculate` of a recipe: turning it on and off, and errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanovllm import recipes
from nanovllm.config import ConfigError, Speculate, load_config, read_recipe
from nanovllm.speculate import MOST_DRAFTS

SYNTHETIC = "speculate.method=synthetic"
NGRAM = "speculate.method=ngram"
MODEL = "speculate.method=draft_model"


def given(*overrides: str) -> Speculate | None:
    return load_config(None, overrides).recipe.speculate


def test_it_is_off_unless_a_recipe_says_otherwise() -> None:
    assert given() is None
    for path in recipes.shipped().values():
        assert read_recipe(str(path)).recipe.speculate is None


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([NGRAM, "speculate.tokens=4"], Speculate(method="ngram", tokens=4)),
        (["speculate.tokens=4", NGRAM], Speculate(method="ngram", tokens=4)),
        (["speculate={method: ngram}"], Speculate(method="ngram")),
        (["speculate=null"], None),
        (["speculate={method: ngram}", "speculate=null"], None),
        (["speculate=null", NGRAM], Speculate(method="ngram")),
        (
            [SYNTHETIC, "speculate.tokens=2", "speculate.accept=[1, 0.5]"],
            Speculate(method="synthetic", tokens=2, accept=[1.0, 0.5]),
        ),
        (
            [NGRAM, "speculate.min_match=8", "speculate.max_match=8"],
            Speculate(method="ngram", min_match=8, max_match=8),
        ),
    ],
)
def test_set(overrides: list[str], expected: Speculate | None) -> None:
    assert given(*overrides) == expected


def test_a_recipe_s_section_is_changed_and_turned_off(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    for text in ("speculate:", "speculate: null"):
        path.write_text(text)
        assert load_config(str(path)).recipe.speculate is None
        assert load_config(str(path), [NGRAM]).recipe.speculate == Speculate(method="ngram")
    path.write_text("speculate:\n  method: ngram\n  tokens: 5\n")
    tuned = load_config(str(path), ["speculate.max_match=4"]).recipe.speculate
    assert tuned == Speculate(method="ngram", tokens=5, max_match=4)
    assert load_config(str(path), ["speculate=null"]).recipe.speculate is None
    path.write_text("cache:\n")
    with pytest.raises(ConfigError, match=r"^cache is a section; write cache.<key>$"):
        load_config(str(path))


METHODS = "ngram, synthetic, draft_model, eagle3 or mtp"
NOT_FALLING = "numbers (speculate.tokens) between 0 and 1, each at most the previous one"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("speculate.tokens=3", f"speculate.method is missing; it must be {METHODS}"),
        ("speculate={}", f"speculate.method is missing; it must be {METHODS}"),
        ("speculate.method=medusa", f"speculate.method is 'medusa'; it must be {METHODS}"),
        ("speculate=3", "speculate is a section; write speculate.<key>"),
        ("speculate.metod=ngram", "unknown key speculate.metod; did you mean speculate.method?"),
        ("min_match=3", "unknown key min_match; did you mean speculate.min_match?"),
        (f"{NGRAM} speculate.tokens=8", "speculate.tokens is 8; it must be between 1 and 7"),
        (f"{NGRAM} speculate.tokens=0", "speculate.tokens is 0; it must be between 1 and 7"),
        (f"{NGRAM} speculate.tokens=x", "speculate.tokens is 'x'; it must be a whole number"),
        (
            f"{NGRAM} speculate.min_match=0",
            "speculate.min_match is 0; it must be between 1 and 1024",
        ),
        (
            f"{NGRAM} speculate.min_match=9",
            "speculate.max_match is 8; it must be between 9 (speculate.min_match) and 1024",
        ),
        (
            f"{NGRAM} speculate.accept=[.1,.1,.1]",
            "speculate.accept is for synthetic drafts; drop it, or write "
            "speculate.method: synthetic",
        ),
        (SYNTHETIC, f"speculate.accept is []; it must be 3 {NOT_FALLING}"),
        (
            f"{SYNTHETIC} speculate.accept=[.5,.5]",
            f"speculate.accept is [0.5, 0.5]; it must be 3 {NOT_FALLING}",
        ),
        (
            f"{SYNTHETIC} speculate.accept=[.5,.6,.1]",
            f"speculate.accept is [0.5, 0.6, 0.1]; it must be 3 {NOT_FALLING}",
        ),
        (
            f"{SYNTHETIC} speculate.accept=[1.5,.6,.1]",
            f"speculate.accept is [1.5, 0.6, 0.1]; it must be 3 {NOT_FALLING}",
        ),
        (
            f"{SYNTHETIC} speculate.accept=[.nan,.nan,.nan]",
            f"speculate.accept is [nan, nan, nan]; it must be 3 {NOT_FALLING}",
        ),
        (
            f"{SYNTHETIC} speculate.accept=[.5,a,.1]",
            "speculate.accept is [0.5, 'a', 0.1]; it must be a list of numbers",
        ),
        (
            f"{SYNTHETIC} speculate.accept=.5",
            "speculate.accept is 0.5; it must be a list of numbers",
        ),
        (
            f"{MODEL} speculate.accept=[.5]",
            f"speculate.accept is [0.5]; it must be 3 {NOT_FALLING}",
        ),
        (
            f"{NGRAM} speculate.model=x",
            "speculate.model is for method draft_model or eagle3; drop it",
        ),
        (
            f"{SYNTHETIC} speculate.model=x speculate.accept=[.5,.4,.1]",
            "speculate.model is for method draft_model or eagle3; write that method and keep "
            "speculate.accept, to measure its real cost",
        ),
        (
            f"{SYNTHETIC} speculate.min_match=3 speculate.accept=[.5,.4,.1]",
            "speculate.min_match is for method ngram; drop it",
        ),
        (f"{MODEL} speculate.min_match=3", "speculate.min_match is for method ngram; drop it"),
        (
            "speculate.method=mtp speculate.max_match=4",
            "speculate.max_match is for method ngram; drop it",
        ),
        (
            f"{NGRAM} speculate.drafts_by=argmax",
            "speculate.drafts_by is for method draft_model or eagle3 or mtp; drop it",
        ),
        (
            f"{MODEL} speculate.drafts_by=both",
            "speculate.drafts_by is 'both'; it must be shared or argmax",
        ),
        (
            f"{MODEL} speculate.dtype=fp8",
            "speculate.dtype is for method eagle3 or mtp; drop it",
        ),
        (
            "speculate.method=mtp speculate.dtype=int8",
            "speculate.dtype is 'int8'; it must be auto, fp8 or own",
        ),
        (
            "speculate.method=eagle3",
            "speculate.model is missing; give the folder of an EAGLE-3 head",
        ),
        (
            "speculate.method=mtp speculate.model=x",
            "speculate.model is for method draft_model or eagle3; drop it",
        ),
        (f"{NGRAM} speculate.taps=[2]", "speculate.taps is for method eagle3; drop it"),
        (
            "speculate.method=mtp speculate.rope_theta=500",
            "speculate.rope_theta is for method eagle3; drop it",
        ),
        (
            "speculate.method=eagle3 speculate.model=x speculate.rope_theta=1",
            "speculate.rope_theta is 1.0; it must be above 1",
        ),
        (
            "speculate.method=eagle3 speculate.model=x speculate.taps=[a]",
            "speculate.taps is ['a']; it must be a list of whole numbers",
        ),
        (
            f"{NGRAM} engine=paper",
            "speculate: the paper engine does not support drafts; leave it out",
        ),
    ],
)
def test_a_mistake_is_one_line(overrides: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        given(*overrides.split())
    assert str(caught.value) == line


def test_the_most_drafts_of_a_row_are_allowed() -> None:
    most = given(NGRAM, f"speculate.tokens={MOST_DRAFTS}")
    assert most is not None and most.tokens == 7
