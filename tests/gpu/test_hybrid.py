"""Qwen3-Next on a GPU in bf16 against transformers in float32, teacher-forced.

All experts are chosen. Otherwise bf16 would choose others for nearly equal scores, with
log-probabilities off by 7. test_experts.py covers such choices.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from nanovllm.bench.graphs import measure
from nanovllm.config import Kernels, Speculate
from nanovllm.kv.hybrid import HybridMemory
from nanovllm.runner.resolved import resolve_config
from nanovllm.wire import Sampling
from tests.gpu.test_engine import Made, reference_logprobs
from tests.models.tiny import NEXT, config_of, make_tiny
from tests.whole_engine import GREEDY, WholeEngine, prompts_of

SHAPE = dict(  # heads as in 80B-A3B, but fewer
    NEXT, vocab_size=2000, hidden_size=512, num_attention_heads=4, num_key_value_heads=2,
    head_dim=256, num_experts=4, num_experts_per_tok=4, moe_intermediate_size=128,
    shared_expert_intermediate_size=128, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=128, linear_value_head_dim=128, max_position_embeddings=1024,
)  # fmt: skip
TOLERANCE = 0.4  # of a log-probability; bf16 with 4 layers of large weights, 3 of them recurrent
NGRAM = Speculate(method="ngram", tokens=3, min_match=1, max_match=4)
STEM = [5, 6, 7, 8, 9, 10, 11, 12]
PROMPTS = [*prompts_of(6), *([*STEM * (4 + 3 * i), i] for i in range(5))]
FEW = [5, 6, 7]  # allowed output tokens of prompts with the stem, which make drafts likely
LIMITED = Sampling(temperature=0.0, logit_bias=dict.fromkeys(FEW, 80.0))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder: Path = tmp_path_factory.mktemp("next")
    model = make_tiny(folder, "qwen3_next", **SHAPE).bfloat16()
    model.save_pretrained(folder)
    return config_of(folder), model.float()


@pytest.mark.gpu
@pytest.mark.parametrize("speculate", [None, NGRAM])
@pytest.mark.parametrize("graphs", [True, False])
def test_choices_agree_with_the_reference(
    made: Made, graphs: bool, speculate: Speculate | None
) -> None:
    """Later turns have cached prefixes, which start from restored states."""
    config, model = made
    recipe = replace(config.recipe, device="cuda", kernels=Kernels(cuda_graphs=graphs))
    engine = WholeEngine(
        replace(config, recipe=recipe), pages=100, page_tokens=16, slots=6, step_tokens=96,
        checkpoints=20, speculate=speculate, max_tokens=300,
    )  # fmt: skip
    for turn in range(3):
        for i, prompt in enumerate(PROMPTS):
            engine.submit(100 * turn + i, prompt, 40, GREEDY if i < 6 else LIMITED)
            engine.loop.step()
        engine.run()
    assert not graphs or engine.runner.steps_by_mode["FULL/decode"] > 10
    assert sum(engine.cached.values()) > 0
    stats = engine.scheduler.stats()
    drafted = stats.draft_tokens, stats.accepted_tokens
    assert drafted == (0, 0) if speculate is None else drafted[0] > drafted[1] > 20, drafted
    for name, text in engine.text.items():
        expected = reference_logprobs(model, PROMPTS[name % 100], text)
        chosen = expected.gather(1, torch.tensor(text)[:, None])[:, 0]
        best = (expected if name % 100 < 6 else expected[:, FEW]).max(1).values
        assert len(text) == 40 and (best - chosen).abs().max().item() < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("delta", ["auto", "torch"])
def test_text_is_the_same_with_checkpoints_in_the_hosts_memory(made: Made, delta: str) -> None:
    """Checkpoints are also equal bit for bit, saved inside chunks and between steps.

    The number of places is small, so places are reused while steps that read them are in flight.
    """
    config, _ = made
    recipe = replace(config.recipe, device="cuda", kernels=Kernels(delta=delta))
    found = []
    states = 5 * resolve_config(replace(config, recipe=recipe)).layout.bytes_per_state
    for gib in (0.0, states / 2**30):  # no pages in host memory
        engine = WholeEngine(
            replace(config, recipe=recipe), pages=60, page_tokens=16, slots=6, step_tokens=96,
            checkpoints=5, checkpoint_fraction=0.0, host_gib=gib, max_tokens=300,
        )  # fmt: skip
        assert isinstance(engine.memory, HybridMemory)
        engine.memory.every = 32
        for turn in range(3):
            for i, prompt in enumerate(PROMPTS):
                engine.submit(100 * turn + i, prompt, 40)
                engine.loop.step()
            engine.run()
        saved_NX = engine.runner.states.saved_NX
        assert saved_NX.is_cuda is (gib == 0) and saved_NX.is_pinned() is (gib > 0)
        events = engine.scheduler.stats().checkpoint_events
        assert min(events.values()) > 0 and sum(engine.cached.values()) > 0
        torch.cuda.synchronize()
        found.append((engine.text, engine.cached, events, saved_NX.cpu()))
        del engine, saved_NX
        gc.collect()
    assert found[0][:3] == found[1][:3]
    torch.testing.assert_close(found[1][3], found[0][3], rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("speculate", [None, NGRAM])
def test_graphs_are_the_eager_steps(made: Made, speculate: Speculate | None) -> None:
    config, _ = made
    recipe = replace(config.recipe, device="cuda")
    engine = WholeEngine(
        replace(config, recipe=recipe), page_tokens=16, slots=24, step_tokens=256,
        speculate=speculate,
    )  # fmt: skip
    assert all(graph.is_right for graph in measure(engine.runner, range(1, 25)))
