"""Pages and recurrent states together: where states are saved, found, lost and left alone."""

from __future__ import annotations

import pytest

from nanovllm.wire import FinishReason
from tests.paper.engine import PaperEngine, generate
from tests.paper.gpu import solo_run

ERROR, LENGTH = FinishReason.ERROR, FinishReason.LENGTH
STEM = [i * i % 47 for i in range(24)]


def text(prompt: list[int], max_new: int) -> list[int]:
    return solo_run(prompt, max_new, [], recurrent=True)


def ask(engine: PaperEngine, request_id: int, prompt: list[int], max_new: int = 5) -> int:
    """Runs a request by itself. Returns how many of its tokens were cached."""
    engine.say(generate(request_id, prompt, max_new))
    engine.finish_all()
    if engine.finish[request_id] == LENGTH:
        assert engine.text[request_id] == text(prompt, max_new)
    return engine.cached[request_id]


@pytest.mark.parametrize("checkpoints", [0, 1])
def test_pages_are_never_reused_without_a_state(checkpoints) -> None:
    """Also a model without room for any state has recurrent layers."""
    engine = PaperEngine(num_pages=60, num_slots=2, budget=64, checkpoints=checkpoints)
    assert [ask(engine, i, STEM[:14]) for i in range(4)] == [
        0,
        0,
        *([12, 12] if checkpoints else [0, 0]),
    ]


def test_a_fork_is_found_from_the_index_and_known_from_the_third_request_on() -> None:
    engine = PaperEngine(num_pages=90, num_slots=2, budget=64, checkpoints=4)
    assert [ask(engine, i, [*STEM, 40 + i, i, i]) for i in range(4)] == [0, 0, 24, 24]


def test_a_state_saved_by_a_corrupted_request_is_lost_where_others_named_the_pages() -> None:
    engine = PaperEngine(num_pages=90, num_slots=2, budget=64, checkpoints=4)
    ask(engine, 0, [*STEM, 1, 1])
    engine.gpu.glitches = frozenset([engine.gpu.steps + 1])  # the step that saves the fork's state
    ask(engine, 1, [*STEM, 2, 2])
    assert engine.finish[1] == ERROR
    assert [ask(engine, i, [*STEM, i, i]) for i in (2, 3)] == [0, 24]
    assert (engine.finish[2], engine.finish[3]) == (LENGTH, LENGTH)
