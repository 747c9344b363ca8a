"""Order of admission: waiting for shared prompts and for pages, overtaking and priorities."""

from __future__ import annotations

import pytest

import nanovllm.kv.keys
from nanovllm.sched.policy import worth_waiting
from nanovllm.wire import Abort, FinishReason
from tests.paper.engine import PaperEngine, generate
from tests.paper.gpu import solo_run

PROMPT = [i * i % 47 for i in range(100)]


def fed(engine: PaperEngine) -> int:
    """Return the number of prompt tokens computed so far in chunks."""
    return sum(chunks for _, chunks in engine.gpu.fed)


def decoded(engine: PaperEngine) -> int:
    """Return the number of tokens of decode rows so far."""
    return sum(rows for rows, _ in engine.gpu.fed)


def waiting(engine: PaperEngine) -> tuple[int, int]:
    """Return how many requests wait for pages or slots, and how many for a shared prompt."""
    stats = engine.scheduler.stats()
    assert sum(stats.waiting_by_reason.values()) == stats.num_waiting
    return stats.waiting_by_reason["capacity"], stats.waiting_by_reason["shared_prompt"]


@pytest.mark.parametrize("num_slots", [8, 3])
@pytest.mark.parametrize("page", [1, 4, 16, 25, 33, 99, 100, 128])
def test_eight_choices_of_a_prompt_compute_it_once(page, num_slots) -> None:
    engine = PaperEngine(page=page, num_pages=2000, num_slots=num_slots, budget=512)
    for i in range(8):
        engine.say(generate(i, PROMPT, 5 + i))
    engine.step()
    assert waiting(engine) == (8 - num_slots, num_slots - 1)
    engine.finish_all()
    assert fed(engine) == 100
    assert decoded(engine) == 7 + sum(range(4, 12))  # the last token of 7 prompts is a row
    assert engine.cached == {0: 0} | dict.fromkeys(range(1, 8), 99)
    for i in range(8):
        assert engine.text[i] == solo_run(PROMPT, 5 + i, [], recurrent=False)
    stats = engine.scheduler.stats()
    assert (stats.prompt_tokens, stats.cached_tokens) == (800, 693)
    assert engine.memory.pool.num_free == 2000


def test_pages_of_choices_are_stored_once() -> None:
    engine = PaperEngine(page=16, num_pages=40, num_slots=8, budget=512)
    for i in range(8):
        engine.say(generate(i, PROMPT, 5))
    engine.step()
    engine.step()
    assert engine.memory.pool.num_free == 40 - 6 - 8  # six full pages, and a last page for each


def cached(engine: PaperEngine, name: int, prompt: list[int]) -> int:
    """Return the number of cached tokens of a prompt that runs alone."""
    engine.say(generate(name, prompt, 1))
    engine.finish_all()
    assert engine.text[name] == solo_run(prompt, 1, [], recurrent=False)
    return engine.cached[name]


def test_a_last_page_is_found_behind_its_own_pages_alone() -> None:
    engine = PaperEngine(page=4, num_pages=40, num_slots=1, budget=64)
    prompts = [[1, 1, 1, 1, 9, 9], [2, 2, 2, 2, 5, 5], [2, 2, 2, 2, 9, 9], [1, 1, 1, 1, 9, 9]]
    assert [cached(engine, *each) for each in enumerate(prompts)] == [0, 0, 4, 5]


@pytest.mark.parametrize(("num_pages", "known"), [(5, 13), (4, 12)])
def test_a_page_too_few_is_no_page_to_copy(num_pages, known) -> None:
    engine = PaperEngine(page=4, num_pages=num_pages, num_slots=1, budget=64)
    assert [cached(engine, name, PROMPT[:14]) for name in range(2)] == [0, known]
    assert engine.memory.pool.num_free == num_pages


