"""Split of a device's memory into running states, checkpoints and pages."""

from __future__ import annotations

from array import array

import pytest
from msgspec.structs import replace

from nanovllm.config import Cache, ConfigError, Recipe, Schedule, Speculate
from nanovllm.kv.hybrid import HybridMemory, memory_of
from nanovllm.kv.keys import PageKeys
from nanovllm.kv.layout import CacheLayout, PagedGroup, StateGroup
from nanovllm.kv.split import (
    Split,
    decode_bytes,
    num_paged,
    room_for_pages,
    running_bytes,
)

GIB = 1 << 30
PAGE = 128
# Qwen3-Next-80B-A3B in bfloat16 on one GPU.
NEXT = CacheLayout(
    paged=(PagedGroup(tuple(range(3, 48, 4)), 2, 256, 256, 2),),
    state=StateGroup(tuple(i for i in range(48) if i % 4 < 3), 8192, 3, 32, 128, 128, 2),
)
DENSE = CacheLayout(paged=NEXT.paged)


def test_pages_in_host_memory_are_counted_and_pinned_in_a_plan() -> None:
    cache = Cache(host_gib=3.0)
    split = Split(10, cache, DENSE, PAGE)
    assert split.host_pages == 1024 and Split(10, Cache(), DENSE, PAGE).host_pages == 0
    numbers = split.numbers([500], ranks=2)
    assert numbers["pages in host memory"] == 1024
    assert numbers["tokens in host memory"] == 131_072
    assert numbers["all pages in the host's memory, GiB"] == 6
    assert split.pin == "pages: 10, host_gib: 3.0"


def test_a_state_has_the_bytes_that_the_model_has() -> None:
    assert (NEXT.bytes_per_token, NEXT.bytes_per_state) == (24_576, 36 * (49_152 + 2_097_152))
    recipe = Recipe(model="x", schedule=Schedule(slots=64))
    assert running_bytes(NEXT, recipe) == 65 * NEXT.bytes_per_state
    drafting = replace(recipe, speculate=Speculate(method="ngram", tokens=3))
    fed = 36 * 4 * (8192 + 2 * 32) * 2  # inputs of the rule for 1 + 3 tokens
    assert running_bytes(NEXT, drafting) == 65 * (NEXT.bytes_per_state + fed)
    assert running_bytes(DENSE, recipe) == running_bytes(DENSE, drafting) == 0


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.5])
def test_checkpoints_and_pages_fill_the_room_in_their_shares(fraction) -> None:
    cache, left = Cache(checkpoint_fraction=fraction), 40 * GIB
    pages = room_for_pages(left, cache, NEXT) // (PAGE * NEXT.bytes_per_token) - 1
    count = Split(pages, cache, NEXT, PAGE).checkpoints
    states = count * NEXT.bytes_per_state
    assert 0 <= fraction * left - states < 2 * NEXT.bytes_per_state
    taken = states + (pages + 1) * PAGE * NEXT.bytes_per_token
    assert 0 <= left - taken < 2 * NEXT.bytes_per_state + PAGE * NEXT.bytes_per_token


def test_a_number_of_checkpoints_leaves_pages_the_rest() -> None:
    cache = Cache(checkpoints=100)
    assert room_for_pages(40 * GIB, cache, NEXT) == 40 * GIB - 100 * NEXT.bytes_per_state
    assert Split(7, cache, NEXT, PAGE).checkpoints == 100


@pytest.mark.parametrize(
    ("layout", "cache"), [(DENSE, Cache()), (NEXT, Cache(prefix=False)), (DENSE, Cache())]
)
def test_where_no_state_is_reused_pages_get_all(layout, cache) -> None:
    assert room_for_pages(40 * GIB, cache, layout) == 40 * GIB
    assert Split(10_000, cache, layout, PAGE).checkpoints == 0


@pytest.mark.parametrize("layout", [DENSE, NEXT])
@pytest.mark.parametrize("checkpoints", [0, 3])
def test_what_a_model_has_follows_from_its_layout(layout, checkpoints) -> None:
    memory = memory_of(layout, Cache(pages=9, page_tokens=4, checkpoints=checkpoints))
    assert isinstance(memory, HybridMemory) is (layout is NEXT)


def test_whatever_its_length_a_request_takes_little_more_than_it_must() -> None:
    """Pages and states are not padded to a common size: vLLM uses pages of 7,808 tokens."""
    found = Split(9_000, Cache(), NEXT, PAGE).numbers((12, 500, 8_000, 100_000), 1)
    above = [found[f"a request of {n:,}, % above the least"] for n in (12, 500, 8_000, 100_000)]
    assert above == pytest.approx([3.68, 0.33, 0.57, 0.09], abs=0.01) and max(above) <= 5
    assert found["a request of 8,000, MiB"] == pytest.approx(73.69 + 63 * 3, abs=0.01)
    memory = memory_of(NEXT, Cache(pages=9_000, page_tokens=PAGE, checkpoints=9))
    for i, num_tokens in enumerate((12, 500, 8_000, 100_000)):
        keys = PageKeys(array("i", [i] * num_tokens), "", PAGE)
        before = memory.pool.num_free
        admitted = memory.admit(i, keys, 0)
        assert admitted is not None
        taken = NEXT.bytes_per_state + PAGE * NEXT.bytes_per_token * (before - memory.pool.num_free)
        assert taken / 2**20 == pytest.approx(found[f"a request of {num_tokens:,}, MiB"])


