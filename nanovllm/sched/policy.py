"""Who goes first, in the queue and in preemption, and with how many tokens. Knows no pages."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from nanovllm.sched.request import Request


def urgency(priority: int, step: int, arrival: int, ageing_steps: int) -> tuple[int, int]:
    """Sort key of a request that arrives now; the smallest goes first.

    Waiting `ageing_steps` steps is worth one priority level. Everybody ages alike, so the order of
    two requests never changes and the key can be fixed at arrival: no starvation, no re-sorting.
    """
    return (priority * ageing_steps + step, arrival)


def prompt_budget(step_tokens: int, mixed_step_tokens: int, num_decoded: int) -> int:
    """Prompt tokens of a step whose decode rows feed `num_decoded` tokens (at least one).

    As many as fill up `mixed_step_tokens` but at least a quarter of it, so that prompts go on
    beside any number of rows; never more than fill up `step_tokens`.
    """
    share = max(mixed_step_tokens - num_decoded, -(-mixed_step_tokens // 4))
    return min(share, step_tokens - num_decoded)


def _key(request: Request) -> tuple[int, int]:
    return request.urgency


class Line:
    """Requests in order of urgency."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def first(self) -> Request:
        return self._requests[0]

    @property
    def last(self) -> Request:
        return self._requests[-1]

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_key)

    def remove(self, request: Request) -> None:
        at = bisect_left(self._requests, request.urgency, key=_key)
        assert self._requests[at] is request
        del self._requests[at]
