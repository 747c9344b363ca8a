"""Scheduling policy: order of requests, and token budget of prompts. Independent of pages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from nanovllm.sched.request import Request

LOOKED_AT = 32  # waiting requests that a step considers at most
MIN_SAVED_TOKENS = 32  # least cached tokens that justify waiting a step: fewer are nearly free


def urgency(priority: int, now: float, arrival: int, ageing_s: float) -> tuple[float, int]:
    """Return the sort key of a request that arrives `now`; the smallest is served first.

    Waiting `ageing_s` seconds is worth one priority level. All requests age alike, so the order of
    two requests never changes and the key is fixed at arrival: no starvation, no re-sorting.
    """
    return (priority * ageing_s + now, arrival)


def prompt_budget(step_tokens: int, mixed_step_tokens: int, num_decoded: int) -> int:
    """Return the prompt tokens of a step whose decode rows have `num_decoded` tokens (>= 1).

    Prompts fill the step up to `mixed_step_tokens`. They get at least a quarter of it, so that they
    progress next to any number of rows, and never exceed `step_tokens`.
    """
    share = max(mixed_step_tokens - num_decoded, -(-mixed_step_tokens // 4))
    return min(share, step_tokens - num_decoded)


def worth_waiting(spared: int, left: int, least: int) -> bool:
    """Return True if a request should wait a step for a prefix that another one computes now.

    By waiting it saves `spared` of the `left` tokens that it must compute. A request that shares
    little would only be late.
    """
    return spared >= least and 2 * spared >= left


class ByUrgency:
    """Requests sorted by urgency."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        # Parallel to _requests, so that bisect needs no key function.
        self._keys: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def add(self, request: Request) -> None:
        at = bisect_left(self._keys, request.urgency)
        self._keys.insert(at, request.urgency)
        self._requests.insert(at, request)

    def remove(self, request: Request) -> None:
        at = bisect_left(self._keys, request.urgency)
        assert self._requests[at] is request
        del self._requests[at], self._keys[at]
