"""Graphs of decode steps with drafts and recurrent states, as tapes, with faults of other engines.

Text, accepted drafts, keys and states of replays are those of eager steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from nanovllm_kernels.delta.reference import mix_drafted
from torch import Tensor

from nanovllm.attention.base import Batch
from nanovllm.attention.delta_kernels import DeltaKernels, decodes, rows
from nanovllm.attention.grouped import PagedKV
from nanovllm.attention.torch_ref import TorchPaged
from nanovllm.config import Config, Speculate
from nanovllm.layers.experts.products import ExpertMLPs
from nanovllm.spec.model_drafter import ModelDrafter
from nanovllm.wire import Sampling
from tests.models.repeating import make_repeating
from tests.models.tiny import HYBRID, NEXT, config_of
from tests.runner.tape import capture_on_tapes, opaque
from tests.runner.test_drafts_in_graphs import capture
from tests.whole_engine import GREEDY, WholeEngine, prompts_of

SLOTS, DRAFTS, MAX_TOKENS = 4, 3, 96
SIZES = [(2, 1), (4, 1), (4, 4), (8, 4), (16, 4)]
FAMILIES: dict[str, dict[str, Any]] = {"qwen3_next": NEXT, "qwen3_5_text": HYBRID}
METHODS = {
    "mtp": Speculate(method="mtp", tokens=DRAFTS, adapt=False),
    "ngram": Speculate(method="ngram", tokens=DRAFTS, min_match=1, adapt=False),
}
# Prompts of 1, 1 + DRAFTS and 2 + DRAFTS tokens have as many as a decode row, or nearly.
PROMPTS = [*prompts_of(3, 5), [7], [11, 11, 11, 11], [9, 9, 9, 9, 9], *prompts_of(2, 6), [3] * 4]
PLAIN = [4, 7]  # requests without drafts, since the last token of their text is drawn at once


class Opaque:
    """Attention of the reference, as one operation. It reads the step's rows when it runs."""

    def __init__(self, paged: TorchPaged) -> None:
        self.paged = paged

    def bind(self, batch: Batch) -> Opaque.Attend:
        return Opaque.Attend(self.paged, batch)

    class Attend:
        def __init__(self, paged: TorchPaged, batch: Batch) -> None:
            self.paged, self.batch = paged, batch

        def __call__(self, cache: PagedKV, q_THA: Tensor, out_THA: Tensor | None = None) -> Tensor:
            def attend(q_THA: Tensor, *places: Tensor) -> Tensor:
                names = "starts_R1", "lengths_R", "page_table_RM"
                batch = replace(self.batch, **dict(zip(names, places, strict=True)))
                o_THA = torch.zeros(*q_THA.shape[:2], cache.width)
                return self.paged.bind(batch)(cache, q_THA, o_THA)

            batch = self.batch
            given = batch.starts_R1, batch.lengths_R, batch.page_table_RM
            o_THA = opaque(attend)(q_THA, *given)
            return o_THA if out_THA is None else out_THA.copy_(o_THA)


def drafted(*tensors: Any) -> Tensor:
    """Return mix_drafted's result, with zeros for tokens of no row instead of anything."""
    x_THV, starts_R1 = mix_drafted(*tensors), tensors[8]
    x_THV[starts_R1[-1] :] = 0
    return x_THV


def engine_of(config: Config, speculate: Speculate | None, slots: int = SLOTS) -> WholeEngine:
    """Return an engine whose attention and delta rule are single operations of a tape."""
    engine = WholeEngine(
        config, speculate=speculate, slots=slots, page_tokens=8, pages=60, max_tokens=MAX_TOKENS
    )
    runner = engine.runner
    assert isinstance(runner.backend, TorchPaged)
    runner.backend = Opaque(runner.backend)
    if isinstance(runner.drafter, ModelDrafter):
        assert isinstance(runner.drafter.backend, TorchPaged)
        runner.drafter.backend = Opaque(runner.drafter.backend)
    for owner in runner.states.progress.owners:
        owner.kernels = DeltaKernels(opaque(rows), opaque(decodes), opaque(drafted))
    return engine


@torch.inference_mode()
def with_graphs(engine: WholeEngine, *, mixed: bool = True) -> None:
    runner = engine.runner
    for graphs in (runner.graphs.plain.decode, *runner.graphs.plain.draws.values()):
        capture(graphs, graphs.distinct(SIZES), MAX_TOKENS)
    if mixed:
        capture_on_tapes(runner, [8, 40, 80])


class Served(NamedTuple):
    text: dict[int, list[int]]
    accepted: list[int]  # by position
    draft_tokens: int
    modes: list[str]  # of the steps, in order


def served(engine: WholeEngine) -> Served:
    """Serve all requests, of which some come while others decode."""
    modes, before = [], dict(engine.runner.steps_by_mode)
    for i, prompt in enumerate(PROMPTS):
        sampling = GREEDY if i % 2 else Sampling(temperature=0.8, seed=i)
        engine.submit(i, prompt, 1 if i in PLAIN else 12 + 3 * i, sampling)
        if i >= SLOTS - 1:
            for _ in range(3):
                engine.loop.step()
    while not engine.loop.idle:
        engine.loop.step()
        engine.scheduler.check()
        now = dict(engine.runner.steps_by_mode)
        modes += [mode for mode, count in now.items() if count > before.get(mode, 0)]
        before = now
    stats = engine.scheduler.stats()
    return Served(engine.text, stats.accepted_by_position, stats.draft_tokens, modes)


