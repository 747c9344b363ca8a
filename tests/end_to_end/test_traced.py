"""The path of a chat request, compared with the tour's table of hops and its stated size."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.traced.path import Trace, function_spans, totals, traced_request

TOUR = (Path(__file__).parents[2] / "nanovllm" / "README.md").read_text()
HOP = re.compile(r"^\| (\d+) \| `([^`]+)` \|", re.MULTILINE)
STATED = re.compile(r"<!-- traced: (\d+) files, (\d+) functions, (\d+) code lines -->")
GROWTH = 1.03  # of the stated size, before the statement must be renewed


@pytest.fixture(scope="module")
def traced() -> tuple[str, list[Trace]]:
    return traced_request()


def hops(text: str) -> list[tuple[int, str]]:
    return [(int(number), function) for number, function in HOP.findall(text)]


def test_the_answer_is_the_demos(traced: tuple[str, list[Trace]]) -> None:
    assert traced[0].startswith("nanovllm is ")


def test_every_hop_is_entered(traced: tuple[str, list[Trace]]) -> None:
    found = hops(TOUR)
    assert [number for number, _ in found] == [*range(1, len(found) + 1)] and len(found) >= 40
    functions = {function for trace in traced[1] for function in trace.functions}
    assert [function for _, function in found if function not in functions] == []


def test_the_path_is_not_longer_than_stated(traced: tuple[str, list[Trace]]) -> None:
    sizes = totals(traced[1])
    stated = STATED.search(TOUR)
    assert stated is not None
    for measured, number in zip(sizes, map(int, stated.groups()), strict=True):
        assert measured <= GROWTH * number, f"the path grew: {sizes}; shorten it"
        assert measured >= number / GROWTH, f"the path is shorter: state {sizes}"


def test_the_prose_states_the_same_size() -> None:
    stated = STATED.search(TOUR)
    assert stated is not None
    files, functions, lines = map(int, stated.groups())
    assert f"{functions} functions in {files} files with {lines:,} code lines" in TOUR


def test_spans_have_qualified_names() -> None:
    text = "class A:\n    def f(self):\n        def g():\n            pass\n        return g\n"
    assert function_spans(ast.parse(text)) == {"A.f": {2, 3, 4, 5}, "A.f.<locals>.g": {3, 4}}
