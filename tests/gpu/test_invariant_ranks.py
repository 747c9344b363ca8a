"""`kernels.invariant` on two GPUs: log-probabilities of a request alone, and among others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.end_to_end.demo_server import asked
from tests.gpu.serving import choices, serving

NUM_COMPARED, NUM_BESIDE = 6, 34
PARALLEL = {"dense": ("qwen3-32b", "{tp: 2}"), "experts": ("qwen3-30b-a3b", "{tp: 2, ep: 2}")}
KEYS = (
    *("load.format=dummy", "model.num_layers=4", "server.served_name=demo"),
    *("cache.pages=400", "schedule.slots=40", "kernels.invariant=true"),
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs"),
]


@pytest.mark.parametrize("family", PARALLEL)
def test_two_ranks_give_the_bits_of_a_request_alone(family: str) -> None:
    name, parallel = PARALLEL[family]
    keys = [*KEYS, f"parallel={parallel}"]
    flags = ["--device", "cuda", *(word for key in keys for word in ("--set", key))]
    questions = [question(nth) for nth in range(NUM_COMPARED + NUM_BESIDE)]
    with serving(f"recipes/{name}.yaml", *flags) as server:
        alone = [choices(server, [one])[0] for one in questions[:NUM_COMPARED]]
        together = choices(server, questions[::-1])[::-1]
    for nth, one in enumerate(alone):
        assert one["logprobs"]["content"] == together[nth]["logprobs"]["content"], nth
    assert len({str(one) for one in alone}) == NUM_COMPARED  # each has an answer of its own


def question(nth: int) -> dict[str, Any]:
    """Return one of many questions of 10 to 400 tokens, with log-probabilities."""
    text = f"Number {nth}. " + "Tell me about sums over ranks. " * (7 * nth % 50)
    sampling = {"temperature": 0.8, "seed": nth} if nth % 2 else {"temperature": 0}
    more = {"logprobs": True, "top_logprobs": 5, "return_tokens_as_token_ids": True}
    return asked(text, max_tokens=24, ignore_eos=True, **sampling, **more)
