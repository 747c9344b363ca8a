"""Cache events in vLLM's format, for routers that send a request where its prefix is cached.

A batch is the array [time, events, rank of the engine]; an event is a map with the key "type"
(vllm/distributed/kv_events.py of vLLM 0.33.0). Fields with None are left out where vLLM leaves them
out. A hash is the last 8 bytes of a page's key, as vLLM's hashes are by default.

Consumers index pages by their tokens and by the hash of the page before. So a page is announced
with its text, once, and withdrawn when its last copy is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
from msgspec import Struct

from nanovllm.kv.keys import Key, PageKeys
from nanovllm.kv.page_log import Change, Registered

MEDIUM = "GPU"  # vLLM's word for the first tier, also on other devices


class BlockStored(Struct, tag=True):
    """Pages of one text, one after the other, that can be reused from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None  # of the page before; None: they begin the text
    token_ids: list[int]
    block_size: int  # tokens per page
    lora_id: int | None
    medium: str
    lora_name: str | None
    # For each page, what distinguishes it from another with the same tokens: the adapter's name,
    # and with the first page the salt.
    extra_keys: list[list[str] | None]
    kv_cache_spec_kind: str  # "full_attention" or "mla_attention"


class BlockRemoved(Struct, tag=True):
    block_hashes: list[int]
    medium: str


class AllBlocksCleared(Struct, tag=True):
    """The first event of an engine: earlier ones came from its predecessor."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, array_like=True):
    ts: float  # seconds since 1970
    events: list[Event]
    data_parallel_rank: int


encode = msgspec.msgpack.Encoder().encode


def hash_of(key: Key) -> int:
    return int.from_bytes(key[-8:], "big")


class EventWriter:
    """Makes events of changes. Lanes of one engine may have copies of a page; they count as one."""

    def __init__(self, page_tokens: int, kind: str) -> None:
        """`kind` is kv_cache_spec_kind."""
        self._page_tokens = page_tokens
        self._kind = kind
        self._copies: Counter[Key] = Counter()  # of announced pages

    def events(self, changes: Iterable[Change]) -> list[Event]:
        """Return the events of one step. Neighbouring pages of a text are one event."""
        events: list[Event] = []
        after: tuple[PageKeys, int] | None = None  # the page that would continue the last event
        for change in changes:
            if isinstance(change, Registered):
                key, keys, index = change
                self._copies[key] += 1
                if self._copies[key] > 1:
                    continue
                if after != (keys, index):
                    events.append(self._opened(keys, index))
                self._add(events[-1], change)
                after = keys, index + 1
            elif gone := [hash_of(key) for key in change if self._is_last(key)]:
                if not (events and isinstance(events[-1], BlockRemoved)):
                    events.append(BlockRemoved([], MEDIUM))
                events[-1].block_hashes += gone  # type: ignore[union-attr]
                after = None
        return events

    def _opened(self, keys: PageKeys, index: int) -> BlockStored:
        """Return an event for pages from `index` on, which has none yet."""
        return BlockStored(
            block_hashes=[],
            parent_block_hash=hash_of(keys.full(index - 1)) if index else None,
            token_ids=[],
            block_size=self._page_tokens,
            lora_id=keys.adapter_number or None,
            medium=MEDIUM,
            lora_name=keys.adapter_name or None,
            extra_keys=[],
            kv_cache_spec_kind=self._kind,
        )

    def _add(self, event: Event, page: Registered) -> None:
        assert isinstance(event, BlockStored)
        key, keys, index = page
        size = self._page_tokens
        event.block_hashes.append(hash_of(key))
        event.token_ids += keys.tokens[index * size : (index + 1) * size].tolist()
        salt = keys.salt if index == 0 else ""
        event.extra_keys.append([text for text in (keys.adapter_name, salt) if text] or None)

    def _is_last(self, key: Key) -> bool:
        """Forget one copy of a page. Return True if it was announced and no copy is left."""
        if key not in self._copies:  # partly filled
            return False
        self._copies[key] -= 1
        if self._copies[key]:
            return False
        del self._copies[key]
        return True
