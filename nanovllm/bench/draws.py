"""Comparison of a graph that draws tokens and drafts with the eager draw from the same logits.

Both run on the same slots and caches, and the same kernels sum in the same order. So all results
must be equal: new tokens, drafts, texts and lengths of the slots, and keys and values that a draft
model wrote for them.

Decision: the texts are made such that a comparison of drafts is one. Random texts would reject all
drafts, and prompt lookup would find nothing in them. So some drafts are replaced by the tokens that
will be drawn in their places, and the end of most texts is copied to their start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nanovllm.runner.batch import Slots, StepRows
from nanovllm.runner.runner import Forwarded, Runner, Written


@contextmanager
def restored(slots: Slots) -> Iterator[None]:
    """Restore the texts and lengths of all slots afterwards."""
    before = slots.tokens_NL.clone(), slots.lengths_N.clone()
    try:
        yield
    finally:
        slots.tokens_NL.copy_(before[0])
        slots.lengths_N.copy_(before[1])


def compare(
    runner: Runner, rows: StepRows, eager: Callable[[], object], replay: Callable[[], object]
) -> int:
    """Return the number of values that differ after the eager draw and the replay.

    The forward pass of `rows` was replayed last, and both draw from its results.
    """
    accept_drafts(runner, rows)
    copy_ends(runner, rows, eager)
    keys, is_fed_R = draft_keys(runner, rows), rows.slots_R != runner.slots.padding
    expected, actual = (results(runner.slots, step, is_fed_R, keys) for step in (eager, replay))
    return sum(int((x != y).sum()) for x, y in zip(expected, actual, strict=True))


def accept_drafts(runner: Runner, rows: StepRows) -> None:
    """Replace the first n % 3 drafts of slot n by the tokens that will be drawn in their places."""
    slots, graphs = runner.slots, runner.graphs.of(adapted=rows.adapted)
    forwarded = graphs.decode.captured[size_of(rows)].output
    assert isinstance(forwarded, Forwarded) and forwarded.logits_SV is not None
    slots_T, positions_T = forwarded.batch.slots_T, forwarded.batch.positions_T + 1
    drawn_T = runner.sampler.draw(forwarded.logits_SV, slots_T, positions_T)
    nth_T = positions_T - slots.lengths_N[slots_T]  # 1 in the place of the first draft
    replaced_T = (slots_T != slots.padding) & (nth_T <= slots_T % 3)
    drafts_T = slots.tokens_NL[slots_T, positions_T]
    slots.tokens_NL[slots_T, positions_T] = drawn_T.int().where(replaced_T, drafts_T)


def size_of(rows: StepRows) -> tuple[int, int]:
    return rows.num_tokens, rows.width


def copy_ends(runner: Runner, rows: StepRows, eager: Callable[[], object]) -> None:
    """Copy the end of each text but every fourth to its start, as it will be after the draw."""
    slots = runner.slots
    slots_F = rows.slots_R[(rows.slots_R % 4 < 3) & (rows.slots_R != slots.padding)]
    size = int(slots.lengths_N[slots_F].min()) // 2 if len(slots_F) else 0
    with restored(slots):
        eager()
        steps_E = torch.arange(1 - size, 1, device=slots.device)
        ends_FE = slots.tokens_NL[slots_F[:, None], slots.lengths_N[slots_F, None] + steps_E]
    slots.tokens_NL[slots_F, :size] = ends_FE


def draft_keys(runner: Runner, rows: StepRows) -> list[tuple[Tensor, Tensor]]:
    """Return the keys and values of each draft layer, one row per place, and the rows' new places.

    A draft model computes them from each row's first new token up to its last draft. The padding
    page is left out.
    """
    slots, num_layers = runner.slots, len(runner.model.layers)
    most = 1 + rows.width + runner.num_drafts
    positions_RM = slots.lengths_N[rows.slots_R, None] + torch.arange(most, device=slots.device)
    positions_RM = positions_RM.clamp(max=slots.max_tokens - 1).long()
    size = slots.page_tokens
    pages_RM = slots.pages_NM[rows.slots_R[:, None], positions_RM // size].long()
    places_P = (pages_RM * size + positions_RM % size)[pages_RM > 0].unique()
    caches: dict[int, Any] = runner.caches.by_layer
    return [
        (bits(pages_PSGA).flatten(0, 1), places_P)
        for layer, cache in caches.items()
        if layer >= num_layers
        for pages_PSGA in (cache.k_PSGA, cache.v_PSGA)
    ]


def bits(x: Tensor) -> Tensor:
    """Return a view as integers, since torch cannot index fp8, and a NaN would equal nothing."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return x.view(kinds[x.element_size()])


def results(
    slots: Slots,
    step: Callable[[], object],
    is_fed_R: Tensor,
    keys: list[tuple[Tensor, Tensor]],
) -> list[Tensor]:
    """Return copies of all that a draw changes. The slots are as before afterwards.

    Padding rows have arbitrary drafts, which are left out. Keys and values are zeroed first, so
    that a draw which does not write them is found.
    """
    for cache_PX, places_P in keys:
        cache_PX[places_P] = 0
    with restored(slots):
        written = step()
        assert isinstance(written, Written)
        changed = [written.tokens_RW[is_fed_R], slots.tokens_NL, slots.lengths_N]
        if written.drafts_RX is not None:
            changed.append(written.drafts_RX[is_fed_R])
        return [x.clone() for x in changed] + [cache_PX[places_P] for cache_PX, places_P in keys]
