"""The inputs of each pass of a draft model, in one launch a pass.

The reference is draft_reference.py. Plain torch takes about thirty launches a pass, of 1 to 2 us
each, which is as long as a pass of a small head.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels.case import Args, Case, Kernel, Tensors
from nanovllm_kernels.sampling import draft_reference as reference
from nanovllm_kernels.sampling.batch_prep import ragged, state
from nanovllm_kernels.sampling.reference import CORRUPTED

BLOCK = 512  # tokens, and columns of the page table, that a program of a first pass writes
ROWS = 128  # rows of a later pass that a program writes
MAX_TOKENS = 2000  # of a request, in the cases


def first_rows(
    slots_R: Tensor, starts_R1: Tensor, lengths_R: Tensor, lengths_N: Tensor, tokens_NL: Tensor,
    pages_NM: Tensor, lag: int, page_tokens: int, max_tokens: int, num_pages: int, num_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the inputs of a first pass, as draft_reference.first_rows describes."""
    num_rows, device = slots_R.shape[0], slots_R.device
    inputs_4T = torch.empty(4, num_tokens, dtype=torch.int64, device=device)
    # These are two tensors, since a view of one would be aligned for some R only.
    sampled_R, draft_at_R = (
        torch.empty(num_rows, dtype=torch.int64, device=device) for _ in range(2)
    )
    out_starts_R1 = torch.empty(num_rows + 1, dtype=torch.int32, device=device)
    out_lengths_R = torch.empty(num_rows, dtype=torch.int32, device=device)
    table_RM = torch.empty(num_rows, num_pages, dtype=torch.int32, device=device)
    first_rows_kernel[(num_rows + 1, triton.cdiv(max(num_tokens, num_pages), BLOCK))](
        slots_R, starts_R1, lengths_R, lengths_N, tokens_NL, pages_NM, inputs_4T, out_starts_R1,
        out_lengths_R, sampled_R, draft_at_R, table_RM, num_rows, num_tokens, num_pages,
        lengths_N.shape[0] - 1, tokens_NL.shape[1], pages_NM.shape[1], page_tokens, max_tokens,
        LAG=lag, BLOCK=BLOCK,
    )  # fmt: skip
    return *inputs_4T.unbind(), out_starts_R1, out_lengths_R, sampled_R, draft_at_R, table_RM


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "num_pages"],
    do_not_specialize_on_alignment=["slots_R", "starts_R1", "lengths_R"],
)
def first_rows_kernel(
    slots_R, starts_R1, lengths_R, lengths_N, tokens_NL, pages_NM, inputs_4T, out_starts_R1,
    out_lengths_R, sampled_R, draft_at_R, table_RM, num_rows, num_tokens, num_pages, padding,
    tokens_stride, pages_stride, page_tokens, max_tokens, LAG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row per index on axis 0. The programs after the last row write the padding tokens."""
    row, part = tl.program_id(0), tl.program_id(1)
    is_row = row < num_rows
    slot = tl.load(slots_R + row, is_row, padding)
    length = tl.load(lengths_R + row, is_row, 0)
    start = tl.load(starts_R1 + row)
    fed = tl.load(starts_R1 + row + 1, is_row, start) - start
    before = length - fed
    start += (1 - LAG) * row
    stop = tl.where(is_row, start + fed + 1 - LAG, num_tokens)
    text, pages = tokens_NL + slot * tokens_stride, pages_NM + slot * pages_stride
    step = part * BLOCK + tl.arange(0, BLOCK)
    inside = start + step < stop
    position = tl.where(is_row, before + step, 0)
    clamped = tl.minimum(position, max_tokens - 1)
    page = tl.load(pages + clamped // page_tokens, inside & (position < max_tokens), 0)
    place = page.to(tl.int64) * page_tokens + clamped % page_tokens
    out = inputs_4T + start + step
    tl.store(out, tl.load(text + position + LAG, inside, 0), inside)
    tl.store(out + num_tokens, clamped, inside)
    tl.store(out + 2 * num_tokens, place, inside)
    tl.store(out + 3 * num_tokens, slot, inside)
    has_column = step < tl.where(is_row, num_pages, 0)
    held = tl.load(pages + step, has_column, 0)
    tl.store(table_RM + row.to(tl.int64) * num_pages + step, held, has_column)
    if part == 0:
        latest = tl.load(lengths_N + slot)
        sampled = start + latest - LAG - before  # of no token if the row feeds none
        sampled = tl.minimum(tl.maximum(sampled, 0), num_tokens - 1)
        tl.store(out_starts_R1 + row, start)
        tl.store(out_lengths_R + row, tl.minimum(length + 1 - LAG, max_tokens), is_row)
        tl.store(sampled_R + row, sampled, is_row)
        tl.store(draft_at_R + row, latest + 1, is_row)


def later_rows(
    slots_R: Tensor, drawn_R: Tensor, nth: int, lengths_N: Tensor, tokens_NL: Tensor,
    pages_NM: Tensor, drafts_RX: Tensor, lag: int, page_tokens: int, max_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Store a draft and return the inputs of its pass, as draft_reference.later_rows describes."""
    num_rows, device = slots_R.shape[0], slots_R.device
    assert drafts_RX.is_contiguous() and drafts_RX.shape[0] == num_rows
    inputs_3R = torch.empty(3, num_rows, dtype=torch.int64, device=device)
    draft_at_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    starts_R1 = torch.empty(num_rows + 1, dtype=torch.int32, device=device)
    lengths_R = torch.empty(num_rows, dtype=torch.int32, device=device)
    later_rows_kernel[(triton.cdiv(num_rows + 1, ROWS),)](
        slots_R, drawn_R, lengths_N, tokens_NL, pages_NM, drafts_RX, inputs_3R, starts_R1,
        lengths_R, draft_at_R, nth, num_rows, lengths_N.shape[0] - 1, tokens_NL.shape[1],
        pages_NM.shape[1], drafts_RX.shape[1], page_tokens, max_tokens, LAG=lag, BLOCK=ROWS,
    )  # fmt: skip
    return *inputs_3R.unbind(), starts_R1, lengths_R, draft_at_R


@triton.jit(
    do_not_specialize=["nth", "num_rows"], do_not_specialize_on_alignment=["slots_R", "drawn_R"]
)
def later_rows_kernel(
    slots_R, drawn_R, lengths_N, tokens_NL, pages_NM, drafts_RX, inputs_3R, starts_R1, lengths_R,
    draft_at_R, nth, num_rows, padding, tokens_stride, pages_stride, drafts_stride, page_tokens,
    max_tokens, LAG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    slot = tl.load(slots_R + row, inside, padding)
    token = tl.maximum(tl.load(drawn_R + row, inside, 0), 0)
    at = tl.load(lengths_N + slot) + nth
    position = at - LAG
    clamped = tl.minimum(position, max_tokens - 1)
    page_at = pages_NM + slot * pages_stride + clamped // page_tokens
    page = tl.load(page_at, inside & (position < max_tokens), 0).to(tl.int64)
    tl.store(tokens_NL + slot * tokens_stride + at, token, slot < padding)
    tl.store(drafts_RX + row * drafts_stride, tl.where(slot < padding, nth, 0), inside)
    tl.store(drafts_RX + row * drafts_stride + nth, token, inside)
    out = inputs_3R + row
    tl.store(out, token, inside)
    tl.store(out + num_rows, clamped, inside)
    tl.store(out + 2 * num_rows, page * page_tokens + clamped % page_tokens, inside)
    tl.store(starts_R1 + row, row, row <= num_rows)
    tl.store(lengths_R + row, clamped + 1, inside)
    tl.store(draft_at_R + row, at + 1, inside)


def texts(num_rows: int, page_tokens: int, device: torch.device) -> Tensors:
    """Return slots_R, lengths_N, tokens_NL and pages_NM of requests of up to MAX_TOKENS.

    The first text ends there, and the second one token earlier. Every other row has no page after
    that of its latest token. The last quarter of the rows has the padding slot.
    """
    slots_R, lengths_N, tokens_NL, pages_NM = state(num_rows, num_rows + 9, MAX_TOKENS, device)
    lengths_N[slots_R[0]] = MAX_TOKENS
    lengths_N[slots_R[1:2]] = MAX_TOKENS - 1
    lengths_N[-1] = 0
    pages_NM = pages_NM[:, : triton.cdiv(MAX_TOKENS, page_tokens)].contiguous()
    columns_M = torch.arange(pages_NM.shape[1], device=device)
    is_after_NM = columns_M > lengths_N[:, None] // page_tokens
    is_after_NM[slots_R[::2]] = False
    return slots_R, lengths_N, functional.pad(tokens_NL, (0, 8)), pages_NM * ~is_after_NM


def first_inputs(
    num_rows: int, width: int, page_tokens: int, lag: int, device: torch.device
) -> Args:
    """Return inputs of first_rows after rows of up to `width` tokens, 0 for one token each.

    Some of the last tokens of a row were rejected. Padding tokens follow the rows.
    """
    slots_R, *of_slots = texts(num_rows, page_tokens, device)
    counts_R = torch.ones(num_rows, dtype=torch.int32, device=device)
    if width:
        counts_R = ragged(num_rows, width, device)
        counts_R[num_rows // 2] = width
    rejected_R = torch.arange(num_rows, dtype=torch.int32, device=device) % counts_R.clamp(min=1)
    lengths_R = (of_slots[0][slots_R] + rejected_R).clamp(max=MAX_TOKENS).maximum(counts_R)
    starts_R1 = functional.pad(counts_R.cumsum(0, dtype=torch.int32), (1, 0))
    num_tokens = int(starts_R1[-1]) + (1 - lag) * num_rows + num_rows // 5 + 1
    sizes = lag, page_tokens, MAX_TOKENS, MAX_TOKENS // page_tokens - 1, num_tokens
    return slots_R, starts_R1, lengths_R * (counts_R > 0), *of_slots, *sizes


def later_inputs(num_rows: int, nth: int, page_tokens: int, lag: int, device: torch.device) -> Args:
    """Return inputs of later_rows. Every third token that was drawn is corrupted."""
    slots_R, *of_slots = texts(num_rows, page_tokens, device)
    drawn_R = torch.arange(num_rows, device=device) % 1000
    drawn_R[::3] = CORRUPTED
    drafts_RX = torch.full((num_rows, 6), 7, dtype=torch.int32, device=device)
    return slots_R, drawn_R, nth, *of_slots, drafts_RX, lag, page_tokens, MAX_TOKENS


def stored(inputs: Tensors, args: Args) -> Tensors:
    return *inputs, args[4], args[6]


FIRST_ROWS = Kernel(
    "first_rows",
    first_rows,
    reference.first_rows,
    tuple(
        Case(
            f"R={R} W={W or 'none'} page={S} lag={lag}",
            partial(first_inputs, R, W, S, lag),
            small=R < 1000,
            num_bytes=8 * R * (MAX_TOKENS // S + 5 * max(W, 1)),
        )
        for R, W, S, lag in (
            (1, 0, 16, 1),
            (1, 4, 16, 0),
            (7, 0, 128, 0),
            (7, 3, 16, 1),
            (3, 700, 16, 0),
            (3, 1300, 128, 1),
            (150, 4, 16, 1),
            (256, 0, 128, 1),
            (256, 4, 128, 1),
            (1100, 2, 128, 0),
        )
    ),
)
LATER_ROWS = Kernel(
    "later_rows",
    later_rows,
    reference.later_rows,
    tuple(
        Case(
            f"R={R} nth={nth} page={S} lag={lag}",
            partial(later_inputs, R, nth, S, lag),
            small=True,
            num_bytes=64 * R,
        )
        for R, nth, S, lag in (
            (1, 1, 16, 1),
            (1, 3, 128, 0),
            (7, 1, 16, 0),
            (127, 2, 16, 1),
            (128, 2, 128, 1),  # the last of starts_R1 needs a second program
            (300, 5, 16, 1),
        )
    ),
    outputs=stored,
)
