"""Gated delta rule for rows of any length, in chunkwise parallel form with pieces of PIECE tokens.

The reference is reference.py; the form is that of Gated Delta Networks (Yang, Kautz and Hatamizadeh
2024). There are four launches. `conv_kernel` convolves and normalises. `pieces_kernel` computes all
that needs no state, for all pieces in parallel. Let F be the decays from token to token, and T = (I
+ A)^-1 for A = beta (k k^T F), strictly lower triangular. A piece writes u = T beta v to an empty
state. For a state before it, the product of w = T beta e^g k with that state is subtracted from u.
Queries attend to the keys of their own piece by (q k^T) F. `scan_kernel` goes through a row's
pieces with a part of a head's state in registers. `gated_norm_kernel` applies norm and gate.

Decision: gates, their sums, A, T and states are float32. Operands of tensor cores, including a copy
of the state, are rounded to the model's dtype first. To compute T, A is rounded to float16.

Decision: a program finds its piece from the rows' starts itself. The host has an upper bound of the
number of pieces, and a launch saved is worth more than the programs that find no piece.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.delta.decode import softplus
from nanovllm_kernels.delta.reference import L2_EPS, DeltaWeights
from nanovllm_kernels.triton_parts import INTERPRETED, dot

PIECE = 64
CONVOLVED, LENGTH = 64, 8  # tokens that a program convolves for one head, and tokens of one run
ROWS = 32  # rows whose starts are read at once
STAGES, WARPS = 3, 4  # pipeline stages and warps of the scan
PARTS = 64  # elements of a value per program of the scan
LOG2_E = tl.constexpr(1.4426950408889634)


def mix_rows(
    qkv_TC: Tensor, a_TH: Tensor, b_TH: Tensor, z_THV: Tensor, weights: DeltaWeights,
    conv_NCW: Tensor, recurrent_NHKV: Tensor, slots_R: Tensor, starts_R1: Tensor,
    parts_X: Tensor | None = None, targets_X: Tensor | None = None, *saved: Tensor,
    out_THV: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return x_THV, which is out_THV if given. Tokens of no row are not written.

    `saved` is as in reference.py; its rows have the strides of the states' rows.
    """
    saved = saved or (conv_NCW, recurrent_NHKV)
    if parts_X is None or targets_X is None:
        parts_X = starts_R1.repeat_interleave(2)[:-1]
        targets_X = torch.stack([torch.full_like(slots_R, -1), slots_R], 1).int()
    num_rows, (T, C), (_, H, K, V) = len(slots_R), qkv_TC.shape, recurrent_NHKV.shape
    assert recurrent_NHKV[0].is_contiguous() and conv_NCW[0].is_contiguous()
    assert qkv_TC.stride(1) == a_TH.stride(1) == b_TH.stride(1) == z_THV.stride(2) == 1
    assert 2 <= weights.conv_CW.shape[1] <= 4
    G, dtype, device = (C - H * V) // (2 * K), qkv_TC.dtype, qkv_TC.device
    y_TC, w_THK, u_THV, o_THV, seen_THX = (
        torch.empty(T, *shape, dtype=dtype, device=device)
        for shape in ((C,), (H, K), (H, V), (H, V), (H, PIECE))
    )
    sums_TH = torch.empty(T, H, dtype=torch.float32, device=device)
    x_THV = o_THV if out_THV is None else out_THV
    assert x_THV.is_contiguous()
    k_block, v_block = (max(16, triton.next_power_of_2(size)) for size in (K, V))
    sizes = {"G": G, "H": H, "K": K, "V": V, "K_BLOCK": k_block, "V_BLOCK": v_block}
    conv_kernel[(T // CONVOLVED + num_rows, 2 * G + H)](
        qkv_TC, weights.conv_CW, conv_NCW, slots_R, starts_R1, parts_X, targets_X, y_TC, num_rows,
        saved[0], qkv_TC.stride(0), conv_NCW.stride(0), L2_EPS, **sizes, ROWS=ROWS,
        WIDTH=weights.conv_CW.shape[1], RUNS=CONVOLVED // LENGTH, LENGTH=LENGTH, num_warps=4,
    )  # fmt: skip
    pieces_kernel[(T // PIECE + 2 * num_rows, H)](
        y_TC, a_TH, b_TH, weights.a_log_H, weights.dt_bias_H, parts_X, w_THK, u_THV, seen_THX,
        sums_TH, 2 * num_rows, a_TH.stride(0), b_TH.stride(0), **sizes, ROWS=ROWS, PIECE=PIECE,
        num_warps=4, maxnreg=168,  # registers per thread, so that three programs fit
    )  # fmt: skip
    part = min(PARTS, v_block)
    scan_kernel[(num_rows * H, triton.cdiv(V, part))](
        y_TC, w_THK, u_THV, seen_THX, sums_TH, recurrent_NHKV, slots_R, parts_X, targets_X, o_THV,
        saved[1], recurrent_NHKV.stride(0), **{**sizes, "V_BLOCK": part}, PIECE=PIECE,
        STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    heads = max(1, 4096 // v_block)
    gated_norm_kernel[(triton.cdiv(T * H, heads),)](
        o_THV, z_THV, weights.norm_V, starts_R1, x_THV, num_rows, *z_THV.stride()[:2], weights.eps,
        H=H, V=V, V_BLOCK=v_block, HEADS=heads, num_warps=4,
    )  # fmt: skip
    return x_THV


@triton.jit
def piece_of(starts_R1, num_rows, nth, ROWS: tl.constexpr, PIECE: tl.constexpr):
    """Return the row of the nth piece of all rows, the row's start and end, and the piece's start.

    The row is num_rows if there is no such piece.
    """
    row, before, total = 0, 0, 0
    for at in range(0, num_rows, ROWS):
        r = at + tl.arange(0, ROWS)
        start = tl.load(starts_R1 + r, r < num_rows, 0)
        pieces = (tl.load(starts_R1 + r + 1, r < num_rows, 0) - start + PIECE - 1) // PIECE
        is_before = total + tl.cumsum(pieces, 0) <= nth
        row += tl.sum(is_before.to(tl.int32), 0)
        before += tl.sum(tl.where(is_before, pieces, 0), 0)
        total += tl.sum(pieces, 0)
    exists = row < num_rows
    begun, end = tl.load(starts_R1 + row, exists, 0), tl.load(starts_R1 + row + 1, exists, 0)
    first = begun + (nth - before) * PIECE
    return tl.where(exists, row, num_rows), begun, end, first


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["slots_R", "starts_R1", "parts_X", "targets_X"],
)
def conv_kernel(
    x_TC, conv_CW, conv_NCW, slots_R, starts_R1, parts_X, targets_X, y_TC, num_rows, saved_NCW,
    x_stride, conv_stride, l2_eps, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, RUNS: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = max(K_BLOCK, V_BLOCK)
    row, start, end, first = piece_of(starts_R1, num_rows, tl.program_id(0), ROWS, RUNS * LENGTH)
    if row < num_rows:
        head = tl.program_id(1)  # of queries, keys or values
        is_key, c = head < 2 * G, tl.arange(0, BLOCK)
        size = tl.where(is_key, K, V)
        first_channel = tl.where(is_key, head * K, 2 * G * K + (head - 2 * G) * V)
        channel, inside = first_channel + c, c < size
        row_at = conv_NCW + tl.load(slots_R + row) * conv_stride
        run = first + tl.arange(0, RUNS) * LENGTH
        x_at = x_TC + run.to(tl.int64)[:, None] * x_stride + channel[None, :]
        inputs = ()  # all loads are issued before the first value is used
        for nth in tl.static_range(1 - WIDTH, LENGTH):
            is_own = (run + nth >= start) & (run + nth < end)
            x = tl.load(x_at + nth * x_stride, is_own[:, None] & inside[None, :], 0.0)
            if nth < 0:  # stored inputs precede the row
                at = row_at + channel * (WIDTH - 1) + (nth + WIDTH - 1)
                before = tl.load(at, c < tl.where(first == start, size, 0), 0.0)
                x += tl.where((run == start)[:, None], before[None, :], 0.0)
            inputs = inputs + (x,)  # noqa: RUF005
        weights = four_weights(conv_CW, channel, inside, WIDTH)
        C: tl.constexpr = 2 * G * K + H * V
        y_at = y_TC + run.to(tl.int64)[:, None] * C + channel[None, :]
        for nth in tl.static_range(LENGTH):
            y = inputs[nth + WIDTH - 1].to(tl.float32) * weights[3][None, :]
            for back in tl.static_range(1, WIDTH):
                y += inputs[nth + WIDTH - 1 - back].to(tl.float32) * weights[3 - back][None, :]
            y = (y / (1.0 + tl.exp2(y * -LOG2_E))).to(y_TC.dtype.element_ty)  # SiLU
            if is_key:
                long = y.to(tl.float32)
                scale = tl.rsqrt(tl.sum(long * long, 1) + l2_eps) * tl.where(head < G, K**-0.5, 1.0)
                y = (long * scale[:, None]).to(y_TC.dtype.element_ty)
            tl.store(y_at + nth * C, y, (run + nth < end)[:, None] & inside[None, :])
        if first == start:
            # A head's inputs are written in the order of memory, since it may lie across a bus.
            of_head, num_stored = tl.arange(0, 4 * BLOCK), size * (WIDTH - 1)
            in_row = first_channel * (WIDTH - 1) + of_head
            for of_part in tl.static_range(2):
                target = tl.load(targets_X + 2 * row + of_part).to(tl.int64)
                length = tl.load(parts_X + 2 * row + of_part + 1) - start
                place = length + of_head % (WIDTH - 1) - (WIDTH - 1)
                of_both = of_head < num_stored
                own, stored = of_both & (place >= 0), of_both & (place < 0)
                input_at = x_TC + (start + place).to(tl.int64) * x_stride + first_channel
                moved = tl.load(input_at + of_head // (WIDTH - 1), own, 0.0)
                moved = tl.where(own, moved, tl.load(row_at + in_row + length, stored, 0.0))
                of_rows = conv_NCW if of_part else saved_NCW
                tl.debug_barrier()  # all threads have read the inputs that are overwritten now
                tl.store(of_rows + target * conv_stride + in_row, moved,
                         of_head < tl.where(target >= 0, num_stored, 0))  # fmt: skip


@triton.jit
def four_weights(conv_CW, channel, inside, WIDTH: tl.constexpr):
    """Return a channel's four weights, the last one for the token itself, and zeros if WIDTH < 4.

    The weights are loaded together and then split. A load of 2 bytes for each weight would take
    longer than the loads of inputs.
    """
    tap = tl.arange(0, 4)[None, :] - (4 - WIDTH)
    at = conv_CW + channel[:, None] * WIDTH + tap
    weights = tl.load(at, inside[:, None] & (tap >= 0), 0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(weights, [channel.shape[0], 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit(do_not_specialize=["num_parts"], do_not_specialize_on_alignment=["parts_X"])
def pieces_kernel(
    y_TC, a_TH, b_TH, a_log_H, dt_bias_H, parts_X, w_THK, u_THV, seen_THX, sums_TH, num_parts,
    a_stride, b_stride, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    part, _, end, first = piece_of(parts_X, num_parts, tl.program_id(0), ROWS, PIECE)
    if part < num_parts:
        head, C = tl.program_id(1), 2 * G * K + H * V
        dtype = y_TC.dtype.element_ty
        t, k, v = tl.arange(0, PIECE), tl.arange(0, K_BLOCK), tl.arange(0, V_BLOCK)
        exists, token = first + t < end, (first + t).to(tl.int64)
        rate = tl.exp(tl.load(a_log_H + head).to(tl.float32))
        dt_bias = tl.load(dt_bias_H + head).to(tl.float32)
        a = tl.load(a_TH + token * a_stride + head, exists, 0.0).to(tl.float32)
        b = tl.load(b_TH + token * b_stride + head, exists, 0.0).to(tl.float32)
        sums = tl.cumsum(tl.where(exists, -rate * softplus(a + dt_bias), 0.0), 0)
        beta = tl.where(exists, tl.sigmoid(b), 0.0)
        tl.store(sums_TH + token * H + head, sums, exists)
        in_keys = exists[:, None] & (k < K)[None, :]
        at = y_TC + token[:, None] * C + head // (H // G) * K + k[None, :]
        q, key = tl.load(at, in_keys, 0.0), tl.load(at + G * K, in_keys, 0.0)
        in_values = exists[:, None] & (v < V)[None, :]
        at = y_TC + token[:, None] * C + (2 * G * K + head * V) + v[None, :]
        value = tl.load(at, in_values, 0.0)
        none, log = tl.zeros([PIECE, PIECE], tl.float32), sums * LOG2_E
        log = tl.where(t[:, None] >= t[None, :], log[:, None] - log[None, :], float("-inf"))
        decay, at = tl.exp2(log), seen_THX + (token * H + head)[:, None] * PIECE + t[None, :]
        tl.store(at, (dot(q, tl.trans(key), none) * decay).to(dtype), exists[:, None])
        a = dot(key, tl.trans(key), none) * decay * beta[:, None]
        t_beta = inverse(a, PIECE, dtype) * beta[None, :]
        u = dot(t_beta.to(dtype), value, tl.zeros([PIECE, V_BLOCK], tl.float32))
        tl.store(u_THV + (token * H + head)[:, None] * V + v[None, :], u.to(dtype), in_values)
        t_beta *= tl.exp(sums)[None, :]
        w = dot(t_beta.to(dtype), key, tl.zeros([PIECE, K_BLOCK], tl.float32))
        tl.store(w_THK + (token * H + head)[:, None] * K + k[None, :], w.to(dtype), in_keys)


@triton.jit
def inverse(a, PIECE: tl.constexpr, dtype: tl.constexpr):
    """Return (I + a)^-1, where only the part of a below the diagonal is used.

    Diagonal blocks of 2 are inverted first, then of 4 and so on. Let (I + m) and (I + n) be the
    inverses of two adjacent blocks, and b the block of a that couples them. The same block of the
    inverse is then -(I + n) b (I + m). Up to a size of 16, diagonal blocks are a batch with a warp
    for each.
    """
    BLOCKS: tl.constexpr = PIECE // 16
    t, block, i = tl.arange(0, PIECE), tl.arange(0, BLOCKS), tl.arange(0, 16)
    is_same = block[:, None, None, None] == block[None, None, :, None]
    blocks = tl.sum(tl.where(is_same, tl.reshape(a, [BLOCKS, 16, BLOCKS, 16]), 0.0), 2)
    x = -tl.where(is_between(i, 1)[None, :, :], blocks, 0.0)
    for nth in tl.static_range(1, 4):
        b = tl.where(is_between(i, 1 << nth)[None, :, :], blocks, 0.0)
        b = product(x, b, b, dtype)
        x -= product(b, x, b, dtype)
    x = tl.reshape(tl.where(is_same, x[:, :, None, :], 0.0), [PIECE, PIECE])
    for nth in tl.static_range(2):
        b = tl.where(is_between(t, 16 << nth), a, 0.0)
        b = product(x, b, b, dtype)
        x -= product(b, x, b, dtype)
    return tl.where(t[:, None] == t[None, :], 1.0, x)


@triton.jit
def is_between(i, size: tl.constexpr):
    """Return a mask of the blocks that couple the second block of each pair with the first."""
    block = i // size
    return (block[:, None] == block[None, :] + 1) & (block[:, None] % 2 == 1)


@triton.jit
def product(a, b, sum, dtype: tl.constexpr):
    """Multiply float16 copies, which are eight times as fine as bfloat16 for numbers below 64."""
    if INTERPRETED or dtype == tl.float32:
        return dot(a, b, sum)
    return tl.dot(a.to(tl.float16), b.to(tl.float16), sum)


@triton.jit(do_not_specialize_on_alignment=["slots_R", "parts_X", "targets_X"])
def scan_kernel(
    y_TC, w_THK, u_THV, seen_THX, sums_TH, recurrent_NHKV, slots_R, parts_X, targets_X, o_THV,
    saved_NHKV, stride, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, PIECE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row, head, C = tl.program_id(0) // H, tl.program_id(0) % H, 2 * G * K + H * V
    dtype = y_TC.dtype.element_ty
    t, k = tl.arange(0, PIECE), tl.arange(0, K_BLOCK)
    v = tl.program_id(1) * V_BLOCK + tl.arange(0, V_BLOCK)
    in_row = head * (K * V) + k[:, None] * V + v[None, :]
    in_state = (k < K)[:, None] & (v < V)[None, :]
    state_at = recurrent_NHKV + tl.load(slots_R + row) * stride + in_row
    state = tl.load(state_at, in_state, 0.0).to(tl.float32)
    for part in range(2 * row, 2 * row + 2):
        start, end = tl.load(parts_X + part), tl.load(parts_X + part + 1)
        for first in tl.range(start, end, PIECE, num_stages=STAGES):
            exists, token = first + t < end, (first + t).to(tl.int64)
            in_keys = exists[:, None] & (k < K)[None, :]
            in_values = exists[:, None] & (v < V)[None, :]
            of_head = token * H + head
            w = tl.load(w_THK + of_head[:, None] * K + k[None, :], in_keys, 0.0)
            u = tl.load(u_THV + of_head[:, None] * V + v[None, :], in_values, 0.0)
            seen = tl.load(seen_THX + of_head[:, None] * PIECE + t[None, :], exists[:, None], 0.0)
            at = y_TC + token[:, None] * C + head // (H // G) * K + k[None, :]
            q, key = tl.load(at, in_keys, 0.0), tl.load(at + G * K, in_keys, 0.0)
            sums = tl.load(sums_TH + of_head, exists, 0.0)
            last = tl.minimum(first + PIECE, end).to(tl.int64) - 1
            total = tl.load(sums_TH + last * H + head)
            before, none = state.to(dtype), tl.zeros([PIECE, V_BLOCK], tl.float32)
            fresh = u.to(tl.float32) - dot(w, before, none)
            o = dot(q, before, none) * tl.exp(sums)[:, None]
            o = dot(seen, fresh.to(dtype), o)
            tl.store(o_THV + of_head[:, None] * V + v[None, :], o.to(dtype), in_values)
            fresh *= tl.where(exists, tl.exp(total - sums), 0.0)[:, None]
            state = dot(tl.trans(key), fresh.to(dtype), state * tl.exp(total))
        target = tl.load(targets_X + part).to(tl.int64)
        in_target = (k < tl.where(target >= 0, K, 0))[:, None] & (v < V)[None, :]
        of_rows = tl.where(part > 2 * row, recurrent_NHKV, saved_NHKV)
        tl.store(of_rows + target * stride + in_row, state, in_target)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["starts_R1"])
def gated_norm_kernel(
    o_THV, z_THV, norm_V, starts_R1, x_THV, num_rows, z_stride, z_head_stride, eps,
    H: tl.constexpr, V: tl.constexpr, V_BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    nth, v = tl.program_id(0) * HEADS + tl.arange(0, HEADS), tl.arange(0, V_BLOCK)
    token, head = (nth // H).to(tl.int64), nth % H
    dtype = x_THV.dtype.element_ty
    is_ours = (token >= tl.load(starts_R1)) & (token < tl.load(starts_R1 + num_rows))
    inside = is_ours[:, None] & (v < V)[None, :]
    at = (token * (H * V) + head * V)[:, None] + v[None, :]
    o = tl.load(o_THV + at, inside, 0.0).to(tl.float32)
    z_at = z_THV + (token * z_stride + head * z_head_stride)[:, None] + v[None, :]
    z = tl.load(z_at, inside, 0.0).to(tl.float32)
    weight = tl.load(norm_V + v, v < V, 0.0).to(tl.float32)
    o = (o * tl.rsqrt(tl.sum(o * o, 1) / V + eps)[:, None]).to(dtype).to(tl.float32)
    o = (o * weight[None, :]).to(dtype).to(tl.float32) * z * tl.sigmoid(z)
    tl.store(x_THV + at, o.to(dtype), inside)
