"""N-gram drafts from a row's own text (prompt lookup) in one launch.

The reference is ngram_reference.py.

Decision: one program reads one row's whole text. Dividing a text among programs would take a second
launch to compare their results. That costs more than it saves up to some ten thousand tokens. A
program keeps the best end of each of its lanes, so that nothing in its loop waits for all lanes.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.case import Args, Case, Kernel, Tensors
from nanovllm_kernels.sampling import ngram_reference as reference

BLOCK = 4096  # tokens that a program compares at once
UNROLLED = tl.constexpr(16)  # tokens of a match; 128 would take a minute to compile, 1024 an hour


def ngram(
    slots_R: Tensor,
    lengths_N: Tensor,
    tokens_NL: Tensor,
    num_drafts: int,
    min_match: int,
    max_match: int,
) -> Tensor:
    """Return drafts_RX, int32, X = 1 + `num_drafts`, as ngram_reference.ngram describes."""
    num_rows, num_positions = slots_R.shape[0], tokens_NL.shape[1]
    assert 1 <= min_match <= max_match and (max_match + 1) * (num_positions + 1) < 1 << 31
    drafts_RX = torch.empty(num_rows, 1 + num_drafts, dtype=torch.int32, device=slots_R.device)
    ngram_kernel[(num_rows,)](
        slots_R, lengths_N, tokens_NL, drafts_RX, num_positions, num_drafts, min_match,
        MAX_MATCH=max_match, DRAFTS=triton.next_power_of_2(num_drafts),
        BLOCK=min(BLOCK, triton.next_power_of_2(num_positions)), num_warps=16,
    )  # fmt: skip
    return drafts_RX


@triton.jit
def ngram_kernel(
    slots_R, lengths_N, tokens_NL, drafts_RX, num_positions, num_drafts, min_match,
    MAX_MATCH: tl.constexpr, DRAFTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots_R + row)
    text = tokens_NL + slot * num_positions
    newest = tl.load(lengths_N + slot)
    best = tl.zeros([BLOCK], tl.int32)  # score: matched tokens, then their end; the larger wins
    for start in range(0, newest, BLOCK):
        end = start + tl.arange(0, BLOCK)
        same = end < newest
        num_matched = tl.zeros([BLOCK], tl.int32)
        for first in range(0, MAX_MATCH, UNROLLED):
            for nth in tl.static_range(min(MAX_MATCH, UNROLLED)):
                # Lanes with a mismatch load nothing more; most have one at the first token.
                back = first + nth
                same = same & (tl.minimum(end, MAX_MATCH - 1) >= back)
                token = tl.load(text + end - back, same, 0)
                same = same & (token == tl.load(text + newest - back, newest >= back, 0))
                num_matched += same.to(tl.int32)
        score = num_matched * (num_positions + 1) + end
        best = tl.maximum(best, tl.where(num_matched >= min_match, score, 0))
    score = tl.max(best, 0)
    end = tl.where(score > 0, score % (num_positions + 1), newest - 1)
    step = tl.arange(0, DRAFTS)
    draft = tl.load(text + end + 1 + step % (newest - end))
    tl.store(text + newest + 1 + step, draft, step < num_drafts)
    out = drafts_RX + row * (1 + num_drafts)
    tl.store(out, tl.where(score > 0, num_drafts, 0))
    tl.store(out + 1 + step, draft, step < num_drafts)


def ngram_inputs(
    num_rows: int,
    num_positions: int,
    vocab_size: int,
    matches: tuple[int, int],
    device: torch.device,
) -> Args:
    """Return random texts, the longest in the first row, with the padding slot in the last row."""
    generator = torch.Generator(device).manual_seed(num_rows)

    def numbers(high: int, *shape: int) -> Tensor:
        shape = (num_rows + 1, *shape)
        return torch.randint(high, shape, generator=generator, device=device, dtype=torch.int32)

    lengths_N, tokens_NL = numbers(num_positions - 7), numbers(vocab_size, num_positions)
    slots_R = torch.randperm(num_rows, generator=generator, device=device)
    lengths_N[slots_R[0]] = num_positions - 8
    if num_rows > 1:
        slots_R[-1] = num_rows
    lengths_N[-1], tokens_NL[-1] = 0, 0
    return slots_R, lengths_N, tokens_NL, 3, *matches


def timed_inputs(num_rows: int, num_known: int, device: torch.device) -> Args:
    """Return texts of one length in which a tenth of the tokens are equal."""
    args = ngram_inputs(num_rows, num_known + 8, 150_000, (2, 8), device)
    _, lengths_N, tokens_NL, *_ = args
    lengths_N[:-1] = num_known
    tokens_NL[:-1, num_known % 10 :: 10] = 7
    return args


def written(drafts_RX: Tensor, args: Args) -> Tensors:
    return drafts_RX, args[2]


NGRAM = Kernel(
    "ngram",
    ngram,
    reference.ngram,
    (
        *(
            Case(
                f"R={R} L={L} V={V} {low}-{high}",
                partial(ngram_inputs, R, L, V, (low, high)),
                small=True,
            )
            for R, L, V, low, high in (
                (1, 9, 2, 1, 1),
                (1, 300, 2, 2, 8),
                (8, 300, 1, 2, 8),
                (8, 300, 10, 1, 3),
                (1, 300, 1, 30, 1024),  # limit of a recipe
                (8, 300, 1000, 2, 8),
                (3, 9000, 3, 4, 8),
                (3, 9000, 50, 2, 2),
            )
        ),
        *(
            Case(f"R={R} known={known}", partial(timed_inputs, R, known), num_bytes=4 * R * known)
            for R, known in ((1, 1024), (1, 32768), (64, 2048), (256, 4096), (256, 32768))
        ),
    ),
    outputs=written,
)
