"""Causal attention over pages in float32, row by row: the meaning of the paged kernels.

Also the inputs and the error bound that their cases share. Knows no kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanovllm_kernels.case import Args, Tensors, normal
from nanovllm_kernels.reference import quantised


def paged_prefill(
    q_THA: Tensor,
    k_PSGA: Tensor,
    v_PSGA: Tensor,
    page_table_RM: Tensor,
    starts_R1: Tensor,
    lengths_R: Tensor,
    max_new: int,
    scales_2G: Tensor | None = None,
) -> Tensor:
    """o_THA, float32. Row r's queries starts_R1[r]:starts_R1[r + 1] are its last tokens.

    `scales_2G`: what keys and values are multiplied by, in a cache of 8 bits.
    """
    k_PSGA, v_PSGA = dequantised(k_PSGA, v_PSGA, scales_2G)
    starts, lengths = starts_R1.tolist(), lengths_R.tolist()
    page_tokens, num_kv_heads, head_size = k_PSGA.shape[1:]
    o_THA = q_THA.new_empty(*q_THA.shape[:2], v_PSGA.shape[3], dtype=torch.float32)
    for row, length in enumerate(lengths):
        rows = slice(starts[row], starts[row + 1])
        q_TGHA = q_THA[rows].float().unflatten(1, (num_kv_heads, -1))
        pages = page_table_RM[row, : -(-length // page_tokens)].long()
        k_LGA = k_PSGA[pages].flatten(0, 1)[:length].float()
        v_LGA = v_PSGA[pages].flatten(0, 1)[:length].float()
        scores = torch.einsum("tgha,lga->tghl", q_TGHA, k_LGA) / math.sqrt(head_size)
        at_L = torch.arange(length, device=q_THA.device)
        seen_TL = at_L <= at_L[length - len(q_TGHA) :, None]
        weights = scores.masked_fill(~seen_TL[:, None, None], -torch.inf).softmax(-1)
        o_THA[rows] = torch.einsum("tghl,lga->tgha", weights, v_LGA).flatten(1, 2)
    return o_THA


def paged_decode(
    q_THA: Tensor,
    k_PSGA: Tensor,
    v_PSGA: Tensor,
    page_table_RM: Tensor,
    lengths_R: Tensor,
    plan_N5: Tensor,
    *,
    starts_R1: Tensor | None = None,
    width: int = 1,
    scales_2G: Tensor | None = None,
) -> Tensor:
    """o_THA, float32. Without `starts_R1` each row has one query. The plan only divides the work.

    Of c queries, the i-th sees the first lengths_R[r] - (c - 1 - i) tokens of row r.
    """
    if starts_R1 is None:
        starts_R1 = torch.arange(len(lengths_R) + 1)
    rows = page_table_RM, starts_R1, lengths_R, width
    return paged_prefill(q_THA, k_PSGA, v_PSGA, *rows, scales_2G)


def dequantised(k_PSGA: Tensor, v_PSGA: Tensor, scales_2G: Tensor | None) -> tuple[Tensor, Tensor]:
    """In float32; as they are where there are no scales."""
    if scales_2G is None:
        return k_PSGA, v_PSGA
    k_scale_G, v_scale_G = scales_2G
    return k_PSGA.float() * k_scale_G[:, None], v_PSGA.float() * v_scale_G[:, None]


def weighted_sizes(reference: Callable[..., Tensor]) -> Callable[[Tensors, Args], Tensors]:
    """The sum of weight * |value|: what rounded weights and a rounded result err in proportion to.

    Values themselves may cancel.
    """

    def scale(expected: Tensors, args: Args) -> Tensors:
        q_THA, k_PSGA, v_PSGA, *rest = args
        if v_PSGA.itemsize > 1:
            size_PSGA = v_PSGA.abs()
        else:  # at least the smallest number: beside a value of 0 the least weights may be lost
            size_PSGA = (v_PSGA.view(torch.uint8) & 0x7F).clamp(min=1).view(v_PSGA.dtype)
        return (reference(q_THA, k_PSGA, size_PSGA, *rest),)

    return scale


def in_8_bits(k_PSGA: Tensor, v_PSGA: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Such a cache in float8_e4m3fn, and its scales_2G, each head's another one."""
    scales_2G = 2.0 ** normal(k_PSGA.device, 2, k_PSGA.shape[2], dtype=torch.float32, seed=6)
    k_PSGA, v_PSGA = (
        quantised(pages_PSGA, scale_G[:, None])
        for pages_PSGA, scale_G in zip((k_PSGA, v_PSGA), scales_2G, strict=True)
    )
    return k_PSGA, v_PSGA, scales_2G


def paged_inputs(
    lengths: Sequence[int],
    new: Sequence[int],
    heads: tuple[int, int, int],
    page_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    kind: str = "normal",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q_THA, k_PSGA, v_PSGA, page_table_RM, starts_R1, lengths_R of rows with scattered pages.

    heads: (H, G, A). Cells that belong to nobody hold NaN. A row of length 1 lives in page 0, as
    rows that pad a graph do; one of length 0 nowhere. A key outweighs all others for some heads:
    in `spike` a late one, in `newest` the last, which only the row's last query may see.
    """
    H, G, A = heads
    counts = [-(-length // page_tokens) for length in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(7)) + 1
    table_RM = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    q_THA = normal(device, sum(new), H, A, dtype=dtype, seed=2)
    cache = normal(device, 2, sum(counts) + 1, page_tokens, G, A, dtype=dtype, seed=1)
    cache[:, 0, 1:] = torch.nan
    used = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        pages = order[used : used + count]
        used += count
        if length > 1:
            table_RM[row, :count] = pages
            past = length - (count - 1) * page_tokens
            cache[:, pages[-1], past:] = torch.nan
            if kind == "spike":
                cache[0, pages[count * 9 // 10], 0] = 4 * q_THA[sum(new[:row]), :: H // G]
            if kind == "newest":
                first = sum(new[:row])
                queries_TGA = q_THA[first : first + new[row], :: H // G]
                cache[0, pages[-1], past - 1] = 4 * queries_TGA.sum(0)
    starts_R1 = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lengths_R = torch.tensor(lengths, dtype=torch.int32, device=device)
    return q_THA, cache[0], cache[1], table_RM.to(device), starts_R1.to(device), lengths_R
