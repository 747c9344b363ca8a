"""Tiny checkpoints with large random weights, written and computed by transformers.

A new transformers model hides errors: norm gains are 1 and attention is nearly uniform, so dropping
a third of its tensors changes no logit. With large weights each tensor matters.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from nanovllm.config import Config, Load, Recipe

COMMON = dict(
    vocab_size=200,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    bos_token_id=None,
    eos_token_id=None,  # generate() runs to its max_new_tokens
)
LLAMA3_ROPE = dict(  # the original context is short, so scaling affects the first tokens
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
EXPERTS = dict(num_experts=5, num_experts_per_tok=3, moe_intermediate_size=20)
M2 = dict(num_local_experts=6, num_experts_per_tok=2, intermediate_size=20, rotary_dim=8)
YARN = dict(  # scaling affects the first tokens
    rope_type="yarn",
    rope_theta=10000.0,
    factor=40.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    beta_fast=32,
    beta_slow=1,
    original_max_position_embeddings=16,
)
V3 = dict(
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=20,
    n_shared_experts=1,
    n_group=4,
    topk_group=2,
    first_k_dense_replace=1,
    num_key_value_heads=4,
    head_dim=8,  # in transformers, of the rotated part
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
)
HYBRID = dict(
    num_hidden_layers=4,
    # A smaller value amplifies noise of first tokens, whose states are nearly zero.
    rms_norm_eps=1e-2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25),
)
NEXT = dict(HYBRID, **EXPERTS, shared_expert_intermediate_size=28)
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3 gqa 1, head_dim 24": ("qwen3", dict(num_key_value_heads=4, head_dim=24)),
    "qwen3 gqa 3, tied": (
        "qwen3",
        dict(num_attention_heads=6, head_dim=8, tie_word_embeddings=True),
    ),
    "qwen3 gqa 8": ("qwen3", dict(num_attention_heads=8, num_key_value_heads=1)),
    "llama": ("llama", {}),
    "llama gqa 1, tied": ("llama", dict(num_key_value_heads=4, tie_word_embeddings=True)),
    "llama gqa 3, head_dim 8": (
        "llama",
        dict(hidden_size=96, num_attention_heads=6, head_dim=8),
    ),
    "llama gqa 8, head_dim 24": (
        "llama",
        dict(num_attention_heads=8, num_key_value_heads=1, head_dim=24),
    ),
    "qwen3_moe": ("qwen3_moe", dict(EXPERTS, norm_topk_prob=True)),
    "qwen3_moe 13, top 8, tied": (
        "qwen3_moe",
        dict(EXPERTS, num_experts=13, num_experts_per_tok=8, tie_word_embeddings=True),
    ),
    "qwen3_moe 7, top 1, dense between": (
        "qwen3_moe",
        dict(EXPERTS, num_experts=7, num_experts_per_tok=1, num_hidden_layers=4)
        | dict(decoder_sparse_step=2, mlp_only_layers=[3]),
    ),
    "minimax_m2": ("minimax_m2", dict(M2)),
    "minimax_m2 13, top 8, tied": (
        "minimax_m2",
        dict(M2, num_local_experts=13, num_experts_per_tok=8, tie_word_embeddings=True)
        | dict(num_attention_heads=6, head_dim=24, rotary_dim=12),
    ),
    "minimax_m2 5, top 1": (
        "minimax_m2",
        dict(M2, num_local_experts=5, num_experts_per_tok=1, num_key_value_heads=4),
    ),
    "deepseek_v3": ("deepseek_v3", dict(V3, rope_parameters=YARN)),
    "deepseek_v3 tied": (
        "deepseek_v3",
        dict(V3, rope_parameters=YARN, tie_word_embeddings=True, qk_nope_head_dim=8, v_head_dim=16),
    ),
    "deepseek_v3 q plain, dense 3, yarn 1": (
        "deepseek_v3",
        dict(V3, q_lora_rank=None, num_hidden_layers=4, first_k_dense_replace=3)
        | dict(rope_parameters=dict(YARN, factor=1.0)),
    ),
    "deepseek_v3 2 shared, dense 2, one group, plain rope": (
        "deepseek_v3",
        dict(V3, n_shared_experts=2, num_hidden_layers=3, first_k_dense_replace=2, n_group=1)
        | dict(topk_group=1, norm_topk_prob=False, num_experts_per_tok=4, qk_nope_head_dim=10),
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        dict(V3, n_group=1, topk_group=1, rope_parameters=None, v_head_dim=20),
    ),
    "glm4_moe_lite 5, top 2, dense 2, tied": (
        "glm4_moe_lite",
        dict(V3, n_group=1, topk_group=1, n_routed_experts=5, num_experts_per_tok=2)
        | dict(mlp_layer_types=["dense", "sparse", "dense"], num_hidden_layers=3)
        | dict(tie_word_embeddings=True, qk_nope_head_dim=24, rms_norm_eps=1e-5),
    ),
    "qwen3_next": ("qwen3_next", dict(NEXT)),
    "qwen3_next 4 values a key, tied": (
        "qwen3_next",
        dict(NEXT, linear_num_value_heads=8, tie_word_embeddings=True, full_attention_interval=2),
    ),
    "qwen3_next that repeats itself": (  # since little is added to the embedding
        "qwen3_next",
        dict(NEXT, num_hidden_layers=2, full_attention_interval=2, tie_word_embeddings=True)
        | dict(linear_num_value_heads=2, linear_value_head_dim=4, moe_intermediate_size=4)
        | dict(shared_expert_intermediate_size=4),
    ),
    "qwen3_next 3 values a key, 3 layers a period, top 1": (
        "qwen3_next",
        dict(NEXT, linear_num_key_heads=1, linear_num_value_heads=3, full_attention_interval=3)
        | dict(num_experts_per_tok=1, linear_conv_kernel_dim=3, num_hidden_layers=7)
        | dict(
            rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
        ),
    ),
    "qwen3_next 1 value a key, dense between": (
        "qwen3_next",
        dict(NEXT, linear_num_key_heads=4, mlp_only_layers=[1], linear_key_head_dim=16),
    ),
    "qwen3_5_text": ("qwen3_5_text", dict(HYBRID)),
    "qwen3_5_text 3 values a key, tied": (
        "qwen3_5_text",
        dict(HYBRID, linear_num_value_heads=6, tie_word_embeddings=True, head_dim=24)
        | dict(num_hidden_layers=3, layer_types=["full_attention", *["linear_attention"] * 2])
        | dict(intermediate_size=100, linear_conv_kernel_dim=3),
    ),
    "qwen3_5_text that repeats itself": (
        "qwen3_5_text",
        dict(HYBRID, num_hidden_layers=2, full_attention_interval=2, tie_word_embeddings=True)
        | dict(linear_num_value_heads=2, linear_value_head_dim=4, intermediate_size=4),
    ),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", dict(NEXT)),
    "qwen3_5_moe_text 13, top 8, shared as wide": (
        "qwen3_5_moe_text",
        dict(NEXT, num_experts=13, num_experts_per_tok=8, linear_num_value_heads=2)
        | dict(shared_expert_intermediate_size=20, num_hidden_layers=2, full_attention_interval=2),
    ),
    "llama llama3 rope": ("llama", dict(rope_parameters=LLAMA3_ROPE)),
}
TOLD = (
    "qwen3 gqa 3, tied",
    "qwen3_moe",
    "minimax_m2",
    "deepseek_v3 tied",
    "qwen3_next that repeats itself",
)  # used for texts of whole engines


def make_tiny(
    folder: Path, family: str, *, max_shard_size: str = "1GB", **overrides: object
) -> PreTrainedModel:
    """Save a seeded random checkpoint of the family in `folder`. Return the float32 model."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**COMMON, **overrides})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    make_loud(model)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def make_loud(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
        else:
            nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)


def config_of(folder: Path, load: Load = Load()) -> Config:
    """Return the same Config as load_config for a recipe with this folder."""
    return Config(
        recipe=Recipe(model=str(folder), device="cpu", load=load),
        source="test",
        changed={},
        model_dir=str(folder),
        config_path=str(folder / "config.json"),
        tokenizer_dir=str(folder),
        served_name="tiny",
    )
