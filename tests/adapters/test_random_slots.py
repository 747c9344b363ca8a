"""Random loads, unloads and requests of more adapters than fit on the device."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from nanovllm.kv.memory import KVMemory
from nanovllm.plan import AdapterContent, StepPlan, StepResult
from nanovllm.sched.adapters import AdapterSlots
from nanovllm.sched.scheduler import Scheduler
from nanovllm.wire import FinishReason, Generate, Sampling

NAMES = "abcdef"
RANK_PAGE = 16
MOST_RANK = 40  # three pages
NUM_PAGES = 5
OVERTAKE_STEPS = 3
MAX_NEW = 4


def num_pages_of(rank: int) -> int:
    return -(-rank // RANK_PAGE)


@dataclass
class KnownSlots:
    """Adapters on the device, as the operations so far must have left them."""

    num_slots: int
    ranks: dict[int, int] = field(default_factory=dict)  # of all loads, by number
    held: dict[int, tuple[int, list[int]]] = field(default_factory=dict)  # slot and pages
    users: Counter[int] = field(default_factory=Counter)
    left: dict[int, int] = field(default_factory=dict)  # time when a request last left, by number
    time: int = 0

    def free(self) -> tuple[set[int], set[int]]:
        """Return the free slots and pages."""
        slots, pages = set(range(self.num_slots)), set(range(NUM_PAGES))
        for slot, own in self.held.values():
            assert slot in slots and pages.issuperset(own)  # no two adapters have the same
            slots, pages = slots - {slot}, pages - {*own}
        return slots, pages

    def make_room(self, number: int) -> bool:
        """Remove unused adapters, the one that was left first at first, until this one fits.

        Return False, and remove none, if it does not fit without all of them.
        """
        before = dict(self.held)
        for other in sorted(self.held, key=lambda one: self.left.get(one, 0)):
            if self.fits(number):
                break
            if not self.users[other]:
                del self.held[other]
        if self.fits(number):
            return True
        self.held = before
        return False

    def fits(self, number: int) -> bool:
        slots, pages = self.free()
        return bool(slots) and len(pages) >= num_pages_of(self.ranks[number])

    def take(self, slots: AdapterSlots, number: int) -> None:
        """Put a request with an adapter in the batch if there is room, and check the load."""
        is_new = number not in self.held
        has_room = not is_new or self.make_room(number)
        assert slots.has_room_for(number) == has_room
        if not has_room:
            return
        slots.take(number)
        loads = slots.taken_loads()
        assert len(loads) == is_new
        for load in loads:
            free_slots, free_pages = self.free()
            assert (load.number, load.slot in free_slots) == (number, True)
            assert free_pages.issuperset(load.pages) and load.pages == sorted({*load.pages})
            assert len(load.pages) == num_pages_of(self.ranks[number])
            self.held[number] = load.slot, load.pages
        assert slots.slot(number) == self.held[number][0]
        self.users[number] += 1

    def give(self, slots: AdapterSlots, number: int) -> None:
        slots.give(number)
        self.time += 1
        self.users[number] -= 1
        self.left[number] = self.time


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["load", "unload", "take", "take", "take", "give", "give", "forget"]),
        st.integers(0, len(NAMES) - 1),
        st.integers(1, MOST_RANK),
    ),
    min_size=20,
    max_size=120,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(operations=OPERATIONS, num_slots=st.integers(1, 4))
def test_slots_and_pages_follow_the_order_of_use(
    operations: list[tuple[str, int, int]], num_slots: int
) -> None:
    slots, device = AdapterSlots(num_slots, NUM_PAGES), KnownSlots(num_slots)
    for kind, at, rank in operations:
        number = slots.resolve(NAMES[at])
        if kind == "load":
            load(slots, device, NAMES[at], rank)
        elif kind == "unload" and number is not None:
            slots.unload(NAMES[at])
            assert slots.resolve(NAMES[at]) is None
        elif kind == "take" and number is not None:
            device.take(slots, number)
        elif kind == "give" and (used := sorted(device.users.elements())):
            device.give(slots, used[at % len(used)])
        elif kind == "forget":
            forget(slots, device)
        slots.check(device.users.elements())
    for number in [*device.users.elements()]:
        device.give(slots, number)
    for name in [*slots.by_name]:
        slots.unload(name)
    forget(slots, device)
    assert device.ranks == device.held == {}
    for name in NAMES[:num_slots]:  # all slots are free again, and then all pages
        load(slots, device, name, 1)
        device.take(slots, slots.by_name[name])
    assert len(device.held) == num_slots
    for number in [*device.users.elements()]:
        device.give(slots, number)
    load(slots, device, "a", NUM_PAGES * RANK_PAGE)
    device.take(slots, slots.by_name["a"])
    assert [pages for _, pages in device.held.values()] == [[*range(NUM_PAGES)]]


def load(slots: AdapterSlots, device: KnownSlots, name: str, rank: int) -> None:
    number = slots.new_number()
    assert number not in device.ranks
    slots.load(name, number, AdapterContent(rank, bytes(32)))
    device.ranks[number] = rank


def forget(slots: AdapterSlots, device: KnownSlots) -> None:
    """Remove adapters without a name and without requests, and check which those are."""
    in_use = {*device.users.elements()}
    gone = device.ranks.keys() - in_use - {*slots.by_name.values()}
    assert sorted(slots.forget(in_use)) == sorted(gone)
    for number in gone:
        del device.ranks[number]
        device.held.pop(number, None)


class Bank:
    """Owner and content of each page on the device, after the loads of all plans."""

    def __init__(self) -> None:
        self.owners = [-1] * NUM_PAGES
        self.contents = [0] * NUM_PAGES

    def apply(self, plan: StepPlan) -> None:
        for one in plan.adapters:
            self.owners = [-1 if owner == one.slot else owner for owner in self.owners]
            for page in one.pages:
                self.owners[page], self.contents[page] = one.slot, one.number

    def pages_of(self, slot: int) -> list[int]:
        """Return the adapter in each page of a slot."""
        pairs = zip(self.owners, self.contents, strict=True)
        return [number for owner, number in pairs if owner == slot]


class Traffic:
    """A scheduler with requests of random adapters, whose waiting times are counted in steps."""

    def __init__(self, num_slots: int) -> None:
        self.slots = AdapterSlots(num_slots, NUM_PAGES)
        self.scheduler = Scheduler(
            KVMemory(200, 4),
            num_slots=6,
            step_tokens=64,
            max_model_tokens=20,
            overtake_steps=OVERTAKE_STEPS,
            adapters=lambda: self.slots,
        )
        self.bank, self.ranks = Bank(), dict[int, int]()
        self.submitted = self.first = self.num_steps_first = 0
        self.finished = Counter[FinishReason]()

    def operate(self, kind: str, at: int, number: int) -> None:
        """Do one of OPERATIONS. `number` is a rank."""
        name, scheduler = ("", *NAMES)[at], self.scheduler
        if kind == "load" and name:
            made = scheduler.new_adapter()
            self.ranks[made] = number
            scheduler.load_adapter(name, made, AdapterContent(number, bytes(32)))
            scheduler.forget_adapters()
        elif kind == "unload" and name in self.slots.by_name:
            scheduler.unload_adapter(name)
            scheduler.forget_adapters()
        elif kind == "submit" and (not name or name in self.slots.by_name):
            self.submitted += 1
            prompt = array("i", [self.submitted] * 5).tobytes()
            most = 1 + number % MAX_NEW
            spec = Generate(self.submitted, prompt, most, [], Sampling(), adapter=name)
            scheduler.add(spec, now=float(self.submitted))
        elif kind == "abort" and scheduler.queue.by_id:
            by_id = [*scheduler.queue.by_id]
            scheduler.abort(by_id[number % len(by_id)])
        elif kind == "step":
            self.step()

    def step(self) -> None:
        scheduler = self.scheduler
        plan = scheduler.plan()
        if plan is None:
            return
        assert isinstance(plan, StepPlan)
        self.bank.apply(plan)
        for request in scheduler.queue.running:
            if request.adapter:
                slot, count = (
                    self.slots.slot(request.adapter),
                    num_pages_of(self.ranks[request.adapter]),
                )
                assert self.bank.pages_of(slot) == [request.adapter] * count
        num_rows = plan.num_decodes + sum(chunk.samples for chunk in plan.chunks)
        output = scheduler.complete(StepResult(plan.step, np.full((num_rows, 1), 7, np.int32)))
        self.finished.update(one.reason for one in output.finished)
        scheduler.check()
        self.count_steps()

    def count_steps(self) -> None:
        """Count the steps in which the oldest waiting request stays the oldest."""
        waiting = self.scheduler.queue.waiting
        first = waiting[0].id if waiting else 0
        is_same = first > 0 and first == self.first
        self.num_steps_first = self.num_steps_first + 1 if is_same else 0
        self.first = first


TRAFFIC = st.lists(
    st.tuples(
        st.sampled_from(["load", "unload", *["submit", "step"] * 4, "abort"]),
        st.integers(0, len(NAMES)),
        st.integers(1, MOST_RANK),
    ),
    min_size=60,
    max_size=250,
)

# The oldest request waits while others overtake it, and then until the slots have drained.
MOST_STEPS = OVERTAKE_STEPS + MAX_NEW + 1


@settings(max_examples=100, deadline=None, derandomize=True)
@given(operations=TRAFFIC, num_slots=st.integers(1, 4))
def test_every_request_is_served_in_a_bounded_number_of_steps(
    operations: list[tuple[str, int, int]], num_slots: int
) -> None:
    traffic = Traffic(num_slots)
    for operation in operations:
        traffic.operate(*operation)
        assert traffic.num_steps_first <= MOST_STEPS
    while traffic.scheduler.has_work:
        traffic.step()
        assert traffic.num_steps_first <= MOST_STEPS
    traffic.finished.update(one.reason for one in traffic.scheduler.output().finished)
    assert traffic.finished.total() == traffic.submitted
    assert {*traffic.finished} <= {FinishReason.LENGTH, FinishReason.ABORT}


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_rare_adapters_do_not_starve_beside_common_ones(num_slots: int) -> None:
    """Each step brings a request of one of as many common adapters as there are slots."""
    traffic, rng = Traffic(num_slots), np.random.default_rng(num_slots)
    for at in range(1, len(NAMES) + 1):
        traffic.operate("load", at, 1)
    longest = 0
    for step in range(300):
        traffic.operate("submit", 1 + step % num_slots, MAX_NEW - 1)
        if step % 20 == 10:
            traffic.operate("submit", int(rng.integers(num_slots, len(NAMES))) + 1, MAX_NEW - 1)
        traffic.operate("step", 0, 0)
        longest = max(longest, traffic.num_steps_first)
    assert 0 < longest <= MOST_STEPS
