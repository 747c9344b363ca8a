"""DeepSeek-V3, V3.1 and R1: latent attention, and experts in groups.

Source: transformers' DeepseekV3ForCausalLM.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from nanovllm.models.decoder import Count
from nanovllm.models.latent import LatentConfig, LatentDecoder


class DeepseekV3Config(LatentConfig, frozen=True, kw_only=True):
    q_lora_rank: Count | None = 1536
    first_k_dense_replace: Annotated[int, Meta(ge=0)] = 3
    n_group: Count = 8
    topk_group: Count = 4
    routed_scaling_factor: float = 2.5


class DeepseekV3(LatentDecoder):
    Config = DeepseekV3Config
