"""Deltas of LoRA adapters in two launches: h = x A^T, then y += h B.

The reference is add_deltas of reference.py. A program of the first launch has the tokens of a block
and one page of ranks, and ends at once if no token has the page's adapter. One of the second has
some columns of y, and reads only the pages of its tokens' adapters. All sizes and counts are on the
device, so CUDA graphs can contain both.

Decision: pages are added in ascending order, and those of an adapter ascend. A row's sum thus has
the same order whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.adapters import reference
from nanovllm_kernels.adapters.reference import NO_ADAPTER, NO_OWNER, RANK_PAGE
from nanovllm_kernels.case import Args, Case, Kernel, Tensors, bits, normal
from nanovllm_kernels.triton_parts import dot

TOKENS, INPUTS, COLUMNS = 16, 128, 64  # of a program
MOST_PARTS = 4  # those of Qwen3.5's recurrent layers: qkv, z, b and a


def add_deltas(
    x_TD: Tensor,
    y_TN: Tensor,
    a_RID: Tensor,
    b_RN: Tensor,
    widths: tuple[int, ...],
    adapter_T: Tensor,
    owner_P: Tensor,
) -> None:
    """Add the deltas to y, in place. See reference.add_deltas."""
    num_tokens, num_pages = len(x_TD), len(owner_P)
    num_ranks, num_parts, num_inputs = a_RID.shape
    assert num_parts <= MOST_PARTS and x_TD.stride(1) == y_TN.stride(1) == 1
    assert a_RID.stride(2) == b_RN.stride(1) == 1
    h_ITR = x_TD.new_empty(num_parts, num_tokens, num_ranks)
    blocks = triton.cdiv(num_tokens, TOKENS)
    shrink_kernel[(num_pages, blocks, num_parts)](
        x_TD, a_RID, h_ITR, adapter_T, owner_P, num_tokens, num_inputs, num_ranks,
        x_TD.stride(0), a_RID.stride(0), a_RID.stride(1), PAGE=RANK_PAGE, TOKENS=TOKENS,
        INPUTS=INPUTS,
    )  # fmt: skip
    padded = (*widths, 0, 0, 0)[:MOST_PARTS]
    columns = sum(triton.cdiv(width, COLUMNS) for width in widths)
    expand_kernel[(columns, blocks)](
        h_ITR, b_RN, y_TN, adapter_T, owner_P, *padded, num_tokens, num_ranks, num_pages,
        y_TN.stride(0), b_RN.stride(0), PAGE=RANK_PAGE, TOKENS=TOKENS, COLUMNS=COLUMNS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def shrink_kernel(
    x_TD, a_RID, h_ITR, adapter_T, owner_P, num_tokens, num_inputs, num_ranks,
    x_stride, a_stride, part_stride, PAGE: tl.constexpr, TOKENS: tl.constexpr,
    INPUTS: tl.constexpr,
):  # fmt: skip
    page, part = tl.program_id(0), tl.program_id(2)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_token = t < num_tokens
    is_own = (tl.load(adapter_T + t, is_token, -1) == tl.load(owner_P + page)) & is_token
    if tl.max(is_own.to(tl.int32), 0) > 0:
        r = page * PAGE + tl.arange(0, PAGE)
        x_at = x_TD + t.to(tl.int64)[:, None] * x_stride
        a_at = a_RID + r.to(tl.int64)[None, :] * a_stride + part * part_stride
        h = tl.zeros([TOKENS, PAGE], tl.float32)
        for first in range(0, num_inputs, INPUTS):
            d = first + tl.arange(0, INPUTS)
            is_input = d < num_inputs
            x = tl.load(x_at + d[None, :], is_own[:, None] & is_input[None, :], 0.0)
            a = tl.load(a_at + d[:, None], is_input[:, None], 0.0)
            h = dot(x, a, h)
        h_at = h_ITR + (part * num_tokens + t).to(tl.int64)[:, None] * num_ranks + r[None, :]
        tl.store(h_at, h.to(h_ITR.dtype.element_ty), is_token[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def expand_kernel(
    h_ITR, b_RN, y_TN, adapter_T, owner_P, width_0, width_1, width_2, width_3, num_tokens,
    num_ranks, num_pages, y_stride, b_stride, PAGE: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_token = t < num_tokens
    adapter = tl.load(adapter_T + t, is_token, -1)
    has_adapter = adapter >= 0
    if tl.max(has_adapter.to(tl.int32), 0) > 0:
        block, part, start, width = tl.program_id(0), 0, 0, width_0
        end_0 = tl.cdiv(width_0, COLUMNS)
        end_1 = end_0 + tl.cdiv(width_1, COLUMNS)
        end_2 = end_1 + tl.cdiv(width_2, COLUMNS)
        if block >= end_2:
            block, part, start, width = block - end_2, 3, width_0 + width_1 + width_2, width_3
        elif block >= end_1:
            block, part, start, width = block - end_1, 2, width_0 + width_1, width_2
        elif block >= end_0:
            block, part, start, width = block - end_0, 1, width_0, width_1
        n = block * COLUMNS + tl.arange(0, COLUMNS)
        is_column = n < width
        n += start
        more = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for page in range(num_pages):
            is_own = has_adapter & (adapter == tl.load(owner_P + page))
            if tl.max(is_own.to(tl.int32), 0) > 0:
                r = page * PAGE + tl.arange(0, PAGE)
                h_at = h_ITR + (part * num_tokens + t).to(tl.int64)[:, None] * num_ranks
                h = tl.load(h_at + r[None, :], is_own[:, None], 0.0)
                b_at = b_RN + r.to(tl.int64)[:, None] * b_stride + n[None, :]
                more = dot(h, tl.load(b_at, is_column[None, :], 0.0), more)
        y_at = y_TN + t.to(tl.int64)[:, None] * y_stride + n[None, :]
        is_written = has_adapter[:, None] & is_column[None, :]
        y = tl.load(y_at, is_written, 0.0).to(tl.float32) + more
        tl.store(y_at, y.to(y_TN.dtype.element_ty), is_written)


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Sizes of a case. `ranks` are those of the adapters on the device."""

    tokens: int
    inputs: int
    widths: tuple[int, ...]
    ranks: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        widths, ranks = ("+".join(map(str, sizes)) for sizes in (self.widths, self.ranks))
        return f"T={self.tokens} D={self.inputs} N={widths} ranks={ranks} {bits(self.dtype)}"


