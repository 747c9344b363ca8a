"""`parallel.ep` by data on two or four GPUs: one GPU's text, with graphs, drafts and masks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from tests.end_to_end.demo_server import asked
from tests.gpu.serving import SMALL, choices, serving, texts
from tests.gpu.test_ranks import DRAFTS, FOUR, QUESTIONS

MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 5003,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}
LONG = asked("All of this once more: " + "pages and slots " * 80, temperature=0, max_tokens=30)
ASKS = [*QUESTIONS, LONG] * 2
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs"),
]


def recipe_in(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(MODEL))
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        "model: {name: a/b}\nconfig: config.json\nload: {format: dummy}\ndtype: float32\n"
        "schedule: {step_tokens: 512}\nserver: {max_model_tokens: 1500, served_name: demo}\n"
    )
    return str(recipe)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[list[str]]]:
    """Yield a future of the texts of one GPU, computed while other servers run."""
    with ThreadPoolExecutor() as pool:
        yield pool.submit(texts, ASKS, recipe_in(tmp_path_factory.mktemp("alone")), *SMALL)


@pytest.mark.parametrize("lanes", [2, pytest.param(4, marks=FOUR)])
@pytest.mark.parametrize("drafts", [DRAFTS, ()], ids=["drafts", "plain"])
def test_lanes_write_what_one_gpu_does(
    drafts: tuple[str, ...], lanes: int, alone: Future[list[str]], tmp_path: Path
) -> None:
    with serving(recipe_in(tmp_path), *SMALL, "--set", f"parallel.ep={lanes}", *drafts) as server:
        found = [choice["message"]["content"] for choice in choices(server, ASKS)]
        page = httpx.get(f"{server.url}/metrics").text.splitlines()
    assert found == alone.result()
    # With random weights, an object may begin with spaces only.
    assert all(text for text, ask in zip(found, ASKS, strict=True) if "response_format" not in ask)
    full = (line for line in page if "graph_steps_total" in line and 'mode="FULL"' in line)
    assert sum(float(line.split()[-1]) for line in full) > 50
