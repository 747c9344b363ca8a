"""Llama 3.1 and its distillations (R1-Distill-Llama); transformers' LlamaForCausalLM.

Its rope scaling is in layers/stretched_rope.py.
"""

from __future__ import annotations

from nanovllm.models.decoder import Decoder, DecoderConfig


class Llama(Decoder):
    Config = DecoderConfig
