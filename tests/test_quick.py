"""`pytest -m quick` covers all packages, and its lists contain existing names only."""

from __future__ import annotations

from pathlib import Path

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
