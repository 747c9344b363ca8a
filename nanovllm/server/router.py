"""Choice of an engine for a request, by an estimate of its cached prefix and by its load.

    cost = prefill_weight * prompt tokens to compute + load_weight * requests in flight

Pages that several requests in flight share are computed once, so each request pays a share. A
prefix common to all prompts therefore draws few of them to the engine that has it, and the other
engines soon have it too. Independent of engines and HTTP.

Decision: the estimate comes from the prompts that were sent, not from reports of every page cached
or evicted. It misses prompts of other API processes and early evictions, and it costs an engine
nothing.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

MOST_PAGES = 1 << 16  # pages remembered per engine; some 10 MB


@dataclass(frozen=True, slots=True)
class Routed:
    """The engine of a request, and the pages of its prompt."""

    engine: int
    keys: list[int]  # of full pages, in order
    num_cached: int  # pages that the engine was estimated to have


class RequestRouter:
    def __init__(
        self,
        num_pages: Sequence[int],
        page_tokens: int,
        *,
        prefill_weight: float,
        load_weight: float,
        first: int = 0,
    ) -> None:
        """`num_pages` is per engine, 0 without a prefix cache.

        `first` breaks the first tie between equal engines. It should differ between API processes.
        """
        self._limits = [min(count, MOST_PAGES) for count in num_pages]
        # Keys of pages, the next to be dropped first.
        self._cached: list[OrderedDict[int, None]] = [OrderedDict() for _ in num_pages]
        self._page_tokens = page_tokens
        self._prefill_weight = prefill_weight
        self._load_weight = load_weight
        self._in_flight: Counter[int] = Counter()  # requests by keys of their pages
        self._turn = first

    def route(
        self,
        token_ids: Sequence[int],
        salt: str,
        owner: str,
        loads: Sequence[float | None],
        adapter: str = "",
    ) -> Routed:
        """Choose an engine for a prompt, to be computed with an adapter if one is named.

        `loads` has the requests in flight of each engine, None for one that must not be chosen; at
        least one must be a number. Requests of one `owner` stay together if that costs nothing.
        """
        keys = self._keys(token_ids, (salt, adapter))
        ahead = self._tokens_ahead(keys, len(token_ids))
        able = [at for at, load in enumerate(loads) if load is not None]
        num_cached = {at: self._num_cached(at, keys) for at in able}
        compute = {at: self._prefill_weight * ahead[num_cached[at]] for at in able}
        cost = {at: compute[at] + self._load_weight * (loads[at] or 0.0) for at in able}
        self._turn += 1
        best = min(able, key=lambda at: (cost[at], (at - self._turn) % len(loads)))
        if owner:  # an owner's own requests raise the load of its engine: allow one more
            limit = cost[best] + self._load_weight
            equal = [at for at in able if cost[at] <= limit and compute[at] <= compute[best]]
            best = max(equal, key=lambda at: blake2b(f"{at} {owner}".encode()).digest())
        return Routed(best, keys, num_cached[best])

    def sent(self, routed: Routed) -> None:
        """Record that the request was sent, so that the engine will have its pages."""
        self._in_flight.update(routed.keys)
        cached = self._cached[routed.engine]
        for key in reversed(routed.keys):  # a page is useless without those before it
            cached[key] = None
            cached.move_to_end(key)
        while len(cached) > self._limits[routed.engine]:
            cached.popitem(last=False)

    def done(self, routed: Routed, num_cached_tokens: int | None) -> None:
        """Record that the request has ended.

        `num_cached_tokens` is the prefix that the engine found, None if the request never started.
        """
        for key in routed.keys:
            self._in_flight[key] -= 1
            if not self._in_flight[key]:
                del self._in_flight[key]
        believed = routed.num_cached * self._page_tokens
        if num_cached_tokens is not None and num_cached_tokens < believed:
            # The engine evicts pages earlier than estimated, so other pages of that age are gone
            # too.
            cached = self._cached[routed.engine]
            for _ in range(len(cached) // 4):
                cached.popitem(last=False)

    def forget(self, engine: int) -> None:
        """Forget the pages of an engine that restarted with an empty cache."""
        self._cached[engine].clear()

    def _keys(self, token_ids: Sequence[int], root: tuple[str, str]) -> list[int]:
        """Return keys of the prompt's full pages, except one that holds the last token.

        The last token is always computed. Equal keys nearly always mean equal prompts up to that
        page. Keys of other processes are different.
        """
        packed = array("i", token_ids).tobytes()
        size = 4 * self._page_tokens
        key = hash(root)
        keys = []
        for begin in range(0, (len(token_ids) - 1) // self._page_tokens * size, size):
            key = hash((key, packed[begin : begin + size]))
            keys.append(key)
        return keys

    def _tokens_ahead(self, keys: list[int], num_tokens: int) -> list[float]:
        """Return the tokens to compute if the first 0, 1, ... pages are cached."""
        size = self._page_tokens
        ahead = float(num_tokens - len(keys) * size)
        sums = [ahead]
        for key in reversed(keys):
            ahead += size / (1 + self._in_flight.get(key, 0))
            sums.append(ahead)
        return sums[::-1]

    def _num_cached(self, engine: int, keys: list[int]) -> int:
        """Return the number of leading pages that the engine has."""
        cached = self._cached[engine]
        return next((at for at, key in enumerate(keys) if key not in cached), len(keys))
