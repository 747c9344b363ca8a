"""Descriptions of kernels: a launch function, a plain torch reference, cases and a tolerance.

`check` compares the two functions on one case. Nothing here depends on how a kernel is written:
Triton, CuTe DSL and plain torch are treated alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Args = tuple[Any, ...]
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """Named inputs of a kernel, to be checked, and timed if they have a minimum of work."""

    name: str
    inputs: Callable[[torch.device], Args]  # deterministic: two calls give equal arguments
    small: bool = False  # fast enough for Triton's interpreter
    num_bytes: int = 0  # least memory traffic; not timed if num_flops is 0, too
    num_flops: int = 0

    @property
    def is_timed(self) -> bool:
        return self.num_bytes + self.num_flops > 0


def every_output(result: Any, args: Args) -> Tensors:  # noqa: ANN401
    """Return the result as a tuple of tensors."""
    return result if isinstance(result, tuple) else (result,)


def size_of_result(expected: Tensors, args: Args) -> Tensors:
    """Return the absolute values of the expected outputs, the default error scale."""
    return tuple(tensor.abs() for tensor in expected)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, its reference and cases, and the error that its outputs may have.

    An element may be off by ulps * eps(dtype of the output) * scale. `scale` is the size of the
    terms that the element is a sum of, which is its own size unless terms can cancel. Integer
    outputs must be equal.
    """

    name: str
    run: Callable[..., Any]  # the function that the layers call
    reference: Callable[..., Any]
    cases: tuple[Case, ...]
    ulps_16: float = 0.0  # for 16-bit outputs
    ulps_32: float = 0.0
    ulps_8: float = 0.0
    scale: Callable[[Tensors, Args], Tensors] = size_of_result
    outputs: Callable[[Any, Args], Tensors] = every_output  # result and in-place arguments


def check(kernel: Kernel, case: Case, device: torch.device, slack: float = 1.0) -> float:
    """Return the worst error divided by the allowed error. Up to 1 passes; NaN counts as infinite.

    `slack` multiplies the allowed error. Triton's interpreter truncates to bfloat16, and a GPU
    rounds to nearest. So in the interpreter a rounding may be off by a whole ulp instead of half.
    """
    # Made once, since some cases run a kernel for them. A kernel may overwrite its arguments.
    inputs = case.inputs(device)
    args, reference_args = deepcopy(inputs), deepcopy(inputs)
    with poisoned_memory():
        actual = kernel.outputs(kernel.run(*args), args)
    expected = kernel.outputs(kernel.reference(*reference_args), reference_args)
    scales = kernel.scale(expected, inputs)
    shares = (worst_share(kernel, *three) for three in zip(actual, expected, scales, strict=True))
    return max(shares) / slack


def worst_share(kernel: Kernel, actual: Tensor, expected: Tensor, scale: Tensor) -> float:
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if not actual.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else float("inf")
    limits = torch.finfo(actual.dtype)
    actual, expected = actual.double(), expected.double()
    if actual.isnan().any() or expected.isnan().any():
        return float("inf")
    ulps = {8: kernel.ulps_8, 16: kernel.ulps_16}.get(limits.bits, kernel.ulps_32)
    allowed = ulps * limits.eps * scale.double() + limits.tiny
    return float(((actual - expected).abs() / allowed).max())


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill new tensors with NaN, so that the check finds elements that are never written."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # does not import torch's compiler, for 2 s
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def normal(device: torch.device, *shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(dtype)


def bits(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "bfloat16", for names of cases."""
    return str(dtype).removeprefix("torch.")
