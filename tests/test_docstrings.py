"""Docstrings are sentences with a capital letter, a full stop and a subject."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [p for folder in ("nanovllm", "kernels") for p in sorted((ROOT / folder).rglob("*.py"))]
BEGIN = re.compile(r"[A-Z0-9`(]|[a-z]+([._]\w+)+\b")  # a capital letter, or code
NO_SUBJECT = re.compile(r"(As|Of)\b(?! soon)")
NOT_YET: tuple[str, ...] = ()  # exempt files with other docstrings; the list may only shrink


def faults(text: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        said = ast.get_docstring(node)
        if said is None:
            continue
        first = said.splitlines()[0]
        if not BEGIN.match(said):
            found.append(f"begins small: {first}")
        elif NO_SUBJECT.match(said):
            found.append(f"says of what, not what: {first}")
        elif said.rstrip()[-1] not in ".:?`":
            found.append(f"does not end: {first}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_docstrings_are_sentences(path: Path) -> None:
    found = faults(path.read_text())
    if str(path.relative_to(ROOT)) in NOT_YET:
        assert found, "take it off the list"
    else:
        assert found == []


def test_the_list_names_files() -> None:
    assert set(NOT_YET) <= {str(path.relative_to(ROOT)) for path in FILES}


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ("the rows", "begins small"), ("Of a cluster.", "says of what"),
        ("As Ops.norm.", "says of what"),
        ("The rows", "does not end"), ("The rows.", ""), ("`x`: its rows.", ""), ("Rows:", ""),
        ("As soon as rows come, they are fed.", ""), ("`--all`", ""),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(said: str, fault: str) -> None:
    found = faults(f'def f():\n    """{said}"""')
    assert [one.startswith(fault) for one in found] == ([True] if fault else [])
