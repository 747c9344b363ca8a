"""What is compiled for Hopper without a GPU, in processes that think they have one: CuTe DSL reads
the architecture when it is imported. And products of block-scaled fp8 numbers, so compiled."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

from nanovllm.runner.precompile import HOPPER
from tests.forks import ROOT, Forks

KINDS = """
from pathlib import Path
from cutlass import cute
from nanovllm_kernels import block_fp8_cute

compile_any = cute.compile
cute.compile = lambda *a, options, **b: compile_any(*a, options=options + " {option}", **b)
for kind in {kinds}:
    compiled = block_fp8_cute.compile_tile.compiles(*kind)
"""


@functools.cache
def forks() -> Forks:
    """Without TRITON_INTERPRET, under which nothing is compiled.

    CuTe DSL is not imported: it keeps what it is to keep in the folder where it was.
    """
    variables = dict(one.split("=") for one in HOPPER[1:])
    return Forks("torch._dynamo", "triton.compiler", TRITON_INTERPRET="0", **variables)


def printed(code: str, folder: Path = ROOT, **environment: str) -> list[str]:
    """What the code prints, run in the folder."""
    done = forks().run(f"{__name__}:execute", code, folder=folder, **environment)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[-4000:]
    return done.stdout.splitlines()


def execute(code: str) -> None:
    exec(code, {"__name__": "__main__"})


def compiled_with(
    option: str, kinds: Iterable[tuple[int, ...]], each: str, folder: Path
) -> list[str]:
    """What the code `each`, indented by four, prints of every `kind` that was `compiled` with one
    more option of the compiler."""
    return printed(KINDS.format(option=option, kinds=list(kinds)) + each, folder)
