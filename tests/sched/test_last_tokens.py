"""Prompts of which one token is left: decode rows, which have a CUDA graph of their own."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest

from nanovllm.kv.memory import KVMemory
from nanovllm.plan import StepPlan, StepResult
from nanovllm.sched.scheduler import Scheduler
from nanovllm.speculate import Drafts
from nanovllm.wire import Generate, Sampling
from tests.models.tiny import CASES, config_of, make_tiny
from tests.whole_engine import WholeEngine, prompts_of

PAGE, NUM_STREAMS, NUM_LONG = 128, 4, 3
LONG = [array("i", [n] * (195 * PAGE + 1)) for n in range(1, 1 + NUM_LONG)]


def completed(scheduler: Scheduler) -> StepPlan:
    """Plan and complete a step."""
    plan = scheduler.plan()
    assert plan is not None
    rows = plan.num_decodes + sum(chunk.samples for chunk in plan.chunks)
    scheduler.complete(StepResult(plan.step, np.full((rows, 1), 9, np.int32)))
    scheduler.check()
    return plan


def decoding(drafts: Drafts) -> Scheduler:
    """Return a scheduler with streams, and with the pages of the long prompts."""
    scheduler = Scheduler(
        KVMemory(900, PAGE),
        num_slots=16,
        step_tokens=100_000,
        max_model_tokens=40_000,
        drafts=drafts,
    )
    for name, prompt in enumerate(LONG):
        scheduler.add(Generate(name, prompt.tobytes(), 1, [], Sampling()), 0.0)
    completed(scheduler)
    for name in range(10, 10 + NUM_STREAMS):
        prompt = array("i", [name] * 200).tobytes()
        scheduler.add(Generate(name, prompt, 500, [], Sampling()), 0.0)
    assert len(completed(scheduler).chunks) == NUM_STREAMS
    completed(scheduler)
    for name, prompt in enumerate(LONG, start=100):
        scheduler.add(Generate(name, prompt.tobytes(), 20, [], Sampling()), 0.0)
    return scheduler


def test_the_last_tokens_of_prompts_are_decode_rows() -> None:
    """Three prompts of 24,961 tokens return, all but one of which are cached."""
    scheduler = decoding(Drafts())
    before = scheduler.stats()
    plan = completed(scheduler)
    assert [admit.num_cached for admit in plan.admits] == [195 * PAGE] * NUM_LONG
    assert (plan.chunks, plan.num_decodes, plan.num_decoded) == ([], 7, 7)
    assert plan.decodes is not None and plan.max_length == 195 * PAGE + 1
    slots = np.frombuffer(plan.decodes, np.int32).tolist()
    assert slots[NUM_STREAMS:] == [admit.slot for admit in plan.admits]
    assert scheduler.stats().generated_tokens - before.generated_tokens == 7
    following = completed(scheduler)
    assert (following.decodes, following.num_decodes, following.chunks) == (None, 7, [])


def test_beside_a_longer_chunk_they_are_chunks() -> None:
    scheduler = decoding(Drafts())
    scheduler.add(Generate(200, array("i", [77] * 300).tobytes(), 9, [], Sampling()), 0.0)
    plan = completed(scheduler)
    assert [chunk.num_tokens for chunk in plan.chunks] == [1, 1, 1, 300]
    assert plan.num_decodes == NUM_STREAMS


def test_with_drafts_they_are_chunks() -> None:
    plan = completed(decoding(Drafts(most=2)))
    assert [chunk.num_tokens for chunk in plan.chunks] == [1, 1, 1]


@pytest.mark.parametrize("case", ["qwen3 gqa 3, tied", "qwen3_next that repeats itself"])
def test_the_text_is_that_of_a_prompt_computed_at_once(case: str, tmp_path: Path) -> None:
    """The prompts have lengths of 1 + a multiple of a page, and of one token."""
    family, overrides = CASES[case]
    make_tiny(tmp_path, family, **overrides)
    engine = WholeEngine(config_of(tmp_path), pages=400, slots=8)
    prompts = [(prompt * 3)[: 4 * n + 1] for n, prompt in enumerate(prompts_of(6))]
    for name, prompt in enumerate(prompts):
        engine.submit(name, prompt, 8)
        engine.run()
    modes = engine.runner.steps_by_mode
    num_mixed = modes["NONE/prefill"] + modes["NONE/mixed"]
    for name, prompt in enumerate(prompts, start=10):
        engine.submit(name, prompt, 8)
    engine.run()
    assert [engine.text[10 + n] for n in range(6)] == [engine.text[n] for n in range(6)]
    if case.startswith("qwen3 "):  # without recurrent states, all pages are reused
        assert [engine.cached[10 + n] for n in range(6)] == [4 * n for n in range(6)]
        assert modes["NONE/prefill"] + modes["NONE/mixed"] == num_mixed == 5
