"""Qwen3, dense (0.6B to 32B): RMS norm of each query and key head before the rotation.

Source: transformers' Qwen3ForCausalLM.
"""

from __future__ import annotations

from typing import ClassVar

from nanovllm.models.decoder import Count, Decoder, DecoderConfig, Rule


class Qwen3Config(DecoderConfig, frozen=True, kw_only=True):
    head_dim: Count  # required; there is no default


class Qwen3(Decoder):
    Config = Qwen3Config
    qk_norm = "head"
    WEIGHTS: ClassVar[tuple[Rule, ...]] = (
        *Decoder.WEIGHTS,
        ("model.layers.{}.self_attn.q_norm.weight", "layers.{}.attn.q_norm"),
        ("model.layers.{}.self_attn.k_norm.weight", "layers.{}.attn.k_norm"),
    )
