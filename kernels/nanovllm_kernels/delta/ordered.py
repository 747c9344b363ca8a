"""Gated delta rule token by token, with the same arithmetic for chunks, decode rows and drafts.

The reference is reference.py. These are the kernels of kernels.invariant. The chunkwise form of
prefill.py rounds otherwise than decode.py, and its pieces begin where a chunk begins. Here one
kernel goes through the tokens of any row, so the bits of a token do not depend on its chunk. It is
compiled once: all that differs between chunks, decode rows and drafts is an argument, not a
constant.

Decision: a state is rounded to the dtype of its tensor after each token, as if each token were a
step of its own.

Decision: stored inputs of the convolution are shifted by a launch of their own. All heads have read
them by then, so no tickets are needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.delta.decode import COLUMNS, MOST_WARPS, convolved, four_of, softplus
from nanovllm_kernels.delta.reference import L2_EPS, DeltaWeights

CHANNELS = 256  # channels of a program that only copies


def mix_rows(
    qkv_TC: Tensor, a_TH: Tensor, b_TH: Tensor, z_THV: Tensor, weights: DeltaWeights,
    conv_NCW: Tensor, recurrent_NHKV: Tensor, slots_R: Tensor, starts_R1: Tensor,
    parts_X: Tensor | None = None, targets_X: Tensor | None = None, *saved: Tensor,
    out_THV: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return x_THV, which is out_THV if given. Tokens of no row are not written.

    `saved` is as in reference.py; its rows have the strides of the states' rows.
    """
    x_THV = like(z_THV) if out_THV is None else out_THV
    states = RowStates(weights, conv_NCW, recurrent_NHKV, slots_R)
    if parts_X is None or targets_X is None:
        states.advance((qkv_TC, a_TH, b_TH), starts_R1, z_THV=z_THV, x_THV=x_THV)
        return x_THV
    targets = targets_X, *(saved or (conv_NCW, recurrent_NHKV))
    for part in range(2):
        states.advance(
            (qkv_TC, a_TH, b_TH), parts_X[part:], step=2, z_THV=z_THV, x_THV=x_THV,
            targets=None if part else targets,
        )  # fmt: skip
    return x_THV


def mix_decodes(
    qkv_TC: Tensor, a_TH: Tensor, b_TH: Tensor, z_THV: Tensor, weights: DeltaWeights,
    conv_NCW: Tensor, recurrent_NHKV: Tensor, slots_R: Tensor, _: Tensor,
) -> Tensor:  # fmt: skip
    """Return x_THV of rows with one token each. The last argument is for other kernels."""
    starts_R1 = torch.arange(len(slots_R) + 1, dtype=torch.int32, device=slots_R.device)
    inputs = qkv_TC, a_TH, b_TH, z_THV, weights, conv_NCW, recurrent_NHKV, slots_R
    return mix_rows(*inputs, starts_R1)


def mix_drafted(
    qkv_TC: Tensor, a_TH: Tensor, b_TH: Tensor, z_THV: Tensor, weights: DeltaWeights,
    conv_NCW: Tensor, recurrent_NHKV: Tensor, slots_R: Tensor, starts_R1: Tensor,
    inputs_NWX: Tensor, replays_R: Tensor, _: Tensor,
) -> Tensor:  # fmt: skip
    """Return x_THV of rows with at most inputs_NWX.shape[1] tokens each, as reference.py does.

    The last argument is for other kernels.
    """
    assert inputs_NWX.is_contiguous()
    (_, width, size), (_, C), H = inputs_NWX.shape, qkv_TC.shape, a_TH.shape[1]
    states = RowStates(weights, conv_NCW, recurrent_NHKV, slots_R)
    x_THV, first_R = like(z_THV), slots_R.int() * width
    replayed_X = torch.stack([first_R, first_R + replays_R.int()], 1).flatten()
    states.advance(inputs_NWX.view(-1, size).split([C, H, H], 1), replayed_X, step=2)
    tokens = qkv_TC, a_TH, b_TH
    states.advance(tokens, starts_R1, z_THV=z_THV, x_THV=x_THV, stores=False)
    keep_kernel[(len(slots_R) * width, triton.cdiv(C + 2 * H, CHANNELS))](
        *tokens, slots_R, starts_R1, inputs_NWX, *(each.stride(0) for each in tokens),
        *inputs_NWX.stride()[:2], W=width, C=C, H=H, BLOCK=CHANNELS,
    )  # fmt: skip
    return x_THV


