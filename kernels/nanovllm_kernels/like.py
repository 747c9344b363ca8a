"""Compilation of a CuTe DSL kernel with placeholder tensors. Imports CuTe DSL."""

from __future__ import annotations

from typing import Any

from cutlass import cute

from nanovllm_kernels.compile_cache import Compiled


def like(dtype: Any, *sizes: Any, divisibility: int = 1) -> Any:  # noqa: ANN401
    """Return a placeholder for a torch tensor of these sizes whose last dimension is dense.

    Strides and the address are multiples of `divisibility` elements.
    """
    strides = [cute.sym_int64(divisibility=divisibility) for _ in sizes[1:]]
    align = divisibility * dtype.width // 8
    return cute.runtime.make_fake_tensor(dtype, sizes, (*strides, 1), assumed_align=align)


def compiled(kernel: Any, *args: Any) -> Compiled:  # noqa: ANN401
    """Compile a kernel for such arguments. It takes torch tensors and runs on torch's stream."""
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    kernel_of_args: Compiled = cute.compile(kernel, *args, stream, options="--enable-tvm-ffi")
    return kernel_of_args
