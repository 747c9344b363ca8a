"""What a CuTe DSL kernel is compiled with in place of tensors. Imports CuTe DSL."""

from __future__ import annotations

from typing import Any

from cutlass import cute


def like(dtype: Any, *sizes: Any, divisibility: int = 1) -> Any:  # noqa: ANN401
    """A tensor of these sizes, the last one dense, as torch allocates it.

    `divisibility`: of strides and address, in elements.
    """
    strides = [cute.sym_int64(divisibility=divisibility) for _ in sizes[1:]]
    align = divisibility * dtype.width // 8
    return cute.runtime.make_fake_tensor(dtype, sizes, (*strides, 1), assumed_align=align)
