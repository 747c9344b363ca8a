"""Gated delta rule for rows of one or few tokens, all between two projections in one launch.

The reference is reference.py. A program handles one value head of one row. It holds the head's
state, reads it once and writes it once. It also computes the convolutions of the head's queries,
keys and values, the gates, and the norm and gate of the output.

Decision: a state is float32 in registers, and has the dtype of its tensor in memory.

Decision: value heads that share queries and keys each convolve these. The last of their programs to
read the stored inputs shifts them by the new token; an atomic ticket identifies the last one. No
program waits for another.

Decision: a program takes its ticket while its state is still loading, and stores the state before
it normalises the output. Accesses after a store of 64 KB wait for that store. This order takes 288
us for 256 rows of Qwen3-Next instead of 332, 85 % of the copy rate. A third program per
multiprocessor, with fewer registers, takes 315 us, and other ways to load and store states take 310
to 320.

Decision: a row with drafts keeps the inputs of its tokens, a few KB each, and not the states after
them, 2 MB each. The next step applies the accepted ones to the state, which it reads
anyway.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.delta.reference import L2_EPS, DeltaWeights
from nanovllm_kernels.device import launches_early
from nanovllm_kernels.triton_parts import launch_dependents, wait

MOST_WARPS = 4  # with more threads than channels, threads would repeat convolutions of others
COLUMNS = 64  # columns of the state over neighbouring threads; with fewer, they cover more rows


def mix_decodes(
    qkv_TC: Tensor, a_TH: Tensor, b_TH: Tensor, z_THV: Tensor, weights: DeltaWeights,
    conv_NCW: Tensor, recurrent_NHKV: Tensor, slots_R: Tensor, tickets_RG: Tensor,
) -> Tensor:  # fmt: skip
    """Return x_THV of rows with one token each. tickets_RG is all zeros before and after."""
    inputs = qkv_TC, a_TH, b_TH, z_THV, weights, conv_NCW, recurrent_NHKV, slots_R
    return mix_drafted(*inputs, None, None, None, tickets_RG)


def mix_drafted(
    qkv_TC: Tensor, a_TH: Tensor, b_TH: Tensor, z_THV: Tensor, weights: DeltaWeights,
    conv_NCW: Tensor, recurrent_NHKV: Tensor, slots_R: Tensor, starts_R1: Tensor | None,
    inputs_NWX: Tensor | None, replays_R: Tensor | None, tickets_RG: Tensor,
) -> Tensor:  # fmt: skip
    """Return x_THV of rows with at most inputs_NWX.shape[1] tokens each, as reference.py does."""
    num_rows, (num_heads, k_size, v_size) = len(slots_R), recurrent_NHKV.shape[1:]
    num_key_heads = (qkv_TC.shape[1] - num_heads * v_size) // (2 * k_size)
    assert tickets_RG.shape[0] >= num_rows and tickets_RG.shape[1] == num_key_heads
    assert tickets_RG.is_contiguous() and weights.conv_CW.is_contiguous()
    assert 2 <= weights.conv_CW.shape[1] <= 4
    assert recurrent_NHKV[0].is_contiguous() and conv_NCW[0].is_contiguous()
    assert qkv_TC.stride(1) == a_TH.stride(1) == b_TH.stride(1) == z_THV.stride(2) == 1
    x_THV = torch.empty(z_THV.shape, dtype=z_THV.dtype, device=z_THV.device)
    waits = launches_early(num_rows, qkv_TC.device)
    blocks = triton.next_power_of_2(k_size), triton.next_power_of_2(v_size)
    warps = min(max(blocks[0] * blocks[1] // 4096, 1), MOST_WARPS)
    delta_decode_kernel[(num_rows * num_heads,)](
        qkv_TC, a_TH, b_TH, z_THV, weights.conv_CW, weights.a_log_H, weights.dt_bias_H,
        weights.norm_V, conv_NCW, recurrent_NHKV, slots_R, starts_R1, inputs_NWX, replays_R,
        tickets_RG, x_THV, qkv_TC.stride(0), a_TH.stride(0), b_TH.stride(0), *z_THV.stride()[:2],
        conv_NCW.stride(0), recurrent_NHKV.stride(0),
        *((0, 0) if inputs_NWX is None else inputs_NWX.stride()[:2]), weights.eps, L2_EPS,
        G=num_key_heads, H=num_heads, K=k_size, V=v_size, K_BLOCK=blocks[0], V_BLOCK=blocks[1],
        WIDTH=weights.conv_CW.shape[1], COLUMNS=min(COLUMNS, blocks[1]), WAITS=waits,
        launch_pdl=waits, num_warps=warps,
    )  # fmt: skip
    return x_THV


@triton.jit(do_not_specialize_on_alignment=["slots_R", "starts_R1", "replays_R"])
def delta_decode_kernel(
    qkv_TC, a_TH, b_TH, z_THV, conv_CW, a_log_H, dt_bias_H, norm_V, conv_NCW, recurrent_NHKV,
    slots_R, starts_R1, inputs_NWX, replays_R, tickets_RG, x_THV, qkv_stride, a_stride, b_stride,
    z_stride, z_head_stride, conv_stride, recurrent_stride, inputs_stride, inputs_token_stride, eps,
    l2_eps, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    wait(WAITS and inputs_NWX is not None)  # the previous launch may have written replays_R
    row, head = tl.program_id(0) // H, tl.program_id(0) % H
    key_head = head // (H // G)
    k, v = tl.arange(0, K_BLOCK), tl.arange(0, V_BLOCK)
    slot = tl.load(slots_R + row)
    state_at = recurrent_NHKV + slot * recurrent_stride + head * (K * V)
    # The state is [K, bands, COLUMNS], so that a thread holds queries and keys of fewer rows.
    band, column = tl.arange(0, V_BLOCK // COLUMNS), tl.arange(0, COLUMNS)
    v_of_state = (band[:, None] * COLUMNS + column[None, :])[None, :, :]
    state_at += k[:, None, None] * V + v_of_state
    in_state = (k < K)[:, None, None] & (v_of_state < V)
    # The state is loaded before a wait, since the previous launch does not write it.
    state = tl.load(state_at, in_state, 0.0, cache_modifier=".cg").to(tl.float32)
    # Token numbers begin with the accepted ones, whose inputs were kept. With kept inputs, the
    # stored state takes in these alone.
    first, num_right, num_taken, num_tokens, inputs_at = row.to(tl.int64), 0, 1, 1, None
    if inputs_NWX is not None:
        first = tl.load(starts_R1 + row).to(tl.int64)
        num_right = tl.load(replays_R + row)
        num_taken = num_right
        num_tokens = num_right + tl.load(starts_R1 + row + 1) - first.to(tl.int32)
        inputs_at = inputs_NWX + slot * inputs_stride
    C: tl.constexpr = 2 * G * K + H * V
    q_of, k_of, v_of = key_head * K + k, (G + key_head) * K + k, 2 * G * K + head * V + v
    q_weight = four_of(conv_CW + q_of * WIDTH, k < K, WIDTH, 4)
    k_weight = four_of(conv_CW + k_of * WIDTH, k < K, WIDTH, 4)
    v_weight = four_of(conv_CW + v_of * WIDTH, v < V, WIDTH, 4)
    conv_at = conv_NCW + slot * conv_stride
    q_past = four_of(conv_at + q_of * (WIDTH - 1), k < K, WIDTH, 3)
    k_past = four_of(conv_at + k_of * (WIDTH - 1), k < K, WIDTH, 3)
    v_past = four_of(conv_at + v_of * (WIDTH - 1), v < V, WIDTH, 3)
    q_conv, k_conv, v_conv = q_past, k_past, v_past
    rate = tl.exp(tl.load(a_log_H + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_H + head).to(tl.float32)
    norm_weight = tl.load(norm_V + v, v < V, 0.0).to(tl.float32)
    launch_dependents(WAITS)  # the next product prefetches its weights
    wait(WAITS and inputs_NWX is None)
    x = inputs_of(0, first, num_right, num_tokens, inputs_at, inputs_token_stride, qkv_TC,
                  qkv_stride, a_TH, a_stride, b_TH, b_stride, z_THV, z_stride, head * z_head_stride,
                  head, q_of, k_of, v_of, k, v, C, H, K, V)  # fmt: skip
    dtype = x_THV.dtype.element_ty
    for nth in range(num_tokens):
        q_now, k_now, v_now, a, b, z = x
        x = inputs_of(nth + 1, first, num_right, num_tokens, inputs_at, inputs_token_stride, qkv_TC,
                      qkv_stride, a_TH, a_stride, b_TH, b_stride, z_THV, z_stride,
                      head * z_head_stride, head, q_of, k_of, v_of, k, v, C, H, K, V)  # fmt: skip
        q = convolved(q_past, q_now, q_weight, dtype)
        key = convolved(k_past, k_now, k_weight, dtype)
        value = convolved(v_past, v_now, v_weight, dtype)
        q_past = (q_past[1], q_past[2], q_now, q_now)
        k_past = (k_past[1], k_past[2], k_now, k_now)
        v_past = (v_past[1], v_past[2], v_now, v_now)
        q *= tl.rsqrt(tl.sum(q * q, 0) + l2_eps) * (K**-0.5)
        key *= tl.rsqrt(tl.sum(key * key, 0) + l2_eps)
        qk = tl.sum(key * q, 0)
        if inputs_NWX is None:
            # All threads of the program wait for the ticket here. Its address depends on `qk`,
            # which is always below 2. So all threads have their stored inputs by then.
            ticket_at = tickets_RG + row * G + key_head + (qk > 2.0).to(tl.int32)
            moved = moved_by(ticket_at, H // G, key_head * 0 + K, "relaxed")
            in_k, in_v = k < moved, v < V
            store_past(conv_at, q_of, k_of, v_of, q_past, k_past, v_past, in_k, in_v, WIDTH)
        decay = tl.exp(-rate * softplus(a + dt_bias))
        o = value
        if nth >= num_right:
            o = tl.sum(state * q[:, None, None], 0).reshape(V_BLOCK)
        prediction = tl.sum(state * key[:, None, None], 0).reshape(V_BLOCK)
        update = (value - prediction * decay) * tl.sigmoid(b)
        added = update.reshape(V_BLOCK // COLUMNS, COLUMNS)[None, :, :]
        state = state * decay + key[:, None, None] * added
        if nth == num_taken - 1:
            tl.store(state_at, state, in_state)
            q_conv, k_conv, v_conv = q_past, k_past, v_past
        if nth >= num_right:
            o = (o * decay + qk * update).to(dtype).to(tl.float32)
            o = (o * tl.rsqrt(tl.sum(o * o, 0) / V + eps)).to(dtype).to(tl.float32) * norm_weight
            o = o.to(dtype).to(tl.float32) * z * tl.sigmoid(z)
            at = x_THV + (first + nth - num_right) * (H * V) + head * V + v
            tl.store(at, o.to(dtype), v < V)
    if inputs_NWX is not None:  # last, when the store of the state is already issued
        moved = moved_by(tickets_RG + row * G + key_head, H // G, key_head * 0 + K, "acq_rel")
        for nth in range(num_right, num_tokens):
            token, to = first + nth - num_right, inputs_at + (nth - num_right) * inputs_token_stride
            own = qkv_TC + token * qkv_stride
            tl.store(to + q_of, tl.load(own + q_of, k < moved), k < moved)
            tl.store(to + k_of, tl.load(own + k_of, k < moved), k < moved)
            tl.store(to + v_of, tl.load(own + v_of, v < V), v < V)
            tl.store(to + C + head, tl.load(a_TH + token * a_stride + head))
            tl.store(to + C + H + head, tl.load(b_TH + token * b_stride + head))
        store_past(conv_at, q_of, k_of, v_of, q_conv, k_conv, v_conv, k < moved, v < V, WIDTH)


@triton.jit
def store_past(
    conv_at, q_of, k_of, v_of, q_past, k_past, v_past, in_k, in_v, WIDTH: tl.constexpr
):  # fmt: skip
    """Store the channels' last WIDTH - 1 inputs, which the next token's convolution reads."""
    dtype = conv_at.dtype.element_ty
    for nth in tl.static_range(4 - WIDTH, 3):
        entry = nth - (4 - WIDTH)
        tl.store(conv_at + q_of * (WIDTH - 1) + entry, q_past[nth].to(dtype), in_k)
        tl.store(conv_at + k_of * (WIDTH - 1) + entry, k_past[nth].to(dtype), in_k)
        tl.store(conv_at + v_of * (WIDTH - 1) + entry, v_past[nth].to(dtype), in_v)


@triton.jit
def four_of(at, inside, WIDTH: tl.constexpr, NUM: tl.constexpr):
    """Return a channel's weights (NUM = 4) or stored inputs (NUM = 3), with zeros if WIDTH < 4."""
    a = inside.to(tl.float32) * 0.0
    b, c, d = a, tl.load(at + (WIDTH - 2), inside, 0.0).to(tl.float32), a
    if WIDTH > 3:
        a = tl.load(at + (WIDTH - 4), inside, 0.0).to(tl.float32)
    if WIDTH > 2:
        b = tl.load(at + (WIDTH - 3), inside, 0.0).to(tl.float32)
    if NUM > 3:
        d = tl.load(at + (WIDTH - 1), inside, 0.0).to(tl.float32)
    return a, b, c, d


