"""All requests: admission, prompt chunks, preemption, departure. Their states: scheduler.py.

Decision: the pages of a request that leaves are free at once, unless a step in flight still writes
to them. Then they are kept until its result has been checked. Only preemption, which needs pages
now, releases pages whose last writes were not checked. These are zeroed before reuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from nanovllm.kv.memory import Found, KVMemory
from nanovllm.plan import CORRUPTED, Admit, Chunk, Grant, Moved
from nanovllm.sched.adapters import BASE, AdapterSlots
from nanovllm.sched.decoding import Decoding
from nanovllm.sched.lending import Lending, PageLender
from nanovllm.sched.policy import LOOKED_AT, ByUrgency, urgency, worth_waiting
from nanovllm.sched.request import Request, State, arrive
from nanovllm.wire import Finish, FinishReason, Generate, Refusal, RefusalKind, Started, StepOutput


@dataclass(slots=True)
class OpenPlan:
    """A StepPlan under construction."""

    budget: int  # prompt tokens that still fit
    admits: list[Admit] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    chunked: list[Request] = field(default_factory=list)  # the requests of `chunks`
    num_tokens: int = 0  # all tokens of the step, with drafts
    max_length: int = 0  # longest context of any row


class Queue:
    """Requests from arrival until no step in flight writes for them, with their slots and pages.

    The limits are explained in Scheduler.
    """

    def __init__(
        self,
        memory: KVMemory,
        decoding: Decoding,
        adapters: AdapterSlots,
        *,
        num_slots: int,
        max_model_tokens: int,
        ageing_s: float,
        overtake_steps: int,
        min_saved_tokens: int,
        lender: PageLender | None = None,
    ) -> None:
        self.memory = memory
        self.lending = None if lender is None else Lending(memory, lender)
        self.decoding = decoding
        self.adapters = adapters
        self.max_model_tokens = max_model_tokens
        self.ageing_s = ageing_s
        self.overtake_steps = overtake_steps
        self.min_saved_tokens = min_saved_tokens
        self.by_id: dict[int, Request] = {}
        self.waiting = ByUrgency()  # the requests in this state, in the order of admission
        self.prefilling = ByUrgency()  # the requests in this state, in the order of chunks
        self.arriving: dict[int, Request] = {}  # the requests in this state, by id
        self._arrived = ByUrgency()  # those of `arriving` whose transfer has ended
        self.events = StepOutput()  # refusals, starts and finishes after the last output
        self.num_deferred = 0  # requests that wait for a prefix that the latest plan computes
        self.num_without_room = 0  # requests that wait for room for their adapter
        self.num_preemptions = self.prompt_tokens = self.cached_tokens = self.loaded_tokens = 0
        self._arrivals = 0
        self._free_slots = list(range(num_slots))[::-1]

    @property
    def num_running(self) -> int:
        """Number of requests in slots."""
        return len(self.decoding.owner) - len(self._free_slots)

    @property
    def running(self) -> list[Request]:
        """Requests in slots, by urgency: the last one is preempted first."""
        owner = self.decoding.owner
        requests = [self.by_id[request_id] for request_id in owner[owner >= 0].tolist()]
        return sorted(requests, key=attrgetter("urgency"))

    # -- arrivals ---------------------------------------------------------------------------

    def add(self, spec: Generate, now: float) -> None:
        """Queue a request that arrived at `now` (seconds), or refuse it."""
        order = urgency(spec.priority, now, self._arrivals, self.ageing_s)
        adapter = self.adapters.resolve(spec.adapter)
        request = arrive(
            spec,
            now,
            order,
            page_tokens=self.memory.page_tokens,
            adapter=adapter or BASE,
            adapter_key=self.adapters.page_key(adapter or BASE),
        )
        self._arrivals += 1
        if adapter is None:
            reason = f"the adapter {spec.adapter!r} is not loaded"
            self.events.refused.append(Refusal(request.id, RefusalKind.NO_ADAPTER, reason))
            return
        if (refusal := self._refuse(request)) is not None:
            self.events.refused.append(Refusal(request.id, *refusal))
            return
        self.by_id[request.id] = request
        self.waiting.add(request)

    def _refuse(self, request: Request) -> tuple[RefusalKind, str] | None:
        if request.num_prompt < 1 or request.spec.max_new < 1:
            return RefusalKind.INVALID, "the prompt and max_tokens must be at least one token"
        if request.limit > self.max_model_tokens:
            lengths = (
                f"{request.num_prompt} prompt tokens and {request.spec.max_new} new ones exceed"
            )
            return RefusalKind.TOO_LONG, f"{lengths} the context of {self.max_model_tokens} tokens"
        if not self.memory.fits(request.limit):
            room = self.memory.pool.num_pages * self.memory.page_tokens
            return RefusalKind.TOO_LONG, f"{request.limit} tokens exceed the cache of {room} tokens"
        return None

    # -- admission --------------------------------------------------------------------------

    def plan_prompts(self, plan: OpenPlan) -> None:
        """Plan chunks for running requests, then for waiting ones that can be admitted."""
        self.num_deferred = 0
        while self.arriving and self._arrived and plan.budget > 0:
            self._end_arrival(self._arrived[0], plan)
        for request in self.prefilling:
            if plan.budget == 0:
                return
            self._feed(request, plan)
        self._admit_waiting(plan)

    def _admit_waiting(self, plan: OpenPlan) -> None:
        """Admit requests in order of urgency while tokens, slots and pages last.

        Four kinds of requests are skipped. One should wait a step for a prefix that is being
        computed; its slot and pages are kept free. Another waits for a transfer of its prefix that
        another request has started. The third lacks pages; it can be overtaken in `overtake_steps`
        steps at most. The fourth lacks room for its adapter. After the same number of steps, only
        requests without an adapter can overtake it.
        """
        passed_over: list[Request] = []  # for want of pages or of room for their adapter
        without_room: set[int] = set()  # adapters; room does not grow while requests are admitted
        self.num_without_room = num_overtaken = at = kept_pages = 0
        is_adapter_due = False
        while plan.budget > 0 and at < min(len(self.waiting), LOOKED_AT + self.num_without_room):
            if len(self._free_slots) <= self.num_deferred:
                break
            request = self.waiting[at]
            if request.num_in_flight:
                break  # preempted, and a result for it is still in flight
            if self.memory.has_tiers and self._awaits(request):
                at += 1
            elif request.adapter != BASE and (
                is_adapter_due
                or request.adapter in without_room
                or not self.adapters.has_room_for(request.adapter)
            ):
                without_room.add(request.adapter)
                is_adapter_due |= request.num_overtaken >= self.overtake_steps
                self.num_without_room += 1
                passed_over.append(request)
                at += 1
            elif (num_pages := self._defer(request, plan)) is not None:
                self.num_deferred += 1
                kept_pages += num_pages
                at += 1
            elif self._admit(request, plan, kept_pages):
                num_overtaken = len(passed_over)
                if request.state is State.PREFILLING:
                    self._feed(request, plan)
            elif request.num_overtaken < self.overtake_steps:
                passed_over.append(request)
                at += 1
            else:
                break  # pages that become free are kept for this request
        for request in passed_over[:num_overtaken]:
            request.num_overtaken += 1

    def _awaits(self, request: Request) -> bool:
        """Return True if the request should wait for the transfer of another one."""
        ticket = self.memory.awaited(request.keys, request.awaited)
        request.awaited = ticket or request.awaited
        return ticket > 0

    def _defer(self, request: Request, plan: OpenPlan) -> int | None:
        """Return the pages that a request needs in the next step, if it should wait for this one.

        Return None if it gains too little by waiting.
        """
        if not plan.chunks:
            return None
        now, then = self.memory.reach(request.keys)
        if not worth_waiting(then - now, len(request.tokens) - now, self.min_saved_tokens):
            return None
        return self.memory.num_pages_for(len(request.tokens)) - then // self.memory.page_tokens

    def _admit(self, request: Request, plan: OpenPlan, kept_pages: int) -> bool:
        reserve = self.num_running + kept_pages  # a running request may soon need a page
        slot = -1 if self.decoding.drafting.most else self._free_slots[-1]
        known = self.memory.admit(
            request.id, request.keys, reserve, slot, may_load=request.may_load
        )
        if known is None:
            return False
        request.slot = self._free_slots.pop()
        request.prefill_until = len(request.tokens)
        request.num_cached = known.num_cached
        request.num_overtaken = 0
        self.adapters.take(request.adapter)
        self.waiting.remove(request)
        self.decoding.begin(request, len(known.pages))
        if known.ticket:
            request.state = State.ARRIVING
            self.arriving[request.id] = request
        else:
            self._start(request, known, plan, num_loaded=0)
        return True

    def _start(self, request: Request, known: Found, plan: OpenPlan, *, num_loaded: int) -> None:
        """Plan the admission of a request that has its slot, its pages and its cached prefix.

        `num_loaded` is the number of tokens of the prefix that came from tiers below the device.
        """
        request.state = State.PREFILLING
        request.num_loaded = num_loaded
        self.prefilling.add(request)
        if not request.was_started:
            request.was_started = True
            self.events.started.append(Started(request.id, known.num_cached, num_loaded))
            self.prompt_tokens += request.num_prompt
            self.cached_tokens += known.num_cached
            self.loaded_tokens += num_loaded
            self.memory.started(request.id, request.num_prompt, known.num_cached, num_loaded)
        admit = Admit(
            slot=request.slot,
            tokens=request.tokens.tobytes(),
            num_prompt=request.num_prompt,
            num_cached=known.num_cached,
            pages=known.pages,
            sampling=request.spec.sampling,
            stop_ids=request.spec.stop_ids,
            restore_from=known.checkpoint,
            adapter=self.adapters.slot(request.adapter),
        )
        plan.admits.append(admit)
        if known.source:
            target = known.pages[known.num_cached // self.memory.page_tokens]
            plan.copies.append((known.source, target))

    # -- transfers --------------------------------------------------------------------------

    def moved(self, moved: Moved) -> None:
        """Process the end of a transfer. A request whose pages did not arrive computes them."""
        request_id, ok = self.memory.moved(moved)
        if (request := self.arriving.get(request_id)) is None:
            return
        if ok:
            self._arrived.add(request)
        else:
            self._begin_anew(request)

    def _end_arrival(self, request: Request, plan: OpenPlan) -> None:
        """Plan the admission of a request whose pages have arrived."""
        if (known := self.memory.arrived(request.id)) is None:
            self._begin_anew(request)
            return
        self._arrived.remove(request)
        del self.arriving[request.id]
        num_loaded = known.num_cached - request.num_cached
        request.num_cached = known.num_cached
        self.decoding.planned[request.slot] = known.num_cached
        self._start(request, known, plan, num_loaded=num_loaded)

    def _begin_anew(self, request: Request) -> None:
        """Move an arriving request back to the queue, where it computes its prefix."""
        request.may_load = False
        self._leave(request, State.WAITING)
        self.memory.release(request.id)
        self.waiting.add(request)

    def _feed(self, request: Request, plan: OpenPlan) -> None:
        """Plan the next chunk of a prompt."""
        done, until = int(self.decoding.planned[request.slot]), request.prefill_until
        waiting = (other.keys for other in self.waiting)
        most = min(until, done + plan.budget)
        end, save_to, at = self.memory.cut(request.id, done, most, waiting)
        self.decoding.planned[request.slot] = end
        self.memory.expect(request.id, end)
        chunk = Chunk(
            slot=request.slot,
            num_tokens=end - done,
            samples=end >= until,
            save_to=save_to,
            start=done,
            save_at=at - done,
        )
        plan.chunks.append(chunk)
        plan.chunked.append(request)
        plan.budget -= end - done
        plan.num_tokens += end - done
        plan.max_length = max(plan.max_length, end)

    def issue(self, step: int, plan: OpenPlan) -> list[Request]:
        """Register the pages of a step's plan. Return the requests whose last chunk is in it.

        Decoding.issue() changes their state.
        """
        self.memory.publish()
        firsts = []
        for request, chunk in zip(plan.chunked, plan.chunks, strict=True):
            if chunk.samples:
                firsts.append(request)
                self.prefilling.remove(request)
            elif self.lending is not None:
                self.lending.issued(step, request, chunk.start + chunk.num_tokens)
        return firsts

    # -- departures -------------------------------------------------------------------------

    def preempt(self, victim: Request) -> None:
        """Move a request back to the queue. It recomputes later, mostly from its cached pages.

        One whose pages are lent is ended: the decode server computes its prompt.
        """
        self.num_preemptions += 1
        victim.may_load = True
        self._leave(victim, State.WAITING)
        self.memory.mark_unverified(victim.id, victim.written)
        self.memory.release(victim.id)
        self.waiting.add(victim)
        if self.lending is not None and self.lending.was_answered(victim):
            self.retire(victim, FinishReason.ABORT)

    def retire(self, request: Request, reason: FinishReason) -> None:
        """End a request. Results that are still in flight for it are dropped."""
        del self.by_id[request.id]
        answer: Finish | None = Finish(request.id, reason)
        if self.lending is not None:
            answer = self.lending.end(request, reason)
        if answer is not None:
            self.events.finished.append(answer)
        if request.state is State.WAITING:
            self.waiting.remove(request)
            request.state = State.FINISHED
            return
        self._leave(request, State.FINISHED)
        if reason is FinishReason.ERROR:
            self.memory.invalidate(request.id)
        elif request.num_in_flight:
            return  # handle_late_result() releases the pages
        else:
            self.memory.mark_unverified(request.id, request.written)
        self.memory.release(request.id)

    def _leave(self, request: Request, state: State) -> None:
        """Free a request's slot, and change its state."""
        if self.lending is not None:
            self.lending.left(request)
        if request.state is State.PREFILLING:
            self.prefilling.remove(request)
        elif self.arriving.pop(request.id, None) is not None and request in self._arrived:
            self._arrived.remove(request)
        self.decoding.leave(request)
        self.adapters.give(request.adapter)
        self._free_slots.append(request.slot)
        request.slot = -1
        request.state = state

    def take_back(self, pages: Sequence[int], state: int, request_id: int) -> None:
        """Release pages and a state whose lease has ended. Abort its request if it still runs."""
        self.memory.take_back(pages, state)
        request = self.lending.not_wanted(request_id) if self.lending is not None else None
        if request is not None:
            self.retire(request, FinishReason.ABORT)

    def handle_late_result(self, request: Request, tokens: list[int]) -> int:
        """Take a result for a request without a slot. Return how many of its tokens are kept."""
        request.num_in_flight -= 1
        if request.state is State.WAITING:
            return self._append_late(request, tokens)
        if self.memory.holds(request.id):
            if tokens[0] == CORRUPTED:
                self.memory.invalidate(request.id, request.written.start)
            if not request.num_in_flight:
                self.memory.mark_unverified(request.id, request.drafted)
                self.memory.release(request.id)
        return 0

    def _append_late(self, request: Request, tokens: list[int]) -> int:
        if tokens[0] == CORRUPTED:
            self.memory.invalidate_by_keys(request.keys)
            self.retire(request, FinishReason.ERROR)
            return 0
        for kept, token in enumerate(tokens):
            if token < 0:
                return kept
            request.tokens.append(token)
            if self.end(request):
                return kept + 1
        return len(tokens)

    def commit_and_check_stop(self, request: Request) -> bool:
        """Register the request's full pages and return True if it ended.

        All tokens but the latest are computed.
        """
        self.decoding.flush(request)
        self.memory.commit(request.id, len(request.tokens) - 1)
        return self.end(request)

    def end(self, request: Request) -> bool:
        """Retire the request and return True if its latest token is its last."""
        if request.tokens[-1] in request.stop_ids:
            self.retire(request, FinishReason.STOP)
        elif len(request.tokens) >= request.limit:
            self.retire(request, FinishReason.LENGTH)
        return request.state is State.FINISHED

    def check(self) -> None:
        self.memory.check()
        running = self.running
        self.adapters.check(request.adapter for request in running)
        slots = [r.slot for r in running]
        assert len(set(slots)) == len(slots) and not set(slots) & set(self._free_slots)
        assert len(slots) + len(self._free_slots) == len(self.decoding.planned), "a slot is lost"
        by_state = {
            state: {r.id for r in self.by_id.values() if r.state is state} for state in State
        }
        assert {r.id for r in self.waiting} == by_state[State.WAITING]
        assert {r.id for r in self.prefilling} == by_state[State.PREFILLING]
        assert set(self.arriving) == by_state[State.ARRIVING] >= {r.id for r in self._arrived}
        assert not by_state[State.FINISHED]
        assert len(running) + len(self.waiting) == len(self.by_id)
        self.decoding.check(running)
