"""Qwen3, dense (0.6B to 32B): every query and key head is RMS-normalised before the rotation."""

from __future__ import annotations

from typing import ClassVar

from nanovllm.models.decoder import Count, Decoder, DecoderConfig, Rule


class Qwen3Config(DecoderConfig, frozen=True, kw_only=True):
    head_dim: Count  # never hidden_size / num_attention_heads by default


class Qwen3(Decoder):
    Config = Qwen3Config
    qk_norm = "head"
    WEIGHTS: ClassVar[tuple[Rule, ...]] = (
        *Decoder.WEIGHTS,
        ("model.layers.{}.self_attn.q_norm.weight", "layers.{}.attn.q_norm"),
        ("model.layers.{}.self_attn.k_norm.weight", "layers.{}.attn.k_norm"),
    )
