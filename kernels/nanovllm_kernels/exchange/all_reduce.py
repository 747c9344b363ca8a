"""All-reduce and all-gather of decode-sized messages, by stores into the memory of peer GPUs.

Longer sums are those of long_sums.py, which has other memory.

The references are the *_reference functions below. Every rank stores its message into its own
region of every rank's buffer. Readers poll their own memory only, until all messages have arrived.
Sums are float32, in the order of ranks, and rounded once. So all ranks get the same bits, for any
size of the message.

Decision: data is its own flag. An unwritten region holds EMPTY in every element, a NaN that no
arithmetic produces. A reader polls an element until its value differs from EMPTY and then resets it
to EMPTY. So no flag is written after the data, and no fence is needed between the two, which would
cost another trip over the link.

A buffer has two slots, for odd and for even calls. Two suffice: data read in call E + 1 was stored
by ranks that had finished call E and emptied its slot. So call E + 2 may write that slot again. The
calls are counted in device memory, because a CUDA graph repeats its arguments.

Kernels of one rank must not overlap, so all calls use one stream. All ranks make the same calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.device import launches_early
from nanovllm_kernels.exchange.long_sums import Landings, long_sum
from nanovllm_kernels.exchange.regions import region, store_sum
from nanovllm_kernels.norms import reference
from nanovllm_kernels.triton_parts import launch_dependents, wait

PROGRAMS = 64  # all must run at once, to wait for other ranks: fewer than any GPU's multiprocessors
MAX_WIDTH = 16384  # elements of a row, which must fit in a program's registers
CHUNK = 2048  # elements that a program takes at a time where it need not take a whole row
LONG_CHUNK = 4096  # the same for a message of more than PROGRAMS * CHUNK elements
GATHERED = 512  # 2-byte units that a program gathers at a time
HOP_BYTES = 768 << 10  # bytes that a link carries in the latency of a short message
EMPTY = tl.constexpr(-1)  # as an int16 or int32
ANOTHER_NAN = tl.constexpr(-2)


@dataclass(frozen=True, slots=True)
class Peers:
    """Buffers of all ranks, including this rank's own, and the counters of its calls."""

    rank: int
    size: int
    capacity: int  # bytes of the longest message, a multiple of 16
    addresses_I: Tensor  # int64: address of each rank's buffer, mapped in this rank
    calls_X: Tensor  # int32: number of calls so far, repeated PROGRAMS times
    keepalive: object = None  # object that must live as long as the buffers
    hop_bytes: int = HOP_BYTES
    landings: Landings | None = None  # memory for longer sums
    short_bytes: int = -1  # longest sum that does not use them

    @property
    def place(self) -> tuple[Tensor, Tensor, int, int]:
        """Return the arguments that all kernels share."""
        return self.addresses_I, self.calls_X, self.rank, self.capacity

    def fits(self, x: Tensor) -> bool:
        """Return True if the message fits in the buffers."""
        return x.nbytes <= self.capacity

    def takes_two_hops(self, num_bytes: int) -> bool:
        """Return True if each chunk is summed by its owner, which then sends the sum to all ranks.

        In one hop a rank stores (size - 1) messages, in two 2 * (size - 1) / size of one.
        """
        saved = (self.size - 1) * (self.size - 2) * num_bytes // self.size
        return saved > self.hop_bytes


def buffer_bytes(size: int, capacity: int) -> int:
    """Return the size of a rank's buffer, which must be all 0xFF before any rank's first call."""
    return 2 * (size + 1) * capacity


def all_reduce(x_TD: Tensor, peers: Peers) -> Tensor:
    """Replace x_TD by its sum over ranks, and return it."""
    _launch(x_TD, None, None, x_TD, 0.0, peers)
    return x_TD


def all_reduce_add(x_TD: Tensor, residual_TD: Tensor, peers: Peers) -> Tensor:
    """Add the sum of x_TD over ranks to residual_TD in place, and return residual_TD."""
    _launch(x_TD, residual_TD, None, residual_TD, 0.0, peers)
    return residual_TD


def all_reduce_add_norm(
    x_TD: Tensor, residual_TD: Tensor, norm_weight_D: Tensor, eps: float, peers: Peers
) -> tuple[Tensor, Tensor]:
    """Add the sum of x_TD over ranks to the residual stream, and replace x_TD by its RMSNorm.

    Returns x_TD and residual_TD.
    """
    _launch(x_TD, residual_TD, norm_weight_D, x_TD, eps, peers)
    return x_TD, residual_TD


def all_gather(x_SW: Tensor, peers: Peers) -> Tensor:
    """Return all ranks' x_SW as x_ISW. Elements have at least 2 bytes.

    The message takes 2 * x_SW.nbytes of the capacity.
    """
    assert x_SW.is_contiguous() and 2 * x_SW.nbytes <= peers.capacity, x_SW.shape
    y_ISW = torch.empty(peers.size, *x_SW.shape, dtype=x_SW.dtype, device=x_SW.device)
    halves, waits = x_SW.nbytes // 2, launches_early(len(x_SW), x_SW.device)
    parts = x_SW.view(torch.int16), y_ISW.view(torch.int16)
    all_gather_kernel[(min(triton.cdiv(halves, GATHERED), PROGRAMS),)](
        *parts, *peers.place, halves, SIZE=peers.size, BLOCK=GATHERED, PROGRAMS=PROGRAMS,
        WAITS=waits, launch_pdl=waits, num_warps=4,
    )  # fmt: skip
    return y_ISW


