"""Operations of kernels in the faster interpreter (interpreter.py) equal those of torch.

Each runs twice, since only the second use of an operator with two types takes the short way.
"""

from __future__ import annotations

import operator

import pytest
import torch
import triton
import triton.language as tl
from nanovllm_kernels.interpreter import Conversions, Operators, patch_once
from torch import Tensor
from triton.runtime import interpreter

from tests.interpreted import in_interpreter, in_parent, passes

N, M = 8, 4
INTEGERS = [torch.int32, torch.int64, torch.uint32]
FLOATS = [torch.float32, torch.int32]  # with float32 on the other side

OPERATIONS = {  # only the interpreter can look them up in a kernel
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "<<": operator.lshift,
    ">>": operator.rshift,
    "where": lambda x, y: tl.where(x < y, x, y),
}


@triton.jit
def operate_kernel(x_N, y_M, out_NM, number: tl.constexpr, OP: tl.constexpr, FIRST: tl.constexpr):
    """Store x op y for each pair, then x op number. The number is on the left if it is FIRST."""
    n, m = tl.arange(0, 8), tl.arange(0, 4)
    places = n[:, None] * 4 + m[None, :]
    for _ in tl.static_range(2):
        x, y = tl.load(x_N + n)[:, None], tl.load(y_M + m)[None, :]
        tl.store(out_NM + places, OPERATIONS[OP](x, y))
        single = OPERATIONS[OP](number, x) if FIRST else OPERATIONS[OP](x, number)
        tl.store(out_NM + 32 + places, tl.broadcast_to(single, (8, 4)))


def quotient(x: Tensor, y: Tensor) -> Tensor:
    return torch.div(x, y, rounding_mode="trunc")


EXPECTED = {
    "+": lambda x, y: (x + y, x + 3),
    "-": lambda x, y: (x - y, x - 3),
    "3 -": lambda x, y: (x - y, 3 - x),
    "*": lambda x, y: (x * y, x * 3),
    "/": lambda x, y: (x / y, x / 3),
    "//": lambda x, y: (quotient(x, y), quotient(x, torch.full_like(x, 3))),
    "%": lambda x, y: (torch.fmod(x, y), torch.fmod(x, torch.full_like(x, 3))),
    "3 where": lambda x, y: (torch.minimum(x, y), torch.where(x > 3, 3, x)),
    "<": lambda x, y: (x < y, x < 3),
    "<=": lambda x, y: (x <= y, x <= 3),
    ">": lambda x, y: (x > y, x > 3),
    ">=": lambda x, y: (x >= y, x >= 3),
    "==": lambda x, y: (x == y, x == 3),
    "!=": lambda x, y: (x != y, x != 3),
    "&": lambda x, y: (x & y, x & 3),
    "|": lambda x, y: (x | y, x | 3),
    "^": lambda x, y: (x ^ y, x ^ 3),
    "<<": lambda x, y: (x << y, x << 3),
    ">>": lambda x, y: (x >> y, x >> 3),
    "where": lambda x, y: (torch.minimum(x, y), torch.where(x < 3, x, 3)),
}
OF_INTEGERS = {"//", "%", "&", "|", "^", "<<", ">>"}


def operands(dtype: torch.dtype, positive: bool) -> tuple[Tensor, Tensor]:
    x_N = torch.tensor([7, 3, 1, 2, 100, 5, 6, 31])
    if not positive:
        x_N[::2] *= -1
    return x_N.to(dtype), torch.tensor([3, 1, 7, 2]).to(dtype)


CASES = [
    (name, *dtypes)
    for name in EXPECTED
    for dtypes in [
        *[(one, one) for one in INTEGERS if name != "/"],
        *[(torch.int32, torch.int64)] * (name != "/"),
        *([(torch.float32, one) for one in FLOATS] if name not in OF_INTEGERS else []),
        *([(torch.int32, torch.float32)] if name not in OF_INTEGERS else []),
    ]
]


