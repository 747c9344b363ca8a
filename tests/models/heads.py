"""Draft heads run pass by pass without a runner, and tiny random heads on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file
from torch import Tensor

from nanovllm.attention.base import Batch, ForwardContext
from nanovllm.attention.grouped import PagedKV
from nanovllm.attention.torch_ref import TorchPaged
from nanovllm.kv.layout import CacheLayout
from nanovllm.models.head import DraftHead
from tests.models.steps import PAGE_TOKENS, PAGES_EACH
from tests.models.tiny import COMMON

Pairs = list[tuple[int, int, Tensor, Tensor]]  # row, first position, tokens after, given states


class HeadSteps:
    """Passes of a head for texts that advance together, in pages that are full of NaN."""

    def __init__(self, head: DraftHead, layout: CacheLayout, num_texts: int) -> None:
        self.head = head
        (group,) = layout.paged
        num_pages = num_texts * PAGES_EACH
        shape = (num_pages + 1, PAGE_TOKENS, group.num_heads)
        self.caches = {
            layer: PagedKV(
                *(torch.full((*shape, size), torch.nan) for size in (group.k_size, group.v_size))
            )
            for layer in group.layers
        }
        head.bind_caches(self.caches)
        self.backend = TorchPaged(self.caches[0])
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)) + 1
        self.pages = order.view(num_texts, PAGES_EACH).int()

    @torch.inference_mode()
    def states(self, pairs: Pairs, *, all_hidden: bool = False) -> list[Tensor]:
        """Run one pass and return the states of each row's pairs."""
        batch = self.batch([(row, start, len(ids)) for row, start, ids, _ in pairs])
        ids_T = torch.cat([ids for _, _, ids, _ in pairs])
        given_TX = torch.cat([given for *_, given in pairs]).clone()
        ctx = ForwardContext(batch, self.backend.bind(batch), all_hidden)
        state_SD = self.head(ids_T, given_TX, ctx)
        if not all_hidden:
            state_SD = state_SD.flip(0)
        return list(state_SD.split([len(ids) for _, _, ids, _ in pairs]))

    def batch(self, rows: list[tuple[int, int, int]]) -> Batch:
        """Return the batch of (row, first position, number of pairs), sampled in reverse order."""
        spans = [torch.arange(start, start + count) for _, start, count in rows]
        counts = torch.tensor([0, *(count for *_, count in rows)])
        pages = [self.pages[row].long() for row, *_ in rows]
        lengths = [start + count for _, start, count in rows]
        return Batch(
            token_ids_T=torch.empty(0),  # a head takes its own
            positions_T=torch.cat(spans),
            slot_mapping_T=torch.cat(
                [
                    page[span // PAGE_TOKENS] * PAGE_TOKENS + span % PAGE_TOKENS
                    for page, span in zip(pages, spans, strict=True)
                ]
            ),
            slots_T=torch.cat(
                [torch.full_like(span, row) for span, (row, *_) in zip(spans, rows, strict=True)]
            ),
            slots_R=torch.tensor([row for row, *_ in rows]),
            starts_R1=counts.cumsum(0).int(),
            lengths_R=torch.tensor(lengths, dtype=torch.int32),
            page_table_RM=torch.stack(pages).int(),
            sampled_at=torch.arange(int(counts.sum())).flip(0),
            num_decodes=0,
            num_decode_tokens=0,
            decode_width=1,
            max_new=int(counts.max()),
            max_length=max(lengths),
        )


EAGLE3 = dict(  # config.json of SpecForge, for targets of tests.models.tiny
    architectures=["LlamaForCausalLMEagle3"],
    vocab_size=COMMON["vocab_size"],
    draft_vocab_size=40,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    rope_theta=500.0,
    eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
)


def eagle3_tensors(
    *,
    target_size: int = 64,
    num_taps: int = 3,
    own: tuple[str, ...] = (),
    seed: int = 3,
    **fields: object,
) -> dict[str, Tensor]:
    """Return the tensors of a random head by canonical name. `own` are those that are optional.

    All of them matter: gains differ from 1, and matrices are large.
    """
    config = {**EAGLE3, **fields}
    size, vocab = int(config["hidden_size"]), int(config["vocab_size"])
    heads, kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    head_size, inner = int(config["head_dim"]), int(config["intermediate_size"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, num_taps * target_size),
        "norm.weight": (size,),
        "embed_tokens.weight": (vocab, size),
        "input_norm.weight": (num_taps * target_size,),
        **{f"fc_norm.{tap}.weight": (target_size,) for tap in range(num_taps)},
    }
    if config["draft_vocab_size"] is not None:
        shapes["lm_head.weight"] = (int(config["draft_vocab_size"]), size)
    for layer in range(int(config["num_hidden_layers"])):
        width = size if layer else 2 * size
        shapes |= {
            f"layers.{layer}.input_layernorm.weight": (size,),
            f"layers.{layer}.hidden_norm.weight": (size,),
            f"layers.{layer}.post_attention_layernorm.weight": (size,),
            f"layers.{layer}.self_attn.q_proj.weight": (heads * head_size, width),
            f"layers.{layer}.self_attn.k_proj.weight": (kv_heads * head_size, width),
            f"layers.{layer}.self_attn.v_proj.weight": (kv_heads * head_size, width),
            f"layers.{layer}.self_attn.o_proj.weight": (size, heads * head_size),
            f"layers.{layer}.self_attn.q_norm.weight": (head_size,),
            f"layers.{layer}.self_attn.k_norm.weight": (head_size,),
            f"layers.{layer}.mlp.gate_proj.weight": (inner, size),
            f"layers.{layer}.mlp.up_proj.weight": (inner, size),
            f"layers.{layer}.mlp.down_proj.weight": (size, inner),
        }
        if layer:
            del shapes[f"layers.{layer}.hidden_norm.weight"]
    optional = ("embed_tokens", "input_norm", "fc_norm", "q_norm", "k_norm")
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        if any(part in name and part not in own for part in optional):
            continue
        values = torch.randn(shape, generator=random)
        tensors[name] = 1 + 0.3 * values if len(shape) == 1 else 1.5 * shape[-1] ** -0.5 * values
    if config["draft_vocab_size"] not in (None, vocab):
        count = int(config["draft_vocab_size"])
        ids = torch.randperm(vocab, generator=random)[:count].sort().values
        tensors["d2t"] = ids - torch.arange(count)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def save_head(
    folder: Path,
    tensors: dict[str, Tensor],
    rename: Mapping[str, str] = MappingProxyType({}),
    **fields: object,
) -> Path:
    """Write a head with config.json. `rename` maps beginnings of canonical names to others.

    A field of None is left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    raw = {**EAGLE3, **fields}
    config = {key: value for key, value in raw.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for begin, other in rename.items():
            if name.startswith(begin):
                name = other + name.removeprefix(begin)
                break
        stored[name] = tensor.contiguous()
    save_file(stored, folder / "model.safetensors")
    return folder
