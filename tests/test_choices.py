"""Delete any choice's file and its lines of the registry, and the rest works."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REGISTRIES = [
    f"nanovllm/{package}/__init__.py"
    for package in ("attention", "models", "sampling", "server/parsers", "spec")
]
ENTRY = re.compile(r'^ .*"(nanovllm\.[\w.]+):\w+",?\n', re.MULTILINE)
CHOICES = [
    (registry, module)
    for registry in REGISTRIES
    for module in sorted(set(ENTRY.findall((ROOT / registry).read_text())))
]


def test_every_registry_has_choices() -> None:
    assert {registry for registry, _ in CHOICES} == set(REGISTRIES) and len(CHOICES) >= 14


@pytest.mark.parametrize(("registry", "module"), CHOICES, ids=[module for _, module in CHOICES])
def test_the_rest_works_without(registry: str, module: str, tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "nanovllm", tmp_path / "nanovllm",
        ignore=shutil.ignore_patterns("demo", "__pycache__"),
    )  # fmt: skip
    (tmp_path / "nanovllm" / "demo").symlink_to(ROOT / "nanovllm" / "demo")
    (tmp_path / f"{module.replace('.', '/')}.py").unlink()
    table = tmp_path / registry
    lines = table.read_text()
    table.write_text(ENTRY.sub(lambda m: "" if m[1] == module else m[0], lines))
    assert f'"{module}:' not in table.read_text()
    path = [str(tmp_path), str(ROOT / "kernels"), str(ROOT)]  # tests are those of the project
    run = subprocess.run(
        [sys.executable, "-P", "-c", CHILD.format(path=path), module],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.stdout.endswith("all of the rest works\n"), run.stderr[-3000:]


CHILD = """
import runpy, sys
sys.path[:0] = {path}
runpy.run_module("tests.without_choice", run_name="__main__", alter_sys=True)
"""
