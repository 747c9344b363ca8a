"""Which of several engines gets a request: a guess of what each has cached, weighed with its load.

    cost = prefill_weight * prompt tokens to compute + load_weight * requests in flight

Pages that requests in flight have in common are computed once for all of these, so each pays a
share: where one prefix begins all prompts it draws few of them to the engine that has it, and the
others soon have it too. Knows neither engines nor HTTP.

Decision: a guess from the prompts that were sent, instead of reports of every page that comes and
goes. It errs by what other API processes sent and by what was dropped early, and costs an engine
nothing.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

MOST_PAGES = 1 << 16  # remembered of each engine; some 10 MB


@dataclass(frozen=True, slots=True)
class Routed:
    """One request's engine, and the pages of its prompt."""

    engine: int
    keys: list[int]  # of full pages, from the first one on
    num_cached: int  # pages that the engine was believed to have


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
        """`num_pages`: of each engine, 0 for one without a prefix cache. `first`: who begins when
        all are equal, which should differ between API processes."""
        self._limits = [min(count, MOST_PAGES) for count in num_pages]
        # Keys of pages, those that will be dropped first in front.
        self._cached: list[OrderedDict[int, None]] = [OrderedDict() for _ in num_pages]
        self._page_tokens = page_tokens
        self._prefill_weight = prefill_weight
        self._load_weight = load_weight
        self._in_flight: Counter[int] = Counter()  # requests by keys of their pages
        self._turn = first

    def route(
        self, token_ids: Sequence[int], salt: str, owner: str, loads: Sequence[float | None]
    ) -> Routed:
        """Choose for a prompt. `loads`: requests in flight on each engine, None where it must not
        go; one must be able. `owner`: whose requests stay together when that costs nothing."""
        keys = self._keys(token_ids, salt)
        ahead = self._tokens_ahead(keys, len(token_ids))
        able = [at for at, load in enumerate(loads) if load is not None]
        found = {at: self._found(at, keys) for at in able}
        compute = {at: self._prefill_weight * ahead[found[at]] for at in able}
        cost = {at: compute[at] + self._load_weight * (loads[at] or 0.0) for at in able}
        num, self._turn = len(loads), self._turn + 1
        best = min(able, key=lambda at: (cost[at], (at - self._turn) % num))
        if owner:  # whose requests add to the load of its engine: one more is as good
            limit = cost[best] + self._load_weight
            equal = [at for at in able if cost[at] <= limit and compute[at] <= compute[best]]
            best = max(equal, key=lambda at: blake2b(f"{at} {owner}".encode()).digest())
        return Routed(best, keys, found[best])

    def sent(self, routed: Routed) -> None:
        """It is on its way: the engine will have its pages."""
        self._in_flight.update(routed.keys)
        cached, limit = self._cached[routed.engine], self._limits[routed.engine]
        for key in reversed(routed.keys):  # no page is of use without those before it
            cached[key] = None
            cached.move_to_end(key)
        while len(cached) > limit:
            cached.popitem(last=False)

    def done(self, routed: Routed, num_cached_tokens: int | None) -> None:
        """It has ended. `num_cached_tokens`: what its engine found; None if it never began."""
        for key in routed.keys:
            self._in_flight[key] -= 1
            if not self._in_flight[key]:
                del self._in_flight[key]
        believed = routed.num_cached * self._page_tokens
        if num_cached_tokens is not None and num_cached_tokens < believed:
            # The engine drops pages sooner than was thought; so it has others of that age no more.
            cached = self._cached[routed.engine]
            for _ in range(len(cached) // 4):
                cached.popitem(last=False)

    def forget(self, engine: int) -> None:
        """It begins anew, with nothing cached."""
        self._cached[engine].clear()

    def _keys(self, token_ids: Sequence[int], salt: str) -> list[int]:
        """Names of the prompt's full pages but one with its last token, which is always computed.

        Equal names mean equal prompts up to there, nearly always. Other processes name otherwise.
        """
        packed, size = array("i", token_ids).tobytes(), 4 * self._page_tokens
        key, keys = hash(salt), []
        for begin in range(0, (len(token_ids) - 1) // self._page_tokens * size, size):
            key = hash((key, packed[begin : begin + size]))
            keys.append(key)
        return keys

    def _tokens_ahead(self, keys: list[int], num_tokens: int) -> list[float]:
        """What is to compute of a prompt when its first 0, 1, ... pages are cached, in tokens."""
        size, in_flight = self._page_tokens, self._in_flight
        ahead = float(num_tokens - len(keys) * size)
        sums = [ahead]
        for key in reversed(keys):
            ahead += size / (1 + in_flight.get(key, 0))
            sums.append(ahead)
        return sums[::-1]

    def _found(self, engine: int, keys: list[int]) -> int:
        """How many of the first pages it has."""
        cached = self._cached[engine]
        return next((at for at, key in enumerate(keys) if key not in cached), len(keys))
