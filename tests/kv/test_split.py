"""How a room is split between running states, checkpoints and pages."""

from __future__ import annotations

import pytest

from nanovllm.config import Cache
from nanovllm.kv.hybrid import HybridMemory, memory_of
from nanovllm.kv.layout import CacheLayout, PagedGroup, StateGroup
from nanovllm.kv.split import num_checkpoints, room_for_pages, running_bytes

GIB = 1 << 30
PAGE = 128
# Qwen3-Next-80B-A3B in bfloat16 on one GPU.
NEXT = CacheLayout(
    paged=(PagedGroup(tuple(range(3, 48, 4)), 2, 256, 256, 2),),
    state=StateGroup(tuple(i for i in range(48) if i % 4 < 3), 8192, 3, 32, 128, 128, 2),
)
DENSE = CacheLayout(paged=NEXT.paged)


def test_a_state_has_the_bytes_that_the_model_has() -> None:
    assert (NEXT.bytes_per_token, NEXT.bytes_per_state) == (24_576, 36 * (49_152 + 2_097_152))
    assert running_bytes(NEXT, 64) == 65 * NEXT.bytes_per_state
    assert running_bytes(DENSE, 64) == 0


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.5])
def test_checkpoints_and_pages_fill_the_room_in_their_shares(fraction) -> None:
    cache, left = Cache(checkpoint_fraction=fraction), 40 * GIB
    pages = room_for_pages(left, cache, NEXT) // (PAGE * NEXT.bytes_per_token) - 1
    count = num_checkpoints(pages, cache, NEXT, PAGE)
    states = count * NEXT.bytes_per_state
    assert 0 <= fraction * left - states < 2 * NEXT.bytes_per_state
    taken = states + (pages + 1) * PAGE * NEXT.bytes_per_token
    assert 0 <= left - taken < 2 * NEXT.bytes_per_state + PAGE * NEXT.bytes_per_token


def test_a_number_of_checkpoints_leaves_pages_the_rest() -> None:
    cache = Cache(checkpoints=100)
    assert room_for_pages(40 * GIB, cache, NEXT) == 40 * GIB - 100 * NEXT.bytes_per_state
    assert num_checkpoints(7, cache, NEXT, PAGE) == 100


@pytest.mark.parametrize(
    ("layout", "cache"), [(DENSE, Cache()), (NEXT, Cache(prefix=False)), (DENSE, Cache())]
)
def test_where_no_state_is_reused_pages_get_all(layout, cache) -> None:
    assert room_for_pages(40 * GIB, cache, layout) == 40 * GIB
    assert num_checkpoints(10_000, cache, layout, PAGE) == 0


@pytest.mark.parametrize("layout", [DENSE, NEXT])
@pytest.mark.parametrize("checkpoints", [0, 3])
def test_what_a_model_has_follows_from_its_layout(layout, checkpoints) -> None:
    memory = memory_of(layout, Cache(pages=9, page_tokens=4, checkpoints=checkpoints))
    assert isinstance(memory, HybridMemory) is (layout is NEXT)
