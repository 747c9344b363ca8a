"""A model run step by step without a runner: pages, batches and all logits."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from nanovllm.attention.base import Batch, ForwardContext
from nanovllm.attention.grouped import PagedKV
from nanovllm.attention.torch_ref import TorchPaged
from nanovllm.config import Config, Kernels, Load
from nanovllm.layers.kernels import select_ops
from nanovllm.layers.ops import Ops
from nanovllm.models.config import read_model_config
from nanovllm.models.decoder import Decoder
from nanovllm.models.head import DraftHead
from nanovllm.models.weights import default_dtype, filler
from nanovllm.parallel.mesh import Mesh
from nanovllm.plan import Chunk
from nanovllm.runner.caches import states_of
from nanovllm.runner.resolved import with_short_states
from nanovllm.sampling.shards import Shard
from tests.models.tiny import config_of

CPU = torch.device("cpu")
PAGE_TOKENS, PAGES_EACH = 4, 20
MAX_TOKENS = PAGE_TOKENS * PAGES_EACH


def fill(
    model: Decoder | DraftHead, config: Config, folder: Path | None = None, prefix: str = ""
) -> None:
    """Fill every parameter in place. Raise ConfigError like weights.filler."""
    filler(model, config, folder, prefix)()


def load(
    folder: Path,
    mesh: Mesh = Mesh(),
    dtype: torch.dtype = torch.float32,
    how: Load = Load(),
    ops: Ops | None = None,
) -> Decoder:
    config = config_of(folder, how)
    family, model_config = read_model_config(config)
    with CPU, default_dtype(dtype):
        model = family(model_config, mesh, ops or select_ops(Kernels(), CPU), MAX_TOKENS)
    fill(model, config)
    return model


class Steps:
    """Prompts that advance together, each in scattered pages of a cache full of NaN."""

    def __init__(
        self, folder: Path, model: Decoder, prompts: list[Tensor], mesh: Mesh, short: bool = False
    ) -> None:
        """Prepare the steps. `short` stores recurrent states in bfloat16."""
        self.model, self.prompts = model, prompts
        self.done = [0] * len(prompts)
        _, config = read_model_config(config_of(folder))
        self.shard = Shard(mesh, config.vocab_size)
        (group,) = model.cache_layout(config, mesh, 4).paged
        num_pages = len(prompts) * PAGES_EACH
        shape = (num_pages + 1, PAGE_TOKENS, group.num_heads)
        caches = {
            layer: PagedKV(
                *(torch.full((*shape, size), torch.nan) for size in (group.k_size, group.v_size))
            )
            for layer in group.layers
        }
        layout = model.cache_layout(config, mesh, 4)
        layout = with_short_states(layout) if short else layout
        states = states_of(
            layout,
            num_slots=len(prompts),
            num_checkpoints=0,
            num_drafts=0,
            dtype=torch.float32,
            device=CPU,
        )
        model.bind_caches({**caches, **(states.by_layer if states else {})})
        self.backend = TorchPaged(caches[group.layers[0]])
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)) + 1
        self.pages = order.view(len(prompts), PAGES_EACH).int()

    def feed(self, counts: tuple[int, ...]) -> list[Tensor]:
        """Feed counts[i] tokens of prompt i and return their logits. Prompts with 0 have no row."""
        logits = self.model.logits(self.hidden(self.batch(counts)))
        logits = self.shard.whole_rows(logits, torch.arange(len(logits)))
        return list(logits.flip(0).split([count for count in counts if count]))

    @torch.inference_mode()
    def hidden(self, batch: Batch, *, all_hidden: bool = False) -> Tensor:
        ctx = ForwardContext(batch, self.backend.bind(batch), all_hidden)
        return self.model(batch.token_ids_T, ctx)

    def batch(self, counts: tuple[int, ...]) -> Batch:
        """Return the batch with counts[i] tokens of prompt i. All tokens are sampled."""
        rows = [row for row, count in enumerate(counts) if count]
        spans = {row: torch.arange(self.done[row], self.done[row] + counts[row]) for row in rows}
        for row in rows:
            self.done[row] += counts[row]
        lengths = [self.done[row] for row in rows]
        used = [-(-length // PAGE_TOKENS) for length in lengths]
        table = torch.zeros(len(rows), PAGES_EACH, dtype=torch.int32)
        for at, row in enumerate(rows):
            table[at, : used[at]] = self.pages[row, : used[at]]
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + counts[row])
        return Batch(
            token_ids_T=torch.cat([self.prompts[row][spans[row]] for row in rows]),
            positions_T=torch.cat([spans[row] for row in rows]),
            slot_mapping_T=torch.cat(
                [
                    self.pages[row].long()[spans[row] // PAGE_TOKENS] * PAGE_TOKENS
                    + spans[row] % PAGE_TOKENS
                    for row in rows
                ]
            ),
            slots_T=torch.tensor([row for row in rows for _ in range(counts[row])]),
            slots_R=torch.tensor(rows),
            starts_R1=torch.tensor(starts, dtype=torch.int32),
            lengths_R=torch.tensor(lengths, dtype=torch.int32),
            page_table_RM=table,
            sampled_at=torch.arange(starts[-1]).flip(0),  # an order other than the trivial one
            num_decodes=0,
            num_decode_tokens=0,
            decode_width=1,
            max_new=max(counts),
            max_length=max(lengths),
            planned=[Chunk(row, counts[row], True, start=int(spans[row][0])) for row in rows],
        )
