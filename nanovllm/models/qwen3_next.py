"""Qwen3-Next (80B-A3B): hybrid layers with routed experts and a gated shared one.

Projections of gated DeltaNet are two tensors. Source: transformers' Qwen3NextForCausalLM.
"""

from __future__ import annotations

from typing import ClassVar

from nanovllm.models.decoder import Rule
from nanovllm.models.hybrid import DELTA, Hybrid, HybridConfig


class Qwen3NextConfig(HybridConfig, frozen=True, kw_only=True):
    GROUPED = True


class Qwen3Next(Hybrid):
    Config = Qwen3NextConfig
    WEIGHTS: ClassVar[tuple[Rule, ...]] = (
        *Hybrid.WEIGHTS,
        (f"{DELTA}.in_proj_qkvz.weight", "layers.{}.attn.qkvzba.weight", "qkvz"),
        (f"{DELTA}.in_proj_ba.weight", "layers.{}.attn.qkvzba.weight", "ba"),
        (f"{DELTA}.in_proj_qkvz.weight", "layers.{}.attn.qkvz.weight", "qkvz"),
        (f"{DELTA}.in_proj_ba.weight", "layers.{}.attn.ba.weight", "ba"),
    )
