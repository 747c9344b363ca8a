"""A request as the scheduler sees it. Only the scheduler may change one."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from nanovllm.wire import FinishReason, Generate


@dataclass(slots=True, eq=False)
class Request:
    """How far its plans reach stands in the scheduler's columns, by slot."""

    spec: Generate
    urgency: tuple[int, int]  # smaller is served first; fixed at arrival
    tokens: array[int]  # the prompt and every output token the host has seen
    num_prompt: int
    limit: int  # num_prompt + max_new
    stop_ids: frozenset[int]
    slot: int = -1  # -1 = not on the device
    prefill_until: int = 0  # tokens to feed before the first (or next) one is sampled
    look_at: int = 0  # token count at which completion has more to do than append
    num_in_flight: int = 0  # once preempted: output tokens still to arrive
    was_started: bool = False
    finish: FinishReason | None = field(default=None)

    @property
    def id(self) -> int:
        return self.spec.request_id


def arrive(spec: Generate, urgency: tuple[int, int]) -> Request:
    tokens = array("i")
    tokens.frombytes(spec.prompt)
    num_prompt = len(tokens)
    limit = num_prompt + spec.max_new
    return Request(spec, urgency, tokens, num_prompt, limit, frozenset(spec.stop_ids))
