"""`parallel.ep=2` by data on two GPUs: one GPU's text, with graphs, drafts and masks."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from tests.end_to_end.demo_server import asked, start
from tests.gpu.test_ranks import DRAFTS, QUESTIONS

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
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs"),
]


def texts(recipe: Path, *more: str) -> tuple[list[str], float]:
    """Of many requests at a time, and how many steps replayed a whole graph."""
    server = start(str(recipe), "--device", "cuda", *more)
    try:
        asks = [*QUESTIONS, LONG] * 2
        with httpx.Client(timeout=90) as client, ThreadPoolExecutor(len(asks)) as pool:
            url = f"{server.url}/v1/chat/completions"
            answers = list(pool.map(lambda ask: client.post(url, json=ask), asks))
            assert [answer.status_code for answer in answers] == [200] * len(asks), answers[-1].text
            page = client.get(f"{server.url}/metrics").text.splitlines()
        full = (line for line in page if "graph_steps_total" in line and 'mode="FULL"' in line)
        found = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
        return found, sum(float(line.split()[-1]) for line in full)
    finally:
        server.process.kill()


@pytest.mark.parametrize("drafts", [(), DRAFTS], ids=["plain", "drafts"])
def test_two_lanes_write_what_one_gpu_does(drafts: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {name: a/b}\nconfig: config.json\nload: {format: dummy}\ndtype: float32\n"
        "cache: {pages: 400}\nschedule: {slots: 8, step_tokens: 512}\n"
        "server: {max_model_tokens: 1500, served_name: demo}\n"
    )
    alone, _ = texts(recipe)
    together, num_full = texts(recipe, "--set", "parallel.ep=2", *drafts)
    assert together == alone and all(alone)
    assert num_full > 50
