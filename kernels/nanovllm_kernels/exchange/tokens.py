"""All-gather of tokens over ranks, and reduce-scatter of their expert outputs, in peer memory.

The references are the *_reference functions below. The buffers, the protocol and the rules for
callers are those of all_reduce.py: an element is its own flag. A token is sent as 32-bit words, a
row of x followed by its weights and experts, so that one launch gathers all three.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels.device import launches_early
from nanovllm_kernels.exchange import all_reduce as sums
from nanovllm_kernels.exchange.all_reduce import (
    CHUNK,
    EMPTY,
    Peers,
    count_call,
    never_empty,
    region,
    send,
    sum_of,
    summed,
)  # fmt: skip
from nanovllm_kernels.triton_parts import launch_dependents, wait

NO_EXPERT = -2  # expert of padding tokens; also replaces -1
GATHERED = 512  # words that a program gathers at a time


def gather_tokens(
    x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, num_tokens: int, peers: Peers
) -> tuple[Tensor, ...]:
    """Return the tokens, weights and experts of all ranks, rank by rank, `num_tokens` of each rank.

    A rank with fewer tokens is padded with tokens whose expert is NO_EXPERT. Weights and experts
    have 32 bits. Each token takes `token_bytes` of the capacity.
    """
    parts = x_TD.contiguous(), weights_TK, experts_TK
    assert num_tokens * token_bytes(x_TD, weights_TK.shape[1]) <= peers.capacity, num_tokens
    gathered = tuple(one.new_empty(peers.size * num_tokens, one.shape[1]) for one in parts)
    words = [one.view(torch.int32) for one in (*parts, *gathered)]
    widths = words[0].shape[1], weights_TK.shape[1]
    total = num_tokens * (widths[0] + 2 * widths[1])
    grid = (min(triton.cdiv(total, GATHERED), sums.PROGRAMS),)
    sizes = dict(WIDTH=widths[0], K=widths[1], FILL=NO_EXPERT, BLOCK=GATHERED)
    more = options(num_tokens, peers)
    gather_kernel[grid](*words, *peers.place, total, len(x_TD), **sizes, **more)
    return gathered


def token_bytes(x_TD: Tensor, num_chosen: int) -> int:
    return x_TD.shape[1] * x_TD.element_size() + 8 * num_chosen


def add_own_sums(parts_ITD: Tensor, stream_TD: Tensor, peers: Peers) -> Tensor:
    """Add the sum over ranks of their parts_ITD[rank] to this rank's stream_TD, and return that.

    stream_TD is the residual stream. Only the first len(stream_TD) rows of the sum are used.
    """
    assert parts_ITD.is_contiguous() and stream_TD.is_contiguous() and peers.fits(parts_ITD[0])
    total, bits = parts_ITD[0].numel(), (torch.int16, torch.int32)[parts_ITD.element_size() // 4]
    add_own_sums_kernel[(min(triton.cdiv(total, CHUNK), sums.PROGRAMS),)](
        parts_ITD.view(bits),
        stream_TD if len(stream_TD) else parts_ITD,  # a placeholder that is not written
        *peers.place,
        total,
        stream_TD.numel(),
        BLOCK=CHUNK,
        num_warps=8,
        **options(parts_ITD.shape[1], peers),
    )
    return stream_TD


def options(num_rows: int, peers: Peers) -> dict[str, Any]:
    waits = launches_early(num_rows, peers.calls_X.device)
    return dict(SIZE=peers.size, PROGRAMS=sums.PROGRAMS, WAITS=waits, launch_pdl=waits)


@triton.jit(do_not_specialize=["rank", "num_own"])
def gather_kernel(
    x_TX, weights_TK, experts_TK, all_x_TX, all_weights_TK, all_experts_TK, addresses_I, calls_X,
    rank, capacity, total, num_own, WIDTH: tl.constexpr, K: tl.constexpr, FILL: tl.constexpr,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, PROGRAMS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    pid, num, LINE = tl.program_id(0), tl.num_programs(0), WIDTH + 2 * K
    own = tl.load(addresses_I + rank)
    wait(WAITS)
    call = tl.load(calls_X + pid)
    first = (call & 1) * (SIZE + 1)
    for start in range(pid * BLOCK, total, num * BLOCK):
        at = start + tl.arange(0, BLOCK)
        token, k = at // LINE, at % LINE - WIDTH
        is_own = token < num_own
        bits = tl.load(x_TX + token * WIDTH + k + WIDTH, is_own & (k < 0), 0)
        bits |= tl.load(weights_TK + token * K + k, is_own & (k >= 0) & (k < K), 0)
        bits |= tl.load(experts_TK + token * K + k - K, is_own & (k >= K), 0)
        bits = never_empty(tl.where(is_own | (k < K), bits, FILL))
        send(bits, addresses_I, rank, first + rank, capacity, at, at < total, SIZE, calls_X)
    tl.debug_barrier()
    launch_dependents(WAITS)  # the next kernel may start while this one waits for other ranks
    count_call(calls_X, call, PROGRAMS)
    for start in range(pid * BLOCK, total, num * BLOCK):
        at = start + tl.arange(0, BLOCK)
        token, k, inside = at // LINE, at % LINE - WIDTH, at < total
        for source in tl.static_range(SIZE):
            words = region(own, first + source, capacity, calls_X) + at
            bits = tl.full([BLOCK], EMPTY, tl.int32)
            while tl.max((bits == EMPTY).to(tl.int32), 0) != 0:
                bits = tl.load(words, inside, 0, volatile=True)
            tl.store(words, tl.full([BLOCK], EMPTY, tl.int32), inside)
            line = (source * (total // LINE) + token).to(tl.int64)
            tl.store(all_x_TX + line * WIDTH + k + WIDTH, bits, inside & (k < 0))
            tl.store(all_weights_TK + line * K + k, bits, inside & (k >= 0) & (k < K))
            tl.store(all_experts_TK + line * K + k - K, bits, inside & (k >= K))


@triton.jit(do_not_specialize=["rank", "num_own"])
def add_own_sums_kernel(
    bits_ITD, stream_TD, addresses_I, calls_X, rank, capacity, total, num_own,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, PROGRAMS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    pid, num = tl.program_id(0), tl.num_programs(0)
    stride = capacity // (bits_ITD.dtype.element_ty.primitive_bitwidth // 8)
    own = tl.load(addresses_I + rank)
    wait(WAITS)
    call = tl.load(calls_X + pid)
    first = (call & 1) * (SIZE + 1)
    for start in range(pid * BLOCK, total, num * BLOCK):
        at = start + tl.arange(0, BLOCK)
        for nth in tl.static_range(1, SIZE + 1):
            to = (rank + nth) % SIZE
            bits = never_empty(tl.load(bits_ITD + to.to(tl.int64) * total + at, at < total, 0))
            there = region(tl.load(addresses_I + to), first + rank, capacity, bits_ITD)
            tl.store(there + at, bits, at < total)
    tl.debug_barrier()
    launch_dependents(WAITS)
    count_call(calls_X, call, PROGRAMS)
    pieces = region(own, first, capacity, bits_ITD)
    for start in range(pid * BLOCK, total, num * BLOCK):
        at = start + tl.arange(0, BLOCK)
        known = tl.minimum(at, tl.maximum(num_own - 1, 0))
        parts, inside = pieces + at, at < total
        whole = sum_of(parts, stride, inside, SIZE, stream_TD, stream_TD, known)
        tl.store(stream_TD + at, whole, at < num_own)


def gather_tokens_reference(
    x_ITD: Tensor, weights_ITK: Tensor, experts_ITK: Tensor, num_tokens: int
) -> tuple[Tensor, ...]:
    """Return the padded tokens of each rank: x and weights with zeros, experts with NO_EXPERT."""
    more = (0, 0, 0, num_tokens - x_ITD.shape[1])
    parts = (
        (x_ITD, 0),
        (weights_ITK, 0),
        (experts_ITK.where(experts_ITK != -1, NO_EXPERT), NO_EXPERT),
    )
    return tuple(functional.pad(one, more, value=value).flatten(0, 1) for one, value in parts)


def add_own_sums_reference(parts_ITD: Tensor, stream_TD: Tensor) -> Tensor:
    """Return one rank's residual stream. parts_ITD has each rank's part of its sum."""
    return (summed(parts_ITD[:, : len(stream_TD)]) + stream_TD.float()).to(stream_TD.dtype)