def test_all_of_a_cache_is_counted() -> None:
    split = Split(999, Cache(checkpoint_fraction=0.5), NEXT, PAGE)
    pages = 1000 * PAGE * NEXT.bytes_per_token
    assert split.bytes["pages"] == pages and 0 <= 2 * pages - split.total < NEXT.bytes_per_state
    assert split.pin == f"pages: 999, checkpoints: {split.checkpoints}"
    dense = Split(999, Cache(), DENSE, PAGE)
    assert (dense.total, dense.pin, dense.numbers([12], 1)) == (
        pages,
        "pages: 999",
        {"pages": 999, "tokens": 999 * PAGE},
    )


def test_checkpoints_in_host_memory_leave_device_memory_to_pages() -> None:
    """One budget has both: of 40 GiB, 400 states take 28.8, and pages the rest."""
    cache = Cache(checkpoints=400, checkpoint_fraction=0.0, host_gib=40)
    assert room_for_pages(30 * GIB, cache, NEXT) == 30 * GIB
    split, state = Split(999, cache, NEXT, PAGE), NEXT.bytes_per_state
    assert (split.checkpoints, split.host_bytes) == (400, 400 * state)
    assert split.host_pages == (40 * GIB - 400 * state) // (PAGE * NEXT.bytes_per_token) == 3_828
    assert split.bytes == {"checkpoints": 0, "pages": 1000 * PAGE * NEXT.bytes_per_token}
    assert split.total == split.bytes["pages"]
    assert split.pin == "pages: 999, checkpoints: 400, checkpoint_fraction: 0, host_gib: 40"
    for ranks in (1, 4):
        found = split.numbers([], ranks)
        assert (found["checkpoints"], found["all checkpoints in the host's memory, GiB"]) == (
            400,
            ranks * 400 * state / GIB,
        )
        assert found["all pages in the host's memory, GiB"] == ranks * 3_828 * 3 / 1024
    on_device = Split(999, Cache(host_gib=40), NEXT, PAGE)
    assert on_device.host_bytes == 0 and on_device.host_pages == 40 * 1024 // 3
    assert on_device.pin == f"pages: 999, checkpoints: {on_device.checkpoints}, host_gib: 40"


@pytest.mark.parametrize(
    ("device_pages", "gib", "states", "host_pages"),
    [
        (1_600, 64, 386, 12_364),  # 50 states suffice for the device, 386 for host memory
        (16_000, 64, 444, 10_939),  # half of it, for the device's pages
        (16_000, 8, 55, 1_379),  # too little for all of the device's pages
    ],
)
def test_there_is_a_state_for_each_4096_tokens_of_the_larger_tier(
    device_pages, gib, states, host_pages
) -> None:
    split = Split(device_pages, Cache(checkpoint_fraction=0.0, host_gib=gib), NEXT, PAGE)
    assert (split.checkpoints, split.host_pages) == (states, host_pages)
    taken = split.host_bytes + host_pages * PAGE * NEXT.bytes_per_token
    assert 0 <= gib * GIB - taken < PAGE * NEXT.bytes_per_token


def test_all_of_the_budget_may_be_states() -> None:
    cache = Cache(
        checkpoints=555, checkpoint_fraction=0.0, host_gib=555 * NEXT.bytes_per_state / GIB
    )
    split = Split(999, cache, NEXT, PAGE)
    assert (split.checkpoints, split.host_pages) == (555, 0)


def test_where_no_state_is_reused_the_host_keeps_none() -> None:
    dense = Split(999, Cache(checkpoint_fraction=0.0, host_gib=3), DENSE, PAGE)
    assert (dense.checkpoints, dense.host_bytes, dense.host_pages) == (0, 0, 1024)
    assert dense.pin == "pages: 999, host_gib: 3"
    assert Split(999, Cache(checkpoint_fraction=0.0), NEXT, PAGE).checkpoints == 0


@pytest.mark.parametrize(
    ("checkpoints", "gib", "needed"),
    [
        ("auto", 0.07, "0.074891 for 1 recurrent state and a page of 128 tokens, 24 KiB each"),
        (0, 0.002, "0.00293 for a page of 128 tokens, 24 KiB each"),
        (200, 14, "14.39209 for 200 recurrent states"),
    ],
)
def test_too_little_host_memory_is_one_line(checkpoints, gib, needed) -> None:
    cache = Cache(checkpoints=checkpoints, checkpoint_fraction=0.0, host_gib=gib)
    with pytest.raises(ConfigError) as caught:
        Split(999, cache, NEXT, PAGE).host_pages  # noqa: B018
    assert str(caught.value) == f"cache.host_gib is {gib}; it must be 0, or at least {needed}"
    found = Split(999, replace(cache, host_gib=float(needed.split()[0])), NEXT, PAGE)
    expected = {"auto": (1, 1), 0: (0, 1), 200: (200, 0)}
    assert (found.checkpoints, found.host_pages) == expected[checkpoints]


def test_what_a_decode_row_moves() -> None:
    assert num_paged(NEXT) == 12
    assert decode_bytes(NEXT, 1000) == 1000 * NEXT.bytes_per_token + 2 * NEXT.bytes_per_state
    assert decode_bytes(DENSE, 1000) == 1000 * DENSE.bytes_per_token
