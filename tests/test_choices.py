"""Each choice is deletable: without its file and its lines of the registry, the rest works."""

from __future__ import annotations

import compileall
import re
import shutil
from pathlib import Path

import pytest

from tests.forks import with_torch

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


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the project with compiled files, since each copy imports all modules."""
    folder = tmp_path_factory.mktemp("compiled") / "nanovllm"
    shutil.copytree(ROOT / "nanovllm", folder, ignore=shutil.ignore_patterns("demo", "__pycache__"))
    assert compileall.compile_dir(folder, quiet=1)
    return folder


@pytest.mark.parametrize(("registry", "module"), CHOICES, ids=[module for _, module in CHOICES])
def test_the_rest_works_without(registry: str, module: str, compiled: Path, tmp_path: Path) -> None:
    shutil.copytree(compiled, tmp_path / "nanovllm")
    (tmp_path / "nanovllm" / "demo").symlink_to(ROOT / "nanovllm" / "demo")
    (tmp_path / f"{module.replace('.', '/')}.py").unlink()
    table = tmp_path / registry
    lines = table.read_text()
    table.write_text(ENTRY.sub(lambda m: "" if m[1] == module else m[0], lines))
    assert f'"{module}:' not in table.read_text()
    done = with_torch().run("tests.without_choice:main", module, folder=tmp_path)
    assert done.stdout == "all of the rest works\n", done.stdout + done.stderr[-3000:]
    assert done.returncode == 0
