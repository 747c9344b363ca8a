"""Rows, and their layout in pages, for tests and timings of the kernels of latent attention.

Rows are those of decode_cases. The last ninth of a head's elements is the rotated part, the rest is
the latent. Imports no kernel: `plan_decode` is passed as an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanovllm_kernels.attention import latent_reference as reference
from nanovllm_kernels.attention.decode_cases import (
    RAGGED,
    KVRows,
    PlanDecode,
    case_of as paged_case_of,
    drafted,
)
from nanovllm_kernels.attention.reference import paged_inputs
from nanovllm_kernels.case import Args, Case, Tensors

R1 = 576  # elements of a cached row of DeepSeek-R1: 512 and 64
SCALE = 192**-0.5


def case_of(plan_decode: PlanDecode, rows: KVRows) -> Case:
    heads, _, size = rows.heads
    paged, case_inputs = paged_case_of(plan_decode, rows), partial(inputs, plan_decode, rows)
    if not rows.timed_as:
        return Case(paged.name, case_inputs, small=sum(rows.lengths) < 1000 and size < R1)
    row = reference.row_size(size - size // 9, size // 9, is_fp8=True) if rows.is_fp8 else 2 * size
    num_elements = heads * (2 * size - size // 9)  # elements of a query and its result
    new = list(zip(rows.counts, rows.lengths, strict=True))
    pairs = sum(n * length - n * (n - 1) // 2 for n, length in new)
    num_bytes = row * sum(rows.lengths) + 2 * num_elements * sum(rows.counts)
    return Case(paged.name, case_inputs, num_bytes=num_bytes, num_flops=2 * num_elements * pairs)


def inputs(plan_decode: PlanDecode, rows: KVRows, device: torch.device) -> Args:
    """Return the arguments of a decode kernel, with the layers' memory layout of queries."""
    heads, *_, size = rows.heads
    q, k, _, table, starts, lengths = paged_inputs(
        rows.lengths, rows.counts, rows.heads, rows.page_tokens, rows.dtype, device, rows.kind
    )
    pages, sizes = k[:, :, 0], (size - size // 9, size // 9)
    if rows.is_fp8:
        row = reference.row_size(*sizes, is_fp8=True)
        like = torch.empty(1, 1, row, dtype=torch.uint8, device=device)
        pages = reference.stored(*pages.flatten(0, 1).split(sizes, 1), like)
        pages = pages.unflatten(0, (-1, rows.page_tokens))
    plan = plan_decode(lengths, pages, heads, max(1, rows.width))
    q_THX = q[..., : sizes[0]].transpose(0, 1).contiguous().transpose(0, 1)
    ragged = (starts, rows.width) if rows.width else (None, 1)
    return q_THX, q[..., sizes[0] :], pages, table, lengths, plan, SCALE, *ragged


def by_position(decode: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a decode kernel that takes `starts_R1` and `width` as keywords.

    The wrapper takes them as positional arguments after the scale, like the arguments of cases.
    """

    def run(*args: Any, **more: bool) -> Tensor:  # noqa: ANN401
        *rows, starts_R1, width = args
        return decode(*rows, starts_R1=starts_R1, width=width, **more)

    return run


def weighted_sizes(expected: Tensors, args: Args) -> Tensors:
    """Return an error scale: the sum of weight * |latent|.

    Errors from rounded weights and from a rounded result are proportional to it. The sum of weight
    * latent itself may cancel.
    """
    return (by_position(reference.latent_decode)(*args, of_sizes=True),)


def all_rows() -> list[KVRows]:
    every = [*checked_rows(), *timed_rows()]
    return [*every, *(rows._replace(is_fp8=True) for rows in every if rows.dtype.itemsize == 2)]


def checked_rows() -> list[KVRows]:
    """Return rows of one token each, then of 0 to W. The last rows have no tokens and length 0."""
    lengths = (8, 130, 9, 64, 65, 1, 300, 17, 66, 128, 131, 0, 0, 0)
    several = [
        KVRows(lengths, (heads, 1, size), page, dtype, "newest", width=width)
        for heads, size, page, width, dtype in (
            (4, 72, 16, 1, torch.bfloat16),
            (16, 72, 64, 4, torch.bfloat16),
            (6, 72, 64, 2, torch.bfloat16),
            (3, 108, 32, 3, torch.float32),
        )
    ]
    long = (2000, *lengths[:-3], 5000, *lengths[-3:])
    several += [KVRows(long, (h, 1, R1), 64, width=w) for h in (16, 128) for w in (2, 3, 4)]
    return [
        KVRows((1,), (2, 1, 72), 16),
        KVRows((700,), (2, 1, 72), 16),
        KVRows(RAGGED, (16, 1, 72), 64),
        KVRows(RAGGED, (5, 1, 108), 32),
        KVRows(RAGGED, (70, 1, 36), 128),  # more heads than a program has
        KVRows(RAGGED, (4, 1, 72), 16, torch.float32),
        *(KVRows((2000, *RAGGED, 5000), (heads, 1, R1), 128) for heads in (16, 32, 128)),
        *map(drafted, several),
    ]


def timed_rows() -> list[KVRows]:
    order = torch.randperm(128, generator=torch.Generator().manual_seed(3))
    spread_lengths = tuple(torch.linspace(100, 4096, 128).int()[order].tolist())
    shapes = [
        ((length,) * R, heads, 0, f"R={R} ctx={length}")
        for R, length in ((128, 4096), (1, 4096), (1, 256), (64, 1024), (256, 256))
        for heads in (16, 128)
    ]
    shapes += [((4096,) * 128, 16, width, f"R=128 ctx=4096 W={width}") for width in (2, 4)]
    shapes.append((spread_lengths, 16, 0, "R=128 ctx=100..4096"))
    return [
        KVRows(lengths, (h, 1, R1), 128, new=(w,) * len(lengths) * bool(w), width=w, timed_as=name)
        for lengths, h, w, name in shapes
    ]
