"""Who goes first, in the queue and in preemption, and with how many tokens. Knows no pages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from nanovllm.sched.request import Request

LOOKED_AT = 32  # requests of the queue that a step looks at in vain before it gives up
LEAST_SPARED = 32  # tokens worth waiting a step for: a step does that many almost for nothing


def urgency(priority: int, now: float, arrival: int, ageing_s: float) -> tuple[float, int]:
    """Sort key of a request that arrives now; the smallest goes first.

    Waiting `ageing_s` seconds is worth one priority level. Everybody ages alike, so the order of
    two requests never changes and the key can be fixed at arrival: no starvation, no re-sorting.
    """
    return (priority * ageing_s + now, arrival)


def prompt_budget(step_tokens: int, mixed_step_tokens: int, num_decoded: int) -> int:
    """Prompt tokens of a step whose decode rows feed `num_decoded` tokens (at least one).

    As many as fill up `mixed_step_tokens` but at least a quarter of it, so that prompts go on
    beside any number of rows; never more than fill up `step_tokens`.
    """
    share = max(mixed_step_tokens - num_decoded, -(-mixed_step_tokens // 4))
    return min(share, step_tokens - num_decoded)


def worth_waiting(spared: int, left: int, least: int) -> bool:
    """Whether a request should wait for tokens that the step being planned computes for others.

    `spared` of the `left` tokens it would have to compute itself; one step later they are cached.
    Those who share little with others would only be late.
    """
    return spared >= least and 2 * spared >= left


class ByUrgency:
    """Requests in order of urgency."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._keys: list[tuple[float, int]] = []  # beside them: bisect then calls no function

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
