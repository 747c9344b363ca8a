"""A GPU made of paper: it runs plans literally and keeps hashes where a GPU keeps keys.

A page cell holds a hash of the whole prefix up to that token, as a deep layer's key does. Attention
is "read my cells back through my page table", a recurrent layer is a rolling hash, and the next
token is a hash of both: a wrong page, a stale checkpoint, a lost chunk or a swapped row changes the
text. Rows of one plan run in reverse order, because nothing may depend on their order.
No torch, no device, microseconds per step.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from nanovllm.kv.pages import DEAD_PAGE
from nanovllm.plan import Admit, StepPlan, StepResult

VOCAB = 50


def advance(state: int, token: int) -> int:
    return (state * 1_000_003 + token + 1) % (1 << 61)


def next_token(cells: list[int], state: int) -> int:
    return hash((tuple(cells), state)) % VOCAB


def ids(raw: bytes) -> list[int]:
    got = array("i")
    got.frombytes(raw)
    return got.tolist()


def solo_run(prompt: list[int], max_new: int, stop_ids: list[int], *, recurrent: bool) -> list[int]:
    """The oracle: what the request must produce, whatever it was batched with."""
    cells: list[int] = []
    state, out = 0, []
    queue = list(prompt)
    while True:
        for token in queue:
            cells.append(advance(cells[-1] if cells else 0, token))
            state = advance(state, token) if recurrent else 0
        out.append(next_token(cells, state))
        if out[-1] in stop_ids or len(out) == max_new:
            return out
        queue = out[-1:]


@dataclass
class Slot:
    known: list[int]
    state: int
    length: int
    pages: list[int] = field(default_factory=list)
    last: int = -1


@dataclass
class PaperHandle:
    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class PaperGPU:
    """Implements engine.executor.Executor. `num_checkpoints` > 0 adds a recurrent layer."""

    def __init__(
        self, num_slots: int, num_pages: int, page_tokens: int, num_checkpoints: int
    ) -> None:
        self.page_tokens = page_tokens
        self.memory = [[-1] * page_tokens for _ in range(num_pages + 1)]
        self.slots: list[Slot | None] = [None] * num_slots
        self.checkpoints = [-1] * num_checkpoints
        self.recurrent = num_checkpoints > 0
        self.decodes: list[int] = []
        self.steps = 0
        self.most_tokens = 0  # any step fed

    def launch(self, plan: StepPlan) -> PaperHandle:
        self.steps += 1
        assert plan.step == self.steps, "a plan is missing"
        for admit in plan.admits:
            self._admit(admit)
        for grant in plan.grants:
            slot = self._slot(grant.slot)
            assert len(slot.pages) == grant.at, "a grant leaves a hole in the page table"
            slot.pages += grant.pages
        if plan.decodes is not None:
            self.decodes = ids(plan.decodes)
        assert len(self.decodes) == plan.num_decodes
        rows = [(slot, 1 + plan.num_drafts, plan.num_drafts, True, -1) for slot in self.decodes]
        rows += [(c.slot, c.num_tokens, 0, c.samples, c.save_to) for c in plan.chunks]
        assert len({row[0] for row in rows}) == len(rows), "a slot has two rows"
        self.most_tokens = max(self.most_tokens, sum(row[1] for row in rows))
        sampled = []
        for slot_id, num_tokens, num_drafts, samples, save_to in reversed(rows):
            slot = self._slot(slot_id)
            for _ in range(num_tokens - num_drafts):
                self._feed(slot, self._next_fed(slot))
            assert slot.length + num_drafts <= plan.max_length
            if save_to >= 0:
                self.checkpoints[save_to] = slot.state
            if samples:
                line = self._sample(slot, num_drafts)
                sampled.append(line + [-1] * (1 + plan.num_drafts - len(line)))
        lines = np.array(sampled[::-1], np.int32).reshape(len(sampled), 1 + plan.num_drafts)
        return PaperHandle(StepResult(plan.step, lines))

    def _sample(self, slot: Slot, num_drafts: int) -> list[int]:
        """The next token, and more while drafts guess right. Wrong guesses leave dirt behind."""
        tokens = [self._next(slot)]
        length, state = slot.length, slot.state
        for i in range(num_drafts):
            right = (tokens[-1] + slot.length + i) % 3 > 0
            draft = tokens[-1] if right else (tokens[-1] + 1) % VOCAB
            self._feed(slot, draft)
            if right and slot.length == length + 1:
                length, state = slot.length, slot.state
                tokens.append(self._next(slot))
        slot.length, slot.state, slot.last = length, state, tokens[-1]
        return tokens

    def _next(self, slot: Slot) -> int:
        return next_token([self._cell(slot, i) for i in range(slot.length)], slot.state)

    def _admit(self, admit: Admit) -> None:
        known = ids(admit.tokens)
        assert 0 < admit.num_prompt <= len(known) and admit.num_cached < len(known)
        assert len(admit.pages) * self.page_tokens >= len(known), "pages for all known tokens"
        state = self.checkpoints[admit.restore_from] if admit.restore_from >= 0 else 0
        self.slots[admit.slot] = Slot(known, state, admit.num_cached, list(admit.pages))

    def _slot(self, index: int) -> Slot:
        slot = self.slots[index]
        assert slot is not None
        return slot

    def _next_fed(self, slot: Slot) -> int:
        return slot.known[slot.length] if slot.length < len(slot.known) else slot.last

    def _feed(self, slot: Slot, token: int) -> None:
        at = slot.length
        cell = advance(self._cell(slot, at - 1) if at else 0, token)
        page = slot.pages[at // self.page_tokens]
        assert page != DEAD_PAGE
        self.memory[page][at % self.page_tokens] = cell
        slot.state = advance(slot.state, token) if self.recurrent else 0
        slot.length += 1

    def _cell(self, slot: Slot, at: int) -> int:
        return self.memory[slot.pages[at // self.page_tokens]][at % self.page_tokens]
