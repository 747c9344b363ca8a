"""Grouped heads: query heads that share key/value heads, over pages of keys and values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from nanovllm_kernels.fp8_reference import FP8
from torch import Tensor

from nanovllm.attention.base import ForwardContext
from nanovllm.config import ConfigError
from nanovllm.kv.layout import CacheLayout, PagedGroup

# What checkpoints call a layer's scale of keys or values: compressed-tensors' and Quark's name,
# ModelOpt's, and the one that compressed-tensors had before.
SCALE_NAMES = (
    "model.layers.{layer}.self_attn.{kind}_scale",
    "model.layers.{layer}.self_attn.{kind}_proj.{kind}_scale",
    "model.layers.{layer}.self_attn.{kind}_proj.output_scale",
)


class PagedKV(NamedTuple):
    """One layer's cache. Zero-filled at start; page 0 is never given to a request."""

    k_PSGA: Tensor
    v_PSGA: Tensor
    # Of numbers of 8 bits: what those of each head are multiplied by, keys' scales, then values'.
    scales_2G: Tensor | None = None

    @property
    def width(self) -> int:
        """The elements of a head's result."""
        return self.v_PSGA.shape[3]


class GroupedHeads:
    """A layer's attention: causal, of scale A**-0.5, over each row's context in its own cache."""

    cache: PagedKV  # from Decoder.bind_caches on

    def __init__(self, num_kv_heads: int) -> None:
        # Until one is loaded. On the host: blocks in fp8 are made of shapes alone at first.
        self.scales_2G = torch.ones(2, num_kv_heads, dtype=torch.float32, device="cpu")

    def bind(self, cache: PagedKV) -> None:
        """The cache is the layer's own from here on, with the layer's scales if it needs any."""
        if cache.k_PSGA.dtype == FP8:
            cache = cache._replace(scales_2G=self.scales_2G.to(cache.k_PSGA.device))
        self.cache = cache

    def __call__(self, ctx: ForwardContext, q_THA: Tensor, out_THA: Tensor | None = None) -> Tensor:
        """o_THA, as wide as values; it is out_THA if given. Keys and values have been stored."""
        return ctx.attend(self.cache, q_THA, out_THA)

    def empty(self, q_THA: Tensor) -> Tensor:
        """What o_THA will look like."""
        return q_THA.new_empty(*q_THA.shape[:2], self.cache.width)


def load_scale(name: str, read: Callable[[], Tensor], blocks: Sequence[Any]) -> bool:
    """Takes the scale of a block's cache, for all its heads; False if that is not the name of one,
    or the block's cache has none.

    `read` gives the tensor, and is called if it is.

    Raises ConfigError if the tensor is no scale, or of no block.
    """
    for kind, nth in (("k", 0), ("v", 1)):
        for pattern in SCALE_NAMES:
            before, after = pattern.format(layer="*", kind=kind).split("*")
            layer = name.removeprefix(before).removesuffix(after)
            if name != f"{before}{layer}{after}" or not layer.isdecimal():
                continue
            tensor = read()
            scale = float(tensor) if tensor.numel() == 1 else math.nan
            if int(layer) >= len(blocks) or not 0 < scale < math.inf:
                raise ConfigError(f"{name} is no positive number for one of the model's layers")
            attend = blocks[int(layer)].attn.attend
            if not isinstance(attend, GroupedHeads):
                return False
            attend.scales_2G[nth] = scale
            return True
    return False


def bytes_of_element(asked: str, dtype: torch.dtype, device: torch.device) -> int:
    """The bytes of an element of the cache that `asked`, cache.dtype, means to a model in `dtype`.

    Raises ConfigError for a pair that no kernels are for.
    """
    if asked == "auto":
        return dtype.itemsize
    if device.type == "cuda" and dtype == torch.float32:
        raise ConfigError("cache.dtype is fp8; on a GPU that goes with dtype bfloat16, not float32")
    return FP8.itemsize


def caches_of(
    group: PagedGroup, num_pages: int, page_tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], dict[int, PagedKV]]:
    """All layers' keys and all their values, zero, and each layer's part of them.

    `dtype` is the model's. Those of 8 bits come as bytes, since torch indexes no such numbers.
    """
    is_fp8 = group.bytes_per_element == FP8.itemsize
    shape = len(group.layers), num_pages, page_tokens, group.num_heads
    whole = [
        torch.zeros(*shape, size, dtype=torch.uint8 if is_fp8 else dtype, device=device)
        for size in (group.k_size, group.v_size)
    ]
    keys, values = (each.view(FP8) if is_fp8 else each for each in whole)
    return whole, {layer: PagedKV(keys[n], values[n]) for n, layer in enumerate(group.layers)}


def pageless(layout: CacheLayout, page_tokens: int, dtype: torch.dtype) -> PagedKV:
    """A cache of no pages in the shape of the first group's: what backends plan by."""
    group = layout.paged[0]
    return caches_of(group, 0, page_tokens, dtype, torch.device("cpu"))[1][group.layers[0]]
