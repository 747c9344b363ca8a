"""Keys and values of float8_e4m3fn as float16 in registers, for paged_decode_cute.

Decision: the caches go through shared memory as units of 16 bits, which hold two neighbouring
elements of a token each, so what copies them knows nothing of 8 bits. A tensor core's product may
take the elements that it sums over in any order, and its columns in any order: so each register of
four elements becomes two of two where it lies, and no element changes threads. Of keys a step
of 16 takes elements 4j..4j+3 where it would have 2j, 2j+1, 2j+8, 2j+9, and of queries the same; of
values two tiles of 8 columns take the even and the odd elements of 16.

Decision: float16, because a GPU gets it from e4m3 in one instruction, exactly; bfloat16 takes four.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float16, Float32, Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute import arch
from cutlass.cutlass_dsl import T, dsl_user_op

LARGEST = 65504.0  # of float16
LIFT = 14.0  # weights, of at most 1, are times 2**14: else those below 2**-24 would be none
# Bytes 0, 1 and bytes 2, 3 of $2; with the permutation bytes 0, 2 and bytes 1, 3.
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
    """Four numbers of e4m3 as two pairs of float16, in that order."""
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
    """Keys [.., tokens / 8, elements / 32] as the steps of 16 elements that `load_q` goes with."""
    fours, pairs = cute.recast_tensor(k_8, Int32), cute.recast_tensor(k_in, Int32)
    for step in range(cute.size(pairs, mode=[2])):
        for n in range(cute.size(pairs, mode=[1])):
            found = widened(fours[(0, step % 2), n, step // 2], NEIGHBOURS)
            pairs[(0, 0), n, step], pairs[(0, 1), n, step] = found


def widen_values(v_8: cute.Tensor, v_in: cute.Tensor) -> None:
    """Values [.., elements / 16, 1] as tiles of even and of odd elements in turn: element_of."""
    fours, pairs = cute.recast_tensor(v_8, Int32), cute.recast_tensor(v_in, Int32)
    for n in range(cute.size(fours, mode=[1])):
        for half in range(2):
            even, odd = widened(fours[(0, half), n, 0], TOKENS)
            pairs[(0, half), 2 * n, 0], pairs[(0, half), 2 * n + 1, 0] = even, odd


def element_of(tile: int, column: Int32) -> Int32:
    """Which element of a head a column of a tile of values is."""
    return tile // 2 * 16 + 2 * column + tile % 2


def load_q(q: cute.Tensor, q_in: cute.Tensor, rows: int, scale: Float32) -> None:
    """Queries [pair, element] of this thread times the keys' scale, for the steps of widen_keys.

    `rows`: of this thread's two pairs, 8 apart, how many there are.
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
