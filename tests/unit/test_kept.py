"""Compiled CuTe DSL kernels on disk: where, and under a key of everything they are made of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm.cli.check_kernels import COMPILED
from nanovllm.config import Kernels
from nanovllm.registry import resolve
from nanovllm.runner.build import keep_compiled

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of flash-attn-4's imports
COMPILE = """
import sys
from contextlib import suppress
from pathlib import Path
import torch

def gated():
    from nanovllm_kernels.gated_linear import GATED_LINEAR
    x, weight = (torch.zeros(128, 64, dtype=torch.bfloat16) for _ in range(2))
    with suppress(RuntimeError):  # there is no GPU to run it on
        GATED_LINEAR(x, weight)

def decode():
    from nanovllm_kernels.paged_decode_cute import compile_decode
    compile_decode(2, 64, 16)
    print("compiled:", compile_decode.cache_info().misses)

def keep_in(folder):
    from nanovllm_kernels import kept
    kept.keep_in(Path(folder))
"""


def run(then: str, folder: Path) -> str:
    """In a process of its own: the architecture is read when the package is imported."""
    command = ["env", f"QUACK_CACHE_DIR={folder}", "CUTE_DSL_ARCH=sm_90a", "QUACK_ARCH=90"]
    command += ["CUDA_VISIBLE_DEVICES=", sys.executable, "-c", COMPILE + then]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_a_second_start_compiles_nothing_wherever_it_was_told_and_whatever_came_first(
    tmp_path: Path,
) -> None:
    folder, other = tmp_path / "kept", tmp_path / "other"
    assert run("gated(); decode()", folder) == "compiled: 1\n"
    written = {path: path.stat().st_mtime_ns for path in folder.rglob("*.o")}
    assert len(written) == 2 and len({path.parent for path in written}) == 1
    assert run(f"keep_in({str(folder)!r}); decode(); gated()", other) == "compiled: 0\n"
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.o")} == written
    assert not other.exists()


@pytest.mark.parametrize("name", COMPILED)
def test_what_compiles_a_kernel_belongs_to_its_key(name: str) -> None:
    import flash_attn.cute
    import quack.cache

    compiles = resolve({name: COMPILED[name][0]}, name).__wrapped__
    for source in (compiles.__code__.co_filename, flash_attn.cute.__file__):
        assert any(Path(source).is_relative_to(known) for known in quack.cache.EXTRA_SOURCE_DIRS)


@pytest.mark.parametrize(
    ("changed", "is_kept"),
    [
        ({}, False),
        ({"attention": "triton", "decode": "triton"}, False),
        ({"attention": "flash", "decode": "triton"}, True),
        ({"attention": "triton", "decode": "cute"}, True),
        ({"gated_linear": "cute"}, True),
    ],
)
def test_an_engine_keeps_what_it_compiles(
    changed: dict[str, str], is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import quack.cache

    monkeypatch.setattr(quack.cache, "CACHE_DIR", "as it was")
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path))
    keep_compiled(Kernels(**{"attention": "torch", "decode": "torch", **changed}))
    assert (str(tmp_path / "cute") if is_kept else "as it was") == quack.cache.CACHE_DIR
