"""CUDA graphs of steps with prompt chunks: the model between its attentions, piece by piece.

Attention depends on the step's rows, so it runs eagerly between two pieces. All else depends on the
number of tokens alone, since the last piece takes as many sampling rows as there can be. Does not
know what a model is: where it calls `attend`, there it is cut.

Decision: queries stay where a piece left them in the graphs' memory, which nothing here holds on
to, so layers and sizes share it: between two pieces nobody else writes there. What attention
returns has one buffer of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm.attention.base import ForwardContext, PagedKV
from nanovllm.runner.batch import rowless
from nanovllm.runner.graphs import borrowed


def piece_sizes(most: int) -> list[int]:
    """Numbers of tokens to capture: padding is at most 12 %, or 31 tokens."""
    sizes, start = [*range(32, 256, 32)], 256
    while start < most:
        sizes += range(start, 2 * start, start // 8)
        start *= 2
    return sorted({min(size, most) for size in sizes} | {most}) if most else []


Graph = Any  # a torch.cuda.CUDAGraph, or what does as it does


@dataclass(frozen=True, slots=True)
class Pieces:
    graphs: list[Graph]
    cuts: list[tuple[int, Tensor, Tensor]]  # after each graph but the last: layer, q_THA, o_THA
    output: Tensor  # of each token that is sampled at
    seconds: float
    bytes_used: int


class PiecewiseGraphs:
    """`run` maps a step's tokens to results, through `attend`; captured once per size."""

    def __init__(
        self,
        run: Callable[[ForwardContext], Tensor],
        caches: tuple[PagedKV, ...],
        most_rows: int,
        device: torch.device,
    ) -> None:
        self.run = run
        self.caches = caches
        self.sampled_S = torch.zeros(most_rows, dtype=torch.int64, device=device)
        self.device = device
        self.new_graph: Callable[[], Graph] = torch.cuda.CUDAGraph
        self.captured: dict[int, Pieces] = {}  # by number of tokens, ascending
        self._pool: Any = None

    def capture(self, sizes: list[int], captured: Callable[[], None] = lambda: None) -> None:
        """Largest first, so that the smaller ones reuse its memory. `captured` hears of each."""
        most = max(sizes, default=0)
        self.inputs_3T = torch.zeros(3, most, dtype=torch.int64, device=self.device)
        self.o_THA = torch.empty(0)
        found = {}
        for size in sorted(sizes, reverse=True):
            found[size] = self._capture(size)
            captured()
        self.captured = dict(sorted(found.items()))

    def _capture(self, size: int) -> Pieces:
        batch = rowless(self.inputs_3T[:, :size], self.sampled_S[:size])
        started, used = time.perf_counter(), torch.cuda.memory_reserved()
        graphs: list[Graph] = []
        cuts: list[tuple[int, Tensor, Tensor]] = []

        def skip(layer: int, q_THA: Tensor, out_THA: Tensor | None = None) -> Tensor:
            if self.o_THA.numel() == 0:
                self.o_THA = q_THA.new_zeros(self.inputs_3T.shape[1], *q_THA.shape[1:])
            return self.o_THA[:size]

        def cut(layer: int, q_THA: Tensor, out_THA: Tensor | None = None) -> Tensor:
            end()
            cuts.append((layer, borrowed(q_THA), self.o_THA[:size]))
            begin()
            return self.o_THA[:size]

        def begin() -> None:
            graphs.append(self.new_graph())
            graphs[-1].capture_begin(self._pool)

        def end() -> None:
            graphs[-1].capture_end()
            self._pool = graphs[-1].pool()

        # Outside the capture: it compiles kernels and sets up library workspaces.
        self.run(ForwardContext(batch, self.caches, skip))
        begin()
        output = self.run(ForwardContext(batch, self.caches, cut))
        end()
        seconds = time.perf_counter() - started
        bytes_used = torch.cuda.memory_reserved() - used
        return Pieces(graphs, cuts, borrowed(output), seconds, bytes_used)

    def fit(self, num_tokens: int) -> int | None:
        """The smallest captured size for so many tokens."""
        return next((size for size in self.captured if size >= num_tokens), None)

    def replay(self, size: int, ctx: ForwardContext) -> Tensor:
        """What `run` returns for the step. Tokens that pad it are fed to the padding page."""
        pieces, batch = self.captured[size], ctx.batch
        assert batch.sampled_at is not None  # of a step with chunks
        num_tokens, num_sampled = len(batch.token_ids_T), len(batch.sampled_at)
        inputs = batch.token_ids_T, batch.positions_T, batch.slot_mapping_T
        self.inputs_3T[:, :num_tokens] = torch.stack(inputs)
        self.inputs_3T[:, num_tokens:size] = 0
        self.sampled_S[:num_sampled] = batch.sampled_at
        self.sampled_S[num_sampled:size] = 0
        first, *others = pieces.graphs
        first.replay()
        for (layer, q_THA, o_THA), graph in zip(pieces.cuts, others, strict=True):
            ctx.attend(layer, q_THA[:num_tokens], o_THA[:num_tokens])
            graph.replay()
        return pieces.output[:num_sampled]