def inputs(shape: DeltaShape, device: torch.device) -> Args:
    """Return arguments of add_deltas. One page has no owner, and every third token no adapter."""
    pages = [-(-rank // RANK_PAGE) for rank in shape.ranks]
    owners = [nth for nth, count in enumerate(pages) for _ in range(count)]
    owners = [NO_OWNER, *owners[::2], *owners[1::2]]  # pages of an adapter need not be adjacent
    num_ranks, parts, width = RANK_PAGE * len(owners), len(shape.widths), sum(shape.widths)
    row = parts * shape.inputs + width
    ranks_RX = normal(device, num_ranks, row + 24, dtype=shape.dtype)  # rows of other products
    a_RX, b_RN = ranks_RX[:, 8 : 8 + parts * shape.inputs], ranks_RX[:, 8 : 8 + row][:, -width:]
    x_TD = normal(device, shape.tokens, shape.inputs, dtype=shape.dtype, seed=1)
    y_TN = normal(device, shape.tokens, width, dtype=shape.dtype, seed=2)
    adapters = [NO_ADAPTER if t % 3 == 2 else t % len(pages) for t in range(shape.tokens)]
    adapter_T, owner_P = (
        torch.tensor(values, dtype=torch.int32, device=device) for values in (adapters, owners)
    )
    a_RID = a_RX.unflatten(1, (parts, shape.inputs))
    return x_TD / shape.inputs**0.5, y_TN, a_RID, b_RN, shape.widths, adapter_T, owner_P


def written(_: object, args: Args) -> Tensors:
    return (args[1],)


def sizes(_: Tensors, args: Args) -> Tensors:
    """Return the sum of the absolute terms of each element."""
    x, y, a, b, *rest = args
    y = y.abs().double()
    reference.add_deltas(x.abs().double(), y, a.abs().double(), b.abs().double(), *rest)
    return (y,)


def timed(tokens: int, num_adapters: int, shape: tuple[int, tuple[int, ...]]) -> Case:
    """Return a timed case of rank 16. All adapters are read once."""
    num_inputs, widths = shape
    made = DeltaShape(tokens, num_inputs, widths, (16,) * num_adapters)
    num_bytes = 2 * 16 * num_adapters * (num_inputs * len(widths) + sum(widths))
    num_bytes += 2 * tokens * (num_inputs + 2 * sum(widths))
    make: Callable[[torch.device], Args] = partial(inputs, made)
    return Case(f"timed {made.name}", make, num_bytes=num_bytes)


SHAPES = (
    DeltaShape(1, 64, (48,), (1,)),
    DeltaShape(7, 200, (72, 16, 16), (16, 33, 4)),
    DeltaShape(37, 128, (130, 130), (40, 20, 16)),
    DeltaShape(33, 96, (64, 40), (8, 16), torch.float32),
    DeltaShape(20, 64, (80, 70, 4, 4), (16, 20), torch.float32),
)
SIZES_8B = (4096, (4096, 1024, 1024)), (4096, (12288, 12288)), (12288, (4096,))
ADD_DELTAS = Kernel(
    "add_deltas",
    add_deltas,
    reference.add_deltas,
    (
        *(Case(shape.name, partial(inputs, shape), small=True) for shape in SHAPES),
        *(timed(tokens, min(tokens, 8), size) for tokens in (1, 64) for size in SIZES_8B),
    ),
    ulps_16=3,
    ulps_32=16,
    scale=sizes,
    outputs=written,
)