def like(z_THV: Tensor) -> Tensor:
    """Return an uninitialised contiguous tensor."""
    return torch.empty(z_THV.shape, dtype=z_THV.dtype, device=z_THV.device)


@dataclass(frozen=True, slots=True)
class RowStates:
    """States of rows, and the weights of their layer."""

    weights: DeltaWeights
    conv_NCW: Tensor
    recurrent_NHKV: Tensor
    slots_R: Tensor

    def advance(
        self,
        tokens: tuple[Tensor, ...],
        starts_X: Tensor,
        *,
        step: int = 1,
        z_THV: Tensor | None = None,
        x_THV: Tensor | None = None,
        stores: bool = True,
        targets: tuple[Tensor, ...] | None = None,
    ) -> None:
        """Apply tokens (qkv_TC, a_TH, b_TH) to the states, and write their outputs to x_THV.

        Row r has tokens starts_X[step * r] to before starts_X[step * r + 1]. Without x_THV there
        are no outputs. Without `stores` the states stay as they are. `targets` are targets_X, whose
        every second number is a row of two other state tensors or -1, and these tensors. They
        receive the states after the tokens, as in reference.py.
        """
        qkv_TC, a_TH, b_TH = tokens
        conv_CW, num_rows = self.weights.conv_CW, len(self.slots_R)
        (num_heads, K, V), (_, C) = self.recurrent_NHKV.shape[1:], qkv_TC.shape
        assert self.recurrent_NHKV[0].is_contiguous() and self.conv_NCW[0].is_contiguous()
        assert qkv_TC.stride(1) == a_TH.stride(1) == b_TH.stride(1) == 1
        assert 2 <= conv_CW.shape[1] <= 4 and conv_CW.is_contiguous()
        targets_X, saved_NCW, saved_NHKV = targets or (starts_X, self.conv_NCW, self.recurrent_NHKV)
        saves = targets is not None
        z = self.recurrent_NHKV.new_empty(1, 1, 1, dtype=qkv_TC.dtype) if z_THV is None else z_THV
        assert z.stride(2) == 1 and (x_THV is None or x_THV.is_contiguous())
        blocks = triton.next_power_of_2(K), triton.next_power_of_2(V)
        ordered_kernel[(num_rows * num_heads,)](
            qkv_TC, a_TH, b_TH, z, conv_CW, self.weights.a_log_H, self.weights.dt_bias_H,
            self.weights.norm_V, self.conv_NCW, self.recurrent_NHKV, self.slots_R, starts_X,
            targets_X, saved_NHKV, z if x_THV is None else x_THV, step, int(x_THV is not None),
            int(stores), int(saves), qkv_TC.stride(0), a_TH.stride(0), b_TH.stride(0),
            *z.stride()[:2],
            self.conv_NCW.stride(0), self.recurrent_NHKV.stride(0), self.weights.eps, L2_EPS,
            G=(C - num_heads * V) // (2 * K), H=num_heads, K=K, V=V, K_BLOCK=blocks[0],
            V_BLOCK=blocks[1], WIDTH=conv_CW.shape[1], COLUMNS=min(COLUMNS, blocks[1]),
            num_warps=min(max(blocks[0] * blocks[1] // 4096, 1), MOST_WARPS),
        )  # fmt: skip
        if stores:
            past_kernel[(num_rows, triton.cdiv(C, CHANNELS))](
                qkv_TC, self.conv_NCW, saved_NCW, self.slots_R, starts_X, targets_X, step,
                int(saves), qkv_TC.stride(0), self.conv_NCW.stride(0), C=C, WIDTH=conv_CW.shape[1],
                BLOCK=CHANNELS,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=["step", "writes", "stores", "saves", "z_stride", "z_head_stride"],
    do_not_specialize_on_alignment=["slots_R", "starts_X", "targets_X"],
)
def ordered_kernel(
    qkv_TC, a_TH, b_TH, z_THV, conv_CW, a_log_H, dt_bias_H, norm_V, conv_NCW, recurrent_NHKV,
    slots_R, starts_X, targets_X, saved_NHKV, x_THV, step, writes, stores, saves, qkv_stride,
    a_stride, b_stride, z_stride, z_head_stride, conv_stride, recurrent_stride, eps, l2_eps,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Go through the tokens of one row with one value head. The arithmetic is that of decode.py."""
    row, head = tl.program_id(0) // H, tl.program_id(0) % H
    key_head = head // (H // G)
    k, v = tl.arange(0, K_BLOCK), tl.arange(0, V_BLOCK)
    slot = tl.load(slots_R + row).to(tl.int64)
    begin = tl.load(starts_X + row * step).to(tl.int64)
    num_tokens = tl.load(starts_X + row * step + 1).to(tl.int64) - begin
    band, column = tl.arange(0, V_BLOCK // COLUMNS), tl.arange(0, COLUMNS)
    v_of_state = (band[:, None] * COLUMNS + column[None, :])[None, :, :]
    in_state = (k < K)[:, None, None] & (v_of_state < V)
    of_state = head * (K * V) + k[:, None, None] * V + v_of_state
    stored = recurrent_NHKV.dtype.element_ty
    state = tl.load(recurrent_NHKV + slot * recurrent_stride + of_state, in_state, 0.0)
    state = state.to(tl.float32)
    q_of, k_of, v_of = key_head * K + k, (G + key_head) * K + k, 2 * G * K + head * V + v
    q_weight = four_of(conv_CW + q_of * WIDTH, k < K, WIDTH, 4)
    k_weight = four_of(conv_CW + k_of * WIDTH, k < K, WIDTH, 4)
    v_weight = four_of(conv_CW + v_of * WIDTH, v < V, WIDTH, 4)
    conv_at = conv_NCW + slot * conv_stride
    q_past = four_of(conv_at + q_of * (WIDTH - 1), k < K, WIDTH, 3)
    k_past = four_of(conv_at + k_of * (WIDTH - 1), k < K, WIDTH, 3)
    v_past = four_of(conv_at + v_of * (WIDTH - 1), v < V, WIDTH, 3)
    rate = tl.exp(tl.load(a_log_H + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_H + head).to(tl.float32)
    norm_weight = tl.load(norm_V + v, v < V, 0.0).to(tl.float32)
    dtype = x_THV.dtype.element_ty
    in_v, in_output = v < V, v < V * writes
    for nth in range(num_tokens):
        token = begin + nth
        own = qkv_TC + token * qkv_stride
        q_now = tl.load(own + q_of, k < K, 0.0).to(tl.float32)
        k_now = tl.load(own + k_of, k < K, 0.0).to(tl.float32)
        v_now = tl.load(own + v_of, in_v, 0.0).to(tl.float32)
        a = tl.load(a_TH + token * a_stride + head).to(tl.float32)
        b = tl.load(b_TH + token * b_stride + head).to(tl.float32)
        z_at = z_THV + token * z_stride + head * z_head_stride + v
        z = tl.load(z_at, in_output, 0.0).to(tl.float32)
        q = convolved(q_past, q_now, q_weight, dtype)
        key = convolved(k_past, k_now, k_weight, dtype)
        value = convolved(v_past, v_now, v_weight, dtype)
        q_past = (q_past[1], q_past[2], q_now, q_now)
        k_past = (k_past[1], k_past[2], k_now, k_now)
        v_past = (v_past[1], v_past[2], v_now, v_now)
        q *= tl.rsqrt(tl.sum(q * q, 0) + l2_eps) * (K**-0.5)
        key *= tl.rsqrt(tl.sum(key * key, 0) + l2_eps)
        qk = tl.sum(key * q, 0)
        decay = tl.exp(-rate * softplus(a + dt_bias))
        o = tl.sum(state * q[:, None, None], 0).reshape(V_BLOCK)
        prediction = tl.sum(state * key[:, None, None], 0).reshape(V_BLOCK)
        update = (value - prediction * decay) * tl.sigmoid(b)
        added = update.reshape(V_BLOCK // COLUMNS, COLUMNS)[None, :, :]
        state = (state * decay + key[:, None, None] * added).to(stored).to(tl.float32)
        o = (o * decay + qk * update).to(dtype).to(tl.float32)
        o = (o * tl.rsqrt(tl.sum(o * o, 0) / V + eps)).to(dtype).to(tl.float32) * norm_weight
        o = o.to(dtype).to(tl.float32) * z * tl.sigmoid(z)
        tl.store(x_THV + token * (H * V) + head * V + v, o.to(dtype), in_output)
    state_at = recurrent_NHKV + slot * recurrent_stride + of_state
    in_k, in_columns = (k < K * stores)[:, None, None], v_of_state < V
    tl.store(state_at, state.to(stored), in_k & in_columns)
    target = target_of(targets_X, row * step, saves)
    in_k = (k < tl.where(target < 0, 0, K))[:, None, None]
    saved_at = saved_NHKV + target * recurrent_stride + of_state
    tl.store(saved_at, state.to(stored), in_k & in_columns)


@triton.jit
def target_of(targets_X, at, saves):
    """Return the row that receives a copy of the state, or -1 for none."""
    target = tl.load(targets_X + at).to(tl.int64)
    return tl.where(saves > 0, target, -1)


@triton.jit(
    do_not_specialize=["step", "saves"],
    do_not_specialize_on_alignment=["slots_R", "starts_X", "targets_X"],
)
def past_kernel(
    qkv_TC, conv_NCW, saved_NCW, slots_R, starts_X, targets_X, step, saves, qkv_stride,
    conv_stride, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the latest WIDTH - 1 inputs of a row's channels, oldest first, as its next past."""
    row, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_R + row).to(tl.int64)
    begin = tl.load(starts_X + row * step).to(tl.int64)
    end = tl.load(starts_X + row * step + 1).to(tl.int64)
    target = target_of(targets_X, row * step, saves)
    is_saved = c < tl.where(target < 0, 0, C)
    of_channel = c * (WIDTH - 1)
    for nth in tl.static_range(WIDTH - 1):  # an entry is read before it is written
        token = end - (WIDTH - 1) + nth
        is_own, before = token >= begin, nth + tl.minimum(end - begin, WIDTH - 1 - nth)
        own = tl.load(qkv_TC + token * qkv_stride + c, c < tl.where(is_own, C, 0), 0.0)
        at = conv_NCW + slot * conv_stride + of_channel
        old = tl.load(at + tl.where(is_own, nth, before), c < C, 0.0)
        past = tl.where(is_own, own.to(old.dtype), old)
        tl.store(at + nth, past, c < C)
        tl.store(saved_NCW + target * conv_stride + of_channel + nth, past, is_saved)


@triton.jit(do_not_specialize_on_alignment=["slots_R", "starts_R1"])
def keep_kernel(
    qkv_TC, a_TH, b_TH, slots_R, starts_R1, inputs_NWX, qkv_stride, a_stride, b_stride,
    inputs_stride, inputs_token_stride, W: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Keep the inputs of a row's nth token: qkv, a and b."""
    row, nth = tl.program_id(0) // W, tl.program_id(0) % W
    token = tl.load(starts_R1 + row).to(tl.int64) + nth
    end = tl.load(starts_R1 + row + 1)
    x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    size = tl.where(token < end, C + 2 * H, 0)  # 0 if the row has no such token
    is_a, is_b = (x >= C) & (x < C + H), (x >= C + H) & (x < C + 2 * H)
    value = tl.load(qkv_TC + token * qkv_stride + x, (x < C) & (x < size), 0.0)
    a = tl.load(a_TH + token * a_stride + x - C, is_a & (x < size), 0.0)
    b = tl.load(b_TH + token * b_stride + x - (C + H), is_b & (x < size), 0.0)
    value = tl.where(is_a, a, tl.where(is_b, b, value))
    slot = tl.load(slots_R + row).to(tl.int64)
    to = inputs_NWX + slot * inputs_stride + nth * inputs_token_stride
    tl.store(to + x, value, x < size)
