"""For each seeded fault, the paper-GPU test that its mutant names fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.paper.faulty import ROOT, run, run_with_torch
from tests.paper.mutants import MUTANTS, Mutant

SUITES = [path for room in ("kv", "paper") for path in ROOT.glob(f"tests/{room}/test_*.py")]
NAMES = ("engine/test_transfer_ends", "engine/test_disk_of_ranks", "models/test_invariant")
NAMES += ("sched/test_lanes",)
WITH_TORCH = [*ROOT.glob("tests/spec/test_*.py"), *(ROOT / f"tests/{name}.py" for name in NAMES)]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.old) == 1, "the mutant no longer fits the code"
    suites = [*SUITES, *WITH_TORCH]
    name, _, _ = mutant.caught_by.partition("[")
    [suite] = [path for path in suites if f"def {name}(" in path.read_text()]
    start = run_with_torch if suite in WITH_TORCH else run
    code = start(mutant, f"{suite}::{mutant.caught_by}", tmp_path / "said")
    said = (tmp_path / "said").read_text()
    assert code == 1, f"survived:\n{said[-2000:]}"
    assert "1 failed" in said, f"broke instead of failing:\n{said[-2000:]}"
