"""Per-head norm, rotary embedding and KV-cache store of a fused QKV projection, in one launch.

The reference is reference.py. A program takes HEADS heads of one token, of any kind. Query and key
heads are normalised (if there are norm weights) and rotated. Value heads are rotated by 0. Queries
go to a new tensor, keys and values to the cache. If only the first R elements of a head are
rotated, the others form pairs that are rotated by 0, too.

A norm over all heads of a row uses means of squares from a launch of `mean_squares` before. Under
tensor parallelism they are summed over ranks between the two launches.

A cache of float8_e4m3fn stores keys and values divided by a scale per layer and head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.device import launches_early
from nanovllm_kernels.norms.reference import Ranks
from nanovllm_kernels.triton_parts import INTERPRETED, launch_dependents, wait

MOST_OVERLAPPED = 128  # tokens up to which attention is launched before this ends
MAX_WIDTH = 16384  # elements of all heads whose squares are summed: they must fit in registers
HEADS = 8  # with heads of 128 and two warps, each thread loads 16 bytes of each half


def rope_store(
    qkv_TX: Tensor, q_norm_X: Tensor | None, k_norm_X: Tensor | None, eps: float,
    cos_sin_LA: Tensor, positions_T: Tensor, slot_mapping_T: Tensor, k_PSGA: Tensor, v_PSGA: Tensor,
    scales_2G: Tensor | None = None, ranks: Ranks | None = None,
) -> Tensor:  # fmt: skip
    """Return q_THA and write keys and values to the cache, as reference.rope_store describes."""
    num_kv_heads, head_size = k_PSGA.shape[2:]
    num_tokens = qkv_TX.shape[-2]
    num_heads = qkv_TX.shape[-1] // head_size - 2 * num_kv_heads
    assert k_PSGA.is_contiguous() and v_PSGA.is_contiguous() and qkv_TX.stride(-1) == 1
    assert (q_norm_X is None) == (k_norm_X is None)
    assert (scales_2G is None) == (k_PSGA.dtype != torch.float8_e4m3fn)
    means_T2 = None
    if ranks is not None:
        widths = num_heads * head_size, num_kv_heads * head_size
        means_T2 = ranks.all_reduce(mean_squares(qkv_TX, widths, ranks.tp_size))
    q_THA = torch.empty(num_tokens, num_heads, head_size, dtype=qkv_TX.dtype, device=qkv_TX.device)
    waits = launches_early(num_tokens, qkv_TX.device)
    num_groups = triton.cdiv(num_heads + 2 * num_kv_heads, HEADS)
    rope_store_kernel[(num_tokens * num_groups,)](
        qkv_TX, q_norm_X, k_norm_X, means_T2, cos_sin_LA, positions_T, slot_mapping_T, q_THA,
        k_PSGA, v_PSGA, scales_2G, qkv_TX.stride(0), qkv_TX.stride(-2), cos_sin_LA.stride(0), eps,
        SLICES=len(qkv_TX) if qkv_TX.ndim == 3 else 1, H=num_heads, G=num_kv_heads,
        HALF=head_size // 2, TURNED=cos_sin_LA.shape[1] // 2,
        HALF_BLOCK=triton.next_power_of_2(head_size // 2), HEADS=HEADS,
        LEADS=waits and num_tokens <= MOST_OVERLAPPED, WAITS=waits, num_warps=2, launch_pdl=waits,
    )  # fmt: skip
    return q_THA


@triton.jit(do_not_specialize_on_alignment=["positions_T", "slot_mapping_T"])
def rope_store_kernel(
    qkv_TX, q_norm_X, k_norm_X, means_T2, cos_sin_LA, positions_T, slot_mapping_T, q_THA, k_PSGA,
    v_PSGA, scales_2G, slice_stride, qkv_stride, cos_sin_stride, eps, SLICES: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, TURNED: tl.constexpr,
    HALF_BLOCK: tl.constexpr, HEADS: tl.constexpr, LEADS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    launch_dependents(LEADS)  # attention
    wait(WAITS)
    GROUPS: tl.constexpr = (H + 2 * G + HEADS - 1) // HEADS
    token = (tl.program_id(0) // GROUPS).to(tl.int64)
    head = (tl.program_id(0) % GROUPS * HEADS + tl.arange(0, HEADS))[:, None]
    a = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (a < HALF) & (head < H + 2 * G)
    is_query, is_key, is_value = head < H, (head >= H) & (head < H + G), head >= H + G
    # The two elements of each pair in a head; the first TURNED pairs are rotated.
    low, high = a, a + HALF
    if TURNED < HALF:
        low = tl.where(a < TURNED, a, a + TURNED)
        high = tl.where(a < TURNED, a + TURNED, a + HALF)
    at = qkv_TX + token * qkv_stride + head * (2 * HALF)
    x = tl.load(at + low, inside, 0.0)
    y = tl.load(at + high, inside, 0.0)
    dtype = x.dtype
    x, y = x.to(tl.float32), y.to(tl.float32)
    if SLICES > 1:
        for nth in tl.static_range(1, SLICES):
            x += tl.load(at + nth * slice_stride + low, inside, 0.0).to(tl.float32)
            y += tl.load(at + nth * slice_stride + high, inside, 0.0).to(tl.float32)
        x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)
    if q_norm_X is not None:
        if means_T2 is not None:
            mean = tl.load(means_T2 + token * 2 + is_key.to(tl.int32))
            q_norm_X += head * (2 * HALF)
            k_norm_X += (head - H) * (2 * HALF)
        else:
            mean = ((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * HALF))[:, None]
        scale = tl.where(is_value, 1.0, tl.rsqrt(mean + eps))
        of_query, of_key = is_query & inside, is_key & inside
        x_weight = norm_weight_of(q_norm_X + low, k_norm_X + low, of_query, of_key)
        y_weight = norm_weight_of(q_norm_X + high, k_norm_X + high, of_query, of_key)
        x = ((x * scale).to(dtype).to(tl.float32) * x_weight).to(dtype).to(tl.float32)
        y = ((y * scale).to(dtype).to(tl.float32) * y_weight).to(dtype).to(tl.float32)
    # The angles are loaded per head, as x and y are, so that no value moves between threads.
    angles = cos_sin_LA + tl.load(positions_T + token) * cos_sin_stride + a
    rotated = inside & (head < H + G) & (a < TURNED)
    cos = tl.load(angles, rotated, 1.0)
    sin = tl.load(angles + TURNED, rotated, 0.0)
    first = (x * cos - y * sin).to(dtype)
    second = (y * cos + x * sin).to(dtype)
    q_at = q_THA + token * (H * 2 * HALF) + head * (2 * HALF)
    tl.store(q_at + low, first, inside & is_query)
    tl.store(q_at + high, second, inside & is_query)
    if scales_2G is not None:
        of_head = tl.maximum(head - H, 0)  # scales of keys, then of values; unused for queries
        scale = tl.load(scales_2G + of_head, head < H + 2 * G, 1.0)
        first, second = quantised(first, scale, k_PSGA), quantised(second, scale, k_PSGA)
    at_token = tl.load(slot_mapping_T + token) * (G * 2 * HALF)
    k_at = k_PSGA + at_token + (head - H) * (2 * HALF)
    tl.store(k_at + low, first, inside & is_key)
    tl.store(k_at + high, second, inside & is_key)
    v_at = v_PSGA + at_token + (head - H - G) * (2 * HALF)
    tl.store(v_at + low, first, inside & is_value)
    tl.store(v_at + high, second, inside & is_value)


@triton.jit
def quantised(x, scale, like):
    """Return x / scale rounded to the type that `like` points to, as reference.quantised does."""
    x = x.to(tl.float32) / scale
    x = tl.minimum(tl.maximum(x, -448.0, tl.PropagateNan.ALL), 448.0, tl.PropagateNan.ALL)
    if INTERPRETED:
        # The interpreter's conversion rounds up without a carry, so x is rounded here: to 4
        # significant bits, or to multiples of 2**-9.
        large = x * 1048577.0
        x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, large - (large - x))
    return x.to(like.dtype.element_ty)


@triton.jit
def norm_weight_of(q_norm_at, k_norm_at, is_query, is_key):
    """Return the norm's weight of query and key heads, and 1 for value heads."""
    norm_weight = tl.load(q_norm_at, is_query, 0.0) + tl.load(k_norm_at, is_key, 0.0)
    return tl.where(is_query | is_key, norm_weight.to(tl.float32), 1.0)


