"""The prose of code and pages keeps to plain words: limits per package, and the measure itself."""

from __future__ import annotations

import pytest

from tests.prose import LIMITS, ROOT, Piece, faults_of, files_of, pieces_of, rates_of

PACKAGES = [
    *sorted(f"nanovllm/{path.name}" for path in (ROOT / "nanovllm").iterdir()
            if path.is_dir() and path.name not in {"__pycache__", "demo"}),
    "kernels", "recipes", "tests", "results", "README.md", "nanovllm/README.md",
    "recipes/README.md", "nanovllm/server/README.md", "nanovllm/grammars/README.md",
    "results/README.md",
]  # fmt: skip
MAX_LONG, MAX_VAGUE_STARTS = 20.0, 15.0  # per 1,000 sentences
TABLES = {"nanovllm/README.md"}  # the tables of the tour start with questions


@pytest.mark.parametrize("name", PACKAGES)
def test_vague_words_are_rare_and_sentences_short(name: str) -> None:
    rates = rates_of([piece for path in files_of(name) for piece in pieces_of(path)])
    assert rates["words"] >= 100
    limits = {**LIMITS, "long": MAX_LONG}
    if name not in TABLES:
        limits["start"] = MAX_VAGUE_STARTS
    over = {group: rates[group] for group, limit in limits.items() if rates[group] > limit}
    assert over == {}, f"`python -m tests.prose {name}` lists the places"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Return what the client told us.", ["what: what", "tell: told"]),
        ("So many pages as nobody reads.", ["many: So many", "who: nobody", "start: So many"]),
        ('`what` is code. So is "told".', []),
        ("Whether it fits.", ["start: Whether it fits."]),
        (" ".join(["word"] * 26) + ".", ["long: 26 words: word word"]),
        (" ".join(["word"] * 25) + ".", []),
    ],
)
def test_the_measure_finds(text: str, found: list[str]) -> None:
    made = [*faults_of(Piece("x.py:1", "docstring", text))]
    assert len(made) == len(found)
    assert all(fault.startswith(start) for fault, start in zip(made, found, strict=True))


def test_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 250 and max(map(len, lines)) <= 200
    assert "pip install -e '.[dev]' && pytest -n 2 --dist worksteal" in "\n".join(lines)
