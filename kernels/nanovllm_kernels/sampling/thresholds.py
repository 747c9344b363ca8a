"""Lowest logit that top-k, top-p and min-p keep, in Triton, by bracketing without a sort.

The reference is reference.py. A threshold is independent of the number of rows, so a row's token
does not depend on its neighbours.

Decision: two passes over the logits, by many programs per row, each narrow a bracket to an eighth.
A third pass copies the logits in the bracket, and one program per row bisects among these. If there
are more logits than the copy has room for, it bisects over the whole row.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.case import Args, Case, Kernel, Tensors, bits
from nanovllm_kernels.sampling import reference
from nanovllm_kernels.sampling.draw import BLOCK, load, rows

LOWEST = tl.constexpr(reference.LOWEST)
PIVOTS = tl.constexpr(8)  # values at which a pass sums the mass of logits
CANDIDATES = tl.constexpr(16384)  # most logits of a row's last bracket that are copied
TILE = tl.constexpr(2048)  # logits that the bisection reads at once
LOG2_E = tl.constexpr(math.log2(math.e))
LANES = tl.constexpr(128)  # threads of a program
UNIT = tl.constexpr(2.0**44)  # integer weight of 1, so that a sum of 2**18 fits in 63 bits
PASSES = 2
PROGRAMS = 8192  # approximate programs of a pass; more would not run at once on any GPU


def thresholds(
    logits_SV: Tensor,
    slots_S: Tensor,
    inverse_temperatures_N: Tensor,
    top_ks_N: Tensor,
    top_ps_N: Tensor,
    min_p_gaps_N: Tensor,
) -> Tensor:
    """Return thresholds_S, float32, as reference.thresholds describes."""
    assert logits_SV.stride(1) == 1
    num_rows, vocab = logits_SV.shape
    num_blocks, device = triton.cdiv(vocab, reference.BLOCK), logits_SV.device
    columns = inverse_temperatures_N, top_ks_N, top_ps_N, min_p_gaps_N
    strides = (column.stride(0) for column in columns)
    floats = partial(torch.empty, dtype=torch.float32, device=device)
    settings_S4, tops_SB = floats(num_rows, 4), floats(num_rows, num_blocks)
    smallest_SB = torch.empty_like(tops_SB)
    counts_S = torch.empty(num_rows, dtype=torch.int32, device=device)
    candidates_SC = logits_SV.new_empty(num_rows, CANDIDATES.value)
    blocks_each = triton.cdiv(num_blocks * num_rows, PROGRAMS)
    grid = triton.cdiv(num_blocks, blocks_each), num_rows
    shape = vocab, num_blocks, blocks_each, logits_SV.stride(0)
    blocks = triton.next_power_of_2(num_blocks)
    tops_kernel[grid](
        logits_SV, slots_S, *columns, settings_S4, tops_SB, smallest_SB, counts_S, *shape, *strides
    )
    common, candidates = (logits_SV, settings_S4, tops_SB), (candidates_SC, counts_S)
    now = None, None
    for _ in range(PASSES):
        before, now = now, (floats(num_rows, 8), floats(num_rows, num_blocks, PIVOTS.value))
        buffers = smallest_SB, *before, *now
        narrow_kernel[grid](*common, *buffers, *shape, BLOCKS=blocks, num_warps=2)
    last_S8, thresholds_S = floats(num_rows, 8), floats(num_rows)
    collect_kernel[grid](*common, *now, last_S8, *candidates, *shape, BLOCKS=blocks)
    finish_kernel[(num_rows,)](
        *common, last_S8, *candidates, thresholds_S, *shape, BLOCKS=blocks, num_warps=8
    )
    return thresholds_S


@triton.jit(do_not_specialize=["blocks_each"], do_not_specialize_on_alignment=["slots_S"])
def tops_kernel(
    logits_SV, slots_S, inverses_N, top_ks_N, top_ps_N, min_p_gaps_N, settings_S4, tops_SB,
    smallest_SB, counts_S, vocab, num_blocks, blocks_each, logits_stride, inverses_stride,
    top_ks_stride, top_ps_stride, min_p_gaps_stride,
):  # fmt: skip
    """Store each row's settings, and the largest and smallest finite logit of its blocks.

    top_k is stored as 0 and top_p as 1 if they are off.
    """
    start, row = tl.program_id(0) * blocks_each, tl.program_id(1)
    slot = tl.load(slots_S + row)
    top_k = tl.load(top_ks_N + slot * top_ks_stride)
    top_k = tl.where((top_k > 0) & (top_k < vocab), top_k, 0)
    top_p = tl.minimum(tl.load(top_ps_N + slot * top_ps_stride), 1.0)
    gap = tl.load(min_p_gaps_N + slot * min_p_gaps_stride)
    if start == 0:
        tl.store(settings_S4 + row * 4, tl.load(inverses_N + slot * inverses_stride))
        tl.store(settings_S4 + row * 4 + 1, top_k.to(tl.float32))
        tl.store(settings_S4 + row * 4 + 2, top_p)
        tl.store(settings_S4 + row * 4 + 3, gap)
        tl.store(counts_S + row, 0)
    if (top_k > 0) | (top_p < 1) | (gap > -float("inf")):
        for block in range(start, tl.minimum(start + blocks_each, num_blocks)):
            at = block * BLOCK + tl.arange(0, BLOCK)
            x = load(logits_SV + row.to(tl.int64) * logits_stride, at, vocab)
            finite = tl.where(x >= LOWEST, x, float("inf"))
            tl.store(tops_SB + row * num_blocks + block, tl.max(x, 0))
            tl.store(smallest_SB + row * num_blocks + block, tl.min(finite, 0))


@triton.jit(do_not_specialize=["blocks_each"])
def narrow_kernel(
    logits_SV, settings_S4, tops_SB, smallest_SB, before_S8, sums_before_SBX, bracket_S8, sums_SBX,
    vocab, num_blocks, blocks_each, logits_stride, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Store the bracket after the previous pass, and each block's mass from every pivot on."""
    start, row = tl.program_id(0) * blocks_each, tl.program_id(1)
    inverse, top_k, top_p, gap = _settings(settings_S4, row)
    if (top_k == 0) & (top_p >= 1):
        return
    if before_S8 is None:
        low, first, high, needed, top = _whole(
            tops_SB, smallest_SB, inverse, top_k, top_p, gap, row, start, vocab, num_blocks, BLOCKS
        )
        above = 0.0
    else:
        low, first, high, above, needed, top = _narrowed(
            before_S8, sums_before_SBX, top_p, row, num_blocks, BLOCKS
        )
    if start == 0:
        _store(bracket_S8, row, low, first, high, above, needed, top)
    if first >= high:
        return
    # At infinite temperature every logit weighs 1: the mass is a count.
    inverse = tl.where(top_k > 0, 0.0, inverse)
    pivots = _pivots(low, first, high)
    for block in range(start, tl.minimum(start + blocks_each, num_blocks)):
        sums = tl.zeros([PIVOTS], tl.float32)
        if tl.load(tops_SB + row * num_blocks + block) >= low:
            at = block * BLOCK + tl.arange(0, BLOCK)
            x = load(logits_SV + row.to(tl.int64) * logits_stride, at[None, :], vocab)
            is_above = (x >= pivots[:, None]).to(tl.float32)
            sums = tl.sum(_weights(x, top, inverse) * is_above, 1)
        sums_at = sums_SBX + (row * num_blocks + block) * PIVOTS
        tl.store(sums_at + tl.arange(0, PIVOTS), sums)


