"""The rows of any number of ranks are made of those of any other, as the model cuts its heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from nanovllm.config import ConfigError
from nanovllm.kv.layout import StateGroup
from nanovllm.layers.gated_delta import DeltaSizes
from nanovllm.parallel.mesh import Mesh
from nanovllm.runner.caches import States
from nanovllm.runner.page_shares import PageShares
from nanovllm.runner.state_rows import StateRow
from nanovllm.transfer.shares import Span
from tests.models.steps import CPU

SIZES = DeltaSizes(9, key_heads=4, value_heads=12, key=3, value=5, taps=4, grouped=True)
GROUP = StateGroup((0, 1, 3), 84, 3, 12, 3, 5, bytes_per_element=2)


def rows_of(ranks: int, recurrent_bytes: int, dtype: torch.dtype) -> list[np.ndarray]:
    """Return the row of each rank, filled from one random state by the model's cut."""
    random = torch.Generator().manual_seed(7)
    recurrent_LHKV = torch.randn(3, 12, 3, 5, generator=random)
    conv_LCW = torch.randn(3, 84, 3, generator=random)
    rows = []
    for rank in range(ranks):
        keys = Mesh(rank, ranks).span("linear_num_key_heads", SIZES.key_heads)
        values = keys.of_width(SIZES.each)
        spans = SIZES.channels(keys)
        group = replace(
            GROUP, channels=84 // ranks, heads=12 // ranks, recurrent_bytes=recurrent_bytes
        )
        states = States(group, 1, 1, 0, dtype, CPU)
        for nth, layer in enumerate(group.layers):
            conv_NCW, recurrent_NHKV = states.by_layer[layer].saved
            recurrent_NHKV[0] = recurrent_LHKV[nth, values.start : values.start + values.count]
            pieces = [conv_LCW[nth, span.start : span.start + span.count] for span in spans]
            conv_NCW[0] = torch.cat(pieces)
        rows.append(states.saved_NX[0].view(torch.uint8).numpy())
    return rows


@pytest.mark.parametrize(("dtype", "recurrent_bytes"), [(torch.bfloat16, 2), (torch.float32, 4)])
@pytest.mark.parametrize(("ranks", "shares"), [(2, 1), (1, 2), (4, 2), (2, 4), (4, 1)])
def test_rows_of_other_ranks(
    ranks: int, shares: int, dtype: torch.dtype, recurrent_bytes: int
) -> None:
    whole = StateRow(replace(GROUP, recurrent_bytes=recurrent_bytes), dtype.itemsize)
    sources = rows_of(ranks, recurrent_bytes, dtype)
    for share, expected in enumerate(rows_of(shares, recurrent_bytes, dtype)):
        assert len(expected) == whole.cut(shares).num_bytes
        row = np.zeros_like(expected)
        for rank, there, here, count in whole.parts(share, shares, ranks):
            assert count > 0 and not row[here : here + count].any()
            row[here : here + count] = sources[rank][there : there + count]
        assert np.array_equal(row, expected)


class RowOfRank:
    """The state of a rank, and a cache whose pages have 4,096 bytes on any number of ranks."""

    def __init__(self, row: np.ndarray) -> None:
        self.row, self.num_trips, self.num_spans = row, 0, 0
        self.tensors = [torch.zeros(1, 1, 4, 1, 8)]

    def state(self, checkpoint: int, spans: Sequence[Span] = ()) -> Any:
        if not spans:  # as the first rank's own pages
            return torch.from_numpy(self.row)
        self.num_trips += 1
        self.num_spans += len(spans)
        joined = np.concatenate([self.row[start : start + count] for start, count in spans])
        return memoryview(joined.data)


@pytest.mark.parametrize(
    ("ranks", "shares", "parts", "read"),
    [
        (2, 1, 2, [{0, 1}]),
        (4, 1, 2, [{0, 1, 2, 3}]),
        (4, 2, 1, [{0, 1}, {2, 3}]),
        (2, 4, 1, [{0}, {0}, {1}, {1}]),
    ],
)
def test_parts_of_a_state_take_one_trip_to_each_rank(
    ranks: int, shares: int, parts: int, read: list[set[int]]
) -> None:
    """`read` are the ranks of P that have bytes of each share. A row has 12 blocks."""
    sources = [RowOfRank(row) for row in rows_of(ranks, 4, torch.float32)]
    first, *others = sources
    whole = StateRow(replace(GROUP, recurrent_bytes=4), 4)
    reader: Any = PageShares
    pages = reader(pages=first, num_heads=[4], others=others, state_row=whole)
    assert (pages.page_bytes(shares), pages.state_parts(shares)) == (4096, parts)
    for share, expected in enumerate(rows_of(shares, 4, torch.float32)):
        for rank in others:
            rank.num_trips = rank.num_spans = 0
        state = np.frombuffer(pages.state(5, range(parts), share, shares), np.uint8)
        assert len(state) == parts * 4096 and not state[len(expected) :].any()
        assert np.array_equal(state[: len(expected)], expected)
        trips = [(rank.num_trips, rank.num_spans) for rank in others]
        assert trips == [(1, 12) if rank in read[share] else (0, 0) for rank in range(1, ranks)]
        for at in range(parts):
            part = np.frombuffer(pages.state(5, range(at, at + 1), share, shares), np.uint8)
            assert np.array_equal(part, state[at * 4096 : (at + 1) * 4096])


def test_ranks_that_cannot_share_a_state() -> None:
    whole = StateRow(GROUP, 2)
    assert (whole.key_heads, whole.num_bytes) == (4, 3 * (720 + 504) + 40)
    with pytest.raises(ConfigError, match=r"^8 ranks cannot share 4 key heads of a state$"):
        list(whole.parts(0, 8, 1))
