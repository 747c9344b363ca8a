"""Simulated GPU that executes plans literally and stores hashes in place of keys.

A page cell contains a hash of the whole prefix up to its token, like a key of a deep layer.
Attention reads the row's cells through its page table. A recurrent layer is a rolling hash. The
next token is a hash of both, so a wrong page, a stale checkpoint, a lost chunk or a swapped row
changes the text. Rows of a plan run in reverse order, because no result may depend on their order.

NaN spreads as on a GPU. It starts at a POISON token, at a simulated error (`glitches`), or at a
cell that contains it. Zero times NaN is NaN. Therefore a NaN anywhere in a page reaches all rows
that read the page, even if it is after their last token. Their new cells are NaN, too. Only `clean`
removes it.

The drafter computes the correct next tokens and changes some of them. Drafts stay in the slot until
the row's next step. Cells of rejected drafts stay in memory, beyond the row's length. A state
cannot be rolled back after it has consumed a rejected draft. Therefore rows that may have drafts
keep their state and record their inputs; the next step first replays the accepted ones.

It needs no torch and no device; a step takes microseconds.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from nanovllm.plan import CORRUPTED, Admit, Masks, RowLogprobs, StepPlan, StepResult
from nanovllm.wire import Generate, StepOutput
from tests.paper.draft_layers import BLANK, NAN, POISON, VOCAB, DraftLayers, advance


def next_token(cells: list[int], state: int, unlucky: int = 0) -> int:
    """Return the next token. One of `unlucky` contexts gives NaN logits without NaN in memory."""
    if NAN in cells or state == NAN:
        return CORRUPTED
    drawn = hash((tuple(cells), state))
    return CORRUPTED if unlucky and drawn // VOCAB % unlucky == 0 else drawn % VOCAB


def ids(raw: bytes) -> list[int]:
    got = array("i")
    got.frombytes(raw)
    return got.tolist()


def allowed_after(text: list[int]) -> int:
    """Return the token that the toy grammar requires after a text. It is the only bit of a mask."""
    return (7 * len(text) + sum(text)) % VOCAB


def solo_run(
    prompt: list[int],
    max_new: int,
    stop_ids: list[int],
    *,
    recurrent: bool,
    grammar: bool = False,
    unlucky: int = 0,
    num_said: int = 0,
) -> list[int]:
    """Return the text that a request must get, independent of other requests in its batches.

    A final CORRUPTED means that the request must end with an error. The last `num_said` tokens of
    `prompt` are output tokens for the grammar.
    """
    said = prompt[len(prompt) - num_said :]
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
        out.append(constrained(token, allowed_after(said + out)) if grammar else token)
        if out[-1] in stop_ids or len(out) == max_new:
            return out
        queue = out[-1:]


@dataclass
class Slot:
    known: list[int]  # at admission
    num_prompt: int
    num_logprobs: int
    state: int  # after the first `num_seen` tokens
    num_seen: int
    length: int  # number of tokens in memory
    pages: list[int]
    tokens: list[int]  # known tokens, then drafts
    inputs: list[int] = field(default_factory=list)  # of the recurrence, after num_seen
    num_cached: int = 0  # at admission
    found: int = 0  # number of drafts that the drafter found; the rest are fillers
    masked: bool = False


@dataclass
class Row:
    """A row that samples. It has a draw for its latest token and one for each draft."""

    slot: Slot
    lengths: list[int]  # number of tokens in memory at each draw
    states: list[int]


def constrained(token: int, allowed: int) -> int:
    """Return the token of a masked draw. It still depends on the whole context."""
    return (allowed + token % 2) % VOCAB


class PaperMasker:
    """Implementation of engine.loop.Masker. A mask's word is the token of the toy grammar."""

    def __init__(self) -> None:
        self.text: dict[int, list[int]] = {}

    def fill(self, rows: list[tuple[int, list[int]]]) -> Masks:
        words = [word for name, drafts in rows for word in self._words(name, drafts)]
        return np.array(words, np.int32).reshape(-1, 1)

    def _words(self, name: int, drafts: list[int]) -> list[int]:
        """Return the masks of a row. Those after a draft against the grammar are arbitrary."""
        text = self.text.get(name, []).copy()
        words = [allowed_after(text)]
        for draft in drafts:
            if (draft - words[-1]) % VOCAB > 1:
                break
            text.append(draft)
            words.append(allowed_after(text))
        return words + [VOCAB - 1] * (1 + len(drafts) - len(words))

    def advance(self, output: StepOutput) -> tuple[int, ...]:
        tokens, names = ids(output.tokens), np.frombuffer(output.ids, np.int64).tolist()
        for name, count in zip(names, ids(output.counts) or [1] * len(names), strict=True):
            self.text.setdefault(name, []).extend(tokens[:count])
            del tokens[:count]
        return ()


