"""Drafting: how many drafts each decode row feeds, by how its own drafts fared so far.

Decision: a draft is worth its place in a step if it is likely enough to be accepted. A row's
history is one number, the share of accepted drafts among those that were compared: of all as long
as they are few, then newer ones count more. The k-th draft is as likely as that share to the power
of k. The likelihood asked for is what a draft costs, in tokens, and rises with the number of rows:
few rows leave a device's arithmetic idle, many need all of it. Rows whose drafts fail feed none
within a dozen steps, and try again all together, in few steps. New rows begin with what the others'
drafts are worth.

Everything is a column, one element per slot, as in decoding.py.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nanovllm.plan import Int32

SlotIndices = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

FIRST_RATE = 0.7  # of the first rows of all
FIRST_WEIGHT, MOST_WEIGHT = 1.5, 8.0  # of a row's past, in compared drafts: at first, and at most
KEPT_BY_ALL = 0.98  # weight of the past of what new rows begin with, for each compared draft
LOW, HIGH, MANY_ROWS = 0.1, 0.5, 256  # a draft's cost beside one row, beside so many and more
STEP_COST = 0.1  # of drafts, even of a few: a part of what the step's rows would bring without
PROBE_EVERY, PROBE_DRAFTS = 16, 2  # steps; with many rows, which have little to gain, fewer


class Drafting:
    """Histories and newest drafts of the rows in slots; `most` drafts at most feeds a row."""

    def __init__(self, num_slots: int, most: int) -> None:
        self.most = most
        self.reach = np.zeros(num_slots, np.int32)  # tokens: no draft was fed beyond, or ever is
        self._found = np.zeros(num_slots, np.int32)  # real drafts among the newest known ones
        self._tokens_ND = np.zeros((num_slots, most), np.int32)  # these, then fillers
        self._rates = np.zeros(num_slots, np.float32)
        self._weights = np.zeros(num_slots, np.float32)  # of these, in compared drafts
        self._rate_of_all = FIRST_RATE
        self._accepted = np.zeros(most + 1, np.int64)  # rows that drafted, by how many were right
        self.draft_tokens = 0

    def begin(self, slot: int) -> None:
        """Forgets the slot's last owner. A request's first drafts come with its first token."""
        self.reach[slot] = 0
        self._found[slot] = self.most
        self._rates[slot], self._weights[slot] = self._rate_of_all, FIRST_WEIGHT

    # -- planning ---------------------------------------------------------------------------

    def choose(self, step: int, slots_R: SlotIndices, most_R: Int32, budget: int) -> Int32:
        """Drafts that each row feeds: `most_R` at most, `budget` in all.

        None for a row whose newest known report found none. That report may be a step old: what
        is fed instead of drafts that are not there any more is never counted.
        """
        found_R = np.minimum(self._found[slots_R], most_R)
        if not np.count_nonzero(found_R):
            return found_R
        rates_R = self._rates[slots_R]
        drafts_R = np.minimum(found_R, worthwhile(rates_R, len(slots_R)))
        price = STEP_COST * len(slots_R) + cost(len(slots_R)) * int(drafts_R.sum())
        if gain(rates_R, drafts_R) < price:
            drafts_R[:] = 0
        if step % (PROBE_EVERY * (1 + 2 * len(slots_R) // MANY_ROWS)) == 0:
            np.maximum(drafts_R, np.minimum(found_R, PROBE_DRAFTS), out=drafts_R)
        if int(drafts_R.sum()) > budget:  # the first rows get theirs
            before_R = drafts_R.cumsum(dtype=np.int32) - drafts_R
            drafts_R = np.clip(budget - before_R, 0, drafts_R)
        return drafts_R

    def fed(self, slot: int, count: int) -> list[int]:
        """The first of the newest known drafts."""
        return list(self._tokens_ND[slot, :count].tolist())

    # -- completion -------------------------------------------------------------------------

    def compared(self, slots_R: SlotIndices, drafts_R: Int32, right_R: Int32) -> None:
        """Notes how many of the drafts that rows fed were accepted.

        It must be called before the step's own report.
        """
        real_R = np.minimum(drafts_R, self._found[slots_R])
        drew = real_R.nonzero()[0]
        if not len(drew):
            return
        slots_R, real_R = slots_R[drew], real_R[drew]
        right_R = np.minimum(right_R[drew], real_R)  # fillers are right only by luck
        compared_R = np.minimum(right_R + 1, real_R)
        weights_R = self._weights[slots_R]
        known_R = weights_R + compared_R
        self._rates[slots_R] = (self._rates[slots_R] * weights_R + right_R) / known_R
        self._weights[slots_R] = np.minimum(known_R, MOST_WEIGHT)
        share, new = float(right_R.sum() / compared_R.sum()), 1 - KEPT_BY_ALL ** compared_R.sum()
        self._rate_of_all += float(new) * (share - self._rate_of_all)
        self._accepted += np.bincount(right_R, minlength=self.most + 1)
        self.draft_tokens += int(real_R.sum())

    def report(self, slots_R: SlotIndices, drafts_RD: Int32) -> None:
        """What the rows of a step will feed next: StepResult.drafts."""
        self._found[slots_R] = drafts_RD[:, 0]
        self._tokens_ND[slots_R] = drafts_RD[:, 1:]

    @property
    def num_drafts(self) -> int:
        """Rows that drafted, in all steps."""
        return int(self._accepted.sum())

    @property
    def accepted_by_position(self) -> list[int]:
        return list(self._accepted[::-1].cumsum()[::-1][1:].tolist())


def cost(num_rows: int) -> float:
    """The price of a draft in tokens: it pays if it is at least so likely to be accepted."""
    return LOW + (HIGH - LOW) * min(num_rows / MANY_ROWS, 1.0)


def worthwhile(rates_R: Floats, num_rows: int) -> Int32:
    """How many drafts of each row pay, if each is accepted at its row's rate."""
    likely_R = np.log(np.clip(rates_R, 1e-6, 0.999))
    reached_R: Int32 = (np.log(cost(num_rows)) / likely_R).astype(np.int32)
    return reached_R


def gain(rates_R: Floats, drafts_R: Int32) -> float:
    """Tokens that these drafts bring, if each is accepted at its row's rate."""
    rates_R = np.minimum(rates_R, 0.999)
    return float((rates_R * (1 - rates_R**drafts_R) / (1 - rates_R)).sum())