@pytest.fixture(autouse=True)
def _opaque_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the reference's experts one operation of a tape, since they read the routing."""
    monkeypatch.setattr(ExpertMLPs, "_run", opaque(ExpertMLPs._run))


@pytest.fixture(scope="module", params=FAMILIES)
def config(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Config]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    make_repeating(folder, request.param, **FAMILIES[request.param])
    yield config_of(folder)


@pytest.mark.parametrize("method", METHODS)
def test_a_replay_is_the_eager_step(config: Config, method: str) -> None:
    """Padding rows, sums of lengths, stale metadata, rows and states.

    Rows come, go, accept and reject. Small graphs follow large ones, whose rows are padding then.
    Rows with drafts are next to rows without, and slots are used again.
    """
    plain = served(engine_of(config, None)).text
    eager = served(engine_of(config, METHODS[method]))
    engine = engine_of(config, METHODS[method])
    with_graphs(engine)
    found = served(engine)
    assert found.text == eager.text == plain
    assert found.accepted == eager.accepted
    assert found.draft_tokens == eager.draft_tokens > 30
    assert sum(found.accepted) > 15 and found.accepted[2] > 1
    kinds = {mode.partition("/")[0] for mode in found.modes}
    assert "FULL" in kinds and "PIECEWISE" in kinds
    assert {mode.partition("/")[0] for mode in eager.modes} == {"NONE"}
    replays = {
        size: one.graph.replays for size, one in engine.runner.graphs.plain.decode.captured.items()
    }
    assert all(replays[size] > 2 for size in ((4, 4), (8, 4), (16, 4))), replays
    assert engine.runner.padded_tokens > 30


@pytest.mark.parametrize("method", METHODS)
def test_states_and_keys_of_a_replay_are_those_of_the_eager_step(
    config: Config, method: str
) -> None:
    """After each step, all pages and all states are equal, but for padding.

    The last state row and page 0 are padding. A state lags by the latest step's tokens.
    """
    engines = [engine_of(config, METHODS[method]) for _ in range(2)]
    with_graphs(engines[1])
    for engine in engines:
        for i, prompt in enumerate(PROMPTS[:5]):
            engine.submit(i, prompt, 14 + 2 * i)
    num_compared = 0
    while not engines[0].loop.idle:
        for engine in engines:
            engine.loop.step()
        eager, replayed = (engine.runner for engine in engines)
        for one, other in zip(eager.caches.tensors, replayed.caches.tensors, strict=True):
            torch.testing.assert_close(other[:, 1:], one[:, 1:], rtol=1e-4, atol=1e-4)
        states, found = eager.states.rows_NX[:-1], replayed.states.rows_NX[:-1]
        torch.testing.assert_close(found, states, rtol=1e-4, atol=1e-4)
        lengths = [runner.states.progress.lengths_N[:-1] for runner in (eager, replayed)]
        assert torch.equal(*lengths)
        num_compared += 1
    assert num_compared >= 12 and float(states.abs().max()) > 0.1
    assert engines[1].runner.steps_by_mode["FULL/decode"] > 8


def test_a_capture_leaves_no_trace(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of a capture are padding, of length 0. No index is negative.

    Slots, states and pages are as before, except the padding page and the padding slot.
    """
    engine = engine_of(config, METHODS["mtp"])
    for i, prompt in enumerate(PROMPTS[:3]):
        engine.submit(i, prompt, 20)
    for _ in range(6):
        engine.loop.step()
    runner = engine.runner
    for take in (runner.builder._take, runner.builder._take_counts):
        take(np.zeros(0, np.int32))  # a capture is before all requests, so that all is padding
    sampled: list[int] = []
    passed = ModelDrafter._pass

    def watched(drafter: ModelDrafter, step: Any, batch: Batch, given: Any) -> Tensor:
        if batch.sampled_at is not None:
            sampled.extend(batch.sampled_at.tolist())
        sampled.extend(batch.positions_T.tolist() + batch.slot_mapping_T.tolist())
        return passed(drafter, step, batch, given)

    monkeypatch.setattr(ModelDrafter, "_pass", watched)
    slots = runner.slots
    parts = [slots.tokens_NL[:-1], slots.lengths_N, slots.pages_NM, runner.states.rows_NX[:-1]]
    parts += [pages[:, 1:] for pages in runner.caches.tensors]
    before = [part.clone() for part in parts]
    with_graphs(engine)
    assert len(sampled) > 100 and min(sampled) == 0
    assert all(map(torch.equal, parts, before))
    assert not slots.tokens_NL[-1].any()


@pytest.mark.parametrize("length", [1, DRAFTS, 1 + DRAFTS, 2 + DRAFTS])
def test_a_prompt_as_short_as_a_decode_row_is_a_chunk(config: Config, length: int) -> None:
    """The request has no state yet, so a graph of decode steps would read the slot's former one.

    The slot's former request has left its state, its keys and its latest tokens there.
    """
    prompts = [PROMPTS[0], [(5 + 3 * i) % 200 for i in range(length)]]
    texts = []
    for has_graphs in (False, True):
        engine = engine_of(config, METHODS["mtp"] if has_graphs else None, slots=1)
        if has_graphs:
            with_graphs(engine, mixed=False)
        for i, prompt in enumerate(prompts):
            engine.submit(i, prompt, 16)
            engine.loop.step()
        engine.run()
        texts.append(engine.text)
    assert texts[0] == texts[1] and len(texts[1][1]) == 16
    modes = engine.runner.steps_by_mode
    assert sum(count for mode, count in modes.items() if mode.startswith("NONE/")) == 2, modes
    assert modes["FULL/decode"] > 5
