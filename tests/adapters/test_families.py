"""Texts of every family with adapters of all its products equal PEFT's, next to base rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from nanovllm.models.adapter_experts import of_expert
from tests.adapters.peft_adapters import config_with, save_adapter, texts_of
from tests.engine.test_ranks import ranked
from tests.models.tiny import CASES, make_tiny
from tests.whole_engine import WholeEngine, prompts_of

PROMPTS = prompts_of(4, seed=8)
MAX_NEW = 6
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LATENT = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
DELTA = ["in_proj_qkvz", "in_proj_ba", "out_proj"]
SHARED = [f"shared_expert{s}.{name}_proj" for s in ("", "s") for name in ("gate", "up", "down")]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SPLIT = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama gqa 3, head_dim 8": dict(target_modules="all-linear"),
    "qwen3_moe": dict(target_modules="all-linear"),
    "qwen3_moe 7, top 1, dense between": dict(target_modules="all-linear", r=9, use_rslora=True),
    "minimax_m2": dict(target_modules=ATTENTION, target_parameters=[*EXPERTS, "mlp.gate.weight"]),
    "deepseek_v3": dict(target_modules=[*LATENT, *SHARED], target_parameters=EXPERTS),
    "deepseek_v3 q plain, dense 3, yarn 1": dict(target_modules="all-linear", r=17),
    "qwen3_next": dict(
        target_modules=[*ATTENTION, *DELTA, *SHARED, "shared_expert_gate"],
        target_parameters=EXPERTS,
    ),
    "qwen3_5_moe_text 13, top 8, shared as wide": dict(
        target_modules=[*ATTENTION, *SPLIT, "out_proj", *SHARED, "shared_expert_gate"],
        target_parameters=EXPERTS,
        r=6,
    ),
    "qwen3_5_moe_text": dict(target_modules="all-linear", r=3),
    "qwen3_5_text": dict(
        target_modules=[*ATTENTION, *SPLIT, "out_proj", "gate_proj", "up_proj", "down_proj"]
    ),
}


def mixed(engine: WholeEngine) -> tuple[list[list[int]], list[list[int]]]:
    """Return the texts of the prompts without and with the adapter, computed together."""
    count = len(PROMPTS)
    for i, prompt in enumerate(PROMPTS):
        engine.submit(i, prompt, MAX_NEW)
        engine.submit(count + i, prompt, MAX_NEW, adapter="a")
    engine.run()
    found = [engine.text[i] for i in range(2 * count)]
    return found[:count], found[count:]


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_of_a_family(family: str, tmp_path: Path) -> None:
    model, adapters = tmp_path / "model", tmp_path / "adapters"
    name, overrides = CASES[family]
    make_tiny(model, name, **overrides)
    save_adapter(model, adapters / "a", 4, **FAMILIES[family])
    base, adapted = mixed(WholeEngine(config_with(model, adapters)))
    assert base == texts_of(model, None, PROMPTS, MAX_NEW)
    assert adapted == texts_of(model, adapters / "a", PROMPTS, MAX_NEW)
    assert base != adapted


def unfuse(source: Path, target: Path, num_experts: int) -> None:
    """Write an adapter with one pair for each expert, as transformers 4 has them."""
    target.mkdir()
    config = json.loads((source / "adapter_config.json").read_text())
    ranks = {
        "rank_pattern": {r".*\.(gate|up)_proj": 8},
        "alpha_pattern": {r".*\.(gate|up)_proj": 16},
    }
    (target / "adapter_config.json").write_text(json.dumps({**config, **ranks}))
    tensors = load_file(source / "adapter_model.safetensors")
    made = {name: one for name, one in tensors.items() if ".experts." not in name}
    for layer in range(2):
        folder = f"base_model.model.model.layers.{layer}.mlp.experts"
        for inner, names in ((".base_layer", ("gate_proj", "up_proj")), ("", ("down_proj",))):
            a, b = (tensors[f"{folder}{inner}.lora_{half}.weight"] for half in "AB")
            for expert in range(num_experts):
                own_a, own_b = of_expert(a, b, expert, num_experts)
                for name, own in zip(names, own_b.chunk(len(names)), strict=True):
                    made[f"{folder}.{expert}.{name}.lora_A.weight"] = own_a.clone()
                    made[f"{folder}.{expert}.{name}.lora_B.weight"] = own.contiguous()
    save_file(made, target / "adapter_model.safetensors")


def test_both_layouts_of_experts_and_two_ranks(tmp_path: Path) -> None:
    model, adapters, old = tmp_path / "model", tmp_path / "new", tmp_path / "old"
    make_tiny(model, "qwen3_moe", **dict(CASES["qwen3_moe"][1], num_experts=6))
    save_adapter(model, adapters / "a", 4, target_modules="all-linear")
    old.mkdir()
    unfuse(adapters / "a", old / "a", 6)
    expected = mixed(WholeEngine(config_with(model, adapters)))
    assert expected[0] != expected[1]
    assert mixed(WholeEngine(config_with(model, old))) == expected
    for ep in (1, 2):  # each expert is cut, or whole on one of the ranks
        config = config_with(model, adapters)
        parallel = replace(config.recipe.parallel, ep=ep)
        cut = replace(config, recipe=replace(config.recipe, parallel=parallel))
        folder = tmp_path / str(ep)
        folder.mkdir()
        with ranked(cut, 2, folder) as engine:
            assert mixed(engine) == expected, ep


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_two_ranks_share_heads_and_their_adapters(family: str, tmp_path: Path) -> None:
    name, overrides = CASES[family]
    make_tiny(tmp_path / "model", name, **overrides)
    save_adapter(tmp_path / "model", tmp_path / "adapters" / "a", 5, **FAMILIES[family])
    config = config_with(tmp_path / "model", tmp_path / "adapters")
    expected = mixed(WholeEngine(config))
    with ranked(config, 2, tmp_path) as engine:
        assert mixed(engine) == expected
