"""CUDA graphs: sizes, capture, replay. Independent of the captured function.

Decision: a graph of a decode step reads the slots of its rows from one static buffer and gathers
everything else from device state, so replaying needs no refill unless the rows changed.

A step with prompt chunks has piecewise graphs. Operations that depend on the step's rows, such as
attention, run eagerly between two graphs. The rest depends on the number of tokens only, since the
last graph computes the maximum number of sampled rows. Independent of the model: it is split
wherever it calls `ForwardContext.eager`.

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
from nanovllm.config import Recipe
from nanovllm.runner.batch import RowBuilder, StepRows, rowless

MOST_DRAFTED = 512  # tokens; larger steps run longer than their launches take, so need no graph
Size = tuple[int, int]  # tokens, and the maximum tokens of a row (width)
Shape = tuple[torch.Size, torch.dtype]  # of one token's result
Graph = Any  # a torch.cuda.CUDAGraph, or a test's substitute
Pool = Any  # a torch.cuda.graph_pool_handle(); None: a new one


def graph_sizes(most: int) -> list[int]:
    """Return the numbers of tokens to capture. Padding is at most about 10 %, 7 rows below 64."""
    sizes = [*range(1, 9), *range(16, 64, 8), *range(64, 128, 8), *range(128, 256, 16)]
    sizes += range(256, most + 1, 32)
    return sorted({min(size, most) for size in sizes} | {most})


def piecewise_sizes(most: int) -> list[int]:
    """Return the numbers of tokens to capture. Padding is at most 12 %, or 31 tokens."""
    sizes, start = [*range(32, 256, 32)], 256
    while start < most:
        sizes += range(start, 2 * start, start // 8)
        start *= 2
    return sorted({min(size, most) for size in sizes} | {most}) if most else []


def largest_graph(num_slots: int, width: int) -> int:
    """Return the tokens of the largest captured decode step with rows of up to `width` tokens."""
    return num_slots if width == 1 else min(num_slots * width, max(num_slots, MOST_DRAFTED))


def obstacles(recipe: Recipe) -> list[str]:
    """Return the reasons why decode steps cannot be captured. The recipe has no "auto"."""
    reasons = []
    if recipe.device != "cuda":
        reasons.append(f"device is {recipe.device}: CUDA graphs need a CUDA device")
    kinds = [k for k in ("attention", "experts", "delta") if getattr(recipe.kernels, k) == "torch"]
    reasons += [f"kernels.{k} is torch, which reads tensors' values on the host" for k in kinds]
    if not recipe.kernels.cuda_graphs:
        reasons.append("kernels.cuda_graphs is false")
    return reasons


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

    A size fixes the number of tokens; their division into rows may differ in each replay. There is
    room for one row per token, or for fewer if rows have `tokens_per_row` tokens on average.
    `keep` selects the part of the output that is stored, since stored tensors of all sizes take
    memory.
    """

    def __init__(
        self,
        run: Callable[[StepRows], object],
        builder: RowBuilder,
        keep: Callable[[Any], object] = lambda output: output,
        tokens_per_row: int = 1,
    ) -> None:
        self.run = run
        self.keep = keep
        self.builder = builder
        self.tokens_per_row = tokens_per_row
        self.captured: dict[Size, Captured] = {}

    def most_rows(self, num_tokens: int) -> int:
        """Return the rows of a graph for `num_tokens`. A step may have fewer."""
        return -(-num_tokens // self.tokens_per_row)

    def takes(self, size: Size, num_rows: int) -> bool:
        """Return True if a graph of this size was captured with room for `num_rows`."""
        return size in self.captured and num_rows <= self.most_rows(size[0])

    def distinct(self, sizes: list[Size]) -> list[Size]:
        """Return the sizes that have fewer rows here than in graphs for fewer tokens per row."""
        # Up to 2 tokens, graphs for 2 per row have one row, too.
        least = min(self.tokens_per_row, 3)
        return [size for size in sizes if size[0] >= least and size[1] >= self.tokens_per_row]

    def padded(self, size: Size, max_length: int) -> StepRows:
        """Return the static rows of a graph, without values on the host."""
        num_tokens, width = size
        return self.builder.padded(num_tokens, width, max_length, self.most_rows(num_tokens))

    def capture(
        self,
        sizes: list[Size],
        max_length: int,
        captured: Callable[[], None] = lambda: None,
        pool: Pool = None,
    ) -> None:
        """Capture all sizes, the largest first, so that smaller ones reuse its memory.

        `captured` is called after each. `pool` is memory to share with other graphs, whose
        replays must not overlap with these.
        """
        pool = pool or torch.cuda.graph_pool_handle()
        for size in sorted(sizes, reverse=True):
            rows = self.padded(size, max_length)
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


class EagerCut(NamedTuple):
    """An eager operation between two graphs: its inputs, and the buffer for its result."""

    operation: EagerOperation
    tensors: tuple[Tensor, ...]
    result: Shape


@dataclass(frozen=True, slots=True)
class CapturedPiecewise:
    graphs: list[Graph]
    cuts: list[EagerCut]  # after each graph but the last
    outputs: tuple[Tensor, ...]  # of sampled tokens, then of all tokens
    seconds: float
    bytes_used: int


class PiecewiseGraphs:
    """Graphs of `run`, which maps a step's tokens to results, one list per number of tokens.

    The first result is of sampled tokens, the others are of all tokens.
    """

    def __init__(
        self,
        run: Callable[[ForwardContext], tuple[Tensor, ...]],
        most_rows: int,
        device: torch.device,
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
        by_size = {}
        for size in sorted(sizes, reverse=True):
            by_size[size] = self._capture(size)
            captured()
        self.captured = dict(sorted(by_size.items()))

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
        outputs = self.run(ForwardContext(batch, no_rows, eager=cut))
        end()
        seconds = time.perf_counter() - started
        bytes_used = torch.cuda.memory_reserved() - used
        return CapturedPiecewise(
            graphs=graphs,
            cuts=cuts,
            outputs=tuple(map(borrowed, outputs)),
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

    def fit(self, num_tokens: int) -> int:
        """Return the smallest captured size for these tokens, or 0."""
        return next((size for size in self.captured if size >= num_tokens), 0)

    def replay(self, size: int, ctx: ForwardContext) -> tuple[Tensor, ...]:
        """Return the results of `run` for the step. Padding tokens write to the padding page."""
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
        of_sampled, *of_all = piecewise.outputs
        return of_sampled[:num_sampled], *(x_TX[:num_tokens] for x_TX in of_all)


def no_rows(*_: object) -> NoReturn:
    """Fail: the attention of a batch without rows must not be called."""
    raise AssertionError("attention is called through ForwardContext.eager only")
