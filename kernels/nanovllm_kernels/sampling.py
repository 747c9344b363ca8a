"""Drawing tokens in Triton. sampling_reference.py says what each function means.

`draw` reads the logits once: every program sums up one block of one row, then one program per row
chooses a block and a token in it. `floors` needs no sort: one program per row bisects between
values that occur in it, and each round skips the blocks that lie below. Neither depends on the
number of rows, so a row's token does not depend on its neighbours.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels import sampling_reference as reference
from nanovllm_kernels.case import Args, Case, Kernel, Tensors, bits, normal

BLOCK = tl.constexpr(reference.BLOCK)
BLOCK_INDEX = tl.constexpr(reference.BLOCK_INDEX)
GOLDEN = tl.constexpr(reference.GOLDEN % (1 << 64))
MIX_1 = tl.constexpr(reference.MIX_1 % (1 << 64))
MIX_2 = tl.constexpr(reference.MIX_2 % (1 << 64))
LOWEST = tl.constexpr(reference.LOWEST)


def draw(
    logits_SV: Tensor,
    slots_S: Tensor,
    positions_S: Tensor,
    inverse_temperatures_N: Tensor,
    seeds_N: Tensor,
    floors_S: Tensor | None = None,
) -> Tensor:
    assert logits_SV.stride(1) == 1
    num_rows, vocab = logits_SV.shape
    inverses, num_blocks = inverse_temperatures_N, triton.cdiv(vocab, reference.BLOCK)
    tops_SB, sums_SB = _sum_blocks(logits_SV, slots_S, inverses, floors_S)
    tokens_S = torch.empty(num_rows, dtype=torch.int64, device=logits_SV.device)
    draw_kernel[(num_rows,)](
        logits_SV,
        slots_S,
        positions_S,
        inverses,
        seeds_N,
        floors_S,
        tops_SB,
        sums_SB,
        tokens_S,
        vocab,
        num_blocks,
        logits_SV.stride(0),
        inverses.stride(0),
        seeds_N.stride(0),
        BLOCKS=triton.next_power_of_2(num_blocks),
    )
    return tokens_S


def floors(
    logits_SV: Tensor,
    slots_S: Tensor,
    inverse_temperatures_N: Tensor,
    top_ks_N: Tensor,
    top_ps_N: Tensor,
    min_p_gaps_N: Tensor,
) -> Tensor:
    assert logits_SV.stride(1) == 1
    num_rows, vocab = logits_SV.shape
    inverses, num_blocks = inverse_temperatures_N, triton.cdiv(vocab, reference.BLOCK)
    tops_SB, _ = _sum_blocks(logits_SV, slots_S, inverses, None)
    floors_S = torch.empty(num_rows, dtype=torch.float32, device=logits_SV.device)
    floors_kernel[(num_rows,)](
        logits_SV,
        slots_S,
        inverses,
        top_ks_N,
        top_ps_N,
        min_p_gaps_N,
        tops_SB,
        floors_S,
        vocab,
        num_blocks,
        logits_SV.stride(0),
        inverses.stride(0),
        top_ks_N.stride(0),
        top_ps_N.stride(0),
        min_p_gaps_N.stride(0),
        BLOCKS=triton.next_power_of_2(num_blocks),
        num_warps=8,
    )
    return floors_S


def _sum_blocks(
    logits_SV: Tensor, slots_S: Tensor, inverses_N: Tensor, floors_S: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Each block's largest logit, and its sum of exp((logit - largest) / temperature)."""
    num_rows, vocab = logits_SV.shape
    num_blocks = triton.cdiv(vocab, reference.BLOCK)
    # Two tensors: a view into one would be aligned for some S only, and Triton compiles for each.
    tops_SB = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits_SV.device)
    sums_SB = torch.empty_like(tops_SB)
    sum_kernel[(num_blocks, num_rows)](
        logits_SV,
        slots_S,
        inverses_N,
        floors_S,
        tops_SB,
        sums_SB,
        vocab,
        num_blocks,
        logits_SV.stride(0),
        inverses_N.stride(0),
    )
    return tops_SB, sums_SB


