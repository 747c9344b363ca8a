"""A prefill and a decode engine on simulated GPUs, by chance: leases end early, loads fail late.

Each of the faults that are put in must change a text, or the simulation would prove nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace as replaced
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from nanovllm.kv.keys import PageKeys
from nanovllm.plan import Moved
from nanovllm.transfer.leases import Leases
from nanovllm.wire import Abort, FinishReason
from tests.paper.draft_layers import NAN
from tests.paper.engine import PAGE, PaperEngine, generate
from tests.paper.gpu import solo_run
from tests.paper.transfers import PaperTransfers, Transfer

SIZES: dict[str, Any] = dict(num_slots=4, budget=24, depth=1)


class LendingEngine:
    """P, with leases of `lease` steps. `fault` is one of the faults of this file, or ""."""

    def __init__(self, rng: Random, fault: str) -> None:
        self.engine = PaperEngine(num_pages=16, **SIZES)
        self.engine.scheduler.queue.lender = self
        self.fault = fault
        self.time = 0.0
        self.leases = Leases(rng.choice([3.0, 8.0, 100.0]), lambda: self.time)
        self.lent: dict[int, tuple[int, list[int]]] = {}  # generation and pages, by request

    def lend(
        self, request: str, pages: Sequence[int], text: bytes, num_tokens: int, *, state: int
    ) -> str:
        held = pages
        if self.fault == "pages are not held":
            self.engine.scheduler.take_back(pages)
            held = ()
        self.lent[int(request)] = self.leases.grant(request, held), list(pages)
        return request

    def step(self) -> None:
        self.time += 1
        self.engine.step()
        for lease in self.leases.scan():
            self.engine.scheduler.take_back(lease.pages)

    def finish(self, generation: int) -> None:
        if (lease := self.leases.finish(generation, "done")) is not None:
            self.engine.scheduler.take_back(lease.pages)


class RemoteTransfers(PaperTransfers):
    """Transfers of D, whose fetches read P's memory at two times."""

    is_remote = True

    def __init__(self, d: PaperEngine, p: LendingEngine) -> None:
        super().__init__([d.gpu, d.gpu.layers], d.tiers)
        self.p = p
        self.offers: dict[bytes, tuple[int, int]] = {}  # generation and page, by key
        self.num_lost = 0

    def holds(self, key: bytes) -> bool:
        if key not in self.offers:
            return False
        self.disk[key] = self._page(key)
        return True

    def _page(self, key: bytes) -> list[list[int]]:
        page = self.offers[key][1]
        return [memory[page].copy() for memory in self.p.engine.transfers.memories]

    def _end(self, one: Transfer) -> Moved:
        if one.kind != "load" or not one.fetches:
            self.fail_every = 0
            return super()._end(one)
        keys = {slot: key for key, slot in one.fetches}
        for at, (slot, _) in enumerate(one.pairs):
            if slot in keys and self.rng.randint(0, 1):
                one.content[at] = self._page(keys[slot])
        generations = {self.offers[key][0] for key in keys.values()}
        is_held = all(map(self.p.leases.is_held, generations))
        self.num_lost += not is_held
        if self.p.fault == "the lease is not checked":
            is_held = True
        self.fail_every = 0 if is_held else 1
        for generation in generations:
            self.p.finish(generation)
        moved = super()._end(one)
        return self._as_if_direct(one, moved) if self.rng.randint(0, 1) else moved

    def _as_if_direct(self, one: Transfer, moved: Moved) -> Moved:
        """Return the end of a load whose fetches went to the device and not to host slots."""
        fetched = frozenset(slot for _, slot in one.fetches)
        for (slot, _), content in zip(one.pairs, one.content, strict=True):
            if slot in fetched:
                self.slots[slot] = [[NAN] * len(cells) for cells in content]
        is_kept = self.p.fault == "slots without content are used"
        return replaced(moved, blank=frozenset() if is_kept else fetched)


def prompt_of(rng: Random) -> list[int]:
    """Return a prompt of four to nine pages, whose beginning others share."""
    return [rng.randint(0, 2)] * 6 + [rng.randint(0, 5) for _ in range(rng.randint(12, 30))]


def run_pair(rng: Random, fault: str = "") -> tuple[int, int, int]:
    """Return the numbers of wrong texts, of loads that arrived, and of those that did not."""
    p = LendingEngine(rng, fault)
    d = PaperEngine(num_pages=24, host=20, most_polls=6, transfers=rng.randint(0, 99), **SIZES)
    d.transfers = remote = RemoteTransfers(d, p)
    d.move, d.moved = remote.move, remote.moved
    d.memory.tier.below = remote
    prompts: dict[int, list[int]] = {}
    for name in range(24):
        prompt = prompts[name] = prompt_of(rng)
        spec = generate(name, prompt, 1)
        p.engine.say(replace(spec, lends=True))
        p.engine.say(generate(1000 + name, prompt_of(rng), 2))
        while name not in p.engine.finish:
            p.step()
        for _ in range(rng.randint(0, 4)):
            p.step()
        if name in p.lent:
            generation, pages = p.lent[name]
            text = prompt_of(rng) if fault == "the text is not checked" else prompt
            keys = PageKeys(array("i", text), "", PAGE)
            for at, page in enumerate(pages[: (len(text) - 1) // PAGE]):
                remote.offers[keys.full(at)] = generation, page
            if fault == "the text is not checked":
                prompts[name] = text
        d.say(generate(name, prompts[name], 4))
        if name % 3 == 2:  # a prompt whose pages may have left the device
            prompts[100 + name] = prompts[name - 2]
            d.say(generate(100 + name, prompts[100 + name], 4))
        for _ in range(rng.randint(0, 8)):
            d.step()
            p.step()
            d.say(Abort(rng.randint(0, 60)))
    while not d.loop.idle or d.scheduler.num_moving or len(p.leases):
        d.step()
        p.step()
    p.engine.finish_all()
    for engine in (d, p.engine):
        assert engine.memory.pool.num_free == engine.memory.pool.num_pages
        engine.scheduler.check()
    done = [name for name, reason in d.finish.items() if reason is FinishReason.LENGTH]
    wrong = sum(
        d.text[name] != solo_run(prompts[name], 4, [], recurrent=d.gpu.recurrent) for name in done
    )
    wrong += sum(reason is FinishReason.ERROR for reason in d.finish.values())
    return wrong, remote.num_loads - remote.num_lost, remote.num_lost


def totals_of(fault: str, count: int) -> tuple[int, ...]:
    found = [run_pair(Random(seed), fault) for seed in range(count)]
    return tuple(map(sum, zip(*found, strict=True)))


def test_the_text_is_right_whatever_happens_to_the_leases() -> None:
    wrong, arrived, lost = totals_of("", 40)
    assert wrong == 0 and arrived > 100 and lost > 20


@pytest.mark.parametrize(
    "fault",
    [
        "the lease is not checked",
        "pages are not held",
        "the text is not checked",
        "slots without content are used",
    ],
)
def test_each_fault_is_seen(fault: str) -> None:
    assert any(run_pair(Random(seed), fault)[0] for seed in range(20))