@triton.jit(do_not_specialize=["blocks_each"])
def collect_kernel(
    logits_SV, settings_S4, tops_SB, before_S8, sums_before_SBX, bracket_S8, candidates_SC,
    counts_S, vocab, num_blocks, blocks_each, logits_stride, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Store the last bracket and its logits, in any order and only up to CANDIDATES.

    With both top_k and top_p the bracket has no upper end, so it has all logits that top_k keeps.
    """
    start, row = tl.program_id(0) * blocks_each, tl.program_id(1)
    _, top_k, top_p, _ = _settings(settings_S4, row)
    if (top_k == 0) & (top_p >= 1):
        return
    low, first, high, above, needed, top = _narrowed(
        before_S8, sums_before_SBX, top_p, row, num_blocks, BLOCKS
    )
    if (top_k > 0) & (top_p < 1):
        high, above = _value(_key(top) + 1), 0.0
    if start == 0:
        _store(bracket_S8, row, low, first, high, above, needed, top)
    for block in range(start, tl.minimum(start + blocks_each, num_blocks)):
        if tl.load(tops_SB + row * num_blocks + block) >= low:
            # Decision: with wider loads a thread would have adjacent logits, and the block would be
            # exchanged between threads before the store.
            at = tl.max_contiguous(block * BLOCK + tl.arange(0, BLOCK), 1)
            x = load(logits_SV + row.to(tl.int64) * logits_stride, at, vocab)
            inside = (x >= low) & (x < high)
            ones = tl.reshape(inside.to(tl.int32), [BLOCK // LANES, LANES])
            counts = tl.sum(ones, 0)
            count = tl.sum(counts, 0)
            if count > 0:
                to = tl.atomic_add(counts_S + row, count, sem="relaxed")
                if to + count <= CANDIDATES:
                    to_C = candidates_SC + row.to(tl.int64) * CANDIDATES + to
                    ranks = (tl.cumsum(counts, 0) - counts)[None, :] + tl.cumsum(ones, 0) - 1
                    tl.store(to_C + tl.reshape(ranks, [BLOCK]), x, inside)


@triton.jit(do_not_specialize=["blocks_each"])
def finish_kernel(
    logits_SV, settings_S4, tops_SB, bracket_S8, candidates_SC, counts_S, thresholds_S, vocab,
    num_blocks, blocks_each, logits_stride, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Store the threshold found in the last bracket.

    Rows without top_k and top_p get the threshold of min-p, or LOWEST.
    """
    row = tl.program_id(0)
    inverse, top_k, top_p, gap = _settings(settings_S4, row)
    if (top_k == 0) & (top_p >= 1):
        threshold = tl.full([], LOWEST, tl.float32)
        if gap > -float("inf"):
            threshold = tl.maximum(
                threshold, tl.max(_tops(tops_SB, row, num_blocks, BLOCKS), 0) + gap
            )
        tl.store(thresholds_S + row, threshold)
        return
    low, _, high, above, needed, top = _bracket(bracket_S8, row)
    num = tl.load(counts_S + row)
    x_N = logits_SV + row.to(tl.int64) * logits_stride
    if num <= CANDIDATES:
        x_N = candidates_SC + row.to(tl.int64) * CANDIDATES
    else:
        num = vocab
    if top_k > 0:
        mass, smallest, _ = _mass(x_N, num, low, high, top, 0.0)
        if above + mass >= top_k:
            low = _search(x_N, num, smallest, high, top, above, top_k, 0.0)
    if top_p < 1:
        mass, smallest, _ = _mass(x_N, num, low, high, top, inverse)
        needed = tl.where(top_k > 0, top_p * mass, needed)
        low = tl.where(smallest < high, smallest, low)
        low = _search(x_N, num, low, high, top, above, needed, inverse)
    tl.store(thresholds_S + row, low)


@triton.jit
def _settings(settings_S4, row):
    """Load a row's inverse temperature, top_k, top_p and min-p gap."""
    at = settings_S4 + row * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def _bracket(bracket_S8, row):
    """Load the state of a search: low, first, high, above, needed and top.

    The boundary is >= low and < high, unless min-p alone keeps less than top_k. The logits >= high
    have the mass `above`, less than `needed`, which is -1 until it is computed. The lowest pivot
    after low is `first`, which is high if the bracket needs no narrowing. Weights are relative to
    that of `top`.
    """
    at = bracket_S8 + row * 8
    low, first, high = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    return low, first, high, tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)


