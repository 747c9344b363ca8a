"""How a model's products are computed, for the log: which implementation serves how many rows."""

from __future__ import annotations

from torch import nn

from nanovllm.layers.linear import Linear
from nanovllm.layers.ops import RowTable


def products(block: nn.Module, head: Linear, most_rows: int) -> str:
    """Each product of a block, and the head's, e.g. `mlp.down skinny+residual 1-128, ...`."""
    parts = [*block.named_modules(), ("head", head)]
    return "; ".join(
        f"{name} {' or '.join(dict.fromkeys(by_rows(t, most_rows) for t in tables_of(part)))}"
        for name, part in parts
        if isinstance(part, Linear)
    )


def tables_of(part: Linear) -> list[RowTable]:
    return [table for table in vars(part).values() if isinstance(table, RowTable)]


def by_rows(table: RowTable, most_rows: int) -> str:
    """E.g. `skinny 1-128, library 129-8192`."""
    parts: list[tuple[str, int, int]] = []
    for rows in range(1, most_rows + 1):
        name = table[rows].name
        if parts and parts[-1][0] == name:
            parts[-1] = (name, parts[-1][1], rows)
        else:
            parts.append((name, rows, rows))
    return ", ".join(
        f"{name} {low}" if low == high else f"{name} {low}-{high}" for name, low, high in parts
    )
