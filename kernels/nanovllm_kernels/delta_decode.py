"""The gated delta rule of rows of one or few tokens: all between two projections in one launch.

Meaning: delta_reference. A program has one row's head of values: it holds the head's state, reads
it once and writes it once. With it go the convolutions of the head's queries, keys and values, the
gates, and norm and gate of what comes out.

Decision: heads of values that share queries and keys each convolve these. The last of them to have
read the stored inputs moves these on: its ticket tells it that it is the last. No program waits.

Decision: a row with drafts keeps its tokens' inputs, a few KB each, instead of states, 2 MB each.
The next step takes in those that were right, into the state that it reads anyway.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.delta_reference import L2_EPS, DeltaWeights
from nanovllm_kernels.device import follows

MOST_WARPS = 4  # with more threads than channels each would convolve what it needs, as others do


def mix_decodes(
    qkv_TC: Tensor, a_TH: Tensor, b_TH: Tensor, z_THV: Tensor, weights: DeltaWeights,
    conv_NCW: Tensor, recurrent_NHKV: Tensor, slots_R: Tensor, tickets_RG: Tensor,
) -> Tensor:  # fmt: skip
    """x_THV of rows that each have one token. tickets_RG: zeros, before and after."""
    tokens, states = (qkv_TC, a_TH, b_TH, z_THV), (conv_NCW, recurrent_NHKV)
    return _launch(tokens, weights, states, slots_R, None, None, None, tickets_RG)


def mix_drafted(
    qkv_TC: Tensor, a_TH: Tensor, b_TH: Tensor, z_THV: Tensor, weights: DeltaWeights,
    conv_NCW: Tensor, recurrent_NHKV: Tensor, slots_R: Tensor, starts_R1: Tensor, kept_NWX: Tensor,
    replays_R: Tensor, tickets_RG: Tensor,
) -> Tensor:  # fmt: skip
    """x_THV of rows that each have at most as many tokens as are kept: delta_reference."""
    tokens, states = (qkv_TC, a_TH, b_TH, z_THV), (conv_NCW, recurrent_NHKV)
    return _launch(tokens, weights, states, slots_R, starts_R1, kept_NWX, replays_R, tickets_RG)


def _launch(
    tokens: tuple[Tensor, ...], weights: DeltaWeights, states: tuple[Tensor, Tensor],
    slots_R: Tensor, starts_R1: Tensor | None, kept_NWX: Tensor | None, replays_R: Tensor | None,
    tickets_RG: Tensor,
) -> Tensor:  # fmt: skip
    qkv_TC, a_TH, b_TH, z_THV = tokens
    conv_NCW, recurrent_NHKV = states
    num_rows, (num_heads, k_size, v_size) = len(slots_R), recurrent_NHKV.shape[1:]
    num_key_heads = (qkv_TC.shape[1] - num_heads * v_size) // (2 * k_size)
    assert tickets_RG.shape[0] >= num_rows and tickets_RG.shape[1] == num_key_heads
    assert tickets_RG.is_contiguous() and weights.conv_CW.is_contiguous()
    assert recurrent_NHKV[0].is_contiguous() and conv_NCW[0].is_contiguous()
    assert qkv_TC.stride(1) == a_TH.stride(1) == b_TH.stride(1) == z_THV.stride(2) == 1
    x_THV = torch.empty(z_THV.shape, dtype=z_THV.dtype, device=z_THV.device)
    waits = follows(num_rows, qkv_TC.device)
    blocks = triton.next_power_of_2(k_size), triton.next_power_of_2(v_size)
    warps = min(max(blocks[0] * blocks[1] // 4096, 1), MOST_WARPS)
    delta_decode_kernel[(num_rows * num_heads,)](
        qkv_TC, a_TH, b_TH, z_THV, weights.conv_CW, weights.a_log_H, weights.dt_bias_H,
        weights.norm_V, conv_NCW, recurrent_NHKV, slots_R, starts_R1, kept_NWX, replays_R,
        tickets_RG, x_THV, qkv_TC.stride(0), a_TH.stride(0), b_TH.stride(0), *z_THV.stride()[:2],
        conv_NCW.stride(0), recurrent_NHKV.stride(0),
        *((0, 0) if kept_NWX is None else kept_NWX.stride()[:2]), weights.eps, L2_EPS,
        G=num_key_heads, H=num_heads, K=k_size, V=v_size, K_BLOCK=blocks[0], V_BLOCK=blocks[1],
        WIDTH=weights.conv_CW.shape[1], WAITS=waits, launch_pdl=waits, num_warps=warps,
    )  # fmt: skip
    return x_THV


@triton.jit(do_not_specialize_on_alignment=["slots_R", "starts_R1", "replays_R"])
def delta_decode_kernel(
    qkv_TC, a_TH, b_TH, z_THV, conv_CW, a_log_H, dt_bias_H, norm_V, conv_NCW, recurrent_NHKV,
    slots_R, starts_R1, kept_NWX, replays_R, tickets_RG, x_THV, qkv_stride, a_stride, b_stride,
    z_stride, z_head_stride, conv_stride, recurrent_stride, kept_stride, kept_token_stride, eps,
    l2_eps, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0) // H, tl.program_id(0) % H
    key_head = head // (H // G)
    k, v = tl.arange(0, K_BLOCK), tl.arange(0, V_BLOCK)
    slot = tl.load(slots_R + row)
    state_at = recurrent_NHKV + slot * recurrent_stride + head * (K * V)
    state_at += k[:, None] * V + v[None, :]
    in_state = (k < K)[:, None] & (v < V)[None, :]
    state = tl.load(state_at, in_state, 0.0)  # before the wait: the launch before left it alone
    # Tokens are counted from those that turned out right, which are kept. The state takes in these.
    first, num_right, num_taken, num_tokens, kept_at = row.to(tl.int64), 0, 1, 1, None
    if kept_NWX is not None:
        first = tl.load(starts_R1 + row).to(tl.int64)
        num_right = tl.load(replays_R + row)
        num_taken = num_right
        num_tokens = num_right + tl.load(starts_R1 + row + 1) - first.to(tl.int32)
        kept_at = kept_NWX + slot * kept_stride
    q_from, k_from, v_from = key_head * K, (G + key_head) * K, 2 * G * K + head * V
    rate = tl.exp(tl.load(a_log_H + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_H + head).to(tl.float32)
    norm_weight = tl.load(norm_V + v, v < V, 0.0).to(tl.float32)
    conv_at = conv_NCW + slot * conv_stride
    own_at = qkv_TC + (first - num_right) * qkv_stride
    if WAITS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for nth in range(num_tokens):
        q = convolved(nth, q_from, k, K, conv_CW, own_at, qkv_stride, kept_at, kept_token_stride,
                      num_right, conv_at, WIDTH)  # fmt: skip
        key = convolved(nth, k_from, k, K, conv_CW, own_at, qkv_stride, kept_at, kept_token_stride,
                        num_right, conv_at, WIDTH)  # fmt: skip
        value = convolved(nth, v_from, v, V, conv_CW, own_at, qkv_stride, kept_at,
                          kept_token_stride, num_right, conv_at, WIDTH)  # fmt: skip
        q *= tl.rsqrt(tl.sum(q * q, 0) + l2_eps) * (K**-0.5)
        key *= tl.rsqrt(tl.sum(key * key, 0) + l2_eps)
        is_own, token = nth >= num_right, first + nth - num_right
        a = tl.load(a_TH + token * a_stride + head, is_own, 0.0)
        b = tl.load(b_TH + token * b_stride + head, is_own, 0.0)
        if kept_NWX is not None:
            gate_at = kept_at + nth * kept_token_stride + (2 * G * K + H * V) + head
            a = tl.where(is_own, a, tl.load(gate_at, nth < num_right, 0.0))
            b = tl.where(is_own, b, tl.load(gate_at + H, nth < num_right, 0.0))
        decay = tl.exp(-rate * softplus(a.to(tl.float32) + dt_bias))
        read = tl.sum(state * key[:, None], 0) * decay
        written = (value - read) * tl.sigmoid(b.to(tl.float32))
        o = tl.sum(state * q[:, None], 0) * decay + tl.sum(key * q, 0) * written
        state = state * decay + key[:, None] * written[None, :]
        if nth == num_taken - 1:
            tl.store(state_at, state, in_state)
        dtype = x_THV.dtype.element_ty
        o = o.to(dtype).to(tl.float32)
        o = (o * tl.rsqrt(tl.sum(o * o, 0) / V + eps)).to(dtype).to(tl.float32) * norm_weight
        shown = v < tl.where(is_own, V, 0)
        z = tl.load(z_THV + token * z_stride + head * z_head_stride + v, shown, 0.0)
        z = z.to(tl.float32)
        o = o.to(dtype).to(tl.float32) * z * tl.sigmoid(z)
        tl.store(x_THV + token * (H * V) + head * V + v, o.to(dtype), shown)
    moved = K  # channels of queries and of keys that this program moves on
    tl.debug_barrier()  # all threads have read
    if H > G:
        ticket_at = tickets_RG + row * G + key_head
        is_last = tl.atomic_add(ticket_at, 1) == H // G - 1
        tl.store(ticket_at, 0, is_last)
        moved = tl.where(is_last, K, 0)
    for nth in tl.static_range(WIDTH - 1):
        at = num_taken + nth - (WIDTH - 1)
        q = input_at(at, q_from, k, moved, own_at, qkv_stride, kept_at, kept_token_stride,
                     num_right, conv_at, WIDTH)  # fmt: skip
        key = input_at(at, k_from, k, moved, own_at, qkv_stride, kept_at, kept_token_stride,
                       num_right, conv_at, WIDTH)  # fmt: skip
        value = input_at(at, v_from, v, V, own_at, qkv_stride, kept_at, kept_token_stride,
                         num_right, conv_at, WIDTH)  # fmt: skip
        tl.debug_barrier()  # what is overwritten now is read no more
        tl.store(conv_at + (q_from + k) * (WIDTH - 1) + nth, q, k < moved)
        tl.store(conv_at + (k_from + k) * (WIDTH - 1) + nth, key, k < moved)
        tl.store(conv_at + (v_from + v) * (WIDTH - 1) + nth, value, v < V)
    if kept_NWX is not None:
        for nth in range(num_right, num_tokens):
            to, own = kept_at + (nth - num_right) * kept_token_stride, own_at + nth * qkv_stride
            tl.store(to + q_from + k, tl.load(own + q_from + k, k < moved), k < moved)
            tl.store(to + k_from + k, tl.load(own + k_from + k, k < moved), k < moved)
            tl.store(to + v_from + v, tl.load(own + v_from + v, v < V), v < V)
            token = first + nth - num_right
            to += 2 * G * K + H * V + head
            tl.store(to, tl.load(a_TH + token * a_stride + head))
            tl.store(to + H, tl.load(b_TH + token * b_stride + head))


@triton.jit
def input_at(
    at, start, channel, size, own_at, own_stride, kept_at, kept_stride, num_right, conv_at,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """What came before the row's tokens, one that turned out right, or one of its own."""
    stored = channel < tl.where(at < 0, size, 0)
    own = channel < tl.where((at >= 0) & (at >= num_right), size, 0)
    of = start + channel
    x = tl.load(conv_at + of * (WIDTH - 1) + (at + WIDTH - 1), stored, 0.0)
    x = tl.where(own, tl.load(own_at + at * own_stride + of, own, 0.0), x)
    if kept_at is not None:
        kept = channel < tl.where((at >= 0) & (at < num_right), size, 0)
        x = tl.where(kept, tl.load(kept_at + at * kept_stride + of, kept, 0.0), x)
    return x


@triton.jit
def convolved(
    nth, start, channel, size, conv_CW, own_at, own_stride, kept_at, kept_stride, num_right,
    conv_at, WIDTH: tl.constexpr,
):  # fmt: skip
    """The convolution at the row's nth token, rounded to the model's dtype, in float32."""
    weight_at, y = conv_CW + (start + channel) * WIDTH, 0.0
    for tap in tl.static_range(WIDTH):
        x = input_at(nth - (WIDTH - 1) + tap, start, channel, size, own_at, own_stride, kept_at,
                     kept_stride, num_right, conv_at, WIDTH)  # fmt: skip
        y += x.to(tl.float32) * tl.load(weight_at + tap, channel < size, 0.0).to(tl.float32)
    return (y * tl.sigmoid(y)).to(own_at.dtype.element_ty).to(tl.float32)


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))
