"""Conversion of float8_e4m3fn keys and values to float16 in registers, for paged_decode_cute.

Decision: the caches pass through shared memory as 16-bit units, each with two neighbouring elements
of a token. The copy code is thus independent of 8-bit types. A tensor core's product may take its
summed elements in any order, and its columns in any order. Therefore a register of four elements
becomes two registers of two in place, and no element changes threads. A step of 16 over a key takes
elements 4j..4j+3 in place of 2j, 2j+1, 2j+8, 2j+9. Queries use the same order. For values, two
tiles of 8 columns take the even and the odd elements of 16.

Decision: float16, because a GPU converts e4m3 to it in one instruction, exactly. bfloat16 takes
four instructions.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float16, Float32, Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute import arch
from cutlass.cutlass_dsl import T, dsl_user_op

LARGEST = 65504.0  # largest float16
LIFT = 14.0  # weights of at most 1 are scaled by 2**14; otherwise those below 2**-24 would be 0
# Convert bytes 0, 1 and bytes 2, 3 of $2; with the permutation, bytes 0, 2 and bytes 1, 3.
WIDEN = """{{
    .reg .b32 four;
    .reg .b16 low, high;
    prmt.b32 four, $2, 0, {order};
    mov.b32 {{low, high}}, four;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}}"""
NEIGHBOURS, TOKENS = "0x3210", "0x3120"


@dsl_user_op
def widened(four: Int32, order: str, *, loc: Any = None, ip: Any = None) -> tuple[Int32, Int32]:  # noqa: ANN401
    """Convert four e4m3 numbers to two pairs of float16, in the given byte order."""
    i32 = T.i32()
    pairs = llvm.inline_asm(
        llvm.StructType.get_literal([i32, i32]),
        [Int32(four).ir_value(loc=loc, ip=ip)],
        WIDEN.format(order=order),
        "=r,=r,r",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    low, high = (llvm.extractvalue(i32, pairs, [n], loc=loc, ip=ip) for n in range(2))
    return Int32(low), Int32(high)


def widen_keys(k_8: cute.Tensor, k_in: cute.Tensor) -> None:
    """Convert keys [.., tokens / 8, elements / 32] to the steps of 16 elements used by `load_q`."""
    fours, pairs = cute.recast_tensor(k_8, Int32), cute.recast_tensor(k_in, Int32)
    for step in range(cute.size(pairs, mode=[2])):
        for n in range(cute.size(pairs, mode=[1])):
            words = widened(fours[(0, step % 2), n, step // 2], NEIGHBOURS)
            pairs[(0, 0), n, step], pairs[(0, 1), n, step] = words


def widen_values(v_8: cute.Tensor, v_in: cute.Tensor) -> None:
    """Convert values [.., elements / 16, 1] to alternating tiles of even and odd elements.

    `element_of` gives the order.
    """
    fours, pairs = cute.recast_tensor(v_8, Int32), cute.recast_tensor(v_in, Int32)
    for n in range(cute.size(fours, mode=[1])):
        for half in range(2):
            even, odd = widened(fours[(0, half), n, 0], TOKENS)
            pairs[(0, half), 2 * n, 0], pairs[(0, half), 2 * n + 1, 0] = even, odd


def element_of(tile: int, column: Int32) -> Int32:
    """Return the element of a head that a column of a tile of values holds."""
    return tile // 2 * 16 + 2 * column + tile % 2


def load_q(q: cute.Tensor, q_in: cute.Tensor, rows: int, scale: Float32) -> None:
    """Load this thread's queries [pair, element], scaled, in the order of widen_keys.

    `scale` is that of keys. The thread has up to two pairs, 8 apart; `rows` is their number.
    """
    thread = arch.lane_idx()
    q_in.fill(0.0)
    for step in range(cute.size(q_in, mode=[2])):
        for r in range(rows):
            line = q[thread // 4 + 8 * r, None]
            four = cute.local_tile(line, (4,), (step * 4 + thread % 4,)).load().to(Float32)
            for n in range(4):
                x = arch.fmin(arch.fmax(four[n] * scale, -LARGEST), LARGEST)
                q_in[(n % 2, r, n // 2), 0, step] = x.to(Float16)
