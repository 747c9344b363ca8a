"""States of fixed size on the device: a row for each slot, the padding slot, and each checkpoint.

Decision: a row holds all layers' states, so that to save or restore one is one copy of memory at
the device's full rate. A layer's tensors are views of all rows.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.gated_delta import DeltaStates, Drafting
from nanovllm.kv.layout import CacheLayout, StateGroup
from nanovllm.plan import StepPlan
from nanovllm.runner.upload import upload_together

ALIGNED = 32  # words: where a row begins


class NoStates:
    """What a model has that keeps pages alone."""

    def __init__(self) -> None:
        self.by_layer: dict[int, DeltaStates] = {}

    def apply(self, plan: StepPlan) -> None:
        """Raises ValueError if the plan has states."""
        asked = [a.restore_from for a in plan.admits] + [c.save_to for c in plan.chunks]
        if plan.saves or any(state >= 0 for state in asked):
            raise ValueError(f"plan {plan.step} has recurrent states, which the model has not")

    def forget(self) -> None:
        """Nothing: there are none."""


class States:
    """Zeros at first. `num_drafts`: of decode rows; with some, slots keep what these fed."""

    def __init__(
        self,
        group: StateGroup,
        num_slots: int,
        num_checkpoints: int,
        num_drafts: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots, self.num_drafts, self.device = num_slots, num_drafts, device
        layers, most_rows = len(group.layers), num_slots * (1 + num_drafts)
        matrices = layers, group.heads, group.key_size, group.value_size
        inputs = layers, group.channels, group.taps
        at = prod(matrices)
        num_words = at - (-prod(inputs) * dtype.itemsize // 4)
        size = num_slots + 1 + num_checkpoints, -(-num_words // ALIGNED) * ALIGNED
        self.rows_NX = torch.zeros(size, dtype=torch.float32, device=device)
        recurrent = self.rows_NX[:, :at].unflatten(1, matrices)
        conv = self.rows_NX[:, at:].view(dtype)[:, : prod(inputs)].unflatten(1, inputs)
        width = group.channels + 2 * group.heads
        shape = (layers, num_slots + 1, 1 + num_drafts, width) if num_drafts else (layers, 0, 0, 0)
        kept = torch.zeros(shape, dtype=dtype, device=device)
        int32 = partial(torch.zeros, dtype=torch.int32, device=device)
        self.drafting = Drafting(int32(num_slots + 1), int32(most_rows), [])
        key_heads = (group.channels - group.heads * group.value_size) // (2 * group.key_size)
        tickets_RG = int32(most_rows, key_heads)
        self.by_layer = {
            layer: DeltaStates(
                conv[:, nth],
                recurrent[:, nth],
                tickets_RG,
                kept[nth] if num_drafts else None,
                self.drafting,
            )
            for nth, layer in enumerate(group.layers)
        }

    def apply(self, plan: StepPlan) -> None:
        """Saves what the plan wants of earlier steps; then new requests' states, whole or zero.

        Layers save the rest when they run the plan's chunks. Never waits. Raises ValueError if
        decode rows have drafts and the plan saves what they left: how far that is, nobody knows.
        """
        if plan.saves and self.num_drafts:
            raise ValueError(f"plan {plan.step} saves states of rows that may have drafts")
        self.drafting.parts = self._parts(plan) if plan.chunks else (None, None)
        for slot, checkpoint in plan.saves:
            self._copy(slot, self._row_of(checkpoint))
        if not plan.admits:
            return
        for admit in plan.admits:
            if admit.restore_from >= 0:
                self._copy(self._row_of(admit.restore_from), admit.slot)
            elif admit.num_cached:
                raise ValueError(f"plan {plan.step} has a prefix without its recurrent state")
        lists = (
            [admit.slot for admit in plan.admits if admit.restore_from < 0],
            [admit.slot for admit in plan.admits],
            [admit.num_cached for admit in plan.admits],
        )
        sent = upload_together([np.array(each, np.int32) for each in lists], self.device)
        self.rows_NX.index_fill_(0, sent[0].long(), 0)
        self.drafting.lengths_N[sent[1].long()] = sent[2]

    def _parts(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """Where the chunks' tokens before and behind a saved state begin, and who gets it."""
        parts, targets, start = [], [], plan.num_decoded
        for chunk in plan.chunks:
            saves = chunk.save_to >= 0
            parts += [start, start + chunk.save_at * saves]
            targets += [self._row_of(chunk.save_to) if saves else -1, chunk.slot]
            start += chunk.num_tokens
        sent = [np.array(each, np.int32) for each in ([*parts, start], targets)]
        parts_X, targets_X = upload_together(sent, self.device)
        return parts_X, targets_X

    def forget(self) -> None:
        """Gives the memory back. Nobody asks for states any more, until there are others."""
        for owner in self.drafting.owners:
            del owner.states
        del self.rows_NX, self.by_layer

    def _row_of(self, checkpoint: int) -> int:
        return self.num_slots + 1 + checkpoint

    def _copy(self, source: int, target: int) -> None:
        self.rows_NX[target].copy_(self.rows_NX[source])


def states_of(layout: CacheLayout, *sizes: Any) -> States | None:  # noqa: ANN401
    """What a model of this layout keeps beside pages, if anything; `sizes` as States takes them."""
    return None if layout.state is None else States(layout.state, *sizes)
