"""Base of Qwen's families with routed experts in place of all or some MLPs."""

from __future__ import annotations

from nanovllm_kernels.experts.route_reference import Routing

from nanovllm.layers.experts.moe import Mixture, MoE
from nanovllm.layers.linear import Layer
from nanovllm.layers.ops import Ops
from nanovllm.models.decoder import Block, Count, Decoder, DecoderConfig, Rule
from nanovllm.parallel.mesh import Mesh

EXPERT = "model.layers.{}.mlp.experts.{}"


class SparseConfig(DecoderConfig, frozen=True, kw_only=True):
    STEP_TOKENS = 16384  # larger: a step of any size reads nearly all experts

    head_dim: Count
    num_experts: Count | None = None
    num_local_experts: Count | None = None  # transformers' name for num_experts
    num_experts_per_tok: Count
    moe_intermediate_size: Count
    norm_topk_prob: bool = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({self.num_experts, self.num_local_experts} - {None}) != 1:
            raise ValueError(
                "num_experts or num_local_experts must be given; if both are, they must be equal"
            )
        if self.num_experts_per_tok > self.experts[1]:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} exceeds num_experts "
                f"{self.experts[1]}"
            )

    @property
    def experts(self) -> tuple[str, int]:
        """The field with the number of experts, and the number."""
        if self.num_experts is not None:
            return "num_experts", self.num_experts
        return "num_local_experts", self.num_local_experts or 0

    @property
    def shared_size(self) -> int:
        """Inner size of the gated shared expert; 0 without one."""
        return 0

    def is_dense(self, layer: int) -> bool:
        """Return True if the layer has a plain MLP."""
        return layer in (self.mlp_only_layers or ()) or (layer + 1) % self.decoder_sparse_step > 0

    def evenly_cut(self, ep: int) -> tuple[str, ...]:
        fields = ["num_attention_heads"]
        if any(self.is_dense(layer) for layer in range(self.num_hidden_layers)):
            fields.append("intermediate_size")
        fields.append(self.experts[0] if ep > 1 else "moe_intermediate_size")
        return tuple(fields)


def moe_of(mixture: Mixture, config: DecoderConfig, *, layer: int, mesh: Mesh, ops: Ops) -> MoE:
    """Return the experts of a layer."""
    return MoE(
        mixture,
        eps=config.rms_norm_eps,
        layer=layer,
        is_last=layer + 1 == config.num_hidden_layers,
        mesh=mesh,
        ops=ops,
    )


class SparseBlock(Block):
    """Attention, then routed experts or an MLP."""

    def mlp_of(self, config: DecoderConfig, layer: int, mesh: Mesh, ops: Ops) -> Layer:
        assert isinstance(config, SparseConfig)
        if config.is_dense(layer):
            return super().mlp_of(config, layer, mesh, ops)
        mixture = Mixture(
            hidden_size=config.hidden_size,
            experts=config.experts,
            inner=("moe_intermediate_size", config.moe_intermediate_size),
            num_chosen=config.num_experts_per_tok,
            rule=Routing("softmax", config.norm_topk_prob),
            exact=False,
            shared=config.shared_size,
            gates_shared=True,
        )
        return moe_of(mixture, config, layer=layer, mesh=mesh, ops=ops)


WEIGHTS: tuple[Rule, ...] = (
    *Decoder.WEIGHTS,
    ("model.layers.{}.self_attn.q_norm.weight", "layers.{}.attn.q_norm"),
    ("model.layers.{}.self_attn.k_norm.weight", "layers.{}.attn.k_norm"),
    ("model.layers.{}.post_attention_layernorm.weight", "layers.{}.mlp.norm_weight"),
    ("model.layers.{}.mlp.gate.weight", "layers.{}.mlp.router.weight"),
    (f"{EXPERT}.gate_proj.weight", "layers.{}.mlp.experts.gate_up", "gate"),
    (f"{EXPERT}.up_proj.weight", "layers.{}.mlp.experts.gate_up", "up"),
    (f"{EXPERT}.down_proj.weight", "layers.{}.mlp.experts.down"),
)
