"""Checks and timings of the kernels over ranks, with one process per GPU.

Each is compared with NCCL's operation and the kernel that would follow it. The link limits a kernel
to the bytes that each rank must send and receive, at LINK bytes per second. For N ranks these are
2 (N - 1) / N of the message for a sum, and N - 1 messages for a gather.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from nanovllm_kernels.case import Args, Case, Kernel, check, normal
from nanovllm_kernels.exchange import all_reduce as ops, tokens
from nanovllm_kernels.exchange.all_reduce import Peers
from nanovllm_kernels.norms.norm import add_rms_norm
from nanovllm_kernels.timing import graph_us

LINK = 450e9  # bytes per second of H100 and H200: 18 NVLink 4 links of 25e9 each way
CAPACITY = 32 << 20
ROWS = (1, 8, 64, 256, 512, 2048)
LONG_ROWS = (512, 2048, 8448)
WIDTHS = (4096, 5120, 8192)
CALLS = 20  # calls in a CUDA graph
PATIENCE_S = 120.0
Connect = Callable[[Any, int, int, torch.device, int], Peers]
CaseRecord = dict[str, Any]


def inputs(size: int, T: int, D: int, with_norm: int, device: torch.device) -> Args:
    """Return all ranks' messages, and the first `with_norm` of residual, norm weight and eps."""
    parts_ITD = normal(device, size, T, D, dtype=torch.bfloat16)
    residual_TD = normal(device, T, D, dtype=torch.bfloat16, seed=1)
    return (parts_ITD, residual_TD, normal(device, D, dtype=torch.bfloat16, seed=2), 1e-6)[
        : 1 + with_norm
    ]


def inputs_of(size: int, T: int, D: int, device: torch.device) -> Args:
    """Return all ranks' tokens, each with eight weights and experts, and a residual stream."""
    experts_ITK = torch.arange(size * T * 8, dtype=torch.int32, device=device).view(size, T, 8) - 1
    weights_ITK = normal(device, size, T, 8, dtype=torch.float32)
    x_ITD, stream_ITD = (normal(device, n, T, D, dtype=torch.bfloat16) for n in (size, 1))
    return x_ITD, weights_ITK, experts_ITK, stream_ITD[0]


def words(size: int, S: int, device: torch.device) -> Args:
    """Return the messages of all ranks for all_gather: two 32-bit words for each of S rows."""
    return (normal(device, size, S, 2, dtype=torch.float32).view(torch.int32),)


def kernels(peers: Peers, nccl: Any) -> Iterator[tuple[Kernel, Callable[..., object]]]:  # noqa: ANN401
    """Yield each kernel with a function that does the same by NCCL."""
    rank, size = peers.rank, peers.size

    def by_nccl(epilogue: Callable[..., object], parts_ITD: Tensor, *rest: Any) -> None:  # noqa: ANN401
        nccl.allreduce([parts_ITD[rank]]).wait()
        epilogue(parts_ITD[rank], *rest)

    def gathered_by_nccl(parts_ISW: Tensor) -> None:
        nccl._allgather_base(torch.empty_like(parts_ISW), parts_ISW[rank]).wait()

    def cases(with_norm: int, rows: tuple[int, ...]) -> tuple[Case, ...]:
        odd = [Case(f"T={T} D={D}", partial(inputs, size, T, D, with_norm), small=True)
               for T, D in ((3, 1000), (67, 72), (130, 2880))]  # fmt: skip
        timed = [
            Case(
                f"T={T} D={D}",
                partial(inputs, size, T, D, with_norm),
                num_bytes=4 * T * D * (size - 1) // size,
            )
            for T in rows
            for D in WIDTHS
        ]
        return (*odd, *timed)

    kinds = [("", replace(peers, landings=None), ROWS)]
    if peers.landings is not None:
        kinds.append(("long_", peers, LONG_ROWS))
    for (prefix, memory, rows), (name, run, expected, more, epilogue) in product(kinds, (
        ("all_reduce", ops.all_reduce, ops.all_reduce_reference, 0, lambda x: x),
        ("all_reduce_add", ops.all_reduce_add, ops.all_reduce_add_reference, 1, Tensor.add_),
        ("all_reduce_add_norm", ops.all_reduce_add_norm, ops.all_reduce_add_norm_reference, 3,
         add_rms_norm),
    )):  # fmt: skip
        on_rank = partial(summed_on, rank, run, memory)
        # Sums have one order, so they are equal. The norm rounds twice, as in rms_norm.
        ulps = 2.0 if more == 3 else 0.0
        kernel = Kernel(prefix + name, on_rank, expected, cases(more, rows), ulps_16=ulps)
        yield kernel, partial(by_nccl, epilogue)
    gathers = tuple(
        Case(f"S={S}", partial(words, size, S), small=S == 1, num_bytes=8 * S * (size - 1))
        for S in ROWS
    )
    gather = Kernel(
        "all_gather",
        lambda parts: ops.all_gather(parts[rank], peers),
        lambda parts: parts,
        gathers,
    )
    yield gather, gathered_by_nccl
    sizes = (3, 72), *((T, D) for T in ROWS[:5] for D in (2048, 7168))
    both = tuple(
        Case(f"T={T} D={D}", partial(inputs_of, size, T, D), D == 72, 4 * (size - 1) * T * D)
        for T, D in sizes
    )
    run, expected = partial(exchanged, peers), partial(exchanged_reference, rank)
    yield Kernel("exchange", run, expected, both), lambda x_ITD, *_: gathered_by_nccl(x_ITD)


