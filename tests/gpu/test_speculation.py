"""Drafts on a GPU: each choice is nearly the best by the reference in float32."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nanovllm.bench.graphs import measure
from nanovllm.config import Kernels, Speculate
from nanovllm.wire import Sampling
from tests.gpu.test_engine import SHAPE, TOLERANCE, WIDE, Made, made, reference_logprobs
from tests.whole_engine import WholeEngine

MODES = {
    "flash, graphs": Kernels(attention="flash"),
    "flash, triton decodes": Kernels(attention="flash", decode="triton"),
    "triton, eager": Kernels(attention="triton", cuda_graphs=False),
    "torch, eager": Kernels(attention="torch", sample="torch", batch_prep="torch"),
}
NGRAM = Speculate(method="ngram", tokens=3, min_match=1, max_match=4)
STEM = [5, 6, 7, 8, 9, 10, 11, 12]
PROMPTS = [[*STEM * (1 + i % 4), *range(i, i + 5)] for i in range(10)]
PROMPTS += [[7] * (4 + 9 * i) for i in range(6)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    shapes = {"tiny": SHAPE, "wide": WIDE}
    return {name: made(tmp_path_factory.mktemp(name), shape) for name, shape in shapes.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["tiny", "wide"])
@pytest.mark.parametrize("logprobs", [0, 1])
def test_choices_behind_drafts_agree_with_the_reference(
    models: dict[str, Made], name: str, mode: str, logprobs: int
) -> None:
    config, model = models[name]
    recipe = replace(config.recipe, device="cuda", kernels=MODES[mode])
    engine = WholeEngine(
        replace(config, recipe=recipe), page_tokens=16, slots=16, step_tokens=96, speculate=NGRAM
    )
    asked = Sampling(temperature=0.0, logprobs=logprobs)
    for i, prompt in enumerate(PROMPTS):
        engine.submit(i, prompt, 40, asked)
        engine.loop.step()
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.accepted_tokens > 30 and stats.draft_tokens > stats.accepted_tokens
    assert "graphs" not in mode or engine.runner.steps_by_mode["FULL/decode"] > 10
    for i, prompt in enumerate(PROMPTS):
        expected = reference_logprobs(model, prompt, engine.text[i])
        assert len(engine.text[i]) == 40
        for at, token in enumerate(engine.text[i]):
            assert expected[at].max().item() - expected[at, token].item() < TOLERANCE, (i, at)
        for at, entry in enumerate(engine.logprobs.get(i, [])):
            assert abs(expected[at, entry.token_id].item() - entry.logprob) < TOLERANCE
    assert not logprobs or all(len(engine.logprobs[i]) == 40 for i in range(len(PROMPTS)))


@pytest.mark.gpu
def test_graphs_of_ragged_rows_are_the_eager_steps(models: dict[str, Made]) -> None:
    config, _ = models["wide"]
    recipe = replace(config.recipe, device="cuda", kernels=MODES["flash, graphs"])
    engine = WholeEngine(
        replace(config, recipe=recipe), page_tokens=16, slots=48, step_tokens=256, speculate=NGRAM
    )
    graphs = list(measure(engine.runner, range(1, 49)))
    assert all(graph.is_right for graph in graphs)
    ragged = [graph.rows for graph in graphs if graph.mode == "FULL/decode of 4"]
    assert ragged[0] == 1 and ragged[-1] == 192
