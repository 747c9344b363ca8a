"""Number of drafts per row and the resulting speed, simulated on a device with given costs."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest

from nanovllm.kv.memory import KVMemory
from nanovllm.plan import StepPlan, StepResult
from nanovllm.sched.drafting import (
    LONGEST,
    MOST_SKIPPED,
    PROBE_DRAFTS,
    PROBE_EVERY,
    Drafting,
    cost,
    worthwhile,
)
from nanovllm.sched.prices import (
    MEASURE_EVERY,
    MEASURE_FIRST,
    DraftPrices,
    row_class,
    size_class,
)
from nanovllm.sched.scheduler import Scheduler
from nanovllm.speculate import Drafts
from nanovllm.wire import Generate, Sampling

D = 3


class Device:
    """Device that accepts drafts with each request's unconditional rates by position.

    A step in which all rows feed D drafts takes `dear` times as long as one without drafts. A step
    with fewer drafts takes between `least` and `dear` times as long. `found` is the number of
    drafts found for a row.
    """

    def __init__(
        self, accept: Sequence[Sequence[float]], dear: float, least: float, found: int | None = D
    ) -> None:
        self.accept = accept  # by request, cyclic
        self.dear = dear
        self.least = least
        self.found = found
        self.random = np.random.default_rng(0)
        self.cost = 0.0
        self.fed: list[int] = []  # drafts of each step
        self.looked_up: list[bool] = []  # of each step: whether it proposes and reports drafts

    def run(self, plan: StepPlan, requests: list[int]) -> StepResult:
        num_rows = len(requests)
        drafts = np.zeros(num_rows, np.int32)
        drafts[: plan.num_decodes] = np.frombuffer(plan.drafts, np.int32) if plan.drafts else 0
        self.fed.append(int(drafts.sum()))
        self.looked_up.append(plan.proposes)
        share = self.fed[-1] / (D * num_rows)
        self.cost += self.least + share * (self.dear - self.least) if share else 1.0
        rates = np.array([self.accept[i % len(self.accept)] for i in requests]).reshape(-1, D)
        drawn = self.random.random((num_rows, 1))
        places = np.arange(D)
        right = (drawn < rates) & (places < drafts[:, None])
        lines = np.full((num_rows, 1 + D), 7, np.int32)
        lines[:, 1:][~right] = -1
        told = np.full((num_rows, 1 + D), 5, np.int32)
        told[:, 0] = self.found or 0
        has_drafts = self.found is not None and plan.proposes
        return StepResult(plan.step, lines, drafts=told if has_drafts else None)


def simulate(
    accept: Sequence[Sequence[float]],
    dear: float,
    *,
    num_rows: int,
    num_requests: int,
    num_new: int = 256,
    least: float = 0.0,
    num_drafts: int = D,
    found: int = D,
    is_measured: bool = True,
) -> tuple[float, Scheduler, Device]:
    """Run requests, `num_rows` at a time. Return tokens per unit of cost.

    Their lengths differ, so that they begin and end at different times.
    """
    scheduler = Scheduler(
        KVMemory(4096, 64),
        num_slots=num_rows,
        step_tokens=8192,
        max_model_tokens=1 << 16,
        drafts=Drafts(most=num_drafts),
    )
    device = Device(accept, dear, least or dear, found if num_drafts else None)
    for i in range(num_requests):
        prompt, new = array("i", [i]).tobytes(), num_new // 2 + i * 37 % num_new
        scheduler.add(Generate(i, prompt, new, [], Sampling()), float(i))
    flying: deque[tuple[StepResult, float]] = deque()
    while scheduler.has_work or flying:
        if (plan := scheduler.plan()) is not None:
            rows = scheduler._decoding._flights[plan.step].rows
            before = device.cost
            result = device.run(plan, rows.ids.tolist())
            flying.append((result, (device.cost - before) * (is_measured and not plan.chunks)))
        # The next step is planned before the result of this one.
        while len(flying) > (plan is not None):
            result, period_s = flying.popleft()
            scheduler.complete(result)
            scheduler.measure(result.step, period_s)
    return scheduler.stats().generated_tokens / device.cost, scheduler, device


ROWS = {1: 8, 64: 160, 256: 500}  # values are numbers of requests
DEAR = {1: 1.2, 64: 1.5, 256: 2.6}  # relative cost of a step with D drafts for each row


def gain(
    rows: int,
    *accept: Sequence[float],
    least: float,
    num_new: int = 256,
    dear: float = 0.0,
    is_measured: bool = True,
) -> float:
    """Return the tokens per unit of time with drafts, relative to those without."""
    dear = dear or DEAR[rows]
    sizes = {"num_rows": rows, "num_requests": ROWS[rows], "num_new": num_new}
    plain, _, device = simulate(accept, dear, least=least, num_drafts=0, **sizes)
    assert not any(device.fed)
    found = simulate(accept, dear, least=least, is_measured=is_measured, **sizes)[0]
    return found / plain


@pytest.mark.parametrize("num_new", [64, 256])
@pytest.mark.parametrize(("rows", "most"), [(1, 0.03), (64, 0.05)])
def test_drafts_that_are_never_accepted_cost_little(rows, most, num_new) -> None:
    """The cost of a step with any draft is that of a step with all."""
    assert 1 / gain(rows, (0, 0, 0), least=DEAR[rows], num_new=num_new) - 1 <= most


@pytest.mark.parametrize("accept", [(0.9, 0.85, 0.8), (0.8, 0.6, 0.45), (0.6, 0.35, 0.2)])
@pytest.mark.parametrize("rows", ROWS)
def test_drafts_that_are_accepted_bring_what_they_can(rows, accept) -> None:
    costs = [1.1 + (DEAR[rows] - 1.1) * most / D for most in (1, 2, 3)]
    # The best constant number of drafts.
    best = max((1 + sum(accept[: i + 1])) / costs[i] for i in range(D))
    assert gain(rows, accept, least=1.1) >= 0.9 * max(best, 1.0)


def test_rows_whose_drafts_fail_do_not_drag_down_the_others() -> None:
    """Requests with rejected drafts take longer, so most rows of a step are theirs."""
    good, bad = (0.95, 0.9, 0.85), (0, 0, 0)
    assert gain(64, good, bad, least=1.1) > 1.1


def test_a_few_rows_among_many_do_not_make_all_steps_longer() -> None:
    _, scheduler, device = simulate(
        [(0.9, 0.8, 0.7)] + [(0, 0, 0)] * 63, 1.5, num_rows=64, num_requests=64
    )
    drafting = device.fed[40:200]
    assert sum(fed > 0 for fed in drafting) <= 2 + len(drafting) // PROBE_EVERY
    assert scheduler.stats().accepted_tokens > 5


def test_where_nothing_is_found_nothing_is_fed() -> None:
    device = simulate([(0.9, 0.8, 0.7)], 1.2, num_rows=4, num_requests=4, found=0)[2]
    assert sum(fed > 0 for fed in device.fed) <= 2  # before the first report


def test_a_row_falls_within_a_few_steps_and_rises_with_a_probe() -> None:
    drafting = Drafting(4, Drafts(most=D))
    slot, most = np.array([2]), np.array([9], np.int32)
    drafting.begin(2)
    drafting.report(slot, np.array([[D, 5, 5, 5]], np.int32))

    def step(number: int, right: int) -> int:
        drafts = drafting.choose(number, slot, most, 100)
        drafting.compared(slot, drafts, np.minimum(drafts, right))
        return int(drafts[0])

    falling = [step(number, right=0) for number in range(1, 16)]
    assert falling[0] == D and sorted(falling, reverse=True) == falling
    assert falling[11:] == [0] * 4
    assert [step(number, right=0) for number in range(16, 33)] == [2, *[0] * 15, 2]
    assert [step(number, right=0) for number in range(33, 64)] == [0] * 31  # twice as rarely
    assert [step(number, right=9) for number in range(64, 68)] == [2, 2, 2, 3]


def test_drafts_in_excess_of_the_tokens_left_are_the_last_rows() -> None:
    drafting = Drafting(8, Drafts(most=D))
    slots, most = np.arange(8), np.array([9, 9, 1, 0, 9, 9, 9, 9], np.int32)
    for slot in range(8):
        drafting.begin(slot)
    assert drafting.choose(1, slots, most, 100).tolist() == [3, 3, 1, 0, 3, 3, 3, 3]
    assert drafting.choose(1, slots, most, 9).tolist() == [3, 3, 1, 0, 2, 0, 0, 0]
    assert drafting.choose(1, slots, most, 0).tolist() == [0] * 8


def test_what_a_draft_costs_rises_with_the_tokens() -> None:
    costs = [round(cost(num_tokens), 2) for num_tokens in (2, 128, 256, 512, 999)]
    assert costs == [0.1, 0.2, 0.3, 0.5, 0.5]
    rates = np.array([0.0, 0.09, 0.3, 0.51, 0.9, 1.0], np.float32)
    assert worthwhile(rates[:1], 9).tolist() == [0]
    assert worthwhile(rates, 9).tolist() == [0, 0, 1, 3, 9, 9]
    assert worthwhile(rates.repeat(50), 9)[::50].tolist() == [0, 0, 0, 1, 6, 9]
    # 64 rows, whose drafts are accepted at 0.65, 0.40 and 0.20: the third one costs more.
    assert worthwhile(np.full(64, 0.61, np.float32), 3).tolist() == [2] * 64


@pytest.mark.parametrize("rows", [1, 64])
def test_where_any_drafts_double_a_step_they_are_given_up(rows: int) -> None:
    """Steps of 2 ms are such: the host and the wider kernels cost as much as the model.

    The fixed estimate expects a gain from these rates of acceptance.
    """
    accept, dear = (0.6, 0.35, 0.2), 2.3
    guessed = gain(rows, accept, least=dear, dear=dear, is_measured=False)
    assert guessed < 0.9
    assert gain(rows, accept, least=dear, dear=dear) > 0.96


def test_where_drafts_are_cheaper_than_estimated_more_of_them_are_fed() -> None:
    accept, cheap = (0.6, 0.35, 0.2), 1.05
    guessed = gain(256, accept, least=cheap, dear=1.1, is_measured=False)
    assert gain(256, accept, least=cheap, dear=1.1) > guessed + 0.02 > 1.25
    accept, cheap = (0.55, 0.3, 0.15), 1.02
    guessed = gain(256, accept, least=cheap, dear=1.1, is_measured=False)
    assert gain(256, accept, least=cheap, dear=1.1) > guessed + 0.05 > 1.15


def test_a_price_is_a_ratio_of_medians_of_one_class_of_rows() -> None:
    prices = DraftPrices()
    for step, (num_rows, num_drafts, period_s) in enumerate(
        [(64, 0, 0.002), (60, 0, 0.002), (64, 0, 0.9), (64, 60, 0.003), (64, 0, 0.002),
         (40, 64, 0.004), (64, 64, 0.9), (64, 64, 0.003), (64, 64, 0.0), (64, 100, 0.003)]
    ):  # fmt: skip
        prices.plan(step, num_rows, num_drafts)
        prices.measure(step, period_s)
        assert (prices.ratio(64, 64) is None) == (step < 7)
    prices.plan(10, 64, 127)
    prices.measure(9, 5.0)  # a step that was not planned to be measured
    prices.measure(10, 0.005)
    # Of 64 to 127 drafts: 0.004, 0.9, 0.003, 0.003 and 0.005 s. The unmeasured step has no part.
    assert prices.ratio(64, 64) == prices.ratio(127, 5) == pytest.approx(2.0)
    assert prices.ratio(8, 64) is None and prices.ratio(1, 1) is None


def test_steps_without_drafts_are_measured_now_and_then() -> None:
    prices, fed = DraftPrices(), []
    for step in range(1, 2 * MEASURE_EVERY):
        fed.append(not prices.is_due(step, 4))
        prices.plan(step, 4, 12 * fed[-1])
        prices.measure(step, 0.01)
    plain = [step for step, is_fed in enumerate(fed, 1) if not is_fed]
    first, each = MEASURE_FIRST, MEASURE_EVERY
    assert plain == [first, 2 * first, 3 * first, 3 * first + each]


@pytest.mark.parametrize(("num_pages", "fed"), [(3, 1), (4, 2)])
def test_drafts_without_a_page_are_not_in_the_price(num_pages: int, fed: int) -> None:
    """Otherwise steps with few drafts would be measured as those with many, which then seem cheap.

    Pages hold two tokens. Both rows have a page, and need another one for a draft.
    """
    scheduler = Scheduler(
        KVMemory(num_pages, 2),
        num_slots=2,
        step_tokens=64,
        max_model_tokens=64,
        drafts=Drafts(most=2),
    )
    for i in range(2):
        scheduler.add(Generate(i, array("i", [i]).tobytes(), 3, [], Sampling()), float(i))
    prices = scheduler._drafting.prices
    scheduler.plan()
    plan = scheduler.plan()
    assert plan is not None and sum(np.frombuffer(plan.drafts, np.int32)) == fed
    assert prices._planned[2] == (row_class(2), size_class(fed))


def test_without_measured_drafts_no_step_is_measured_without_them() -> None:
    prices = DraftPrices()
    for step in range(1, 600):
        prices.plan(step, 4, 12)
        prices.measure(step, 0.0)  # a simulated device has no clock
        assert not prices.is_due(step + 1, 4)


@pytest.mark.parametrize(("plain_s", "rest"), [(0.01, 16), (0.0008, 32), (0.0003, 64)])
def test_drafts_that_are_too_dear_are_asked_about_again_after_a_rest(plain_s, rest) -> None:
    """All slots have drafts. A rest ends before a step with a probe."""
    drafting, slots = Drafting(8, Drafts(most=D)), np.arange(8)
    for slot in slots.tolist():
        drafting.begin(slot)
    for step in range(6):  # a step with drafts takes five times as long
        drafting.prices.plan(step, 8, 24 * (step % 2))
        drafting.prices.measure(step, (plain_s, 5 * plain_s)[step % 2])
    every = drafting._probe_every(8)
    assert every == 400 > LONGEST * MOST_SKIPPED >= rest
    most = np.full(8, D, np.int32)
    for step, skips_until in ((7, 7 + rest), (every - 3, every)):
        drafting.prices.plan(step - 1, num_rows=8, num_drafts=0)  # none is due for measurement
        assert not drafting.skips(step) and not drafting.choose(step, slots, most, 100).any()
        at = range(step + 1, step + rest + 2)
        assert [drafting.skips(one) for one in at] == [one < skips_until for one in at]
    assert drafting.choose(every, slots, most, 100).tolist() == [PROBE_DRAFTS] * 8
    assert not drafting.skips(every + 1)


@pytest.mark.parametrize(("plain_s", "rest"), [(0.01, 8), (0.0008, 16), (0.0003, 32)])
def test_a_rest_without_found_drafts_has_more_steps_if_they_are_short(plain_s, rest) -> None:
    drafting, slots = Drafting(64, Drafts(most=D)), np.arange(64)
    for step in range(3):
        drafting.prices.plan(step, 64, 0)
        drafting.prices.measure(step, plain_s)
    assert not drafting.choose(5, slots, np.full(64, D, np.int32), 999).any()
    assert [drafting.skips(5 + nth) for nth in (1, rest - 1, rest)] == [True, True, False]


@pytest.mark.parametrize("rows", [1, 8, 64, 256])
def test_drafts_that_do_not_pay_are_looked_up_in_few_steps(rows: int) -> None:
    """All rows have found drafts, none of which is right. A look-up is read in two of 16 steps."""
    device = simulate([(0, 0, 0)], DEAR[64], num_rows=rows, num_requests=rows, num_new=600)[2]
    later = device.looked_up[40:-4]
    assert 0.125 < sum(later) / len(later) < 0.16
    assert 2 < sum(fed > 0 for fed in device.fed[40:]) <= 5  # probes


@pytest.mark.parametrize(("rows", "share"), [(8, 1.0), (64, 2 / 8), (256, 2 / 16)])
def test_where_many_rows_find_nothing_few_steps_look_up(rows: int, share: float) -> None:
    sizes = {"num_rows": rows, "num_requests": rows, "num_new": 600}
    device = simulate([(0, 0, 0)], DEAR[64], found=0, **sizes)[2]
    later = device.looked_up[40:300]  # all requests run
    assert sum(later) / len(later) == pytest.approx(share, abs=0.01)
    assert not any(device.fed[40:])


@pytest.mark.parametrize(("rows", "most"), [(1, 2), (8, 2), (64, 9), (256, 17)])
def test_after_a_rest_drafts_are_fed_again(rows: int, most: int) -> None:
    """From the first step that could find drafts, the next one to feed some is near.

    It is nearer where rows are few, since a rest without drafts is then short.
    """
    waited = [waited_steps(rows, begins) for begins in range(40, 80)]
    assert min(waited) == 2 and max(waited) == most


def waited_steps(rows: int, begins: int) -> int:
    """Return the steps until drafts are fed, which can be found from step `begins` on."""
    drafting, slots, most = Drafting(rows, Drafts(most=D)), np.arange(rows), np.full(rows, D)
    for slot in slots.tolist():
        drafting.begin(slot)
    drafting.report(slots, np.zeros((rows, 1 + D), np.int32))
    before = False  # whether the step before proposes drafts
    for step in range(1, begins + 40):
        if not drafting.skips(step) and drafting.choose(step, slots, most, 999).any():
            return step - begins
        proposes = drafting.plan_proposals(step, slots, num_fed=0)
        if before:  # its result arrives after the plan of this step
            drafting.report(slots, np.full((rows, 1 + D), D * (step > begins), np.int32))
        before = proposes
    raise AssertionError("no step has fed drafts")
