"""Base of all families: config fields, tensor names, block, forward pass.

Properties of a single family are in that family's file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, cast

from msgspec import Meta, Struct
from torch import Tensor, nn

from nanovllm.attention.base import ForwardContext
from nanovllm.kv.layout import CacheLayout, PagedGroup
from nanovllm.layers.attention import Attention, QKNorm
from nanovllm.layers.embedding import VocabEmbedding
from nanovllm.layers.fp8 import BlockFp8, blocks
from nanovllm.layers.linear import Layer
from nanovllm.layers.mlp import MLP
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.ops import Ops
from nanovllm.layers.residual import Added, Residual
from nanovllm.layers.rope import Rope, cos_sin_table
from nanovllm.models.support import ONLY
from nanovllm.parallel.mesh import Mesh

Count = Annotated[int, Meta(ge=1, le=1 << 24)]
Rule = tuple[str, str] | tuple[str, str, str]  # checkpoint name, parameter[, part]; {} = an index


class DecoderConfig(Struct, frozen=True, kw_only=True):
    """The used fields of config.json. A missing one is an error that names it."""

    ONLY: ClassVar[dict[str, object]] = ONLY  # fields with a single supported value
    # Default of partial_rotary_factor. None: heads are rotated whole, and a factor is an error.
    ROTATED: ClassVar[float | None] = None
    STEP_TOKENS: ClassVar[int] = 8192  # default of schedule.step_tokens on a GPU

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Annotated[int, Meta(ge=1, le=1024)]
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count | None = None
    max_position_embeddings: Annotated[int, Meta(ge=2, le=1 << 24)]  # a prompt and an answer
    rms_norm_eps: Annotated[float, Meta(ge=0)]
    rope_parameters: Rope  # models/config.py turns the older rope_theta and rope_scaling into it
    tie_word_embeddings: bool = False
    quantization_config: BlockFp8 | None = None
    checkpoint_layers: Count | None = None  # num_hidden_layers of the file, if the recipe has fewer

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        least = 2 if self.ROTATED else self.head_size
        if self.rotary_size % 2 or not least <= self.rotary_size <= self.head_size:
            named = f"head_dim * partial_rotary_factor, or rotary_dim, is {self.rotary_size}"
            raise ValueError(f"{named}; it must be even, from {least} to head_dim {self.head_size}")

    def evenly_cut(self, _: int) -> tuple[str, ...]:
        """Return the fields that are cut evenly over ranks; those of experts over `ep` ranks."""
        return "num_attention_heads", "intermediate_size"

    def inputs_of(self, name: str) -> int:
        """Return the inputs of a product per unit of the field, for example per head."""
        return self.head_size if name == "num_attention_heads" else 1

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def key_value_size(self, *, decodes: bool) -> int:
        """Return the elements of a head's key and value together, in a step that decodes or not."""
        return 2 * self.head_size

    @property
    def rotary_size(self) -> int:
        """Number of leading elements of a head that are rotated."""
        part = self.rope_parameters.partial_rotary_factor or self.ROTATED or 1
        return int(self.head_size * part)

    def mtp(self) -> MtpSpec | None:
        """Return the layer that predicts further tokens, or None if the family has none."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpSpec:
    """The MTP layer of a family (models/mtp.py): its config, and its names in the checkpoint."""

    config: DecoderConfig  # with the layer as the last of num_hidden_layers
    prefix: str  # of all tensors of MTP
    block: str  # the attention and the experts
    norms: tuple[str, str, str]  # of the embedding, of the hidden state, and after the block
    proj: str  # product of the two normalised inputs, the embedding first
    less_one: str = "-"  # pattern of norm weights that are stored as weight - 1
    copies: tuple[str, ...] = ()  # copies of the target's embedding and output head


class Block(Layer):
    """Attention, then an MLP or experts. Each part has its own norm."""

    Attention: ClassVar[type[Attention]] = Attention

    def __init__(
        self, config: DecoderConfig, layer: int, mesh: Mesh, ops: Ops, *, qk_norm: QKNorm
    ) -> None:
        super().__init__()
        self.attn = self.attn_of(config, layer, mesh, ops, qk_norm=qk_norm)
        self.mlp = self.mlp_of(config, layer, mesh, ops)

    def attn_of(
        self, config: DecoderConfig, layer: int, mesh: Mesh, ops: Ops, *, qk_norm: QKNorm
    ) -> Layer:
        """Return the attention part, with its norm."""
        return self.Attention(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_size=config.head_size,
            eps=config.rms_norm_eps,
            qk_norm=qk_norm,
            is_last=layer + 1 == config.num_hidden_layers,
            mesh=mesh,
            ops=ops,
        )

    def mlp_of(self, config: DecoderConfig, layer: int, mesh: Mesh, ops: Ops) -> Layer:
        """Return the part after attention, with its norm."""
        return MLP(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            eps=config.rms_norm_eps,
            mesh=mesh,
            ops=ops,
            is_last=layer + 1 == config.num_hidden_layers,
        )

    def forward(self, residual: Residual, cos_sin_LA: Tensor, ctx: ForwardContext) -> Residual:
        """Return the residual stream after this block. May overwrite its input."""
        after: Residual = self.mlp(self.attn(residual, cos_sin_LA, ctx), ctx)
        return after


class Decoder(Layer):
    """Embedding, blocks, final norm, head.

    WEIGHTS maps checkpoint tensors to parameters. IGNORED lists tensors that may be present unused.
    """

    Config: ClassVar[type[DecoderConfig]]
    Block: ClassVar[type[Block]] = Block
    qk_norm: ClassVar[QKNorm] = "none"
    WEIGHTS: ClassVar[tuple[Rule, ...]] = (
        ("model.embed_tokens.weight", "embed.weight"),
        ("model.layers.{}.input_layernorm.weight", "layers.{}.attn.qkv.norm_weight"),
        ("model.layers.{}.self_attn.q_proj.weight", "layers.{}.attn.qkv.weight", "q"),
        ("model.layers.{}.self_attn.k_proj.weight", "layers.{}.attn.qkv.weight", "k"),
        ("model.layers.{}.self_attn.v_proj.weight", "layers.{}.attn.qkv.weight", "v"),
        ("model.layers.{}.self_attn.o_proj.weight", "layers.{}.attn.out.weight"),
        ("model.layers.{}.post_attention_layernorm.weight", "layers.{}.mlp.gate_up.norm_weight"),
        ("model.layers.{}.mlp.gate_proj.weight", "layers.{}.mlp.gate_up.weight", "gate"),
        ("model.layers.{}.mlp.up_proj.weight", "layers.{}.mlp.gate_up.weight", "up"),
        ("model.layers.{}.mlp.down_proj.weight", "layers.{}.mlp.down.weight"),
        ("model.norm.weight", "norm.weight"),
        ("lm_head.weight", "head.weight"),
    )
    LESS_ONE: ClassVar[str] = "-"  # pattern of norm weights that are stored as weight - 1
    IGNORED: ClassVar[tuple[str, ...]] = (
        "model.layers.{}.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
    )
    cos_sin_LA: Tensor

    def __init__(self, config: DecoderConfig, mesh: Mesh, ops: Ops, max_tokens: int) -> None:
        """`max_tokens` is the maximum length of a request, and that of the rotary table."""
        super().__init__()
        self.embed = VocabEmbedding(config.vocab_size, config.hidden_size, mesh, ops)
        layers = blocks(
            partial(self.Block, config, mesh=mesh, ops=ops, qk_norm=self.qk_norm),
            count=config.num_hidden_layers,
            rules=self.WEIGHTS,
            quantised=config.quantization_config,
        )
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.head = self.embed
        if not config.tie_word_embeddings:
            self.head = VocabEmbedding(config.vocab_size, config.hidden_size, mesh, ops)
        table = cos_sin_table(config.rope_parameters, config.rotary_size, max_tokens)
        self.register_buffer("cos_sin_LA", table, persistent=False)

    def bind_caches(self, caches: Mapping[int, Any]) -> None:
        """Set the cache of each layer. It may replace an earlier one."""
        for layer, cache in caches.items():
            cast("Any", self.layers[layer]).attn.bind(cache)

    def forward(self, token_ids_T: Tensor, ctx: ForwardContext) -> Tensor:
        """Return x_SD: the normalised last hidden states of sampled tokens.

        With `ctx.all_hidden`, return those of all tokens, x_TD.
        """
        residual: Residual = Added(self.embed(token_ids_T))
        for layer, block in enumerate(self.layers):
            if ctx.taps is not None:
                residual = ctx.taps.take(layer, residual)
            residual = block(residual, self.cos_sin_LA, ctx)
        if ctx.taps is not None:
            residual = ctx.taps.take(len(self.layers), residual)
        x_SD: Tensor = self.norm(residual)[0]
        return x_SD

    def logits(self, x_SD: Tensor) -> Tensor:
        """Return logits_SV in the model's dtype, for this rank's span of the vocabulary."""
        return self.head.product(x_SD)

    @staticmethod
    def cache_layout(config: DecoderConfig, mesh: Mesh, dtype_bytes: int) -> CacheLayout:
        """Return the cache layout of this rank's layers. `dtype_bytes`: bytes of an element."""
        heads = mesh.span_or_copy("num_key_value_heads", config.num_key_value_heads)
        group = PagedGroup(
            layers=tuple(range(config.num_hidden_layers)),
            num_heads=heads.count,
            k_size=config.head_size,
            v_size=config.head_size,
            bytes_per_element=dtype_bytes,
        )
        return CacheLayout(paged=(group,))
