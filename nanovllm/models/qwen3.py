"""Qwen3, dense (0.6B to 32B): every query and key head is RMS-normalised before the rotation."""

from __future__ import annotations

from typing import ClassVar

from nanovllm.layers.ops import Ops
from nanovllm.models.decoder import Block, Count, Decoder, DecoderConfig, Rule
from nanovllm.parallel.mesh import Mesh


class Qwen3Config(DecoderConfig, frozen=True, kw_only=True):
    head_dim: Count  # never hidden_size / num_attention_heads by default


class Qwen3(Decoder):
    Config = Qwen3Config
    WEIGHTS: ClassVar[tuple[Rule, ...]] = (
        *Decoder.WEIGHTS,
        ("model.layers.{}.self_attn.q_norm.weight", "layers.{}.attn.q_norm"),
        ("model.layers.{}.self_attn.k_norm.weight", "layers.{}.attn.k_norm"),
    )

    @staticmethod
    def block(config: DecoderConfig, layer: int, mesh: Mesh, ops: Ops) -> Block:
        return Block(config, layer, mesh, ops, qk_norm="head")
