"""Draft heads that do not fit are refused with one line, and those that fit are planned for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from nanovllm.bench.gpus import gpu_of
from nanovllm.bench.plan import WEIGHTS, plan_of
from nanovllm.config import Config, ConfigError, Load, Speculate, load_config
from nanovllm.parallel.mesh import Mesh
from nanovllm.runner.build import load
from nanovllm.runner.resolved import resolve_config
from tests.models.heads import eagle3_tensors, save_head
from tests.models.test_mtp import make_mtp
from tests.models.tiny import NEXT, V3, config_of, make_tiny
from tests.whole_engine import GREEDY, WholeEngine, prompts_of

DUMMY = "load.format=dummy"
HEAD = dict(  # as AngelSlim's head of Qwen3-8B, with 32,000 draft tokens
    architectures=["LlamaForCausalLMEagle3"], vocab_size=151_936, draft_vocab_size=32_000,
    hidden_size=4096, intermediate_size=12_288, num_hidden_layers=1, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960, rms_norm_eps=1e-6,
    rope_theta=1_000_000, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 17, 32]},
)  # fmt: skip


def line_of(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_config(config)
    return str(caught.value)


def given(config: Config, **keys: object) -> Config:
    return replace(config, recipe=replace(config.recipe, speculate=Speculate(**keys)))


def test_heads_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    target, head = tmp_path / "target", tmp_path / "head"
    make_tiny(target, "qwen3", num_hidden_layers=4, hidden_size=80)
    save_head(head, eagle3_tensors())
    config = config_of(target)
    assert line_of(given(config, method="eagle3", model=str(head))) == (
        f"{head}/model.safetensors: fc.weight has the shape [64, 192]; the target's hidden_size is "
        "80, so the head is for another target"
    )
    assert line_of(given(config, method="eagle3", model="/nowhere")) == (
        "speculate.model: /nowhere is not a folder; give that of an EAGLE-3 head"
    )
    for place in ("~nobody-at-all/x", "x" * 300):
        assert line_of(given(config, method="eagle3", model=place)) == (
            f"speculate.model: {place} is not a folder; give that of an EAGLE-3 head"
        )
    assert line_of(given(config, method="eagle3", model=str(head / "config.json"))) == (
        f"speculate.model: {head}/config.json is not a folder; give that of an EAGLE-3 head"
    )
    for place in ("/nowhere/config.json", "/nowhere", "x" * 300 + ".json"):
        random = replace(config, recipe=replace(config.recipe, load=Load(format="dummy")))
        assert line_of(given(random, method="eagle3", model=place)) == (
            f"speculate.model: {place} is not a folder; give that of an EAGLE-3 head"
        )
    assert line_of(given(config, method="mtp")) == (
        f"speculate.method is mtp, but {target}/config.json has no MTP layer; use ngram, eagle3 or "
        "draft_model"
    )


def test_a_head_that_cannot_be_cut_is_one_line(tmp_path: Path) -> None:
    target, head = tmp_path / "target", tmp_path / "head"
    make_tiny(target, "qwen3", num_hidden_layers=4)
    fields = dict(num_attention_heads=3, num_key_value_heads=3)
    save_head(head, eagle3_tensors(**fields), **fields)
    config = given(config_of(target), method="eagle3", model=str(head))
    with pytest.raises(ConfigError) as caught:
        resolve_config(config, Mesh(0, 2))
    assert str(caught.value) == (
        f"{head}/config.json: parallel.tp is 2; the model's num_attention_heads 3 is not a "
        "multiple of it; it can be 1, 3"
    )


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "mtp"])
def test_weights_of_draft_models_are_checked_before_any_weight_is_read(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a large model would be loaded for nothing."""
    target, other = tmp_path / "target", tmp_path / "other"
    if method == "mtp":
        make_mtp(target, "qwen3_next", **NEXT)
        path, lost = target / "model.safetensors", "mtp.fc.weight"
    else:
        make_tiny(target, "qwen3", num_hidden_layers=5)
        make_tiny(other, "qwen3") if method == "draft_model" else save_head(other, eagle3_tensors())
        path, lost = other / "model.safetensors", "layers.0.self_attn.q_proj.weight"
        lost = f"model.{lost}" if method == "draft_model" else lost
    tensors = load_file(path)
    del tensors[lost]
    save_file(tensors, path)
    model = None if method == "mtp" else str(other)
    config = given(config_of(target), method=method, model=model)
    caplog.set_level("INFO", "engine")
    with pytest.raises(ConfigError) as caught:
        load(config, resolve_config(config))
    assert str(caught.value) == f"{path} does not fit the model: 1 tensor missing: {lost}"
    assert not [line for line in caplog.messages if line.startswith("loading")]