def test_only_equal_salts_wait_for_each_other() -> None:
    engine = PaperEngine(num_pages=200, num_slots=8, budget=512)
    for i in range(6):
        engine.say(generate(i, PROMPT, 3, salt="ab"[i % 2]))
    engine.step()
    assert waiting(engine) == (0, 4)
    engine.finish_all()
    assert fed(engine) == 2 * 100
    assert decoded(engine) == 4 + 6 * 2  # the last token of 4 prompts is a row


def test_without_the_prefix_cache_nobody_waits_and_nothing_is_shared() -> None:
    engine = PaperEngine(num_pages=400, num_slots=8, budget=1000, prefix=False)
    for i in range(8):
        engine.say(generate(i, PROMPT, 3))
    engine.step()
    assert waiting(engine) == (0, 0)
    engine.finish_all()
    assert fed(engine) == 800


def test_of_recurrent_states_only_those_saved_are_shared() -> None:
    engine = PaperEngine(num_pages=60, num_slots=4, budget=60, checkpoints=4)
    for i in range(4):
        engine.say(generate(i, PROMPT[:15], 4))
    engine.finish_all()
    assert engine.cached == {0: 0, 1: 12, 2: 12, 3: 12}
    assert engine.text[3] == solo_run(PROMPT[:15], 4, [], recurrent=True)
    for i, tail in enumerate(([1], [2]), 4):  # a state is saved at their fork
        engine.say(generate(i, PROMPT[20:40] + tail * 5, 4))
    engine.step()
    assert waiting(engine) == (0, 1)
    engine.finish_all()
    assert engine.cached[5] == 20
    for i in (4, 5):
        assert engine.text[i] == solo_run(PROMPT[20:40] + [i - 3] * 5, 4, [], recurrent=True)


def test_a_long_prefix_is_waited_for_and_a_short_one_is_not() -> None:
    engine = PaperEngine(num_pages=200, num_slots=8, budget=512, depth=0)
    engine.say(generate(0, PROMPT + [1] * 20, 3))
    engine.say(generate(1, PROMPT + [2] * 20, 3))
    engine.say(generate(2, PROMPT[:40] + [3] * 60, 3))  # would compute most of it itself
    engine.step()
    assert list(engine.cached) == [0, 2]
    engine.step()
    assert engine.cached == {0: 0, 2: 0, 1: 100}
    engine.finish_all()
    assert fed(engine) == 120 + 100 + 20
    assert engine.text[1] == solo_run(PROMPT + [2] * 20, 3, [], recurrent=False)


@pytest.mark.parametrize(
    ("spared", "left", "worth"), [(31, 32, False), (32, 64, True), (32, 65, False), (99, 100, True)]
)
def test_what_is_worth_waiting_for(spared, left, worth) -> None:
    assert worth_waiting(spared, left, 32) is worth


def test_who_waits_for_a_prompt_holds_up_no_other_and_keeps_its_place() -> None:
    engine = PaperEngine(num_pages=200, num_slots=3, budget=512, depth=0)
    for i, prompt in enumerate((PROMPT, PROMPT, [1] * 9, [2] * 9)):
        engine.say(generate(i, prompt, 30))
    engine.step()
    assert sorted(engine.cached) == [0, 2]  # the third slot is reserved for the waiting request
    engine.step()
    assert sorted(engine.cached) == [0, 1, 2]
    engine.finish_all()


def test_what_is_kept_for_those_that_wait_are_pages_too() -> None:
    engine = PaperEngine(num_pages=40, num_slots=8, budget=512, depth=0)
    engine.say(generate(0, PROMPT, 5))  # 25 pages of 40
    engine.say(generate(1, PROMPT + [1] * 29, 5))  # 8 more
    engine.say(generate(2, [2] * 30, 5))  # 8 pages
    engine.step()
    assert sorted(engine.cached) == [0]
    engine.step()
    assert sorted(engine.cached) == [0, 1]
    engine.finish_all()


