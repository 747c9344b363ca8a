"""One launch that gathers the inputs of decode rows from slots, and one that writes results back.

The reference is batch_reference.py. Plain torch takes about forty launches for the two, which at
one row of a small model is a fifth of the step.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.case import Args, Case, Kernel, Tensors
from nanovllm_kernels.sampling import batch_reference as reference
from nanovllm_kernels.sampling.draw import mix, uniforms

PAGES = 512  # columns of the page table that a program copies
COUNTS = 1024  # rows whose token counts a program sums at once
ROWS = 128  # rows that a program writes back
COIN_INDEX = tl.constexpr(reference.COIN_INDEX)
CORRUPTED = tl.constexpr(reference.CORRUPTED)


def gather_rows(
    slots_R: Tensor, counts_R: Tensor | None, lengths_N: Tensor, tokens_NL: Tensor,
    pages_NM: Tensor, page_tokens: int, num_pages: int, num_tokens: int, width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the inputs of decode rows, as batch_reference.gather_rows describes."""
    num_rows, device = slots_R.shape[0], slots_R.device
    assert counts_R is not None or (num_tokens, width) == (num_rows, 1)
    inputs_4T = torch.empty(4, num_tokens, dtype=torch.int64, device=device)
    starts_R1 = torch.empty(num_rows + 1, dtype=torch.int32, device=device)
    lengths_R = torch.empty(num_rows, dtype=torch.int32, device=device)
    table_RM = torch.empty(num_rows, num_pages, dtype=torch.int32, device=device)
    gather_kernel[(num_rows, triton.cdiv(num_pages, PAGES))](
        slots_R, counts_R, lengths_N, tokens_NL, pages_NM, inputs_4T, starts_R1, lengths_R,
        table_RM, num_rows, num_tokens, lengths_N.shape[0] - 1, tokens_NL.shape[1],
        pages_NM.shape[1], num_pages, page_tokens, WIDTH=triton.next_power_of_2(width),
        SHARE=triton.next_power_of_2(max(width, triton.cdiv(num_tokens, num_rows))),
        COUNTS=COUNTS, PAGES=PAGES,
    )  # fmt: skip
    return *inputs_4T.unbind(), starts_R1, lengths_R, table_RM


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_pages"])
def gather_kernel(
    slots_R, counts_R, lengths_N, tokens_NL, pages_NM, inputs_4T, starts_R1, lengths_R, table_RM,
    num_rows, num_tokens, padding, tokens_stride, pages_stride, num_pages, page_tokens,
    WIDTH: tl.constexpr, SHARE: tl.constexpr, COUNTS: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots_R + row)
    page = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    held = tl.load(pages_NM + slot * pages_stride + page, page < num_pages, 0)
    tl.store(table_RM + row.to(tl.int64) * num_pages + page, held, page < num_pages)
    if tl.program_id(1) == 0:
        if counts_R is None:
            start, count, total = row, 1, num_rows
        else:
            above, every = tl.zeros([COUNTS], tl.int32), tl.zeros([COUNTS], tl.int32)
            for other in range(0, num_rows, COUNTS):
                others = other + tl.arange(0, COUNTS)
                counts = tl.load(counts_R + others, others < num_rows, 0)
                above += tl.where(others < row, counts, 0)
                every += counts
            start, count, total = tl.sum(above, 0), tl.load(counts_R + row), tl.sum(every, 0)
            # Each program also writes some of the padding tokens, which belong to no row.
            spare = row * SHARE + tl.arange(0, SHARE)
            is_spare = (spare >= total) & (spare < num_tokens)
            for i in tl.static_range(3):
                tl.store(inputs_4T + i * num_tokens + spare, 0, is_spare)
            tl.store(inputs_4T + 3 * num_tokens + spare, padding, is_spare)
        before = tl.load(lengths_N + slot)
        step = tl.arange(0, WIDTH)
        position = before + step
        of_slot = pages_NM + slot * pages_stride
        holder = tl.load(of_slot + position // page_tokens, step < count, 0).to(tl.int64)
        token = tl.load(tokens_NL + slot * tokens_stride + position, step < count, 0)
        out = inputs_4T + start + step
        tl.store(out, token.to(tl.int64), step < count)
        tl.store(out + num_tokens, position.to(tl.int64), step < count)
        tl.store(out + 2 * num_tokens, holder * page_tokens + position % page_tokens, step < count)
        tl.store(out + 3 * num_tokens, slot, step < count)
        tl.store(starts_R1 + row, start)
        tl.store(starts_R1 + num_rows, total, row == num_rows - 1)
        tl.store(lengths_R + row, tl.where(count > 0, before + count, 0))


def write_back(
    slots_R: Tensor, lengths_R: Tensor, samples_R1: Tensor | None, tokens_S: Tensor,
    lengths_N: Tensor, tokens_NL: Tensor, width: int, accept: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Return tokens_RW, the step's output tokens, as batch_reference.write_back describes."""
    num_rows = slots_R.shape[0]
    rates_D, seeds_N = (None, None) if accept is None else accept
    tokens_RW = torch.empty(num_rows, width, dtype=torch.int32, device=slots_R.device)
    write_back_kernel[(triton.cdiv(num_rows, ROWS),)](
        slots_R, lengths_R, samples_R1, tokens_S, lengths_N, tokens_NL, rates_D, seeds_N, tokens_RW,
        num_rows, lengths_N.shape[0] - 1, tokens_NL.shape[1],
        0 if seeds_N is None else seeds_N.stride(0), WIDTH=width,
        STEPS=triton.next_power_of_2(width), BLOCK=ROWS,
    )  # fmt: skip
    return tokens_RW


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["samples_R1"])
def write_back_kernel(
    slots_R, lengths_R, samples_R1, tokens_S, lengths_N, tokens_NL, rates_D, seeds_N, tokens_RW,
    num_rows, padding, tokens_stride, seeds_stride, WIDTH: tl.constexpr, STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_R + row, row < num_rows, padding)
    length = tl.load(lengths_R + row, row < num_rows, 0)
    first, last = row, row + 1
    if samples_R1 is not None:
        first = tl.load(samples_R1 + row, row < num_rows, 0)
        last = tl.load(samples_R1 + row + 1, row < num_rows, 0)
    count = tl.where(length > 0, last - first, 0)
    step = tl.arange(0, STEPS)[None, :]
    draw = tokens_S + first[:, None] + step
    drawn = tl.load(draw, step < count[:, None], 0).to(tl.int32)
    out, line = count, drawn
    if WIDTH > 1:
        is_draft = step < count[:, None] - 1
        following = tl.load(draw + 1, is_draft, 0)
        position = (length - count + 1)[:, None] + step
        draft = tl.load(tokens_NL + slot[:, None] * tokens_stride + position, is_draft, 0)
        if rates_D is None:
            right = drawn == draft
        else:
            seed = tl.load(seeds_N + slot * seeds_stride)
            key = mix(mix(seed.to(tl.uint64))[:, None] + position.to(tl.uint64))
            coin = uniforms(key, COIN_INDEX + tl.zeros_like(key))
            right = coin < tl.load(rates_D + step, step < WIDTH - 1, 0.0)
        right = right & is_draft & (drawn >= 0) & (following != CORRUPTED)
        num_accepted = tl.min(tl.where(right, STEPS, step), 1)
        out = tl.minimum(num_accepted + 1, count)
        line = tl.where(step < num_accepted[:, None], draft, drawn)
    newest = tl.sum(tl.where(step == out[:, None] - 1, drawn, 0), 1)
    length += out - count
    of_slot = tokens_NL + slot * tokens_stride
    tl.store(lengths_N + slot, length, (slot < padding) & (length > 0))
    tl.store(of_slot + length, tl.maximum(newest, 0), (slot < padding) & (count > 0))
    at = tokens_RW + row[:, None] * WIDTH + step
    inside = (row < num_rows)[:, None] & (step < WIDTH)
    tl.store(at, tl.where(step < out[:, None], line, -1), inside)


def state(num_rows: int, num_slots: int, max_tokens: int, device: torch.device) -> Tensors:
    """Return slots_R, lengths_N, tokens_NL and pages_NM.

    The last quarter of the rows has the padding slot, which is the last one and all zeros.
    """
    generator = torch.Generator(device).manual_seed(num_rows)

    def numbers(high: int, *shape: int) -> Tensor:
        shape = (num_slots + 1, *shape)
        numbers = torch.randint(
            1, high, shape, generator=generator, device=device, dtype=torch.int32
        )
        numbers[-1] = 0
        return numbers

    slots_R = torch.randperm(num_slots, generator=generator, device=device)[:num_rows]
    slots_R[num_rows - num_rows // 4 :] = num_slots
    return (
        slots_R,
        numbers(max_tokens - 16),
        numbers(4, max_tokens + 1),  # few distinct tokens, so that drafts are often right
        numbers(5000, max_tokens // 16 + 1),
    )


def ragged(num_rows: int, width: int, device: torch.device) -> Tensor:
    """Return counts_R. The last quarter of the rows feeds no token."""
    counts_R = torch.arange(num_rows, dtype=torch.int32, device=device) * 7 % width + 1
    counts_R[num_rows - num_rows // 4 :] = 0
    return counts_R


def gather_inputs(num_rows: int, width: int, page_tokens: int, device: torch.device) -> Args:
    """Return inputs of gather_rows, without counts if `width` is 0.

    Padding tokens make them at least one per row, like those of CUDA graphs.
    """
    slots_R, lengths_N, tokens_NL, pages_NM = state(num_rows, 1200, 2000, device)
    counts_R, num_tokens = None, num_rows
    if width:
        counts_R = ragged(num_rows, width, device)
        num_tokens = max(num_rows, int(counts_R.sum())) + num_rows // 5
    sizes = page_tokens, 2000 // page_tokens + 1, num_tokens, max(width, 1)
    return slots_R, counts_R, lengths_N, tokens_NL, pages_NM, *sizes


def write_back_inputs(num_rows: int, width: int, coins: bool, device: torch.device) -> Args:
    """Return inputs of write_back, without samples_R1 if `width` is 0."""
    slots_R, lengths_N, tokens_NL, _ = state(num_rows, 300, 2000, device)
    counts_R, samples_R1 = torch.ones_like(slots_R, dtype=torch.int32), None
    if width:
        counts_R = ragged(num_rows, width, device)
        samples_R1 = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        samples_R1[1:] = counts_R.cumsum(0)
    lengths_R = (lengths_N[slots_R] + counts_R) * (counts_R > 0)
    generator = torch.Generator(device).manual_seed(width)
    tokens_S = torch.randint(
        1, 4, (int(counts_R.sum()),), generator=generator, device=device, dtype=torch.int64
    )
    tokens_S[::7] = reference.CORRUPTED
    rates_D = torch.linspace(0.9, 0.3, max(width - 1, 1), device=device)
    seeds_N = torch.arange(2 * len(lengths_N), device=device)[::2]
    accept = (rates_D, seeds_N) if coins else None
    return slots_R, lengths_R, samples_R1, tokens_S, lengths_N, tokens_NL, max(width, 1), accept


def written(tokens_RW: Tensor, args: Args) -> Tensors:
    return tokens_RW, *args[4:6]


GATHER_ROWS = Kernel(
    "gather_rows",
    gather_rows,
    reference.gather_rows,
    tuple(
        Case(
            f"R={R} W={W or 'none'} page={S}",
            partial(gather_inputs, R, W, S),
            small=R < 1000,
            num_bytes=8 * R * (2000 // S + 1),
        )
        for R, W, S in (
            (1, 0, 16),
            (7, 0, 128),
            (256, 0, 16),
            (256, 0, 128),
            (1, 4, 128),
            (256, 4, 128),
            (7, 1, 16),
            (7, 3, 128),
            (1100, 2, 128),
        )
    ),
)
WRITE_BACK = Kernel(
    "write_back",
    write_back,
    reference.write_back,
    tuple(
        Case(
            f"R={R} W={W or 'none'}" + " coins" * coins,
            partial(write_back_inputs, R, W, coins),
            small=True,
            num_bytes=4 * R * (5 + 4 * W),
        )
        for R, W, coins in (
            (1, 0, False),
            (256, 0, False),
            (1, 4, False),
            (7, 1, False),
            (7, 8, True),
            (200, 3, False),
            (256, 4, False),
            (256, 4, True),
        )
    ),
    outputs=written,
)
