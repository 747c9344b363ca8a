"""Lanes as threads, each with its own Runner and requests: the text is that of one rank."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from nanovllm.config import Speculate
from nanovllm.engine.ranks import Follower, RankedExecutor
from nanovllm.experts import ExpertLoad
from nanovllm.parallel.places import places_of
from nanovllm.plan import LanesPlan, Masks, StepPlan, StepResult, mode_key
from nanovllm.runner.graphs import Captured
from nanovllm.wire import FinishReason
from tests.engine.test_ranks import CONFIG, NGRAM, SMALL, cut, ranked, text_of
from tests.models.corrupted import POISON
from tests.models.tiny import CASES, config_of, make_tiny
from tests.parallel.test_mesh import COUNTS
from tests.whole_engine import WholeEngine


@pytest.mark.parametrize(
    ("family", "drafts", "ep"),
    [
        ("qwen3_moe", NGRAM, 2),
        ("qwen3_moe", None, 4),
        ("minimax_m2", NGRAM, 4),
        ("deepseek_v3", None, 2),
        ("deepseek_v3", NGRAM, 4),
        ("qwen3_next", NGRAM, 2),
        ("qwen3_next", None, 4),
    ],
)
def test_text_is_that_of_one_rank(
    family: str, drafts: Speculate | None, ep: int, tmp_path: Path
) -> None:
    overrides = {**CASES[family][1], COUNTS[family]: 12, "vocab_size": 5003}
    if family == "deepseek_v3":
        overrides["n_group"] = 6
    make_tiny(tmp_path, family, **overrides)
    config = config_of(tmp_path)
    expected = text_of(WholeEngine(config, speculate=drafts, **SMALL))
    with ranked(cut(config, 1, ep), 1, tmp_path, speculate=drafts, **SMALL) as engine:
        assert text_of(engine) == expected


def test_beside_a_lane_with_more_rows_than_graphs_have_no_graph_draws(tmp_path: Path) -> None:
    """The forward pass is eager and does not write the inputs of the lane's sampling graph."""
    make_tiny(tmp_path, "qwen3", vocab_size=5003)
    config = config_of(tmp_path)
    expected = text_of(WholeEngine(config, **SMALL))
    engine = WholeEngine(config, **SMALL)
    runner, launch = engine.runner, engine.runner.launch
    for graphs in (runner.graphs.plain.decode, *runner.graphs.plain.draw):
        graphs.captured = {(num, 1): Captured(None, object(), 0.0, 0) for num in range(1, 5)}
    runner.launch = lambda plan: launch(replace(plan, lane_tokens=1000))
    assert text_of(engine) == expected
    assert {mode.partition("/")[0] for mode in runner.steps_by_mode} == {"NONE"}


class Counting:
    """Executor with a given number of padded tokens. It is also its steps' handle."""

    gap_s = busy_s = 0.0
    vet = disk = lender = remote = None

    def __init__(self, padded: int) -> None:
        self.padded_tokens = padded
        self.steps_by_mode: Counter[str] = Counter()

    def launch(self, plan: StepPlan) -> Counting:
        self.mode = mode_key("FULL", plan)
        self.steps_by_mode[self.mode] += 1
        return self

    def sample(self, masks: Masks) -> None:
        """Ignore the masks."""

    def wait(self) -> StepResult:
        return StepResult(1, np.full((1, 1), self.padded_tokens, np.int32))

    def expert_load(self, *, wait: bool) -> ExpertLoad:
        counts = np.array([self.padded_tokens, 2], np.int64).tobytes()
        return ExpertLoad([5], counts, counts)


def test_what_all_lanes_count_is_told_as_one(tmp_path: Path) -> None:
    """The step counts as structured if the step of any lane is."""
    first, *others = places_of(cut(CONFIG, 1, 3), str(tmp_path))
    executor = RankedExecutor(Counting(1), first)  # type: ignore[arg-type]
    followers = [Follower(Counting(10**place.rank), place) for place in others]  # type: ignore[arg-type]
    own = StepPlan(1, [], [], 1, np.int32([3]).tobytes(), [], 9, [])
    lanes = own, replace(own, masked=[0]), own
    plan = LanesPlan(1, lanes, rows=(own.decodes,) * 3, num_slots=4)
    assert executor.expert_load(wait=True).by_rank == {"0": 1, "1": 2}
    handle = executor.launch(plan)
    assert handle.mode == "FULL/structured"
    handle.sample(np.zeros((1, 1), np.int32))
    for _ in range(2):  # the plan, then the masks
        for follower, place in zip(followers, others, strict=True):
            follower.take(place.recv())
    result = handle.wait()
    assert [int(one.tokens[0, 0]) for one in result.lanes] == [1, 10, 100]
    assert executor.padded_tokens == 111
    assert executor.steps_by_mode == {"FULL/structured": 1}
    found = executor.expert_load(wait=True)
    assert found.by_rank == {"0": 111, "1": 6}
    assert found.imbalance == {"5/experts": 222 / 117, "5/ranks": 222 / 117}


def test_lanes_share_experts_in_fp8(tmp_path: Path) -> None:
    """Experts are quantised from other weights during loading, on each rank its own."""
    overrides = {**CASES["deepseek_v3"][1], "n_routed_experts": 8, "vocab_size": 5003}
    make_tiny(tmp_path, "deepseek_v3", **overrides)
    config = config_of(tmp_path)
    config = replace(config, recipe=replace(config.recipe, quantize="fp8"))
    expected = text_of(WholeEngine(config, **SMALL))
    with ranked(cut(config, 1, 2), 1, tmp_path, **SMALL) as engine:
        assert text_of(engine) == expected


def test_a_corrupted_request_ends_alone(tmp_path: Path) -> None:
    """NaN goes to the other lane's experts with its token, and returns only to that token."""
    family, overrides = CASES["qwen3_moe"]
    model = make_tiny(tmp_path, family, **{**overrides, "num_experts": 6})
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = torch.nan
    model.save_pretrained(tmp_path)
    config = config_of(tmp_path)

    def outcome(engine: WholeEngine) -> tuple[dict[int, list[int]], dict[int, FinishReason]]:
        for at in range(6):
            engine.submit(at, [5, 20, POISON if at % 3 == 1 else 9, 31 + at], 8)
        engine.run()
        return engine.text, engine.finish

    text, finish = outcome(WholeEngine(config))
    assert Counter(finish.values()) == {FinishReason.LENGTH: 4, FinishReason.ERROR: 2}
    with ranked(cut(config, 1, 2), 1, tmp_path) as engine:
        assert outcome(engine) == (text, finish)
