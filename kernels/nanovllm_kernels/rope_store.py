"""From the fused projection to rotated queries and a filled cache, in one launch.

Meaning: nanovllm_kernels.reference. A program takes HEADS heads of one token, whatever they are:
query and key heads are normalised (if there are norm_weights) and rotated, value heads pass through
(a rotation by 0), and each goes to its place.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels import reference
from nanovllm_kernels.case import Args, Case, Kernel, Tensors, bits, normal
from nanovllm_kernels.device import follows

MOST_OVERLAPPED = 128  # tokens: attention of so many rows is launched before this ends
HEADS = 8  # of width 128, in two warps: a 16-byte load of each half a thread


def rope_store(
    qkv_TX: Tensor,
    q_norm_A: Tensor | None,
    k_norm_A: Tensor | None,
    eps: float,
    cos_sin_LA: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    k_PSGA: Tensor,
    v_PSGA: Tensor,
) -> Tensor:
    num_kv_heads, head_size = k_PSGA.shape[2:]
    num_tokens = qkv_TX.shape[-2]
    num_heads = qkv_TX.shape[-1] // head_size - 2 * num_kv_heads
    assert k_PSGA.is_contiguous() and v_PSGA.is_contiguous() and qkv_TX.stride(-1) == 1
    assert (q_norm_A is None) == (k_norm_A is None)
    q_THA = torch.empty(num_tokens, num_heads, head_size, dtype=qkv_TX.dtype, device=qkv_TX.device)
    waits = follows(num_tokens, qkv_TX.device)
    num_groups = triton.cdiv(num_heads + 2 * num_kv_heads, HEADS)
    rope_store_kernel[(num_tokens * num_groups,)](
        qkv_TX,
        q_norm_A,
        k_norm_A,
        cos_sin_LA,
        positions_T,
        slot_mapping_T,
        q_THA,
        k_PSGA,
        v_PSGA,
        qkv_TX.stride(0),
        qkv_TX.stride(-2),
        cos_sin_LA.stride(0),
        eps,
        SLICES=len(qkv_TX) if qkv_TX.ndim == 3 else 1,
        H=num_heads,
        G=num_kv_heads,
        HALF=head_size // 2,
        HALF_BLOCK=triton.next_power_of_2(head_size // 2),
        HEADS=HEADS,
        LEADS=waits and num_tokens <= MOST_OVERLAPPED,
        WAITS=waits,
        num_warps=2,
        launch_pdl=waits,
    )
    return q_THA


@triton.jit
def rope_store_kernel(
    qkv_TX,
    q_norm_A,
    k_norm_A,
    cos_sin_LA,
    positions_T,
    slot_mapping_T,
    q_THA,
    k_PSGA,
    v_PSGA,
    slice_stride,
    qkv_stride,
    cos_sin_stride,
    eps,
    SLICES: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    LEADS: tl.constexpr,
    WAITS: tl.constexpr,
):
    if WAITS:
        tl.extra.cuda.gdc_wait()
    if LEADS:  # attention, which may read what came before this before it waits
        tl.extra.cuda.gdc_launch_dependents()
    GROUPS: tl.constexpr = (H + 2 * G + HEADS - 1) // HEADS
    token = (tl.program_id(0) // GROUPS).to(tl.int64)
    head = (tl.program_id(0) % GROUPS * HEADS + tl.arange(0, HEADS))[:, None]
    a = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (a < HALF) & (head < H + 2 * G)
    is_query, is_key, is_value = head < H, (head >= H) & (head < H + G), head >= H + G
    at = qkv_TX + token * qkv_stride + head * (2 * HALF) + a
    x = tl.load(at, inside, 0.0)
    y = tl.load(at + HALF, inside, 0.0)
    dtype = x.dtype
    x, y = x.to(tl.float32), y.to(tl.float32)
    if SLICES > 1:
        for nth in tl.static_range(1, SLICES):
            x += tl.load(at + nth * slice_stride, inside, 0.0).to(tl.float32)
            y += tl.load(at + nth * slice_stride + HALF, inside, 0.0).to(tl.float32)
        x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)
    if q_norm_A is not None:
        mean = (tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * HALF)
        scale = tl.where(is_value, 1.0, tl.rsqrt(mean + eps)[:, None])
        x_weight = norm_weight_of(q_norm_A + a, k_norm_A + a, is_query & inside, is_key & inside)
        y_weight = norm_weight_of(
            q_norm_A + HALF + a, k_norm_A + HALF + a, is_query & inside, is_key & inside
        )
        x = ((x * scale).to(dtype).to(tl.float32) * x_weight).to(dtype).to(tl.float32)
        y = ((y * scale).to(dtype).to(tl.float32) * y_weight).to(dtype).to(tl.float32)
    # Loaded per head, as x and y are, so that no value changes threads.
    angles = cos_sin_LA + tl.load(positions_T + token) * cos_sin_stride + a
    rotated = inside & (head < H + G)
    cos = tl.load(angles, rotated, 1.0)
    sin = tl.load(angles + HALF, rotated, 0.0)
    first = (x * cos - y * sin).to(dtype)
    second = (y * cos + x * sin).to(dtype)
    q_at = q_THA + token * (H * 2 * HALF) + head * (2 * HALF) + a
    tl.store(q_at, first, inside & is_query)
    tl.store(q_at + HALF, second, inside & is_query)
    at_token = tl.load(slot_mapping_T + token) * (G * 2 * HALF)
    k_at = k_PSGA + at_token + (head - H) * (2 * HALF) + a
    tl.store(k_at, first, inside & is_key)
    tl.store(k_at + HALF, second, inside & is_key)
    v_at = v_PSGA + at_token + (head - H - G) * (2 * HALF) + a
    tl.store(v_at, first, inside & is_value)
    tl.store(v_at + HALF, second, inside & is_value)


@triton.jit
def norm_weight_of(q_norm_at, k_norm_at, is_query, is_key):
    """1 for value heads."""
    norm_weight = tl.load(q_norm_at, is_query, 0.0) + tl.load(k_norm_at, is_key, 0.0)
    return tl.where(is_query | is_key, norm_weight.to(tl.float32), 1.0)


def inputs(
    kind: str, T: int, H: int, G: int, A: int, dtype: torch.dtype, device: torch.device
) -> Args:
    """Cells are scattered over the pages, positions over the table. `plain`: no norm."""
    page_tokens, num_pages, length = 16, triton.cdiv(T, 16) + 2, 4096
    width = (H + 2 * G) * A
    qkv_TX = normal(device, T, width + 64 * (kind == "strided"), dtype=dtype)[:, :width]
    if kind == "spike":
        qkv_TX[:, A // 3 :: A] = 1e4
    if kind == "slices":
        qkv_TX = normal(device, 2, T, width, dtype=dtype)
    norm_weights: list[Tensor | None] = [None, None]
    if kind != "plain":
        norm_weights = [normal(device, A, dtype=dtype, seed=seed) for seed in (1, 2)]
    generator = torch.Generator().manual_seed(3)
    slot_mapping = torch.randperm(num_pages * page_tokens, generator=generator)[:T]
    positions = torch.randint(length, (T,), generator=generator)
    angles_LA = normal(device, length, A // 2, dtype=torch.float32, seed=4) * 3
    cos_sin_LA = torch.cat([angles_LA.cos(), angles_LA.sin()], 1)
    cache = normal(device, 2, num_pages, page_tokens, G, A, dtype=dtype, seed=5)
    return (
        qkv_TX, *norm_weights, 1e-6, cos_sin_LA, positions.to(device), slot_mapping.to(device),
        cache[0], cache[1],
    )  # fmt: skip


def outputs(q_THA: Tensor, args: Args) -> Tensors:
    return q_THA, args[7], args[8]


def pair_sizes(expected: Tensors, args: Args) -> Tensors:
    """A rotated element is the sum of two terms; together at most twice the larger of its pair."""
    largest = [torch.stack(tensor.abs().chunk(2, -1)).amax(0) for tensor in expected]
    return tuple(2 * torch.cat([half, half], -1) for half in largest)


def cases() -> tuple[Case, ...]:
    heads = ((16, 8, 128), (32, 8, 128), (14, 2, 64), (3, 1, 80), (16, 2, 256), (1, 1, 16))
    shapes = [("normal", T, *h, torch.bfloat16) for T in (1, 7, 513) for h in heads]
    shapes += [("normal", 7, 16, 8, 128, torch.float32), ("plain", 513, 32, 8, 128, torch.bfloat16)]
    shapes += [
        (kind, 7, 16, 8, 128, torch.bfloat16) for kind in ("plain", "strided", "spike", "slices")
    ]
    checked = [
        Case(
            f"{kind} T={T} H={H} G={G} A={A} {bits(dtype)}",
            partial(inputs, kind, T, H, G, A, dtype),
            T <= 7,
        )
        for kind, T, H, G, A, dtype in shapes
    ]
    timed = [
        Case(
            f"T={T} H={H} G={G} A=128",
            partial(inputs, "normal", T, H, G, 128, torch.bfloat16),
            num_bytes=2 * 2 * T * (H + 2 * G) * 128 + 4 * T * 128,
        )
        for T, H, G in ((1, 16, 8), (256, 16, 8), (256, 32, 8), (8192, 16, 8), (8192, 32, 8))
    ]
    return (*checked, *timed)


# 16 bit: an element of the normalised head and its product with the norm's weight may each round to
# the neighbouring number, and so may the sum. 32 bit: sums 8 additions deep and six roundings.
ROPE_STORE = Kernel(
    "rope_store",
    rope_store,
    reference.rope_store,
    cases(),
    ulps_16=3,
    ulps_32=16,
    scale=pair_sizes,
    outputs=outputs,
)