@triton.jit
def sum_kernel(
    logits_SV,
    slots_S,
    inverses_N,
    floors_S,
    tops_SB,
    sums_SB,
    vocab,
    num_blocks,
    logits_stride,
    inverses_stride,
):
    block, row = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = _load(logits_SV + row.to(tl.int64) * logits_stride, at, vocab)
    if floors_S is not None:
        x = tl.where(x >= tl.load(floors_S + row), x, -float("inf"))
    inverse = tl.load(inverses_N + tl.load(slots_S + row) * inverses_stride)
    top = tl.max(x, 0)
    # An empty block has no largest logit to subtract; its weights are 0 without.
    total = tl.sum(tl.exp((x - tl.maximum(top, LOWEST)) * inverse), 0)
    tl.store(tops_SB + row * num_blocks + block, top)
    tl.store(sums_SB + row * num_blocks + block, total)


@triton.jit
def draw_kernel(
    logits_SV,
    slots_S,
    positions_S,
    inverses_N,
    seeds_N,
    floors_S,
    tops_SB,
    sums_SB,
    tokens_S,
    vocab,
    num_blocks,
    logits_stride,
    inverses_stride,
    seeds_stride,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots_S + row)
    inverse = tl.load(inverses_N + slot * inverses_stride)
    seed = tl.load(seeds_N + slot * seeds_stride)
    key = mix(mix(seed.to(tl.uint64)) + tl.load(positions_S + row).to(tl.uint64))
    block = tl.arange(0, BLOCKS)
    tops = tl.load(tops_SB + row * num_blocks + block, block < num_blocks, -float("inf"))
    sums = tl.load(sums_SB + row * num_blocks + block, block < num_blocks, 0.0)
    top = tl.max(tops, 0)
    noise = gumbel(key, BLOCK_INDEX + block.to(tl.uint64) * BLOCK)
    weights = tl.where(inverse == 0, tops, (tops - top) * inverse + tl.log(sums) + noise)
    # Logits of NaN compare with nothing; the minimum keeps even their token in the vocabulary.
    chosen = tl.minimum(tl.argmax(weights, 0), num_blocks - 1)
    at = chosen * BLOCK + tl.arange(0, BLOCK)
    x = _load(logits_SV + row.to(tl.int64) * logits_stride, at, vocab)
    if floors_S is not None:
        x = tl.where(x >= tl.load(floors_S + row), x, -float("inf"))
    x = tl.where(inverse == 0, x, (x - top) * inverse + gumbel(key, at.to(tl.uint64)))
    token = tl.minimum(chosen * BLOCK + tl.argmax(x, 0), vocab - 1)
    tl.store(tokens_S + row, token.to(tl.int64))


@triton.jit
def floors_kernel(
    logits_SV,
    slots_S,
    inverses_N,
    top_ks_N,
    top_ps_N,
    min_p_gaps_N,
    tops_SB,
    floors_S,
    vocab,
    num_blocks,
    logits_stride,
    inverses_stride,
    top_ks_stride,
    top_ps_stride,
    min_p_gaps_stride,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots_S + row)
    top_k = tl.load(top_ks_N + slot * top_ks_stride)
    top_p = tl.load(top_ps_N + slot * top_ps_stride)
    block = tl.arange(0, BLOCKS)
    tops_at = tops_SB + row * num_blocks
    tops = tl.load(tops_at + block, block < num_blocks, -float("inf"))
    top = tl.max(tops, 0)
    logits_V = logits_SV + row.to(tl.int64) * logits_stride
    low = tl.maximum(top + tl.load(min_p_gaps_N + slot * min_p_gaps_stride), LOWEST)
    if (top_k > 0) & (top_k < vocab):
        if top_k <= num_blocks:
            # The k-th largest of the blocks' largest: at least k logits are no smaller.
            ranked = tl.sort(tops, descending=True)
            low = tl.maximum(low, tl.sum(tl.where(block == top_k - 1, ranked, 0.0), 0))
        # At infinite temperature every logit weighs 1: the mass is a count.
        count = top_k.to(tl.float32)
        low = _search(logits_V, tops_at, vocab, num_blocks, low, top, count, 0.0)
    if top_p < 1:
        inverse = tl.load(inverses_N + slot * inverses_stride)
        mass, _, _ = _mass(logits_V, tops_at, vocab, num_blocks, low, top, inverse)
        low = _search(logits_V, tops_at, vocab, num_blocks, low, top, top_p * mass, inverse)
    tl.store(floors_S + row, low)


