"""Each request gets the same text with any schedule as alone. One test per possible fault.

tests/paper/test_random_batches.py covers combinations.
"""

from __future__ import annotations

from array import array
from itertools import pairwise

import numpy as np
import pytest

from nanovllm.plan import StepResult
from nanovllm.sched.policy import prompt_budget
from nanovllm.wire import Abort, FinishReason, Generate, RefusalKind, Sampling
from tests.paper.engine import PAGE, PaperEngine, generate, pack
from tests.paper.gpu import VOCAB, ids, solo_run


@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize("budget", [5, 20])  # with and without chunking
def test_an_equal_prompt_costs_one_token_or_where_states_recur_its_last_page(
    checkpoints, budget
) -> None:
    engine = PaperEngine(num_pages=16, num_slots=2, budget=budget, checkpoints=checkpoints)
    for request_id in range(3):
        engine.say(generate(request_id, list(range(14)), 3))
        engine.finish_all()
    known = [0, 12, 12] if checkpoints else [0, 13, 13]
    assert engine.cached == dict(enumerate(known))
    stats = engine.scheduler.stats()
    assert (stats.prompt_tokens, stats.cached_tokens) == (42, sum(known))
    as_rows = 0 if checkpoints else 2  # a last token is a decode row
    assert sum(chunks for _, chunks in engine.gpu.fed) == 42 - sum(known) - as_rows


def test_tenants_never_share_pages() -> None:
    engine = PaperEngine(num_pages=16, num_slots=2, budget=20)
    salts = ["", "a", "b", "a", "", "a\x00"]
    for request_id, salt in enumerate(salts):
        request = Generate(request_id, pack([7] * 14), 2, [], Sampling(), 0, salt)
        engine.say(request)
        engine.finish_all()
    assert list(engine.cached.values()) == [0, 0, 0, 13, 13, 0]


@pytest.mark.parametrize("page", [4, 16])
def test_the_prefix_cache_can_be_turned_off(page) -> None:
    engine = PaperEngine(num_pages=16, page=page, num_slots=2, budget=20, prefix=False)
    for request_id in (0, 1):
        engine.say(generate(request_id, list(range(14)), 3))
        engine.finish_all()
    assert engine.cached == {0: 0, 1: 0}


def test_a_long_prompt_never_stalls_running_streams() -> None:
    engine = PaperEngine(num_pages=400, num_slots=4, budget=16)
    engine.say(generate(0, [1, 2, 3], 60))
    for _ in range(4):
        engine.step()
    engine.say(generate(1, [2] * 600, 1))
    before = len(engine.text[0])
    for _ in range(30):
        engine.step()
    assert len(engine.text[0]) == before + 30  # one token per step while 600 prompt tokens are fed
    assert 1 not in engine.finish
    engine.finish_all()
    assert engine.finish[1] == FinishReason.LENGTH


def test_a_step_that_decodes_has_a_budget_of_its_own() -> None:
    engine = PaperEngine(num_pages=400, num_slots=4, budget=64, mixed=24)
    engine.say(generate(0, [1] * 130, 12))
    engine.say(generate(1, [2] * 200, 12))
    engine.finish_all()
    both, one = [(2, 0)] * 5, [(1, 0)] * 6
    assert engine.gpu.fed == [(0, 64)] * 3 + [(1, 23)] * 6 + both + one
    assert [len(engine.text[i]) for i in (0, 1)] == [12, 12]


def test_more_decode_rows_than_the_budget_stop_neither_themselves_nor_prompts() -> None:
    engine = PaperEngine(num_pages=400, num_slots=9, budget=64, mixed=6)
    for i in range(8):
        engine.say(generate(i, [i] * 5, 40))
    for _ in range(3):
        engine.step()
    engine.say(generate(8, [9] * 30, 1))
    before = len(engine.text[0])
    for _ in range(15):
        engine.step()
    assert engine.gpu.fed[-15:] == [(8, 2)] * 15  # a quarter of the budget, rounded up
    assert [len(engine.text[i]) for i in range(8)] == [before + 15] * 8
    engine.step()
    assert engine.finish == {8: FinishReason.LENGTH}


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
        (512, 512, 500, 12),  # the minimum of a quarter does not exceed step_tokens
        (512, 512, 512, 0),
    ],
)
def test_the_prompt_budget_beside_decode_rows(step_tokens, mixed, decoded, prompt) -> None:
    assert prompt_budget(step_tokens, mixed, decoded) == prompt


