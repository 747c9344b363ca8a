"""Interface between the engine and the planner of its steps: a Scheduler, or Lanes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from nanovllm.look import Admitted
from nanovllm.plan import AdapterContent, LanesPlan, Moved, Moves, StepPlan, StepResult
from nanovllm.wire import FinishReason, Generate, Stats, StepOutput


class Snapshot(Struct, frozen=True):
    """State of a planner, for observers. With lanes, slots are numbered through all of them."""

    slots: bytes  # int64 request id by slot, or -1
    num_running: int
    num_waiting: int
    num_preemptions: int  # since the start
    free: int  # pages that no request holds
    cached: int  # free pages whose content can be reused
    # Waiting requests: id, time of arrival, True if it was preempted.
    queue: list[tuple[int, float, bool]]
    arriving: list[int]  # ids of requests whose pages arrive from a tier below the device


class Planner(Protocol):
    """Planner and bookkeeper of steps. Only the engine's loop calls it, except for snapshot()."""

    step_tokens: int
    mixed_step_tokens: int  # may change between steps
    has_tiers: bool  # False: there are no transfers

    @property
    def has_work(self) -> bool:
        """Return True if any request has not ended, or a transfer should start."""
        ...

    @property
    def num_moving(self) -> int:
        """Return the number of transfers between tiers that have not ended."""
        ...

    @property
    def num_waiting(self) -> int:
        """Return the number of waiting requests."""
        ...

    def request_ids(self) -> list[int]:
        """Return the ids of all requests that have not ended."""
        ...

    def add(self, spec: Generate, now: float) -> None:
        """Queue a request that arrived at `now` (seconds), or refuse it if it can never run."""
        ...

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request, unless it has ended."""
        ...

    def new_adapter(self) -> int:
        """Return the number of the next load of an adapter."""
        ...

    def load_adapter(self, name: str, number: int, content: AdapterContent) -> None:
        """Let new requests use a load by a name. Earlier requests of the name go on as before."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Refuse new requests with the name of an adapter."""
        ...

    def forget_adapters(self) -> list[int]:
        """Return the numbers of adapters that no request can use any more, and forget them."""
        ...

    def plan(self) -> StepPlan | LanesPlan | None:
        """Return the next step, or None if there is nothing to do until a result arrives."""
        ...

    def moves(self) -> Moves | None:
        """Return the transfers to start before the latest plan is launched, or None.

        Called once after each plan(), also if that returned None.
        """
        ...

    def moved(self, moved: Moved) -> None:
        """Process the end of a transfer."""
        ...

    def take_back(self, pages: Sequence[int], state: int = -1, request_id: int = -1) -> None:
        """Release pages and a state whose lease has ended. Abort its request if it still runs."""
        ...

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Note the device time of a step that computed only prompts, `num_tokens` in all."""
        ...

    def masked_rows(self, plan: StepPlan | LanesPlan) -> list[tuple[int, list[int]]]:
        """Return (request id, drafts) of each row in plan.masked. Some may have finished."""
        ...

    def admitted(self, plan: StepPlan | LanesPlan) -> list[Admitted]:
        """Return the admissions of the latest plan, for observers."""
        ...

    def complete(self, result: StepResult) -> StepOutput:
        """Process the result of the oldest step in flight."""
        ...

    def measure(self, step: int, period_s: float) -> None:
        """Note the time of each completed step: the device's or the host's, whichever is longer.

        It is in seconds. It is 0 if it is not typical of the step's rows: if the step has prompts,
        or follows an idle time of the engine.
        """
        ...

    def output(self) -> StepOutput:
        """Return refusals, starts and finishes after the last output."""
        ...

    def snapshot(self, num_queued: int = 0) -> Snapshot:
        """Return the present state, with at most `num_queued` waiting requests.

        Any thread may call it.
        """
        ...

    def stats(self) -> Stats:
        """Return the counters, for metrics."""
        ...
