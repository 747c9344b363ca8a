"""A request whose grammar fails ends with an error, and other requests continue."""

from __future__ import annotations

import pytest

from nanovllm.wire import FinishReason, StepOutput
from tests.paper.engine import PaperEngine, generate
from tests.paper.gpu import PaperMasker, solo_run

FAILED, LENGTH = FinishReason.FAILED, FinishReason.LENGTH


class Failing(PaperMasker):
    """Masker that fails request `bad` after `after` tokens."""

    def __init__(self, bad: int, after: int) -> None:
        super().__init__()
        self.bad = bad
        self.after = after

    def advance(self, output: StepOutput) -> tuple[int, ...]:
        super().advance(output)
        return (self.bad,) if len(self.text.get(self.bad, [])) >= self.after else ()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("after", [1, 7, 19])  # 19 is the last token
def test_it_ends_alone(depth: int, drafts: int, after: int) -> None:
    engine = PaperEngine(num_pages=60, num_slots=4, budget=40, depth=depth, drafts=drafts)
    engine.loop.masker = Failing(3, after)
    for i in range(6):
        engine.say(generate(i, [i] * 6, 19, grammar="toy" * (i % 2)))
        engine.step()
    engine.finish_all()
    assert engine.finish == {i: FAILED if i == 3 else LENGTH for i in range(6)}
    assert after <= len(engine.text[3]) <= 19
    for i in (0, 1, 2, 4, 5):
        assert engine.text[i] == solo_run([i] * 6, 19, [], recurrent=False, grammar=i % 2 == 1)
    assert engine.memory.pool.num_free == 60  # all pages are released
