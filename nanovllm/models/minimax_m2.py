"""MiniMax-M2: routed experts in all layers, selected by sigmoid scores plus a bias per expert.

Queries and keys are normalised over all heads together; a part of each head is rotated. Source:
transformers' MiniMaxM2ForCausalLM.
"""

from __future__ import annotations

from typing import ClassVar

from nanovllm_kernels.experts.route_reference import Routing

from nanovllm.layers.experts.moe import Mixture
from nanovllm.layers.linear import Layer
from nanovllm.layers.ops import Ops
from nanovllm.models.decoder import Block, Count, Decoder, DecoderConfig, Rule
from nanovllm.models.sparse import moe_of
from nanovllm.parallel.mesh import Mesh

SPARSE = "model.layers.{}.block_sparse_moe"


class MiniMaxM2Config(DecoderConfig, frozen=True, kw_only=True):
    """Config of MiniMax-M2. `intermediate_size` is that of one expert.

    The official config has fields for draft modules, but no checkpoint has these modules.
    """

    ONLY: ClassVar[dict[str, object]] = {
        **DecoderConfig.ONLY,
        "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "use_qk_norm": True,
        "use_routing_bias": True,
    }
    ROTATED = 1.0
    STEP_TOKENS = 16384  # larger: a step of any size reads nearly all experts

    head_dim: Count
    rotary_dim: Count | None = None  # used if there is no partial_rotary_factor
    num_local_experts: Count
    num_experts_per_tok: Count
    attn_type_list: tuple[int, ...] = ()  # by layer; 1: full causal attention

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_experts_per_tok > self.num_local_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} exceeds num_local_experts "
                f"{self.num_local_experts}"
            )
        if other := {*self.attn_type_list} - {1}:
            raise ValueError(f"attn_type_list has {min(other)}; only 1 is supported")

    @property
    def rotary_size(self) -> int:
        is_said = self.rope_parameters.partial_rotary_factor is not None
        return super().rotary_size if is_said else self.rotary_dim or self.head_dim

    def evenly_cut(self, ep: int) -> tuple[str, ...]:
        return "num_attention_heads", "num_local_experts" if ep > 1 else "intermediate_size"


class MiniMaxM2Block(Block):
    """Attention, then routed experts."""

    def mlp_of(self, config: DecoderConfig, layer: int, mesh: Mesh, ops: Ops) -> Layer:
        assert isinstance(config, MiniMaxM2Config)
        mixture = Mixture(
            hidden_size=config.hidden_size,
            experts=("num_local_experts", config.num_local_experts),
            inner=("intermediate_size", config.intermediate_size),
            num_chosen=config.num_experts_per_tok,
            rule=Routing("sigmoid", renormalise=True),
            exact=True,
        )
        return moe_of(mixture, config, layer=layer, mesh=mesh, ops=ops)


class MiniMaxM2(Decoder):
    Config = MiniMaxM2Config
    Block = MiniMaxM2Block
    qk_norm = "row"
    WEIGHTS: ClassVar[tuple[Rule, ...]] = (
        *Decoder.WEIGHTS,
        ("model.layers.{}.self_attn.q_norm.weight", "layers.{}.attn.q_norm"),
        ("model.layers.{}.self_attn.k_norm.weight", "layers.{}.attn.k_norm"),
        ("model.layers.{}.post_attention_layernorm.weight", "layers.{}.mlp.norm_weight"),
        (f"{SPARSE}.gate.weight", "layers.{}.mlp.router.weight"),
        (f"{SPARSE}.e_score_correction_bias", "layers.{}.mlp.bias"),
        (f"{SPARSE}.experts.{{}}.w1.weight", "layers.{}.mlp.experts.gate_up", "gate"),
        (f"{SPARSE}.experts.{{}}.w3.weight", "layers.{}.mlp.experts.gate_up", "up"),
        (f"{SPARSE}.experts.{{}}.w2.weight", "layers.{}.mlp.experts.down"),
    )