def test_the_least_urgent_is_preempted() -> None:
    engine = PaperEngine(num_pages=8, num_slots=3, budget=32)
    for i in range(3):
        engine.say(generate(i, [i] * 6, 14))  # five pages each at the end, eight in total
    for _ in range(17):
        engine.step()
    assert engine.text[0] == solo_run([0] * 6, 14, [], recurrent=False)  # one token per step
    assert engine.scheduler.stats().num_preemptions >= 2
    engine.finish_all()
    assert list(engine.finish) == [0, 1, 2]
    stats = engine.scheduler.stats()  # prompt tokens, without those computed again
    assert (stats.prompt_tokens, stats.cached_tokens) == (18, 0)
    assert sum(chunks for _, chunks in engine.gpu.fed) > 18


def test_a_preempted_request_waits_for_its_tokens_in_flight() -> None:
    engine = PaperEngine(num_pages=7, num_slots=3, budget=32, depth=2)
    for i, num_prompt in enumerate([6, 6, 4]):
        engine.say(generate(i, [i] * num_prompt, 10))
    while not engine.scheduler.stats().num_preemptions:
        engine.step()
    engine.say(Abort(1))  # now pages are free, but tokens to recompute are still in flight
    engine.step()
    assert engine.scheduler.stats().num_waiting == 1
    engine.finish_all()
    assert engine.text[2] == solo_run([2] * 4, 10, [], recurrent=False)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("num_new", range(3, 10))
def test_pages_become_free_while_a_preempted_request_has_tokens_in_flight(num_new, depth) -> None:
    engine = PaperEngine(num_pages=9, num_slots=4, budget=32, depth=depth)
    asked = [([0] * 6, 6), ([1] * 6, num_new), ([2] * 4, 10), ([3] * 4, 3)]
    for i, (prompt, max_new) in enumerate(asked):
        engine.say(generate(i, prompt, max_new))
    engine.finish_all()
    for i, (prompt, max_new) in enumerate(asked):
        assert engine.text[i] == solo_run(prompt, max_new, [], recurrent=False)


def test_pages_are_found_only_after_the_plan_that_writes_them() -> None:
    engine = PaperEngine(num_pages=20, num_slots=2, budget=40, min_saved_tokens=1000)
    for i in range(2):
        engine.say(generate(i, [1] * 14, 3))
    engine.finish_all()
    assert engine.cached == {0: 0, 1: 0}  # neither request waited for the other
    assert engine.text[0] == engine.text[1] == solo_run([1] * 14, 3, [], recurrent=False)


def test_a_checkpoint_is_found_only_after_the_plan_that_writes_it() -> None:
    sizes = {"num_pages": 40, "num_slots": 2, "budget": 40, "min_saved_tokens": 1000}
    engine = PaperEngine(checkpoints=1, **sizes)
    for i, token in enumerate([1, 2]):  # the second takes the checkpoint; the first's pages stay
        engine.say(generate(i, [token] * 9, 1))
        engine.finish_all()
    for i in (2, 3):
        engine.say(generate(i, [1] * 9, 3))
    engine.finish_all()
    assert engine.cached == dict.fromkeys(range(4), 0)
    assert engine.text[2] == engine.text[3] == solo_run([1] * 9, 3, [], recurrent=True)


def test_a_token_no_step_has_computed_is_in_no_shared_page() -> None:
    engine = PaperEngine(num_pages=20, num_slots=1, budget=40)
    prompt = [1] * 5
    engine.say(generate(0, prompt, 3))  # its last token fills its second page
    engine.finish_all()
    prompt += [*engine.text[0], 2]
    engine.say(generate(1, prompt, 3))
    engine.finish_all()
    assert engine.cached == {0: 0, 1: 4}
    assert engine.text[1] == solo_run(prompt, 3, [], recurrent=False)


