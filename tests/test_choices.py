"""Delete any choice's file and its lines of the registry, and the rest works."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
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
def test_the_rest_works_without(
    registry: str, module: str, forks: Callable[[Path, str], str], tmp_path: Path
) -> None:
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
    word = forks(tmp_path, module)
    assert word.endswith("all of the rest works\n"), word[-3000:]


@pytest.fixture(scope="module")
def forks() -> Iterator[Callable[[Path, str], str]]:
    """Checks a copy without a module, and returns what the check said.

    Each is a fork of one process that has imported what others wrote, and nothing of ours.
    """
    path = [str(ROOT / "kernels"), str(ROOT)]  # tests are those of the project
    command = [sys.executable, "-P", "-c", FORKS.format(path=path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as process:
        assert process.stdin is not None and process.stdout is not None
        told, said = process.stdin, process.stdout

        def check(folder: Path, module: str) -> str:
            told.write(f"{folder} {module}\n")
            assert said.readline() == "done\n"
            return (folder / "said").read_text()

        yield check
        told.close()
        assert process.wait(60) == 0


FORKS = """
import os, runpy, signal, sys
import httptools, httpx, huggingface_hub, jinja2, msgspec, pandas, tokenizers, torch, torch._dynamo
import transformers, triton, uvicorn, uvloop
from transformers import AutoModelForCausalLM, PreTrainedModel

for line in sys.stdin:
    folder, module = line.split()
    if os.fork() == 0:
        signal.alarm(120)
        said = os.open("said", os.O_WRONLY | os.O_CREAT, dir_fd=os.open(folder, os.O_RDONLY))
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.chdir(folder)
        sys.path[:0] = [folder, *{path}]
        sys.argv[1:] = [module]
        assert not any(name.split(".")[0] == "nanovllm" for name in sys.modules)
        runpy.run_module("tests.without_choice", run_name="__main__", alter_sys=True)
        sys.stdout.flush()
        os._exit(0)  # without undoing what was imported, which takes longer than all before
    os.wait()
    print("done", flush=True)
"""