def mean_squares(qkv_TX: Tensor, widths: tuple[int, int], num_ranks: int) -> Tensor:
    """Return float32 means_T2 of squares, as reference.mean_squares describes."""
    num_tokens, block = qkv_TX.shape[-2], triton.next_power_of_2(max(widths))
    assert block <= MAX_WIDTH and qkv_TX.stride(-1) == 1
    means_T2 = torch.empty(num_tokens, 2, dtype=torch.float32, device=qkv_TX.device)
    waits = launches_early(num_tokens, qkv_TX.device)
    mean_squares_kernel[(num_tokens, 2)](
        qkv_TX,
        means_T2,
        qkv_TX.stride(0),
        qkv_TX.stride(-2),
        1 / num_ranks,
        SLICES=len(qkv_TX) if qkv_TX.ndim == 3 else 1,
        Q_WIDTH=widths[0],
        K_WIDTH=widths[1],
        BLOCK=block,
        WAITS=waits,
        num_warps=min(max(block // 512, 1), 16),  # 16 elements per thread: two 16-byte loads
        launch_pdl=waits,
    )
    return means_T2


@triton.jit
def mean_squares_kernel(
    qkv_TX, means_T2, slice_stride, qkv_stride, share, SLICES: tl.constexpr, Q_WIDTH: tl.constexpr,
    K_WIDTH: tl.constexpr, BLOCK: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    wait(WAITS)
    token, nth = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width = tl.where(nth == 0, Q_WIDTH, K_WIDTH)
    n = tl.arange(0, BLOCK)
    at = qkv_TX + token * qkv_stride + nth * Q_WIDTH + n
    x = tl.load(at, n < width, 0.0).to(tl.float32)
    for another in tl.static_range(1, SLICES):
        x += tl.load(at + another * slice_stride, n < width, 0.0).to(tl.float32)
    tl.store(means_T2 + token * 2 + nth, tl.sum(x * x, 0) / width * share)
