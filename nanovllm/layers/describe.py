"""Description of a model's GEMM kernels by number of rows, for the log."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from nanovllm.layers.linear import Linear
from nanovllm.layers.products import RowTable


def products(block: nn.Module, head: Linear, sizes: Iterable[int]) -> str:
    """Return a text like `mlp.down skinny+residual 1-128, ...` for a block's products and the head.

    `sizes` are the numbers of rows to look up, ascending. All numbers up to 8,192 would take half a
    second at start.
    """
    row_counts = tuple(sizes)
    parts = [*block.named_modules(), ("head", head)]
    return "; ".join(
        f"{name} {' or '.join(dict.fromkeys(by_rows(t, row_counts) for t in tables_of(part)))}"
        for name, part in parts
        if tables_of(part)
    )


def tables_of(part: nn.Module) -> list[RowTable]:
    return [table for table in vars(part).values() if isinstance(table, RowTable)]


def by_rows(table: RowTable, sizes: Iterable[int]) -> str:
    """Return a text like `skinny 1-128, library 144-8192`: the first and last size looked up."""
    parts: list[tuple[str, int, int]] = []
    for rows in sizes:
        name = table[rows].name
        if parts and parts[-1][0] == name:
            parts[-1] = (name, parts[-1][1], rows)
        else:
            parts.append((name, rows, rows))
    return ", ".join(
        f"{name} {low}" if low == high else f"{name} {low}-{high}" for name, low, high in parts
    )
