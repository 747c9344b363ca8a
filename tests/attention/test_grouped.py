"""Caches of 8 bits on a CPU: stored values, attention results, and sources of scales."""

from __future__ import annotations

import pytest
import torch
from nanovllm_kernels.attention.reference import in_8_bits, paged_prefill
from nanovllm_kernels.norms.reference import quantised
from torch import Tensor

from nanovllm.attention.grouped import FP8, GroupedHeads, PagedKV, bytes_of_element, load_scale
from nanovllm.attention.latent import LatentHeads
from nanovllm.attention.torch_ref import TorchPaged
from nanovllm.config import ConfigError
from tests.attention.paged_batches import make_batch

CPU = torch.device("cpu")


def test_numbers_are_saturated_and_only_nan_is_nan() -> None:
    x = torch.tensor([0.0, 1e-9, 500.0, -1e30, torch.inf, torch.nan, 3.3, 448.0 * 0.5 + 9])
    found = quantised(x, torch.tensor(0.5)).float() * 0.5
    expected = torch.tensor([0.0, 0.0, 224.0, -224.0, 224.0, torch.nan, 3.25, 224.0])
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("lengths", [(900, 17, 64, 700, 1, 1300), (33, 8, 130)])
def test_attention_is_that_of_the_dequantised_cache(lengths: tuple[int, ...]) -> None:
    new = (1, 4, 3, 7, 1, 40)[: len(lengths)]
    q_THA, wide, batch = make_batch(lengths, new, (4, 2, 16), 16, torch.float32, CPU)
    cache = PagedKV(*in_8_bits(*wide[:2]))
    rows = batch.page_table_RM, batch.starts_R1, batch.lengths_R, batch.max_new
    expected_THA = paged_prefill(q_THA, cache.k_PSGA, cache.v_PSGA, *rows, cache.scales_2G)
    backend = TorchPaged(cache)
    o_THA = backend.bind(batch)(cache, q_THA)
    torch.testing.assert_close(o_THA, expected_THA, rtol=1e-5, atol=1e-5)
    unscaled = paged_prefill(q_THA, cache.k_PSGA.float(), cache.v_PSGA.float(), *rows)
    assert (unscaled - expected_THA).abs().max() > 0.1


def test_a_cache_of_8_bits_gets_the_scales_of_its_layer() -> None:
    heads = GroupedHeads(3)
    wide, narrow = (torch.zeros(1, 4, 3, 8, dtype=dtype) for dtype in (torch.float32, FP8))
    heads.bind(PagedKV(wide, wide))
    assert heads.cache.scales_2G is None
    heads.bind(PagedKV(narrow, narrow))
    assert heads.cache.scales_2G is heads.scales_2G
    assert heads.scales_2G.tolist() == [[1.0] * 3] * 2


def test_which_dtype_goes_with_8_bits() -> None:
    cuda = torch.device("cuda")
    assert bytes_of_element("auto", torch.bfloat16, cuda) == 2
    assert bytes_of_element("fp8", torch.bfloat16, cuda) == 1
    assert bytes_of_element("fp8", torch.float32, CPU) == 1
    with pytest.raises(ConfigError) as caught:
        bytes_of_element("fp8", torch.float32, cuda)
    said = "cache.dtype is fp8; on a GPU it requires dtype bfloat16, not float32"
    assert str(caught.value) == said


class Block:
    def __init__(self) -> None:
        self.attn = self
        self.attend = GroupedHeads(2)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.1.self_attn.k_scale", 0),
        ("model.layers.1.self_attn.v_scale", 1),
        ("model.layers.1.self_attn.k_proj.k_scale", 0),
        ("model.layers.1.self_attn.v_proj.v_scale", 1),
        ("model.layers.1.self_attn.v_proj.output_scale", 1),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_scales_of_published_checkpoints(name: str, kind: int, shape: tuple[int, ...]) -> None:
    blocks = [Block(), Block()]
    assert load_scale(name, lambda: torch.full(shape, 0.25, dtype=torch.bfloat16), blocks)
    expected = torch.ones(2, 2, 2)
    expected[1, kind] = 0.25
    assert torch.equal(torch.stack([block.attend.scales_2G for block in blocks]), expected)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.q_scale",
        "model.layers.1.self_attn.k_proj.weight_scale",
        "model.layers.1.self_attn.v_proj.k_scale",
        "model.layers.1.mlp.0.self_attn.k_scale",
        "k_scale",
    ],
)
def test_other_names_are_not_taken(name: str) -> None:
    assert not load_scale(name, lambda: torch.tensor(0.5), [Block(), Block()])


def test_a_cache_without_scales_takes_none() -> None:
    block = Block()
    block.attend = LatentHeads()  # type: ignore[assignment]
    assert not load_scale("model.layers.0.self_attn.k_scale", lambda: torch.tensor(0.5), [block])


@pytest.mark.parametrize(
    ("layer", "scale"),
    [
        (0, torch.tensor(0.0)),
        (0, torch.tensor(-1.0)),
        (0, torch.tensor(torch.nan)),
        (0, torch.tensor(torch.inf)),
        (0, torch.ones(2)),
        (2, torch.tensor(0.5)),
    ],
)
def test_what_is_no_scale_is_said(layer: int, scale: Tensor) -> None:
    name = f"model.layers.{layer}.self_attn.k_scale"
    with pytest.raises(ConfigError) as caught:
        load_scale(name, lambda: scale, [Block(), Block()])
    assert str(caught.value) == f"{name} is not a positive number for one of the model's layers"
