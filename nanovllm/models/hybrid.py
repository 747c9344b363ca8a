"""Base of Qwen's hybrid families: gated DeltaNet layers, and gated attention in every fourth layer.

Experts, if there are any, have a gated shared one next to them. Norm weights are stored as
weight - 1. The module that predicts further tokens (MTP) is a draft head: models/mtp.py.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec.structs import replace

from nanovllm.config import ConfigError
from nanovllm.kv.layout import CacheLayout, StateGroup
from nanovllm.layers.attention import QKNorm
from nanovllm.layers.experts.shared import shared_rules
from nanovllm.layers.gated_attention import GatedAttention
from nanovllm.layers.gated_delta import DeltaSizes, GatedDeltaNet
from nanovllm.layers.linear import Layer
from nanovllm.layers.ops import Ops
from nanovllm.models.decoder import Count, Decoder, DecoderConfig, MtpSpec, Rule
from nanovllm.models.sparse import WEIGHTS, SparseBlock, SparseConfig
from nanovllm.parallel.mesh import Mesh

DELTA, SHARED = "model.layers.{}.linear_attn", "model.layers.{}.mlp.shared_expert"


class HybridConfig(SparseConfig, frozen=True, kw_only=True):
    ROTATED = 0.25
    GROUPED: ClassVar[bool]  # see DeltaSizes

    norm_topk_prob: bool = True
    linear_conv_kernel_dim: Count
    linear_key_head_dim: Count
    linear_value_head_dim: Count
    linear_num_key_heads: Count
    linear_num_value_heads: Count
    shared_expert_intermediate_size: Count
    full_attention_interval: Count = 4
    layer_types: tuple[str, ...] | None = None  # used by transformers instead of the interval

    def __post_init__(self) -> None:
        super().__post_init__()
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if values % keys:
            raise ValueError(
                f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}"
            )
        types = self.layer_types
        if types is not None and len(types) < self.num_hidden_layers:
            raise ValueError(f"layer_types names {len(types)} of {self.num_hidden_layers} layers")
        if other := {*(types or ())} - {"full_attention", "linear_attention"}:
            raise ValueError(f"layer_types has {min(other)}")

    def attends(self, layer: int) -> bool:
        """Return True if the layer is attention over pages, False if it is gated DeltaNet."""
        if self.layer_types is not None:
            return self.layer_types[layer] == "full_attention"
        return (layer + 1) % self.full_attention_interval == 0

    def mtp(self) -> MtpSpec | None:
        """Return the MTP module. Its layer has full attention and experts."""
        count = self.num_hidden_layers + 1
        norms = r"pre_fc_norm_\w+|norm|layers\.0\.(\w+_layernorm|self_attn\.[qk]_norm)"
        return MtpSpec(
            config=replace(
                self,
                num_hidden_layers=count,
                layer_types=("full_attention",) * count,
                mlp_only_layers=(),
                decoder_sparse_step=1,
            ),
            prefix="mtp.",
            block="mtp.layers.0",
            norms=(
                "mtp.pre_fc_norm_embedding.weight",
                "mtp.pre_fc_norm_hidden.weight",
                "mtp.norm.weight",
            ),
            proj="mtp.fc.weight",
            less_one=rf"mtp\.({norms})\.weight",
        )

    @property
    def shared_size(self) -> int:
        return self.shared_expert_intermediate_size

    @property
    def sizes(self) -> DeltaSizes:
        return DeltaSizes(
            hidden=self.hidden_size,
            key_heads=self.linear_num_key_heads,
            value_heads=self.linear_num_value_heads,
            key=self.linear_key_head_dim,
            value=self.linear_value_head_dim,
            taps=self.linear_conv_kernel_dim,
            grouped=self.GROUPED,
        )

    def evenly_cut(self, ep: int) -> tuple[str, ...]:
        return *super().evenly_cut(ep), "linear_num_key_heads", "shared_expert_intermediate_size"

    def inputs_of(self, name: str) -> int:
        if name == "linear_num_key_heads":
            return self.sizes.each * self.linear_value_head_dim
        return super().inputs_of(name)


class HybridBlock(SparseBlock):
    """Gated DeltaNet or gated attention, then routed experts and a shared one."""

    Attention = GatedAttention

    def attn_of(
        self, config: DecoderConfig, layer: int, mesh: Mesh, ops: Ops, *, qk_norm: QKNorm
    ) -> Layer:
        assert isinstance(config, HybridConfig)
        if config.attends(layer):
            return super().attn_of(config, layer, mesh, ops, qk_norm=qk_norm)
        return GatedDeltaNet(
            config.sizes,
            eps=config.rms_norm_eps,
            is_last=layer + 1 == config.num_hidden_layers,
            is_one=config.quantization_config is None,
            mesh=mesh,
            ops=ops,
        )


class Hybrid(Decoder):
    Block = HybridBlock
    qk_norm = "head"
    LESS_ONE = r"model\.(layers\.\d+\.(\w+_layernorm|self_attn\.[qk]_norm)|norm)\.weight"
    WEIGHTS: ClassVar[tuple[Rule, ...]] = (
        *WEIGHTS,
        ("model.layers.{}.input_layernorm.weight", "layers.{}.attn.qkvzba.norm_weight"),
        ("model.layers.{}.input_layernorm.weight", "layers.{}.attn.qkvz.norm_weight"),
        (f"{DELTA}.conv1d.weight", "layers.{}.attn.conv"),
        (f"{DELTA}.A_log", "layers.{}.attn.a_log"),
        (f"{DELTA}.dt_bias", "layers.{}.attn.dt_bias"),
        (f"{DELTA}.norm.weight", "layers.{}.attn.norm"),
        (f"{DELTA}.out_proj.weight", "layers.{}.attn.out_proj.weight"),
        *shared_rules(SHARED),
        (f"{SHARED}_gate.weight", "layers.{}.mlp.router.weight", "shared"),
    )

    @staticmethod
    def cache_layout(config: DecoderConfig, mesh: Mesh, dtype_bytes: int) -> CacheLayout:
        """Return pages for attention layers and states for the others.

        Raise ConfigError if there are no attention layers.
        """
        assert isinstance(config, HybridConfig)
        everything = Decoder.cache_layout(config, mesh, dtype_bytes).paged[0]
        layers = tuple(layer for layer in everything.layers if config.attends(layer))
        if not layers:
            count = config.num_hidden_layers
            raise ConfigError(
                f"the first {count} layers have no attention layer; raise model.num_layers"
            )
        others = tuple(layer for layer in everything.layers if not config.attends(layer))
        sizes = config.sizes
        keys = mesh.span("linear_num_key_heads", config.linear_num_key_heads)
        states = StateGroup(
            layers=others,
            channels=sum(span.count for span in sizes.channels(keys)),
            taps=sizes.taps - 1,
            heads=keys.count * sizes.each,
            key_size=sizes.key,
            value_size=sizes.value,
            bytes_per_element=max(dtype_bytes, 2),  # never fp8, also with an fp8 cache
        )
        return CacheLayout((replace(everything, layers=layers),), states if others else None)
