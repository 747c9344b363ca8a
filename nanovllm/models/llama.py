"""Llama 3.1 and its distillations (R1-Distill-Llama). Its rope scaling stands in layers/rope.py."""

from __future__ import annotations

from nanovllm.layers.ops import Ops
from nanovllm.models.decoder import Block, Decoder, DecoderConfig
from nanovllm.parallel.mesh import Mesh


class Llama(Decoder):
    Config = DecoderConfig

    @staticmethod
    def block(config: DecoderConfig, layer: int, mesh: Mesh, ops: Ops) -> Block:
        return Block(config, layer, mesh, ops, qk_norm="none")
