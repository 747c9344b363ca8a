"""A prefill and a decode engine on simulated GPUs, by chance, with the faults of two hosts.

D has one rank or two, each of which reads its own share of a page. One share may fail alone.

Each fault that is put in must change a text, or the simulation would prove nothing.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from msgspec.structs import replace

from nanovllm.kv.costs import TransferCosts
from nanovllm.transfer.params import TICKET
from nanovllm.wire import Abort, FinishReason
from tests.paper.engine import generate
from tests.paper.gpu import solo_run
from tests.paper.pair import (
    IDENTITY,
    KEY,
    KINDS,
    LAYOUT,
    DecodeEngine,
    PaperClient,
    PrefillEngine,
)

NUM_PAIRS = 24 if settings().max_examples <= 100 else 420  # the latter with the profile `thorough`
NUM_CASES = 24  # of a pair
# Tickets that D must refuse, with the reason that it counts.
REFUSED = {
    "forged": "forged", "expired": "expired", "foreign": "unconnected", "twin": "model",
    "layout": "layout", "another prompt": "text", "stale": "unconnected",
}  # fmt: skip
FAULTS = {  # each with the seed of a pair in which it is seen
    "the lease is not checked": 1,
    "pages are not held": 0,
    "states are not held": 13,
    "engines are not compared": 0,
    "slots without content are used": 13,
    "the ends of ranks are not joined": 10,
    "pages are read before they are computed": 6,
    "pages are ready too early": 6,
    "leases are not revoked": 20,
}


class Pair:
    """P and D, and all that a router sends to them."""

    def __init__(self, seed: int, fault: str = "") -> None:
        self.rng = Random(seed)
        self.kind = list(KINDS)[seed % len(KINDS)]
        self.fault = fault
        self.num_starts = 0
        self.is_slow = bool(seed // len(KINDS) // 2 % 2)  # P, so that D waits for its chunks
        self.fault_rate = 0.02
        self.p = self.start_p()
        beats = self.rng.choice([1, 2, 1000])
        shares = 2 if seed // len(KINDS) % 2 else 1  # ranks of D
        self.has_disk = bool(seed // len(KINDS) // 4 % 2)  # of D
        self.client = PaperClient(self.p, self.rng, fault, beats, shares)
        self.d = DecodeEngine(self.client, self.kind, has_disk=self.has_disk)
        self.counts: Counter[str] = Counter()
        self.prompts: dict[int, list[int]] = {}
        self.tickets: list[tuple[list[int], str]] = []  # of all prompts so far
        self.later: list[tuple[int, str]] = []  # ends of faults, by step
        self.time = 0
        self.is_loaded = True

    def start_p(self) -> PrefillEngine:
        self.num_starts += 1
        lease_s = self.rng.choice([4.0, 12.0, 100.0])
        budget = 8 if self.is_slow else 24
        return PrefillEngine(self.num_starts, self.kind, lease_s, budget=budget, fault=self.fault)

    def prompt(self) -> list[int]:
        """Return a prompt of four to nine pages, whose beginning others share."""
        rng = self.rng
        return [rng.randint(0, 2)] * 6 + [rng.randint(0, 5) for _ in range(rng.randint(12, 30))]

    # -- steps and faults -------------------------------------------------------------------

    def step(self) -> None:
        self.time += 1
        for end in [end for end in self.later if end[0] <= self.time]:
            self.later.remove(end)
            self._end_fault(end[1])
        if self.is_loaded and self.rng.random() < 0.15:  # P's pages and states are soon reused
            self.p.paper.say(generate(10_000 + self.time, self.prompt(), 1))
        self.p.step(computes=not self.is_slow or self.rng.random() < 0.3)
        self.client.step()
        self.d.step()

    def _end_fault(self, fault: str) -> None:
        if fault == "freeze":
            self.p.is_frozen = False
        elif fault == "break":
            self.client.is_broken = False

    def maybe_fault(self) -> None:
        if self.rng.random() > self.fault_rate:
            return
        fault = self.rng.choice(["freeze", "freeze", "break", "break", "kill p", "kill d"])
        self.counts[fault] += 1
        if fault == "kill p":
            self.restart_p()
        elif fault == "kill d":
            self._count_d()
            old = self.client
            self.client = PaperClient(
                self.p, self.rng, self.fault, old.beats_every, shares=old.shares
            )
            self.d = DecodeEngine(self.client, self.kind, has_disk=self.has_disk)
            self.prompts.clear()
        else:
            self.p.is_frozen |= fault == "freeze"
            self.client.is_broken |= fault == "break"
            self.later.append((self.time + self.rng.randint(1, 8), fault))

    def restart_p(self, latest: int = 0) -> None:
        """Replace P by another start of it, whose latest generation is `latest`."""
        self.p = self.client.p = self.start_p()
        self.p.leases._latest = latest

    # -- cases ------------------------------------------------------------------------------

    def case(self, name: int) -> None:
        """Send one request to P, and with its answer to D."""
        rng, prompt = self.rng, self.prompt()
        p = self.p
        p.paper.say(replace(generate(name, prompt, 1), lends=True))
        p.paper.say(generate(1000 + name, self.prompt(), 2))
        if rng.random() < 0.05:
            p.paper.say(Abort(name))
        handover = self.answer_of(p, name)
        if self.is_slow and rng.random() < 0.1:  # P's API process is lost
            p.paper.say(Abort(name))
        for _ in range(0 if self.is_slow else rng.randint(0, 4)):
            self.step()
            self.maybe_fault()
        text = json.loads(handover)[TICKET] if handover else ""
        if text:
            self.tickets.append((prompt, text))
        what = rng.choice([*["own"] * 12, *REFUSED, "none", "replayed", "replayed"])
        prompt, text = self.changed(what, prompt, text)
        self.prompts[name] = prompt
        refused = Counter(self.d.remote.counts)
        spec = replace(generate(name, prompt, 4), ticket=text)
        if text:
            self.d.tickets.offer(spec, b"")
        if text and what in REFUSED and not (self.client.is_broken or self.fault):
            assert self.d.remote.counts[REFUSED[what]] == refused[REFUSED[what]] + 1, what
        self.d.say(spec)
        if name % 3 == 2 and name - 2 in self.prompts:  # its pages may have left the device
            self.prompts[100 + name] = self.prompts[name - 2]
            self.d.say(generate(100 + name, self.prompts[name - 2], 4))
        for _ in range(rng.randint(0, 8)):
            self.step()
            self.maybe_fault()
            self.d.say(Abort(rng.randint(0, 60)))

    def answer_of(self, p: PrefillEngine, name: int) -> str:
        """Return the object of P's answer. A router that loses P goes on without."""
        handovers: dict[int, str] = {}
        real = p.lend

        def lend(request: str, *args: object, **named: object) -> str:
            handovers[int(request)] = real(request, *args, **named)  # type: ignore[arg-type]
            return handovers[int(request)]

        p.lend = lend  # type: ignore[method-assign, assignment]
        while name not in p.paper.finish and p is self.p:
            self.step()
            self.maybe_fault()
        del p.lend  # type: ignore[method-assign]
        return handovers.get(name, "")

    def changed(self, what: str, prompt: list[int], text: str) -> tuple[list[int], str]:
        """Return the prompt and the ticket that D receives."""
        if what == "replayed" and self.tickets:
            return self.rng.choice(self.tickets[-3:])
        if what == "none" or not text:
            return prompt, ""
        ticket = KEY.check(text, LAYOUT, IDENTITY, time.time())
        match what:
            case "forged":
                return prompt, text[:-8] + "AAAAAAAA"
            case "expired":
                ticket = replace(ticket, expires_at=time.time() - 1000)
            case "foreign":
                ticket = replace(ticket, engine="x")
            case "twin":
                ticket = replace(ticket, identity=b"x")
            case "layout":
                ticket = replace(ticket, layout=b"x")
            case "stale":  # the new P has a lease of the same number
                self.restart_p(ticket.generation - 1)
                self.p.paper.say(replace(generate(2000, self.prompt(), 1), lends=True))
                self.answer_of(self.p, 2000)
            case "another prompt":
                if self.p.engine != ticket.engine:  # then it is refused before
                    return prompt, ""
                prompt = [*prompt[:5], 7, *prompt[6:]]
        return prompt, KEY.sign(ticket)

    # -- end --------------------------------------------------------------------------------

    def finish(self) -> None:
        """Let all requests and leases end. Check that nothing is held and all texts are right."""
        self.is_loaded = False
        deadline = self.time + (1200 if self.is_slow else 400)
        while not self.d.loop.idle or self.d.scheduler.num_moving or len(self.p.leases):
            assert self.time < deadline, "something is held after the lease"
            self.step()
        for _ in range(20):
            self.step()
        self.p.paper.finish_all()
        self.d.check_empty()
        self._count_d()
        pool = self.p.paper.memory.pool
        if self.fault not in ("pages are not held", "states are not held"):
            assert pool.num_free == pool.num_pages
            states = getattr(self.p.paper.memory, "states", None)
            assert states is None or not states.num_held

    def _count_d(self) -> None:
        d = self.d
        self.counts.update(d.transfers.counts)
        for kind in ("shares differ", "awaited"):
            self.counts[kind] += self.client.counts[kind]
        self.counts.update(f"P {end}" for end in self.p.leases.counts.elements())
        self.counts.update(d.remote.counts)
        for name, reason in d.finish.items():
            assert reason in (FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR)
            self.counts["wrong"] += reason is FinishReason.ERROR
            if reason is FinishReason.LENGTH and name in self.prompts:
                right = solo_run(self.prompts[name], 4, [], recurrent=d.gpu.recurrent)
                self.counts["wrong"] += d.text[name] != right
                self.counts["right"] += d.text[name] == right


