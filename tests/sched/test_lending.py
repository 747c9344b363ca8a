"""Pages of an ended prefill request stay held until their lease has ended."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import pytest

from nanovllm.kv.keys import PageKeys
from nanovllm.kv.memory import KVMemory
from nanovllm.plan import StepResult
from nanovllm.sched.scheduler import Scheduler
from nanovllm.wire import Finish, FinishReason, Generate, Sampling

TOKENS = array("i", range(10))


class NotedLender:
    def __init__(self, handover: str = "{}") -> None:
        self.handover = handover
        self.lent: list[tuple[str, list[int], bytes, int]] = []

    def lend(
        self, request: str, pages: Sequence[int], text: bytes, num_tokens: int, *, state: int
    ) -> str:
        assert state == -1
        self.lent.append((request, list(pages), text, num_tokens))
        return self.handover


def scheduler_of(lender: NotedLender | None) -> Scheduler:
    memory = KVMemory(4, 4)
    return Scheduler(memory, num_slots=2, step_tokens=32, max_model_tokens=16, lender=lender)


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
    ((request, pages, text, num_tokens),) = lender.lent
    assert (request, num_tokens, text) == ("1", 8, PageKeys(TOKENS, "", 4).full(1))
    pool = scheduler.memory.pool
    assert len(set(pages)) == 2 and pool.held == set(pages)
    other = array("i", range(50, 60)).tobytes()  # needs three pages of two
    spec = Generate(request_id=2, prompt=other, max_new=1, stop_ids=[], sampling=Sampling())
    scheduler.add(spec, 0.0)
    assert scheduler.plan() is None
    scheduler.take_back(pages)
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
