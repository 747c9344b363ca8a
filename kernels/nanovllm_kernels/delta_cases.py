"""What the kernels of the gated delta rule are checked and timed with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm_kernels import delta_decode, delta_reference as reference
from nanovllm_kernels.case import Args, Case, Kernel, Tensors, bits, normal
from nanovllm_kernels.delta_reference import DeltaWeights


@dataclass(frozen=True, slots=True)
class Layer:
    """Heads of keys and of values, their sizes, and the convolution's width."""

    G: int = 16
    H: int = 32
    K: int = 128
    V: int = 128
    W: int = 4
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"GH={self.G, self.H} KV={self.K, self.V} W={self.W} {bits(self.dtype)}"

    @property
    def channels(self) -> int:
        return 2 * self.G * self.K + self.H * self.V


def inputs(layer: Layer, lengths: tuple[int, ...], device: torch.device) -> Args:
    """Rows in shuffled slots of twice as many; projections are slices of wider ones."""
    T, R, C = sum(lengths), len(lengths), layer.channels
    H, K, V, W = layer.H, layer.K, layer.V, layer.W
    like = {"dtype": layer.dtype}
    qkvz_TX = normal(device, T, C + H * V, **like)
    ba_TX = normal(device, T, 2 * H, seed=1, **like)
    weights = DeltaWeights(
        normal(device, C, W, seed=2, **like) / 2,
        normal(device, H, dtype=torch.float32, seed=3),
        normal(device, H, dtype=torch.float32, seed=4),
        normal(device, V, seed=5, **like),
        1e-6,
    )
    conv_NCW = normal(device, 2 * R, C, W - 1, seed=6, **like)
    recurrent_NHKV = normal(device, 2 * R, H, K, V, dtype=torch.float32, seed=7)
    slots_R = torch.randperm(2 * R, generator=torch.Generator().manual_seed(8))[:R].to(device)
    starts_R1 = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return (
        qkvz_TX[:, :C], ba_TX[:, H:], ba_TX[:, :H], qkvz_TX[:, C:].unflatten(1, (H, V)), weights,
        conv_NCW, recurrent_NHKV, slots_R, starts_R1.to(device),
    )  # fmt: skip


def decode_inputs(layer: Layer, num_rows: int, device: torch.device) -> Args:
    """Rows of one token, and tickets."""
    tickets_RG = torch.zeros(num_rows, layer.G, dtype=torch.int32, device=device)
    return *inputs(layer, (1,) * num_rows, device), tickets_RG


def drafted_inputs(
    layer: Layer, lengths: tuple[int, ...], replays: tuple[int, ...], device: torch.device
) -> Args:
    """Rows of few tokens; slots that have kept inputs of before; tickets."""
    tickets_RG = torch.zeros(len(lengths), layer.G, dtype=torch.int32, device=device)
    most, width = max(*lengths, *replays), layer.channels + 2 * layer.H
    kept_NWX = normal(device, 2 * len(lengths), most, width, dtype=layer.dtype, seed=9)
    replays_R = torch.tensor(replays, dtype=torch.int32, device=device)
    return *inputs(layer, lengths, device), kept_NWX, replays_R, tickets_RG


def decode(*args: Any) -> Tensor:  # noqa: ANN401
    return delta_decode.mix_decodes(*args[:-2], args[-1])


def without_tickets(function: Callable[..., Tensor], *args: Any) -> Tensor:  # noqa: ANN401
    return function(*args[:-1])


def outputs(x_THV: Tensor, args: Args) -> Tensors:
    """The result, both states, kept inputs and tickets."""
    return x_THV, *args[5:7], *args[9:]


def mixed_size(expected: Tensors, args: Args) -> Tensors:
    """A head of the result has a size of 1 before weight and gate, terms of a state one of 1.

    Queries, keys and values are rounded to 16 bits; two implementations may round one differently.
    """
    rounded = torch.finfo(args[0].dtype).eps / torch.finfo(torch.float32).eps
    gated_THV = args[4].norm_V.float() * F.silu(args[3].float())
    sizes = [tensor.abs() for tensor in expected]
    sizes[0], sizes[2] = sizes[0] + gated_THV.abs(), (sizes[2] + 1) * rounded
    return tuple(sizes)


def state_bytes(layer: Layer, num_rows: int) -> int:
    """Both states, read and written."""
    recurrent, stored = layer.H * layer.K * layer.V, layer.channels * (layer.W - 1)
    return 2 * num_rows * (4 * recurrent + layer.dtype.itemsize * stored)


def token_bytes(layer: Layer, num_tokens: int) -> int:
    """What comes from the projections and goes to the next."""
    return num_tokens * layer.dtype.itemsize * (layer.channels + 2 * layer.H * layer.V)


NEXT = Layer()  # Qwen3-Next
SMALL = tuple(
    Layer(G, H, K, V, W, dtype)
    for G, H, K, V, W in (
        (2, 2, 16, 16, 4),
        (1, 2, 32, 24, 4),
        (1, 3, 24, 32, 2),
        (1, 4, 16, 16, 3),
    )
    for dtype in (torch.bfloat16, torch.float32)
)
FEW = (4, 0, 1, 2, 3), (0, 1, 4, 0, 2)  # tokens of rows, kept ones that were right
DECODE_CASES = (
    *(Case(f"rows=5 {layer}", partial(decode_inputs, layer, 5), small=True) for layer in SMALL),
    *(
        Case(
            f"rows={num_rows} {layer}",
            partial(decode_inputs, layer, num_rows),
            num_bytes=state_bytes(layer, num_rows) + token_bytes(layer, num_rows),
        )
        for layer in (NEXT, Layer(4, 8))
        for num_rows in (1, 8, 64, 256)
    ),
)
DRAFTED_CASES = (
    *(Case(f"{layer}", partial(drafted_inputs, layer, *FEW), small=True) for layer in SMALL),
    *(
        Case(
            f"rows={R} tokens=4 replays=2 {NEXT}",
            partial(drafted_inputs, NEXT, (4,) * R, (2,) * R),
            num_bytes=state_bytes(NEXT, R) + token_bytes(NEXT, 6 * R),
        )
        for R in (1, 8, 64, 256)
    ),
)
# Rounded are queries, keys, values, outputs and norms, each perhaps to the neighbouring number; 32
# bit: sums of up to 128 terms, four of them one after the other.
ULPS = {"ulps_16": 8, "ulps_32": 64}
DECODE = Kernel(
    "delta_decode", decode, partial(without_tickets, reference.mix_rows), DECODE_CASES,
    scale=mixed_size, outputs=outputs, **ULPS,
)  # fmt: skip
DRAFTED = Kernel(
    "delta_drafted", delta_decode.mix_drafted, partial(without_tickets, reference.mix_drafted),
    DRAFTED_CASES, scale=mixed_size, outputs=outputs, **ULPS,
)  # fmt: skip
