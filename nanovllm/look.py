"""What whoever looks at an engine is told of its steps: places, counts and times only.

Never text, token ids, or anything a client wrote: who may look may see that somebody talks, and
not what about. Times are seconds of the engine's clock (time.monotonic). A request is its number
in wire.Generate.
"""

from __future__ import annotations

from msgspec import Struct

MOST_STEPS = 512  # in one answer


class Look(Struct, frozen=True, tag="look", array_like=True):
    """Asks an engine for its newest steps after `since`, MOST_STEPS at most."""

    since: int


class Admitted(Struct, frozen=True):
    slot: int
    request: int
    prompt: int  # the client's tokens
    tokens: int  # to feed: after a preemption also what was generated before
    cached: int  # of these, found in memory
    came_s: float  # to the engine


class Step(Struct, array_like=True):
    """One step: what was planned, and from `ended_s` on what became of it."""

    step: int
    begun_s: float
    mode: str  # plan.mode_key
    slots: bytes  # int64 by slot: the request that has it, or -1
    decodes: bytes  # int32: the slots of its decode rows
    budget: int  # tokens that it might have fed, by the limits of the schedule
    drafted: int  # tokens that these feed besides their newest
    masked: int  # rows that follow a grammar
    chunks: list[tuple[int, int]]  # slot, prompt tokens
    admitted: list[Admitted]
    preempted: int
    ended_s: float = 0.0  # its tokens were on the host
    host_s: float = 0.0  # that the host worked since the step before had ended
    device_s: float = 0.0  # that the device worked on it
    bubble_s: float = 0.0  # that the device waited for the host before
    generated: int = 0  # tokens that requests gained
    accepted: int = 0  # drafts among these
    finished: list[tuple[int, str]] = []  # request and reason, since the step before had ended
    running: int = 0
    waiting: int = 0
    free: int = 0  # pages that nobody holds
    cached: int = 0  # of these, with contents that a prompt may find


class Steps(Struct, frozen=True, tag="steps", array_like=True):
    """Answers a Look: the steps, oldest first, and how things stand now."""

    now_s: float
    oldest: int  # the first step that is still known; 0: none is
    newest: int  # the last one; below `since` in an engine that began anew
    steps: list[Step]
    slots: bytes  # as in Step
    queue: list[tuple[int, float, bool]]  # who waits, since when, and whether it was preempted
    waiting: int
    free: int
    cached: int
