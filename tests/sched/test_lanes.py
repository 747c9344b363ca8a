"""Lanes with a simulated GPU each: any schedule gives each request the same text as alone."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import numpy as np
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from nanovllm.config import Parallel
from nanovllm.engine.ranks import num_masks
from nanovllm.look import Step
from nanovllm.plan import LanesPlan, LanesResult, Masks, StepPlan, StepResult
from nanovllm.sched.lanes import Lanes
from nanovllm.wire import FinishReason, RefusalKind
from tests.paper.conversations import by_chance, conversations, held
from tests.paper.engine import PaperEngine, generate
from tests.paper.gpu import PaperHandle, ids

NUM_ENGINES = 8 * settings().max_examples


class LanesHandle:
    """Implementation of engine.executor.StepHandle."""

    gap_s = busy_s = 0.0
    mode = ""

    def __init__(self, plan: LanesPlan, handles: list[PaperHandle | None]) -> None:
        self.plan, self.handles = plan, handles

    def sample(self, masks: Masks) -> None:
        for plan, handle in zip(self.plan.lanes, self.handles, strict=True):
            own, masks = np.split(masks, [num_masks(plan)])
            if plan.masked and handle is not None:
                handle.sample(own)
        assert len(masks) == 0

    def wait(self) -> StepResult:
        nothing = StepResult(0, np.zeros((1, 1), np.int32))
        found = tuple(nothing if one is None else one.wait() for one in self.handles)
        return LanesResult(self.plan.step, nothing.tokens, lanes=found)


class PaperLanes(PaperEngine):
    """Engine with a simulated GPU for each lane. Schedulers of lanes belong to further engines."""

    def __init__(self, num_lanes: int, depth: int = 1, load_weight: float = 4.0, **sizes) -> None:
        super().__init__(depth=depth, **sizes)
        engines = [PaperEngine(depth=depth, **sizes) for _ in range(num_lanes)]
        self.gpus = [engine.gpu for engine in engines]
        self.memories = [engine.memory for engine in engines]
        parallel = Parallel(load_weight=load_weight)
        self.lanes = Lanes([engine.scheduler for engine in engines], parallel)  # type: ignore[misc]
        self.loop = self.loop_of(self.lanes, depth, lambda: float(len(self.plans)))
        self.steps_by_mode = Counter()

    def launch(self, plan: StepPlan) -> LanesHandle:  # type: ignore[override]
        assert isinstance(plan, LanesPlan)
        self.plans.append(plan)
        self.check_alike(plan)
        handles = [self._launch(*one) for one in zip(self.gpus, plan.lanes, strict=True)]
        return LanesHandle(plan, handles)

    def _launch(self, gpu, plan: StepPlan) -> PaperHandle | None:
        """Launch a lane's part of a plan without the padding common to all lanes.

        The GPU of an idle lane forgets its rows.
        """
        if not plan.step:
            gpu.decodes = []
            return None
        chunks = [chunk for chunk in plan.chunks if chunk.slot != self.lanes.padding]
        drafts = plan.drafts if any(ids(plan.drafts)) else b""
        return gpu.launch(replace(plan, chunks=chunks, drafts=drafts))

    def check_alike(self, plan: LanesPlan) -> None:
        fed = [one.num_decoded + one.num_prompt for one in plan.lanes]
        assert all(fed) and {one.lane_tokens for one in plan.lanes} == {max(fed)}
        assert len({bool(one.chunks) for one in plan.lanes}) == 1
        assert len({bool(one.drafts) for one in plan.lanes if one.num_decodes}) <= 1
        assert len({(one.proposes, one.draws_late) for one in plan.lanes}) == 1
        assert max(fed) <= self.budget + 1
        real = [one for one in plan.lanes if one.step]
        assert plan.num_decodes == sum(one.num_decodes for one in real)
        assert len(plan.masked) == sum(len(one.masked) for one in real)

    def step(self) -> None:
        self.loop.step()
        self.lanes.check()


def sizes_of_lanes(rng: Random) -> dict[str, Any]:
    return dict(
        num_lanes=rng.randint(2, 4),
        num_pages=rng.randint(8, 14),
        num_slots=rng.randint(1, 4),
        budget=rng.randint(4, 20),
        mixed=rng.randint(1, 20),
        depth=rng.randint(0, 2),
        drafts=rng.choice([0, 1, 3]),
        draft_lag=rng.choice([None, 0, 1]),
        checkpoints=rng.choice([None, None, 3]),
        load_weight=rng.choice([0.0, 4.0, 100.0]),
    )


def test_lanes_never_change_the_text() -> None:
    by_chance(converse, NUM_ENGINES)


@settings(deadline=None)
@given(st.randoms())
def test_the_smallest_conversation_that_goes_wrong(rng: Random) -> None:
    """Run the same with few engines. Hypothesis reduces a failure to the smallest one."""
    converse(rng)


def converse(rng: Random) -> None:
    turns, sizes = conversations(rng), sizes_of_lanes(rng)
    abort_every, grammar_every = rng.choice([0, 3]), rng.choice([0, 0, 1, 2])
    engine = PaperLanes(**sizes)
    asked = held(
        engine, turns, abort_every=abort_every, grammar_every=grammar_every,
        recurrent=sizes["checkpoints"] is not None,
    )  # fmt: skip
    for request_id, (*_, text) in enumerate(asked):
        got, reason = engine.text.get(request_id, []), engine.finish.get(request_id)
        if reason is None:
            assert got == [] and engine.refused[request_id] == RefusalKind.TOO_LONG
        elif reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert got == text[: len(got)]
        else:
            assert got == text
    assert all(memory.pool.num_free == memory.pool.num_pages for memory in engine.memories)
    assert [gpu.layers.faults for gpu in engine.gpus if gpu.layers and gpu.layers.faults] == []


# -- assignment of requests to lanes --------------------------------------------------------------

ROOM = dict(num_pages=40, num_slots=4, budget=32)


def lane_of(engine: PaperLanes, request_id: int) -> int:
    return next(at for at, lane in enumerate(engine.lanes.lanes) if request_id in lane.queue.by_id)


def test_requests_spread_over_lanes() -> None:
    engine = PaperLanes(4, **ROOM)
    for request_id in range(8):
        engine.say(generate(request_id, [request_id + 1] * 9, 5))
    assert sorted(lane_of(engine, one) for one in range(8)) == [0, 0, 1, 1, 2, 2, 3, 3]
    engine.step()
    stats = engine.lanes.stats()
    assert (stats.num_running, stats.num_steps, stats.step_tokens) == (8, 1, 8 * 9)
    engine.finish_all()
    assert engine.lanes.stats().generated_tokens == 8 * 5


def test_a_request_goes_where_its_prefix_is_unless_that_is_far_busier() -> None:
    engine = PaperLanes(2, load_weight=4.0, **ROOM)
    prompt = list(range(16))
    engine.say(generate(0, prompt, 2))
    here = lane_of(engine, 0)
    engine.finish_all()
    for request_id in (1, 2, 3):  # 12 tokens are cached, which outweighs three requests
        engine.say(generate(request_id, [*prompt, request_id], 9))
    assert [lane_of(engine, one) for one in (1, 2, 3)] == [here] * 3
    engine.say(generate(4, [*prompt, 4], 9))
    engine.say(generate(5, [*prompt, 5], 9))
    assert lane_of(engine, 5) == 1 - here
    engine.finish_all()
    assert engine.cached[1] == 16


def test_a_prefix_with_a_state_is_found_where_it_is() -> None:
    engine = PaperLanes(3, checkpoints=8, **ROOM)
    prompt = list(range(13))
    engine.say(generate(0, prompt, 2))
    engine.finish_all()
    for request_id in (1, 2, 3):
        engine.say(generate(request_id, [*prompt, 7], 2))
        engine.finish_all()
    assert [engine.cached[one] for one in (0, 1, 2)] == [0, 12, 12]


def test_the_queue_is_one_limit_of_all_lanes() -> None:
    engine = PaperLanes(2, num_pages=40, num_slots=1, budget=32, max_queue=3)
    for request_id in range(8):
        engine.say(generate(request_id, [request_id] * 5, 2))
    assert list(engine.refused.values()) == [RefusalKind.QUEUE_FULL] * 5
    assert engine.lanes.snapshot().num_waiting == 3
    engine.finish_all()
    assert sorted(engine.finish) == [0, 1, 2]


def test_a_prompt_beside_what_others_decode_is_cut() -> None:
    """Otherwise a full step of a lane without decode rows would delay all lanes."""
    engine = PaperLanes(2, num_pages=60, num_slots=4, budget=32, mixed=6)
    engine.say(generate(0, [1] * 5, 20))
    engine.step()
    engine.say(generate(1, [2] * 60, 1))
    assert lane_of(engine, 1) == 1 - lane_of(engine, 0)
    for _ in range(8):
        engine.step()
    assert len(engine.text[0]) >= 7
    assert max(one.num_prompt for plan in engine.plans[2:] for one in plan.lanes) == 6  # type: ignore[attr-defined]
    engine.finish_all()


def test_whoever_looks_sees_slots_of_all_lanes() -> None:
    engine = PaperLanes(2, **ROOM)
    for request_id in range(3):
        engine.say(generate(request_id, [request_id + 1] * 9, 3 + request_id))
    engine.finish_all()
    found = engine.loop.recent.since(0)
    assert [step.step for step in found.steps] == list(range(1, 1 + len(engine.plans)))
    fed: dict[int, int] = Counter()
    for step in found.steps:
        owners = np.frombuffer(step.slots, np.int64).tolist()
        assert len(owners) == 8
        for slot, count in step.chunks:
            fed[owners[slot]] += count
        fed += Counter(owners[slot] for slot in ids(step.decodes))
    assert fed == {0: 9 + 2, 1: 9 + 3, 2: 9 + 4}
    admitted = [one.request for step in found.steps for one in step.admitted]
    assert sorted(admitted) == [0, 1, 2] and isinstance(found.steps[0], Step)
    assert found.steps[-1].free == 80


def test_steps_that_are_complete_leave_no_time_to_be_measured() -> None:
    """Otherwise the memory of a server with lanes and drafts grows with each step."""
    engine = PaperLanes(2, drafts=3, **ROOM)
    for request_id in range(3):
        engine.say(generate(request_id, [request_id + 1] * 9, 20))
    engine.step()
    prices = [lane.queue.decoding.drafting.prices for lane in engine.lanes.lanes]
    assert [len(each._planned) for each in prices] == [1, 1]
    engine.finish_all()
    assert [len(each._planned) for each in prices] == [0, 0]
    assert [each.plain_s(1) for each in prices] == [None, None]