def summed_on(
    rank: int, run: Callable[..., object], memory: Peers, parts_ITD: Tensor, *rest: object
) -> object:
    """Run a sum over ranks, as `rank`."""
    return run(parts_ITD[rank], *rest, memory)


def exchanged(peers: Peers, x_ITD: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """Gather the tokens of all ranks, and return sums over ranks of the results to their owners.

    Here the results are the tokens themselves.
    """
    own = (part[peers.rank] for part in (x_ITD, *more[:2]))
    gathered = tokens.gather_tokens(*own, x_ITD.shape[1], peers)
    return *gathered, tokens.add_own_sums(gathered[0].view_as(x_ITD), more[2], peers)


def exchanged_reference(rank: int, x_ITD: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    gathered = tokens.gather_tokens_reference(x_ITD, *more[:2], x_ITD.shape[1])
    return *gathered, tokens.add_own_sums_reference(x_ITD[rank].expand_as(x_ITD), more[2])


def check_ranks(size: int, connect: Connect, quick: bool) -> Iterator[CaseRecord]:
    """Yield a record for each case as check-kernels prints it, with the worst error of all ranks.

    `connect` is called in each rank's process, which must be able to import it.
    """
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pairs = [context.Pipe(duplex=False) for _ in range(size)]
        ranks = [
            context.Process(
                target=rank_main, args=(rank, size, Path(folder), connect, quick, writer)
            )
            for rank, (_, writer) in enumerate(pairs)
        ]
        for rank, (_, writer) in zip(ranks, pairs, strict=True):
            rank.start()
            writer.close()
        try:
            yield from followed([reader for reader, _ in pairs])
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def followed(pipes: list[connection.Connection]) -> Iterator[CaseRecord]:
    """Yield the ranks' records until all ranks are done or one of them fails."""
    while pipes:
        ready = connection.wait(pipes, PATIENCE_S)
        if not ready:
            yield {"kernel": "ranks", "case": "", "problem": f"no message for {PATIENCE_S} s"}
            return
        for pipe in ready:
            assert isinstance(pipe, connection.Connection)
            try:
                record = pipe.recv()
            except EOFError:
                record = {"kernel": "ranks", "case": "", "problem": "a rank ended"}
            if record is None:
                pipes.remove(pipe)
                continue
            yield record
            if "worst" not in record:  # the other ranks wait for the failed one for ever
                return


def rank_main(
    rank: int, size: int, folder: Path, connect: Connect, quick: bool, pipe: connection.Connection
) -> None:
    try:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        store = distributed.FileStore(str(folder / "ranks"), size)  # type: ignore[attr-defined]
        peers = connect(distributed.PrefixStore("peers", store), rank, size, device, CAPACITY)  # type: ignore[attr-defined]
        group: Any = distributed.ProcessGroupNCCL  # type: ignore[attr-defined]
        shared = distributed.PrefixStore("nccl", store)  # type: ignore[attr-defined]
        nccl = group(shared, rank, size, group.Options())
        for kernel, rival in kernels(peers, nccl):
            for case in kernel.cases:
                if case.small or not quick:
                    record = measured(kernel, case, rival, device, nccl, quick)
                    if rank == 0:
                        pipe.send(record)
        pipe.send(None)
    except Exception as error:
        problem = f"rank {rank}: {type(error).__name__}: {error}"
        pipe.send({"kernel": "ranks", "case": "", "problem": problem})
    finally:
        os._exit(0)  # an orderly shutdown of NCCL hangs once a CUDA graph uses it


def measured(
    kernel: Kernel,
    case: Case,
    rival: Callable[..., object],
    device: torch.device,
    nccl: Any,  # noqa: ANN401
    quick: bool,
) -> CaseRecord:
    """Check and time one case. A collective call: all ranks must make it for the same case."""
    worst = torch.tensor([check(kernel, case, device)], dtype=torch.float64, device=device)
    largest = distributed.AllreduceOptions()  # type: ignore[attr-defined]
    largest.reduceOp = distributed.ReduceOp.MAX
    nccl.allreduce([worst], largest).wait()
    record: CaseRecord = {"kernel": kernel.name, "case": case.name, "worst": worst.item()}
    if not quick and case.is_timed:
        us, nccl_us = (
            graph_us([partial(run, *case.inputs(device))] * CALLS) for run in (kernel.run, rival)
        )
        bytes_per_s = 1e6 * case.num_bytes / us
        record |= {"us": us, "nccl_us": nccl_us, "tb_per_s": bytes_per_s / 1e12}
        record["share"] = bytes_per_s / LINK
    return record
