"""All imports of GPU tests exist. Without a GPU these tests are not collected."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "gpu"
MODULES = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_what_is_imported_exists(name: str) -> None:
    """Imports inside functions are included."""
    import_module(f"tests.gpu.{name}")
    for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text())):
        if isinstance(node, ast.ImportFrom):
            module = import_module(str(node.module))
            lacking = [each.name for each in node.names if not hasattr(module, each.name)]
            assert not lacking, f"{node.module} has no {lacking}"


def test_all_of_them_were_looked_at() -> None:
    assert {"__init__", "conftest", "test_piecewise", "test_kernels"} < set(MODULES)