def test_a_refused_admission_leaves_the_pages_it_found() -> None:
    engine = PaperEngine(num_pages=8, num_slots=2, budget=40)
    engine.say(generate(0, [1] * 9, 1))
    engine.finish_all()
    engine.say(generate(1, [2] * 13, 3))  # four pages of eight
    engine.step()
    engine.say(generate(2, [1] * 17, 3))  # needs three in addition to two cached, one in reserve
    engine.step()
    assert engine.scheduler.stats().num_waiting == 1
    engine.finish_all()
    assert engine.cached == {0: 0, 1: 0, 2: 8}
    assert engine.memory.pool.num_free == 8


def test_a_restored_state_is_the_one_saved_behind_the_prefix() -> None:
    engine = PaperEngine(num_pages=40, num_slots=2, budget=40, checkpoints=3)
    for i, token in enumerate([1, 2, 1, 2, 1, 2]):
        engine.say(generate(i, [token] * 9, 5))
        engine.finish_all()
        assert engine.text[i] == solo_run([token] * 9, 5, [], recurrent=True)
    assert engine.cached == {0: 0, 1: 0, 2: 8, 3: 8, 4: 8, 5: 8}


@pytest.mark.parametrize("num_stops", [1, 4, 5, 9])
@pytest.mark.parametrize("nth", range(5))
def test_whichever_of_its_stop_ids_comes_ends_a_request(num_stops, nth) -> None:
    free = solo_run([3] * 6, 12, [], recurrent=False)
    at = next(i for i in range(3, 12) if free[i] not in free[:i])
    others = [(free[at] + i) % VOCAB for i in range(1 + 9 * nth, VOCAB)]
    others = [token for token in others if token not in free][: num_stops - 1]
    engine = PaperEngine(num_pages=20, num_slots=2, budget=40)
    engine.say(generate(0, [3] * 6, 12, [*others, free[at]]))
    engine.finish_all()
    assert engine.text[0] == free[: at + 1]
    assert engine.finish[0] == FinishReason.STOP


def test_rows_change_when_one_goes_as_another_comes() -> None:
    """A request ends by a stop token, so its row still runs in the step in flight."""
    engine = PaperEngine(num_pages=40, num_slots=3, budget=40)
    texts = [solo_run([i] * 6, 12, [], recurrent=False) for i in range(6)]
    for i in range(6):
        engine.say(generate(i, [i] * 6, 12, [texts[i][4 + i]]))
        engine.step()
    engine.finish_all()
    for i in range(6):
        end = texts[i].index(texts[i][4 + i]) + 1
        assert engine.text[i] == texts[i][:end]


@pytest.mark.parametrize("wrong_every", [1, 3, 20])
@pytest.mark.parametrize("drafts", [0, 3])
def test_rows_with_a_grammar_beside_rows_without(drafts, wrong_every) -> None:
    sizes = {"num_pages": 60, "num_slots": 4, "budget": 40}
    engine = PaperEngine(drafts=drafts, wrong_every=wrong_every, **sizes)
    for i in range(6):
        engine.say(generate(i, [i] * 6, 19, grammar="toy" * (i % 2)))
        engine.step()
    engine.finish_all()
    for i in range(6):
        assert engine.text[i] == solo_run([i] * 6, 19, [], recurrent=False, grammar=i % 2 == 1)
    assert (engine.scheduler.stats().accepted_tokens > 20) == (drafts > 0 and wrong_every > 1)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("checkpoints", [None, 0, 3])
@pytest.mark.parametrize("budget", [5, 12, 40])
@pytest.mark.parametrize("drafts", [1, 3])
def test_drafts_never_change_the_text(drafts, budget, checkpoints, depth) -> None:
    sizes = {"num_pages": 24, "num_slots": 3, "budget": budget, "checkpoints": checkpoints}
    engine = PaperEngine(drafts=drafts, depth=depth, **sizes)
    texts = [solo_run([i] * 6, 20, [], recurrent=checkpoints is not None) for i in range(5)]
    for i in range(5):
        engine.say(generate(i, [i] * 6, 20, [texts[i][9 + i]], logprobs=1))
        engine.step()
    engine.finish_all()
    for i in range(5):
        assert engine.text[i] == texts[i][: texts[i].index(texts[i][9 + i]) + 1]
    assert engine.memory.pool.num_free == 24
    assert any(right for _, _, right in engine.gpu.drafted)


