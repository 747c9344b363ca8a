"""Gumbel-max sampling of tokens in Triton. The reference is reference.py.

`draw` reads the logits once. Each program sums one block of one row; then one program per row
chooses a block and a token in it. The result is independent of the number of rows, so a row's token
does not depend on its neighbours. `winners` does the same on a slice of the vocabulary, for `best`.

Decision: faulty rows are found from the sums, which are needed anyway. A NaN or +inf anywhere makes
its block's sum NaN. If all tokens are impossible, all sums are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.case import Args, Case, Kernel, Tensors, bits, normal
from nanovllm_kernels.sampling import reference

BLOCK = tl.constexpr(reference.BLOCK)
BLOCK_INDEX = tl.constexpr(reference.BLOCK_INDEX)
GOLDEN = tl.constexpr(reference.GOLDEN % (1 << 64))
MIX_1 = tl.constexpr(reference.MIX_1 % (1 << 64))
MIX_2 = tl.constexpr(reference.MIX_2 % (1 << 64))
LOWEST = tl.constexpr(reference.LOWEST)
CORRUPTED = tl.constexpr(reference.CORRUPTED)


def draw(
    logits_SV: Tensor,
    slots_S: Tensor,
    positions_S: Tensor,
    inverse_temperatures_N: Tensor,
    seeds_N: Tensor,
    thresholds_S: Tensor | None = None,
) -> Tensor:
    """Return tokens_S, int64, as reference.draw describes."""
    tokens_S = torch.empty(len(logits_SV), dtype=torch.int64, device=logits_SV.device)
    args = logits_SV, slots_S, positions_S, inverse_temperatures_N, seeds_N, thresholds_S
    _draw(*args, 0, None, tokens_S)
    return tokens_S


def winners(
    logits_SV: Tensor,
    slots_S: Tensor,
    positions_S: Tensor,
    inverse_temperatures_N: Tensor,
    seeds_N: Tensor,
    thresholds_S: Tensor | None = None,
    first_token: int = 0,
) -> Tensor:
    """Return winners_S2, int32 pairs of key and token, as reference.winners describes."""
    winners_S2 = torch.empty(len(logits_SV), 2, dtype=torch.int32, device=logits_SV.device)
    args = logits_SV, slots_S, positions_S, inverse_temperatures_N, seeds_N, thresholds_S
    _draw(*args, first_token, winners_S2, None)
    return winners_S2


def best(winners_IS2: Tensor) -> Tensor:
    """Return tokens_S, int64, from the winners of all ranks, as reference.best describes."""
    assert winners_IS2.is_contiguous()
    num_ranks, num_rows, _ = winners_IS2.shape
    tokens_S = torch.empty(num_rows, dtype=torch.int64, device=winners_IS2.device)
    ranks = triton.next_power_of_2(num_ranks)
    best_kernel[(num_rows,)](winners_IS2, tokens_S, num_rows, num_ranks, RANKS=ranks)
    return tokens_S


def _draw(
    logits_SV: Tensor, slots_S: Tensor, positions_S: Tensor, inverses_N: Tensor, seeds_N: Tensor,
    thresholds_S: Tensor | None, first_token: int, winners_S2: Tensor | None,
    tokens_S: Tensor | None,
) -> None:  # fmt: skip
    """Fill either winners_S2 or tokens_S."""
    assert logits_SV.stride(1) == 1
    num_rows, vocab = logits_SV.shape
    num_blocks = triton.cdiv(vocab, reference.BLOCK)
    tops_SB, sums_SB = _sum_blocks(logits_SV, slots_S, inverses_N, thresholds_S)
    draw_kernel[(num_rows,)](
        logits_SV, slots_S, positions_S, inverses_N, seeds_N, thresholds_S, tops_SB, sums_SB,
        winners_S2, tokens_S, first_token, vocab, num_blocks, logits_SV.stride(0),
        inverses_N.stride(0), seeds_N.stride(0), BLOCKS=triton.next_power_of_2(num_blocks),
    )  # fmt: skip


def _sum_blocks(
    logits_SV: Tensor, slots_S: Tensor, inverses_N: Tensor, thresholds_S: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return each block's largest logit, and its sum of exp((logit - largest) / temperature).

    The sum is at least 1. It is 0 if no token of the block is possible, and NaN if the block has a
    NaN or +inf. Greedy rows use temperature 1.
    """
    num_rows, vocab = logits_SV.shape
    num_blocks = triton.cdiv(vocab, reference.BLOCK)
    # These are two tensors, since a view of one would be aligned for some S only. Triton compiles a
    # kernel for each alignment.
    tops_SB = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits_SV.device)
    sums_SB = torch.empty_like(tops_SB)
    sum_kernel[(num_blocks, num_rows)](
        logits_SV, slots_S, inverses_N, thresholds_S, tops_SB, sums_SB, vocab, num_blocks,
        logits_SV.stride(0), inverses_N.stride(0),
    )  # fmt: skip
    return tops_SB, sums_SB


