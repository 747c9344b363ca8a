"""All-reduce of prefill-sized messages, with the residual addition and the norm in the same kernel.

The references are those of all_reduce.py, and so are the results: sums in float32, in the order of
ranks, rounded once, with the same bits on all ranks. There the latency of a launch counts, here the
bytes on the links: 2 (N - 1) / N of a message for N ranks, the least that an all-reduce needs.

Each rank owns an equal share of a message's rows. A program

1. sends its rows of the message to their owners,
2. sums the rows that this rank owns, adds the residual, and sends the results to all ranks,
3. stores the results that other owners sent, and their norms.

Before steps 2 and 3 it waits for the same program of all ranks, which has stored all that it reads
next. So the programs of a launch need not run at once, as long as all GPUs start them in the same
order. No program waits for another one of its own rank. Launches may have different numbers of
programs, the same on all ranks; each program counts its own calls.

Decision: flags, and not data as its own flag as in all_reduce.py. A flag costs a trip over the link
for each program and step, 2 us of some hundred, but nothing is emptied after it was read.

Memory is used again without a further wait. A rank sends its share of call E + 1 to an owner that
has sent sums of call E, so it has read its shares. It sends sums of call E + 1 to a rank whose
program has begun call E + 1, so it has read the sums of call E. Kernels of one rank must not
overlap, so all calls use one stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.exchange.regions import region, store_sum

PROGRAMS = 1056  # eight for each multiprocessor of a Hopper GPU
MAX_WIDTH = 16384  # elements of a row, which must fit in a program's registers
ALIGNED = 128  # bytes
STEPS = 2  # that wait for other ranks
NUM_WARPS = 4


@dataclass(frozen=True, slots=True)
class Landings:
    """Memory of all ranks in which long messages land: shares, sums, and flags."""

    rank: int
    size: int
    share_bytes: int  # of one rank's share of the longest message, a multiple of ALIGNED
    addresses_I: Tensor  # int64: address of each rank's memory, mapped in this rank
    calls_P: Tensor  # int32: number of calls so far of each of the P programs of a launch

    def rows_at_once(self, row_bytes: int) -> int:
        """Return the number of rows that one launch sums."""
        return self.size * (self.share_bytes // row_bytes)


def landing_bytes(size: int, share_bytes: int, programs: int = PROGRAMS) -> int:
    """Return the size of a rank's memory, which must be all 0 before any rank's first call."""
    return 2 * size * share_bytes + 4 * STEPS * programs * size


def long_sum(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    norm_weight_D: Tensor | None,
    y_TD: Tensor,
    eps: float,
    landings: Landings,
) -> None:
    """Sum x_TD over ranks, in launches of as many rows as fit.

    With a residual stream, add the sum to it in place. With the weight of a norm, y_TD is the norm
    of that stream. With neither, y_TD is the sum. It may be x_TD.
    """
    assert x_TD.is_contiguous() and y_TD.is_contiguous(), x_TD.stride()
    assert residual_TD is None or residual_TD.is_contiguous()
    width = x_TD.shape[1]
    at_once = landings.rows_at_once(width * x_TD.element_size())
    assert width <= MAX_WIDTH and at_once, (width, landings.share_bytes)
    at_once = triton.cdiv(len(x_TD), triton.cdiv(len(x_TD), at_once))
    for start in range(0, len(x_TD), at_once):
        rows = slice(start, start + at_once)
        x = x_TD[rows]
        programs = min(len(landings.calls_P), triton.cdiv(len(x), landings.size))
        long_sum_kernel[(programs,)](
            x, None if residual_TD is None else residual_TD[rows], norm_weight_D, y_TD[rows],
            landings.addresses_I, landings.calls_P, landings.rank,
            landings.share_bytes, len(x), eps,
            SIZE=landings.size, WIDTH=width, BLOCK=triton.next_power_of_2(width), STEPS=STEPS,
            num_warps=NUM_WARPS,
        )  # fmt: skip


@triton.jit
def flag(address, source, step, share_bytes, like, SIZE: tl.constexpr, STEPS: tl.constexpr):
    """Return the place of the last call in which rank `source` has sent what a step reads."""
    first = region(address, tl.full((), 2 * SIZE, tl.int32), share_bytes, like)
    return first + (tl.program_id(0) * STEPS + step) * SIZE + source


@triton.jit
def meet(
    addresses_I, calls_P, rank, call, share_bytes,
    STEP: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Wait until this program of all ranks has stored what the step reads."""
    tl.debug_barrier()  # the stores of all threads come before the flag
    own = tl.load(addresses_I + rank)
    for nth in tl.static_range(1, SIZE):
        peer = tl.load(addresses_I + (rank + nth) % SIZE)
        at = flag(peer, rank, STEP, share_bytes, calls_P, SIZE, STEPS)
        tl.atomic_xchg(at, call, sem="release", scope="sys")
    for nth in tl.static_range(1, SIZE):
        at = flag(own, (rank + nth) % SIZE, STEP, share_bytes, calls_P, SIZE, STEPS)
        is_early = 1
        while is_early != 0:  # the difference is right also after 2**31 calls
            last = tl.atomic_add(at, 0, sem="acquire", scope="sys")
            is_early = (last - call < 0).to(tl.int32)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["rank", "num_rows"])
