"""Each layer owns the cache that the layout declares for it, and gets another after a change."""

from __future__ import annotations

from pathlib import Path

import torch

from nanovllm.kv.layout import CacheLayout, PagedGroup
from nanovllm.plan import StepPlan
from nanovllm.runner.caches import make_caches
from nanovllm.runner.runner import Runner
from tests.models.steps import CPU, load
from tests.models.tiny import make_tiny
from tests.whole_engine import small_demo


def test_layers_own_what_the_layout_declares_for_them(tmp_path: Path) -> None:
    """A layer's cache does not depend on list positions: groups have any order, and gaps."""
    make_tiny(tmp_path, "qwen3", num_hidden_layers=4)
    model = load(tmp_path)
    layout = CacheLayout((PagedGroup((3, 0), 2, 8, 8, 4), PagedGroup((2,), 1, 4, 4, 4)))
    found = make_caches(layout, 5, 2, torch.float32, CPU)
    model.bind_caches(found.by_layer)
    attends = [block.attn.attend for block in model.layers]
    sizes = {at: tuple(attends[at].cache.k_PSGA.shape[2:]) for at in (0, 2, 3)}
    assert sizes == {0: (2, 8), 2: (1, 4), 3: (2, 8)}
    assert not hasattr(attends[1], "cache")
    keys = found.tensors[0]
    assert attends[3].cache.k_PSGA.data_ptr() == keys[0].data_ptr()
    assert attends[0].cache.k_PSGA.data_ptr() == keys[1].data_ptr()


def test_pages_of_8_bits_are_cleaned_and_copied() -> None:
    found = make_caches(CacheLayout((PagedGroup((0, 1), 2, 8, 4, 1),)), 5, 2, torch.float32, CPU)
    cache = found.by_layer[1]
    assert cache.k_PSGA.dtype == cache.v_PSGA.dtype == torch.float8_e4m3fn
    assert [each.nbytes for each in found.tensors] == [2 * 6 * 2 * 2 * 8, 2 * 6 * 2 * 2 * 4]
    assert not cache.k_PSGA.float().any()
    for page in range(6):
        cache.k_PSGA[page].copy_(torch.full((2, 2, 8), float(page)))
    cache.v_PSGA[4].copy_(torch.full((2, 2, 4), torch.nan))
    found.apply(StepPlan(1, [], [], 0, None, [], 0, [], clean=[4], copies=[(1, 2), (3, 5)]))
    assert cache.k_PSGA.float().mean((1, 2, 3)).tolist() == [0, 1, 1, 3, 0, 3]
    assert not cache.v_PSGA.float().any()


def test_a_runner_with_other_caches_binds_the_model_to_them() -> None:
    """The first caches have one page, for measuring; later ones have all pages that fit."""
    built = small_demo(4)
    first, layers = built.runner, built.runner.model.layers
    _, _, page_tokens, num_heads, size = first.caches.tensors[0].shape
    group = PagedGroup(tuple(range(len(layers))), num_heads, size, size, 4)
    other = make_caches(CacheLayout((group,)), 1, page_tokens, torch.float32, CPU)
    assert all(len(block.attn.attend.cache.k_PSGA) == 101 for block in layers)
    Runner(first.model, first.prep, first.sampler, other, first.backend)
    for layer, block in enumerate(layers):
        assert block.attn.attend.cache is other.by_layer[layer]
        assert len(block.attn.attend.cache.k_PSGA) == 2


def test_pages_of_latents_are_cleaned_and_copied() -> None:
    """Latents have one head and no values; only the layout distinguishes them from other pages."""
    found = make_caches(
        CacheLayout((PagedGroup((0, 1), 1, 6, 0, 4, "latent"),)), 4, 2, torch.float32, CPU
    )
    keys, values = found.tensors
    assert keys.shape == (2, 5, 2, 1, 6) and values.numel() == 0
    keys.copy_(torch.arange(keys.numel()).view_as(keys))
    before = keys.clone()
    found.apply(StepPlan(0, [], [], 0, b"", [], 0, [], clean=[3], copies=[(1, 4), (4, 2)]))
    assert torch.equal(keys[:, [4, 2]], before[:, [1, 4]]) and not keys[:, 3].any()
    assert torch.equal(keys[:, [0, 1]], before[:, [0, 1]])
    assert found.by_layer[1].k_PSGA.data_ptr() == keys[1].data_ptr()