@triton.jit(do_not_specialize_on_alignment=["slots_S"])
def sum_kernel(
    logits_SV, slots_S, inverses_N, thresholds_S, tops_SB, sums_SB, vocab, num_blocks,
    logits_stride, inverses_stride,
):  # fmt: skip
    block, row = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = load(logits_SV + row.to(tl.int64) * logits_stride, at, vocab)
    if thresholds_S is not None:
        x = tl.where(x < tl.load(thresholds_S + row), -float("inf"), x)  # a NaN stays
    inverse = tl.load(inverses_N + tl.load(slots_S + row) * inverses_stride)
    inverse = tl.where(inverse == 0, 1.0, inverse)  # -inf * 0 would be NaN
    top = tl.max(x, 0)
    # A block of -inf has no finite largest logit to subtract; LOWEST makes its weights 0.
    total = tl.sum(tl.exp((x - tl.maximum(top, LOWEST)) * inverse), 0)
    tl.store(tops_SB + row * num_blocks + block, top)
    tl.store(sums_SB + row * num_blocks + block, total)


@triton.jit(do_not_specialize_on_alignment=["slots_S"])
def draw_kernel(
    logits_SV, slots_S, positions_S, inverses_N, seeds_N, thresholds_S, tops_SB, sums_SB,
    winners_S2, tokens_S, first_token, vocab, num_blocks, logits_stride, inverses_stride,
    seeds_stride, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots_S + row)
    inverse = tl.load(inverses_N + slot * inverses_stride)
    seed = tl.load(seeds_N + slot * seeds_stride)
    stream = mix(mix(seed.to(tl.uint64)) + tl.load(positions_S + row).to(tl.uint64))
    block = tl.arange(0, BLOCKS)
    tops = tl.load(tops_SB + row * num_blocks + block, block < num_blocks, -float("inf"))
    sums = tl.load(sums_SB + row * num_blocks + block, block < num_blocks, 0.0)
    total = tl.sum(sums, 0)
    if (total > 0) == 0:
        if winners_S2 is not None:
            _store_winner(winners_S2, row, tl.where(total == 0, -float("inf"), total), 0)
        else:
            tl.store(tokens_S + row, CORRUPTED)
        return
    noise = gumbel(stream, BLOCK_INDEX + (first_token + block * BLOCK).to(tl.uint64))
    heat = tl.minimum(tl.maximum(tops * inverse, LOWEST), -LOWEST)
    keys = tl.where(inverse == 0, tops, heat + tl.log(sums) + noise)
    chosen = tl.argmax(keys, 0)
    at = chosen * BLOCK + tl.arange(0, BLOCK)
    x = load(logits_SV + row.to(tl.int64) * logits_stride, at, vocab)
    if thresholds_S is not None:
        x = tl.where(x < tl.load(thresholds_S + row), -float("inf"), x)
    drawn = (x - tl.max(x, 0)) * inverse + gumbel(stream, (first_token + at).to(tl.uint64))
    token = first_token + chosen * BLOCK + tl.argmax(tl.where(inverse == 0, x, drawn), 0)
    if winners_S2 is not None:
        _store_winner(winners_S2, row, tl.max(keys, 0), token)
    else:
        tl.store(tokens_S + row, token.to(tl.int64))


@triton.jit
def _store_winner(winners_S2, row, key, token):
    tl.store(winners_S2 + row * 2, key.to(tl.int32, bitcast=True))
    tl.store(winners_S2 + row * 2 + 1, token)


@triton.jit(do_not_specialize=["num_rows"])
def best_kernel(winners_IS2, tokens_S, num_rows, num_ranks, RANKS: tl.constexpr):
    row, rank = tl.program_id(0), tl.arange(0, RANKS)
    at, inside = winners_IS2 + (rank * num_rows + row) * 2, rank < num_ranks
    keys = tl.load(at, inside, 0).to(tl.float32, bitcast=True)
    is_nan = keys != keys
    keys = tl.where(inside & (keys == keys), keys, -float("inf"))
    is_corrupted = (tl.max(is_nan.to(tl.int32), 0) == 1) | (tl.max(keys, 0) < LOWEST)
    tokens = tl.load(at + 1, inside, 0)
    token = tl.sum(tl.where(rank == tl.argmax(keys, 0), tokens, 0), 0)
    tl.store(tokens_S + row, tl.where(is_corrupted, CORRUPTED, token).to(tl.int64))


@triton.jit
def load(logits_V, at, vocab):
    return tl.load(logits_V + at, at < vocab, -float("inf")).to(tl.float32)


@triton.jit
def gumbel(stream, index):
    u = uniforms(stream, index)
    series = u * (1 + u * (0.5 + u * (1 / 3)))
    return -tl.log(tl.where(u < 2**-8, series, -tl.log(1 - u)))


@triton.jit
def uniforms(stream, index):
    bits = (mix(stream + (index + 1) * GOLDEN) >> 32).to(tl.uint32)
    return tl.minimum(bits.to(tl.float32) * 2**-32 + 2**-33, 1 - 2**-24)