@triton.jit
def _search(logits_V, tops_B, vocab, num_blocks, low, top, needed, inverse):
    """The largest logit in [low, top] from which on upwards the mass is >= needed, or low.

    Bisects on the bits. After each round both ends move on to values that occur, so the rounds
    number about log2 of the different values in between, whatever the logits' type.
    """
    below, above = _key(low), _key(top) + 1
    while above - below > 1:
        middle = (below + above) >> 1
        floor = _value(middle)
        mass, smallest, next_smaller = _mass(
            logits_V, tops_B, vocab, num_blocks, floor, top, inverse
        )
        if mass >= needed:
            below = tl.maximum(middle, _key(smallest))
        else:
            above = tl.minimum(middle, _key(next_smaller) + 1)
    return _value(below)


@triton.jit
def _mass(logits_V, tops_B, vocab, num_blocks, floor, top, inverse):
    """Of the logits >= floor: the sum of exp((x - top) * inverse), and the smallest of them.

    Besides, the largest logit < floor.
    """
    sums = tl.zeros([BLOCK], tl.float32)
    smallest = tl.full([BLOCK], float("inf"), tl.float32)
    smaller = tl.full([BLOCK], -float("inf"), tl.float32)
    for block in range(num_blocks):
        block_top = tl.load(tops_B + block)
        if block_top >= floor:
            x = _load(logits_V, block * BLOCK + tl.arange(0, BLOCK), vocab)
            sums += tl.where(x >= floor, tl.exp((x - top) * inverse), 0.0)
            smallest = tl.minimum(smallest, tl.where(x >= floor, x, float("inf")))
            smaller = tl.maximum(smaller, tl.where(x >= floor, -float("inf"), x))
        else:
            smaller = tl.maximum(smaller, block_top)
    return tl.sum(sums, 0), tl.min(smallest, 0), tl.max(smaller, 0)


@triton.jit
def _load(logits_V, at, vocab):
    return tl.load(logits_V + at, at < vocab, -float("inf")).to(tl.float32)


