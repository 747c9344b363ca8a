"""A request as the scheduler sees it. Only the scheduler's own objects may change one."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from nanovllm.kv.keys import PageKeys
from nanovllm.wire import FinishReason, Generate


@dataclass(slots=True, eq=False)
class Request:
    """How far its plans reach, and its newest tokens, stand in the columns of Decoding, by slot."""

    spec: Generate
    urgency: tuple[float, int]  # smaller is served first; fixed at arrival
    tokens: array[int]  # the prompt and the output tokens; on the device, without the newest
    keys: PageKeys  # of `tokens`
    num_prompt: int
    limit: int  # num_prompt + max_new
    stop_ids: frozenset[int]
    slot: int = -1  # -1 = not on the device
    num_cached: int = 0  # tokens that were in memory when it got its slot
    prefill_until: int = 0  # tokens to feed before the first (or next) one is sampled
    num_in_flight: int = 0  # once off the device: lines of results still to arrive
    written: range = range(0)  # once off the device: tokens that no result vouches for
    drafted: range = range(0)  # of these and of vouched ones: where drafts may have been fed
    num_overtaken: int = 0  # steps that admitted others past it because it had no pages
    was_started: bool = False
    finish: FinishReason | None = field(default=None)

    @property
    def id(self) -> int:
        return self.spec.request_id


def arrive(spec: Generate, urgency: tuple[float, int], page_tokens: int) -> Request:
    tokens = array("i")
    tokens.frombytes(spec.prompt)
    num_prompt = len(tokens)
    limit = num_prompt + spec.max_new
    keys = PageKeys(tokens, spec.salt, page_tokens)
    return Request(spec, urgency, tokens, keys, num_prompt, limit, frozenset(spec.stop_ids))
