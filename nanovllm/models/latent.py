"""Base of families with latent attention: dense layers, then grouped routed and shared experts.

The layer after the last one, which predicts further tokens (MTP), is a draft head: models/mtp.py.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta
from msgspec.structs import replace
from nanovllm_kernels.attention.latent_reference import row_size
from nanovllm_kernels.experts.route_reference import Routing

from nanovllm.config import ConfigError
from nanovllm.kv.layout import CacheLayout, PagedGroup
from nanovllm.layers.attention import QKNorm
from nanovllm.layers.experts.moe import Mixture
from nanovllm.layers.experts.shared import shared_rules
from nanovllm.layers.latent_attention import LatentAttention, LatentSizes
from nanovllm.layers.linear import Layer
from nanovllm.layers.ops import Ops
from nanovllm.layers.stretched_rope import YarnRope
from nanovllm.models.decoder import Block, Count, Decoder, DecoderConfig, MtpSpec, Rule
from nanovllm.models.sparse import moe_of
from nanovllm.parallel.mesh import Mesh

ATTENTION, MLPS = "model.layers.{}.self_attn", "model.layers.{}.mlp"


class LatentConfig(DecoderConfig, frozen=True, kw_only=True):
    ONLY: ClassVar[dict[str, object]] = {
        **DecoderConfig.ONLY,
        "moe_layer_freq": 1,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    STEP_TOKENS = 16384  # larger: a step of any size reads nearly all experts

    q_lora_rank: Count | None  # defaults are those of transformers, here and in the families
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count
    first_k_dense_replace: Annotated[int, Meta(ge=0)]  # number of layers with a plain MLP
    mlp_layer_types: tuple[Literal["dense", "sparse"], ...] | None = None  # takes precedence
    n_routed_experts: Count
    num_experts_per_tok: Count
    moe_intermediate_size: Count
    n_shared_experts: Annotated[int, Meta(ge=0, le=1024)] | None = 1
    n_group: Count
    topk_group: Count
    norm_topk_prob: bool = True
    routed_scaling_factor: float
    num_nextn_predict_layers: Annotated[int, Meta(ge=0)] = 1  # layers of MTP in the checkpoint

    def __post_init__(self) -> None:
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                f"num_key_value_heads is {self.num_key_value_heads}; it must be "
                f"num_attention_heads, {self.num_attention_heads}, since each head has its own "
                "keys and values"
            )
        if (rotated := self.qk_rope_head_dim) % 2:
            raise ValueError(f"qk_rope_head_dim is {rotated}; it must be even")
        if self.head_dim not in (None, rotated):
            raise ValueError(f"head_dim is {self.head_dim}; it must be qk_rope_head_dim, {rotated}")
        if (factor := self.rope_parameters.partial_rotary_factor) not in (None, 1):
            raise ValueError(f"partial_rotary_factor is {factor}; only 1 is supported")
        types = self.mlp_layer_types
        if types is not None and len(types) < self.num_hidden_layers:
            raise ValueError(
                f"mlp_layer_types names {len(types)} of {self.num_hidden_layers} layers"
            )
        if self.topk_group > self.n_group:
            raise ValueError(f"topk_group is {self.topk_group}; there are n_group {self.n_group}")
        most = self.n_routed_experts // self.n_group * self.topk_group
        if self.n_routed_experts % self.n_group or self.num_experts_per_tok > most:
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_tok}, of topk_group "
                f"{self.topk_group} of n_group {self.n_group} equal groups, but n_routed_experts "
                f"is {self.n_routed_experts}"
            )

    @property
    def head_size(self) -> int:
        """Elements of a head's result, which are the inputs of o."""
        return self.v_head_dim

    def key_value_size(self, *, decodes: bool) -> int:
        """Return the elements per head. In decode steps, latents serve as keys and values."""
        if decodes:
            return 2 * self.kv_lora_rank + self.qk_rope_head_dim
        return self.qk_nope_head_dim + self.v_head_dim + self.qk_rope_head_dim

    @property
    def rotary_size(self) -> int:
        return self.qk_rope_head_dim

    @property
    def sizes(self) -> LatentSizes:
        return LatentSizes(
            hidden=self.hidden_size,
            heads=self.num_attention_heads,
            query_rank=self.q_lora_rank,
            rank=self.kv_lora_rank,
            key=self.qk_nope_head_dim,
            rotated=self.qk_rope_head_dim,
            value=self.v_head_dim,
        )

    @property
    def score_scale(self) -> float:
        rope, size = self.rope_parameters, self.qk_nope_head_dim + self.qk_rope_head_dim
        return float(size**-0.5 * (rope.score_scale if isinstance(rope, YarnRope) else 1.0))

    def mtp(self) -> MtpSpec | None:
        """Return the first layer after the checkpoint's last one. It always has experts."""
        if not self.num_nextn_predict_layers:
            return None
        name = f"model.layers.{self.checkpoint_layers or self.num_hidden_layers}"
        return MtpSpec(
            config=replace(
                self,
                num_hidden_layers=self.num_hidden_layers + 1,
                first_k_dense_replace=0,
                mlp_layer_types=None,
            ),
            prefix=f"{name}.",
            block=name,
            norms=(
                f"{name}.enorm.weight",
                f"{name}.hnorm.weight",
                f"{name}.shared_head.norm.weight",
            ),
            proj=f"{name}.eh_proj.weight",
            copies=(f"{name}.embed_tokens.weight", f"{name}.shared_head.head.weight"),
        )

    def is_dense(self, layer: int) -> bool:
        """Return True if the layer has a plain MLP."""
        if self.mlp_layer_types is not None:
            return self.mlp_layer_types[layer] == "dense"
        return layer < self.first_k_dense_replace

    def evenly_cut(self, ep: int) -> tuple[str, ...]:
        fields = ["num_attention_heads"]
        if any(map(self.is_dense, range(self.num_hidden_layers))):
            fields.append("intermediate_size")
        if ep > 1:
            fields.append("n_routed_experts")
        if ep == 1 or self.n_shared_experts:
            fields.append("moe_intermediate_size")
        return tuple(fields)