class PaperHandle:
    gap_s = busy_s = 0.0
    mode = ""

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
    """Implementation of engine.executor.Executor. See the module.

    `num_checkpoints` is None without recurrent layers. `glitches` are numbers of steps in which the
    last token fed by the last row gets NaN. Every `wrong_every`-th draft is wrong.
    """

    def __init__(
        self,
        num_slots: int,
        num_pages: int,
        page_tokens: int,
        num_checkpoints: int | None,
        unlucky: int = 0,
        glitches: frozenset[int] = frozenset(),
        most_drafts: int = 0,
        wrong_every: int = 3,
        draft_lag: int | None = None,
    ) -> None:
        self.most_drafts = most_drafts
        self.wrong_every = wrong_every
        self.page_tokens = page_tokens
        self.unlucky = unlucky
        self.glitches = glitches
        self.struck: list[list[int]] = []  # tokens at admission of each slot with a glitch
        self.memory = [[BLANK] * page_tokens for _ in range(num_pages + 1)]
        self.layers = None
        if draft_lag is not None:
            blank = [[BLANK] * page_tokens for _ in range(num_pages + 1)]
            self.layers = DraftLayers(draft_lag, page_tokens, blank)
        self.slots: list[Slot | None] = [None] * num_slots
        self.recurrent = num_checkpoints is not None
        self.checkpoints = [-1] * (num_checkpoints or 0)
        self.decodes: list[int] = []
        self.steps = 0
        self.steps_by_mode: Counter[str] = Counter()
        self.padded_tokens = 0
        self.fed: list[tuple[int, int]] = []  # per step: tokens of decode rows, tokens of chunks
        self.drafted: list[tuple[int, int, int]] = []  # per row: drafts fed, found, correct
        self.unsampled: PaperHandle | None = None

    def vet(self, request: Generate) -> None:
        """Accept all requests."""

    def launch(self, plan: StepPlan) -> PaperHandle:
        self.steps += 1
        assert plan.step == self.steps, "a plan is missing"
        for slot_id, checkpoint in plan.saves:
            self._replay(self._slot(slot_id))
            self.checkpoints[checkpoint] = self._slot(slot_id).state
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
        drafts = ids(plan.drafts) if plan.drafts else [0] * plan.num_decodes
        assert len(drafts) == plan.num_decodes and all(0 <= d <= self.most_drafts for d in drafts)
        assert any(drafts) or not plan.drafts, "says that no row has drafts"
        rows = [(slot, 1 + d, 1 + d, -1, 0) for slot, d in zip(self.decodes, drafts, strict=True)]
        may_draft = set(self.decodes) if self.most_drafts else set()
        rows += [(c.slot, c.num_tokens, int(c.samples), c.save_to, c.save_at) for c in plan.chunks]
        assert len({row[0] for row in rows}) == len(rows), "a slot has two rows"
        num_decoded = sum(drafts) + plan.num_decodes
        assert num_decoded == plan.num_decoded
        self.fed.append((num_decoded, sum(row[1] for row in rows) - num_decoded))
        assert self.unsampled is None, "launched behind a step that was not sampled"
        to_sample, firsts = [], []
        for slot_id, num_tokens, num_draws, save_to, save_at in reversed(rows):
            slot = self._slot(slot_id)
            old = [*slot.tokens[slot.length :], 0][: 1 + num_tokens]
            firsts.append((slot, slot.length, old))
            self._replay(slot)
            states = [self._feed(slot, slot_id in may_draft) for _ in range(num_tokens)]
            if self.steps in self.glitches and slot_id == rows[-1][0]:
                states[-1] = self._strike(slot)
            assert slot.length <= plan.max_length
            if save_to >= 0:
                assert 0 < save_at <= num_tokens
                self.checkpoints[save_to] = states[save_at - 1]
            if num_draws:
                lengths = range(slot.length + 1 - num_draws, slot.length + 1)
                to_sample.append(Row(slot, list(lengths), states[-num_draws:]))
        handle = PaperHandle(plan.step, partial(self._finish, plan, to_sample[::-1], firsts))
        self.unsampled = handle
        if not plan.masked:
            handle.sample(None)
        return handle

    def _clean_and_copy(self, plan: StepPlan) -> None:
        """Clean and copy pages before the forward pass. Targets are pages that the plan assigns."""
        given = {page for got in (*plan.admits, *plan.grants) for page in got.pages}
        assert len(set(plan.clean)) == len(plan.clean), "cleaned twice"
        for page in plan.clean:
            self.memory[page] = [BLANK] * self.page_tokens
        sources, targets = {src for src, _ in plan.copies}, {dst for _, dst in plan.copies}
        assert len(targets) == len(plan.copies) and targets <= given and not sources & targets
        assert not sources.intersection(plan.clean), "copied from a page that was just cleaned"
        for src, dst in plan.copies:
            self.memory[dst] = self.memory[src].copy()
        if self.layers is not None:  # the same pages of other layers
            for page in plan.clean:
                self.layers.memory[page] = [BLANK] * self.page_tokens
            for src, dst in plan.copies:
                self.layers.memory[dst] = self.layers.memory[src].copy()

    def _strike(self, slot: Slot) -> int:
        at = slot.length - 1
        self.memory[slot.pages[at // self.page_tokens]][at % self.page_tokens] = NAN
        self.struck.append(slot.known)
        if slot.inputs:
            slot.inputs[-1] = POISON
        elif self.recurrent:
            slot.state = NAN
        return NAN if self.recurrent else 0

    def _finish(
        self,
        plan: StepPlan,
        rows: list[Row],
        firsts: list[tuple[Slot, int, list[int]]],
        masks: Masks | None,
    ) -> StepResult:
        allowed = self._allowed(plan, rows, masks)
        most = max((len(row.lengths) for row in rows), default=1)
        sampled, logprobs = [], []
        for i, row in reversed(list(enumerate(rows))):
            line = self._sample(row, allowed.get(i, []))
            logprobs += self._logprobs(i, row, line)[::-1]
            sampled.append(line + [-1] * (most - len(line)))
        for slot, start, fed in firsts if self.layers is not None else []:
            self.layers.first(slot, start, fed, partial(self._cell, slot))
        found = [self._draft(row.slot, proposes=plan.proposes) for row in reversed(rows)]
        self.unsampled = None
        lines = np.array(sampled[::-1], np.int32).reshape(-1, most)
        drafts = np.array(found[::-1], np.int32).reshape(-1, 1 + self.most_drafts)
        told = drafts if self.most_drafts and plan.proposes else None
        return StepResult(plan.step, lines, tuple(logprobs[::-1]), told)

    def _allowed(self, plan: StepPlan, rows: list[Row], masks: Masks | None) -> dict[int, list]:
        """Return the allowed token of each draw, by masked row."""
        words = [] if masks is None else masks[:, 0].tolist()
        assert len(words) == sum(len(rows[i].lengths) for i in plan.masked)
        allowed = {}
        for i in plan.masked:
            rows[i].slot.masked = True
            allowed[i], words = words[: len(rows[i].lengths)], words[len(rows[i].lengths) :]
        return allowed

    def _sample(self, row: Row, allowed: list[int]) -> list[int]:
        """Return the accepted drafts and the next token. Rejected drafts stay in memory."""
        slot, line = row.slot, []
        for i, (length, state) in enumerate(zip(row.lengths, row.states, strict=True)):
            drawn = self._next(slot, length, state)
            if drawn == CORRUPTED:
                break
            line.append(constrained(drawn, allowed[i]) if allowed else drawn)
            if slot.tokens[length : length + 1] != line[-1:]:
                break
        newest = max(len(line) - 1, 0)
        if len(row.lengths) > 1:
            self.drafted.append((len(row.lengths) - 1, slot.found, newest))
        slot.length = row.lengths[newest]
        # A corrupted token is stored as 0, since an index must not be negative.
        slot.tokens[slot.length :] = line[-1:] or [0]
        return line or [CORRUPTED]

    def _logprobs(self, i: int, row: Row, line: list[int]) -> list[RowLogprobs]:
        """Return log-probabilities made of the token's position and its neighbours."""
        if row.slot.num_logprobs < 0 or line == [CORRUPTED]:
            return []
        return [
            RowLogprobs(i, -float(row.lengths[n]), [token + 1], [-0.5], n)
            for n, token in enumerate(line)
        ]

    def _draft(self, slot: Slot, *, proposes: bool) -> list[int]:
        """Return the number of drafts found for a sampled row, then all drafts with fillers."""
        if not (most := self.most_drafts):
            return [0]
        if not proposes:
            slot.found = 0
            slot.tokens += [0] * most
            return [0] * (1 + most)
        if self.layers is not None:
            drafts = self.layers.propose(
                slot, most, lambda text: max(self._after(slot, text, 1)[0], 0)
            )
        else:
            drafts = self._after(slot, slot.tokens, most)
        drafts = [max(token, 0) for token in drafts] + [0] * (most - len(drafts))
        for i, token in enumerate(drafts):
            if (slot.length + i + token) % self.wrong_every == 0:
                drafts[i] = (token + 1) % VOCAB
        slot.found = most
        if self.layers is None:
            slot.found = min((slot.length + slot.tokens[-1]) % (most + 2), most)
        slot.tokens += drafts
        return [slot.found, *drafts]

    def _after(self, slot: Slot, text: list[int], count: int) -> list[int]:
        """Return the correct tokens after a text that the slot's text begins with."""
        return solo_run(
            text,
            count,
            [],
            recurrent=self.recurrent,
            grammar=slot.masked,
            unlucky=self.unlucky,
            num_said=len(text) - slot.num_prompt,
        )

    def _next(self, slot: Slot, length: int, state: int) -> int:
        pages = slot.pages[: -(-length // self.page_tokens)]
        cells = [cell for page in pages for cell in self.memory[page]]
        if NAN in cells:
            return CORRUPTED
        return next_token(cells[:length], state, self.unlucky)

    def _admit(self, admit: Admit) -> None:
        known = ids(admit.tokens)
        assert 0 < admit.num_prompt <= len(known) and admit.num_cached < len(known)
        assert len(admit.pages) * self.page_tokens >= len(known), "pages for all known tokens"
        restored = self.recurrent and admit.num_cached > 0
        assert (admit.restore_from >= 0) == restored, "no state of the cached tokens"
        state = self.checkpoints[admit.restore_from] if restored else 0
        self.slots[admit.slot] = Slot(
            known,
            admit.num_prompt,
            admit.sampling.logprobs,
            state,
            admit.num_cached,
            admit.num_cached,
            list(admit.pages),
            known.copy(),
            num_cached=admit.num_cached,
        )

    def _slot(self, index: int) -> Slot:
        slot = self.slots[index]
        assert slot is not None
        return slot

    def _replay(self, slot: Slot) -> None:
        """Advance the state by the accepted tokens of the last step."""
        for given in slot.inputs[: slot.length - slot.num_seen]:
            slot.state = advance(slot.state, given)
        slot.num_seen, slot.inputs = slot.length, []

    def _feed(self, slot: Slot, may_draft: bool) -> int:
        """Store the next token in memory and return the state after it."""
        at = slot.length
        token = slot.tokens[at]
        page = slot.pages[at // self.page_tokens]
        assert page != 0  # the padding page, which belongs to no request
        cells, here = self.memory[page], at % self.page_tokens
        cell = advance(self._cell(slot, at - 1) if at else 0, token)
        cells[here] = BLANK  # the cell is written before it is read
        cells[here] = NAN if NAN in cells else cell
        slot.length += 1
        if not self.recurrent:
            return 0
        slot.inputs.append(POISON if cells[here] == NAN else token)
        if not may_draft:
            self._replay(slot)
        state = slot.state
        for given in slot.inputs:
            state = advance(state, given)
        return state

    def _cell(self, slot: Slot, at: int) -> int:
        return self.memory[slot.pages[at // self.page_tokens]][at % self.page_tokens]
