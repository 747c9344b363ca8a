"""Slots and pages of adapters on the device: reuse, eviction, and order of waiting requests."""

from __future__ import annotations

from array import array
from hashlib import sha256

import numpy as np
from nanovllm_kernels.adapters import reference

from nanovllm.adapters import section
from nanovllm.kv.keys import root_key
from nanovllm.kv.memory import KVMemory
from nanovllm.plan import AdapterContent, AdapterLoad, StepPlan, StepResult
from nanovllm.sched.adapters import BASE, AdapterSlots
from nanovllm.sched.scheduler import Scheduler
from nanovllm.wire import Generate, RefusalKind, Sampling


def load(slots: AdapterSlots, name: str, rank: int) -> int:
    number = slots.new_number()
    slots.load(name, number, AdapterContent(rank, name.encode() * 32))
    return number


def taken(slots: AdapterSlots, number: int) -> tuple[int, list[AdapterLoad]]:
    slots.take(number)
    return slots.slot(number), slots.taken_loads()


def test_the_scheduler_counts_pages_of_the_kernels_size() -> None:
    """The scheduler may not import kernels, so both state how many ranks a page holds."""
    assert section.RANK_PAGE == reference.RANK_PAGE


def test_loads_wait_for_the_next_plan_unless_their_adapter_is_forgotten() -> None:
    """A request that waits for a transfer takes its adapter, and may leave before any plan."""
    slots = AdapterSlots(num_slots=2, num_pages=2)
    one, two = load(slots, "a", 1), load(slots, "b", 1)
    for number in (one, two):
        slots.take(number)
        slots.give(number)
    slots.unload("a")
    assert slots.forget(in_use=[]) == [one]
    assert slots.taken_loads() == [AdapterLoad(two, 1, [1])] and slots.taken_loads() == []


def test_keys_of_pages_depend_on_the_digest_of_an_adapter_alone() -> None:
    slots = AdapterSlots(num_slots=1, num_pages=1)
    one, again, other = (slots.new_number() for _ in range(3))
    for name, number, digest in (("a", one, b"x"), ("b", again, b"x"), ("a", other, b"y")):
        slots.load(name, number, AdapterContent(1, digest * 32))
    keys = [slots.page_key(number) for number in (one, again, other, BASE)]
    assert keys == [b"x" * 32, b"x" * 32, b"y" * 32, b""]
    assert len({root_key("s", key) for key in keys}) == 3
    assert root_key("x" * 24, b"") != root_key("", b"x" * 32)  # a salt is not an adapter
    # The key of the model alone, which pages on disk have.
    assert root_key("s") == sha256(bytes([1]) + bytes(15) + b"s").digest()


def test_unused_adapters_leave_the_least_recently_used_first() -> None:
    slots = AdapterSlots(num_slots=3, num_pages=4)
    one, two, wide, huge = (
        load(slots, name, rank) for name, rank in (("a", 1), ("b", 16), ("c", 17), ("d", 64))
    )
    assert taken(slots, one) == (0, [AdapterLoad(one, 0, [0])])
    assert taken(slots, one) == (0, [])
    assert taken(slots, two) == (1, [AdapterLoad(two, 1, [1])])
    assert taken(slots, wide) == (2, [AdapterLoad(wide, 2, [2, 3])])
    slots.give(wide)
    slots.give(one)
    assert not slots.has_room_for(huge)  # the page of `two` is in use
    assert slots.slot_counts() == {"capacity": 3, "loaded": 3, "in_use": 2}
    slots.give(one)
    slots.give(two)
    assert slots.slot_counts() == {"capacity": 3, "loaded": 3, "in_use": 0}
    again = load(slots, "a", 33)
    assert again != one and slots.resolve("a") == again  # a number of its own
    # `wide`, then `one` left.
    assert taken(slots, again) == (0, [AdapterLoad(again, 0, [0, 2, 3])])
    slots.check([again])
    assert taken(slots, BASE) == (-1, [])
    assert slots.resolve("") == BASE and slots.resolve("x") is None
    slots.unload("a")
    assert slots.resolve("a") is None
    slots.give(again)
    assert slots.has_room_for(huge)
    assert slots.forget(in_use=[one]) == [again]  # the first "a" is still in use
    assert slots.forget(in_use=[]) == [one]
    slots.check([])


def scheduler_with(adapters: AdapterSlots, overtake_steps: int = 3) -> Scheduler:
    made = Scheduler(
        KVMemory(100, 4),
        num_slots=6,
        step_tokens=64,
        max_model_tokens=100,
        overtake_steps=overtake_steps,
    )
    made.queue.adapters = adapters
    return made


def submit(scheduler: Scheduler, request_id: int, adapter: str, max_new: int = 4) -> None:
    prompt = array("i", [request_id] * 5).tobytes()
    spec = Generate(request_id, prompt, max_new, [], Sampling(), adapter=adapter)
    scheduler.add(spec, now=float(request_id))


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    assert isinstance(plan, StepPlan)
    num_rows = plan.num_decodes + sum(chunk.samples for chunk in plan.chunks)
    scheduler.complete(StepResult(plan.step, np.full((num_rows, 1), 7, np.int32)))
    scheduler.check()
    return plan


def test_a_request_waits_for_its_adapter_and_holds_no_other_back() -> None:
    adapters = AdapterSlots(num_slots=1, num_pages=1)
    load(adapters, "common", 1), load(adapters, "rare", 1)
    scheduler = scheduler_with(adapters)
    for request_id, name in enumerate(["common", "rare", "common", ""]):
        submit(scheduler, request_id, name)
    plan = step(scheduler)
    assert [admit.adapter for admit in plan.admits] == [0, 0, -1]
    assert plan.adapters == [AdapterLoad(1, 0, [0])]
    assert scheduler.stats().waiting_by_reason["adapter"] == 1
    submit(scheduler, 9, "unknown")
    (refusal,) = scheduler.output().refused
    assert refusal.kind is RefusalKind.NO_ADAPTER
    assert refusal.message == "the adapter 'unknown' is not loaded"


def test_a_rare_adapter_does_not_starve() -> None:
    adapters = AdapterSlots(num_slots=1, num_pages=1)
    load(adapters, "common", 1), load(adapters, "rare", 1)
    scheduler = scheduler_with(adapters)
    submit(scheduler, 0, "common")
    step(scheduler)
    submit(scheduler, 1, "rare")
    for request_id in range(2, 40):  # one more request of the common adapter in each step
        submit(scheduler, request_id, "common")
        submit(scheduler, 100 + request_id, "")
        if any(load.number == 2 for load in step(scheduler).adapters):
            break
    assert request_id < 12  # three steps that overtake it, then four that drain the slot


def test_an_adapter_that_leaves_before_its_load_takes_no_page() -> None:
    """Its request was aborted while it waited for a transfer, so no plan has loaded it."""
    slots = AdapterSlots(num_slots=1, num_pages=2)
    wide, narrow = load(slots, "a", 32), load(slots, "b", 16)
    slots.take(wide)
    slots.give(wide)
    assert taken(slots, narrow) == (0, [AdapterLoad(narrow, 0, [1])])
