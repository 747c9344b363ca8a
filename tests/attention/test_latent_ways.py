"""Chunks of latent attention choose their form for each size of queries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm.attention import latent_rows
from nanovllm.attention.latent import Latents
from nanovllm.plan import Chunk


def test_layers_whose_kv_b_has_an_adapter_choose_for_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their queries and values are in the latent space, too wide for the expanded form."""
    used: list[tuple[str, int]] = []

    def way(name: str) -> Any:
        return lambda *_: lambda cache, q_THA, out_THA: used.append((name, q_THA.shape[2]))

    monkeypatch.setattr(latent_rows, "Expanded", way("expanded"))
    monkeypatch.setattr(latent_rows, "absorbed_chunks", way("absorbed"))
    batch: Any = SimpleNamespace(planned=[Chunk(0, 900, samples=True)])
    kernel: Any = None
    chunks = latent_rows.Chunks(batch, 16, 0, kernel, expands=True)
    for key in (128, 512, 128):
        weight_HAX = torch.zeros(1, key, 512, dtype=torch.bfloat16)
        q_THA = torch.zeros(900, 1, key + 64, dtype=torch.bfloat16)
        chunks(Latents(weight_HAX, weight_HAX, weight_HAX, 1.0), q_THA)
    assert used == [("expanded", 192), ("absorbed", 576), ("expanded", 192)]
