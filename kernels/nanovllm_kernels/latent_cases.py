"""What kernels over pages of latents are checked and timed with: rows, and how they lie in memory.

Knows no kernel: what plans the work is given.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm_kernels import latent_reference as reference
from nanovllm_kernels.case import Args, Case, Tensors, bits, normal

PlanDecode = Callable[..., Any]  # a kernel's plan_decode
RAGGED = (1, 130, 7, 64, 65, 1, 300, 17, 128)
R1 = (512, 64)  # DeepSeek-R1's latent, and what of a key is rotated
SCALE = 192**-0.5


class Rows(NamedTuple):
    """A case's rows: of each, the tokens in the cache, and how many of them are new if not one."""

    lengths: tuple[int, ...]
    heads: int
    sizes: tuple[int, int] = R1
    page_tokens: int = 64
    dtype: torch.dtype = torch.bfloat16
    width: int = 0  # most new tokens of a row; 0: one each, and no starts_R1
    newest: bool = False  # the last key outweighs all others, which only the last query may see
    is_fp8: bool = False  # the cache; queries are of dtype
    timed_as: str = ""

    @property
    def counts(self) -> tuple[int, ...]:
        """0 to `width` new tokens in turn, from the most down; where timed as many as can be."""
        if self.width == 0:
            return (1,) * len(self.lengths)
        turns = (self.width - nth % (self.width + 1) for nth in range(len(self.lengths)))
        most = (self.width,) * len(self.lengths) if self.timed_as else tuple(turns)
        return tuple(map(min, zip(most, self.lengths, strict=True)))