@in_interpreter
@pytest.mark.parametrize(("name", "left", "right"), CASES, ids=str)
def test_operators(name: str, left: torch.dtype, right: torch.dtype) -> None:
    x_N, y_M = operands(left, left == torch.uint32)[0], operands(right, True)[1]
    number = 3.0 if torch.float32 in (left, right) and name != "*" else 3
    wide = torch.promote_types(left, right) if left != torch.uint32 else torch.int64
    x_NM, y_NM = (part.to(wide).expand(N, M) for part in (x_N[:, None], y_M))
    pairs, single = EXPECTED[name](x_NM, y_NM)
    out_NM = torch.zeros(2 * N, M, dtype=left if pairs.dtype != torch.bool else torch.int32)
    if left != right:
        out_NM = out_NM.to(wide)
    operate_kernel[(1,)](x_N, y_M, out_NM, number, name.split()[-1], name.startswith("3"))
    modulus = 2**32 if left == torch.uint32 else 2**63
    expected = torch.cat((pairs, single)).double() % modulus
    assert torch.equal(out_NM.double() % modulus, expected), (out_NM, expected)


@triton.jit
def move_kernel(x_N, out_N, steps_2, one, start: tl.constexpr):
    """Copy elements from places that all kinds of offsets lead to."""
    n = tl.arange(0, 4)
    for _ in tl.static_range(2):
        step = tl.load(steps_2 + 1)
        x = x_N + start + n + step
        tl.store(out_N + n.to(tl.int64), tl.load(x - 1 + one + (-1)))
        tl.store(out_N + 4 + n, tl.load(x, mask=(n < 2) & (step == 2), other=-1.0))


@in_interpreter
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_pointers_move_by_elements(dtype: torch.dtype) -> None:
    x_N, out_N = torch.arange(12).to(dtype), torch.zeros(8, dtype=dtype)
    move_kernel[(1,)](x_N, out_N, torch.tensor([0, 2]), 1, 3)
    assert out_N.tolist() == [4, 5, 6, 7, 5, 6, -1, -1]


@triton.jit
def convert_kernel(x_N, wide_N, narrow_N, N: tl.constexpr):
    n = tl.arange(0, N)
    wide = tl.load(x_N + n).to(tl.float32)
    tl.store(wide_N + n, wide)
    tl.store(narrow_N + n, wide.to(tl.bfloat16))


@in_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_value_of_a_narrow_type_is_converted_exactly(dtype: torch.dtype) -> None:
    bits, kind = (16, torch.int16) if dtype == torch.bfloat16 else (8, torch.int8)
    x_N = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)).to(kind).view(dtype)
    x_N = torch.where(x_N.float().isfinite(), x_N.float(), 0.0).to(dtype)
    wide_N, narrow_N = torch.empty(2**bits), torch.empty(2**bits, dtype=torch.bfloat16)
    convert_kernel[(1,)](x_N, wide_N, narrow_N, 2**bits)
    assert torch.equal(wide_N, x_N.float())
    assert torch.equal(narrow_N.float(), x_N.float())


@in_interpreter
def test_float32_is_truncated_to_bfloat16() -> None:
    x_N = torch.tensor([1 + 2**-8 + 2**-9, -3.999, torch.inf, 1e-39])
    wide_N, narrow_N = torch.empty(4), torch.empty(4, dtype=torch.bfloat16)
    convert_kernel[(1,)](x_N, wide_N, narrow_N, 4)
    bits_N = x_N.view(torch.int32) >> 16 << 16
    assert torch.equal(narrow_N.float().view(torch.int32), bits_N)


@in_interpreter
def test_the_interpreter_is_replaced_once() -> None:
    replaced = interpreter._patch_attr, interpreter._convert_float
    assert [type(one) for one in replaced] == [Operators, Conversions]
    patch_once()
    assert (interpreter._patch_attr, interpreter._convert_float) == replaced


@in_parent
def test_in_the_interpreter() -> None:
    passes(__file__, len(CASES) + 9)