@pytest.mark.parametrize("dtype", ["own", "auto"])
def test_an_eagle3_head_is_planned_for(dtype: str, tmp_path: Path) -> None:
    """It has 4 KiB of cache a token, and neither an embedding nor the whole output head.

    With `auto`, its products are in fp8 on an H200, with a scale for each block of 128 x 128.
    """
    path = tmp_path / "head.json"
    path.write_text(json.dumps(HEAD))
    head = ["speculate.method=eagle3", f"speculate.model={path}"]
    speculate = [*head, f"speculate.dtype={dtype}"]
    plain = plan_of(load_config("qwen3-8b", [DUMMY]), gpu_of("h200"), 1)
    both = plan_of(load_config("qwen3-8b", [DUMMY, *speculate]), gpu_of("h200"), 1)
    assert both.resolved.layout.bytes_per_token - plain.resolved.layout.bytes_per_token == 4096
    size, inner, heads, kv = 4096, 12_288, 32 * 128, 8 * 128
    products = 3 * size * size + 2 * size * (heads + 2 * kv) + heads * size + 3 * size * inner
    products += 32_000 * size
    num_bytes = products + 4 * products // 128**2 if dtype == "auto" else 2 * products
    norms, table = 2 * 4 * size, both.resolved.max_model_tokens * 128 * 4  # float32
    assert both.used[WEIGHTS] - plain.used[WEIGHTS] == num_bytes + norms + table


@pytest.mark.parametrize(
    ("model", "cache", "weights"),
    [
        # 576 elements of latents; 257 experts in fp8 are 11.32 GB of it, the product of two 0.21.
        # Drafts read an fp8 copy of the output head.
        ("deepseek-r1", 1152, 11_765_745_888 + 129_280 * 7168 + 4 * 1010 * 56),
        ("qwen3-next-80b-a3b", 2048, 3_300_971_520 + 151_936 * 2048 + 4 * 1187 * 16),
    ],
)
def test_mtp_is_planned_for(model: str, cache: int, weights: int) -> None:
    """Neither the embedding nor the model's own output head is counted twice."""
    plain = plan_of(load_config(model, [DUMMY]), gpu_of("h200"), 1)
    both = plan_of(load_config(model, [DUMMY, "speculate.method=mtp"]), gpu_of("h200"), 1)
    assert both.resolved.layout.bytes_per_token - plain.resolved.layout.bytes_per_token == cache
    assert both.used[WEIGHTS] - plain.used[WEIGHTS] == weights


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_random_mtp_writes_the_text_of_the_random_model(family: str, tmp_path: Path) -> None:
    make_tiny(tmp_path, family, **(V3 if family == "deepseek_v3" else NEXT))
    config = config_of(tmp_path, Load(format="dummy", seed=5))
    found = []
    for speculate in (None, Speculate(method="mtp", tokens=2, adapt=False)):
        engine = WholeEngine(config, speculate=speculate)
        for i, prompt in enumerate(prompts_of(3)):
            engine.submit(i, prompt, 10, GREEDY)
        engine.run()
        found.append(engine.text)
    assert found[0] == found[1]
    assert engine.scheduler.stats().num_drafts > 10
    loader = engine.runner.draft_model
    assert loader is not None and loader.layers[0].mlp.layer == len(engine.runner.model.layers)
