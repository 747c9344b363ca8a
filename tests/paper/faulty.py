"""Run a test in a separate process in which one module has a seeded fault."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, ModuleType

import pytest

from tests.forks import with_torch
from tests.paper.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
# Each process forks from a server with these imports. None of them imports the faulty module.
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["numpy", "hypothesis", "nanovllm.config", "nanovllm.plan", __name__])
EVENTUALLY_S = "2"  # a fault often prevents what a test waits for


class Faulty(SourceFileLoader, MetaPathFinder):
    """Finder and loader of a mutant's module. It finds no other module."""

    def __init__(self, mutant: Mutant) -> None:
        module = mutant.file.removeprefix("kernels/").removesuffix(".py").replace("/", ".")
        super().__init__(module, str(ROOT / mutant.file))
        self.mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = spec_from_file_location(fullname, self.path, loader=self)
        return found if fullname == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        text = Path(self.path).read_text()
        return compile(text.replace(self.mutant.old, self.mutant.new), self.path, "exec")


def run(mutant: Mutant, test: str, output: Path) -> int | None:
    """Run a test with the mutant and return pytest's exit code. Its output goes to a file."""
    process = FORKS.Process(target=_run, args=(mutant, test, output))
    process.start()
    process.join(300)
    process.kill()
    return process.exitcode


def run_with_torch(mutant: Mutant, test: str, output: Path) -> int:
    """Run a test that imports torch with the mutant, as `run` does."""
    done = with_torch().run(f"{__name__}:execute_named", mutant.name, test)
    output.write_text(done.stdout + done.stderr)
    return done.returncode


def execute_named(name: str, test: str) -> int:
    """Run a test with the mutant of this name, in this process."""
    [mutant] = [mutant for mutant in MUTANTS if mutant.name == name]
    return _execute(mutant, test)


def _run(mutant: Mutant, test: str, output: Path) -> None:
    with output.open("w") as written:
        os.dup2(written.fileno(), 1)
        os.dup2(written.fileno(), 2)
    os.chdir(ROOT)
    gc.freeze()  # shared by all forks
    code = _execute(mutant, test)
    sys.stdout.flush()
    os._exit(code)


def _execute(mutant: Mutant, test: str) -> int:
    os.environ["EVENTUALLY_S"] = EVENTUALLY_S
    faulty = Faulty(mutant)
    assert faulty.name not in sys.modules
    sys.meta_path.insert(0, faulty)
    options = ["-x", "--tb=line", "-p", "no:cacheprovider", "--disable-plugin-autoload"]
    quickly = ["-p", "no:unraisableexception"]  # it collects garbage ten times
    return pytest.main([*options, *quickly, "-W", "ignore", test])