@triton.jit
def _key(x):
    """The bits of a float32 as a signed number in the order of the floats, int64."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def gumbel(key, index):
    u = uniforms(key, index)
    series = u * (1 + u * (0.5 + u * (1 / 3)))
    return -tl.log(tl.where(u < 2**-8, series, -tl.log(1 - u)))


@triton.jit
def uniforms(key, index):
    bits = (mix(key + (index + 1) * GOLDEN) >> 32).to(tl.uint32)
    return tl.minimum(bits.to(tl.float32) * 2**-32 + 2**-33, 1 - 2**-24)


@triton.jit
def mix(x):
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


def rows(S: int, V: int, dtype: torch.dtype, device: torch.device) -> Args:
    """logits_SV, slots_S and inverse temperatures, a greedy slot among them."""
    generator = torch.Generator(device).manual_seed(S)
    slots_S = torch.randperm(S, generator=generator, device=device)
    inverses_N = torch.tensor([1.0, 0.0, 1 / 0.6, 0.5], device=device).repeat(-(-S // 4))
    return (normal(device, S, V, dtype=torch.float32) * 4).to(dtype), slots_S, inverses_N


def draw_inputs(S: int, V: int, dtype: torch.dtype, device: torch.device) -> Args:
    logits_SV, slots_S, inverses_N = rows(S, V, dtype, device)
    seeds_N = torch.arange(len(inverses_N), device=device) << 40
    return logits_SV, slots_S, slots_S * 77, inverses_N, seeds_N, None


def draw_above_floors_inputs(S: int, V: int, dtype: torch.dtype, device: torch.device) -> Args:
    *others, _ = draw_inputs(S, V, dtype, device)
    return *others, torch.full((S,), 9.0, device=device)


def floors_inputs(
    S: int, V: int, dtype: torch.dtype, k: int, p: float, min_p_gap: float, device: torch.device
) -> Args:
    logits_SV, slots_S, inverses_N = rows(S, V, dtype, device)
    top_ks_N = torch.full_like(inverses_N, k, dtype=torch.int32)
    top_ps_N, gaps_N = torch.full_like(inverses_N, p), torch.full_like(inverses_N, min_p_gap)
    return logits_SV, slots_S, inverses_N, top_ks_N, top_ps_N, gaps_N


def floors_room(expected: Tensors, args: Args) -> Tensors:
    """How far floors may be off: not at all, but where top_p is a value's mass within rounding.

    There the boundary is that value or its neighbour, as sums happen to be rounded.
    """
    logits_SV, slots_S, inverses_N, top_ks_N, top_ps_N, gaps_N = args
    others_N = inverses_N, top_ks_N, torch.ones_like(top_ps_N), gaps_N
    x_SV, floor_S1 = logits_SV.float(), expected[0][:, None]
    is_kept_SV = x_SV >= reference.floors(logits_SV, slots_S, *others_N)[:, None]
    scaled_SV = (x_SV - x_SV.amax(-1, keepdim=True)).double() * inverses_N[slots_S, None]
    mass_SV = scaled_SV.exp() * is_kept_SV
    needed_S = top_ps_N[slots_S] * mass_SV.sum(-1)
    rounding_S = SUM_ROUNDING * mass_SV.sum(-1)
    is_bare_S = (mass_SV * (x_SV >= floor_S1)).sum(-1) - needed_S <= rounding_S
    is_near_S = needed_S - (mass_SV * (x_SV > floor_S1)).sum(-1) <= rounding_S
    below_S = x_SV.masked_fill((x_SV >= floor_S1) | ~is_kept_SV, OFF).amax(-1)
    above_S = x_SV.masked_fill(x_SV <= floor_S1, -OFF).amin(-1)
    room_S = torch.maximum(
        (expected[0] - below_S).where(is_bare_S & below_S.isfinite(), 0.0),
        (above_S - expected[0]).where(is_near_S & above_S.isfinite(), 0.0),
    )
    return (room_S.where(top_ps_N[slots_S] < 1, 0.0),)


OFF = -float("inf")
SUM_ROUNDING = 1e-5  # relative, of a float32 sum over a vocabulary
DRAW = Kernel(
    "draw",
    draw,
    reference.draw,
    (
        *(
            Case(f"{name}S={S} V={V} {bits(dtype)}", partial(inputs, S, V, dtype), small=True)
            for name, inputs in (("", draw_inputs), ("floors ", draw_above_floors_inputs))
            for S, V in ((1, 100), (5, 6007))
            for dtype in (torch.float32, torch.bfloat16)
        ),
        *(
            Case(
                f"S={S} V=151936",
                partial(draw_inputs, S, 151936, torch.bfloat16),
                num_bytes=2 * S * 151936,
            )
            for S in (1, 64, 256, 512)
        ),
    ),
)
FLOORS = Kernel(
    "floors",
    floors,
    reference.floors,
    (
        *(
            Case(
                f"S=5 V=6007 k={k} p={p} min_p_gap={gap} {bits(dtype)}",
                partial(floors_inputs, 5, 6007, dtype, k, p, gap),
                small=True,
            )
            for k, p, gap in ((2, 1.0, OFF), (20, 0.9, OFF), (0, 0.8, -2.0), (0, 1.0, OFF))
            for dtype in (torch.float32, torch.bfloat16)
        ),
        *(
            Case(
                f"S={S} V=151936 k={k} p={p}",
                partial(floors_inputs, S, 151936, torch.bfloat16, k, p, OFF),
                num_bytes=2 * S * 151936,
            )
            for S in (1, 64, 256)
            for k, p in ((20, 0.95), (0, 0.95), (1000, 1.0))
        ),
    ),
    ulps_32=1 / torch.finfo(torch.float32).eps,
    scale=floors_room,
)
