"""Pages of an ended prefill request stay held until their lease has ended."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from nanovllm.kv.keys import PageKeys
from nanovllm.kv.memory import KVMemory
from nanovllm.plan import CORRUPTED, Lent, StepResult
from nanovllm.sched.scheduler import Scheduler
from nanovllm.wire import Finish, FinishReason, Generate, Sampling, StepOutput

TOKENS = array("i", range(10))


class NotedLender:
    """Notes all calls. `ended` is what `revoke` returns: None once D has ended the lease."""

    def __init__(self, handover: str = "{}", num_ranks: int = 1) -> None:
        self.handover = handover
        self.num_ranks = num_ranks
        self.lent: list[tuple[str, Lent, int]] = []
        self.ready: list[int | None] = []
        self.calls: list[str] = []
        self.ended: Lent | None = None

    def lend(self, request: str, lent: Lent, num_tokens: int, num_ready: int | None = None) -> str:
        assert lent.state == -1
        self.lent.append((request, lent, num_tokens))
        self.ready.append(num_ready)
        if self.handover:
            self.ended = lent
        return self.handover

    def advance(self, request: str, num_ready: int, *, is_last: bool = False) -> None:
        self.ready.append(num_ready)
        self.calls += ["last"] if is_last else []

    def revoke(self, request: str) -> Lent | None:
        self.calls.append("revoke")
        return self.ended


def scheduler_of(lender: NotedLender | None, step_tokens: int = 32) -> Scheduler:
    memory = KVMemory(4, 4)
    return Scheduler(
        memory, num_slots=2, step_tokens=step_tokens, max_model_tokens=16, lender=lender
    )


def ended(scheduler: Scheduler, num_tokens: int = 10, *, lends: bool = True) -> Finish:
    """Run a request that generates one token."""
    prompt = TOKENS[:num_tokens].tobytes()
    spec = Generate(
        request_id=1, prompt=prompt, max_new=1, stop_ids=[], sampling=Sampling(), lends=lends
    )
    scheduler.add(spec, 0.0)
    plan = scheduler.plan()
    assert plan is not None and len(plan.chunks) == 1
    output = scheduler.complete(StepResult(plan.step, np.array([[5]], np.int32)))
    scheduler.check()
    (finish,) = output.finished
    return finish


def test_pages_are_held_until_they_are_taken_back() -> None:
    lender = NotedLender()
    scheduler = scheduler_of(lender)
    assert ended(scheduler) == Finish(1, FinishReason.LENGTH, "{}")
    ((request, lent, num_tokens),) = lender.lent
    assert (request, num_tokens, lent.key) == ("1", 8, PageKeys(TOKENS, "", 4).full(1))
    assert lender.ready == [None] and not lender.calls
    pool = scheduler.memory.pool
    assert len(set(lent.pages)) == 2 and pool.held == set(lent.pages)
    other = array("i", range(50, 60)).tobytes()  # needs three pages of two
    spec = Generate(request_id=2, prompt=other, max_new=1, stop_ids=[], sampling=Sampling())
    scheduler.add(spec, 0.0)
    assert scheduler.plan() is None
    scheduler.take_back(lent.pages)
    scheduler.check()
    assert pool.num_free == 4 and scheduler.plan() is not None


@pytest.mark.parametrize(
    ("num_tokens", "lends", "handover"), [(10, False, "{}"), (4, True, "{}"), (10, True, "")]
)
def test_no_lease(num_tokens: int, lends: bool, handover: str) -> None:
    """A plain request, a prompt of one page, whose last token D computes, and a full lender."""
    scheduler = scheduler_of(NotedLender(handover))
    assert ended(scheduler, num_tokens, lends=lends).handover == ""
    assert not scheduler.memory.pool.held


def test_an_aborted_request_lends_nothing() -> None:
    lender = NotedLender()
    scheduler = scheduler_of(lender)
    prompt = TOKENS.tobytes()
    scheduler.add(
        Generate(
            request_id=1, prompt=prompt, max_new=1, stop_ids=[], sampling=Sampling(), lends=True
        ),
        0.0,
    )
    plan = scheduler.plan()
    assert plan is not None
    scheduler.abort(1)
    output = scheduler.complete(StepResult(plan.step, np.array([[5]], np.int32)))
    assert output.finished == [Finish(1, FinishReason.ABORT)] and not lender.lent
    assert not scheduler.memory.pool.held


# -- prompts of several chunks ------------------------------------------------------------------


def begun(lender: NotedLender) -> Scheduler:
    """Return a scheduler of chunks of 4 tokens with a prompt of 10, and no step yet."""
    scheduler = scheduler_of(lender, step_tokens=4)
    scheduler.add(
        Generate(
            request_id=1,
            prompt=TOKENS.tobytes(),
            max_new=1,
            stop_ids=[],
            sampling=Sampling(),
            lends=True,
        ),
        0.0,
    )
    return scheduler


def stepped(scheduler: Scheduler) -> StepOutput:
    plan = scheduler.plan()
    assert plan is not None
    samples = sum(chunk.samples for chunk in plan.chunks)
    output = scheduler.complete(StepResult(plan.step, np.full((samples, 1), 5, np.int32)))
    scheduler.check()
    return output


@pytest.mark.parametrize(
    ("num_ranks", "ready"), [(1, [[1], [1, 2], [1, 2, 2]]), (4, [[], [1], [1, 2]])]
)
def test_pages_are_lent_as_they_are_computed(num_ranks: int, ready: list[list[int]]) -> None:
    """With several ranks, a step shows only that the one before it is complete on all of them."""
    lender = NotedLender(num_ranks=num_ranks)
    scheduler = begun(lender)
    outputs = []
    for expected in ready:
        outputs.append(stepped(scheduler))
        assert lender.ready == expected
    answers = [output.finished for output in outputs]
    answer = [Finish(1, FinishReason.LENGTH, "{}")]
    assert answers == [answer if at == (num_ranks > 1) else [] for at in range(3)]
    assert [output.tokens for output in outputs] == [b""] * 3  # the answer was sent before
    ((request, lent, num_tokens),) = lender.lent
    assert (request, num_tokens, lent.key) == ("1", 8, PageKeys(TOKENS, "", 4).full(1))
    assert lender.calls == ["last"] and scheduler.memory.pool.held == set(lent.pages)
    assert not scheduler.request_ids()
    scheduler.take_back(lent.pages, request_id=1)
    assert scheduler.memory.pool.num_free == 4


def test_a_prompt_that_is_not_wanted_any_more_is_aborted() -> None:
    lender = NotedLender()
    scheduler = begun(lender)
    stepped(scheduler)
    ((_, lent, _),) = lender.lent
    lender.ended = None
    scheduler.take_back(lent.pages, request_id=1)
    scheduler.check()
    assert lender.calls == ["revoke"] and not scheduler.request_ids()
    assert scheduler.memory.pool.num_free == 4 and scheduler.output().finished == []


@pytest.mark.parametrize("way", ["abort", "preempt"])
def test_a_lease_is_revoked_if_its_prompt_cannot_be_completed(way: str) -> None:
    lender = NotedLender()
    scheduler = begun(lender)
    stepped(scheduler)
    if way == "abort":
        scheduler.abort(1)
    else:
        scheduler.queue.preempt(scheduler.queue.by_id[1])
    scheduler.check()
    assert lender.calls == ["revoke"] and not scheduler.request_ids()
    assert scheduler.memory.pool.num_free == 4 and scheduler.output().finished == []
    assert scheduler.plan() is None


def test_a_corrupted_prompt_is_not_lent_to_its_end() -> None:
    lender = NotedLender()
    scheduler = begun(lender)
    stepped(scheduler)
    stepped(scheduler)
    plan = scheduler.plan()
    assert plan is not None
    output = scheduler.complete(StepResult(plan.step, np.array([[CORRUPTED]], np.int32)))
    scheduler.check()
    assert lender.calls == ["revoke"] and lender.ready == [1, 2]
    assert output.finished == [] and scheduler.memory.pool.num_free == 4


def test_a_full_lender_is_asked_again() -> None:
    lender = NotedLender("")
    scheduler = begun(lender)
    assert stepped(scheduler).finished == stepped(scheduler).finished == []
    lender.handover = "{}"
    assert stepped(scheduler).finished == [Finish(1, FinishReason.LENGTH, "{}")]
    assert lender.ready == [1, 2, None] and not lender.calls


def test_chunks_of_a_preempted_request_are_forgotten() -> None:
    """Its pages were released. It computes its prompt again, and lends other pages."""
    lender = NotedLender()
    scheduler = begun(lender)
    plan = scheduler.plan()
    assert plan is not None
    scheduler.queue.preempt(scheduler.queue.by_id[1])
    scheduler.complete(StepResult(plan.step, np.zeros((0, 1), np.int32)))
    assert not lender.lent
    stepped(scheduler)
    assert lender.ready[0] is not None