def run_pair(seed: int, fault: str = "") -> Counter[str]:
    pair = Pair(seed, fault)
    for name in range(NUM_CASES):
        pair.case(name)
    pair.finish()
    return pair.counts


def test_the_text_is_right_whatever_happens_to_the_engines() -> None:
    """Killed, frozen and parted engines; aborts; full pools; and tickets of all wrong kinds."""
    counts: Counter[str] = Counter()
    for seed in range(NUM_PAIRS):
        found = run_pair(seed)
        assert not found["wrong"], seed
        counts += found
    assert counts["right"] > 12 * NUM_PAIRS and counts["arrived"] > 4 * NUM_PAIRS, counts
    kinds = "states", "lost", "kill p", "kill d", "freeze", "break", "awaited", "P revoked"
    for kind in (*kinds, *REFUSED.values()):
        assert counts[kind] > NUM_PAIRS / 4, (kind, counts)
    assert counts["shares differ"] > NUM_PAIRS / 8 and counts["from disk"] > NUM_PAIRS, counts


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_seen(fault: str) -> None:
    """The other pairs run only if a change of the code has moved a fault to another pair."""
    others = (seed for seed in range(NUM_PAIRS) if seed != FAULTS[fault])
    assert any(is_seen(seed, fault) for seed in (FAULTS[fault], *others))


