"""What the kernels of the gated delta rule are checked and timed with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm_kernels import delta_decode, delta_reference as reference
from nanovllm_kernels.case import Args, Case, Kernel, Tensors, bits, normal
from nanovllm_kernels.delta_reference import DeltaWeights

Ints = tuple[int, ...]


class Layer(NamedTuple):
    """Heads of keys and of values, their sizes, and the convolution's width."""

    G: int = 16
    H: int = 32
    K: int = 128
    V: int = 128
    W: int = 4
    dtype: torch.dtype = torch.bfloat16


def channels(layer: Layer) -> int:
    """How many the convolution has."""
    return 2 * layer.G * layer.K + layer.H * layer.V


def inputs(layer: Layer, lengths: tuple[int, ...], device: torch.device) -> Args:
    """Rows in shuffled slots of twice as many; projections are slices of wider ones."""
    T, N, C, (_, H, K, V, W, dtype) = sum(lengths), 2 * len(lengths), channels(layer), layer
    qkvz_TX = normal(device, T, C + H * V, dtype=dtype)
    ba_TX = normal(device, T, 2 * H, seed=1, dtype=dtype)
    gates_2H = normal(device, 2, H, dtype=torch.float32, seed=3)
    conv_CW, norm_V = (normal(device, *x, seed=4, dtype=dtype) for x in ((C, W), (V,)))
    conv_NCW = normal(device, N, C, W - 1, seed=6, dtype=dtype)
    recurrent_NHKV = normal(device, N, H, K, V, dtype=torch.float32, seed=7)
    slots_R = torch.randperm(N, generator=torch.Generator().manual_seed(8))[: N // 2].to(device)
    starts_R1 = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    weights = DeltaWeights(conv_CW / 2, *gates_2H, norm_V, 1e-6)
    tokens = qkvz_TX[:, :C], ba_TX[:, H:], ba_TX[:, :H], qkvz_TX[:, C:].unflatten(1, (H, V))
    return *tokens, weights, conv_NCW, recurrent_NHKV, slots_R, starts_R1


def decode_inputs(layer: Layer, num_rows: int, device: torch.device) -> Args:
    """Rows of one token, and tickets."""
    tickets_RG = torch.zeros(num_rows, layer.G, dtype=torch.int32, device=device)
    return *inputs(layer, (1,) * num_rows, device), tickets_RG


def drafted_inputs(layer: Layer, lengths: Ints, replays: Ints, device: torch.device) -> Args:
    """Rows of few tokens; slots that have kept inputs of before; tickets."""
    sizes = 2 * len(lengths), max(*lengths, *replays), channels(layer) + 2 * layer.H
    kept_NWX = normal(device, *sizes, dtype=layer.dtype, seed=9)
    replays_R = torch.tensor(replays, dtype=torch.int32, device=device)
    tickets_RG = torch.zeros(len(lengths), layer.G, dtype=torch.int32, device=device)
    return *inputs(layer, lengths, device), kept_NWX, replays_R, tickets_RG


def outputs(x_THV: Tensor, args: Args) -> Tensors:
    """The result, both states, kept inputs and tickets."""
    return x_THV, *args[5:7], *args[9:]


def mixed_size(expected: Tensors, args: Args) -> Tensors:
    """A head of the result has a size of 1 before weight and gate, terms of a state one of 1.

    Queries, keys and values are rounded to 16 bits; two implementations may round one differently.
    """
    rounded = torch.finfo(args[0].dtype).eps / torch.finfo(torch.float32).eps
    x_THV, conv_NCW, recurrent_NHKV, *more = (tensor.abs() for tensor in expected)
    gated_THV = (args[4].norm_V.float() * F.silu(args[3].float())).abs()
    return x_THV + gated_THV, conv_NCW, (recurrent_NHKV + 1) * rounded, *more


def least_bytes(layer: Layer, num_rows: int, num_tokens: int) -> int:
    """Both states, read and written, and what comes from projections and goes to the next."""
    (_, H, K, V, W, dtype), C = layer, channels(layer)
    states = 2 * num_rows * (4 * H * K * V + dtype.itemsize * C * (W - 1))
    return states + num_tokens * dtype.itemsize * (C + 2 * H * V)


def case(layer: Layer, make: Callable[..., Args], said: str, *of: Any, **more: int) -> Case:  # noqa: ANN401
    name = f"{said} GH={layer[:2]} KV={layer[2:4]} W={layer.W} {bits(layer.dtype)}"
    return Case(name, partial(make, layer, *of), small=layer.K < 64, **more)


NEXT, RANK = Layer(), Layer(4, 8)  # Qwen3-Next, whole and one of four ranks
HEADS = (2, 2, 16, 16, 4), (1, 2, 32, 24, 4), (1, 3, 24, 32, 2), (1, 4, 16, 16, 3)
SMALL = tuple(Layer(*of, dtype) for of in HEADS for dtype in (torch.bfloat16, torch.float32))
DECODE_CASES = [case(layer, decode_inputs, "rows=5", 5) for layer in SMALL] + [
    case(layer, decode_inputs, f"rows={R}", R, num_bytes=least_bytes(layer, R, R))
    for layer in (NEXT, RANK)
    for R in (1, 8, 64, 256)
]
FEW = (4, 0, 1, 2, 3), (0, 1, 4, 0, 2)  # tokens of rows, kept ones that were right
DRAFTED_CASES = [case(layer, drafted_inputs, "rows=5", *FEW) for layer in SMALL] + [
    case(NEXT, drafted_inputs, f"rows={R} tokens=4 replays=2", (4,) * R, (2,) * R,
         num_bytes=least_bytes(NEXT, R, 6 * R))
    for R in (1, 8, 64, 256)
]  # fmt: skip
# Rounded are queries, keys, values, outputs and norms, each perhaps to the neighbouring number; 32
# bit: sums of up to 128 terms, four of them one after the other.
DECODE = Kernel(
    "delta_decode", lambda *args: delta_decode.mix_decodes(*args[:-2], args[-1]),
    lambda *args: reference.mix_rows(*args[:-1]), (*DECODE_CASES,), 8, 64,
    scale=mixed_size, outputs=outputs,
)  # fmt: skip
DRAFTED = Kernel(
    "delta_drafted", delta_decode.mix_drafted, lambda *args: reference.mix_drafted(*args[:-1]),
    (*DRAFTED_CASES,), 8, 64, scale=mixed_size, outputs=outputs,
)  # fmt: skip
