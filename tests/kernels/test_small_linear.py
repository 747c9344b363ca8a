"""Products for steps of a few rows: which steps take them, and every shape of program.

The kernel runs in Triton's interpreter, in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
import triton
from nanovllm_kernels import reference, small_linear
from nanovllm_kernels.case import Case, check
from nanovllm_kernels.small_linear import Shape, SmallLinear
from torch import Tensor

from nanovllm.layers.ops import Ops
from nanovllm.layers.residual import Added, Pending, Residual

CPU = torch.device("cpu")
INTERPRETED = triton.knobs.runtime.interpret
INTERPRETER_ROUNDS = 2.0  # it truncates to bfloat16, which errs twice as much as rounding
SHAPES = [Shape(8, 4, 16, 3, 0), Shape(16, 2, 32, 2, 0), Shape(32, 1, 64, 1, 0)]
KERNELS = (small_linear.LINEAR, small_linear.NORM_LINEAR, small_linear.NORM_GATE_UP)
ONE_BY_ONE = Ops(
    reference.rms_norm, reference.add_rms_norm, reference.silu_mul, reference.rope_store
)


class Recorder:
    """Stands where the kernel would; fits two rows, and one where there is a norm."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def fits(self, num_rows, weight, *, normed=False):
        return num_rows <= (1 if normed else 2)

    def linear(self, x, weight):
        self.calls.append("linear")
        return x @ weight.T

    def norm_linear(self, x, residual, gain, eps, weight, *, gated=False):
        self.calls.append("norm_linear gated" if gated else "norm_linear")
        stream = Added(x) if residual is None else Pending(residual, x)
        y, added = normed(ONE_BY_ONE, stream, gain, weight, gated=gated)
        return y, added.stream_TD


def normed(ops: Ops, residual: Residual, gain, weight, *, gated=False) -> tuple[Tensor, Added]:
    table = ops.normed(weight, gated=gated, is_added=isinstance(residual, Added))
    return table[len(residual.stream_TD)].run(residual, gain, 0.1, weight)


def numbers(num_rows: int) -> tuple[torch.Tensor, ...]:
    """x, residual, gain, weight."""
    torch.manual_seed(num_rows)
    shapes = (num_rows, 8), (num_rows, 8), (8,), (6, 8)
    return tuple(torch.randn(shape) for shape in shapes)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("begun", [False, True], ids=["first", "later"])
def test_one_by_one_is_norm_then_product_then_gate(begun, gated) -> None:
    x, residual, gain, weight = numbers(3)
    total = x + residual if begun else x
    scaled = total / (total.square().mean(1, keepdim=True) + 0.1).sqrt() * gain
    expected = scaled @ weight.T
    if gated:
        gate, up = expected.chunk(2, 1)
        expected = gate * torch.sigmoid(gate) * up
    before = Pending(residual.clone(), x.clone()) if begun else Added(x.clone())
    y, after = normed(ONE_BY_ONE, before, gain, weight, gated=gated)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(after.stream_TD, total)


@pytest.mark.parametrize(
    ("num_rows", "calls"),
    [(1, ["norm_linear gated", "norm_linear", "linear"]), (2, ["linear"] * 3), (3, [])],
)
def test_the_number_of_rows_chooses_and_nothing_else_changes(num_rows, calls) -> None:
    recorder = Recorder()
    ops = replace(ONE_BY_ONE, small_linear=recorder)
    x, residual, gain, weight = numbers(num_rows)
    for each in (ops, ONE_BY_ONE):
        before = Pending(residual.clone(), x.clone())
        gated, added = normed(each, before, gain, weight, gated=True)
        plain, _ = normed(each, added, gain, weight)
        last = each.plain(weight)[num_rows].run(x, weight)
        if each is ops:
            ours = gated, plain, last
    assert recorder.calls == calls
    assert all(map(torch.equal, ours, (gated, plain, last)))


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "plain", "normed"),
    [
        (1, 4096, torch.bfloat16, True, True),
        (2, 4096, torch.bfloat16, True, False),  # every program would normalise all of it
        (4, 1024, torch.float16, True, True),
        (16, 1024, torch.bfloat16, True, False),
        (17, 64, torch.bfloat16, False, False),
        (1, 1000, torch.bfloat16, False, False),
        (1, 1024, torch.float32, False, False),
    ],
)
def test_what_fits(rows, width, dtype, plain, normed) -> None:
    weight = torch.empty(8, width, dtype=dtype)
    assert SmallLinear().fits(rows, weight) is plain
    assert SmallLinear().fits(rows, weight, normed=True) is normed


def test_shapes_of_programs_in_the_interpreter() -> None:
    command = ["env", "CUDA_VISIBLE_DEVICES=", "TRITON_INTERPRET=1", sys.executable, "-m", "pytest"]
    command += ["-p", "no:cacheprovider", "-k", "shape_of_program", __file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "9 passed" in done.stdout


# Each of the two is for one process: the interpreter's runs the kernel, the other starts it.
test_shapes_of_programs_in_the_interpreter.__test__ = not INTERPRETED


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_shape_of_program(kernel, shape) -> None:
    """No result depends on how the work is cut."""
    product = SmallLinear(shape=shape)
    inputs = small_linear.norm_inputs
    run = partial(product.norm_linear, gated=kernel is small_linear.NORM_GATE_UP)
    if kernel is small_linear.LINEAR:
        inputs, run = small_linear.linear_inputs, product.linear
    case = Case("odd", partial(inputs, 5, 52, 144))
    assert check(replace(kernel, run=run), case, CPU, INTERPRETER_ROUNDS) <= 1


test_shape_of_program.__test__ = INTERPRETED


def test_many_results_are_the_library_s() -> None:
    x = torch.empty(5, 1024, dtype=torch.bfloat16)
    assert SmallLinear().fits(len(x), torch.empty(6553, 1024, dtype=torch.bfloat16))
    assert not SmallLinear().fits(len(x), torch.empty(6554, 1024, dtype=torch.bfloat16))
    assert SmallLinear().fits(4, torch.empty(6554, 1024, dtype=torch.bfloat16))
