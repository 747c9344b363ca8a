"""Float32 reference of causal attention over pages, row by row, for the paged kernels.

Also has the inputs and the error bound that their cases share. Imports no kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanovllm_kernels.case import Args, Tensors, normal
from nanovllm_kernels.norms.reference import quantised


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
    """Return o_THA in float32. Row r's queries, starts_R1[r]:starts_R1[r + 1], are its last tokens.

    `scales_2G` has the dequantisation factors of keys and values per head of an 8-bit cache.
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
    """Return o_THA in float32. Without `starts_R1` each row has one query.

    If a row has c queries, the i-th sees the first lengths_R[r] - (c - 1 - i) tokens. The plan only
    divides the work, so it does not change the result.
    """
    if starts_R1 is None:
        starts_R1 = torch.arange(len(lengths_R) + 1)
    rows = page_table_RM, starts_R1, lengths_R, width
    return paged_prefill(q_THA, k_PSGA, v_PSGA, *rows, scales_2G)


def dequantised(k_PSGA: Tensor, v_PSGA: Tensor, scales_2G: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return keys and values in float32, or unchanged if there are no scales."""
    if scales_2G is None:
        return k_PSGA, v_PSGA
    k_scale_G, v_scale_G = scales_2G
    return k_PSGA.float() * k_scale_G[:, None], v_PSGA.float() * v_scale_G[:, None]


def weighted_sizes(reference: Callable[..., Tensor]) -> Callable[[Tensors, Args], Tensors]:
    """Return an error scale: the sum of weight * |value|.

    Errors from rounded weights and from a rounded result are proportional to it. The sum of weight
    * value itself may cancel.
    """

    def scale(expected: Tensors, args: Args) -> Tensors:
        q_THA, k_PSGA, v_PSGA, *rest = args
        if v_PSGA.itemsize > 1:
            size_PSGA = v_PSGA.abs()
        else:  # smallest number at least: with a value of 0, small weights may vanish
            size_PSGA = (v_PSGA.view(torch.uint8) & 0x7F).clamp(min=1).view(v_PSGA.dtype)
        return (reference(q_THA, k_PSGA, size_PSGA, *rest),)

    return scale


def in_8_bits(k_PSGA: Tensor, v_PSGA: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cache in float8_e4m3fn and its scales_2G, which differ between heads."""
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
    """Return q_THA, k_PSGA, v_PSGA, page_table_RM, starts_R1 and lengths_R, with scattered pages.

    `heads` is (H, G, A). Unused cells hold NaN. A row of length 1 lies in page 0, like the padding
    rows of a CUDA graph; a row of length 0 has no page. One key outweighs all others for some
    heads, unless `kind` is "normal". With "spike" it is a late one, with "newest" the last, which
    only the row's last query may see.
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
