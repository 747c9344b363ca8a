"""How a room is split: states of running requests, states kept for reuse, pages. Knows bytes.

The states of all slots come first, for without them nothing runs. Of what they leave, checkpoints
get cache.checkpoint_fraction, or what cache.checkpoints of them take, and pages the rest.
"""

from __future__ import annotations

from nanovllm.config import Cache
from nanovllm.kv.layout import CacheLayout


def running_bytes(layout: CacheLayout, num_slots: int) -> int:
    """The states of all slots and of the padding slot."""
    return (num_slots + 1) * layout.bytes_per_state


def room_for_pages(left: int, cache: Cache, layout: CacheLayout) -> int:
    """The bytes for pages, of those that running states leave."""
    if cache.checkpoints == "auto":
        return left - int(left * fraction_of(cache, layout))
    return left - cache.checkpoints * layout.bytes_per_state


def num_checkpoints(num_pages: int, cache: Cache, layout: CacheLayout, page_tokens: int) -> int:
    """Beside so many pages. None where nothing recurs, or nothing may be reused."""
    if cache.checkpoints != "auto":
        return cache.checkpoints if layout.state is not None else 0
    share = fraction_of(cache, layout)
    pages = (num_pages + 1) * page_tokens * layout.bytes_per_token
    return int(pages * share / (1 - share) / layout.bytes_per_state) if share else 0


def fraction_of(cache: Cache, layout: CacheLayout) -> float:
    return cache.checkpoint_fraction if layout.state is not None and cache.prefix else 0.0
