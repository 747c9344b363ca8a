"""Which graphs each kind of step replays, counted on tapes in place of CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from msgspec.structs import replace as struct_replace

from nanovllm.config import Speculate, load_config
from nanovllm.plan import Chunk
from nanovllm.runner.graph_set import StepGraphs
from nanovllm.runner.graphs import Captured
from nanovllm.runner.runner import Runner
from nanovllm.wire import Sampling
from tests.runner.plans import Plans, admit
from tests.runner.tape import capture_on_tapes
from tests.runner.test_drafts_in_graphs import engine_of, with_graphs
from tests.whole_engine import small_demo

PROMPTS = [[5, 9, 5, 9, 5], [7] * 11, [3, 1, 4, 1, 5, 9, 2, 6]]
PAGES = 8  # of a slot, 8 tokens each


@pytest.fixture
def runner() -> Runner:
    """Return a runner with a draft model, whose graphs are tapes: up to 4 rows, and 16 tokens."""
    config = load_config(None, ["device=cpu"])
    runner = engine_of(config, Speculate(method="draft_model", tokens=3)).runner
    with_graphs(runner, 96)
    capture_on_tapes(runner, [16])
    return runner


def replays(graphs: StepGraphs) -> dict[str, int]:
    """Return the number of replays by name."""
    by_name = {"decode": graphs.decode, **graphs.draws}
    counts = {
        name: sum(one.graph.replays for one in each.captured.values())
        for name, each in by_name.items()
    }
    return counts | {"mixed": sum(one.graphs[0].replays for one in graphs.mixed.captured.values())}


def replayed(runner: Runner, plans: Plans, decodes: list[int], **changes: object) -> dict[str, int]:
    """Return the graphs that a step of decode rows replays, and how often."""
    before, launch = replays(runner.graphs.plain), runner.launch
    runner.launch = lambda plan: launch(struct_replace(plan, **changes))
    try:
        plans.step((), decodes)
    finally:
        del runner.launch
    after = replays(runner.graphs.plain)
    return {name: count - before[name] for name, count in after.items() if count != before[name]}


def begun(runner: Runner, sampling: Sampling) -> Plans:
    """Return plans after whose first steps all slots decode."""
    plans = Plans(runner)
    for slot, prompt in enumerate(PROMPTS):
        pages = list(range(1 + PAGES * slot, 1 + PAGES * (slot + 1)))
        plans.step([admit(slot, prompt, pages, sampling=sampling)], (), {slot: len(prompt)})
    return plans


def test_a_decode_step_replays_its_forward_pass_and_a_draw(runner: Runner) -> None:
    plans = begun(runner, Sampling(temperature=0.0))
    assert replays(runner.graphs.plain)["mixed"] == 3
    assert replayed(runner, plans, [0, 1, 2]) == {"decode": 1, "draw": 1}
    assert plans.result is not None and plans.result.drafts is not None
    found = replayed(runner, plans, [0, 1, 2], proposes=False)
    assert found == {"decode": 1, "draw without drafts": 1}
    assert plans.result.drafts is None


@pytest.mark.parametrize(
    ("drafts", "name"),
    [
        ([3, 3, 3], "draw, 1/4 rows"),  # 12 of 16 tokens in 3 of 4 rows
        ([1, 1, 1], "draw, 1/2 rows"),  # 6 of 8 tokens in 3 of 4 rows
        ([3, 1, 1], "draw, 1/2 rows"),
        ([1, 0, 0], "draw"),  # 4 tokens in 3 rows
    ],
)
def test_passes_of_a_draft_model_take_few_rows_if_rows_have_many_tokens(
    runner: Runner, drafts: list[int], name: str
) -> None:
    plans = begun(runner, Sampling(temperature=0.0))
    plans.step((), [0, 1, 2])  # proposes drafts
    slots = runner.slots
    before, launched = replays(runner.graphs.plain), slots.lengths_N.clone()
    plans.step((), [0, 1, 2], drafts=drafts)
    after = replays(runner.graphs.plain)
    changed = {each for each, count in after.items() if count != before[each]}
    assert changed == {"decode", name}
    assert plans.result is not None and plans.result.drafts is not None
    assert plans.result.drafts[:, 0].tolist() == [3, 3, 3]
    lengths = [len(line) for line in plans.lines.values()]
    assert (slots.lengths_N - launched)[:3].tolist() == lengths


def test_graphs_of_few_rows_are_captured_if_they_have_fewer_rows() -> None:
    graphs = small_demo(4, "speculate={method: ngram, tokens: 3}").runner.graphs.plain
    sizes = [(tokens, width) for width in (1, 4) for tokens in (1, 2, 3, 4, 8)]
    found = {
        name: [(size, each.most_rows(size[0])) for size in each.distinct(sizes)]
        for name, each in graphs.draws.items()
    }
    assert found["draw"] == [(size, size[0]) for size in sizes]
    assert found["draw, 1/2 rows"] == [((2, 4), 1), ((3, 4), 2), ((4, 4), 2), ((8, 4), 4)]
    assert found["draw, 1/4 rows"] == [((3, 4), 1), ((4, 4), 1), ((8, 4), 2)]


def test_rows_with_more_than_a_temperature_draw_eagerly(runner: Runner) -> None:
    plans = begun(runner, Sampling(temperature=1.0, seed=3, top_k=5))
    assert replayed(runner, plans, [0, 1, 2]) == {"decode": 1}


def test_a_step_for_which_no_graph_is_large_enough_replays_none(runner: Runner) -> None:
    plans = begun(runner, Sampling(temperature=0.0))
    assert replayed(runner, plans, [0], lane_tokens=5) == {}
    graphs = runner.graphs.plain
    rows = runner.builder.padded(3, 1, 96)
    assert [graphs.fit(rows, count) for count in (1, 2, 3, 4, 5)] == [2, 2, 4, 4, 0]
    assert [graphs.fit(replace(rows, width=4), count) for count in (4, 5, 9, 17)] == [4, 8, 16, 0]
    mixed = replace(rows, sampled_at=torch.zeros(1, dtype=torch.int64), chunks=[Chunk(0, 9, True)])
    assert [graphs.fit(mixed, count) for count in (1, 16, 17)] == [16, 16, 0]


def test_without_a_draft_model_there_is_one_kind_of_draw() -> None:
    """Steps of drafts by other methods replay it also if the plan wants no drafts by a model."""
    graphs = small_demo(4, "speculate={method: ngram, tokens: 3}").runner.graphs
    names = ["draw", "draw, 1/4 rows", "draw, 1/2 rows"]
    assert list(graphs.plain.draws) == list(graphs.adapted.draws) == names
    forwarded, size = object(), (2, 4)
    graphs.plain.decode.captured[size] = Captured(None, forwarded, 0.0, 0)
    for proposes in (False, True):
        draw = graphs.plain.draw_after(size, forwarded, num_rows=1, proposes=proposes)
        assert draw is graphs.plain.draw[-1]  # the others are not captured
    eager = object()
    assert graphs.plain.draw_after(size, eager, num_rows=1, proposes=True) is None
    assert graphs.plain.draw_after((2, 1), forwarded, num_rows=1, proposes=True) is None
    assert graphs.of(adapted=True) is graphs.adapted and graphs.of(adapted=False) is graphs.plain
    assert graphs.adapted.draw_after(size, forwarded, num_rows=1, proposes=True) is None
