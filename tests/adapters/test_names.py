"""Names of modules in files: those of transformers, and those of the base's checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm.config import ConfigError
from nanovllm.models.adapter_experts import module_of, of_expert, spellings
from nanovllm.runner.build import build
from tests.adapters.peft_adapters import config_with, save_adapter, texts_of
from tests.adapters.test_families import EXPERTS, FAMILIES, MAX_NEW, PROMPTS, mixed
from tests.models.tiny import CASES, make_tiny
from tests.whole_engine import WholeEngine

PREFIX = "base_model.model."


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def rewrite(source: Path, target: Path, tensors: dict[str, Tensor], **changes: Any) -> None:
    """Write an adapter with other tensors, and other keys in its config."""
    target.mkdir(parents=True)
    config = json.loads((source / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps(config | changes))
    save_file(tensors, target / "adapter_model.safetensors")


def test_names_of_a_model_with_an_image_encoder(tmp_path: Path) -> None:
    """Rank and scale of a module follow patterns with the name in the file."""
    name, overrides = CASES["qwen3_5_text"]
    make_tiny(tmp_path / "model", name, **overrides)
    settings = FAMILIES["qwen3_5_text"] | dict(alpha_pattern={"model.layers.1.mlp.up_proj": 31})
    save_adapter(tmp_path / "model", tmp_path / "plain" / "a", 4, **settings)
    inner = f"{PREFIX}model.language_model."
    tensors = {
        name.replace(f"{PREFIX}model.", inner): one
        for name, one in tensors_of(tmp_path / "plain" / "a").items()
    }
    targets = rf"model\.language_model\.layers\..*\.({'|'.join(settings['target_modules'])})"
    changes = dict(
        target_modules=targets, alpha_pattern={"language_model.layers.1.mlp.up_proj": 31}
    )
    rewrite(tmp_path / "plain" / "a", tmp_path / "wrapped" / "a", tensors, **changes)
    config = config_with(tmp_path / "model", tmp_path / "wrapped")
    expected = texts_of(tmp_path / "model", tmp_path / "plain" / "a", PROMPTS, MAX_NEW)
    base, adapted = mixed(WholeEngine(config))
    assert adapted == expected != base
    lost = f"{inner}layers.1.mlp.up_proj.lora_"
    fewer = {name: one for name, one in tensors.items() if not name.startswith(lost)}
    rewrite(tmp_path / "plain" / "a", tmp_path / "fewer" / "a", fewer, **changes)
    with pytest.raises(ConfigError, match=r"1 tensor missing: model\.layers\.1\.mlp\.up_proj$"):
        build(config_with(tmp_path / "model", tmp_path / "fewer"))
    both = tensors | tensors_of(tmp_path / "plain" / "a")
    rewrite(tmp_path / "plain" / "a", tmp_path / "both" / "a", both, **changes)
    with pytest.raises(ConfigError, match="are names of the same module"):
        build(config_with(tmp_path / "model", tmp_path / "both"))


@pytest.mark.parametrize("folder", ["mlp", "block_sparse_moe"])
def test_experts_named_w1_w2_w3(folder: str, tmp_path: Path) -> None:
    """MiniMax-M2's checkpoint names gate w1, up w3 and down w2. All of them have alpha 8."""
    name, overrides = CASES["minimax_m2"]
    make_tiny(tmp_path / "model", name, **overrides)
    settings = dict(target_modules=["q_proj"], target_parameters=EXPERTS)
    save_adapter(tmp_path / "model", tmp_path / "fused" / "a", 4, **settings)
    tensors = tensors_of(tmp_path / "fused" / "a")
    made = {name: one for name, one in tensors.items() if ".experts." not in name}
    for layer in range(2):
        at = f"{PREFIX}model.layers.{layer}"
        for inner, names in ((".base_layer", ("w1", "w3")), ("", ("w2",))):
            a, b = (tensors[f"{at}.mlp.experts{inner}.lora_{half}.weight"] for half in "AB")
            for expert in range(6):
                own_a, own_b = of_expert(a, b, expert, 6)
                for one, half_b in zip(names, own_b.chunk(len(names)), strict=True):
                    path = f"{at}.{folder}.experts.{expert}.{one}"
                    made[f"{path}.lora_A.weight"] = own_a.clone()
                    made[f"{path}.lora_B.weight"] = half_b.contiguous()
    singles = ["w1", "w2", "w3"]
    changes: dict[str, Any] = dict(
        target_modules=["q_proj", *singles],
        target_parameters=None,
        lora_alpha=5,
        alpha_pattern=dict.fromkeys(["q_proj", *singles], 8),
    )
    rewrite(tmp_path / "fused" / "a", tmp_path / "single" / "a", made, **changes)
    expected = texts_of(tmp_path / "model", tmp_path / "fused" / "a", PROMPTS, MAX_NEW)
    base, adapted = mixed(WholeEngine(config_with(tmp_path / "model", tmp_path / "single")))
    assert adapted == expected != base
    changes |= dict(target_modules=["q_proj", "w1", "w3"])
    rewrite(tmp_path / "fused" / "a", tmp_path / "spare" / "a", made, **changes)
    words = "12 tensors of modules that the config does not target: model.layers.0.mlp.experts.0"
    with pytest.raises(ConfigError, match=re.escape(words)):
        build(config_with(tmp_path / "model", tmp_path / "spare"))


def test_all_spellings_are_of_the_same_module() -> None:
    module = "model.layers.3.mlp.experts.7.up_proj"
    assert spellings(module) == [
        module,
        "model.layers.3.block_sparse_moe.experts.7.w3",
        "model.layers.3.mlp.experts.7.w3",
        "model.language_model.layers.3.mlp.experts.7.up_proj",
        "model.language_model.layers.3.block_sparse_moe.experts.7.w3",
        "model.language_model.layers.3.mlp.experts.7.w3",
    ]
    assert {module_of(name) for name in spellings(module)} == {module}
    dense = "model.layers.3.mlp.up_proj"
    assert spellings(dense) == [dense, "model.language_model.layers.3.mlp.up_proj"]