def long_sum_kernel(
    x_TD,
    residual_TD,
    norm_weight_D,
    y_TD,
    addresses_I,
    calls_P,
    rank,
    share_bytes,
    num_rows,
    eps,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    pid, num = tl.program_id(0), tl.num_programs(0)
    d = tl.arange(0, BLOCK)
    inside = d < WIDTH
    each = tl.cdiv(num_rows, SIZE)
    own = tl.load(addresses_I + rank)
    call = tl.load(calls_P + pid) + 1
    norm_weight = 0.0
    HAS_NORM: tl.constexpr = norm_weight_D is not None
    if HAS_NORM:
        norm_weight = tl.load(norm_weight_D + d, inside, 0.0)

    for nth in tl.static_range(1, SIZE):
        owner = (rank + nth) % SIZE
        place = region(tl.load(addresses_I + owner), rank, share_bytes, x_TD)
        for n in range(pid, tl.minimum(each, num_rows - owner * each), num):
            x = tl.load(x_TD + (owner * each + n).to(tl.int64) * WIDTH + d, inside)
            tl.store(place + n * WIDTH + d, x, inside)
    meet(addresses_I, calls_P, rank, call, share_bytes, 0, SIZE, STEPS)

    for n in range(pid, tl.minimum(each, num_rows - rank * each), num):
        at = (rank * each + n).to(tl.int64) * WIDTH + d
        total = tl.zeros((BLOCK,), tl.float32)
        for source in tl.static_range(SIZE):
            if source == rank:
                part = tl.load(x_TD + at, inside, 0.0)
            else:
                place = region(own, tl.full((), source, tl.int32), share_bytes, x_TD)
                part = tl.load(place + n * WIDTH + d, inside, 0.0, cache_modifier=".cg")
            total += part.to(tl.float32)
        if residual_TD is not None:
            total += tl.load(residual_TD + at, inside, 0.0).to(tl.float32)
        whole = total.to(y_TD.dtype.element_ty)
        for nth in tl.static_range(1, SIZE):
            peer = tl.load(addresses_I + (rank + nth) % SIZE)
            place = region(peer, SIZE + rank, share_bytes, y_TD)
            tl.store(place + n * WIDTH + d, whole, inside)
        store_sum(whole, residual_TD, norm_weight, y_TD, at, inside, eps, HAS_NORM, WIDTH)
    meet(addresses_I, calls_P, rank, call, share_bytes, 1, SIZE, STEPS)

    for nth in tl.static_range(1, SIZE):
        owner = (rank + nth) % SIZE
        place = region(own, SIZE + owner, share_bytes, y_TD)
        for n in range(pid, tl.minimum(each, num_rows - owner * each), num):
            at = (owner * each + n).to(tl.int64) * WIDTH + d
            whole = tl.load(place + n * WIDTH + d, inside, 0.0, cache_modifier=".cg")
            store_sum(whole, residual_TD, norm_weight, y_TD, at, inside, eps, HAS_NORM, WIDTH)
    tl.store(calls_P + pid, call)
