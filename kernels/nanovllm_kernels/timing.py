"""Launch times of kernels on a GPU, and the GPU's ceilings. Imports no kernel.

Decision: launches are timed inside a CUDA graph, to exclude the host's overhead. The graph cycles
through copies of the arguments that together exceed the L2 cache several times, since an engine
runs other layers in between. Arguments too small for that are reported as warm. In an engine
they are warm, too, since the previous layer has just written them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from nanovllm_kernels.case import Args, Case, Kernel, normal

CACHES = 4  # L2 sizes that the copies of arguments must fill to count as cold
MOST_COPIES = 32
LAUNCHES = 8  # least launches per graph
REPLAYS = 15
COPIED_BYTES = 2 << 30
MATRIX = 8192


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured rates of a large copy and a large matrix product."""

    copy_bytes_per_s: float  # reads plus writes
    matmul_flops: float  # bfloat16

    @property
    def rates(self) -> dict[str, float]:
        """Return the rates in TB/s and TFLOP/s, under their names in the records."""
        copied, multiplied = self.copy_bytes_per_s / 1e12, self.matmul_flops / 1e12
        return {"copy_tb_per_s": copied, "matmul_tflops": multiplied}

    def __str__(self) -> str:
        copied, multiplied = self.rates.values()
        return f"copies {copied:.2f} TB/s, multiplies {multiplied:.0f} TFLOP/s"


@dataclass(frozen=True, slots=True)
class Timing:
    """Median time of a launch, and the rates that follow from it."""

    us: float
    tb_per_s: float | None  # None: the case has no bytes
    tflops: float | None
    share: float  # fraction of the GPU's ceiling
    is_cold: bool


def ceilings(device: torch.device) -> Ceilings:
    source, target = normal(device, 2, COPIED_BYTES // 4, dtype=torch.float32)
    # A kernel copies here, since a plain copy uses the copy engines, which are slower.
    copy_us = graph_us([lambda: torch.neg(source, out=target)] * 4)
    a, b = normal(device, 2, MATRIX, MATRIX, dtype=torch.bfloat16)
    product = torch.empty_like(a)
    matmul_us = graph_us([lambda: torch.mm(a, b, out=product)] * 10)
    return Ceilings(2e6 * COPIED_BYTES / copy_us, 2e6 * MATRIX**3 / matmul_us)


def time_case(kernel: Kernel, case: Case, device: torch.device, limits: Ceilings) -> Timing:
    copies = [case.inputs(device)]
    least_bytes = CACHES * torch.cuda.get_device_properties(device).L2_cache_size
    num_copies = min(max(1, -(-least_bytes // size_of(copies[0]))), MOST_COPIES)
    copies += [case.inputs(device) for _ in range(num_copies - 1)]
    rounds = -(-LAUNCHES // num_copies)
    calls = [lambda args=args: kernel.run(*args) for args in copies * rounds]
    us = graph_us(calls)
    bytes_per_s, flops = 1e6 * case.num_bytes / us, 1e6 * case.num_flops / us
    return Timing(
        us,
        tb_per_s=bytes_per_s / 1e12 if case.num_bytes else None,
        tflops=flops / 1e12 if case.num_flops else None,
        share=max(bytes_per_s / limits.copy_bytes_per_s, flops / limits.matmul_flops),
        is_cold=num_copies * size_of(copies[0]) >= least_bytes,
    )


def size_of(args: Args) -> int:
    return sum(arg.nbytes for arg in args if isinstance(arg, torch.Tensor))


def graph_us(calls: list[Callable[[], object]]) -> float:
    """Return the median time of a call in microseconds."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()  # compiles kernels and allocates library workspaces
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    graph.replay()
    for mark in marks[:-1]:
        mark.record()
        graph.replay()
    marks[-1].record()
    marks[-1].synchronize()
    times_ms = [start.elapsed_time(end) for start, end in pairwise(marks)]
    return 1e3 * statistics.median(times_ms) / len(calls)
