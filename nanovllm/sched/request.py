"""A request as the scheduler sees it. Only the scheduler and its tails may change one."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from nanovllm.wire import FinishReason, Generate


@dataclass(slots=True, eq=False)
class Request:
    """How far its plans reach, and its newest tokens, stand in the scheduler's columns, by slot."""

    spec: Generate
    urgency: tuple[int, int]  # smaller is served first; fixed at arrival
    tokens: array[int]  # the prompt and the output tokens; on the device, without the newest
    num_prompt: int
    limit: int  # num_prompt + max_new
    stop_ids: frozenset[int]
    slot: int = -1  # -1 = not on the device
    prefill_until: int = 0  # tokens to feed before the first (or next) one is sampled
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
