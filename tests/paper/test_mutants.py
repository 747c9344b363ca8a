"""The paper-GPU tests are worth something: every seeded fault makes one of the fixed ones fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paper.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
TAKEN = ("nanovllm/*.py", "nanovllm/kv/*.py", "nanovllm/sched/*.py", "nanovllm/engine/*.py",
         "tests/__init__.py", "tests/paper/*.py", "tests/kv/*.py", "pyproject.toml")  # fmt: skip
LEFT_OUT = ("test_mutants.py", "test_random_batches.py")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    for pattern in TAKEN:
        for path in ROOT.glob(pattern):
            if path.name in LEFT_OUT:
                continue
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    target = tmp_path / mutant.file
    text = target.read_text()
    assert text.count(mutant.old) == 1, "the mutant no longer fits the code"
    target.write_text(text.replace(mutant.old, mutant.new))
    suites = sorted(
        str(path.relative_to(tmp_path)) for path in tmp_path.glob("tests/[kp]*/test_*.py")
    )
    command = [sys.executable, "-m", "pytest", "-x", "--tb=short", "-p", "no:cacheprovider",
               "-W", "ignore", "-o", "pythonpath=.", *suites]  # fmt: skip
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 1, f"survived:\n{run.stdout[-2000:]}"
    assert "failed" in run.stdout, f"broke instead of failing:\n{run.stdout[-2000:]}{run.stderr}"