@triton.jit
def mix(x):
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


def rows(S: int, V: int, dtype: torch.dtype, device: torch.device) -> Args:
    """Return logits_SV, slots_S and inverse temperatures, of which some are 0 (greedy)."""
    generator = torch.Generator(device).manual_seed(S)
    slots_S = torch.randperm(S, generator=generator, device=device)
    inverses_N = torch.tensor([1.0, 0.0, 1 / 0.6, 0.5], device=device).repeat(-(-S // 4))
    return (normal(device, S, V, dtype=torch.float32) * 4).to(dtype), slots_S, inverses_N


def draw_inputs(S: int, V: int, dtype: torch.dtype, device: torch.device) -> Args:
    logits_SV, slots_S, inverses_N = rows(S, V, dtype, device)
    seeds_N = torch.arange(len(inverses_N), device=device) << 40
    return logits_SV, slots_S, slots_S * 77, inverses_N, seeds_N, None


def draw_corrupted_inputs(S: int, V: int, dtype: torch.dtype, device: torch.device) -> Args:
    """Return inputs with a NaN or +inf in every second row, and a last row of -inf only."""
    logits_SV, *others = draw_inputs(S, V, dtype, device)
    for row in range(0, S, 2):
        logits_SV[row, (row + 1) * 7919 % V] = float("inf") if row % 4 else float("nan")
    logits_SV[-1] = -float("inf")
    return logits_SV, *others


def draw_above_thresholds_inputs(S: int, V: int, dtype: torch.dtype, device: torch.device) -> Args:
    *others, _ = draw_inputs(S, V, dtype, device)
    return *others, torch.full((S,), 9.0, device=device)


def winners_inputs(
    inputs: Callable[..., Args], S: int, V: int, dtype: torch.dtype, device: torch.device
) -> Args:
    """Return the inputs of a rank whose columns begin with the third block of the vocabulary."""
    return *inputs(S, V, dtype, device), 2 * reference.BLOCK


def winners_outputs(winners_S2: Tensor, args: Args) -> Tensors:
    """Return keys and tokens. Keys that are not finite become outliers, and their tokens -1."""
    keys_S = winners_S2[:, 0].view(torch.float32)
    is_sound_S = keys_S.isfinite()
    return keys_S.nan_to_num(-1e6, neginf=-2e6), winners_S2[:, 1].where(is_sound_S, -1)


def key_terms(expected: Tensors, args: Args) -> Tensors:
    """Return error scales: a key's size plus 8, the size of its logarithm and its noise."""
    return expected[0].abs() + 8, expected[1]


def best_inputs(ranks: int, S: int, device: torch.device) -> Args:
    """Return winners that include equal keys, rows with a NaN and rows without a finite key."""
    generator = torch.Generator().manual_seed(S)
    keys_IS = torch.randn(ranks, S, generator=generator).round()
    keys_IS[0, ::3], keys_IS[-1, ::7] = -float("inf"), float("nan")
    keys_IS[:, ::5] = -float("inf")
    tokens_IS = torch.arange(ranks * S, dtype=torch.int32).view(ranks, S)
    return (torch.stack((keys_IS.view(torch.int32), tokens_IS), 2).to(device),)


INPUTS = (
    ("", draw_inputs),
    ("thresholds ", draw_above_thresholds_inputs),
    ("corrupted ", draw_corrupted_inputs),
)


def cases(
    shapes: Sequence[tuple[int, int]], timed: Sequence[tuple[int, int]], *of: Callable[..., Args]
) -> Iterator[Case]:
    """Yield cases for INPUTS. A function in `of` wraps each of these."""
    for name, inputs in INPUTS:
        for S, V in shapes:
            for dtype in (torch.float32, torch.bfloat16):
                case_inputs = partial(*of, inputs, S, V, dtype)
                yield Case(f"{name}S={S} V={V} {bits(dtype)}", case_inputs, small=True)
    for S, V in timed:
        case_inputs = partial(*of, draw_inputs, S, V, torch.bfloat16)
        yield Case(f"S={S} V={V}", case_inputs, num_bytes=2 * S * V)


WINNERS = Kernel(
    "winners",
    winners,
    reference.winners,
    (*cases(((1, 100), (5, 4096), (5, 6007)), [(S, 38912) for S in (1, 64, 256)], winners_inputs),),
    ulps_32=4,
    scale=key_terms,
    outputs=winners_outputs,
)
BEST = Kernel(
    "best",
    best,
    reference.best,
    tuple(
        Case(f"I={ranks} S={S}", partial(best_inputs, ranks, S), small=True)
        for ranks, S in ((1, 8), (2, 1), (8, 256), (3, 40))
    ),
)
DRAW = Kernel(
    "draw",
    draw,
    reference.draw,
    (*cases(((1, 100), (5, 6007)), [(S, 151936) for S in (1, 64, 256, 512)]),),
)