def test_who_waits_goes_on_alone_when_the_other_leaves() -> None:
    engine = PaperEngine(num_pages=200, num_slots=4, budget=30)
    for i in range(2):
        engine.say(generate(i, PROMPT, 3))
    engine.step()
    engine.step()
    engine.say(Abort(0))
    engine.finish_all(most_steps=12)
    assert engine.finish == {0: FinishReason.ABORT, 1: FinishReason.LENGTH}
    assert engine.text[1] == solo_run(PROMPT, 3, [], recurrent=False)
    assert fed(engine) == 100  # 60 of them by the aborted request, 56 of these in full pages


def test_a_copy_does_not_ask_for_more_pages_than_there_are() -> None:
    engine = PaperEngine(num_pages=2, num_slots=2, budget=20)
    for i in range(2):
        engine.say(generate(i, [1] * 6, 2))
        engine.finish_all()
    assert engine.cached == {0: 0, 1: 4}
    assert engine.text[1] == solo_run([1] * 6, 2, [], recurrent=False)


def test_a_page_that_was_only_copied_from_is_free_in_the_next_step() -> None:
    engine = PaperEngine(num_pages=6, num_slots=2, budget=30, depth=0)
    for i, prompt in enumerate(([1] * 6, [2] * 5)):
        engine.say(generate(i, prompt, 1))
        engine.finish_all()
    engine.say(generate(2, [1] * 6, 8))  # two pages, and the source of a copy
    engine.say(generate(3, [2] * 10, 2))  # three pages, one of them cached, and one in reserve
    engine.step()
    assert waiting(engine) == (1, 0)
    engine.step()
    assert waiting(engine) == (0, 0)
    engine.finish_all()


def test_a_page_is_copied_as_its_owner_left_it() -> None:
    """The owner has written more tokens after the prompt; only the prompt's tokens match."""
    engine = PaperEngine(num_pages=20, num_slots=2, budget=20)
    engine.say(generate(0, [1] * 5, 3))
    engine.finish_all()
    engine.say(generate(1, [1] * 5, 9))
    engine.say(generate(2, [1] * 6, 9))
    engine.finish_all()
    assert engine.cached == {0: 0, 1: 4, 2: 4}
    engine.say(generate(3, [1] * 6, 9))
    engine.finish_all()
    assert engine.cached[3] == 5
    for i, num_prompt in ((1, 5), (2, 6), (3, 6)):
        assert engine.text[i] == solo_run([1] * num_prompt, 9, [], recurrent=False)


def test_a_last_page_is_known_by_all_that_comes_before_it() -> None:
    engine = PaperEngine(num_pages=20, num_slots=2, budget=20)
    for i, prompt in enumerate(([1] * 4 + [3, 3], [2] * 4 + [5, 5], [2] * 4 + [3, 3])):
        engine.say(generate(i, prompt, 5))
        engine.finish_all()
        assert engine.text[i] == solo_run(prompt, 5, [], recurrent=False)
    assert engine.cached == {0: 0, 1: 0, 2: 4}


def test_keys_of_pages_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bytes] = []
    chain = nanovllm.kv.keys.chain
    counting = lambda parent, tokens: (calls.append(parent), chain(parent, tokens))[1]  # noqa: E731
    monkeypatch.setattr(nanovllm.kv.keys, "chain", counting)
    engine = PaperEngine(num_pages=46, num_slots=4, budget=512)
    engine.say(generate(0, PROMPT[:80], 60))
    engine.step()
    calls.clear()
    engine.say(generate(1, PROMPT[:80] + [1] * 100, 4))  # 45 pages, 20 of them cached
    for _ in range(40):
        engine.step()
        assert waiting(engine) == (1, 0)
    assert 20 <= len(calls) <= 21 + 10  # plus pages that the other request filled
    calls.clear()
    engine.finish_all()
    assert 24 <= len(calls) <= 24 + 8


def test_a_preempted_request_finds_the_pages_it_had() -> None:
    engine = PaperEngine(num_pages=8, num_slots=3, budget=32)
    for i in range(3):
        engine.say(generate(i, [i] * 6, 14))
    engine.finish_all()
    num_preemptions = engine.scheduler.stats().num_preemptions
    assert num_preemptions >= 2
    assert fed(engine) <= 18 + num_preemptions * 20
    for i in range(3):
        assert engine.text[i] == solo_run([i] * 6, 14, [], recurrent=False)


