"""Scheduler: turns waiting requests into StepPlans and StepResults into StepOutputs.

Pure bookkeeping: no tensors, no clock, no sockets, no randomness. Delegates to `Queue` (all
requests, admission, preemption) and `Decoding` (decode rows stored as columns).

States of a request (request.State). Each arrow is one method:

       Queue.add              Queue._admit              Decoding.issue
    ------------> WAITING ----------------> PREFILLING ---------------> DECODING
                   ^  |                       |    |                     |   |
                   |  |                       |    |                     |   |
                   '--+---- Queue.preempt ----'----+---------------------'   |
                      |                            |                         |
                      '------ Queue.retire --------'-------------------------'--> FINISHED

            Queue._admit               Queue._end_arrival
    WAITING -------------> ARRIVING ----------------------> PREFILLING
       ^                    |    |      Queue.retire
       |                    |    '-------------------------> FINISHED
       '--------------------'
        Queue.preempt, or the transfer has failed

    WAITING     has no slot and no pages; after a preemption, results may still be in flight
    ARRIVING    has a slot and pages, some of which a transfer fills; is not planned
    PREFILLING  has a slot, and pages for the whole prompt, which is not planned to its end
    DECODING    has a row in each step until its last token is planned
    FINISHED    has no slot; its pages are kept while a step in flight writes to them

A transfer is known by its ticket. It may come from host memory or any other source. It ends in one
of three ways. When it completes, its pages are registered for reuse, and not before. When it fails,
the request releases its pages and computes. If the request has left before, the pages that the
transfer may still write are in quarantine until it ends. Other requests with the same prefix wait
for one transfer at most.

Theory of operation, one step:

    1. plan()      decode rows first, one token each, with their drafts
    2.             a row whose pages are full gets one more; if none is free, preempt the least
                   urgent request
    3.             then chunks of running prompts, within the token budget
    4.             then admission of waiting requests: slot, pages, cached prefix, first chunk
                   or transfer. moves() has the transfers to start before the plan is launched
    5. (device)    the plan runs; plan() of the next step does not wait for it
    6. complete()  append the sampled tokens, register full pages
    7.             retire requests at a stop token or their limit; release pages
    8. output()    refusals, starts and finishes, sent with the tokens

plan() may be called again before the previous complete(), since it does not depend on the values of
sampled tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from nanovllm.kv.memory import KVMemory
from nanovllm.look import Admitted
from nanovllm.plan import (
    CORRUPTED,
    AdapterContent,
    Grant,
    Int32,
    LanesPlan,
    Moved,
    Moves,
    StepPlan,
    StepResult,
)
from nanovllm.sched.adapters import AdapterSlots
from nanovllm.sched.decoding import Decoding, Flight, Rows, rows_of
from nanovllm.sched.lending import PageLender
from nanovllm.sched.planner import Snapshot
from nanovllm.sched.policy import MIN_SAVED_TOKENS, prompt_budget
from nanovllm.sched.queue import OpenPlan, Queue
from nanovllm.sched.request import Request, State
from nanovllm.speculate import Drafts
from nanovllm.wire import (
    STEP_TOKENS,
    FinishReason,
    Generate,
    Stats,
    StepOutput,
    TokenLogprobs,
)

NO_DRAFTS = Drafts()


class Scheduler:
    """Planner of the steps of one device, or of several in lockstep. Implements planner.Planner.

    `num_slots` is at most `step_tokens`, so that every decode row fits every step.
    `mixed_step_tokens` limits the prompts of steps with decode rows, not the rows themselves; it
    may change between steps. `overtake_steps` is the number of steps in which later requests may
    be admitted before one that lacks pages. `min_saved_tokens`: a request waits a step for a prefix
    that another one computes if that saves this many tokens and half of its own. Rows get
    pages for `drafts.tokens_ahead` more tokens, if pages are free. `adapters` makes their state.
    """

    def __init__(
        self,
        memory: KVMemory,
        *,
        num_slots: int,
        step_tokens: int,
        mixed_step_tokens: int = 1 << 30,
        max_model_tokens: int,
        drafts: Drafts = NO_DRAFTS,
        ageing_s: float = 1.0,
        overtake_steps: int = 64,
        min_saved_tokens: int = MIN_SAVED_TOKENS,
        adapters: Callable[[], AdapterSlots] = AdapterSlots,
        lender: PageLender | None = None,
    ) -> None:
        self.memory = memory
        self.has_tiers = memory.has_tiers
        self.step_tokens = step_tokens
        self.mixed_step_tokens = mixed_step_tokens
        self.tokens_ahead = drafts.tokens_ahead
        num_slots = min(num_slots, step_tokens)
        self._decoding = Decoding(num_slots, memory.page_tokens, drafts)
        self._drafting = self._decoding.drafting
        self.queue = Queue(
            memory,
            self._decoding,
            adapters(),
            num_slots=num_slots,
            max_model_tokens=max_model_tokens,
            ageing_s=ageing_s,
            overtake_steps=overtake_steps,
            min_saved_tokens=min_saved_tokens,
            lender=lender,
        )
        self._step = self._generated = self._fed = 0
        self._steps_by_tokens = [0] * (len(STEP_TOKENS) + 1)

    @property
    def has_work(self) -> bool:
        return bool(self.queue.by_id) or (self.has_tiers and self.memory.has_moves)

    @property
    def num_moving(self) -> int:
        return self.memory.num_moving

    def request_ids(self) -> list[int]:
        return list(self.queue.by_id)

    def add(self, spec: Generate, now: float) -> None:
        """Queue a request that arrived at `now` (seconds), or refuse it if it can never run."""
        self.queue.add(spec, now)

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> None:
        if (request := self.queue.by_id.get(request_id)) is not None:  # else it has finished
            self.queue.retire(request, reason)

    def new_adapter(self) -> int:
        return self.queue.adapters.new_number()

    def load_adapter(self, name: str, number: int, content: AdapterContent) -> None:
        self.queue.adapters.load(name, number, content)

    def unload_adapter(self, name: str) -> None:
        self.queue.adapters.unload(name)

    def forget_adapters(self, in_use: Iterable[int] = ()) -> list[int]:
        """Forget adapters without a name and without a request, and return their numbers.

        `in_use` are further numbers to keep.
        """
        own = (request.adapter for request in self.queue.by_id.values())
        return self.queue.adapters.forget([*own, *in_use])

    def output(self) -> StepOutput:
        """Return refusals, starts and finishes after the last output."""
        events, self.queue.events = self.queue.events, StepOutput()
        return events

    @property
    def num_waiting(self) -> int:
        return len(self.queue.waiting)

    def snapshot(self, num_queued: int = 0) -> Snapshot:
        """Return the present state, with at most `num_queued` waiting requests."""
        queue, pool = self.queue, self.memory.pool
        return Snapshot(
            slots=self._decoding.owner.tobytes(),
            num_running=queue.num_running,
            num_waiting=self.num_waiting,
            num_preemptions=queue.num_preemptions,
            free=pool.num_free,
            cached=pool.num_cached,
            queue=[(r.id, r.came_s, r.was_started) for r in islice(queue.waiting, num_queued)],
            arriving=list(queue.arriving),
        )

    def admitted(self, plan: StepPlan | LanesPlan) -> list[Admitted]:
        """Return the admissions of the latest plan, for observers."""
        assert isinstance(plan, StepPlan)
        owner, by_id = self._decoding.owner, self.queue.by_id
        return [
            Admitted(
                slot=admit.slot,
                request=int(owner[admit.slot]),
                prompt=admit.num_prompt,
                tokens=len(admit.tokens) // 4,
                cached=admit.num_cached,
                came_s=by_id[int(owner[admit.slot])].came_s,
                loaded=by_id[int(owner[admit.slot])].num_loaded,
            )
            for admit in plan.admits
        ]

    def stats(self) -> Stats:
        queue = self.queue
        deferred = min(queue.num_deferred, len(queue.waiting))
        num_without_room = min(queue.num_without_room, len(queue.waiting) - deferred)
        reasons = {
            "capacity": len(queue.waiting) - deferred - num_without_room,
            "shared_prompt": deferred,
        }
        if queue.adapters.by_name:
            reasons["adapter"] = num_without_room
        return Stats(
            num_running=queue.num_running,
            num_waiting=self.num_waiting,
            waiting_by_reason=reasons,
            kv_usage=self.memory.usage,
            checkpoints=self.memory.checkpoints,
            checkpoint_events=self.memory.checkpoint_events,
            num_preemptions=queue.num_preemptions,
            prompt_tokens=queue.prompt_tokens,
            cached_tokens=queue.cached_tokens,
            generated_tokens=self._generated,
            num_steps=self._step,
            steps_by_tokens=self._steps_by_tokens.copy(),
            step_tokens=self._fed,
            num_drafts=self._drafting.num_drafts,
            draft_tokens=self._drafting.draft_tokens,
            accepted_tokens=sum(self._drafting.accepted_by_position),
            accepted_by_position=self._drafting.accepted_by_position,
            tiers=self.memory.tier_stats(len(queue.arriving), queue.loaded_tokens),
            adapter_slots=queue.adapters.slot_counts(),
            adapters=self._adapter_requests() if queue.adapters.by_name else {},
        )

    def _adapter_requests(self) -> dict[str, dict[str, int]]:
        """Return the number of running and of waiting requests, by adapter."""
        requests, count = list(self.queue.by_id.values()), self.queue.adapters.counts
        return {
            "running": count(r.spec.adapter for r in requests if r.slot >= 0),
            "waiting": count(r.spec.adapter for r in requests if r.slot < 0),
        }

    # -- planning ---------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Return the next step, or None if there is nothing to do until a result arrives."""
        plan = OpenPlan(self.step_tokens)
        decodes, drafts_R = self._plan_decodes(plan)
        self.queue.plan_prompts(plan)
        if not plan.num_tokens:
            return None
        self._step += 1
        self._fed += plan.num_tokens
        self._steps_by_tokens[bisect_left(STEP_TOKENS, plan.num_tokens)] += 1
        firsts = self.queue.issue(self._step, plan) if plan.chunks else []
        if as_rows := self._are_decode_rows(plan):
            plan.chunks = []
        rows, decodes, same = self._decoding.issue(
            self._step, decodes, drafts_R, firsts, as_decodes=as_rows
        )
        return StepPlan(
            step=self._step,
            admits=plan.admits,
            grants=plan.grants,
            num_decodes=len(decodes.requests),
            decodes=None if same else decodes.slots.astype(np.int32).tobytes(),
            chunks=plan.chunks,
            max_length=plan.max_length,
            masked=rows.masked,
            saves=self.memory.taken_saves(),
            clean=self.memory.taken_dirty(),
            copies=plan.copies,
            drafts=b"" if drafts_R is None else drafts_R.tobytes(),
            proposes=self._drafting.plan_proposals(
                self._step, rows.slots, 0 if drafts_R is None else int(drafts_R.sum())
            ),
            adapters=self.queue.adapters.taken_loads(),
        )

    def _are_decode_rows(self, plan: OpenPlan) -> bool:
        """Return True if the chunks become decode rows: each is a prompt cached but for one token.

        Never with drafts: a draft model treats the rows of a prompt differently.
        """
        if not plan.chunks or self._drafting.most:
            return False
        return all(
            chunk.samples
            and chunk.num_tokens == 1
            and chunk.save_to < 0
            and chunk.start == request.num_cached
            for chunk, request in zip(plan.chunks, plan.chunked, strict=True)
        )

    def moves(self) -> Moves | None:
        """Return the transfers to start now, or None. Called once after each plan()."""
        return self.memory.taken_moves()

    def moved(self, moved: Moved) -> None:
        """Process the end of a transfer."""
        self.queue.moved(moved)

    def take_back(self, pages: Sequence[int], state: int = -1, request_id: int = -1) -> None:
        """Release pages and a state whose lease has ended. Abort its request if it still runs."""
        self.queue.take_back(pages, state, request_id)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Note the device time of a step that computed only prompts, `num_tokens` in all."""
        self.memory.computed(num_tokens, seconds)

    def masked_rows(self, plan: StepPlan | LanesPlan) -> list[tuple[int, list[int]]]:
        """Return (request id, drafts) of each row in plan.masked. Some may have finished."""
        return [self._decoding.fed(plan.step, row) for row in plan.masked]

    def _plan_decodes(self, plan: OpenPlan) -> tuple[Rows, Int32 | None]:
        """Return a row for each decoding request that may still sample, and its drafts."""
        rows, planned_R = self._decoding.wanting()
        if not rows.requests:
            return rows, None
        ends_R = planned_R + 1
        if short := self._decoding.short_of_room(rows, ends_R):
            going = self._make_room(rows, short, plan)
            if not going.requests:
                return going, None
            if going is not rows:
                rows, ends_R = going, self._decoding.planned[going.slots] + 1
        plan.num_tokens = len(rows.requests)
        drafts_R = self._plan_drafts(rows, ends_R, plan) if self._drafting.most else None
        if drafts_R is not None:
            ends_R += drafts_R
            self._drafting.reach[rows.slots] = np.maximum(self._drafting.reach[rows.slots], ends_R)
            plan.num_tokens += int(drafts_R.sum())
        self._decoding.planned[rows.slots] = ends_R
        plan.max_length = int(ends_R.max())
        plan.budget = prompt_budget(self.step_tokens, self.mixed_step_tokens, plan.num_tokens)
        return rows, drafts_R

    def _plan_drafts(self, rows: Rows, ends_R: Int32, plan: OpenPlan) -> Int32 | None:
        """Return the drafts of each row, within its limit and its pages; None if there are none.

        Drafts take at most half of the tokens that the rows leave free in the step.
        """
        if self._drafting.skips(self._step + 1):
            return None
        decoding, slots_R = self._decoding, rows.slots
        most_R = decoding.limit[slots_R] - 1 - ends_R
        budget = (self.step_tokens - plan.num_tokens) // 2
        drafts_R = self._drafting.choose(self._step + 1, slots_R, most_R, budget)
        reach_R = np.minimum(ends_R + drafts_R + self.tokens_ahead, decoding.limit[slots_R])
        while short := decoding.short_of_room(rows, reach_R):
            granted = [self._grant(r, int(decoding.room[r.slot]) + 1, plan) for r in short]
            if not any(granted):
                break
        drafts_R = np.minimum(drafts_R, decoding.room[slots_R] - ends_R)
        return drafts_R if np.count_nonzero(drafts_R) else None

    def _grant(self, request: Request, end: int, plan: OpenPlan) -> bool:
        """Grant pages for `end` tokens in total. Return False if too few are free."""
        if (pages := self.memory.extend(request.id, end)) is None:
            return False
        plan.grants.append(Grant(request.slot, self._decoding.grow(request, len(pages)), pages))
        return True

    def _make_room(self, rows: Rows, short: list[Request], plan: OpenPlan) -> Rows:
        """Grant a page to each row in `short`, and return the rows that can run.

        If no page is free, preempt the least urgent requests.
        """
        queue, stalled = self.queue, set[int]()
        running: list[Request] = []  # sorted only if no page is free
        num_preemptions = queue.num_preemptions
        for request in sorted(short, key=lambda r: r.urgency):
            if request.state is State.WAITING:
                continue  # preempted for a more urgent request
            end = int(self._decoding.planned[request.slot]) + 1
            while not self._grant(request, end, plan):
                running = running or queue.running
                if running[-1] is request:
                    stalled.add(request.id)
                    break
                queue.preempt(running.pop())
        if not stalled and num_preemptions == queue.num_preemptions:
            return rows
        going = [r for r in rows.requests if r.state is State.DECODING and r.id not in stalled]
        return rows_of(going)

    # -- completion -------------------------------------------------------------------------

    def measure(self, step: int, period_s: float) -> None:
        """Note the time of a completed step, for the price of drafts."""
        self._drafting.prices.measure(step, period_s)

    def complete(self, result: StepResult) -> StepOutput:
        """Append a step's tokens, finish requests, register pages. Steps complete in order."""
        flight, tokens = self._decoding.pop_flight(result.step), result.tokens
        rows = flight.rows
        if len(tokens) != len(rows.requests):
            count = len(rows.requests)
            raise ValueError(f"{len(tokens)} rows of tokens for a step of {count} rows")
        if (lending := self.queue.lending) is None:
            kept_R = self._append(flight, result)
        else:
            are_answered_R = lending.are_answered(rows.ids)
            kept_R = self._append(flight, result)
            kept_R[are_answered_R] = 0  # their tokens are not sent
            self.queue.events.finished.extend(lending.completed(result.step))
        logprobs = [
            TokenLogprobs(
                request_id=int(rows.ids[p.row]),
                token_id=int(tokens[p.row, p.nth]),
                logprob=p.logprob,
                top_ids=p.top_ids,
                top_logprobs=p.top_logprobs,
            )
            for p in result.logprobs
            if p.nth < kept_R[p.row]
        ]
        ids, counts = rows.ids, b""
        if tokens.shape[1] > 1 or not kept_R.all():
            tokens = tokens[np.arange(tokens.shape[1]) < kept_R[:, None]]
            ids, counts = ids[kept_R > 0], kept_R[kept_R > 0].tobytes()
        self._generated += tokens.size
        events = self.output()
        return replace(
            events, ids=ids.tobytes(), tokens=tokens.tobytes(), counts=counts, logprobs=logprobs
        )

    def _append(self, flight: Flight, result: StepResult) -> Int32:
        """Return how many of its tokens each row keeps: 0 if its request finished before."""
        rows, tokens_RT = flight.rows, result.tokens
        kept_R = np.zeros(len(tokens_RT), np.int32)
        present = self._rows_in_slots(flight, tokens_RT, kept_R)
        if flight.drafts is not None:  # rejected drafts were planned and are not computed
            slots_R, drafts_R = rows.slots[present], flight.drafts[present]
            right_R = (tokens_RT[present, 1:] >= 0).sum(1, dtype=np.int32)
            self._decoding.planned[slots_R] -= drafts_R - right_R
            self._drafting.compared(slots_R, drafts_R, right_R)
        if result.drafts is not None:
            self._drafting.report(rows.slots[present], result.drafts[present])
        for nth, tokens_R in enumerate(tokens_RT.T):
            if nth:
                # Otherwise this draft and all later ones were rejected.
                present = present[tokens_R[present] >= 0]
            if not len(present):
                break
            # A slice makes views instead of copies.
            at = present if len(present) < len(kept_R) else slice(None)
            kept_R[at] += 1
            due = self._decoding.append(rows.slots[at], tokens_R[at])
            if ended := [
                i for i in due if self.queue.commit_and_check_stop(rows.requests[present[i]])
            ]:
                present = np.delete(present, ended)
        return kept_R

    def _rows_in_slots(
        self, flight: Flight, tokens_RT: Int32, kept_R: Int32
    ) -> npt.NDArray[np.int64]:
        """Return the rows of requests in slots. Handle the results of all other rows."""
        requests, present = flight.rows.requests, np.arange(len(tokens_RT))
        if (is_present := self._decoding.present(flight.rows)) is not None:
            for row in np.flatnonzero(~is_present).tolist():
                kept_R[row] = self.queue.handle_late_result(requests[row], tokens_RT[row].tolist())
            present = present[is_present]
        corrupted = tokens_RT[:, 0] == CORRUPTED
        if np.count_nonzero(corrupted):
            for row in present[corrupted[present]].tolist():
                self.queue.retire(requests[row], FinishReason.ERROR)
            present = present[~corrupted[present]]
        return present

    def check(self) -> None:
        """Assert the invariants that hold between calls. Tests call this after every step."""
        self.queue.check()
