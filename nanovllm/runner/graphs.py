"""CUDA graphs of decode steps: sizes, capture, replay. Independent of the captured function.

Graphs of steps with prompt chunks are in runner/piecewise.py.

Decision: a graph reads the slots of its rows from one static buffer and gathers everything else
from device state, so replaying needs no refill unless the rows changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm.config import Recipe
from nanovllm.runner.batch import RowBuilder, StepRows


def graph_sizes(most: int) -> list[int]:
    """Return the numbers of tokens to capture. Padding is at most about 10 %, 7 rows below 64."""
    sizes = [*range(1, 9), *range(16, 64, 8), *range(64, 128, 8), *range(128, 256, 16)]
    sizes += range(256, most + 1, 32)
    return sorted({min(size, most) for size in sizes} | {most})


def largest_graph(num_slots: int, width: int) -> int:
    """Return the tokens of the largest captured decode step with rows of up to `width` tokens."""
    return num_slots if width == 1 else min(num_slots * width, max(num_slots, MOST_DRAFTED))


def obstacles(recipe: Recipe) -> list[str]:
    """Return the reasons why decode steps cannot be captured. The recipe has no "auto"."""
    found = []
    if recipe.device != "cuda":
        found.append(f"device is {recipe.device}: CUDA graphs need a CUDA device")
    kinds = [k for k in ("attention", "experts", "delta") if getattr(recipe.kernels, k) == "torch"]
    found += [f"kernels.{kind} is torch, which reads tensors' values on the host" for kind in kinds]
    if not recipe.kernels.cuda_graphs:
        found.append("kernels.cuda_graphs is false")
    return found


MOST_DRAFTED = 512  # tokens; larger steps run longer than their launches take, so need no graph
Size = tuple[int, int]  # tokens, and the maximum tokens of a row (width)


@dataclass(frozen=True, slots=True)
class Memory:
    """A view of a tensor's memory that does not own it."""

    __cuda_array_interface__: dict[str, object]


def borrowed(x: Tensor) -> Tensor:
    """Return a view of x that does not keep its memory from later captures of the pool.

    x was made during a capture. The pool's memory stays mapped as long as its graphs live, so the
    content is valid until a graph that was captured later is replayed.
    """
    if not x.is_cuda:
        return x  # a test's substitute for a graph has no pool
    assert x.is_contiguous()
    flat = {"data": (x.data_ptr(), False), "shape": (x.nbytes,), "typestr": "|u1", "version": 3}
    return torch.as_tensor(Memory(flat), device=x.device).view(x.dtype).view(x.shape)


@dataclass(frozen=True, slots=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    output: object
    seconds: float
    bytes_used: int


class DecodeGraphs:
    """Graphs of `run`, which maps the rows of a decode step to device tensors, one per size.

    A size fixes the number of tokens; their division into rows may differ in each replay. `keep`
    selects the part of the output that is stored, since stored tensors of all sizes take memory.
    """

    def __init__(
        self,
        run: Callable[[StepRows], object],
        builder: RowBuilder,
        keep: Callable[[Any], object] = lambda output: output,
    ) -> None:
        self.run = run
        self.keep = keep
        self.builder = builder
        self.captured: dict[Size, Captured] = {}

    def capture(
        self, sizes: list[Size], max_length: int, captured: Callable[[], None] = lambda: None
    ) -> None:
        """Capture all sizes, the largest first, so that smaller ones reuse its memory.

        `captured` is called after each.
        """
        pool = torch.cuda.graph_pool_handle()
        for size in sorted(sizes, reverse=True):
            rows = self.builder.padded(*size, max_length)
            started, used = time.perf_counter(), torch.cuda.memory_reserved()
            self.run(rows)  # compiles kernels and sets up library workspaces outside the capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
                output = self.run(rows)
            seconds = time.perf_counter() - started
            bytes_used = torch.cuda.memory_reserved() - used
            self.captured[size] = Captured(graph, self.keep(output), seconds, bytes_used)
            del output  # frees its memory for the next capture
            captured()
        self.captured = dict(sorted(self.captured.items()))

    def fit(self, num_tokens: int, width: int) -> Size | None:
        """Return the smallest captured size for these tokens, or None."""
        return next((s for s in self.captured if s[0] >= num_tokens and s[1] == width), None)

    def replay(self, size: Size) -> Any:  # noqa: ANN401
        self.captured[size].graph.replay()
        return self.captured[size].output