@triton.jit
def _store(bracket_S8, row, low, first, high, above, needed, top):
    """Store the state of a search, as _bracket loads it."""
    at = bracket_S8 + row * 8
    tl.store(at, low)
    tl.store(at + 1, first)
    tl.store(at + 2, high)
    tl.store(at + 3, above)
    tl.store(at + 4, needed)
    tl.store(at + 5, top)


@triton.jit
def _tops(tops_SB, row, num_blocks, BLOCKS: tl.constexpr):
    """Load the largest logit of each of a row's blocks, and -inf after the last block."""
    block = tl.arange(0, BLOCKS)
    return tl.load(tops_SB + row * num_blocks + block, block < num_blocks, -float("inf"))


@triton.jit
def _whole(
    tops_SB, smallest_SB, inverse, top_k, top_p, gap, row, start, vocab, num_blocks,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return the initial bracket: low, first, high, needed, top.

    If first is high, only the row's first program, which stores the bracket, computes the final
    low.
    """
    block = tl.arange(0, BLOCKS)
    tops = _tops(tops_SB, row, num_blocks, BLOCKS)
    smallest_at = smallest_SB + row * num_blocks + block
    smallest = tl.min(tl.load(smallest_at, block < num_blocks, float("inf")), 0)
    top = tl.max(tops, 0)
    low = tl.maximum(top + gap, LOWEST)
    high = _value(_key(top) + 1)
    needed = tl.where(top_k > 0, top_k, -1.0)
    is_ranked = (top_k > 0) & (top_k <= tl.sum((tops > -float("inf")).to(tl.int32), 0))
    if is_ranked & (start == 0):
        # At least k logits, and few more, are no smaller than the k-th largest of the blocks' tops.
        ranked = tl.sort(tops, descending=True)
        low = tl.maximum(low, tl.sum(tl.where(block == top_k - 1, ranked, 0.0), 0))
    # A whole vocabulary of logits below top + reach has less mass than top_p excludes.
    reach = tl.log((1 - top_p) / vocab) / inverse
    first = tl.maximum(smallest, tl.where(top_k > 0, smallest, top + reach))
    first = tl.where(is_ranked, high, tl.minimum(tl.maximum(first, low), top))
    return low, first, high, needed, top


@triton.jit
def _pivots(low, first, high):
    """Return low, then values evenly spread from first to below high."""
    pivot = tl.arange(0, PIVOTS)
    share = (pivot - 1).to(tl.float32) / (PIVOTS - 1)
    return tl.where(pivot == 0, low, first * (1 - share) + high * share)


@triton.jit
def _narrowed(bracket_S8, sums_SBX, top_p, row, num_blocks, BLOCKS: tl.constexpr):
    """Return the bracket narrowed by the masses that the pass summed from its pivots on."""
    low, first, high, above, needed, top = _bracket(bracket_S8, row)
    if first < high:
        block, pivot = tl.arange(0, BLOCKS), tl.arange(0, PIVOTS)
        at = (row * num_blocks + block)[:, None] * PIVOTS + pivot[None, :]
        masses = tl.sum(tl.load(sums_SBX + at, (block < num_blocks)[:, None], 0.0), 0)
        total = tl.sum(tl.where(pivot == 0, masses, 0.0), 0)
        needed = tl.where(needed < 0, top_p * total, needed)
        pivots = _pivots(low, first, high)
        enough = (masses >= needed) & (masses > 0)
        low = tl.maximum(low, tl.max(tl.where(enough, pivots, low), 0))
        high = tl.minimum(high, tl.min(tl.where(enough, high, pivots), 0))
        above = tl.maximum(above, tl.max(tl.where(enough, above, masses), 0))
        first = low * (1 - 1 / PIVOTS) + high * (1 / PIVOTS)
    return low, first, high, above, needed, top


@triton.jit
def _search(x_N, num, low, high, top, above, needed, inverse):
    """Return the largest of low and the logits in (low, high) from which on the mass is >= needed.

    This bisects on the bits. After each round both ends move to values that occur. So for any dtype
    the number of rounds is about log2 of the number of distinct values in between.
    """
    below, beyond = _key(low), _key(high)
    while beyond - below > 1:
        middle = (below + beyond) >> 1
        mass, smallest, next_smaller = _mass(x_N, num, _value(middle), high, top, inverse)
        if above + mass >= needed:
            below = tl.maximum(middle, _key(smallest))
        else:
            beyond = tl.minimum(middle, _key(next_smaller) + 1)
    return _value(below)


@triton.jit
def _mass(x_N, num, threshold, high, top, inverse):
    """Return the mass of the logits >= threshold and < high, and the smallest of them.

    Also return the largest logit < threshold. The mass is the sum of exp((x - top) * inverse). It
    is summed as integers, so the result does not depend on the order.
    """
    sums = tl.zeros([TILE], tl.int64)
    smallest = tl.full([TILE], float("inf"), tl.float32)
    smaller = tl.full([TILE], -float("inf"), tl.float32)
    for start in range(0, num, TILE):
        # Loads of rows of any length cannot be wide, so adjacent logits go to adjacent threads.
        x = load(x_N, tl.max_contiguous(start + tl.arange(0, TILE), 1), num)
        inside = (x >= threshold) & (x < high)
        sums += (tl.where(inside, _weights(x, top, inverse), 0.0) * UNIT).to(tl.int64)
        smallest = tl.minimum(smallest, tl.where(inside, x, float("inf")))
        smaller = tl.maximum(smaller, tl.where(x < threshold, x, -float("inf")))
    return tl.sum(sums, 0).to(tl.float32) / UNIT, tl.min(smallest, 0), tl.max(smaller, 0)


@triton.jit
def _weights(x, top, inverse):
    """Return exp((x - top) * inverse), which is finite even for -inf at infinite temperature."""
    return tl.exp2((tl.maximum(x, LOWEST) - top) * (inverse * LOG2_E))


@triton.jit
def _key(x):
    """Return an int64 in the order of the float32 values. -0.0 and 0.0 have the same."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


def thresholds_inputs(
    S: int, V: int, dtype: torch.dtype, k: int, p: float, min_p_gap: float, device: torch.device
) -> Args:
    logits_SV, slots_S, inverses_N = rows(S, V, dtype, device)
    top_ks_N = torch.full_like(inverses_N, k, dtype=torch.int32)
    top_ps_N, gaps_N = torch.full_like(inverses_N, p), torch.full_like(inverses_N, min_p_gap)
    return logits_SV, slots_S, inverses_N, top_ks_N, top_ps_N, gaps_N


def thresholds_mixed_inputs(V: int, dtype: torch.dtype, device: torch.device) -> Args:
    """Return rows with no, one or several settings; in some, most logits tie or are -inf."""
    logits_SV, slots_S, inverses_N = rows(9, V, dtype, device)
    logits_SV[3:5] = logits_SV[3:5].round()
    logits_SV[5:, 7:-7] = OFF
    k, p, gap = [0, 1000, 0, 700, 0, 5, 0, 9, 12], [1.0, 1.0, 0.7, 0.95, 1e-6], [OFF] * 6
    p, gap = [*p, 1.0, 0.999999, 0.6, 1.0], [*gap, -2.0, OFF, -3.0]
    wishes = torch.tensor((k, p, gap), dtype=torch.float32, device=device)
    top_ks_N, top_ps_N, gaps_N = wishes.new_empty(3, len(inverses_N)).index_copy(1, slots_S, wishes)
    return logits_SV, slots_S, inverses_N, top_ks_N.int(), top_ps_N, gaps_N


def thresholds_room(expected: Tensors, args: Args) -> Tensors:
    """Return the allowed error of thresholds: 0, unless top_p is a value's mass within rounding.

    In that case the boundary is that value or its neighbour, depending on the rounding of sums.
    """
    logits_SV, slots_S, inverses_N, top_ks_N, top_ps_N, gaps_N = args
    others_N = inverses_N, top_ks_N, torch.ones_like(top_ps_N), gaps_N
    x_SV, threshold_S1 = logits_SV.float(), expected[0][:, None]
    is_kept_SV = x_SV >= reference.thresholds(logits_SV, slots_S, *others_N)[:, None]
    scaled_SV = (x_SV - x_SV.amax(-1, keepdim=True)).double() * inverses_N[slots_S, None]
    mass_SV = scaled_SV.exp() * is_kept_SV
    needed_S = top_ps_N[slots_S] * mass_SV.sum(-1)
    rounding_S = SUM_ROUNDING * mass_SV.sum(-1)
    is_bare_S = (mass_SV * (x_SV >= threshold_S1)).sum(-1) - needed_S <= rounding_S
    is_near_S = needed_S - (mass_SV * (x_SV > threshold_S1)).sum(-1) <= rounding_S
    below_S = x_SV.masked_fill((x_SV >= threshold_S1) | ~is_kept_SV, OFF).amax(-1)
    above_S = x_SV.masked_fill(x_SV <= threshold_S1, -OFF).amin(-1)
    room_S = torch.maximum(
        (expected[0] - below_S).where(is_bare_S & below_S.isfinite(), 0.0),
        (above_S - expected[0]).where(is_near_S & above_S.isfinite(), 0.0),
    )
    return (room_S.where(top_ps_N[slots_S] < 1, 0.0),)


OFF = -float("inf")
SUM_ROUNDING = 1e-5  # relative error of a float32 sum over a vocabulary
THRESHOLDS = Kernel(
    "thresholds",
    thresholds,
    reference.thresholds,
    (
        *(
            Case(
                f"S=5 V=6007 k={k} p={p} min_p_gap={gap} {bits(dtype)}",
                partial(thresholds_inputs, 5, 6007, dtype, k, p, gap),
                small=True,
            )
            for k, p, gap in (
                (2, 1.0, OFF),
                (20, 0.9, OFF),
                (0, 0.8, -2.0),
                (0, 1.0, OFF),
                (1000, 1.0, OFF),
                (1000, 0.97, OFF),
                (0, 1e-6, OFF),
            )
            for dtype in (torch.float32, torch.bfloat16)
        ),
        *(
            Case(f"mixed V=6007 {bits(dtype)}", partial(thresholds_mixed_inputs, 6007, dtype), True)
            for dtype in (torch.float32, torch.bfloat16)
        ),
        *(
            Case(
                f"S={S} V=151936 k={k} p={p}",
                partial(thresholds_inputs, S, 151936, torch.bfloat16, k, p, OFF),
                num_bytes=2 * S * 151936,
            )
            for S in (1, 64, 256)
            for k, p in ((20, 0.95), (0, 0.95), (1000, 1.0))
        ),
    ),
    ulps_32=1 / torch.finfo(torch.float32).eps,
    scale=thresholds_room,
)