class LatentBlock(Block):
    """Latent attention, then an MLP or routed and shared experts."""

    def attn_of(
        self, config: DecoderConfig, layer: int, mesh: Mesh, ops: Ops, *, qk_norm: QKNorm
    ) -> Layer:
        assert isinstance(config, LatentConfig)
        return LatentAttention(
            config.sizes,
            eps=config.rms_norm_eps,
            scale=config.score_scale,
            is_last=layer + 1 == config.num_hidden_layers,
            mesh=mesh,
            ops=ops,
        )

    def mlp_of(self, config: DecoderConfig, layer: int, mesh: Mesh, ops: Ops) -> Layer:
        assert isinstance(config, LatentConfig)
        if config.is_dense(layer):
            return super().mlp_of(config, layer, mesh, ops)
        inner = config.moe_intermediate_size
        mixture = Mixture(
            hidden_size=config.hidden_size,
            experts=("n_routed_experts", config.n_routed_experts),
            inner=("moe_intermediate_size", inner),
            num_chosen=config.num_experts_per_tok,
            rule=Routing(
                score="sigmoid",
                renormalise=config.norm_topk_prob,
                scale=config.routed_scaling_factor,
                num_groups=config.n_group,
                chosen_groups=config.topk_group,
            ),
            exact=True,
            shared=inner * (config.n_shared_experts or 0),
        )
        return moe_of(mixture, config, layer=layer, mesh=mesh, ops=ops)


class LatentDecoder(Decoder):
    Block = LatentBlock
    WEIGHTS: ClassVar[tuple[Rule, ...]] = (
        *(rule for rule in Decoder.WEIGHTS if rule[2:] not in (("k",), ("v",))),
        (f"{ATTENTION}.kv_a_proj_with_mqa.weight", "layers.{}.attn.qkv.weight", "kv"),
        ("model.layers.{}.input_layernorm.weight", "layers.{}.attn.latents.norm_weight"),
        (f"{ATTENTION}.q_a_proj.weight", "layers.{}.attn.latents.weight", "q"),
        (f"{ATTENTION}.kv_a_proj_with_mqa.weight", "layers.{}.attn.latents.weight", "kv"),
        (f"{ATTENTION}.q_a_layernorm.weight", "layers.{}.attn.q_b.norm_weight"),
        (f"{ATTENTION}.q_b_proj.weight", "layers.{}.attn.q_b.weight"),
        (f"{ATTENTION}.kv_a_layernorm.weight", "layers.{}.attn.kv_norm"),
        (f"{ATTENTION}.kv_b_proj.weight", "layers.{}.attn.kv_b.weight"),
        ("model.layers.{}.post_attention_layernorm.weight", "layers.{}.mlp.norm_weight"),
        (f"{MLPS}.gate.weight", "layers.{}.mlp.router.weight"),
        (f"{MLPS}.gate.e_score_correction_bias", "layers.{}.mlp.bias"),
        *shared_rules(f"{MLPS}.shared_experts"),
        (f"{MLPS}.experts.{{}}.gate_proj.weight", "layers.{}.mlp.experts.gate_up", "gate"),
        (f"{MLPS}.experts.{{}}.up_proj.weight", "layers.{}.mlp.experts.gate_up", "up"),
        (f"{MLPS}.experts.{{}}.down_proj.weight", "layers.{}.mlp.experts.down"),
    )

    @staticmethod
    def cache_layout(config: DecoderConfig, mesh: Mesh, dtype_bytes: int) -> CacheLayout:
        """Return a layout with one head of latents, the same on every rank, and no values."""
        assert isinstance(config, LatentConfig)
        rank, rotated = config.kv_lora_rank, config.qk_rope_head_dim
        if dtype_bytes == 1 and (rank % 4 or rotated % 2):
            raise ConfigError(f"cache.dtype is fp8, but kv_lora_rank is {rank}; use auto")
        group = PagedGroup(
            layers=tuple(range(config.num_hidden_layers)),
            num_heads=1,
            k_size=row_size(rank, rotated, is_fp8=dtype_bytes == 1),
            v_size=0,
            bytes_per_element=dtype_bytes,
            kind="latent",
        )
        return CacheLayout(paged=(group,))
