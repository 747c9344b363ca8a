"""Multi-token prediction (MTP): the layer after a model's last, which drafts further tokens.

One layer drafts any number of tokens: its own normalised state takes the place of the target's.
Equations: arXiv 2412.19437, section 2.2, with the state after the target's final norm, as in
transformers' MtpLayer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from nanovllm.attention.base import ForwardContext
from nanovllm.layers.fp8 import blocks
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.ops import Ops
from nanovllm.layers.residual import Added, Residual
from nanovllm.models.decoder import Decoder, MtpSpec, Rule
from nanovllm.models.head import DraftHead, replicated, rules_of_layer
from nanovllm.parallel.mesh import Mesh


def rules_of_mtp(spec: MtpSpec, family: type[Decoder]) -> list[Rule]:
    """Return the loading rules of an MtpHead."""
    embed_norm, hidden_norm, norm = spec.norms
    return [
        (embed_norm, "embed_norm.weight"),
        (hidden_norm, "hidden_norm.weight"),
        (spec.proj, "proj.weight"),
        (norm, "norm.weight"),
        *rules_of_layer(family.WEIGHTS, spec.block, 0),
    ]


class MtpHead(DraftHead):
    """MTP layer of a target. The rotary table, the embedding and the output head are the target's.

    Decision: drafts may read the output head from an fp8 copy, since the target verifies each of
    them. Every pass reads the whole head, 1.85 GB of DeepSeek-R1 in bfloat16.

    Decision: `proj` is whole on every rank, since a cut one needs a sum over ranks in each pass.
    """

    def __init__(
        self, spec: MtpSpec, target: Decoder, mesh: Mesh, ops: Ops, *, fp8_head: bool = False
    ) -> None:
        super().__init__(target, fp8_head=fp8_head)
        config, family = spec.config, type(target)
        self.WEIGHTS, self.LESS_ONE = rules_of_mtp(spec, family), spec.less_one
        self.IGNORED = spec.copies
        norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps, ops)
        self.embed_norm, self.hidden_norm, self.norm = norm(), norm(), norm()
        self.proj = replicated(config.hidden_size, 2 * config.hidden_size, ops)
        last = config.num_hidden_layers - 1
        layers = blocks(
            lambda _: family.Block(config, last, mesh, ops, qk_norm=family.qk_norm),
            count=1,
            rules=self.WEIGHTS,
            quantised=config.quantization_config,
        )
        self.layers = nn.ModuleList(layers)
        self._table = (target.cos_sin_LA,)

    @property
    def read_by_pass(self) -> Sequence[nn.Module]:
        return self.proj, self.layers

    def given(self, hidden_TD: Tensor, taps: Sequence[Tensor]) -> Tensor:
        """Return the target's hidden states, after its final norm."""
        return hidden_TD

    def forward(self, token_ids_T: Tensor, given_TX: Tensor, ctx: ForwardContext) -> Tensor:
        """Return state_SD of sampled pairs, after the final norm."""
        embedded_TD = self.embed_norm(Added(self.embedding(token_ids_T)))[0]
        hidden_TD = self.hidden_norm(Added(given_TX))[0]
        x_TD = self.proj.product(torch.cat((embedded_TD, hidden_TD), 1))
        residual: Residual = self.layers[0](Added(x_TD), self._table[0], ctx)
        state_SD: Tensor = self.norm(residual)[0]
        return state_SD
