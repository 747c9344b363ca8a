"""Pages of float8_e4m3fn to pages of 16 bits, for attention that knows no numbers of 8 bits."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels import attention_reference as reference
from nanovllm_kernels.case import Args, Case, Kernel

LINES = 64  # of a token's head, that a program takes


def widen_pages(
    k_PSGA: Tensor,
    v_PSGA: Tensor,
    scales_2G: Tensor,
    page_table_RM: Tensor,
    lengths_R: Tensor,
    wide_2PSGA: Tensor,
) -> Tensor:
    """Returns wide_2PSGA: its page 1 + r * M + m becomes entry m of row r of the page table, keys
    and values times their heads' scales. Page 0 and pages past a row's length stay as they were.
    """
    num_rows, most_pages = page_table_RM.shape
    page_tokens, num_kv_heads, width = k_PSGA.shape[1:]
    assert k_PSGA.is_contiguous() and v_PSGA.is_contiguous() and wide_2PSGA.is_contiguous()
    assert wide_2PSGA.shape[2:] == k_PSGA.shape[1:] == v_PSGA.shape[1:]
    assert wide_2PSGA.shape[1] > num_rows * most_pages
    lines = page_tokens * num_kv_heads
    widen_kernel[(num_rows * most_pages, triton.cdiv(lines, LINES), 2)](
        k_PSGA,
        v_PSGA,
        scales_2G,
        page_table_RM,
        lengths_R,
        wide_2PSGA,
        page_table_RM.stride(0),
        most_pages,
        wide_2PSGA.stride(0),
        S=page_tokens,
        G=num_kv_heads,
        A=width,
        A_BLOCK=triton.next_power_of_2(width),
        LINES=LINES,
        num_warps=4,
    )
    return wide_2PSGA


@triton.jit(
    do_not_specialize=["table_stride", "most_pages"],
    do_not_specialize_on_alignment=["page_table_RM", "lengths_R"],
)
def widen_kernel(
    k_PSGA,
    v_PSGA,
    scales_2G,
    page_table_RM,
    lengths_R,
    wide_2PSGA,
    table_stride,
    most_pages,
    kind_stride,
    S: tl.constexpr,
    G: tl.constexpr,
    A: tl.constexpr,
    A_BLOCK: tl.constexpr,
    LINES: tl.constexpr,
):
    row, nth, kind = tl.program_id(0) // most_pages, tl.program_id(0) % most_pages, tl.program_id(2)
    if nth * S < tl.load(lengths_R + row):
        page = tl.load(page_table_RM + row.to(tl.int64) * table_stride + nth).to(tl.int64)
        line = tl.program_id(1) * LINES + tl.arange(0, LINES)
        a = tl.arange(0, A_BLOCK)[None, :]
        inside = (line < S * G)[:, None] & (a < A)
        at = line[:, None] * A + a
        pages = k_PSGA if kind == 0 else v_PSGA
        x = tl.load(pages + page * (S * G * A) + at, inside, 0.0).to(tl.float32)
        x *= tl.load(scales_2G + kind * G + line % G)[:, None]
        to = wide_2PSGA + kind.to(tl.int64) * kind_stride
        to += (1 + tl.program_id(0)).to(tl.int64) * (S * G * A)
        tl.store(to + at, x.to(wide_2PSGA.dtype.element_ty), inside)


def widened(
    k_PSGA: Tensor,
    v_PSGA: Tensor,
    scales_2G: Tensor,
    page_table_RM: Tensor,
    lengths_R: Tensor,
    wide_2PSGA: Tensor,
) -> Tensor:
    """The meaning of widen_pages."""
    wide = reference.dequantised(k_PSGA, v_PSGA, scales_2G)
    most_pages, page_tokens = page_table_RM.shape[1], k_PSGA.shape[1]
    for row, length in enumerate(lengths_R.tolist()):
        used = -(-length // page_tokens)
        for kind, pages_PSGA in enumerate(wide):
            first = 1 + row * most_pages
            found = pages_PSGA[page_table_RM[row, :used].long()]
            wide_2PSGA[kind, first : first + used] = found.to(wide_2PSGA.dtype)
    return wide_2PSGA


def inputs(
    lengths: tuple[int, ...], heads: tuple[int, int, int], page_tokens: int, device: torch.device
) -> Args:
    new = (1,) * len(lengths)
    paged = reference.paged_inputs(lengths, new, heads, page_tokens, torch.bfloat16, device)
    _, k_PSGA, v_PSGA, table_RM, _, lengths_R = paged
    cache = reference.in_8_bits(k_PSGA.nan_to_num(2.0), v_PSGA.nan_to_num(3.0))
    shape = 2, 1 + table_RM.numel(), *k_PSGA.shape[1:]
    wide_2PSGA = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    return *cache, table_RM, lengths_R, wide_2PSGA


def cases() -> tuple[Case, ...]:
    shapes = [
        ((1, 130, 7, 64, 200, 0, 33), (4, 2, 128), 16),
        ((300, 17), (3, 1, 80), 48),
        ((5,), (2, 2, 256), 16),
        ((33000, 700, 1, 9000), (48, 8, 128), 128),
    ]
    checked = [
        Case(f"rows={len(lengths)} longest={max(lengths)} HGA={heads} page={page}",
             partial(inputs, lengths, heads, page), small=max(lengths) <= 300)
        for lengths, heads, page in shapes
    ]  # fmt: skip
    timed = [
        Case(f"{len(lengths)} x {lengths[0]} HGA={heads} page=128",
             partial(inputs, lengths, heads, 128), num_bytes=3 * 2 * sum(lengths) * 8 * 128)
        for lengths, heads in (((4000,) * 16, (32, 8, 128)), ((40960,), (48, 8, 128)))
    ]  # fmt: skip
    return (*checked, *timed)


# The product is rounded once, of the same float32 number; the interpreter truncates.
WIDEN_PAGES = Kernel("widen_pages", widen_pages, widened, cases(), ulps_16=0.5)
