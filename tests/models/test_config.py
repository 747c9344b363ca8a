"""Which config.json is understood, and the one line said about others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nanovllm.config import ConfigError
from nanovllm.layers.rope import Llama3Rope, PlainRope
from nanovllm.models.config import read_model_config
from tests.models.tiny import config_of

RECIPES = Path(__file__).parents[2] / "recipes"
HUB_LLAMA: dict[str, Any] = dict(  # spelled as the hub does
    architectures=["LlamaForCausalLM"],
    attention_bias=False,
    mlp_bias=False,
    hidden_act="silu",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-05,
    rope_theta=500000,
    rope_scaling=dict(
        factor=8,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
        rope_type="llama3",
    ),
    tie_word_embeddings=False,
    quantization_config=None,
)
LLAMA3 = Llama3Rope(
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def read(folder: Path, raw: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(raw))
    return read_model_config(config_of(folder))[1]


def test_hub_spelling(tmp_path: Path) -> None:
    config = read(tmp_path, HUB_LLAMA)
    assert config.rope_parameters == LLAMA3
    assert config.head_size == 128
    assert not config.tie_word_embeddings


def test_older_names_of_the_rope_type(tmp_path: Path) -> None:
    scaling = {**HUB_LLAMA["rope_scaling"], "type": "llama3"}
    del scaling["rope_type"]
    assert read(tmp_path, {**HUB_LLAMA, "rope_scaling": scaling}).rope_parameters == LLAMA3
    plain = read(tmp_path, {**HUB_LLAMA, "rope_scaling": None}).rope_parameters
    assert plain == PlainRope(rope_theta=500000.0)


def test_transformers_5_spelling(tmp_path: Path) -> None:
    rope = {**HUB_LLAMA["rope_scaling"], "rope_theta": 500000.0}
    raw = {k: v for k, v in HUB_LLAMA.items() if k not in ("rope_theta", "rope_scaling")}
    assert read(tmp_path, {**raw, "rope_parameters": rope}).rope_parameters == LLAMA3


@pytest.mark.parametrize(
    ("change", "rotary_size"),
    [
        ({}, 128),
        ({"rotary_dim": 64}, 64),  # MiniMax-M2
        ({"partial_rotary_factor": 0.25}, 32),
        ({"rope_parameters": dict(rope_theta=1e4, partial_rotary_factor=0.5)}, 64),
        ({"rotary_dim": 48, "partial_rotary_factor": 0.25}, 48),
    ],
)
def test_a_part_of_a_head_is_rotated(
    change: dict[str, Any], rotary_size: int, tmp_path: Path
) -> None:
    assert read(tmp_path, {**HUB_LLAMA, **change}).rotary_size == rotary_size


def test_the_family_is_the_architecture(tmp_path: Path) -> None:
    for name in ("Llama", "Qwen3"):
        raw = {**HUB_LLAMA, "architectures": [f"{name}ForCausalLM"], "head_dim": 128}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        assert read_model_config(config_of(tmp_path))[0].__name__ == name


@pytest.mark.parametrize(
    "change, said",
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architectures is GPT2LMHeadModel; supported are DeepseekV3ForCausalLM, "
            "LlamaForCausalLM, MiniMaxM2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM, "
            "Qwen3NextForCausalLM",
        ),
        (
            {"architectures": []},
            "architectures is empty; supported are DeepseekV3ForCausalLM, "
            "LlamaForCausalLM, MiniMaxM2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM, "
            "Qwen3NextForCausalLM",
        ),
        ({"architectures": ...}, "Object missing required field `architectures`"),
        ({"hidden_size": ...}, "Object missing required field `hidden_size`"),
        ({"hidden_size": "big"}, "Expected `int`, got `str` - at `$.hidden_size`"),
        ({"hidden_size": 0}, "Expected `int` >= 1 - at `$.hidden_size`"),
        ({"vocab_size": 3.5}, "Expected `int`, got `float` - at `$.vocab_size`"),
        ({"num_attention_heads": 30}, "num_attention_heads 30 is not a multiple of "
         "num_key_value_heads 8"),
        ({"rotary_dim": 130}, "rotary_dim, or head_dim * partial_rotary_factor, is 130; it must be "
         "even, from 2 to head_dim 128"),
        ({"partial_rotary_factor": 0.0}, "rotary_dim, or head_dim * partial_rotary_factor, is 0; "
         "it must be even, from 2 to head_dim 128"),
        ({"attention_bias": True}, "attention_bias is true; only false is supported"),
        ({"mlp_bias": True}, "mlp_bias is true; only false is supported"),
        ({"use_sliding_window": True}, "use_sliding_window is true; only false is supported"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"; only "silu" is supported'),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "Object missing required field `weight_block_size` - at `$.quantization_config`",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 128]}},
            "weight_block_size is [1, 128]; only [128, 128] is supported - at "
            "`$.quantization_config`",
        ),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "Invalid enum value 'awq' - at `$.quantization_config.quant_method`",
        ),
        ({"rope_theta": ...}, "missing field rope_theta (or rope_parameters)"),
        ({"rope_scaling": "llama3"}, "Expected `object | null`, got `str` - at `$.rope_scaling`"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            "rope type is longrope; supported are default, llama3, yarn",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}},
            "Object missing required field `low_freq_factor` - at `$.rope_parameters`",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"]},
            "Object missing required field `head_dim`",
        ),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_named(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    raw = {**HUB_LLAMA, **change}
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, {key: value for key, value in raw.items() if value is not ...})
    assert str(caught.value) == f"{tmp_path / 'config.json'}: {said}"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null"])
def test_not_json_at_all(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"^\S+/config\.json: [A-Z].*") as caught:
        read_model_config(config_of(tmp_path))
    assert "\n" not in str(caught.value)


def test_no_config_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_model_config(config_of(tmp_path))
    assert str(caught.value) == f"cannot read {tmp_path / 'config.json'}: No such file or directory"


@pytest.mark.parametrize("asked, given", [("auto", 32), (1, 1), (32, 32)])
def test_the_first_layers_alone(asked: int | str, given: int, tmp_path: Path) -> None:
    read(tmp_path, HUB_LLAMA)
    config = config_of(tmp_path)
    recipe = replace(config.recipe, num_layers=asked)
    assert read_model_config(replace(config, recipe=recipe))[1].num_hidden_layers == given


@pytest.mark.parametrize("asked", [0, 33])
def test_layers_that_a_model_has_not(asked: int, tmp_path: Path) -> None:
    read(tmp_path, HUB_LLAMA)
    config = config_of(tmp_path)
    config = replace(config, recipe=replace(config.recipe, num_layers=asked))
    with pytest.raises(ConfigError) as caught:
        read_model_config(config)
    most = f"32, which {tmp_path}/config.json has"
    assert str(caught.value) == f"model.num_layers is {asked}; it must be between 1 and {most}"


R1 = json.loads((RECIPES / "configs" / "DeepSeek-R1.json").read_text())


def test_r1_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, R1)
    assert config.sizes == (7168, 128, 1536, 512, 128, 64, 128)
    assert (config.rotary_size, config.head_size) == (64, 128)
    rope = config.rope_parameters
    assert rope.amplitude == 1.0  # of cosines and sines, and yet scores are scaled
    assert config.score_scale == pytest.approx(192**-0.5 * 1.8738, rel=1e-4)
    lite = replace(rope, mscale=0.707, mscale_all_dim=0.707)
    assert lite.score_scale == pytest.approx(1.590, rel=1e-3)
    assert replace(rope, factor=1.0).score_scale == 1.0
    assert config.evenly_cut(1) == (
        "num_attention_heads",
        "intermediate_size",
        "moe_intermediate_size",
    )
    assert "n_routed_experts" in config.evenly_cut(8)
    plain = {**R1, "q_lora_rank": None, "n_shared_experts": None, "first_k_dense_replace": 0}
    lacking = read(tmp_path, plain)
    assert lacking.sizes.query_rank is None
    assert lacking.evenly_cut(8) == ("num_attention_heads", "n_routed_experts")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_key_value_heads": 64}, "num_key_value_heads is 64; it must be num_attention_heads, "
         "128, as each head makes its own"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63; it must be even"),
        ({"n_group": 7}, "num_experts_per_tok is 8, of topk_group 4 of n_group 7 equal groups, but "
         "n_routed_experts is 256"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok is 129, of topk_group 4 of n_group 8 "
         "equal groups, but n_routed_experts is 256"),
        ({"topk_group": 9}, "topk_group is 9; there are n_group 8"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2; only 1 is supported"),
        ({"scoring_func": "softmax"}, 'scoring_func is "softmax"; only "sigmoid" is supported'),
        ({"topk_method": "greedy"}, 'topk_method is "greedy"; only "noaux_tc" is supported'),
        ({"kv_lora_rank": ...}, "Object missing required field `kv_lora_rank`"),
    ],
)  # fmt: skip
def test_what_latent_attention_cannot_be(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    raw = {**R1, **change}
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, {key: value for key, value in raw.items() if value is not ...})
    assert str(caught.value) == f"{tmp_path / 'config.json'}: {said}"
