"""Check at start that the products of a model do not depend on the number of rows, nor on chunks.

On a GPU, kernels.invariant needs a library whose kernels all add in one order. That may change with
the library's version and with the shape of a weight, so each shape is tried before it serves.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from nanovllm.config import ConfigError
from nanovllm.layers.experts.products import ExpertMLPs
from nanovllm.layers.gated_delta import GatedDeltaNet
from nanovllm.layers.linear import Linear
from nanovllm.layers.products import Fusion

FEW = range(1, 131)  # all numbers of rows around the borders between kernels for few rows
COUNTS = *FEW, 200, 256, 257, 512, 1000, 2048, 4096, 8192
MOST_ELEMENTS = 1 << 29  # of a result: 1 GiB in 16 bits
CHUNKS = 1, 2, 5, 69, 70, 150  # ends of the chunks of a text in recurrent layers


def check_products(model: nn.Module, dtype: torch.dtype, counts: tuple[int, ...] = COUNTS) -> None:
    """Raise ConfigError if a row of a product has other bits with another number of rows.

    Each type and shape of weight is tried once, with random rows of `dtype`. The operations that a
    product includes must not depend on the number of rows either.
    """
    seen: set[tuple[object, ...]] = set()
    for name, module in model.named_modules():
        if not isinstance(module, Linear | ExpertMLPs) or not hasattr(module, "by_rows"):
            continue  # attention multiplies by weights that have no table
        weight = module.gate_up if isinstance(module, ExpertMLPs) else module.weight
        kind = type(module), weight.shape, weight.dtype
        if kind in seen:
            continue
        seen.add(kind)
        features = weight.shape[-2] * (module.num_chosen if isinstance(module, ExpertMLPs) else 1)
        tried = tuple(count for count in counts if count * features <= MOST_ELEMENTS)
        count = first_that_differs(product_of(module, dtype, tried[-1]), tried)
        if count is None:
            count = next((n for n in tried if fused(module, n) != fused(module, tried[-1])), None)
        if count is not None:
            raise ConfigError(
                f"kernels.invariant is true, but the product with {name} {list(weight.shape)} has "
                f"other bits for {count} rows than for {tried[-1]}; leave kernels.invariant false"
            )


def check_states(model: nn.Module, dtype: torch.dtype) -> None:
    """Raise ConfigError if a recurrent layer's outputs depend on the chunks of a text.

    The first such layer goes through a random text of `dtype`: in one chunk, and in several, some
    of which are decode steps of one token.
    """
    for name, module in model.named_modules():
        if not isinstance(module, GatedDeltaNet):
            continue
        whole_THV, cut_THV = (chunked(module, dtype, ends) for ends in (CHUNKS[-1:], CHUNKS))
        if not whole_THV.equal(cut_THV):
            raise ConfigError(
                f"kernels.invariant is true, but {name} has other bits in one chunk than in "
                "several; leave kernels.invariant false"
            )
        return


def chunked(layer: GatedDeltaNet, dtype: torch.dtype, ends: tuple[int, ...]) -> Tensor:
    """Return x_THV of a random text from states of zeros, in chunks with these ends."""
    heads, (channels, _, taps) = layer.attend, layer.conv.shape
    num_heads, size, device = heads.value_heads, heads.value_size, layer.conv.device
    conv_1CW = torch.zeros(1, channels, taps - 1, dtype=dtype, device=device)
    recurrent_1HKV = torch.zeros(1, num_heads, heads.key_size, size, device=device)
    widths = [channels, num_heads, num_heads, num_heads * size]
    x_TX = random(ends[-1], sum(widths), device).to(dtype)
    return torch.cat(
        [
            mixed(layer, x_TX[start:end].split(widths, 1), (conv_1CW, recurrent_1HKV))
            for start, end in pairwise((0, *ends))
        ]
    )


def mixed(
    layer: GatedDeltaNet, tokens: tuple[Tensor, ...], states: tuple[Tensor, Tensor]
) -> Tensor:
    """Return x_THV of the tokens of one row: qkv_TC, a_TH, b_TH and z_TX. Update its states."""
    heads, weights, (*inputs, z_TX) = layer.attend, layer.delta_weights, tokens
    z_THV = z_TX.unflatten(1, (heads.value_heads, heads.value_size))
    num_tokens, device = len(z_TX), z_TX.device
    slots_R = torch.zeros(1, dtype=torch.int64, device=device)
    if num_tokens > 1:
        starts_R1 = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
        return heads.kernels.rows(*inputs, z_THV, weights, *states, slots_R, starts_R1)
    tickets_RG = torch.zeros(1, heads.key_heads, dtype=torch.int32, device=device)
    return heads.kernels.decodes(*inputs, z_THV, weights, *states, slots_R, tickets_RG)


def first_that_differs(product: Callable[[int], Tensor], counts: tuple[int, ...]) -> int | None:
    """Return the first number of rows whose product is not the start of the longest one."""
    expected_TN = product(counts[-1])
    return next((n for n in counts[:-1] if not product(n).equal(expected_TN[:n])), None)


def fused(module: Linear | ExpertMLPs, num_rows: int) -> list[Fusion]:
    """Return the operations that the module's products of so many rows include."""
    tables = module.by_rows, getattr(module, "by_rows_pending", None)
    return [table[num_rows].fused for table in tables if table is not None]


def product_of(
    module: Linear | ExpertMLPs, dtype: torch.dtype, most: int
) -> Callable[[int], Tensor]:
    """Return a function of a number of rows that multiplies the first of `most` random rows."""
    weight = module.weight if isinstance(module, Linear) else module.gate_up
    x_TD = random(most, weight.shape[-1], weight.device).to(dtype)
    if isinstance(module, Linear):
        return lambda count: module.product(x_TD[:count])
    scores_TE = random(most, module.experts.full, weight.device).softmax(1)
    weights_TK, chosen_TK = scores_TE.topk(module.num_chosen, 1)
    experts_TK = chosen_TK.int()
    return lambda count: module(x_TD[:count], weights_TK[:count], experts_TK[:count])


def random(num_rows: int, width: int, device: torch.device) -> Tensor:
    """Return normal numbers in float32, the same in each call."""
    draw = torch.Generator(device).manual_seed(0)
    return torch.randn(num_rows, width, generator=draw, device=device)
