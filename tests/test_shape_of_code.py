"""Rules of the design that no linter has."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    path
    for folder in ("nanovllm", "kernels", "recipes", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
MAX_LINES = {"nanovllm": 500, "recipes": 400, "tests": 500, "kernels": 700}
MAX_FUNCTION = 60
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "core"}
MAY_READ_ENVIRONMENT = {
    "nanovllm/config.py",
    "nanovllm/log.py",
    "kernels/nanovllm_kernels/products/invariant.py",  # sets what only a library reads
}
# Names of classes that may repeat: a Protocol and its implementation, and parts of kernels.
SAME_NAME = {"SchemaReader", "SkinnyLinear"}
OF_A_KERNEL = {"Kind", "Operands", "Product", "Shape", "Shared", "Size", "Tile"}
# Decorators @triton.jit, @cute.jit and @cute.kernel. check-kernels measures these functions.
ON_DEVICE = {"jit", "kernel"}
WAITS = {"item", "tolist", "cpu", "nonzero", "synchronize"}
MUST_NOT_WAIT = ("nanovllm/sampling/", "nanovllm/runner/runner.py", "nanovllm/runner/batch.py",
                 "nanovllm/models/decoder.py", "nanovllm/layers/",
                 "nanovllm/attention/flash.py", "nanovllm/attention/paged.py",
                 "nanovllm/attention/triton.py")  # fmt: skip
TOP_LEVEL = {
    "pyproject.toml",
    "nanovllm",
    "kernels",
    "recipes",
    "tests",
    "results",
    "README.md",
    "LICENSE",
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_shape(path: Path) -> None:
    name = name_of(path)
    text = path.read_text()
    assert text.count("\n") <= MAX_LINES[name.split("/")[0]], "split the file"
    assert path.stem not in EMPTY_NAMES, "name the file after what it owns"
    assert text.isascii() or name.startswith(("tests/", "recipes/demo/")), "ASCII in code"
    product = name.startswith(("nanovllm/", "kernels/"))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_on_device(node):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= MAX_FUNCTION, f"{node.name} has {length} lines"
        assert not isinstance(node, ast.Global), "pass it as an argument"
        if product and isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}:
            assert name in MAY_READ_ENVIRONMENT, "configuration comes from the recipe"
        if name.startswith(MUST_NOT_WAIT) and isinstance(node, ast.Call):
            called = getattr(node.func, "attr", "")
            assert called not in WAITS or on_host(node), f"line {node.lineno} waits for the device"


def is_on_device(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    used = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return any(getattr(d, "attr", getattr(d, "id", "")) in ON_DEVICE for d in used)


def on_host(node: ast.Call) -> bool:
    """Return True for numpy arrays on the host, whose names have no shape suffix."""
    receiver = node.func.value if isinstance(node.func, ast.Attribute) else node.func
    name = getattr(receiver, "attr", getattr(receiver, "id", ""))
    tail = name.rpartition("_")[2]
    return bool(name) and not (tail.isupper() and len(tail) <= 4)


def code_line_numbers(text: str) -> set[int]:
    """Return the numbers of lines of code: no blanks, comments, docstrings and imports."""
    passed_over: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            passed_over |= {*range(node.lineno, (node.end_lineno or 0) + 1)}
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and (ast.get_docstring(node) is not None):
            said = node.body[0]
            passed_over |= {*range(said.lineno, (said.end_lineno or 0) + 1)}
    silent = {
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENDMARKER,
    }  # fmt: skip
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            found |= {*range(token.start[0], token.end[0] + 1)}
    return found - passed_over


def test_code_lines_are_code_alone() -> None:
    text = '"""Two\nlines."""\n\nimport os\n\n# said\nx = [\n    1,  # one\n]\n'
    assert code_line_numbers(text) == {7, 8, 9}


def test_a_class_name_means_one_thing() -> None:
    named = [
        node.name
        for path in FILES
        if name_of(path).startswith(("nanovllm/", "kernels/"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        if node.name not in OF_A_KERNEL or name_of(path).startswith("nanovllm/")
    ]
    assert {name for name in named if named.count(name) > 1} == SAME_NAME
    assert not OF_A_KERNEL & {*named}


def test_top_level() -> None:
    found = {p.name for p in ROOT.iterdir() if not p.name.startswith((".", "__"))}
    assert {n for n in found if not n.endswith(".egg-info") and n != "build"} <= TOP_LEVEL


def test_every_module_says_what_it_owns() -> None:
    silent = [
        name_of(path)
        for path in FILES
        if path.read_text().strip() and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert silent == []
