"""EAGLE-3 heads: one or more Llama layers over the target's taps (arXiv 2503.01840).

The first layer attends over two vectors side by side: the token's embedding and the head's state,
each normalised. The state is a product of the taps in the first pass, and the residual stream of
the previous pass in later ones. Equations: SafeAILab's EAGLE, and speculators' Eagle3DraftModel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from nanovllm.attention.base import ForwardContext
from nanovllm.layers.attention import Attention
from nanovllm.layers.embedding import VocabEmbedding
from nanovllm.layers.fp8 import Made, has_whole_blocks, in_fp8
from nanovllm.layers.linear import Layer, Linear, Placement
from nanovllm.layers.mlp import MLP
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.ops import Ops
from nanovllm.layers.residual import Added, Residual
from nanovllm.layers.rope import cos_sin_table
from nanovllm.models.decoder import Block, Decoder, Rule
from nanovllm.models.eagle3_config import Eagle3Spec
from nanovllm.models.head import DraftHead, replicated, rules_of_layer
from nanovllm.parallel.cut import span_of_vocabulary
from nanovllm.parallel.mesh import Mesh, Span


class PairAttention(Attention):
    """Attention whose queries, keys and values are a product of two vectors side by side."""

    def __init__(self, **sizes: Any) -> None:  # noqa: ANN401
        """Take the arguments of Attention."""
        super().__init__(**sizes)
        weight, placement = self.qkv.weight, self.qkv.placements["weight"]
        self.qkv = Linear(len(weight), 2 * sizes["hidden_size"], placement, self.ops)

    def of_pairs(
        self, pair_TX: Tensor, stream_TD: Tensor, cos_sin_LA: Tensor, ctx: ForwardContext
    ) -> Residual:
        """Return the residual stream plus the block's result. May overwrite the stream."""
        o_TX = self.attended(self.qkv.product(pair_TX), cos_sin_LA, ctx)
        if self.is_last and not ctx.all_hidden:
            o_TX, stream_TD = ctx.batch.sampled(o_TX), ctx.batch.sampled(stream_TD)
        after: Residual = self.out(o_TX, Added(stream_TD))
        return after


class PairBlock(Layer):
    """First layer of a head: norms of both vectors, attention, MLP."""

    def __init__(self, spec: Eagle3Spec, mesh: Mesh, ops: Ops) -> None:
        super().__init__()
        config = spec.config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.starts_normed = spec.norm_before_residual
        self.embed_norm = RMSNorm(size, eps, ops)
        self.state_norm = RMSNorm(size, eps, ops)
        self.attn = PairAttention(
            hidden_size=size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_size=config.head_size,
            eps=eps,
            qk_norm=spec.qk_norm,
            is_last=config.num_hidden_layers == 1,
            mesh=mesh,
            ops=ops,
        )
        self.mlp = MLP(size, config.intermediate_size, eps=eps, mesh=mesh, ops=ops)

    def of_pairs(
        self, embedded_TD: Tensor, state_TD: Tensor, cos_sin_LA: Tensor, ctx: ForwardContext
    ) -> Residual:
        """Return the residual stream after this block. May overwrite the state."""
        normed_TD = self.state_norm(Added(state_TD))[0]
        pair_TX = torch.cat((self.embed_norm(Added(embedded_TD))[0], normed_TD), 1)
        stream_TD = normed_TD if self.starts_normed else state_TD
        after: Residual = self.mlp(self.attn.of_pairs(pair_TX, stream_TD, cos_sin_LA, ctx), ctx)
        return after


class DraftIds(NamedTuple):
    """The columns of this rank's logits that have a draft token.

    Draft ids increase with the target's ids, so a span of the vocabulary has a span of draft ids.
    """

    columns_X: Tensor  # int64
    num_columns: int  # of the rank's span of the vocabulary
    rows: Span  # of draft ids

    @classmethod
    def of_rank(cls, target_ids_X: Tensor, mesh: Mesh, vocab_size: int) -> DraftIds:
        """Return those of this rank, from the target's ids of all draft ids (on the host)."""
        span = span_of_vocabulary(mesh, vocab_size)
        ends = torch.tensor([span.start, span.start + span.count], device="cpu")
        first, stop = torch.searchsorted(target_ids_X, ends).numpy().tolist()
        columns_X = (target_ids_X[first:stop] - span.start).to(torch.get_default_device())
        return cls(columns_X, span.count, Span(len(target_ids_X), first, stop - first))


