"""Qwen3.5 and 3.6, text only: hybrid layers, with a tensor for each projection of gated DeltaNet.

Dense models (0.8B to 27B) have a plain MLP in each layer; others (35B-A3B, 122B-A10B, 397B-A17B)
have experts in each. Tensors of the image encoder are left out. The position of a text token is the
same in all three parts of the rotary embedding (`mrope_section`), which is then the plain one.
Sources: transformers' Qwen3_5ForCausalLM and Qwen3_5MoeForCausalLM.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from nanovllm.models.decoder import Count, DecoderConfig, MtpSpec, Rule
from nanovllm.models.hybrid import DELTA, Hybrid, HybridConfig


class SplitConfig(HybridConfig, frozen=True, kw_only=True):
    """Fields of both kinds of models. Of transformers' names, experts have only `num_experts`."""

    ONLY: ClassVar[dict[str, object]] = {**DecoderConfig.ONLY, "attn_output_gate": True}
    GROUPED = False

    mtp_num_hidden_layers: Annotated[int, Meta(ge=0)] = 1  # layers of MTP in the checkpoint

    def mtp(self) -> MtpSpec | None:
        """Return the MTP module, or None if there is none."""
        return super().mtp() if self.mtp_num_hidden_layers else None


class Qwen35MoeConfig(SplitConfig, frozen=True, kw_only=True):
    """Config of models with experts. transformers has no `norm_topk_prob`: it is always true."""

    ONLY: ClassVar[dict[str, object]] = {**SplitConfig.ONLY, "norm_topk_prob": True}

    intermediate_size: Count = 1  # unused, and usually absent, since no layer has a plain MLP

    def is_dense(self, layer: int) -> bool:
        return False


class Qwen35Config(SplitConfig, frozen=True, kw_only=True):
    """Config of dense models. Fields of experts are absent, and their defaults are unused."""

    STEP_TOKENS = DecoderConfig.STEP_TOKENS

    num_experts: Count | None = 1
    num_experts_per_tok: Count = 1
    moe_intermediate_size: Count = 1
    shared_expert_intermediate_size: Count = 1

    def is_dense(self, layer: int) -> bool:
        return True

    def evenly_cut(self, ep: int) -> tuple[str, ...]:
        return "num_attention_heads", "intermediate_size", "linear_num_key_heads"


class Qwen35(Hybrid):
    Config: ClassVar[type[DecoderConfig]] = Qwen35Config
    WEIGHTS: ClassVar[tuple[Rule, ...]] = (
        *Hybrid.WEIGHTS,
        (f"{DELTA}.in_proj_qkv.weight", "layers.{}.attn.qkvzba.weight", "qkv"),
        (f"{DELTA}.in_proj_z.weight", "layers.{}.attn.qkvzba.weight", "z"),
        (f"{DELTA}.in_proj_b.weight", "layers.{}.attn.qkvzba.weight", "b"),
        (f"{DELTA}.in_proj_a.weight", "layers.{}.attn.qkvzba.weight", "a"),
        (f"{DELTA}.in_proj_qkv.weight", "layers.{}.attn.qkvz.weight", "qkv"),
        (f"{DELTA}.in_proj_z.weight", "layers.{}.attn.qkvz.weight", "z"),
        (f"{DELTA}.in_proj_b.weight", "layers.{}.attn.ba.weight", "b"),
        (f"{DELTA}.in_proj_a.weight", "layers.{}.attn.ba.weight", "a"),
    )


class Qwen35Moe(Qwen35):
    Config = Qwen35MoeConfig
