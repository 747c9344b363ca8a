"""Inputs, cases and tolerances of the kernels of the gated delta rule."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm_kernels.case import Args, Case, Kernel, Tensors, bits, normal
from nanovllm_kernels.delta import (
    decode as delta_decode,
    ordered as delta_ordered,
    prefill as delta_prefill,
    reference,
)
from nanovllm_kernels.delta.reference import DeltaWeights

Ints = tuple[int, ...]


class DeltaLayer(NamedTuple):
    """Sizes of a layer: G key heads of K, H value heads of V, convolutions of width W; dtypes."""

    G: int = 16
    H: int = 32
    K: int = 128
    V: int = 128
    W: int = 4
    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32  # dtype of the recurrent states


def inputs(layer: DeltaLayer, lengths: Ints, replays: Ints | None, device: torch.device) -> Args:
    """Return rows in shuffled slots, of which half are unused; projections are strided views.

    With `replays` there are tickets, and unless it is empty, also kept inputs of the slots. Without
    `replays`, each row saves its state at the last multiple of 16 tokens before its end, if not 0.
    """
    R, T, (G, H, K, V, W, dtype, state_dtype) = len(lengths), sum(lengths), layer
    C = 2 * G * K + H * V
    shapes = (C, W), (V,), (T, C + H * V), (T, 2 * H), (2 * R, C, W - 1), (2 * R, 9, C + 2 * H)
    conv_CW, norm_V, qkvz_TX, ba_TX, conv_NCW, inputs_NWX = (
        normal(device, *shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)
    )
    gates_2H = normal(device, 2, H, dtype=torch.float32, seed=6)
    recurrent_NHKV = normal(device, 2 * R, H, K, V, dtype=state_dtype, seed=7)
    slots_R = torch.randperm(2 * R, generator=torch.Generator().manual_seed(8))[:R].to(device)
    starts_R1 = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    rows = (
        qkvz_TX[:, :C], ba_TX[:, H:], ba_TX[:, :H], qkvz_TX[:, C:].unflatten(1, (H, V)),
        DeltaWeights(conv_CW / 2, *gates_2H, norm_V, 1e-6), conv_NCW, recurrent_NHKV, slots_R,
        starts_R1,
    )  # fmt: skip
    if replays is None:
        saved_R = starts_R1[:-1] + ((starts_R1.diff() - 1) // 16 * 16).clamp(min=0)
        parts_X = torch.cat([torch.stack([starts_R1[:-1], saved_R], 1).flatten(), starts_R1[-1:]])
        unused_R = torch.ones(2 * R).index_fill(0, slots_R.cpu(), 0).nonzero()[:, 0].to(device)
        targets_R = torch.where(saved_R > starts_R1[:-1], unused_R, -1)
        return *rows, parts_X, torch.stack([targets_R, slots_R], 1).flatten()
    tickets_RG = torch.zeros(R, G, dtype=torch.int32, device=device)
    step_inputs = (
        (inputs_NWX, torch.tensor(replays, dtype=torch.int32, device=device)) if replays else ()
    )
    return *rows, *step_inputs, tickets_RG


def outputs(x_THV: Tensor, args: Args) -> Tensors:
    """Return the result, both states, kept inputs and tickets."""
    return x_THV, *args[5:7], *args[9:]


def mixed_size(expected: Tensors, args: Args) -> Tensors:
    """Return error scales. Heads before weight and gate, and terms of a state, have a size of 1.

    Queries, keys and values are rounded to 16 bits, and two implementations may round one
    differently.
    """
    rounded = max(1.0, torch.finfo(args[0].dtype).eps / torch.finfo(args[6].dtype).eps / 32)
    x_THV, conv_NCW, recurrent_NHKV, *more = (tensor.abs() for tensor in expected)
    gated_THV = (args[4].norm_V.float() * F.silu(args[3].float())).abs()
    return x_THV + gated_THV, conv_NCW, (recurrent_NHKV + 1) * rounded, *more


def case(layer: DeltaLayer, lengths: Ints, replays: Ints | None) -> Case:
    """Return a case. Its bytes are states, read and written, and projections; small ones have 0."""
    (G, H, K, V, W, dtype, state_dtype), is_small = layer, layer.K < 64
    C, tokens = 2 * G * K + H * V, sum(lengths) + sum(replays or ())
    each = state_dtype.itemsize * H * K * V + dtype.itemsize * C * (W - 1)
    states = (2 + (replays is None)) * len(lengths) * each
    num_bytes = (states + tokens * dtype.itemsize * (C + 2 * H * V)) * (not is_small)
    name = f"rows={len(lengths)} of {max(lengths)} GH={G, H} KV={K, V} W={W} {bits(dtype)}"
    name += f" states {bits(state_dtype)}" * (state_dtype != torch.float32)
    return Case(name, partial(inputs, layer, lengths, replays), is_small, num_bytes)


# Qwen3-Next: the whole layer, one of four ranks, and with cache.state_dtype: bfloat16.
NEXT, RANK, SHORT = DeltaLayer(), DeltaLayer(4, 8), DeltaLayer(state_dtype=torch.bfloat16)
HEADS = (2, 2, 16, 16, 4), (1, 2, 32, 24, 4), (1, 3, 24, 32, 2), (1, 4, 16, 16, 3)
SMALL = tuple(DeltaLayer(*of, dtype) for of in HEADS for dtype in (torch.bfloat16, torch.float32))
SMALL += tuple(DeltaLayer(*of, torch.bfloat16, torch.bfloat16) for of in HEADS[1:3])
FEW = (4, 0, 1, 2, 3), (0, 1, 4, 0, 2)  # tokens of each row; accepted kept tokens of each row
PROMPTS = (4000,) * 16, (4000,) * 2, (8192,), (128,), (130,) * 63, (1, 300, 64, 0, 63)
DECODE_CASES = [case(layer, (1,) * 5, ()) for layer in SMALL] + [
    case(layer, (1,) * R, ()) for layer in (NEXT, RANK, SHORT) for R in (1, 8, 64, 256)
]
DRAFTED_CASES = [case(layer, *FEW) for layer in SMALL] + [
    case(layer, (4,) * R, (2,) * R) for layer in (NEXT, SHORT) for R in (1, 8, 64, 256)
]
PREFILL_CASES = [
    case(SMALL[0], (66, 0, 3), None),  # first and last: few programs, for --quick without a GPU
    *(case(layer, (1, 70, 0, 5, 149), None) for layer in SMALL),
    *(case(layer, lengths, None) for layer in (NEXT, RANK, SHORT) for lengths in PROMPTS),
    case(SMALL[-1], (1, 70), None),
]
ORDERED_CASES = [
    *(case(layer, (1, 20, 0, 5), None) for layer in SMALL[:8]),
    *(case(NEXT, lengths, None) for lengths in ((1,) * 64, (1000,), (130,) * 63)),
]
# In 16 bits, queries, keys, values, outputs and norms are rounded, each perhaps to the neighbouring
# number. In 32 bits, there are four consecutive sums of up to 128 terms. Where the terms cancel,
# the norm magnifies the errors.
DELTA_DECODE = Kernel(
    "delta_decode", lambda *args: delta_decode.mix_decodes(*args[:-2], args[-1]),
    lambda *args: reference.mix_rows(*args[:-1]), (*DECODE_CASES,), 8, 256,
    scale=mixed_size, outputs=outputs,
)  # fmt: skip
DELTA_DRAFTED = Kernel(
    "delta_drafted", delta_decode.mix_drafted, reference.mix_drafted, (*DRAFTED_CASES,), 8, 256,
    scale=mixed_size, outputs=outputs,
)  # fmt: skip
DELTA_ORDERED = Kernel(
    "delta_ordered", delta_ordered.mix_rows, reference.mix_rows, (*ORDERED_CASES,), 8, 256,
    scale=mixed_size, outputs=outputs,
)  # fmt: skip
DELTA_ORDERED_DRAFTED = Kernel(
    "delta_ordered_drafted", delta_ordered.mix_drafted, reference.mix_drafted,
    (*(case(layer, *FEW) for layer in SMALL[:8]), case(NEXT, (4,) * 64, (2,) * 64)), 8, 256,
    scale=mixed_size, outputs=outputs,
)  # fmt: skip
# Here the matrices u and w of a piece and copies of the state are rounded, too.
DELTA_PREFILL = Kernel(
    "delta_prefill", delta_prefill.mix_rows, reference.mix_rows, (*PREFILL_CASES,), 16, 512,
    scale=mixed_size, outputs=outputs,
)  # fmt: skip
