"""Piecewise CUDA graphs of steps with prompt chunks.

Operations that depend on the step's rows, such as attention, run eagerly between two graphs. The
rest depends on the number of tokens only, since the last graph computes the maximum number of
sampled rows. Independent of the model: it is split wherever it calls `ForwardContext.eager`.

Decision: the inputs of an eager operation stay in the graphs' memory, without an owner, so that
layers and sizes share it. Nothing else writes there between two graphs. The results of eager
operations have their own buffers, one for each shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from nanovllm.attention.base import EagerOperation, ForwardContext
from nanovllm.runner.batch import rowless
from nanovllm.runner.graphs import borrowed


def piecewise_sizes(most: int) -> list[int]:
    """Return the numbers of tokens to capture. Padding is at most 12 %, or 31 tokens."""
    sizes, start = [*range(32, 256, 32)], 256
    while start < most:
        sizes += range(start, 2 * start, start // 8)
        start *= 2
    return sorted({min(size, most) for size in sizes} | {most}) if most else []


Graph = Any  # a torch.cuda.CUDAGraph, or a test's substitute


Shape = tuple[torch.Size, torch.dtype]  # of one token's result


class EagerCut(NamedTuple):
    """An eager operation between two graphs: its inputs, and the buffer for its result."""

    operation: EagerOperation
    tensors: tuple[Tensor, ...]
    result: Shape


@dataclass(frozen=True, slots=True)
class CapturedPiecewise:
    graphs: list[Graph]
    cuts: list[EagerCut]  # after each graph but the last
    output: Tensor  # of sampled tokens
    seconds: float
    bytes_used: int


class PiecewiseGraphs:
    """Graphs of `run`, which maps a step's tokens to results, one list per number of tokens."""

    def __init__(
        self, run: Callable[[ForwardContext], Tensor], most_rows: int, device: torch.device
    ) -> None:
        self.run = run
        self.sampled_S = torch.zeros(most_rows, dtype=torch.int64, device=device)
        self.device = device
        self.new_graph: Callable[[], Graph] = torch.cuda.CUDAGraph
        self.captured: dict[int, CapturedPiecewise] = {}  # by number of tokens, ascending
        self._pool: Any = None

    def capture(self, sizes: list[int], captured: Callable[[], None] = lambda: None) -> None:
        """Capture all sizes, the largest first, so that smaller ones reuse its memory.

        `captured` is called after each.
        """
        most = max(sizes, default=0)
        self.inputs_4T = torch.zeros(4, most, dtype=torch.int64, device=self.device)
        self.results: dict[Shape, Tensor] = {}  # [most tokens, ...]
        found = {}
        for size in sorted(sizes, reverse=True):
            found[size] = self._capture(size)
            captured()
        self.captured = dict(sorted(found.items()))

    def _capture(self, size: int) -> CapturedPiecewise:
        batch = rowless(self.inputs_4T[:, :size], self.sampled_S[:size])
        started, used = time.perf_counter(), torch.cuda.memory_reserved()
        graphs: list[Graph] = []
        cuts: list[EagerCut] = []

        def skip(operation: EagerOperation, _: ForwardContext, *tensors: Tensor) -> Tensor:
            return self.results[self._result_of(operation, tensors)][:size]

        def cut(operation: EagerOperation, _: ForwardContext, *tensors: Tensor) -> Tensor:
            end()
            result = self._result_of(operation, tensors)
            cuts.append(EagerCut(operation, tuple(map(borrowed, tensors)), result))
            begin()
            return self.results[result][:size]

        def begin() -> None:
            graphs.append(self.new_graph())
            graphs[-1].capture_begin(self._pool)

        def end() -> None:
            graphs[-1].capture_end()
            self._pool = graphs[-1].pool()

        # This run, before the capture, compiles kernels and sets up library workspaces.
        self.run(ForwardContext(batch, no_rows, eager=skip))
        begin()
        output = self.run(ForwardContext(batch, no_rows, eager=cut))
        end()
        seconds = time.perf_counter() - started
        bytes_used = torch.cuda.memory_reserved() - used
        return CapturedPiecewise(
            graphs=graphs,
            cuts=cuts,
            output=borrowed(output),
            seconds=seconds,
            bytes_used=bytes_used,
        )

    def _result_of(self, operation: EagerOperation, tensors: tuple[Tensor, ...]) -> Shape:
        """Return the key of the buffer for a result, and allocate it if necessary.

        It starts with zeros, because padding tokens read it, too.
        """
        like_TX = operation.empty(*tensors)
        shape = like_TX.shape[1:], like_TX.dtype
        if shape not in self.results:
            self.results[shape] = like_TX.new_zeros(self.inputs_4T.shape[1], *shape[0])
        return shape

    def fit(self, num_tokens: int) -> int | None:
        """Return the smallest captured size for these tokens, or None."""
        return next((size for size in self.captured if size >= num_tokens), None)

    def replay(self, size: int, ctx: ForwardContext) -> Tensor:
        """Return the result of `run` for the step. Padding tokens write to the padding page."""
        piecewise, batch = self.captured[size], ctx.batch
        assert batch.sampled_at is not None and not ctx.all_hidden  # the captured case
        num_tokens, num_sampled = len(batch.token_ids_T), len(batch.sampled_at)
        inputs = batch.token_ids_T, batch.positions_T, batch.slot_mapping_T, batch.slots_T
        self.inputs_4T[:, :num_tokens] = torch.stack(inputs)
        self.inputs_4T[:, num_tokens:size] = 0
        self.sampled_S[:num_sampled] = batch.sampled_at
        self.sampled_S[num_sampled:size] = -1
        first, *others = piecewise.graphs
        first.replay()
        results = {shape: x_TX[:num_tokens] for shape, x_TX in self.results.items()}
        for (operation, tensors, shape), graph in zip(piecewise.cuts, others, strict=True):
            operation(ctx, *[x_TX[:num_tokens] for x_TX in tensors], results[shape])
            graph.replay()
        return piecewise.output[:num_sampled]


def no_rows(*_: object) -> NoReturn:
    """Fail: the attention of a batch without rows must not be called."""
    raise AssertionError("attention is called through ForwardContext.eager only")