def test_right_drafts_make_fewer_steps_and_never_pass_the_limit() -> None:
    """Drafts also request no pages that only a longer text would need."""
    engine = PaperEngine(num_pages=10, num_slots=2, budget=40, drafts=3, wrong_every=1000)
    for i in range(2):
        engine.say(generate(i, [i] * 6, 14))  # five pages each at the end, ten in total
    engine.finish_all()
    assert [engine.text[i] for i in (0, 1)] == [
        solo_run([i] * 6, 14, [], recurrent=False) for i in (0, 1)
    ]
    assert engine.scheduler.stats().num_preemptions == 0
    assert engine.gpu.steps <= 10
    assert max(len(plan.grants) for plan in engine.plans) == 2


def test_drafts_take_no_page_from_others() -> None:
    """A row's own token gets the last free page, not a draft."""
    found = []
    for drafts in (0, 3):
        engine = PaperEngine(num_pages=8, num_slots=3, budget=32, drafts=drafts, wrong_every=1)
        for i in range(3):
            engine.say(generate(i, [i] * 6, 14))
        engine.finish_all()
        assert [engine.text[i] for i in range(3)] == [
            solo_run([i] * 6, 14, [], recurrent=False) for i in range(3)
        ]
        found.append(engine.scheduler.stats().num_preemptions)
    assert 0 < found[1] <= found[0] + 1, found


def test_a_row_feeds_as_many_drafts_as_were_found() -> None:
    """The depth is 0, so the latest number of drafts is available in each step."""
    engine = PaperEngine(num_pages=40, num_slots=4, budget=64, depth=0, drafts=3)
    for i in range(4):
        engine.say(generate(i, [i] * 6, 30))
    engine.finish_all()
    assert all(0 < fed <= found for fed, found, _ in engine.gpu.drafted)
    assert {fed for fed, _, _ in engine.gpu.drafted} == {1, 2, 3}
    assert {len(set(ids(plan.drafts))) for plan in engine.plans} >= {0, 2, 3}  # rows differ


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_drafts_are_counted_by_position(depth) -> None:
    """Only found drafts are counted. A correct filler is a coincidence."""
    engine = PaperEngine(num_pages=40, num_slots=4, budget=64, depth=depth, drafts=3)
    for i in range(4):
        engine.say(generate(i, [i] * 6, 30))
    engine.finish_all()
    stats = engine.scheduler.stats()
    real = [(min(fed, found), right) for fed, found, right in engine.gpu.drafted if found]
    right = [min(fed, right) for fed, right in real]
    assert stats.num_drafts == len(real) > 20
    assert stats.draft_tokens == sum(fed for fed, _ in real)
    assert stats.accepted_tokens == sum(right)
    assert stats.accepted_by_position == [sum(r > nth for r in right) for nth in range(3)]
    assert 0 < stats.accepted_by_position[2] < stats.accepted_by_position[0]


@pytest.mark.parametrize("depth", [0, 1])
def test_drafts_that_fail_are_looked_up_in_few_steps(depth: int) -> None:
    """Drafts are fed only after a step that proposed them, and gain again once they are right."""
    engine = PaperEngine(num_pages=400, num_slots=4, budget=64, depth=depth, drafts=3)
    engine.gpu.wrong_every = 1
    for i in range(4):
        engine.say(generate(i, [i] * 6, 300))
    for _ in range(100):
        engine.step()
    usual = engine.plans[30:]
    assert 4 <= sum(plan.proposes for plan in usual) <= len(usual) // 4
    engine.gpu.wrong_every = 1000
    engine.finish_all()
    assert all(bool(plan.drafts) <= before.proposes for before, plan in pairwise(engine.plans))
    assert len(engine.plans) < 260
    for i in range(4):
        assert engine.text[i] == solo_run([i] * 6, 300, [], recurrent=False)


