"""Slots to the inputs of a decode step in one launch, and the step's outcome back in another.

Meaning: nanovllm_kernels.batch_reference. Plain torch takes some twenty launches for the two, which
at one row of a small model is a tenth of the step.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels import batch_reference as reference
from nanovllm_kernels.case import Args, Case, Kernel, Tensors
from nanovllm_kernels.sampling_reference import CORRUPTED

PAGES = 512  # columns of the page table a program copies
ROWS = 128  # rows a program writes back


def gather_decode(
    slots_R: Tensor,
    lengths_N: Tensor,
    tokens_NL: Tensor,
    pages_NM: Tensor,
    page_tokens: int,
    num_pages: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_rows, device = slots_R.shape[0], slots_R.device
    ids_R, positions_R, slot_mapping_R = torch.empty(3, num_rows, dtype=torch.int64, device=device)
    lengths_R = torch.empty(num_rows, dtype=torch.int32, device=device)
    table_RM = torch.empty(num_rows, num_pages, dtype=torch.int32, device=device)
    gather_kernel[(num_rows, triton.cdiv(num_pages, PAGES))](
        slots_R,
        lengths_N,
        tokens_NL,
        pages_NM,
        ids_R,
        positions_R,
        slot_mapping_R,
        lengths_R,
        table_RM,
        tokens_NL.shape[1],
        pages_NM.shape[1],
        num_pages,
        page_tokens,
        BLOCK=PAGES,
    )
    return ids_R, positions_R, slot_mapping_R, lengths_R, table_RM


@triton.jit
def gather_kernel(
    slots_R,
    lengths_N,
    tokens_NL,
    pages_NM,
    ids_R,
    positions_R,
    slot_mapping_R,
    lengths_R,
    table_RM,
    tokens_stride,
    pages_stride,
    num_pages,
    page_tokens,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots_R + row)
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = tl.load(pages_NM + slot * pages_stride + page, page < num_pages, 0)
    tl.store(table_RM + row.to(tl.int64) * num_pages + page, held, page < num_pages)
    if tl.program_id(1) == 0:
        position = tl.load(lengths_N + slot)
        at = tl.load(pages_NM + slot * pages_stride + position // page_tokens).to(tl.int64)
        token = tl.load(tokens_NL + slot * tokens_stride + position)
        tl.store(ids_R + row, token.to(tl.int64))
        tl.store(positions_R + row, position.to(tl.int64))
        tl.store(slot_mapping_R + row, at * page_tokens + position % page_tokens)
        tl.store(lengths_R + row, position + 1)


def write_back(
    slots_R: Tensor,
    lengths_R: Tensor,
    slots_S: Tensor,
    positions_S: Tensor,
    tokens_S: Tensor,
    lengths_N: Tensor,
    tokens_NL: Tensor,
) -> None:
    num_rows, num_sampled = slots_R.shape[0], slots_S.shape[0]
    write_back_kernel[(triton.cdiv(max(num_rows, num_sampled), ROWS),)](
        slots_R,
        lengths_R,
        slots_S,
        positions_S,
        tokens_S,
        lengths_N,
        tokens_NL,
        num_rows,
        num_sampled,
        lengths_N.shape[0] - 1,
        tokens_NL.shape[1],
        BLOCK=ROWS,
    )


@triton.jit(do_not_specialize=["num_rows", "num_sampled"])
def write_back_kernel(
    slots_R,
    lengths_R,
    slots_S,
    positions_S,
    tokens_S,
    lengths_N,
    tokens_NL,
    num_rows,
    num_sampled,
    padding,
    tokens_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_R + row, row < num_rows, padding)
    length = tl.load(lengths_R + row, row < num_rows, 0)
    tl.store(lengths_N + slot, length, slot < padding)
    slot = tl.load(slots_S + row, row < num_sampled, padding)
    position = tl.load(positions_S + row, row < num_sampled, 0)
    token = tl.load(tokens_S + row, row < num_sampled, 0).to(tl.int32)
    token = tl.maximum(token, 0)  # CORRUPTED is no token
    tl.store(tokens_NL + slot * tokens_stride + position, token, slot < padding)


def state(num_rows: int, num_slots: int, width: int, device: torch.device) -> Tensors:
    """slots_R, lengths_N, tokens_NL, pages_NM."""
    generator = torch.Generator(device).manual_seed(num_rows)

    def numbers(high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(1, high, shape, generator=generator, device=device, dtype=dtype)

    slots_R = torch.randperm(num_slots, generator=generator, device=device)[:num_rows]
    return (
        slots_R,
        numbers(width, num_slots),
        numbers(1000, num_slots, width + 1),
        numbers(5000, num_slots, width // 16 + 1),
    )


def gather_inputs(num_rows: int, page_tokens: int, device: torch.device) -> Args:
    slots_R, lengths_N, tokens_NL, pages_NM = state(num_rows, 300, 2000, device)
    return slots_R, lengths_N, tokens_NL, pages_NM, page_tokens, 2000 // page_tokens + 1


def write_back_inputs(num_rows: int, num_sampled: int, device: torch.device) -> Args:
    slots_R, lengths_N, tokens_NL, _ = state(num_rows, 300, 2000, device)
    slots_R[-1] = 299  # the padding slot
    lengths_N[-1].zero_()
    tokens_NL[-1].zero_()
    lengths_R = lengths_N[slots_R] + 1
    slots_S = slots_R.flip(0)[:num_sampled]
    positions_S = lengths_R.flip(0)[:num_sampled].long()
    tokens_S = torch.arange(num_sampled, device=device) + 7
    tokens_S[::3] = CORRUPTED
    return slots_R, lengths_R, slots_S, positions_S, tokens_S, lengths_N, tokens_NL


def written(_: object, args: Args) -> Tensors:
    return args[-2:]


GATHER_DECODE = Kernel(
    "gather_decode",
    gather_decode,
    reference.gather_decode,
    tuple(
        Case(f"R={R} page={S}", partial(gather_inputs, R, S), small=True)
        for R in (1, 7, 256)
        for S in (16, 128)
    ),
)
WRITE_BACK = Kernel(
    "write_back",
    write_back,
    reference.write_back,
    tuple(
        Case(f"R={R} S={S}", partial(write_back_inputs, R, S), small=True)
        for R, S in ((1, 1), (7, 3), (256, 256), (200, 131))
    ),
    outputs=written,
)
