"""Compilation of kernels for Hopper without a GPU, in processes whose environment names Hopper.

CuTe DSL reads the architecture when it is imported, so the processes are separate ones. Also
compiles products of block-scaled fp8 numbers in that way.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

from nanovllm.runner.precompile import HOPPER
from tests.forks import ROOT, Forks

KINDS = """
from pathlib import Path
from cutlass import cute
from nanovllm_kernels.products.{module} import {function} as compiles

compile_any = cute.compile
cute.compile = lambda *a, options, **b: compile_any(*a, options=options + " {option}", **b)
for kind in {kinds}:
    compiled = compiles.compiles(*kind)
"""


@functools.cache
def forks() -> Forks:
    """Return a server of forks without TRITON_INTERPRET, under which nothing is compiled.

    CuTe DSL is not imported in it, since its dumps go to the folder in which it was imported.
    """
    variables = dict(one.split("=") for one in HOPPER[1:])
    packages = "pytest", "torch._dynamo", "transformers", "triton.compiler"
    return Forks(*packages, TRITON_INTERPRET="0", **variables)


def printed(code: str, folder: Path = ROOT, **environment: str) -> list[str]:
    """Return the lines that the code prints, run in the folder."""
    done = forks().run(f"{__name__}:execute", code, folder=folder, **environment)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[-4000:]
    return done.stdout.splitlines()


def execute(code: str) -> None:
    exec(code, {"__name__": "__main__"})


def compiled_with(
    option: str,
    kinds: Iterable[tuple[int, ...]],
    each: str,
    folder: Path,
    of: str = "block_fp8_cute.compile_tile",
) -> list[str]:
    """Compile every kind with one more option of the compiler and return the printed lines.

    The code `each`, indented by four, runs for every `kind` after it is `compiled`. `of` is a
    module of products and its compile function.
    """
    module, function = of.split(".")
    code = KINDS.format(option=option, kinds=list(kinds), module=module, function=function)
    return printed(code + each, folder)
