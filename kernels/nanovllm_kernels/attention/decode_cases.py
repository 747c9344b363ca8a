"""Rows, and their layout in memory, for tests and timings of the decode kernels.

Imports no kernel: `plan_decode` is passed as an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm_kernels.attention import reference
from nanovllm_kernels.case import Args, Case, bits

PlanDecode = Callable[[Tensor, Tensor], Any]  # plan_decode function of a kernel
RAGGED = (1, 130, 7, 64, 65, 1, 300, 17, 128)


class KVRows(NamedTuple):
    """Rows of a case: the cached tokens of each, and its number of new tokens if it is not one."""

    lengths: tuple[int, ...]
    heads: tuple[int, int, int]  # query heads, key/value heads, head size
    page_tokens: int
    dtype: torch.dtype = torch.bfloat16
    kind: str = "normal"  # `kind` of paged_inputs
    new: tuple[int, ...] = ()
    width: int = 0  # maximum new tokens per row; 0: one per row, without starts_R1
    is_fp8: bool = False  # cache in fp8; queries have `dtype`
    timed_as: str = ""

    @property
    def counts(self) -> tuple[int, ...]:
        return self.new or (1,) * len(self.lengths)


def drafted(rows: KVRows) -> KVRows:
    """Give the rows W, W - 1, ..., 0 new tokens in turn, but at most their length. W is `width`."""
    turns = (rows.width - nth % (rows.width + 1) for nth in range(len(rows.lengths)))
    return rows._replace(new=tuple(min(pair) for pair in zip(turns, rows.lengths, strict=True)))


def case_of(plan_decode: PlanDecode, rows: KVRows) -> Case:
    """Return a case of a decode kernel. Rows with `timed_as` are timed, and others only checked."""
    lengths, (H, G, A) = rows.lengths, rows.heads
    shape = f"HGA={rows.heads} page={rows.page_tokens}"
    case_inputs = partial(inputs, plan_decode, rows)
    if rows.timed_as:
        num_bytes = 4 * A * (sum(lengths) * G // (1 + rows.is_fp8) + sum(rows.counts) * H)
        return Case(
            f"{rows.timed_as} {shape}{' fp8' * rows.is_fp8}", case_inputs, num_bytes=num_bytes
        )
    name = f"{rows.kind} rows={len(lengths)} longest={max(lengths)} {shape} {bits(rows.dtype)}"
    name += f" W={rows.width}" if rows.width else ""
    name += " fp8" * rows.is_fp8
    return Case(name, case_inputs, small=sum(lengths) < 1400)


def inputs(plan_decode: PlanDecode, rows: KVRows, device: torch.device) -> Args:
    """Return the arguments of paged_decode. Those after the plan are in by_position's order."""
    q, k, v, table, starts, lengths = reference.paged_inputs(
        rows.lengths, rows.counts, rows.heads, rows.page_tokens, rows.dtype, device, rows.kind
    )
    ragged = (starts, rows.width) if rows.width else (None, 1)
    k, v, scales = reference.in_8_bits(k, v) if rows.is_fp8 else (k, v, None)
    return q, k, v, table, lengths, plan_decode(lengths, k), *ragged, scales


