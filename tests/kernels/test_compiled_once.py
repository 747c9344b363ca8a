"""Triton does not compile a kernel again for another number of tokens in a step.

Requests would wait for that compilation.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import nanovllm_kernels

FOLDER = Path(nanovllm_kernels.__file__).parent
CHANGING = {"num_rows", "num_tokens", "num_pairs", "num_parts", "num_own", "most_tiles"}
FIXED = {("latent_decode_kernel", "num_pairs")}  # depends on heads and drafts, not on a step


def kernels() -> Iterator[tuple[ast.FunctionDef, set[str]]]:
    """Yield every launched kernel, and its arguments not specialised by Triton."""
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                for one in node.decorator_list:
                    if ast.unparse(one).startswith("triton.jit"):
                        keywords = one.keywords if isinstance(one, ast.Call) else []
                        found = {key.arg: ast.literal_eval(key.value) for key in keywords}
                        yield node, set(found.get("do_not_specialize", ()))


def test_sizes_that_change_from_step_to_step_are_not_specialised() -> None:
    heeded = [
        (node.name, one.arg)
        for node, unheeded in kernels()
        for one in node.args.args
        if one.arg in CHANGING - unheeded and one.annotation is None
    ]
    assert set(heeded) == FIXED
    assert len([*kernels()]) > 40