def is_seen(seed: int, fault: str) -> bool:
    """Return True if a text is wrong, if a page is released twice, or if D reads no page at all."""
    try:
        return run_pair(seed, fault)["wrong"] > 0
    except (AssertionError, TypeError):
        return True


@pytest.mark.parametrize("seed", [0, 2])
def test_requests_with_one_prompt_read_its_ticket_once(seed: int) -> None:
    """They wait for the load even if computing is faster: its pages cannot be read again."""
    pair = Pair(seed)
    pair.is_loaded, pair.fault_rate, d = False, 0.0, pair.d
    pair.p.leases._lease_s = 100.0
    d.memory.tier.costs = TransferCosts(token_s=0.0)  # type: ignore[attr-defined]
    prompt = pair.prompts[0] = pair.prompts[1] = pair.prompts[2] = [5] * 30
    pair.p.paper.say(replace(generate(0, prompt, 1), lends=True))
    ticket = json.loads(pair.answer_of(pair.p, 0))[TICKET]
    for name in (0, 1, 2):
        spec = replace(generate(name, prompt, 4), ticket=ticket if name == 0 else "")
        if spec.ticket:
            d.tickets.offer(spec, b"")
        d.say(spec)
    pair.finish()
    assert pair.counts["right"] == 3 and d.remote.counts == {"read": 1}


@pytest.mark.parametrize("seed", [0, 2])
def test_requests_that_have_waited_for_one_load_read_the_next_ticket_once(seed: int) -> None:
    """The first load brings the beginning of a longer prompt, of which two requests have one
    ticket.
    """
    pair = Pair(seed)
    pair.is_loaded, pair.fault_rate, d = False, 0.0, pair.d
    pair.p.leases._lease_s = 100.0
    short, long = [5] * 14, [5] * 30
    pair.prompts.update({0: short, 1: long, 2: long})
    tickets = []
    for name in (0, 1):
        pair.p.paper.say(replace(generate(name, pair.prompts[name], 1), lends=True))
        tickets.append(json.loads(pair.answer_of(pair.p, name))[TICKET])
    for name, ticket in enumerate((*tickets, "")):
        spec = replace(generate(name, pair.prompts[name], 4), ticket=ticket)
        if ticket:
            d.tickets.offer(spec, b"")
        d.say(spec)
    pair.finish()
    assert pair.counts["right"] == 3 and d.remote.counts == {"read": 2}
