"""Messages of /debug/steps: places, counts and times of an engine's latest steps.

They never contain text, token ids or other content from clients, since an observer may see traffic
but no content. Times are in seconds of the engine's clock (time.monotonic). A request is
identified by its id in wire.Generate.
"""

from __future__ import annotations

from msgspec import Struct

MOST_STEPS = 512  # per answer


class Look(Struct, frozen=True, tag="look", array_like=True):
    """Request for an engine's latest steps after `since`, MOST_STEPS at most."""

    since: int


class Admitted(Struct, frozen=True):
    slot: int
    request: int
    prompt: int  # tokens of the client's prompt
    tokens: int  # tokens at admission; after a preemption, with those generated before
    cached: int  # cached tokens at admission
    came_s: float  # time of arrival at the engine
    loaded: int = 0  # cached tokens whose pages arrived from a tier below the device
    arriving_s: float = 0.0  # time from which they arrived; 0 without them


class Step(Struct, array_like=True):
    """One step. The fields before `ended_s` are set at planning, the others at completion."""

    step: int
    begun_s: float
    mode: str  # plan.mode_key
    slots: bytes  # int64 request id by slot, or -1
    decodes: bytes  # int32 slots of the decode rows
    budget: int  # maximum tokens of the step, by the schedule's limits
    drafted: int  # drafts of the decode rows
    masked: int  # rows with a grammar
    chunks: list[tuple[int, int]]  # slot, prompt tokens
    admitted: list[Admitted]
    preempted: int
    ended_s: float = 0.0  # time when its tokens were on the host
    host_s: float = 0.0  # host time since the end of the previous step
    device_s: float = 0.0  # device time
    bubble_s: float = 0.0  # time that the device waited for the host before this step
    generated: int = 0  # new tokens of requests
    accepted: int = 0  # accepted drafts among them
    finished: list[tuple[int, str]] = []  # request and reason, since the end of the previous step
    running: int = 0
    waiting: int = 0
    free: int = 0  # pages that no request holds
    cached: int = 0  # free pages whose content can be reused


class Steps(Struct, frozen=True, tag="steps", array_like=True):
    """Answer to a Look: the steps, oldest first, and the current state."""

    now_s: float
    oldest: int  # the first step that is still stored; 0 = none
    newest: int  # the last step; less than `since` after a restart of the engine
    steps: list[Step]
    slots: bytes  # as in Step
    queue: list[tuple[int, float, bool]]  # waiting: request, arrival, True if it was preempted
    waiting: int
    free: int
    cached: int
    arriving: list[tuple[int, float]] = []  # requests whose pages arrive, and since when
