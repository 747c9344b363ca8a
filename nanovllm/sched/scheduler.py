"""Scheduler: turns waiting requests into StepPlans and StepResults into StepOutputs.

Pure bookkeeping: no tensors, no clock, no sockets, no randomness. Two calls make a step: plan()
before the device runs, complete() after it ran. plan() may be called again before the previous
complete(); nothing in it depends on a token the host has not seen.

Decision: what changes every step is kept in numpy columns, one element per slot, and decode rows
are planned and completed as arrays. Rows are rebuilt only when membership changes, so a steady
decode costs a few array operations a step, whatever the number of rows.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from nanovllm.kv.memory import KVMemory
from nanovllm.plan import Admit, Chunk, Grant, Int32, StepPlan, StepResult
from nanovllm.sched.policy import Line, prompt_budget, urgency
from nanovllm.sched.request import Request, arrive
from nanovllm.sched.rows import Flight, Plan, Rows, rows_of
from nanovllm.sched.tails import Tails
from nanovllm.wire import (
    Finish,
    FinishReason,
    Generate,
    Refusal,
    RefusalKind,
    Started,
    Stats,
    StepOutput,
    TokenLogprobs,
)


class Scheduler:
    """`num_slots` never exceeds `step_tokens`, so that every decode row fits every step.

    `mixed_step_tokens` limits the prompts of steps with decode rows, never the rows themselves.
    """

    def __init__(
        self,
        memory: KVMemory,
        *,
        num_slots: int,
        step_tokens: int,
        mixed_step_tokens: int = 1 << 30,
        max_model_tokens: int,
        num_drafts: int = 0,
        max_queue: int = 1 << 30,
        ageing_steps: int = 256,
    ) -> None:
        self.memory = memory
        self.step_tokens = step_tokens
        self.mixed_step_tokens = mixed_step_tokens
        self.max_model_tokens = max_model_tokens
        self.num_drafts = num_drafts
        self.max_queue = max_queue
        self.ageing_steps = ageing_steps
        num_slots = min(num_slots, step_tokens)
        self._free_slots = list(range(num_slots))[::-1]
        self._planned = np.zeros(num_slots, np.int32)  # tokens the issued plans compute, at most
        self._limit = np.zeros(num_slots, np.int32)
        self._room = np.zeros(num_slots, np.int32)  # tokens the held pages can take
        self._tails = Tails(num_slots, memory.page_tokens)
        self._waiting = Line()
        self._running = Line()  # the last one is preempted first
        self._prefilling = Line()  # of the running: those with prompt left to feed
        self._decoding = rows_of([])  # of the running: the others
        self._last_decodes = self._decoding  # what the device has
        self._by_id: dict[int, Request] = {}
        self._flights: dict[int, Flight] = {}
        self._step = self._arrivals = 0
        self._longest = 0  # no decoding row's context is longer
        self._told = StepOutput()  # since the last output
        self._num_preemptions = self._prompt_tokens = self._cached_tokens = self._generated = 0

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    # -- arrivals and departures ------------------------------------------------------------

    def add(self, spec: Generate) -> None:
        """Queue a request; one that could not run even alone is refused at once."""
        order = urgency(spec.priority, self._step, self._arrivals, self.ageing_steps)
        request = arrive(spec, order)
        self._arrivals += 1
        if (refusal := self._refuse(request)) is not None:
            self._told.refused.append(Refusal(request.id, *refusal))
            return
        self._by_id[request.id] = request
        self._waiting.add(request)

    def _refuse(self, request: Request) -> tuple[RefusalKind, str] | None:
        if request.num_prompt < 1 or request.spec.max_new < 1:
            return RefusalKind.INVALID, "the prompt and max_tokens must be at least one token"
        if request.limit > self.max_model_tokens:
            asked = f"{request.num_prompt} prompt tokens and {request.spec.max_new} new ones exceed"
            return RefusalKind.TOO_LONG, f"{asked} the context of {self.max_model_tokens} tokens"
        if not self.memory.fits(request.limit + self.num_drafts):
            room = self.memory.pool.num_pages * self.memory.page_tokens
            return RefusalKind.TOO_LONG, f"{request.limit} tokens exceed the cache of {room} tokens"
        if len(self._waiting) >= self.max_queue:
            return RefusalKind.QUEUE_FULL, f"{self.max_queue} requests are waiting already"
        return None

    def abort(self, request_id: int) -> None:
        if (request := self._by_id.get(request_id)) is not None:  # else it has just finished
            self._retire(request, FinishReason.ABORT)

    def output(self) -> StepOutput:
        """What happened besides tokens since the last output."""
        told, self._told = self._told, StepOutput()
        return told

    def stats(self) -> Stats:
        return Stats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_usage=self.memory.usage,
            num_preemptions=self._num_preemptions,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated,
            num_steps=self._step,
        )

    # -- planning ---------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do until a result arrives."""
        plan = Plan(self.step_tokens)
        decodes, num_drafts = self._plan_decodes(plan)
        self._plan_chunks(plan)
        if not plan.chunks and not decodes.requests:
            return None
        for request in plan.chunked:  # only now: rows of one plan must not read each other's pages
            self.memory.commit(request.id, request.tokens, int(self._planned[request.slot]))
        self.memory.publish()
        self._step += 1
        same = decodes is self._last_decodes
        self._last_decodes = decodes
        firsts = [r for r, c in zip(plan.chunked, plan.chunks, strict=True) if c.samples]
        rows = decodes
        if firsts:
            for request in firsts:
                self._prefilling.remove(request)
            rows = rows_of(decodes.requests + firsts)
            is_all = decodes is self._decoding
            self._decoding = rows if is_all else rows_of(self._decoding.requests + firsts)
        self._flights[self._step] = Flight(rows, len(decodes.requests), num_drafts)
        return StepPlan(
            step=self._step,
            admits=plan.admits,
            grants=plan.grants,
            num_decodes=len(decodes.requests),
            decodes=None if same else decodes.slots.astype(np.int32).tobytes(),
            num_drafts=num_drafts,
            chunks=plan.chunks,
            max_length=self._longest,
            masked=rows.masked,
        )

    def masked_ids(self, plan: StepPlan) -> list[int]:
        """The requests of plan.masked; some may have finished since."""
        requests = self._flights[plan.step].rows.requests
        return [requests[row].id for row in plan.masked]

    def _plan_decodes(self, plan: Plan) -> tuple[Rows, int]:
        """One row for each decoding request that may still sample; its drafts share the budget."""
        rows = self._decoding
        wants = self._planned[rows.slots] + 1 < self._limit[rows.slots]
        if not wants.all():  # the last token of some is still on its way
            rows = rows_of([r for r, want in zip(rows.requests, wants, strict=True) if want])
        if not rows.requests:
            return rows, 0
        num_drafts = min(self.num_drafts, self.step_tokens // len(rows.requests) - 1)
        if rows.masked:
            num_drafts = 0  # a grammar would have to see the drafts, which are on the device
        ends = self._planned[rows.slots] + (1 + num_drafts)
        short = np.flatnonzero(ends > self._room[rows.slots])
        if short.size:
            rows = self._make_room(rows, [rows.requests[i] for i in short], num_drafts, plan)
            ends = self._planned[rows.slots] + (1 + num_drafts)
        if not rows.requests:
            return rows, 0
        self._planned[rows.slots] = ends
        self._longest = max(self._longest, int(ends.max()))
        num_decoded = len(rows.requests) * (1 + num_drafts)
        plan.budget = prompt_budget(self.step_tokens, self.mixed_step_tokens, num_decoded)
        return rows, num_drafts

    def _make_room(self, rows: Rows, short: list[Request], num_drafts: int, plan: Plan) -> Rows:
        """A page more for the rows that need one, taken from the least urgent if none is free.

        Returns the rows that can go ahead.
        """
        stalled: set[int] = set()
        num_preemptions = self._num_preemptions
        for request in sorted(short, key=lambda r: r.urgency):
            if request.slot < 0:
                continue  # preempted for a more urgent one
            end = int(self._planned[request.slot]) + 1 + num_drafts
            while (pages := self.memory.extend(request.id, end)) is None:
                if (victim := self._running.last) is request:
                    stalled.add(request.id)
                    break
                self._preempt(victim)
            else:
                at = int(self._room[request.slot]) // self.memory.page_tokens
                plan.grants.append(Grant(request.slot, at, pages))
                self._room[request.slot] += len(pages) * self.memory.page_tokens
        if not stalled and num_preemptions == self._num_preemptions:
            return rows
        return rows_of([r for r in rows.requests if r.slot >= 0 and r.id not in stalled])

    def _plan_chunks(self, plan: Plan) -> None:
        for request in self._prefilling:
            if plan.budget == 0:
                return
            self._feed(request, plan)
        while plan.budget > 0 and self._free_slots and self._waiting:
            request = self._waiting.first
            if request.num_in_flight:
                return  # preempted; its last token is still on its way
            if (admit := self._admit(request)) is None:
                return
            plan.admits.append(admit)
            self._feed(request, plan)

    def _admit(self, request: Request) -> Admit | None:
        reserve = len(self._running)  # each of them may need a page soon
        known = self.memory.admit(request.id, request.tokens, request.spec.salt, reserve)
        if known is None:
            return None
        slot = request.slot = self._free_slots.pop()
        request.prefill_until = len(request.tokens)
        self._planned[slot] = known.num_cached
        self._limit[slot] = request.limit
        self._room[slot] = len(known.pages) * self.memory.page_tokens
        self._waiting.remove(request)
        self._running.add(request)
        self._prefilling.add(request)
        self._tails.begin(request)
        if not request.was_started:
            request.was_started = True
            self._told.started.append(Started(request.id, known.num_cached))
            self._prompt_tokens += request.num_prompt
            self._cached_tokens += known.num_cached
        return Admit(
            slot=slot,
            tokens=request.tokens.tobytes(),
            num_prompt=request.num_prompt,
            num_cached=known.num_cached,
            pages=known.pages,
            sampling=request.spec.sampling,
            stop_ids=request.spec.stop_ids,
            restore_from=known.checkpoint,
        )

    def _feed(self, request: Request, plan: Plan) -> None:
        """Plan the next chunk; one never jumps over the boundary where a state is to be saved."""
        done, until = int(self._planned[request.slot]), request.prefill_until
        size = self.memory.page_tokens
        boundary = (until - 1) // size * size if self.memory.hybrid else 0
        end = min(boundary if done < boundary else until, done + plan.budget)
        save_to = -1
        if end == boundary > 0:
            save_to = self.memory.save_checkpoint(request.id, request.tokens, end)
        self._planned[request.slot] = end
        self._longest = max(self._longest, end)
        plan.chunks.append(Chunk(request.slot, end - done, end >= until, save_to))
        plan.chunked.append(request)
        plan.budget -= end - done

    def _preempt(self, victim: Request) -> None:
        """Back to the queue; it will recompute, mostly from its own cached pages."""
        self._tails.flush(victim)
        if victim.prefill_until <= self._planned[victim.slot]:
            victim.num_in_flight = int(self._planned[victim.slot]) + 1 - len(victim.tokens)
        self._num_preemptions += 1
        self._evacuate(victim)
        self._waiting.add(victim)

    def _evacuate(self, request: Request) -> None:
        """Off the device: its slot and pages may serve any later plan."""
        self._running.remove(request)
        if self._planned[request.slot] < request.prefill_until:
            self._prefilling.remove(request)
        else:
            self._decoding = rows_of([r for r in self._decoding.requests if r is not request])
        self.memory.release(request.id)
        self._free_slots.append(request.slot)
        request.slot = -1
        if not self._running:
            self._longest = 0

    def _retire(self, request: Request, reason: FinishReason, stop_id: int = -1) -> None:
        request.finish = reason
        del self._by_id[request.id]
        self._told.finished.append(Finish(request.id, reason, stop_id))
        if request.slot >= 0:
            self._evacuate(request)
        else:
            self._waiting.remove(request)

    # -- completion -------------------------------------------------------------------------

    def complete(self, result: StepResult) -> StepOutput:
        """Take a step's tokens: append, finish, commit pages. Steps complete in order."""
        flight, lines = self._flights.pop(result.step), result.tokens
        rows = flight.rows
        if len(lines) != len(rows.requests):
            raise ValueError(f"{len(lines)} lines for a step of {len(rows.requests)} rows")
        kept_R = self._append(flight, lines)
        logprobs = [
            TokenLogprobs(
                int(rows.ids[p.row]), int(lines[p.row, 0]), p.logprob, p.top_ids, p.top_logprobs
            )
            for p in result.logprobs
            if kept_R[p.row]
        ]
        ids, counts = rows.ids, b""
        if lines.shape[1] > 1 or not kept_R.all():
            lines = lines[np.arange(lines.shape[1]) < kept_R[:, None]]
            ids, counts = ids[kept_R > 0], kept_R[kept_R > 0].tobytes()
        self._generated += lines.size
        told = self.output()
        return replace(
            told, ids=ids.tobytes(), tokens=lines.tobytes(), counts=counts, logprobs=logprobs
        )

    def _append(self, flight: Flight, lines_RT: Int32) -> Int32:
        """How many tokens of its line each request keeps: none if it finished meanwhile."""
        rows, kept_R = flight.rows, np.zeros(len(lines_RT), np.int32)
        here = np.arange(len(lines_RT))  # the rows whose requests still have their slots
        if rows is not self._decoding:  # somebody came or went since
            is_here = [r.slot == s for r, s in zip(rows.requests, rows.slots, strict=True)]
            for row in np.flatnonzero(~np.array(is_here, bool)).tolist():
                hoped = 1 + flight.num_drafts if row < flight.num_decodes else 1
                kept_R[row] = self._append_away(rows.requests[row], lines_RT[row].tolist(), hoped)
            here = here[is_here]
        present = here
        for nth, tokens_R in enumerate(lines_RT.T):
            if nth:
                here = here[tokens_R[here] >= 0]  # else this draft and all after it were refused
            kept_R[here] += 1
            due = self._tails.append(rows.slots[here], tokens_R[here])
            ended = [i for i in due if self._look_at(rows.requests[here[i]])]
            if ended:
                here = np.delete(here, ended)
        if flight.num_drafts:  # those that were refused were planned for, but are not computed
            drafted = present[present < flight.num_decodes]
            self._planned[rows.slots[drafted]] -= 1 + flight.num_drafts - kept_R[drafted]
        return kept_R

    def _append_away(self, request: Request, line: list[int], hoped: int) -> int:
        """To a request without a slot: it was preempted, or it has finished and keeps nothing."""
        kept = 0
        for token in line:
            if token < 0 or request.finish is not None:
                break
            request.tokens.append(token)
            kept += 1
            self._end(request)
        request.num_in_flight -= hoped
        return kept

    def _look_at(self, request: Request) -> bool:
        """Share its full pages: all but its newest token is computed. Returns whether it ended."""
        self._tails.flush(request)
        self.memory.commit(request.id, request.tokens, len(request.tokens) - 1)
        return self._end(request)

    def _end(self, request: Request) -> bool:
        """Retire the request if its newest token is its last. Returns whether it is."""
        if (token := request.tokens[-1]) in request.stop_ids:
            self._retire(request, FinishReason.STOP, token)
        elif len(request.tokens) >= request.limit:
            self._retire(request, FinishReason.LENGTH)
        return request.finish is not None

    def check(self) -> None:
        """Invariants that hold between any two calls. Tests call this after every step."""
        self.memory.check()
        slots = [r.slot for r in self._running]
        assert len(set(slots)) == len(slots) and not set(slots) & set(self._free_slots)
        assert len(slots) + len(self._free_slots) == len(self._planned), "a slot is lost"
        decoding = {r.id for r in self._decoding.requests}
        prefilling = {r.id for r in self._prefilling}
        assert decoding | prefilling == {r.id for r in self._running}
        assert not decoding & prefilling
        for request in self._running:
            planned = int(self._planned[request.slot])
            assert planned < request.limit + self.num_drafts
            assert planned <= min(self._room[request.slot], self._longest)
            if request.id in prefilling:
                assert planned < request.prefill_until
