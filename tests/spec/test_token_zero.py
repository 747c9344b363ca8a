"""Token id 0 is drafted, accepted and rejected as any other one is.

It must be neither padding nor a sign that there is no draft.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from nanovllm.attention.base import Attend, AttentionBackend, Batch
from nanovllm.config import Speculate
from nanovllm.spec.model_drafter import ModelDrafter
from nanovllm.wire import Sampling
from tests.models.tiny import config_of, make_tiny
from tests.spec.test_heads import Pair, eagle3, mtp
from tests.whole_engine import GREEDY, WholeEngine

NUM_DRAFTS, NUM_NEW = 3, 33
OTHER = 7
HEADS: dict[str, tuple[Callable[[Path, str], Pair], str]] = {
    "eagle3": (eagle3, "qwen3"),
    "mtp": (mtp, "deepseek_v3"),
    "mtp of a hybrid model": (mtp, "qwen3_next"),
}


def always(token: int) -> Sampling:
    """Return the parameters of a request whose every token is this one."""
    return Sampling(temperature=0.0, logit_bias={token: 100.0})


def only_zero(state_SX: Tensor) -> Tensor:
    """Return logits of a draft model that always drafts token 0."""
    logits_SV = torch.zeros(len(state_SX), 200)
    logits_SV[:, 0] = 1
    return logits_SV


class OnlyDrafts(NamedTuple):
    """A backend that refuses rows that are not marked as those of a draft model."""

    backend: AttentionBackend

    def bind(self, batch: Batch) -> Attend:
        assert batch.is_draft and not batch.planned
        return self.backend.bind(batch)


def counts_of(engine: WholeEngine, prompts: list[list[int]], sampling: Sampling) -> list[int]:
    """Serve the prompts, and return the numbers of drafted and of accepted tokens."""
    for name, prompt in enumerate(prompts):
        engine.submit(name, prompt, NUM_NEW, sampling)
    engine.run()
    stats = engine.scheduler.stats()
    return [stats.draft_tokens, stats.accepted_tokens]


@pytest.mark.parametrize("case", HEADS)
def test_zeros_that_a_draft_model_proposes(case: str, tmp_path: Path) -> None:
    make, family = HEADS[case]
    pair = make(tmp_path, family)
    prompts = [[5, 0, 9], [0], [0, 0, 0, 0, 0]]

    def served(sampling: Sampling) -> tuple[list[int], dict[int, list[int]]]:
        engine = WholeEngine(pair.config, speculate=pair.speculate, page_tokens=4)
        drafter = engine.runner.drafter
        assert isinstance(drafter, ModelDrafter)
        drafter.model.logits = only_zero  # type: ignore[method-assign]
        drafter.backend = OnlyDrafts(drafter.backend)
        return counts_of(engine, prompts, sampling), engine.text

    (drafted, accepted), text = served(always(0))
    assert text == dict.fromkeys(range(3), [0] * NUM_NEW)
    assert drafted == accepted == 3 * (NUM_NEW - 1) * NUM_DRAFTS // (NUM_DRAFTS + 1)
    (drafted, accepted), text = served(always(OTHER))
    assert text == dict.fromkeys(range(3), [OTHER] * NUM_NEW)
    assert (drafted > 3 * NUM_NEW, accepted) == (True, 0)
    plain = WholeEngine(pair.config, page_tokens=4)
    counts_of(plain, prompts, GREEDY)
    assert served(GREEDY)[1] == plain.text


def test_zeros_that_n_grams_propose(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3")
    speculate = Speculate(method="ngram", tokens=NUM_DRAFTS, min_match=1, adapt=False)

    def served(prompt: list[int], sampling: Sampling) -> tuple[list[int], dict[int, list[int]]]:
        engine = WholeEngine(config_of(tmp_path), speculate=speculate, page_tokens=4)
        return counts_of(engine, [prompt], sampling), engine.text

    (drafted, accepted), text = served([5, 0, 0], always(0))
    assert text == {0: [0] * NUM_NEW}
    assert drafted == accepted == (NUM_NEW - 1) * NUM_DRAFTS // (NUM_DRAFTS + 1)
    # After the first 7, the drafts are 0, 5 and 7. Later ones are all 7.
    (drafted, accepted), text = served([OTHER, 0, 5], always(OTHER))
    assert text == {0: [OTHER] * NUM_NEW}
    assert 1 <= drafted - accepted <= 2 * NUM_DRAFTS < accepted