def test_drafts_leave_prompts_half_of_the_tokens() -> None:
    engine = PaperEngine(num_pages=60, num_slots=4, budget=8, drafts=3, wrong_every=1000)
    for i in range(2):
        engine.say(generate(i, [i] * 2, 40))
    for _ in range(3):
        engine.step()
    engine.say(generate(2, [2] * 40, 1))
    engine.finish_all()
    beside = [(decoded, fed) for decoded, fed in engine.gpu.fed if decoded >= 2 and fed]
    assert all(fed >= 3 for _, fed in beside[:-1])
    assert any(decoded > 2 for decoded, _ in beside)


def test_ageing_lets_a_patient_request_pass_urgent_newcomers() -> None:
    engine = PaperEngine(num_pages=40, num_slots=1, budget=8, ageing=5)
    engine.say(generate(0, [1] * 4, 8))
    engine.step()
    engine.say(generate(1, [1] * 4, 2, priority=1))  # equals 5 steps of waiting
    order: list[int] = []
    for i in range(2, 30):
        engine.say(generate(i, [1] * 4, 2))
        engine.step()
        order += [i for i in engine.finish if i not in order]
    engine.finish_all()
    order += [i for i in engine.finish if i not in order]
    assert 1 < order.index(1) < 8  # after some requests that arrived later, well before the last
    assert sorted(order) == list(range(30))


def test_a_full_queue_refuses() -> None:
    engine = PaperEngine(num_pages=40, num_slots=1, budget=8, max_queue=2)
    for i in range(4):
        engine.say(generate(i, [1, 2, 3], 4))
    assert engine.refused == {2: RefusalKind.QUEUE_FULL, 3: RefusalKind.QUEUE_FULL}
    engine.finish_all()
    assert sorted(engine.finish) == [0, 1]


def test_what_can_never_fit_is_refused_at_once() -> None:
    engine = PaperEngine(num_pages=4, num_slots=1, budget=8)
    engine.say(generate(0, [1] * 10, 7))  # 17 tokens in 16 cells
    engine.say(generate(1, [], 7))
    assert engine.refused == {0: RefusalKind.TOO_LONG, 1: RefusalKind.INVALID}
    assert engine.loop.idle


class CountingTokens(array):
    """A token array that counts tokens copied by slicing."""

    copied = 0

    def __getitem__(self, at):
        got = super().__getitem__(at)
        if isinstance(at, slice):
            CountingTokens.copied += len(got)
        return got


def test_a_decode_step_never_copies_the_context() -> None:
    engine = PaperEngine(num_pages=600, num_slots=1, budget=4000)
    engine.say(generate(0, [1] * 2000, 41))
    engine.step()
    (request,) = engine.scheduler._decoding.rows.requests
    request.tokens = request.keys.tokens = CountingTokens("i", request.tokens)
    engine.finish_all()
    assert CountingTokens.copied <= 41 + PAGE  # each new token is copied once, with its full page
    assert CountingTokens.copied >= 40 - PAGE


def test_a_steady_decode_repeats_its_rows() -> None:
    """Only the first plan of an unchanged batch lists its rows."""
    engine = PaperEngine(num_pages=200, num_slots=8, budget=64)
    for i in range(8):
        engine.say(generate(i, [i] * 5, 30))
    engine.finish_all()
    steady = [plan for plan in engine.plans if plan.num_decodes == 8]
    assert len(steady) == 29
    assert [plan.decodes is None for plan in steady] == [False] + [True] * 28


def test_results_of_the_wrong_shape_are_an_error() -> None:
    engine = PaperEngine(num_pages=20, num_slots=2, budget=64)
    engine.say(generate(0, [1, 2], 3))
    plan = engine.scheduler.plan()
    assert plan is not None
    with pytest.raises(ValueError, match="2 rows of tokens for a step of 1 rows"):
        engine.scheduler.complete(StepResult(plan.step, np.zeros((2, 1), np.int32)))
