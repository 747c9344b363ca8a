"""For each seeded fault, the paper-GPU test that its mutant names fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.paper.faulty import ROOT, run
from tests.paper.mutants import MUTANTS, Mutant

SUITES = [path for room in ("kv", "paper", "spec") for path in ROOT.glob(f"tests/{room}/test_*.py")]
SUITES += [ROOT / f"tests/engine/test_{name}.py" for name in ("transfer_ends", "disk_of_ranks")]
SUITES += [ROOT / "tests/models/test_invariant.py"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.old) == 1, "the mutant no longer fits the code"
    [suite] = [path for path in SUITES if f"def {mutant.caught_by}(" in path.read_text()]
    code = run(mutant, f"{suite}::{mutant.caught_by}", tmp_path / "said")
    said = (tmp_path / "said").read_text()
    assert code == 1, f"survived:\n{said[-2000:]}"
    assert "1 failed" in said, f"broke instead of failing:\n{said[-2000:]}"