class Eagle3Head(DraftHead):
    """Head of a target. `max_tokens` is the length of its own rotary table.

    Decision: `fc` is whole on every rank, since a cut one needs a sum over ranks.

    Decision: products may be in fp8, since the target verifies each draft. Every pass reads all of
    them except `fc`: 0.7 GB for a head of Qwen3-8B in bfloat16.
    """

    cos_sin_LA: Tensor

    def __init__(
        self,
        spec: Eagle3Spec,
        target: Decoder,
        mesh: Mesh,
        ops: Ops,
        max_tokens: int,
        *,
        fp8: bool = False,
    ) -> None:
        """`fp8`: products are quantised. If the head has no output head of its own, drafts are
        read from an fp8 copy of the target's.
        """
        super().__init__(target, fp8_head=fp8 and not spec.has_output)

        def typed(make: Callable[[], Made]) -> Made:
            return in_fp8(make, has_whole_blocks) if fp8 else make()

        config = spec.config
        size, eps, num_taps = config.hidden_size, config.rms_norm_eps, len(spec.taps)
        self.spec, self.taps, self.normalises_state = spec, spec.taps, spec.norm_output
        self.input_norm: RMSNorm | None = None
        if spec.norm_before_fc:
            self.input_norm = RMSNorm(num_taps * spec.target_size, eps, ops)
        count = num_taps if spec.fc_norm else 0
        self.tap_norms = nn.ModuleList(RMSNorm(spec.target_size, eps, ops) for _ in range(count))
        self.fc = typed(lambda: replicated(size, num_taps * spec.target_size, ops))
        later = partial(Block, config, mesh=mesh, ops=ops, qk_norm=spec.qk_norm)
        self.layers = nn.ModuleList([typed(lambda: PairBlock(spec, mesh, ops))])
        layers = range(1, config.num_hidden_layers)
        self.layers.extend(typed(partial(later, layer)) for layer in layers)
        self.norm = RMSNorm(size, eps, ops)
        self.embed: VocabEmbedding | None = None
        if spec.has_embedding:
            self.embed = VocabEmbedding(spec.target_vocab, size, mesh, ops)
        self.draft_ids = draft_ids_of(spec, mesh)
        self.head: Linear | None = None
        if spec.has_output:
            self.head = typed(lambda: output_of(spec, self.draft_ids, mesh, ops))
        table = cos_sin_table(config.rope_parameters, config.rotary_size, max_tokens)
        self.register_buffer("cos_sin_LA", table, persistent=False)
        self.WEIGHTS, self.IGNORED = [*rules_of(spec)], ignored_of(spec)

    @property
    def embedding(self) -> VocabEmbedding:
        return super().embedding if self.embed is None else self.embed

    @property
    def output(self) -> nn.Module:
        return super().output if self.head is None else self.head

    @property
    def read_by_given(self) -> Sequence[nn.Module]:
        return (self.fc,)

    def given(self, hidden_TD: Tensor, taps: Sequence[Tensor]) -> Tensor:
        """Return the head's states of all tokens: fc of the target's taps side by side."""
        normed = [
            norm(Added(tap_TD))[0] for norm, tap_TD in zip(self.tap_norms, taps, strict=False)
        ]
        taps_TX = torch.cat(normed or [*taps], 1)
        if self.input_norm is not None:
            taps_TX = self.input_norm(Added(taps_TX))[0]
        return self.fc.product(taps_TX)

    def forward(self, token_ids_T: Tensor, given_TX: Tensor, ctx: ForwardContext) -> Tensor:
        """Return state_SD of sampled pairs: the residual stream, or with norm_output its norm."""
        first = cast("PairBlock", self.layers[0])
        embedded_TD = self.embedding(token_ids_T)
        residual = first.of_pairs(embedded_TD, given_TX, self.cos_sin_LA, ctx)
        for block in self.layers[1:]:
            residual = block(residual, self.cos_sin_LA, ctx)
        if isinstance(residual, Added) and not self.normalises_state:
            return residual.stream_TD
        normed_SD, stream = self.norm(residual)
        state_SD: Tensor = normed_SD if self.normalises_state else stream.stream_TD
        return state_SD

    def logits(self, state_SD: Tensor) -> Tensor:
        """Return logits_SV of this rank's span. Tokens that are no draft token have -inf."""
        x_SD = state_SD if self.normalises_state else self.norm(Added(state_SD))[0]
        if self.head is None:
            return super().logits(x_SD)
        if self.draft_ids is None:
            return self.head.product(x_SD)
        out_SV = x_SD.new_full((len(x_SD), self.draft_ids.num_columns), float("-inf"))
        if not self.draft_ids.rows.count:
            return out_SV
        return out_SV.index_copy_(1, self.draft_ids.columns_X, self.head.product(x_SD))


def draft_ids_of(spec: Eagle3Spec, mesh: Mesh) -> DraftIds | None:
    """Return this rank's columns with a draft token; None if all tokens are draft tokens."""
    target_ids = spec.target_ids() if spec.has_output else None
    if target_ids is None:
        return None
    return DraftIds.of_rank(target_ids, mesh, spec.target_vocab)


def output_of(spec: Eagle3Spec, ids: DraftIds | None, mesh: Mesh, ops: Ops) -> Linear:
    """Return the head's own product for logits, of the whole vocabulary or of its draft tokens."""
    size = spec.config.hidden_size
    if ids is None:
        return VocabEmbedding(spec.target_vocab, size, mesh, ops)
    return Linear(ids.rows.count, size, Placement(0, (("", ids.rows),)), ops)


def rules_of(spec: Eagle3Spec) -> Iterator[Rule]:
    """Yield the loading rules, with the names of the head's files."""
    rules: list[Rule] = [
        ("fc.weight", "fc.weight"),
        ("input_norm.weight", "input_norm.weight"),
        ("norm.weight", "norm.weight"),
        ("embed_tokens.weight", "embed.weight"),
        ("lm_head.weight", "head.weight"),
        ("layers.0.input_layernorm.weight", "layers.0.embed_norm.weight"),
        ("layers.0.hidden_norm.weight", "layers.0.state_norm.weight"),
    ]
    for tap in range(len(spec.taps)):
        rules.append((f"fc_norm.{tap}.weight", f"tap_norms.{tap}.weight"))
    for layer in range(spec.config.num_hidden_layers):
        rules += rules_of_layer(Decoder.WEIGHTS, f"layers.{layer}", layer)
        for norm in ("q_norm", "k_norm"):
            source = f"layers.{layer}.self_attn.{norm}.weight"
            rules.append((source, f"layers.{layer}.attn.{norm}"))
    for name, *target in rules:
        yield spec.names.get(name, name), target[0], "".join(target[1:])


def ignored_of(spec: Eagle3Spec) -> list[str]:
    """Return the names of tensors that are read elsewhere, or not needed."""
    return [spec.names.get(name, name) for name in ("d2t", "t2d")]
