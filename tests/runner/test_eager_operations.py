"""Piecewise graphs are cut at each operation that depends on rows, for any type of result."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanovllm.attention.base import Batch, ForwardContext
from nanovllm.runner.graphs import PiecewiseGraphs, no_rows
from tests.runner.tape import Tape

CPU = torch.device("cpu")
STEPS = [[4, 4], [1], [2, 1, 4], [3], [8], [1, 1, 1]]  # short steps follow long ones


class Sums:
    """Running sums of two tensors over their row's tokens, each in a state of the row's slot."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self, ctx: ForwardContext, x_TD: Tensor, y_TD: Tensor, out_T2D: Tensor | None = None
    ) -> Tensor:
        self.calls += 1
        found_T2D = self.empty(x_TD, y_TD) if out_T2D is None else out_T2D
        starts = ctx.batch.starts_R1.tolist()
        for row, slot in enumerate(ctx.batch.slots_R.tolist()):
            tokens = slice(starts[row], starts[row + 1])
            found_T2D[tokens, 0] = x_TD[tokens].cumsum(0) + slot
            found_T2D[tokens, 1] = y_TD[tokens].cumsum(0)
        return found_T2D

    def empty(self, x_TD: Tensor, y_TD: Tensor) -> Tensor:
        return x_TD.new_empty(len(x_TD), 2, x_TD.shape[1])


class Firsts:
    """For each token, 1 if it is its row's first: one number per token, of another dtype."""

    def __call__(self, ctx: ForwardContext, x_TD: Tensor, out_T: Tensor | None = None) -> Tensor:
        found_T = self.empty(x_TD) if out_T is None else out_T
        found_T.zero_()
        found_T[ctx.batch.starts_R1[:-1].long()] = 1
        return found_T

    def empty(self, x_TD: Tensor) -> Tensor:
        return x_TD.new_empty(len(x_TD), dtype=torch.int64)


class Toy:
    """A model of three eager operations, two of the same shape."""

    def __init__(self) -> None:
        self.operations = Sums(), Firsts(), Sums()

    def run(self, ctx: ForwardContext) -> tuple[Tensor, ...]:
        """Return results of sampled tokens, and others of all tokens."""
        first, second, third = self.operations
        x_TD = ctx.batch.token_ids_T[:, None] * torch.arange(1.0, 4)
        x_TD = ctx.eager(first, ctx, x_TD, x_TD + 1).sum(1) / 2
        x_TD = x_TD * (2 + ctx.eager(second, ctx, x_TD)[:, None])
        x_TD = ctx.eager(third, ctx, x_TD, x_TD * x_TD).flatten(1)
        return ctx.batch.sampled(x_TD) + 1, x_TD - 2


def captured(toy: Toy) -> PiecewiseGraphs:
    graphs = PiecewiseGraphs(toy.run, 8, CPU)
    graphs.new_graph = Tape
    graphs.capture([3, 8])
    return graphs


def step(counts: list[int], seed: int) -> Batch:
    """Return a batch with rows of `counts` tokens in slots 5 and up. Each row samples its last
    token.
    """
    starts = torch.tensor([0, *counts]).cumsum(0)
    ids = torch.randint(1, 50, (sum(counts),), generator=torch.Generator().manual_seed(seed))
    rows = torch.arange(len(counts)) + 5, starts.int(), torch.tensor(counts).int()
    table, shape = torch.zeros(len(counts), 1).int(), (0, 0, 1, max(counts), 8)
    return Batch(ids, ids, ids, ids, *rows, table, starts[1:] - 1, *shape)


def test_replays_are_the_eager_step_whatever_its_rows() -> None:
    toy = Toy()
    graphs = captured(toy)
    assert toy.operations[0].calls == 0  # no call during the capture, which has no rows
    for seed, counts in enumerate(STEPS):
        ctx = ForwardContext(step(counts, seed), no_rows)
        size = graphs.fit(sum(counts))
        assert size == (3 if sum(counts) <= 3 else 8)
        found, expected = graphs.replay(size, ctx), toy.run(ctx)
        assert [len(tensor) for tensor in found] == [len(counts), sum(counts)]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert toy.operations[0].calls == 2 * len(STEPS)


def test_a_graph_ends_at_each_operation_and_results_of_a_shape_share_a_buffer() -> None:
    toy = Toy()
    graphs = captured(toy)
    for piecewise in graphs.captured.values():
        assert tuple(cut.operation for cut in piecewise.cuts) == toy.operations
        assert len(piecewise.graphs) == 4
        assert [len(cut.tensors) for cut in piecewise.cuts] == [2, 1, 2]
        sums, firsts = ((2, 3), torch.float32), ((), torch.int64)
        assert [cut.result for cut in piecewise.cuts] == [sums, firsts, sums]
    assert {shape: len(x_TX) for shape, x_TX in graphs.results.items()} == {sums: 8, firsts: 8}


def test_tokens_that_only_pad_a_step_are_nobody_s() -> None:
    """Padding tokens are token 0. Results of eager operations for padding are not written."""
    graphs = captured(Toy())
    graphs.replay(8, ForwardContext(step([5], 1), no_rows))
    assert graphs.inputs_4T[:, 5:].tolist() == [[0] * 3] * 4
    assert all(x_TX[:5].any() and not x_TX[5:].any() for x_TX in graphs.results.values())


def test_attention_past_the_hook_is_refused_while_there_are_no_rows() -> None:
    graphs = PiecewiseGraphs(lambda ctx: ctx.attend(None, ctx.batch.token_ids_T), 8, CPU)
    with pytest.raises(AssertionError, match=r"through ForwardContext\.eager only"):
        graphs.capture([8])


def test_hidden_states_of_all_tokens_are_not_what_was_captured() -> None:
    graphs = captured(Toy())
    with pytest.raises(AssertionError):
        graphs.replay(8, ForwardContext(step([5], 1), no_rows, all_hidden=True))
