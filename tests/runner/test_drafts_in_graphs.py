"""Graphs of decode steps with a draft model, as tapes: a replay reads no number of its capture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.attention.base import Batch
from nanovllm.attention.grouped import PagedKV
from nanovllm.config import DEMO, Config, Speculate, load_config
from nanovllm.runner.graphs import Captured, DecodeGraphs
from nanovllm.runner.runner import Runner
from nanovllm.wire import Sampling
from tests.runner.tape import Tape
from tests.whole_engine import GREEDY, WholeEngine, prompts_of

SLOTS, DRAFTS = 4, 3


class WholeTables:
    """Attention over all pages of a row's table, in shapes that do not depend on any length."""

    def bind(self, batch: Batch) -> WholeTables.Attend:
        return WholeTables.Attend(batch)

    class Attend:
        def __init__(self, batch: Batch) -> None:
            self.batch = batch

        def __call__(self, cache: PagedKV, q_THA: Tensor, out_THA: Tensor | None = None) -> Tensor:
            batch = self.batch
            token_T = torch.arange(len(q_THA), dtype=torch.int32)
            row_T = torch.searchsorted(batch.starts_R1[1:].contiguous(), token_T, right=True)
            table_TM = batch.page_table_RM[row_T.clamp(max=len(batch.page_table_RM) - 1)]
            keys_TGCA, values_TGCA = (
                pages_PSGA[table_TM].flatten(1, 2).transpose(1, 2)
                for pages_PSGA in (cache.k_PSGA, cache.v_PSGA)
            )
            seen_TC = torch.arange(keys_TGCA.shape[2]) <= batch.positions_T[:, None]
            o_THA = F.scaled_dot_product_attention(
                q_THA[:, :, None],
                keys_TGCA,
                values_TGCA,
                attn_mask=seen_TC[:, None, None],
                enable_gqa=True,
            )[:, :, 0]
            return o_THA if out_THA is None else out_THA.copy_(o_THA)


def capture(graphs: DecodeGraphs, sizes: list[tuple[int, int]], max_length: int) -> None:
    for size in sizes:
        rows, tape = graphs.padded(size, max_length), Tape()
        tape.capture_begin(None)
        output = graphs.run(rows)
        tape.capture_end()
        graphs.captured[size] = Captured(tape, graphs.keep(output), 0.0, 0)


@torch.inference_mode()
def with_graphs(runner: Runner, max_length: int) -> None:
    sizes = [(2, 1), (4, 1), (4, 4), (8, 4), (16, 4)]
    for graphs in (runner.graphs.plain.decode, *runner.graphs.plain.draws.values()):
        capture(graphs, graphs.distinct(sizes), max_length)


def engine_of(config: Config, speculate: Speculate) -> WholeEngine:
    engine = WholeEngine(
        config, speculate=speculate, slots=SLOTS, page_tokens=8, pages=60, max_tokens=96
    )
    runner = engine.runner
    runner.backend = WholeTables()
    runner.drafter.backend = WholeTables()
    return engine


@pytest.mark.parametrize(
    ("model", "adapt"),
    [(DEMO, True), (DEMO / "draft", True), (DEMO / "draft", False)],
    ids=["itself", "draft", "draft, all its drafts"],
)
def test_a_replay_is_the_eager_step(model: Path, adapt: bool) -> None:
    """Rows come, go and reject drafts. Text and accepted drafts are those of eager steps."""
    config = load_config(None, ["device=cpu"])
    speculate = Speculate(method="draft_model", model=str(model), tokens=DRAFTS, adapt=adapt)
    found = {}
    for has_graphs in (False, True):
        engine = engine_of(config, speculate)
        if has_graphs:
            with_graphs(engine.runner, 96)
        for i, prompt in enumerate(prompts_of(7, 5)):
            sampling = GREEDY if i % 2 else Sampling(temperature=1.0, seed=i)
            engine.submit(i, prompt[:30], 16 + 3 * i, sampling)
        engine.run()
        stats = engine.scheduler.stats()
        found[has_graphs] = engine.text, stats.accepted_by_position, stats.draft_tokens
        modes = {mode.partition("/")[0] for mode in engine.runner.steps_by_mode}
        assert ("FULL" in modes) == has_graphs
    assert found[True] == found[False]
    assert sum(found[True][1]) > 20
    if has_graphs:
        replays = {
            name: sum(one.graph.replays for one in graphs.captured.values())
            for name, graphs in engine.runner.graphs.plain.draws.items()
        }
        assert replays["draw"] > 0 and replays["draw, 1/4 rows"] > 9, replays
