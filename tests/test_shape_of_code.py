"""The rules of the design that a linter has no word for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    path
    for folder in ("nanovllm", "kernels", "recipes", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
MAX_LINES = {"nanovllm": 400, "recipes": 400, "tests": 500, "kernels": 700}
MAX_FUNCTION = 60
MAX_TOTAL = {"nanovllm": 13_000, "kernels": 5_000}
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "core"}
MAY_READ_ENVIRONMENT = {"nanovllm/config.py", "nanovllm/log.py"}
ON_DEVICE = {"jit", "kernel"}  # @triton.jit, @cute.jit, @cute.kernel: check-kernels measures them
WAITS = {"item", "tolist", "cpu", "nonzero", "synchronize"}
MUST_NOT_WAIT = ("nanovllm/sampling/", "nanovllm/runner/runner.py", "nanovllm/runner/batch.py",
                 "nanovllm/runner/slots.py", "nanovllm/models/decoder.py", "nanovllm/layers/",
                 "nanovllm/attention/flash.py", "nanovllm/attention/paged.py")  # fmt: skip
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
    """Numpy on the host may: names of its arrays end without a shape suffix."""
    receiver = node.func.value if isinstance(node.func, ast.Attribute) else node.func
    name = getattr(receiver, "attr", getattr(receiver, "id", ""))
    tail = name.rpartition("_")[2]
    return bool(name) and not (tail.isupper() and len(tail) <= 4)


@pytest.mark.parametrize("folder", MAX_TOTAL)
def test_total(folder: str) -> None:
    lines = sum(p.read_text().count("\n") for p in FILES if name_of(p).startswith(f"{folder}/"))
    assert lines <= MAX_TOTAL[folder]


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
