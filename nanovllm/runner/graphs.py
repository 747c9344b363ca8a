"""CUDA graphs of the decode step: which sizes, capture, replay. Does not know what is captured.

Graphs of prompt chunks are in runner/piecewise.py.

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
    """Numbers of tokens to capture: padding stays under about 10 % (at most 7 rows below 64)."""
    sizes = [*range(1, 9), *range(16, 64, 8), *range(64, 128, 8), *range(128, 256, 16)]
    sizes += range(256, most + 1, 32)
    return sorted({min(size, most) for size in sizes} | {most})


def largest_graph(num_slots: int, width: int) -> int:
    """Tokens of the largest decode step that is captured, of rows of up to `width`."""
    return num_slots if width == 1 else min(num_slots * width, max(num_slots, MOST_DRAFTED))


def obstacles(recipe: Recipe) -> list[str]:
    """Why no step can be captured, of a recipe without any "auto"; empty: decode steps can."""
    found = []
    if recipe.device != "cuda":
        found.append(f"device is {recipe.device}: CUDA graphs need a CUDA device")
    kinds = [k for k in ("attention", "experts", "delta") if getattr(recipe.kernels, k) == "torch"]
    found += [f"kernels.{kind} is torch, which reads tensors' values on the host" for kind in kinds]
    if not recipe.kernels.cuda_graphs:
        found.append("kernels.cuda_graphs is false")
    return found


MOST_DRAFTED = 512  # tokens: a larger step computes for longer than the host takes to launch it
Size = tuple[int, int]  # tokens, and the width: how many of them a row can have


@dataclass(frozen=True, slots=True)
class Memory:
    """A tensor's, without being its owner."""

    __cuda_array_interface__: dict[str, object]


def borrowed(x: Tensor) -> Tensor:
    """Returns x, made during a capture, without holding its memory back from the pool's later
    captures.

    A pool's memory stays mapped as long as its graphs live, so until a later capture's replay the
    contents are x's.
    """
    if not x.is_cuda:
        return x  # of a stand-in for a graph, which has no pool
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
    """`run` maps the rows of a decode step to device tensors; it is captured once per size.

    Rows of a size are ragged: as many tokens in as many rows as it takes, and the rest is padding.

    `keep`: what to keep of a captured run's, because kept tensors of all sizes take memory.
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
        """Largest first, so that the smaller ones reuse its memory. `captured` hears of each."""
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
            del output  # or the next capture could not have its memory
            captured()
        self.captured = dict(sorted(self.captured.items()))

    def fit(self, num_tokens: int, width: int) -> Size | None:
        """The smallest captured size for so many tokens, in rows of up to `width`."""
        return next((s for s in self.captured if s[0] >= num_tokens and s[1] == width), None)

    def replay(self, size: Size) -> Any:  # noqa: ANN401
        self.captured[size].graph.replay()
        return self.captured[size].output
