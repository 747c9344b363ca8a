"""A GPU made of paper: it runs plans literally and keeps hashes where a GPU keeps keys.

A page cell holds a hash of the whole prefix up to that token, as a deep layer's key does. Attention
is "read my cells back through my page table", a recurrent layer is a rolling hash, and the next
token is a hash of both: a wrong page, a stale checkpoint, a lost chunk or a swapped row changes the
text. Rows of one plan run in reverse order, because nothing may depend on their order.

It can go wrong as a GPU does: NaN comes of POISON in a text, of a stroke of bad luck (`glitches`),
or of a cell that holds it. Zero times NaN is NaN, so it spreads to whoever reads a page that has it
anywhere, also past their own tokens; what they write is NaN, too. Only `clean` ends that.
No torch, no device, microseconds per step.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from nanovllm.plan import CORRUPTED, Admit, Masks, StepPlan, StepResult
from nanovllm.wire import Generate, StepOutput

VOCAB = 50
POISON = VOCAB  # as a token of a prompt: its keys and values are NaN
NAN = -7  # as a cell or a state
BLANK = -1


def advance(state: int, token: int) -> int:
    if state == NAN or token == POISON:
        return NAN
    return (state * 1_000_003 + token + 1) % (1 << 61)


def next_token(cells: list[int], state: int, unlucky: int = 0) -> int:
    """`unlucky`: every so many contexts give NaN for logits, with healthy keys and values."""
    if NAN in cells or state == NAN:
        return CORRUPTED
    drawn = hash((tuple(cells), state))
    return CORRUPTED if unlucky and drawn // VOCAB % unlucky == 0 else drawn % VOCAB


def ids(raw: bytes) -> list[int]:
    got = array("i")
    got.frombytes(raw)
    return got.tolist()


def allowed_after(text: list[int]) -> int:
    """A toy grammar: which token must follow a text, as the only bit of a mask."""
    return (7 * len(text) + sum(text)) % VOCAB


def solo_run(
    prompt: list[int],
    max_new: int,
    stop_ids: list[int],
    *,
    recurrent: bool,
    grammar: bool = False,
    unlucky: int = 0,
) -> list[int]:
    """The oracle: what the request must produce, whatever it was batched with.

    CORRUPTED in the end: it must end with an error there.
    """
    cells: list[int] = []
    state: int = 0
    out: list[int] = []
    queue = list(prompt)
    while True:
        for token in queue:
            cells.append(advance(cells[-1] if cells else 0, token))
            state = advance(state, token) if recurrent else 0
        token = next_token(cells, state, unlucky)
        if token == CORRUPTED:
            return [*out, token]
        out.append(constrained(token, allowed_after(out)) if grammar else token)
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


def constrained(token: int, allowed: int) -> int:
    """What a masked draw makes of a token: it still depends on all of the context."""
    return (allowed + token % 2) % VOCAB


class PaperMasker:
    """Implements engine.loop.Masker. A mask's word is the token the toy grammar allows."""

    def __init__(self) -> None:
        self.text: dict[int, list[int]] = {}

    def fill(self, request_ids: list[int]) -> Masks:
        words = [allowed_after(self.text.get(name, [])) for name in request_ids]
        return np.array(words, np.int32).reshape(-1, 1)

    def advance(self, output: StepOutput) -> None:
        tokens, names = ids(output.tokens), np.frombuffer(output.ids, np.int64).tolist()
        for name, count in zip(names, ids(output.counts) or [1] * len(names), strict=True):
            self.text.setdefault(name, []).extend(tokens[:count])
            del tokens[:count]


class PaperHandle:
    gap_s = 0.0

    def __init__(self, step: int, finish: Callable[[Masks | None], StepResult]) -> None:
        self.step = step
        self.finish = finish
        self.result: StepResult | None = None

    def sample(self, masks: Masks | None) -> None:
        assert self.result is None, "sampled twice"
        self.result = self.finish(masks)

    def wait(self) -> StepResult:
        assert self.result is not None, "waited for a step that was not sampled"
        return self.result


