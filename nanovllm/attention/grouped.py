"""Grouped-query attention over pages of keys and values."""

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

# Names of a layer's scale of keys or values in checkpoints: that of compressed-tensors and Quark,
# ModelOpt's, and the former one of compressed-tensors.
SCALE_NAMES = (
    "model.layers.{layer}.self_attn.{kind}_scale",
    "model.layers.{layer}.self_attn.{kind}_proj.{kind}_scale",
    "model.layers.{layer}.self_attn.{kind}_proj.output_scale",
)


class PagedKV(NamedTuple):
    """One layer's cache. Zero-filled at start; page 0 never belongs to a request."""

    k_PSGA: Tensor
    v_PSGA: Tensor
    # With an fp8 cache: the scale of each head's keys, then of its values.
    scales_2G: Tensor | None = None

    @property
    def width(self) -> int:
        """Elements of a head's result."""
        return self.v_PSGA.shape[3]


class GroupedHeads:
    """A layer's attention: causal, with scale A**-0.5, over each row's context in its own cache."""

    cache: PagedKV  # set by Decoder.bind_caches

    def __init__(self, num_kv_heads: int) -> None:
        # Default until a scale is loaded. On the host, since fp8 blocks first exist as shapes only.
        self.scales_2G = torch.ones(2, num_kv_heads, dtype=torch.float32, device="cpu")

    def bind(self, cache: PagedKV) -> None:
        """Set the layer's cache, with the layer's scales if it is fp8."""
        if cache.k_PSGA.dtype == FP8:
            cache = cache._replace(scales_2G=self.scales_2G.to(cache.k_PSGA.device))
        self.cache = cache

    def __call__(self, ctx: ForwardContext, q_THA: Tensor, out_THA: Tensor | None = None) -> Tensor:
        """Return o_THA, as wide as values. It is out_THA if given. Keys and values are in the
        cache.
        """
        return ctx.attend(self.cache, q_THA, out_THA)

    def empty(self, q_THA: Tensor) -> Tensor:
        """Return an uninitialised o_THA."""
        return q_THA.new_empty(*q_THA.shape[:2], self.cache.width)


def load_scale(name: str, read: Callable[[], Tensor], blocks: Sequence[Any]) -> bool:
    """Load the scale of a block's cache, for all its heads.

    Return False if `name` is not that of a scale, or if the block's cache has none. `read` returns
    the tensor and is called only if needed. Raise ConfigError if the tensor is not a valid scale or
    its layer does not exist.
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
                raise ConfigError(f"{name} is not a positive number for one of the model's layers")
            attend = blocks[int(layer)].attn.attend
            if not isinstance(attend, GroupedHeads):
                return False
            attend.scales_2G[nth] = scale
            return True
    return False


def bytes_of_element(asked: str, dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes of a cache element for `asked` (cache.dtype) and the model's `dtype`.

    Raise ConfigError for a pair that no kernel supports.
    """
    if asked == "auto":
        return dtype.itemsize
    if device.type == "cuda" and dtype == torch.float32:
        raise ConfigError("cache.dtype is fp8; on a GPU it requires dtype bfloat16, not float32")
    return FP8.itemsize


def caches_of(
    group: PagedGroup, num_pages: int, page_tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], dict[int, PagedKV]]:
    """Return the keys and the values of all layers, zero-filled, and each layer's view of them.

    `dtype` is the model's. The whole tensors of an fp8 cache are uint8, since torch cannot index
    fp8 tensors.
    """
    is_fp8 = group.bytes_per_element == FP8.itemsize
    whole = [
        torch.zeros(
            (len(group.layers), num_pages, page_tokens, group.num_heads, size),
            dtype=torch.uint8 if is_fp8 else dtype,
            device=device,
        )
        for size in (group.k_size, group.v_size)
    ]
    keys, values = (each.view(FP8) if is_fp8 else each for each in whole)
    return whole, {layer: PagedKV(keys[n], values[n]) for n, layer in enumerate(group.layers)}


def pageless(layout: CacheLayout, page_tokens: int, dtype: torch.dtype) -> PagedKV:
    """Return a cache without pages that has the shape of the first group's. Backends plan by it."""
    group = layout.paged[0]
    cpu = torch.device("cpu")
    _, by_layer = caches_of(group, 0, page_tokens, dtype=dtype, device=cpu)
    return by_layer[group.layers[0]]
