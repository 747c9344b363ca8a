"""Scheduler-side state of a request. Only objects of sched/ may change it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import Enum, auto

from nanovllm.kv.keys import PageKeys
from nanovllm.wire import Generate


class State(Enum):
    """Progress of a request. The diagram in scheduler.py has the transitions."""

    WAITING = auto()
    ARRIVING = auto()
    PREFILLING = auto()
    DECODING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """One request. Its planned progress and latest tokens are columns of Decoding, by slot."""

    spec: Generate
    came_s: float  # time of arrival
    urgency: tuple[float, int]  # smaller is served first; fixed at arrival
    tokens: array[int]  # prompt and output; while in a slot, the latest are in Decoding
    keys: PageKeys  # of `tokens`
    num_prompt: int
    limit: int  # num_prompt + max_new
    stop_ids: frozenset[int]
    state: State = State.WAITING
    slot: int = -1  # -1 = not on the device
    num_cached: int = 0  # tokens that were cached at admission
    prefill_until: int = 0  # tokens to compute before the next one is sampled
    num_in_flight: int = 0  # without a slot: results still to arrive
    written: range = range(0)  # without a slot: positions whose result was not checked
    drafted: range = range(0)  # without a slot: positions where drafts may have been written
    # Steps that admitted later requests while it lacked pages, or room for its adapter.
    num_overtaken: int = 0
    was_started: bool = False
    num_loaded: int = 0  # cached tokens that came from tiers below the device, at admission
    may_load: bool = True  # False after a failed transfer, until it is preempted
    awaited: int = 0  # ticket of another request's transfer that it waited for; 0 = none
    adapter: int = 0  # number of its adapter's load; 0 = none

    @property
    def id(self) -> int:
        return self.spec.request_id


def arrive(
    spec: Generate,
    now: float,
    urgency: tuple[float, int],
    page_tokens: int,
    *,
    adapter: int = 0,
    adapter_key: bytes = b"",
) -> Request:
    """Return a new request. `adapter_key`: the digest of its adapter, for keys of pages."""
    tokens = array("i")
    tokens.frombytes(spec.prompt)
    return Request(
        spec=spec,
        came_s=now,
        urgency=urgency,
        tokens=tokens,
        keys=PageKeys(
            tokens,
            spec.salt,
            page_tokens,
            adapter_key,
            adapter_name=spec.adapter,
            adapter_number=adapter,
        ),
        num_prompt=len(tokens),
        limit=len(tokens) + spec.max_new,
        stop_ids=frozenset(spec.stop_ids),
        adapter=adapter,
    )
