"""Unsupported configs get one sentence, with the nearest supported model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from nanovllm.config import ConfigError, read_recipe
from nanovllm.layers.rope import Rope
from nanovllm.models import MODELS, support
from nanovllm.models.support import check_config
from nanovllm.recipes import models

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
QWEN3_8B: dict[str, Any] = json.loads((CONFIGS / "Qwen3-8B.json").read_text())


def line_of(folder: Path, raw: dict[str, Any], name: str = "") -> str:
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError) as caught:
        check_config(folder / "config.json", name)
    line = str(caught.value)
    assert line.startswith(f"{folder / 'config.json'}: ") and "\n" not in line
    return line


@pytest.mark.parametrize("path", sorted(CONFIGS.iterdir()), ids=lambda path: path.stem)
def test_the_configs_of_recipes_pass(path: Path) -> None:
    assert check_config(path)["architectures"][0] in MODELS


def test_what_is_repeated_without_torch_is_the_same_with_it() -> None:
    tags = [kind.__struct_config__.tag for kind in get_args(Rope)]
    assert tags == [*support.ROPE_TYPES]
    assert {MODELS[known.architecture] for known in support.KNOWN} == set(MODELS.values())
    served = {read_recipe(name).recipe.model for name in models()}
    ids = {name for known in support.KNOWN for name in (known.name, known.fp8)}
    assert served - ids == {"Qwen/Qwen3-Next-80B-A3B-Thinking"}


SMALL, LARGE = (
    dict(hidden_size=1024, num_hidden_layers=24),
    dict(hidden_size=8192, num_hidden_layers=80),
)
MIDDLE = dict(hidden_size=4096, num_hidden_layers=32)  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "more", "near"),
    [
        ("Qwen2ForCausalLM", SMALL, "Qwen/Qwen3-0.6B"),
        ("Qwen2ForCausalLM", MIDDLE, "Qwen/Qwen3-8B"),
        ("Gemma3ForCausalLM", MIDDLE, "Qwen/Qwen3-8B"),
        ("Phi3ForCausalLM", {}, "Qwen/Qwen3-8B"),
        ("GPT2LMHeadModel", {}, "Qwen/Qwen3-8B"),
        ("MistralForCausalLM", MIDDLE, "meta-llama/Llama-3.1-8B-Instruct"),
        ("MistralForCausalLM", LARGE, "meta-llama/Llama-3.1-70B-Instruct"),
        ("MixtralForCausalLM", MIDDLE, "Qwen/Qwen3-30B-A3B"),
        ("Qwen2MoeForCausalLM", dict(SMALL, num_experts=60), "Qwen/Qwen3-30B-A3B"),
        ("GptOssForCausalLM", dict(hidden_size=2880, num_hidden_layers=36, num_local_experts=128),
         "Qwen/Qwen3-30B-A3B"),
        ("Glm4MoeForCausalLM", dict(hidden_size=5120, num_hidden_layers=92, n_routed_experts=160),
         "Qwen/Qwen3-235B-A22B"),
        ("DeepseekV32ForCausalLM", {}, "deepseek-ai/DeepSeek-V3.1"),
        ("DeepseekV2ForCausalLM", SMALL, "deepseek-ai/DeepSeek-V3"),
        ("MiniMaxM1ForCausalLM", {}, "MiniMaxAI/MiniMax-M2.5"),
        ("Qwen3_5ForSequenceClassification", {"text_config": MIDDLE}, "Qwen/Qwen3.5-9B"),
        ("Qwen3_5MoeForSequenceClassification",
         {"text_config": dict(hidden_size=3072, num_hidden_layers=48)}, "Qwen/Qwen3.5-122B-A10B"),
        ("Qwen3NextForSequenceClassification", {}, "Qwen/Qwen3-Next-80B-A3B-Instruct"),
        ("Llama4ForConditionalGeneration", {"text_config": dict(LARGE, num_local_experts=16)},
         "Qwen/Qwen3-235B-A22B"),
        ("Qwen3VLForConditionalGeneration", {"text_config": MIDDLE}, "Qwen/Qwen3-8B"),
        ("Qwen3VLMoeForConditionalGeneration", {"text_config": {}}, "Qwen/Qwen3-235B-A22B"),
        ("X", {"hidden_size": "a", "num_hidden_layers": -1}, "Qwen/Qwen3-8B"),
    ],
)  # fmt: skip
def test_another_architecture_has_a_nearest_model(tmp_path, architecture, more, near) -> None:
    line = line_of(tmp_path, {"architectures": [architecture], **more})
    assert f": architectures is {architecture}" in line
    assert line.endswith(f"; the nearest supported model is {near}")
    assert ("a text generator's name" in line) != architecture.endswith("ForCausalLM")


QWEN = "serve the unquantised Qwen/Qwen3-8B, or Qwen/Qwen3-8B-FP8"


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ({"quant_method": "awq", "bits": 4}, "AWQ (4 bits)"),
        ({"quant_method": "gptq", "bits": 8}, "GPTQ (8 bits)"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "modelopt"}, "ModelOpt"),
        ({"quant_method": "mxfp4"}, "MXFP4"),
        ({"quant_method": "hqq"}, "hqq"),
        ({"quant_method": "fp8"}, "FP8 scales of other blocks than 128 x 128"),
        ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8"),
        ({"bits": 4}, "an unnamed method (4 bits)"),
    ],
)
def test_every_quantisation_that_is_not_block_fp8_is_named(tmp_path, given, form) -> None:
    for field in ("quantization_config", "compression_config"):
        line = line_of(tmp_path, {**QWEN3_8B, field: given}, "models/Qwen3-8B-AWQ")
        assert line.endswith(
            f"the weights are quantised with {form}, which is not supported; {QWEN}"
        )


@pytest.mark.parametrize(
    ("file", "form"),
    [
        ("quantize_config.json", "GPTQ"),
        ("quant_config.json", "AWQ"),
        ("hf_quant_config.json", "ModelOpt"),
    ],
)
def test_older_checkpoints_say_so_in_another_file(tmp_path, file, form) -> None:
    (tmp_path / file).write_text("{}")
    assert f"quantised with {form}, which" in line_of(tmp_path, QWEN3_8B)


@pytest.mark.parametrize(
    ("name", "change", "advice"),
    [
        ("any/name", {}, QWEN),  # by sizes
        ("Qwen/Qwen3-14B-AWQ", {}, "the unquantised Qwen/Qwen3-14B, or Qwen/Qwen3-14B-FP8"),
        ("any/name", {"hidden_size": 5}, "the unquantised model (with --set quantize=fp8 if that"),
        (
            "x/Llama-3.1-8B-Instruct-GPTQ-INT4",
            {},
            "the unquantised meta-llama/Llama-3.1-8B-Instruct (with --set quantize=fp8 if that",
        ),
    ],
)
def test_the_advice_is_the_unquantised_or_the_fp8_id(tmp_path, name, change, advice) -> None:
    raw = {**QWEN3_8B, **change, "quantization_config": {"quant_method": "awq"}}
    assert advice in line_of(tmp_path, raw, name)


@pytest.mark.parametrize(
    ("name", "config", "model"),
    [
        ("x/DeepSeek-V3.1-AWQ", "DeepSeek-R1", "deepseek-ai/DeepSeek-V3.1"),
        ("x/DeepSeek-R1-0528-NVFP4", "DeepSeek-R1", "deepseek-ai/DeepSeek-R1-0528"),
        ("x/MiniMax-M2.5-AWQ-4bit", "MiniMax-M2", "MiniMaxAI/MiniMax-M2.5"),
        ("any/name", "MiniMax-M2.7", "MiniMaxAI/MiniMax-M2"),  # by sizes
    ],
)
def test_models_that_are_published_in_fp8_have_no_other_version(
    tmp_path, name, config, model
) -> None:
    raw = json.loads((CONFIGS / f"{config}.json").read_text())
    raw["quantization_config"] = {"quant_method": "awq", "bits": 4}
    line = line_of(tmp_path, raw, name)
    assert line.endswith(f"not supported; serve {model}, whose weights are in block fp8")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"; only "silu" is supported'),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type of rope_scaling is longrope; "),
        ({"quantization_config": "fp8"}, "quantization_config must be an object"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures must be a list of names"),
        ({"architectures": [1]}, "architectures must be a list of names"),
    ],
)
def test_other_fields_that_no_family_can_have(tmp_path, change, says) -> None:
    assert says in line_of(tmp_path, {**QWEN3_8B, **change})


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"\xff\xfe", b"null", b'{"a":' + b"[" * 10**5]
)
def test_not_json_at_all(tmp_path, content) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json: "):
        check_config(tmp_path / "config.json")
