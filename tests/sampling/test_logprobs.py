"""The order of alternatives with equal logits, which must not depend on other rows."""

from __future__ import annotations

import pytest
import torch

from nanovllm.sampling.logprobs import best_ids


@pytest.mark.parametrize("count", [1, 4, 20])
def test_of_equal_logits_the_first_ids_are_best(count: int) -> None:
    torch.manual_seed(0)
    logits_WV = torch.randn(40, 3000).mul(4).round() / 4  # some 200 rows of equal numbers
    logits_WV[3] = 0.0
    logits_WV[4, 100:] = -torch.inf
    logits_WV[5] = -logits_WV[5].abs() - 1
    found = best_ids(logits_WV, count)
    for row, ids in zip(logits_WV.tolist(), found.tolist(), strict=True):
        assert ids == sorted(range(len(row)), key=lambda nth: (-row[nth], nth))[:count]
    assert best_ids(logits_WV[7:8], count).tolist() == found[7:8].tolist()
