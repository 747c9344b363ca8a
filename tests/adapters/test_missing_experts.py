"""An adapter's file that lacks experts of some layers is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from nanovllm.config import ConfigError
from tests.adapters.peft_adapters import config_with, save_adapter
from tests.models.tiny import CASES, make_tiny
from tests.whole_engine import WholeEngine


def test_a_layer_without_its_experts_is_a_fault(tmp_path: Path) -> None:
    name, overrides = CASES["qwen3_moe"]
    make_tiny(tmp_path / "model", name, **overrides)
    folder = tmp_path / "adapters" / "a"
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    save_adapter(
        tmp_path / "model", folder, 1, target_modules=["q_proj"], target_parameters=parameters
    )
    path = folder / "adapter_model.safetensors"
    whole = load_file(path)
    WholeEngine(config_with(tmp_path / "model", tmp_path / "adapters"))
    for gone, missing in (
        (r"layers\.1\.mlp\.experts\.", "2 tensors missing: model.layers.1.mlp.experts.down_proj"),
        (
            r"layers\.0\.mlp\.experts\.lora",
            "1 tensor missing: model.layers.0.mlp.experts.down_proj",
        ),
    ):
        save_file({n: t for n, t in whole.items() if not re.search(gone, n)}, path)
        with pytest.raises(ConfigError, match=missing):
            WholeEngine(config_with(tmp_path / "model", tmp_path / "adapters"))
    flat = {n: t.flatten() if "experts.lora" in n else t for n, t in whole.items()}
    save_file({n: t for n, t in flat.items() if "base_layer" not in n}, path)
    with pytest.raises(ConfigError, match="with a wrong shape"):
        WholeEngine(config_with(tmp_path / "model", tmp_path / "adapters"))
