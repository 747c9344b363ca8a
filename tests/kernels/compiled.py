"""Products of block-scaled fp8 numbers as CuTe DSL compiles them, in a process of its own: the
architecture is read when the package is imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from nanovllm.runner.precompile import HOPPER

KINDS = """
from pathlib import Path
from cutlass import cute
from nanovllm_kernels import block_fp8_cute

compile_any = cute.compile
cute.compile = lambda *a, options, **b: compile_any(*a, options=options + " {option}", **b)
for kind in {kinds}:
    compiled = block_fp8_cute.compile_tile.compiles(*kind)
"""


def printed(code: str, folder: Path) -> list[str]:
    """What the code prints, run in the folder."""
    command = [*HOPPER, sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


def compiled_with(
    option: str, kinds: Iterable[tuple[int, ...]], each: str, folder: Path
) -> list[str]:
    """What the code `each`, indented by four, prints of every `kind` that was `compiled` with one
    more option of the compiler."""
    return printed(KINDS.format(option=option, kinds=list(kinds)) + each, folder)
