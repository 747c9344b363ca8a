"""Any schedule must give every request the text it would get alone."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from nanovllm.engine.loop import EngineLoop
from nanovllm.kv.memory import KVMemory
from nanovllm.kv.pages import PagePool
from nanovllm.plan import StepResult
from nanovllm.sched.policy import prompt_budget
from nanovllm.sched.scheduler import Scheduler
from nanovllm.wire import Abort, FinishReason, Generate, RefusalKind, Sampling, StepOutput
from tests.paper_gpu import VOCAB, PaperGPU, PaperMasker, ids, solo_run

PAGE = 4
NUM_ENGINES = 200 * settings().max_examples  # 20,000; --hypothesis-profile=quick: 1,000
# Few stems and few token values, so that requests often share pages.
stems = st.sampled_from([[1] * 5, [2] * 8, [1, 1, 2, 1, 1, 2, 1, 1]])
tails = st.lists(st.integers(0, 2), min_size=1, max_size=7)


def pack(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


def generate(
    request_id: int,
    prompt: list[int],
    max_new: int,
    stops: Sequence[int] = (),
    priority: int = 0,
    grammar: str = "",
) -> Generate:
    return Generate(
        request_id, pack(prompt), max_new, list(stops), Sampling(), priority, "", grammar
    )


@st.composite
def conversations(draw) -> list[tuple[list[int], int, list[int], int | None, int, int]]:
    """(prompt tail, max_new, stop ids, request continued, steps until the next, priority)."""
    turns = []
    for i in range(draw(st.integers(1, 12))):
        continues = draw(st.none() | st.integers(0, i - 1)) if i else None
        prompt = draw(tails) if continues is not None else draw(stems) + draw(tails)
        stops = draw(st.lists(st.integers(0, VOCAB - 1), max_size=6))
        pause, priority = draw(st.integers(0, 6)), draw(st.integers(-1, 1))
        turns.append((prompt, draw(st.integers(1, 9)), stops, continues, pause, priority))
    return turns


class Harness:
    def __init__(
        self,
        *,
        num_pages: int,
        num_slots: int,
        budget: int,
        mixed: int = 1000,
        depth: int = 1,
        checkpoints: int = 0,
        drafts: int = 0,
        prefix: bool = True,
        max_queue: int = 1000,
        ageing: int = 3,
    ) -> None:
        self.budget, self.mixed = budget, mixed
        self.memory = KVMemory(num_pages, PAGE, checkpoints, prefix=prefix)
        self.scheduler = Scheduler(
            self.memory,
            num_slots=num_slots,
            step_tokens=budget,
            mixed_step_tokens=mixed,
            max_model_tokens=4096,
            num_drafts=drafts,
            max_queue=max_queue,
            ageing_steps=ageing,
        )
        self.gpu = PaperGPU(num_slots, num_pages, PAGE, checkpoints)
        self.loop = EngineLoop(self.scheduler, self.gpu, self.collect, PaperMasker(), depth)
        self.text: dict[int, list[int]] = {}
        self.finish: dict[int, FinishReason] = {}
        self.stop_id: dict[int, int] = {}
        self.refused: dict[int, RefusalKind] = {}
        self.cached: dict[int, int] = {}

    def collect(self, out: StepOutput) -> None:
        for started in out.started:
            assert started.request_id not in self.cached, "started twice"
            self.cached[started.request_id] = started.num_cached
        tokens = ids(out.tokens)
        names = np.frombuffer(out.ids, np.int64).tolist()
        counts = ids(out.counts) if out.counts else [1] * len(names)
        assert sum(counts) == len(tokens)
        for name, count in zip(names, counts, strict=True):
            assert name not in self.finish, "spoke after it finished"
            self.text.setdefault(name, []).extend(tokens[:count])
            del tokens[:count]
        for done in out.finished:
            assert done.request_id not in self.finish, "finished twice"
            self.finish[done.request_id] = done.reason
            self.stop_id[done.request_id] = done.stop_id
        for refusal in out.refused:
            self.refused[refusal.request_id] = refusal.kind

    def say(self, message: Generate | Abort) -> None:
        self.loop.handle(message)
        self.loop.tell()

    def step(self) -> None:
        self.loop.step()
        self.scheduler.check()
        for decoded, fed in self.gpu.fed[-1:]:
            assert decoded + fed <= self.budget
            assert not decoded or fed <= max(self.mixed - decoded, -(-self.mixed // 4))

    def finish_all(self, most_steps: int = 4000) -> None:
        for _ in range(most_steps):
            if self.loop.idle:
                return
            self.step()
        raise AssertionError("the engine is stuck")


@settings(max_examples=NUM_ENGINES, deadline=None)
@given(
    turns=conversations(),
    num_pages=st.integers(8, 14),
    num_slots=st.integers(1, 5),
    budget=st.integers(1, 20),
    mixed=st.integers(1, 20),
    depth=st.integers(0, 2),
    drafts=st.sampled_from([0, 1, 3]),
    checkpoints=st.sampled_from([0, 1, 3]),
    abort_every=st.sampled_from([0, 3]),
    prefix=st.sampled_from([True, True, False]),
    grammar_every=st.sampled_from([0, 0, 1, 2, 3]),
)
def test_batching_never_changes_the_text(
    turns,
    num_pages,
    num_slots,
    budget,
    mixed,
    depth,
    drafts,
    checkpoints,
    abort_every,
    prefix,
    grammar_every,
) -> None:
    harness = Harness(
        num_pages=num_pages,
        num_slots=num_slots,
        budget=budget,
        mixed=mixed,
        depth=depth,
        checkpoints=checkpoints,
        drafts=drafts,
        prefix=prefix,
    )
    expected: dict[int, list[int]] = {}
    prompts: list[list[int]] = []
    for request_id, (tail, max_new, stop_ids, continues, pause, priority) in enumerate(turns):
        earlier = prompts[continues] + expected[continues] if continues is not None else []
        prompts.append(earlier + tail)
        prompt, grammar = prompts[-1], grammar_every > 0 and request_id % grammar_every == 0
        expected[request_id] = solo_run(
            prompt, max_new, stop_ids, recurrent=checkpoints > 0, grammar=grammar
        )
        asked = generate(request_id, prompt, max_new, stop_ids, priority, "toy" * grammar)
        harness.say(asked)
        for _ in range(pause):
            harness.step()
        if abort_every and request_id % abort_every == 2:
            harness.say(Abort(request_id - 1))
    harness.finish_all()
    for request_id, text in expected.items():
        got = harness.text.get(request_id, [])
        max_new, stop_ids = turns[request_id][1:3]
        if not harness.memory.fits(len(prompts[request_id]) + max_new + drafts):
            assert got == [] and harness.refused[request_id] == RefusalKind.TOO_LONG
        elif harness.finish[request_id] == FinishReason.ABORT:
            assert abort_every and request_id % abort_every == 1
            assert got == text[: len(got)]  # cut short, never wrong
        else:
            assert got == text
            by_stop = text[-1] in stop_ids
            reason = FinishReason.STOP if by_stop else FinishReason.LENGTH
            assert harness.finish[request_id] == reason
            assert harness.stop_id[request_id] == (text[-1] if by_stop else -1)
    assert harness.memory.pool.num_free == num_pages, "a finished request still holds pages"


@pytest.mark.parametrize("checkpoints", [0, 2])
@pytest.mark.parametrize("budget", [5, 20])  # with and without chunking
def test_an_equal_prompt_costs_at_most_one_page(checkpoints, budget) -> None:
    harness = Harness(num_pages=16, num_slots=2, budget=budget, checkpoints=checkpoints)
    for request_id in (0, 1):
        harness.say(generate(request_id, list(range(14)), 3))
        harness.finish_all()
    assert harness.cached == {0: 0, 1: 12}
    assert harness.scheduler.stats().cached_tokens == 12


def test_tenants_never_share_pages() -> None:
    harness = Harness(num_pages=16, num_slots=2, budget=20)
    salts = ["", "a", "b", "a", "", "a\x00"]
    for request_id, salt in enumerate(salts):
        request = Generate(request_id, pack([7] * 14), 2, [], Sampling(), 0, salt)
        harness.say(request)
        harness.finish_all()
    assert list(harness.cached.values()) == [0, 0, 0, 12, 12, 0]


def test_the_prefix_cache_can_be_turned_off() -> None:
    harness = Harness(num_pages=16, num_slots=2, budget=20, prefix=False)
    for request_id in (0, 1):
        harness.say(generate(request_id, list(range(14)), 3))
        harness.finish_all()
    assert harness.cached == {0: 0, 1: 0}


def test_a_long_prompt_never_stalls_running_streams() -> None:
    harness = Harness(num_pages=400, num_slots=4, budget=16)
    harness.say(generate(0, [1, 2, 3], 60))
    for _ in range(4):
        harness.step()
    harness.say(generate(1, [2] * 600, 1))
    before = len(harness.text[0])
    for _ in range(30):
        harness.step()
    assert len(harness.text[0]) == before + 30  # a token every step while 600 tokens are fed
    assert 1 not in harness.finish
    harness.finish_all()
    assert harness.finish[1] == FinishReason.LENGTH


def test_a_step_that_decodes_has_a_budget_of_its_own() -> None:
    harness = Harness(num_pages=400, num_slots=4, budget=64, mixed=24)
    harness.say(generate(0, [1] * 130, 12))
    harness.say(generate(1, [2] * 200, 12))
    harness.finish_all()
    both, one = [(2, 0)] * 5, [(1, 0)] * 6
    assert harness.gpu.fed == [(0, 64)] * 3 + [(1, 23)] * 6 + both + one
    assert [len(harness.text[i]) for i in (0, 1)] == [12, 12]


def test_more_decode_rows_than_the_budget_stop_neither_themselves_nor_prompts() -> None:
    harness = Harness(num_pages=400, num_slots=9, budget=64, mixed=6)
    for i in range(8):
        harness.say(generate(i, [i] * 5, 40))
    for _ in range(3):
        harness.step()
    harness.say(generate(8, [9] * 30, 1))
    before = len(harness.text[0])
    for _ in range(15):
        harness.step()
    assert harness.gpu.fed[-15:] == [(8, 2)] * 15  # a quarter of the budget, rounded up
    assert [len(harness.text[i]) for i in range(8)] == [before + 15] * 8
    harness.step()
    assert harness.finish == {8: FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("step_tokens", "mixed", "decoded", "prompt"),
    [
        (8192, 4096, 1, 4095),
        (8192, 4096, 512, 3584),
        (8192, 512, 384, 128),
        (8192, 512, 385, 128),
        (8192, 512, 512, 128),
        (8192, 1, 512, 1),
        (8192, 8192, 512, 7680),
        (512, 512, 500, 12),  # never beyond step_tokens, not even for the quarter
        (512, 512, 512, 0),
    ],
)
def test_the_prompt_budget_beside_decode_rows(step_tokens, mixed, decoded, prompt) -> None:
    assert prompt_budget(step_tokens, mixed, decoded) == prompt


def test_the_least_urgent_is_preempted() -> None:
    harness = Harness(num_pages=8, num_slots=3, budget=32)
    for i in range(3):
        harness.say(generate(i, [i] * 6, 14))  # five pages each in the end, eight in all
    for _ in range(17):
        harness.step()
    assert harness.text[0] == solo_run([0] * 6, 14, [], recurrent=False)  # a token every step
    assert harness.scheduler.stats().num_preemptions >= 2
    harness.finish_all()
    assert list(harness.finish) == [0, 1, 2]


def test_a_preempted_request_waits_for_its_tokens_in_flight() -> None:
    harness = Harness(num_pages=7, num_slots=3, budget=32, depth=2)
    for i, num_prompt in enumerate([6, 6, 4]):
        harness.say(generate(i, [i] * num_prompt, 10))
    while not harness.scheduler.stats().num_preemptions:
        harness.step()
    harness.say(Abort(1))  # now there are pages, but not yet all the tokens to recompute
    harness.step()
    assert harness.scheduler.stats().num_waiting == 1
    harness.finish_all()
    assert harness.text[2] == solo_run([2] * 4, 10, [], recurrent=False)


def test_pages_are_found_only_after_the_plan_that_writes_them() -> None:
    harness = Harness(num_pages=20, num_slots=2, budget=40)
    for i in range(2):
        harness.say(generate(i, [1] * 14, 3))
    harness.finish_all()
    assert harness.cached == {0: 0, 1: 0}
    assert harness.text[0] == harness.text[1] == solo_run([1] * 14, 3, [], recurrent=False)


def test_a_checkpoint_is_found_only_after_the_plan_that_writes_it() -> None:
    harness = Harness(num_pages=40, num_slots=2, budget=40, checkpoints=1)
    for i, token in enumerate([1, 2]):  # the second takes the checkpoint, the first's pages stay
        harness.say(generate(i, [token] * 9, 1))
        harness.finish_all()
    for i in (2, 3):
        harness.say(generate(i, [1] * 9, 3))
    harness.finish_all()
    assert harness.cached == dict.fromkeys(range(4), 0)
    assert harness.text[2] == harness.text[3] == solo_run([1] * 9, 3, [], recurrent=True)


def test_a_token_no_step_has_computed_is_in_no_shared_page() -> None:
    harness = Harness(num_pages=20, num_slots=1, budget=40)
    prompt = [1] * 5
    harness.say(generate(0, prompt, 3))  # its last token fills its second page
    harness.finish_all()
    prompt += [*harness.text[0], 2]
    harness.say(generate(1, prompt, 3))
    harness.finish_all()
    assert harness.cached == {0: 0, 1: 4}
    assert harness.text[1] == solo_run(prompt, 3, [], recurrent=False)


def test_a_refused_admission_leaves_the_pages_it_found() -> None:
    harness = Harness(num_pages=8, num_slots=2, budget=40)
    harness.say(generate(0, [1] * 9, 1))
    harness.finish_all()
    harness.say(generate(1, [2] * 13, 3))  # four pages of eight
    harness.step()
    harness.say(generate(2, [1] * 17, 3))  # two are known, three more are wanted and one beside
    harness.step()
    assert harness.scheduler.stats().num_waiting == 1
    harness.finish_all()
    assert harness.cached == {0: 0, 1: 0, 2: 8}
    assert harness.memory.pool.num_free == 8


def test_a_restored_state_is_the_one_saved_behind_the_prefix() -> None:
    harness = Harness(num_pages=40, num_slots=2, budget=40, checkpoints=3)
    for i, token in enumerate([1, 2, 1, 2]):
        harness.say(generate(i, [token] * 9, 5))
        harness.finish_all()
        assert harness.text[i] == solo_run([token] * 9, 5, [], recurrent=True)
    assert harness.cached == {0: 0, 1: 0, 2: 8, 3: 8}


@pytest.mark.parametrize("num_stops", [1, 4, 5, 9])
@pytest.mark.parametrize("nth", range(5))
def test_whichever_of_its_stop_ids_comes_ends_a_request(num_stops, nth) -> None:
    free = solo_run([3] * 6, 12, [], recurrent=False)
    at = next(i for i in range(3, 12) if free[i] not in free[:i])
    others = [(free[at] + i) % VOCAB for i in range(1 + 9 * nth, VOCAB)]
    others = [token for token in others if token not in free][: num_stops - 1]
    harness = Harness(num_pages=20, num_slots=2, budget=40)
    harness.say(generate(0, [3] * 6, 12, [*others, free[at]]))
    harness.finish_all()
    assert harness.text[0] == free[: at + 1]
    assert (harness.finish[0], harness.stop_id[0]) == (FinishReason.STOP, free[at])


def test_rows_change_when_one_goes_as_another_comes() -> None:
    """One ends by a stop token, so its row still runs in the step that is on its way."""
    harness = Harness(num_pages=40, num_slots=3, budget=40)
    texts = [solo_run([i] * 6, 12, [], recurrent=False) for i in range(6)]
    for i in range(6):
        harness.say(generate(i, [i] * 6, 12, [texts[i][4 + i]]))
        harness.step()
    harness.finish_all()
    for i in range(6):
        end = texts[i].index(texts[i][4 + i]) + 1
        assert harness.text[i] == texts[i][:end]


@pytest.mark.parametrize("drafts", [0, 3])
def test_rows_with_a_grammar_beside_rows_without(drafts) -> None:
    harness = Harness(num_pages=60, num_slots=4, budget=40, drafts=drafts)
    for i in range(6):
        harness.say(generate(i, [i] * 6, 9, grammar="toy" * (i % 2)))
        harness.step()
    harness.finish_all()
    for i in range(6):
        assert harness.text[i] == solo_run([i] * 6, 9, [], recurrent=False, grammar=i % 2 == 1)


@pytest.mark.parametrize("checkpoints", [0, 3])
@pytest.mark.parametrize("budget", [5, 12, 40])
@pytest.mark.parametrize("drafts", [1, 3])
def test_drafts_never_change_the_text(drafts, budget, checkpoints) -> None:
    harness = Harness(
        num_pages=24, num_slots=3, budget=budget, drafts=drafts, checkpoints=checkpoints
    )
    texts = [solo_run([i] * 6, 20, [], recurrent=checkpoints > 0) for i in range(5)]
    for i in range(5):
        harness.say(generate(i, [i] * 6, 20, [texts[i][9 + i]]))
        harness.step()
    harness.finish_all()
    for i in range(5):
        assert harness.text[i] == texts[i][: texts[i].index(texts[i][9 + i]) + 1]
    assert harness.memory.pool.num_free == 24


def test_ageing_lets_a_patient_request_pass_urgent_newcomers() -> None:
    harness = Harness(num_pages=40, num_slots=1, budget=8, ageing=5)
    harness.say(generate(0, [1] * 4, 8))
    harness.step()
    harness.say(generate(1, [1] * 4, 2, priority=1))  # worth 5 steps of waiting
    order: list[int] = []
    for i in range(2, 30):
        harness.say(generate(i, [1] * 4, 2))
        harness.step()
        order += [i for i in harness.finish if i not in order]
    harness.finish_all()
    order += [i for i in harness.finish if i not in order]
    assert 1 < order.index(1) < 8  # later than some that came after it, far earlier than the last
    assert sorted(order) == list(range(30))


def test_a_full_queue_refuses() -> None:
    harness = Harness(num_pages=40, num_slots=1, budget=8, max_queue=2)
    for i in range(4):
        harness.say(generate(i, [1, 2, 3], 4))
    assert harness.refused == {2: RefusalKind.QUEUE_FULL, 3: RefusalKind.QUEUE_FULL}
    harness.finish_all()
    assert sorted(harness.finish) == [0, 1]


def test_what_can_never_fit_is_refused_at_once() -> None:
    harness = Harness(num_pages=4, num_slots=1, budget=8)
    harness.say(generate(0, [1] * 10, 7))  # 17 tokens, 16 places
    harness.say(generate(1, [], 7))
    assert harness.refused == {0: RefusalKind.TOO_LONG, 1: RefusalKind.INVALID}
    assert harness.loop.idle


class CountingTokens(array):
    """A token array that counts how many tokens are copied out of it by slicing."""

    copied = 0

    def __getitem__(self, at):
        got = super().__getitem__(at)
        if isinstance(at, slice):
            CountingTokens.copied += len(got)
        return got


def test_a_decode_step_never_copies_the_context() -> None:
    harness = Harness(num_pages=600, num_slots=1, budget=4000)
    harness.say(generate(0, [1] * 2000, 41))
    harness.step()
    (request,) = harness.scheduler._decoding.requests
    request.tokens = CountingTokens("i", request.tokens)
    harness.finish_all()
    assert CountingTokens.copied <= 41 + PAGE  # each new token once, when its page fills up
    assert CountingTokens.copied >= 40 - PAGE


def test_a_steady_decode_repeats_its_rows() -> None:
    """Only the first plan of an unchanged batch names its rows."""
    harness = Harness(num_pages=200, num_slots=8, budget=64)
    plans = []
    launch = harness.gpu.launch
    harness.gpu.launch = lambda plan: (plans.append(plan), launch(plan))[1]
    for i in range(8):
        harness.say(generate(i, [i] * 5, 30))
    harness.finish_all()
    steady = [plan for plan in plans if plan.num_decodes == 8]
    assert len(steady) == 29
    assert [plan.decodes is None for plan in steady] == [False] + [True] * 28


def test_results_of_the_wrong_shape_are_an_error() -> None:
    harness = Harness(num_pages=20, num_slots=2, budget=64)
    harness.say(generate(0, [1, 2], 3))
    plan = harness.scheduler.plan()
    assert plan is not None
    with pytest.raises(ValueError, match="2 lines for a step of 1 rows"):
        harness.scheduler.complete(StepResult(plan.step, np.zeros((2, 1), np.int32)))


@given(st.lists(st.sampled_from(["take", "hold", "drop"]), max_size=60), st.data())
def test_every_page_is_in_exactly_one_place(actions, data) -> None:
    forgotten: list[int] = []
    pool = PagePool(6, forgotten.append)
    held: list[int] = []
    for action in actions:
        if action == "take":
            held += pool.take(data.draw(st.integers(0, 3))) or []
        elif held:
            page = data.draw(st.sampled_from(held))
            if action == "hold":
                pool.hold(page)
                held.append(page)
            else:
                pool.drop(page, keep=data.draw(st.booleans()))
                held.remove(page)
        pool.check()
        assert pool.num_free == 6 - len(set(held))
        assert 0 not in held