def _launch(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    norm_weight_D: Tensor | None,
    y_TD: Tensor,
    eps: float,
    peers: Peers,
) -> None:
    if peers.landings is not None and x_TD.nbytes > peers.short_bytes:
        long_sum(x_TD, residual_TD, norm_weight_D, y_TD, eps, peers.landings)
        return
    num_rows, row_width = x_TD.shape
    assert x_TD.is_contiguous() and peers.fits(x_TD), (x_TD.shape, peers.capacity)
    assert residual_TD is None or residual_TD.is_contiguous()
    if norm_weight_D is not None:
        width = row_width
    else:
        width = CHUNK if x_TD.numel() <= PROGRAMS * CHUNK else LONG_CHUNK
    assert width <= MAX_WIDTH
    chunks = triton.cdiv(x_TD.numel(), width)
    block = triton.next_power_of_2(width)
    waits = launches_early(num_rows, x_TD.device)
    all_reduce_kernel[(min(chunks, PROGRAMS),)](
        x_TD.view(torch.int16 if x_TD.element_size() == 2 else torch.int32),
        residual_TD,
        norm_weight_D,
        y_TD,
        *peers.place,
        x_TD.numel(),
        eps,
        SIZE=peers.size,
        TWO_HOPS=peers.takes_two_hops(x_TD.nbytes),
        WIDTH=width,
        BLOCK=block,
        PROGRAMS=PROGRAMS,
        WAITS=waits,
        launch_pdl=waits,
        num_warps=min(max(block // 256, 1), 16),  # 8 elements per thread: 16 bytes of bf16
    )


@triton.jit
def send(bits, addresses_I, rank, index, capacity, at, inside, SIZE: tl.constexpr, like):
    """Store `bits` in that region of all ranks, from the next rank on, with its own rank last."""
    for nth in tl.static_range(1, SIZE + 1):
        peer = tl.load(addresses_I + (rank + nth) % SIZE)
        tl.store(region(peer, index, capacity, like) + at, bits, inside)


@triton.jit
def count_call(calls_X, call, PROGRAMS: tl.constexpr):
    """Advance the call counters, of which each program advances a part.

    All counters advance, so the next call may have another number of programs. Must follow a
    barrier: every thread of the program must have read the program's counter.
    """
    i = tl.arange(0, PROGRAMS)
    tl.store(calls_X + i, call + 1, i % tl.num_programs(0) == tl.program_id(0))


@triton.jit
def never_empty(bits):
    """Return the bits, with EMPTY replaced by another NaN."""
    return tl.where(bits == EMPTY, ANOTHER_NAN, bits).to(bits.dtype)


@triton.jit
def owner_of(chunk, SIZE: tl.constexpr):
    """Return the rank that sums a chunk.

    The chunks of one program are num_programs apart. The second term spreads them over owners.
    """
    return (chunk + chunk // tl.num_programs(0)) % SIZE


@triton.jit
def sum_of(pieces, stride, inside, NUM: tl.constexpr, like, residual_TD, at):
    """Poll until NUM pieces have arrived and return their sum, plus the residual if there is one.

    The pieces are `stride` elements apart and are reset to EMPTY. The sum is rounded to the type of
    `like`.
    """
    total = tl.zeros(inside.shape, tl.float32)
    if residual_TD is not None:
        residual = tl.load(residual_TD + at, inside, 0.0)
    missing = 1
    while missing != 0:
        # All loads are issued before the first value is used.
        total = tl.zeros(inside.shape, tl.float32)
        empty = tl.zeros(inside.shape, tl.int32)
        for source in tl.static_range(NUM):
            bits = tl.load(pieces + source * stride, inside, 0, volatile=True)
            empty |= (bits == EMPTY).to(tl.int32)
            total += bits.to(like.dtype.element_ty, bitcast=True).to(tl.float32)
        missing = tl.max(empty, 0)
    nothing = tl.full(inside.shape, EMPTY, pieces.dtype.element_ty)
    for source in tl.static_range(NUM):
        tl.store(pieces + source * stride, nothing, inside)
    if residual_TD is not None:
        total += residual.to(tl.float32)
    return total.to(like.dtype.element_ty)


@triton.jit(do_not_specialize=["rank"])
def all_reduce_kernel(
    bits_TD,
    residual_TD,
    norm_weight_D,
    y_TD,
    addresses_I,
    calls_X,
    rank,
    capacity,
    num_elements,
    eps,
    SIZE: tl.constexpr,
    TWO_HOPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WAITS: tl.constexpr,
):
    pid, num = tl.program_id(0), tl.num_programs(0)
    d = tl.arange(0, BLOCK)
    num_chunks = tl.cdiv(num_elements, WIDTH)
    stride = capacity // (bits_TD.dtype.element_ty.primitive_bitwidth // 8)
    own = tl.load(addresses_I + rank)
    norm_weight = 0.0
    HAS_NORM: tl.constexpr = norm_weight_D is not None
    if HAS_NORM:
        norm_weight = tl.load(norm_weight_D + d, d < WIDTH, 0.0)
    wait(WAITS)
    call = tl.load(calls_X + pid)
    first = (call & 1) * (SIZE + 1)
    pieces = region(own, first, capacity, bits_TD)
    sums = region(own, first + SIZE, capacity, bits_TD)

    for chunk in range(pid, num_chunks, num):
        at = chunk * WIDTH + d
        inside = (d < WIDTH) & (at < num_elements)
        bits = never_empty(tl.load(bits_TD + at, inside, 0))
        if TWO_HOPS:
            owner = tl.load(addresses_I + owner_of(chunk, SIZE))
            tl.store(region(owner, first + rank, capacity, bits_TD) + at, bits, inside)
        else:
            send(bits, addresses_I, rank, first + rank, capacity, at, inside, SIZE, bits_TD)
    tl.debug_barrier()
    launch_dependents(WAITS)  # the next kernel may start while this one waits for other ranks
    count_call(calls_X, call, PROGRAMS)

    if TWO_HOPS:
        for chunk in range(pid, num_chunks, num):
            if owner_of(chunk, SIZE) == rank:
                at = chunk * WIDTH + d
                inside = (d < WIDTH) & (at < num_elements)
                whole = sum_of(pieces + at, stride, inside, SIZE, y_TD, residual_TD, at)
                bits = never_empty(whole.to(bits_TD.dtype.element_ty, bitcast=True))
                send(bits, addresses_I, rank, first + SIZE, capacity, at, inside, SIZE, bits_TD)
        tl.debug_barrier()

    for chunk in range(pid, num_chunks, num):
        at = chunk * WIDTH + d
        inside = (d < WIDTH) & (at < num_elements)
        if TWO_HOPS:
            whole = sum_of(sums + at, 0, inside, 1, y_TD, None, at)
        else:
            whole = sum_of(pieces + at, stride, inside, SIZE, y_TD, residual_TD, at)
        store_sum(whole, residual_TD, norm_weight, y_TD, at, inside, eps, HAS_NORM, WIDTH)


@triton.jit(do_not_specialize=["rank"])
def all_gather_kernel(
    halves_S, y_IS, addresses_I, calls_X, rank, capacity, num_halves, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Gather over ranks. Each 2-byte unit travels as a 4-byte word, which cannot be EMPTY."""
    pid, num = tl.program_id(0), tl.num_programs(0)
    own = tl.load(addresses_I + rank)
    wait(WAITS)
    call = tl.load(calls_X + pid)
    first = (call & 1) * (SIZE + 1)
    for start in range(pid * BLOCK, num_halves, num * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < num_halves
        words = tl.load(halves_S + at, inside, 0).to(tl.int32) & 0xFFFF
        send(words, addresses_I, rank, first + rank, capacity, at, inside, SIZE, calls_X)
    tl.debug_barrier()
    launch_dependents(WAITS)  # the next kernel may start while this one waits for other ranks
    count_call(calls_X, call, PROGRAMS)
    for start in range(pid * BLOCK, num_halves, num * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < num_halves
        at_source = region(own, first, capacity, calls_X) + at
        missing = 1
        while missing != 0:
            empty = tl.zeros(inside.shape, tl.int32)
            for source in tl.static_range(SIZE):
                words = tl.load(at_source + source * (capacity // 4), inside, 0, volatile=True)
                empty |= (words == EMPTY).to(tl.int32)
            missing = tl.max(empty, 0)
        for source in tl.static_range(SIZE):
            words_at = at_source + source * (capacity // 4)
            words = tl.load(words_at, inside, 0, volatile=True)
            tl.store(words_at, tl.full(words.shape, EMPTY, tl.int32), inside)
            tl.store(y_IS + source * num_halves + at, words.to(tl.int16), inside)


def summed(parts_ITD: Tensor) -> Tensor:
    """Return the float32 sum over ranks, added in the order of ranks."""
    total_TD = parts_ITD[0].float()
    for part_TD in parts_ITD[1:]:
        total_TD = total_TD + part_TD.float()
    return total_TD


def all_reduce_reference(parts_ITD: Tensor) -> Tensor:
    return summed(parts_ITD).to(parts_ITD.dtype)


def all_reduce_add_reference(parts_ITD: Tensor, residual_TD: Tensor) -> Tensor:
    return (summed(parts_ITD) + residual_TD.float()).to(residual_TD.dtype)


def all_reduce_add_norm_reference(
    parts_ITD: Tensor, residual_TD: Tensor, norm_weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    sum_TD = all_reduce_add_reference(parts_ITD, residual_TD)
    return reference.rms_norm(sum_TD, norm_weight_D, eps), sum_TD
