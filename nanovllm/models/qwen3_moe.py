"""Qwen3-MoE (30B-A3B, 235B-A22B): Qwen3 with routed experts in place of all or some MLPs.

Source: transformers' Qwen3MoeForCausalLM.
"""

from __future__ import annotations

from nanovllm.models.decoder import Decoder
from nanovllm.models.sparse import WEIGHTS, SparseBlock, SparseConfig


class Qwen3Moe(Decoder):
    Config = SparseConfig
    Block = SparseBlock
    qk_norm = "head"
    WEIGHTS = WEIGHTS
