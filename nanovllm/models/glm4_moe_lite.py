"""GLM-4.7-Flash: latent attention, one dense layer, and experts without groups.

Source: transformers' Glm4MoeLiteForCausalLM. Its tensors have DeepSeek-V3's names.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from nanovllm.models.decoder import Count
from nanovllm.models.latent import LatentConfig, LatentDecoder


class Glm4MoeLiteConfig(LatentConfig, frozen=True, kw_only=True):
    q_lora_rank: Count | None = 768
    first_k_dense_replace: Annotated[int, Meta(ge=0)] = 1
    n_group: Count = 1
    topk_group: Count = 1
    routed_scaling_factor: float = 1.8


class Glm4MoeLite(LatentDecoder):
    Config = Glm4MoeLiteConfig
