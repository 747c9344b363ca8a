"""results/steps.py: temporary changes of kernel constants, and its output for the demo model."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from nanovllm_kernels.products import few_fp8

from results import steps
from tests.forks import with_server_packages

ROOT = Path(__file__).parents[2]


def test_a_change_is_undone() -> None:
    """A constant, a table's entry, cached results of both, and errors are covered."""
    before, table = (few_fp8.START, few_fp8.SHAPES[16]), few_fp8.SHAPES
    change = "{0}.START = 7; {0}.SHAPES[16] = {0}.SHAPES[32]".format("products.few_fp8")
    with steps.changed(change):
        assert (few_fp8.START, few_fp8.SHAPES[16]) == (7, few_fp8.SHAPES[32])
    assert (few_fp8.START, few_fp8.SHAPES[16]) == before
    assert few_fp8.SHAPES is table  # other modules may have imported it
    with pytest.raises(ZeroDivisionError), steps.changed("products.few_fp8.START = 1 // 0"):
        pass
    with pytest.raises(RuntimeError, match="within"), steps.changed("products.few_fp8.START = 8"):
        raise RuntimeError("within")
    assert before[0] == few_fp8.START


def test_more_rows_than_slots_are_refused() -> None:
    done = CliRunner().invoke(steps.main, ["recipes/demo.yaml", "now:", "--rows", "9"])
    assert done.exit_code == 2
    assert "--rows 9: a step has 1 to 8 (schedule.slots)" in done.output


def test_variants_of_a_step_on_the_demo() -> None:
    other, wrong = (f"products.few_fp8.START = {value}" for value in (3, "nothing"))
    variants = "now:", f"other:{other}", f"wrong:{wrong}", "again:"
    line = [sys.executable, "results/steps.py", "recipes/demo.yaml", "--rows", "2", *variants]
    code = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = with_server_packages().start(line, timeout=300, cwd=ROOT, env=os.environ | code)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    now, other, wrong, again = done.stdout.splitlines()[-4:]
    same = r" +\d+\.\d us, off by 0\.0000  "
    assert re.fullmatch(f"now{same}", now)
    assert re.fullmatch(rf"other{same}products\.few_fp8\.START = 3", other)
    assert re.fullmatch(r"wrong +NameError: name 'nothing' is not defined", wrong)
    assert re.fullmatch(f"again{same}", again)
