"""The rows of any number of ranks are made of those of any other, as the model cuts its heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from nanovllm.config import ConfigError
from nanovllm.kv.layout import StateGroup
from nanovllm.layers.gated_delta import DeltaSizes
from nanovllm.parallel.mesh import Mesh
from nanovllm.runner.caches import States
from nanovllm.runner.state_rows import StateRow
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


def test_ranks_that_cannot_share_a_state() -> None:
    whole = StateRow(GROUP, 2)
    assert (whole.key_heads, whole.num_bytes) == (4, 3 * (720 + 504) + 40)
    with pytest.raises(ConfigError, match=r"^8 ranks cannot share 4 key heads of a state$"):
        list(whole.parts(0, 8, 1))
