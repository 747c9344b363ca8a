"""Division of a step's tokens into two halves, which alternate in each part of a layer.

While the ranks sum the products of one half, each rank computes the other half. The loop is
models/decoder.py:Decoder._in_halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec.structs import replace as replace_struct

from nanovllm.attention.base import Batch
from nanovllm.plan import Chunk

TILE = 128  # rows of a tile of a product; a first half of several tiles has whole ones
LEAST_TILES = 8
NO_SLOT = -1  # of a padding chunk, whose recurrent state is not stored


def halves_of(batch: Batch) -> tuple[Batch, ...]:
    """Return the two halves of a step with chunks, or () if decode rows fill the first one.

    The cut may be inside a chunk. The second half then attends to keys and values that the first
    one has stored. Indices of tokens count from the first token of a half. `sampled_at` is None in
    both, since the last layer is not divided.
    """
    num_tokens, num_rows = len(batch.token_ids_T), len(batch.lengths_R)
    at = num_tokens // 2
    at -= at % TILE if at >= LEAST_TILES * TILE else 0
    if batch.num_decode_tokens >= at:
        return ()
    padding = [Chunk(NO_SLOT, batch.max_new, samples=False)] * (num_rows - batch.num_decodes)
    before, after = divided(batch.planned or padding, at - batch.num_decode_tokens)
    stop, start = batch.num_decodes + len(before), num_rows - len(after)
    ends_R = batch.starts_R1[1 : stop + 1]
    first = replace(
        part_of(batch, slice(0, at), slice(0, stop)),
        starts_R1=batch.starts_R1[: stop + 1].clamp(max=at),
        lengths_R=batch.lengths_R[:stop] - (ends_R - at).clamp(min=0),
        max_new=max(batch.decode_width, *(chunk.num_tokens for chunk in before)),
        planned=before,
    )
    second = replace(
        part_of(batch, slice(at, num_tokens), slice(start, num_rows)),
        starts_R1=(batch.starts_R1[start:] - at).clamp(min=0),
        max_new=max(chunk.num_tokens for chunk in after),
        planned=after,
        num_decodes=0,
        num_decode_tokens=0,
    )
    return first, second


def part_of(batch: Batch, tokens: slice, rows: slice) -> Batch:
    """Return these tokens and rows of a batch. The starts of rows are those of the whole batch."""
    return replace(
        batch,
        token_ids_T=batch.token_ids_T[tokens],
        positions_T=batch.positions_T[tokens],
        slot_mapping_T=batch.slot_mapping_T[tokens],
        slots_T=batch.slots_T[tokens],
        slots_R=batch.slots_R[rows],
        lengths_R=batch.lengths_R[rows],
        page_table_RM=batch.page_table_RM[rows],
        sampled_at=None,
    )


def divided(chunks: Sequence[Chunk], count: int) -> tuple[list[Chunk], list[Chunk]]:
    """Return the chunks of the first `count` tokens, and those of the rest.

    A chunk on both sides becomes two. The part that has the token before the saved state saves it.
    """
    before, after = list[Chunk](), list[Chunk]()
    for chunk in chunks:
        own = min(count, chunk.num_tokens)  # tokens on the first side
        count -= own
        if own in (0, chunk.num_tokens):
            (before if own else after).append(chunk)
            continue
        saves_first = chunk.save_at <= own
        before.append(
            replace_struct(
                chunk,
                num_tokens=own,
                samples=False,
                save_to=chunk.save_to if saves_first else -1,
            )
        )
        after.append(
            replace_struct(
                chunk,
                num_tokens=chunk.num_tokens - own,
                start=chunk.start + own,
                save_to=-1 if saves_first else chunk.save_to,
                save_at=0 if saves_first else chunk.save_at - own,
            )
        )
    return before, after