def case_of(plan_decode: PlanDecode, rows: Rows) -> Case:
    lengths, heads, (rank, rotated), dtype = rows.lengths, rows.heads, rows.sizes, rows.dtype
    made = partial(inputs, plan_decode, rows)
    shape = f"H={heads} {rank}+{rotated} page={rows.page_tokens}"
    shape += f" W={rows.width}" * bool(rows.width) + " fp8" * rows.is_fp8
    if not rows.timed_as:
        name = f"rows={len(lengths)} longest={max(lengths)} {shape} {bits(dtype)}"
        name += " newest" * rows.newest
        return Case(name, made, small=sum(lengths) < 1000 and rank * heads < 8192)
    row = reference.row_size(rank, rotated, is_fp8=rows.is_fp8)
    num_bytes = row * (1 if rows.is_fp8 else dtype.itemsize) * sum(lengths)
    num_bytes += (2 * rank + rotated) * dtype.itemsize * heads * sum(rows.counts)
    new = zip(rows.counts, lengths, strict=True)
    pairs = sum(n * length - n * (n - 1) // 2 for n, length in new)
    num_flops = 2 * (2 * rank + rotated) * heads * pairs
    return Case(f"{rows.timed_as} {shape}", made, num_bytes=num_bytes, num_flops=num_flops)


def inputs(plan_decode: PlanDecode, rows: Rows, device: torch.device) -> Args:
    heads, width = rows.heads, rows.width
    q, rotated, pages, table, starts, lengths = latent_inputs(rows, device)
    plan = plan_decode(lengths, pages, heads, max(1, width))
    ragged = (starts, width) if width else (None, 1)
    return q, rotated, pages, table, lengths, plan, SCALE, *ragged


def latent_inputs(rows: Rows, device: torch.device) -> tuple[Tensor, ...]:
    """q_THX, rotated_THA, pages_PSX, page_table_RM, starts_R1, lengths_R with scattered pages.

    Queries lie as layers have them. Cells that belong to nobody hold NaN. A row of length 1 lives
    in page 0, as rows that pad a graph do; one of length 0 nowhere.
    """
    (rank, rotated), page_tokens, dtype = rows.sizes, rows.page_tokens, rows.dtype
    counts = [-(-length // page_tokens) for length in rows.lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(7)) + 1
    table_RM = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    num_tokens = sum(rows.counts)
    q_HTX = normal(device, rows.heads, num_tokens, rank, dtype=dtype, seed=2)
    q_THA = normal(device, num_tokens, rows.heads, 2 * rotated, dtype=dtype, seed=3)
    numbers = normal(device, sum(counts) + 1, page_tokens, rank + rotated, dtype=dtype, seed=1)
    like = (
        numbers
        if not rows.is_fp8
        else numbers.new_empty(
            1, 1, reference.row_size(rank, rotated, is_fp8=True), dtype=torch.uint8
        )
    )
    numbers[0, 1:] = torch.nan
    used = token = 0
    for row, (length, count, new) in enumerate(zip(rows.lengths, counts, rows.counts, strict=True)):
        pages = order[used : used + count]
        used += count
        if length > 1:
            table_RM[row, :count] = pages
            past = length - (count - 1) * page_tokens
            numbers[pages[-1], past:] = torch.nan
            if rows.newest and new:
                numbers[pages[-1], past - 1, :rank] = q_HTX[0, token : token + new].sum(0)
        token += new
    pages_PSX = reference.stored(*numbers.flatten(0, 1).split([rank, rotated], 1), like)
    pages_PSX = pages_PSX.unflatten(0, (-1, page_tokens))
    starts_R1 = torch.tensor([0, *rows.counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lengths_R = torch.tensor(rows.lengths, dtype=torch.int32, device=device)
    rows_R = table_RM.to(device), starts_R1.to(device), lengths_R
    return q_HTX.transpose(0, 1), q_THA[..., rotated:], pages_PSX, *rows_R


def by_position(decode: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A decode kernel that takes `starts_R1` and `width` behind the scale, as cases do."""

    def run(*args: Any, **more: bool) -> Tensor:  # noqa: ANN401
        *rows, starts_R1, width = args
        return decode(*rows, starts_R1=starts_R1, width=width, **more)

    return run


def weighted_sizes(expected: Tensors, args: Args) -> Tensors:
    """The sum of weight * |latent|: what rounded weights and a rounded result err in proportion
    to. Latents themselves may cancel.
    """
    return (by_position(reference.latent_decode)(*args, of_sizes=True),)


def all_rows() -> list[Rows]:
    checked = [*rows_of_one(), *rows_of_several()]
    every = [*checked, *timed_rows()]
    return [*every, *(rows._replace(is_fp8=True) for rows in every if rows.dtype.itemsize == 2)]


def rows_of_one() -> list[Rows]:
    small = (64, 16)
    return [
        Rows((1,), 2, small, 16),
        Rows((700,), 2, small, 16),
        Rows(RAGGED, 16, small),
        Rows(RAGGED, 5, (80, 24), 32),
        Rows(RAGGED, 40, small, 128),  # more heads than a program has
        Rows(RAGGED, 4, small, 16, torch.float32),
        Rows((70, 65), 16),
        *(Rows((2000, *RAGGED, 5000), heads, R1, 128) for heads in (16, 32, 128)),
    ]


def rows_of_several() -> list[Rows]:
    """Rows of 0 to W new tokens, and some of none and no length at the tail."""
    lengths = (8, 130, 9, 64, 65, 1, 300, 17, 66, 128, 131, 0, 0, 0)
    long = (2000, *lengths[:-3], 5000, *lengths[-3:])
    small = (64, 16)
    return [
        Rows(lengths, 4, small, 16, width=1, newest=True),
        Rows(lengths, 6, small, 64, width=2, newest=True),
        Rows(lengths, 16, small, 64, width=4, newest=True),
        Rows(lengths, 3, small, 32, torch.float32, width=3, newest=True),
        *(Rows(long, heads, width=width) for heads in (16, 128) for width in (2, 3, 4)),
    ]


def timed_rows() -> list[Rows]:
    order = torch.randperm(128, generator=torch.Generator().manual_seed(3))
    spread = tuple(torch.linspace(100, 4096, 128).int()[order].tolist())
    return [
        *(
            Rows((length,) * R, heads, page_tokens=128, timed_as=f"R={R} ctx={length}")
            for R, length in ((128, 4096), (1, 4096), (64, 1024), (256, 256))
            for heads in (16, 128)
        ),
        *(
            Rows((4096,) * 128, 16, page_tokens=128, width=width, timed_as="R=128 ctx=4096")
            for width in (2, 4)
        ),
        Rows(spread, 16, page_tokens=128, timed_as="R=128 ctx=100..4096"),
        Rows((4096,) * 128, 16, page_tokens=64, timed_as="R=128 ctx=4096"),
    ]
