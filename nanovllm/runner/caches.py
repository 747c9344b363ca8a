"""Keys, values and recurrent states on the device, and the operations of a plan on them.

Decision: all layers of a group are in one tensor, so that one launch fills or copies a page of all
layers. A layer's view of it is contiguous, as attention requires.

Recurrent states have rows for slots and the padding slot, and rows for checkpoints.

Decision: a row holds the states of all layers, so that a save or restore is one copy at the full
rate of the device or the bus. A layer's tensors are views of all rows.

Decision: checkpoints in host memory are pinned. Their copies run in the order of the stream and the
host never waits. Kernels write there through the same address.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.base import Batch
from nanovllm.attention.gated_delta import DeltaStates, StateProgress
from nanovllm.attention.grouped import PagedKV, caches_of
from nanovllm.config import ConfigError
from nanovllm.kv.layout import CacheLayout, StateGroup
from nanovllm.plan import StepPlan
from nanovllm.runner.batch import upload_together
from nanovllm.runner.state_rows import WORD, StateRow


@dataclass(frozen=True, slots=True)
class Caches:
    tensors: tuple[Tensor, ...]  # keys, then values, of each group: [L, P, S, G, A]
    by_layer: dict[int, PagedKV]  # the layers' views of `tensors`

    def apply(self, plan: StepPlan) -> None:
        """Zero the pages of plan.clean, then do plan.copies, all of which read before any writes.

        Earlier reads of these pages are already in the stream. Do not wait.
        """
        if not plan.clean and not plan.copies:
            return
        sources, targets = [src for src, _ in plan.copies], [dst for _, dst in plan.copies]
        lists = [np.array(pages, np.int32) for pages in (plan.clean, sources, targets)]
        uploaded = upload_together(lists, self.tensors[0].device)
        clean_P, sources_P, targets_P = (pages_P.long() for pages_P in uploaded)
        for pages_LPSGA in self.tensors:
            if plan.clean:
                pages_LPSGA.index_fill_(1, clean_P, 0)
            if plan.copies:
                pages_LPSGA.index_copy_(1, targets_P, pages_LPSGA.index_select(1, sources_P))


def make_caches(
    layout: CacheLayout,
    num_pages: int,
    page_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Caches:
    """Return zero-filled caches of `num_pages` pages and the padding page 0.

    A bulk load of a request's last page also reads tokens after its end, with a weight of 0, and 0
    times NaN is NaN. Hence the zeros, and hence pages that may contain NaN are zeroed before reuse.
    """
    tensors: list[Tensor] = []
    caches: dict[int, PagedKV] = {}
    for group in layout.paged:
        group_tensors, by_layer = caches_of(group, num_pages + 1, page_tokens, dtype, device=device)
        tensors += group_tensors
        caches |= by_layer
    return Caches(tuple(tensors), caches)


class NoStates:
    """Substitute for a model without recurrent states."""

    saved_NX = None

    def __init__(self) -> None:
        self.by_layer: dict[int, DeltaStates] = {}

    def apply(self, plan: StepPlan) -> None:
        """Raise ValueError if the plan has states."""
        checkpoints = [a.restore_from for a in plan.admits] + [c.save_to for c in plan.chunks]
        if plan.saves or any(state >= 0 for state in checkpoints):
            raise ValueError(f"plan {plan.step} has recurrent states, which the model has not")

    def parts_of(self, batch: Batch) -> None:
        """Return None, since there are no states to save."""

    def forget(self) -> None:
        """Do nothing."""


class States:
    """States of a model, initially zero.

    With drafts, slots also store the inputs of their last step.
    """

    def __init__(
        self,
        group: StateGroup,
        num_slots: int,
        num_checkpoints: int,
        num_drafts: int,
        dtype: torch.dtype,
        device: torch.device,
        in_host: bool = False,
    ) -> None:
        self.num_drafts = num_drafts
        self.device = device
        layers = len(group.layers)
        most_rows = num_slots * (1 + num_drafts)
        matrices = layers, group.heads, group.key_size, group.value_size
        inputs = layers, group.channels, group.taps
        recurrent_dtype = torch.float32 if group.recurrent_bytes == 4 else torch.bfloat16
        layout = StateRow(group, dtype.itemsize)
        at, words = layout.inputs_at // WORD, layout.num_bytes // WORD
        self.rows_NX = torch.zeros(num_slots + 1, words, dtype=torch.float32, device=device)
        place = "cpu" if in_host else device
        self.saved_NX = self.rows_NX.new_zeros(num_checkpoints, words, device=place)
        if in_host and device.type == "cuda" and num_checkpoints:
            pin(self.saved_NX, self, "cache.host_gib")
        recurrent = part(self.rows_NX, recurrent_dtype, matrices)
        saved_recurrent = part(self.saved_NX, recurrent_dtype, matrices)
        conv = part(self.rows_NX[:, at:], dtype, inputs)
        saved_conv = part(self.saved_NX[:, at:], dtype, inputs)
        step_inputs: Tensor | None = None
        if num_drafts:
            width = group.channels + 2 * group.heads
            shape = layers, num_slots + 1, 1 + num_drafts, width
            step_inputs = torch.zeros(shape, dtype=dtype, device=device)
        int32 = partial(torch.zeros, dtype=torch.int32, device=device)
        self.progress = StateProgress(int32(num_slots + 1), int32(most_rows), [])
        tickets_RG = int32(most_rows, layout.key_heads)
        self.by_layer = {
            layer: DeltaStates(
                conv_NCW=conv[:, nth],
                recurrent_NHKV=recurrent[:, nth],
                tickets_RG=tickets_RG,
                inputs_NWX=None if step_inputs is None else step_inputs[nth],
                progress=self.progress,
                saved=(saved_conv[:, nth], saved_recurrent[:, nth]),
            )
            for nth, layer in enumerate(group.layers)
        }

    def apply(self, plan: StepPlan) -> None:
        """Do the plan's saves, then restore or zero the states of admitted requests.

        Layers save the other states when they run the plan's chunks. Do not wait. Raise ValueError
        if decode rows may have drafts and the plan saves their states, since the number of tokens
        in such a state is unknown.
        """
        if plan.saves and self.num_drafts:
            raise ValueError(f"plan {plan.step} saves states of rows that may have drafts")
        for slot, checkpoint in plan.saves:
            self.saved_NX[checkpoint].copy_(self.rows_NX[slot], non_blocking=True)
        if not plan.admits:
            return
        for admit in plan.admits:
            if admit.restore_from >= 0:
                self.rows_NX[admit.slot].copy_(self.saved_NX[admit.restore_from], non_blocking=True)
            elif admit.num_cached:
                raise ValueError(f"plan {plan.step} has a prefix without its recurrent state")
        blank = [admit.slot for admit in plan.admits if admit.restore_from < 0]
        slots = [admit.slot for admit in plan.admits]
        lengths = [admit.num_cached for admit in plan.admits]
        arrays = [np.array(numbers, np.int32) for numbers in (blank, slots, lengths)]
        blank_X, slots_X, lengths_X = upload_together(arrays, self.device)
        self.rows_NX.index_fill_(0, blank_X.long(), 0)
        self.progress.lengths_N[slots_X.long()] = lengths_X

    def parts_of(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Return the token ranges of chunks before and after saved states, and their targets.

        Return None in a padding step.
        """
        if not batch.planned:
            return None
        parts, targets, start = [], [], batch.num_decode_tokens
        for chunk in batch.planned:
            parts += [start, start + (chunk.save_at if chunk.save_to >= 0 else 0)]
            targets += [chunk.save_to, chunk.slot]
            start += chunk.num_tokens
        arrays = [np.array(numbers, np.int32) for numbers in ([*parts, start], targets)]
        parts_X, targets_X = upload_together(arrays, self.device)
        return parts_X, targets_X

    def forget(self) -> None:
        """Free the memory. The states must not be used any more."""
        for owner in self.progress.owners:
            del owner.states
        del self.rows_NX, self.saved_NX, self.by_layer


def part(rows_NX: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a view of the first elements of every row, with a dtype and shape."""
    return rows_NX.view(dtype)[:, : prod(shape)].view(len(rows_NX), *shape)


def pin(tensor: Tensor, owner: object, key: str, whole: str = "") -> None:
    """Pin the memory until the owner is deleted. Raise ConfigError with CUDA's error if it fails.

    `key` is the recipe key that sets its size. `whole` describes all of its memory in the error.
    torch's own pinned allocations may be rounded up to a power of two.
    """
    cuda, address = torch.cuda.cudart(), tensor.data_ptr()
    error = cuda.cudaHostRegister(address, tensor.nbytes, 0)
    if error != cuda.cudaError.success:
        amount = f"{key}: {tensor.nbytes / 2**30:.1f} GiB of pinned memory{whole}"
        raise ConfigError(f"{amount}: {torch.cuda.CudaError(int(error))}")
    finalize(owner, cuda.cudaHostUnregister, address)


def states_of(layout: CacheLayout, **sizes: Any) -> States | None:  # noqa: ANN401
    """Return the states of a model with this layout, or None. `sizes`: arguments of States."""
    return None if layout.state is None else States(layout.state, **sizes)
