"""Calls and expressions in nanovllm are plain: arguments are named, flags are not multiplied."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "nanovllm").rglob("*.py"))
MAX_POSITIONAL = 4
# Called with more. The recipe chooses the kernel behind the first ones, and the kernels name some
# arguments differently. Names of the others are not visible in the call (partial, logging).
CHOSEN = {"rows", "decodes", "drafted", "kernel", "product", "gate_up", "down", "find_thresholds"}
GIVEN = {"_draw", "_ngram", "job", "info", "sequence", "_others", "LogRecord"}


def names_of_tuples(function: ast.AST) -> set[str]:
    """Return the names that a function assigns a tuple display to."""
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def golf_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the remedy of each call or expression that is too dense."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            tuples = names_of_tuples(function)
            for node in ast.walk(function):
                if isinstance(node, ast.Starred) and getattr(node.value, "id", "") in tuples:
                    yield node.lineno, "write the elements of the tuple into the call"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) > MAX_POSITIONAL:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name not in CHOSEN | GIVEN:
                yield node.lineno, f"name the arguments of {name}"
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = (node.left, node.right)
            is_text = any(
                isinstance(side, ast.JoinedStr)
                or (isinstance(side, ast.Constant) and isinstance(side.value, str))
                for side in sides
            )
            is_flag = any(isinstance(side, ast.Compare | ast.BoolOp) for side in sides)
            if is_text and is_flag:
                yield node.lineno, "use a conditional expression instead of a product"
        if isinstance(node, ast.IfExp) and any(
            isinstance(inner, ast.NamedExpr) for inner in ast.walk(node)
        ):
            yield node.lineno, "assign before the conditional expression"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_calls_are_plain(path: Path) -> None:
    assert [*golf_in(ast.parse(path.read_text()))] == []


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("def f():\n    a = 1, 2\n    g(*a)\n", "write the elements of the tuple into the call"),
        ("g(1, 2, 3, 4, 5)\n", "name the arguments of g"),
        ("x.g(1, 2, 3, 4, 5, b=6)\n", "name the arguments of g"),
        ("a = 'x' * (b > 1)\n", "use a conditional expression instead of a product"),
        ("a = f'{x}' * (b and c)\n", "use a conditional expression instead of a product"),
        ("a = b if (c := d) else c\n", "assign before the conditional expression"),
        ("def f(*a):\n    b = [1]\n    g(*a, *b)\n    g(1, 2, 3, 4)\n    '=' * 80\n", None),
    ],
)
def test_the_rules_themselves(text: str, remedy: str | None) -> None:
    assert [told for _, told in golf_in(ast.parse(text))] == ([remedy] if remedy else [])