class PaperGPU:
    """Implements engine.executor.Executor. `num_checkpoints` > 0 adds a recurrent layer.

    `glitches`: steps whose last row gets NaN for the newest token it feeds.
    """

    def __init__(
        self,
        num_slots: int,
        num_pages: int,
        page_tokens: int,
        num_checkpoints: int,
        unlucky: int = 0,
        glitches: frozenset[int] = frozenset(),
    ) -> None:
        self.page_tokens = page_tokens
        self.unlucky = unlucky
        self.glitches = glitches
        self.struck: list[list[int]] = []  # what the slots knew that were hit by a glitch
        self.memory = [[BLANK] * page_tokens for _ in range(num_pages + 1)]
        self.slots: list[Slot | None] = [None] * num_slots
        self.checkpoints = [-1] * num_checkpoints
        self.recurrent = num_checkpoints > 0
        self.decodes: list[int] = []
        self.steps = 0
        self.steps_by_mode: Counter[str] = Counter()
        self.padded_tokens = 0
        self.fed: list[tuple[int, int]] = []  # by each step: tokens of decode rows, of chunks
        self.unsampled: PaperHandle | None = None

    def vet(self, request: Generate) -> None:
        """Paper takes any."""

    def launch(self, plan: StepPlan) -> PaperHandle:
        self.steps += 1
        assert plan.step == self.steps, "a plan is missing"
        self._clean_and_copy(plan)
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
        num_decoded = plan.num_decodes * (1 + plan.num_drafts)
        self.fed.append((num_decoded, sum(row[1] for row in rows) - num_decoded))
        assert self.unsampled is None, "launched behind a step that was not sampled"
        to_sample = []
        for slot_id, num_tokens, num_drafts, samples, save_to in reversed(rows):
            slot = self._slot(slot_id)
            for _ in range(num_tokens - num_drafts):
                self._feed(slot, self._next_fed(slot))
            if self.steps in self.glitches and slot_id == rows[-1][0]:
                self._strike(slot)
            assert slot.length + num_drafts <= plan.max_length
            if save_to >= 0:
                self.checkpoints[save_to] = slot.state
            if samples:
                to_sample.append((slot, num_drafts))
        handle = PaperHandle(plan.step, partial(self._finish, plan, to_sample[::-1]))
        self.unsampled = handle
        if not plan.masked:
            handle.sample(None)
        return handle

    def _clean_and_copy(self, plan: StepPlan) -> None:
        """What a plan does before its forward pass: with pages of those it admits or lets grow."""
        given = {page for got in (*plan.admits, *plan.grants) for page in got.pages}
        assert len(set(plan.clean)) == len(plan.clean), "cleaned twice"
        for page in plan.clean:
            self.memory[page] = [BLANK] * self.page_tokens
        sources, targets = {src for src, _ in plan.copies}, {dst for _, dst in plan.copies}
        assert len(targets) == len(plan.copies) and targets <= given and not sources & targets
        assert not sources.intersection(plan.clean), "copied from a page that was just cleaned"
        for src, dst in plan.copies:
            self.memory[dst] = self.memory[src].copy()

    def _strike(self, slot: Slot) -> None:
        at = slot.length - 1
        self.memory[slot.pages[at // self.page_tokens]][at % self.page_tokens] = NAN
        slot.state = NAN if self.recurrent else 0
        self.struck.append(slot.known)

    def _finish(
        self, plan: StepPlan, rows: list[tuple[Slot, int]], masks: Masks | None
    ) -> StepResult:
        allowed: dict[int, int] = {}
        if masks is not None:
            assert len(masks) == len(plan.masked)
            allowed = dict(zip(plan.masked, masks[:, 0].tolist(), strict=True))
        sampled = []
        for row, (slot, num_drafts) in reversed(list(enumerate(rows))):
            line = self._sample(slot, num_drafts, allowed.get(row))
            sampled.append(line + [-1] * (1 + plan.num_drafts - len(line)))
        self.unsampled = None
        lines = np.array(sampled[::-1], np.int32).reshape(len(sampled), 1 + plan.num_drafts)
        return StepResult(plan.step, lines)

    def _sample(self, slot: Slot, num_drafts: int, allowed: int | None) -> list[int]:
        """The next token, and more while drafts guess right. Wrong guesses leave dirt behind."""
        tokens = [self._next(slot)]
        if tokens == [CORRUPTED]:
            slot.last = 0  # what a device makes of it: never a negative index
            return tokens
        if allowed is not None:
            tokens = [constrained(tokens[0], allowed)]
        length, state = slot.length, slot.state
        for i in range(num_drafts):
            right = (tokens[-1] + slot.length + i) % 3 > 0
            draft = tokens[-1] if right else (tokens[-1] + 1) % VOCAB
            self._feed(slot, draft)
            if right and slot.length == length + 1 and self._next(slot) != CORRUPTED:
                length, state = slot.length, slot.state
                tokens.append(self._next(slot))
        slot.length, slot.state, slot.last = length, state, tokens[-1]
        return tokens

    def _next(self, slot: Slot) -> int:
        pages = slot.pages[: -(-slot.length // self.page_tokens)]
        cells = [cell for page in pages for cell in self.memory[page]]
        if NAN in cells:
            return CORRUPTED
        return next_token(cells[: slot.length], slot.state, self.unlucky)

    def _admit(self, admit: Admit) -> None:
        known = ids(admit.tokens)
        assert 0 < admit.num_prompt <= len(known) and admit.num_cached < len(known)
        assert len(admit.pages) * self.page_tokens >= len(known), "pages for all known tokens"
        assert not self.recurrent or admit.num_cached % self.page_tokens == 0, "no such state"
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
        page = slot.pages[at // self.page_tokens]
        assert page != 0  # which is nobody's
        cells, here = self.memory[page], at % self.page_tokens
        cell = advance(self._cell(slot, at - 1) if at else 0, token)
        cells[here] = BLANK  # written before it is read
        cells[here] = NAN if NAN in cells else cell
        slot.state = advance(slot.state, token) if self.recurrent else 0
        if cells[here] == NAN and self.recurrent:
            slot.state = NAN
        slot.length += 1

    def _cell(self, slot: Slot, at: int) -> int:
        return self.memory[slot.pages[at // self.page_tokens]][at % self.page_tokens]