def test_a_long_prompt_without_pages_holds_up_no_small_ones() -> None:
    engine = PaperEngine(num_pages=60, num_slots=16, budget=64)
    engine.say(generate(0, [1] * 60, 20))
    engine.step()
    engine.say(generate(1, [2] * 180, 4))  # 45 pages
    for i in range(2, 14):
        engine.say(generate(i, [i] * 5, 3))
    for _ in range(12):
        engine.step()
    assert set(range(2, 14)) <= set(engine.finish)
    assert 1 not in engine.cached
    engine.finish_all()
    assert engine.text[1] == solo_run([2] * 180, 4, [], recurrent=False)


@pytest.mark.parametrize("overtake", [0, 5, 30])
def test_a_long_prompt_is_overtaken_in_so_many_steps_and_no_more(overtake) -> None:
    engine = PaperEngine(num_pages=60, num_slots=16, budget=64, overtake=overtake, depth=0)
    engine.say(generate(100, [1] * 29, 10))
    engine.step()
    engine.say(generate(0, [2] * 210, 4))
    num_steps = 0
    while 0 not in engine.cached:
        num_steps += 1
        engine.say(generate(num_steps, [3 + num_steps % 40] * 9, 4))  # short prompts without end
        engine.step()
        assert num_steps < overtake + 12
    early = [i for i in engine.cached if 0 < i < 100]
    assert early == list(range(1, overtake + 1))
    engine.finish_all()


def test_waiting_alone_does_not_count_as_being_overtaken() -> None:
    engine = PaperEngine(num_pages=60, num_slots=16, budget=64, overtake=5)
    engine.say(generate(0, [1] * 60, 30))
    engine.step()
    engine.say(generate(1, [2] * 180, 4))
    engine.say(generate(2, [3] * 180, 4))
    for _ in range(15):
        engine.step()
    engine.say(generate(3, [4] * 5, 3))
    engine.finish_all()
    assert list(engine.finish) == [3, 0, 1, 2]


def test_no_flood_of_the_most_urgent_starves_anybody_longer_than_stated() -> None:
    """With raise_priority the minimum is -100, which is worth 100 times ageing_s."""
    engine = PaperEngine(num_pages=40, num_slots=2, budget=16, ageing=0.25)
    engine.say(generate(1000, [1] * 4, 9))
    engine.say(generate(1001, [1] * 4, 9))
    engine.step()
    engine.say(generate(0, [1] * 4, 2))
    came = {0: engine.now()}
    for i in range(1, 120):
        engine.say(generate(i, [1] * 4, 2, priority=-100))
        came[i] = engine.now()
        if i % 3 == 0:
            engine.step()
    engine.finish_all()
    before = list(engine.cached)[2 : list(engine.cached).index(0)]
    assert len(before) > 50  # the urgent requests were preferred
    assert max(came[i] for i in before) <= came[0] + 100 * 0.25


def test_the_longest_context_is_that_of_the_rows_there_are() -> None:
    engine = PaperEngine(num_pages=60, num_slots=4, budget=200)
    engine.say(generate(0, PROMPT, 4))
    engine.say(generate(1, [1] * 5, 12))
    engine.finish_all()
    lengths = [plan.max_length for plan in engine.plans]
    assert lengths == [100, 101, 102, 103, *range(9, 17)]


def test_steps_are_counted_by_their_tokens() -> None:
    engine = PaperEngine(num_pages=60, num_slots=4, budget=200)
    engine.say(generate(0, PROMPT, 4))
    engine.say(generate(1, [1] * 9, 4))
    engine.finish_all()
    stats = engine.scheduler.stats()
    assert stats.step_tokens == 109 + 3 * 2
    assert stats.steps_by_tokens == [0, 3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]  # up to 8, up to 128
