"""`pytest -m quick` covers all packages, its lists contain existing names, and threads are few."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quick import LONG, QUICK, SLOW, is_quick

TESTS = Path(__file__).parent
PACKAGES = TESTS.parent / "nanovllm"
NEW = {"kv", "sched", "spec"}  # may have no folder of tests, since those of tests/paper cover them
FILES = {str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py")}


def test_every_line_names_tests() -> None:
    for one in QUICK:
        assert one.strip("/") in NEW or any(is_quick(name) and one in name for name in FILES), one
    texts = [(TESTS / name).read_text() for name in FILES if is_quick(name)]
    for test in SLOW:
        assert any(f"def {test}(" in text for text in texts), test


def test_long_files_are_there() -> None:
    assert {*LONG} <= FILES


def test_every_package_is_touched() -> None:
    packages = {path.parent.name for path in PACKAGES.glob("*/__init__.py")} | {"kernels", "paper"}
    assert len(packages) >= 14
    assert packages - NEW <= {name.split("/")[0] for name in FILES if is_quick(name)}


def test_what_is_listed_is_quick() -> None:
    assert is_quick("test_quick.py") and is_quick("ipc/test_channel.py")
    assert not is_quick("ipc/test_channel.py", next(iter(SLOW)))
    assert not is_quick("kernels/sampling/test_draw.py") and not is_quick("ipc")


@pytest.mark.parametrize(("given", "threads"), [(None, "1"), ("3", "3")])
def test_torch_has_one_thread_unless_the_environment_has_another_number(
    given: str | None, threads: str
) -> None:
    """The number is set before torch is imported, which reads it once."""
    code = "import os, sys, tests.conftest; print(os.environ['OMP_NUM_THREADS'], {*sys.modules})"
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    variables |= {"OMP_NUM_THREADS": given} if given else {}
    command = [sys.executable, "-c", code]
    said = subprocess.check_output(command, cwd=TESTS.parent, env=variables, text=True)
    found, modules = said.split(" ", 1)
    assert found == threads and "'hypothesis'" in modules and "'torch'" not in modules