def by_position(decode: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a decode kernel that takes `starts_R1`, `width` and `scales_2G` as keywords.

    The wrapper takes them as positional arguments after the plan, like the arguments of cases.
    """

    def run(*args: Any) -> Tensor:  # noqa: ANN401
        *rows, starts_R1, width, scales_2G = args
        return decode(*rows, starts_R1=starts_R1, width=width, scales_2G=scales_2G)

    return run


def all_rows() -> list[KVRows]:
    several = map(drafted, (*rows_of_several(), *rows_of_every_end()))
    checked, timed = [*rows_of_one(), *several], [*timed_rows(), *timed_drafts()]
    in_8_bits = (rows._replace(is_fp8=True) for rows in (*checked[1::3], *timed))
    return [*checked, *timed, *in_8_bits]


def rows_of_one() -> list[KVRows]:
    small = [
        ((1,), (2, 1, 128), 16),
        ((1000,), (2, 1, 64), 16),
        (RAGGED, (4, 2, 128), 16),
        (RAGGED, (8, 2, 128), 128),
        (RAGGED, (3, 1, 80), 32),
        (RAGGED, (4, 2, 64), 64),
        (RAGGED, (2, 2, 256), 48),
        (RAGGED, (20, 1, 16), 16),  # more query heads than the 16 rows of a tensor core
        (RAGGED, (8, 8, 64), 128),
        ((1,) * 5, (4, 2, 128), 128),
    ]
    large = [
        ((2000, *RAGGED, 5000), heads, page_tokens)
        for heads in ((16, 8, 128), (32, 8, 128), (14, 2, 64), (16, 2, 256), (12, 4, 80))
        for page_tokens in (16, 64, 128)
    ]
    return [
        *(KVRows(*shape) for shape in (*small, *large)),
        KVRows(RAGGED, (4, 2, 64), 16, torch.float32),
        KVRows(RAGGED, (4, 2, 128), 32, kind="spike"),
        # More partial results than one merge step takes, with the largest among the last.
        KVRows((1340,), (2, 1, 128), 16, kind="spike"),
    ]


def rows_of_several() -> list[KVRows]:
    """Return rows of 0 to W new tokens, with rows of no tokens and length 0 at the end."""
    lengths = (8, 130, 9, 64, 65, 1, 300, 17, 66, 128, 131, 0, 0, 0)
    long = (2000, *lengths[:-3], 5000, *lengths[-3:])
    small = (
        ((1, 1, 64), 16, 4, "newest"),
        ((4, 2, 128), 16, 2, "normal"),
        ((4, 2, 128), 128, 8, "newest"),
        ((8, 2, 128), 16, 2, "newest"),
        ((8, 2, 128), 128, 4, "newest"),
        ((8, 2, 128), 64, 8, "spike"),
        ((3, 1, 80), 32, 4, "newest"),
        ((7, 1, 64), 64, 4, "normal"),
        ((2, 2, 256), 48, 4, "newest"),
        ((20, 1, 16), 16, 2, "newest"),
        ((20, 1, 16), 16, 8, "newest"),
    )
    return [
        *(KVRows(lengths, heads, page, kind=kind, width=W) for heads, page, W, kind in small),
        KVRows(lengths, (4, 2, 64), 16, torch.float32, "newest", width=4),
        KVRows((130, 0, 0), (2, 1, 64), 64, width=1),
        KVRows((1340,), (2, 1, 128), 16, kind="newest", width=4),
        KVRows((1345, 0), (4, 1, 128), 64, kind="spike", width=8),
        *(
            KVRows(long, heads, page_tokens, kind="newest", width=width)
            for heads in ((16, 8, 128), (32, 8, 128), (14, 2, 64), (16, 2, 256), (40, 2, 128))
            for page_tokens, width in ((16, 2), (64, 4), (128, 8))
        ),
    ]


def rows_of_every_end() -> list[KVRows]:
    """Return lengths at which some queries see no token of the last block.

    Each set appears once, so that rows are split over lanes, and nine times, so that most are
    whole.
    """
    lengths = tuple(at + past for at in (16, 64, 128, 2048) for past in range(-1, 8))
    return [
        KVRows(lengths * repeats + (0,) * 5, heads, page_tokens, kind="newest", width=width)
        for heads, page_tokens, width in (
            ((16, 8, 128), 128, 8),
            ((32, 8, 128), 128, 4),
            ((4, 4, 64), 16, 8),
            ((7, 1, 64), 32, 2),
            ((16, 1, 128), 64, 1),
            ((20, 1, 128), 64, 2),
        )
        for repeats in (1, 9)
    ]


def timed_rows() -> list[KVRows]:
    order = torch.randperm(256, generator=torch.Generator().manual_seed(3))
    # Lengths of 256 requests in the middle of an offline run, in random order.
    spread_lengths = tuple(torch.linspace(100, 2048, 256).int()[order].tolist())
    equal = [
        KVRows((length,) * R, (H, G, A), page_tokens, timed_as=f"R={R} ctx={length}")
        for R, length, H, G, A, page_tokens in (
            (1, 1024, 16, 8, 128, 128),
            (1, 32768, 32, 8, 128, 128),
            (8, 4096, 32, 8, 128, 128),
            (64, 1024, 16, 8, 128, 128),
            (64, 1024, 32, 8, 128, 128),
            (256, 1024, 16, 8, 128, 128),
            (256, 1024, 16, 8, 128, 64),
            (256, 1024, 16, 8, 128, 16),
            (256, 1024, 32, 8, 128, 128),
            (64, 4096, 16, 2, 256, 64),
        )
    ]
    return [*equal, KVRows(spread_lengths, (16, 8, 128), 128, timed_as="R=256 ctx=100..2048")]


def timed_drafts() -> list[KVRows]:
    """Return rows as in a CUDA graph of R * W tokens, which has room for R * W rows."""
    cases = []
    for R, length, H, W in (
        (1, 1024, 16, 4),
        (1, 1024, 32, 4),
        (1, 4096, 32, 4),
        (64, 1024, 16, 4),
        (64, 1024, 32, 4),
        (256, 1024, 16, 4),
    ):
        unused = (0,) * (R * W - R)
        name = f"R={R} ctx={length} W={W}"
        lengths, new = (length,) * R + unused, (W,) * R + unused
        cases.append(KVRows(lengths, (H, 8, 128), 128, new=new, width=W, timed_as=name))
    return cases