@triton.jit
def inputs_of(
    nth, first, num_right, num_tokens, inputs_at, token_stride, qkv_TC, qkv_stride, a_TH, a_stride,
    b_TH, b_stride, z_THV, z_stride, z_from, head, q_of, k_of, v_of, k, v, C: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Return channels of q, k and v, a, b and z of the row's nth token, or 0 if it has no such."""
    is_own, token = (nth >= num_right) & (nth < num_tokens), first + nth - num_right
    own_k, own_v = k < tl.where(is_own, K, 0), v < tl.where(is_own, V, 0)
    at = qkv_TC + token * qkv_stride
    q, key, value = (
        tl.load(at + q_of, own_k, 0.0),
        tl.load(at + k_of, own_k, 0.0),
        tl.load(at + v_of, own_v, 0.0),
    )
    a = tl.load(a_TH + token * a_stride + head, is_own, 0.0)
    b = tl.load(b_TH + token * b_stride + head, is_own, 0.0)
    z = tl.load(z_THV + token * z_stride + z_from + v, own_v, 0.0)
    if inputs_at is not None:
        is_replay, at = nth < num_right, inputs_at + nth * token_stride
        replay_k, replay_v = k < tl.where(is_replay, K, 0), v < tl.where(is_replay, V, 0)
        q = tl.where(is_replay, tl.load(at + q_of, replay_k, 0.0), q)
        key = tl.where(is_replay, tl.load(at + k_of, replay_k, 0.0), key)
        value = tl.where(is_replay, tl.load(at + v_of, replay_v, 0.0), value)
        a = tl.where(is_replay, tl.load(at + C + head, is_replay, 0.0), a)
        b = tl.where(is_replay, tl.load(at + C + H + head, is_replay, 0.0), b)
    return (
        q.to(tl.float32), key.to(tl.float32), value.to(tl.float32), a.to(tl.float32),
        b.to(tl.float32), z.to(tl.float32),
    )  # fmt: skip


@triton.jit
def convolved(past, x, weight, dtype):
    """Return SiLU of the convolution at a token, rounded to the model's dtype, as float32."""
    y = past[0] * weight[0] + past[1] * weight[1] + past[2] * weight[2] + x * weight[3]
    return (y * tl.sigmoid(y)).to(dtype).to(tl.float32)


@triton.jit
def moved_by(ticket_at, NUM: tl.constexpr, moved, ORDER: tl.constexpr):
    """Return the number of query and key channels whose stored inputs this program shifts.

    It is `moved` in the last of the NUM programs that share the ticket, and 0 in the others. The
    last one runs when all of them have read the inputs.
    """
    tl.debug_barrier()
    if NUM > 1:
        is_last = tl.atomic_add(ticket_at, 1, sem=ORDER) == NUM - 1
        tl.store(ticket_at, 0, is_last)
        moved = tl.where(is_last, moved, 0)
    return moved


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))
