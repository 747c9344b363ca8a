"""Number of drafts for each decode row, by the acceptance of its earlier drafts.

Decision: a draft gets a place in a step if its probability of acceptance exceeds its cost. A row's
history is one number, the fraction of accepted drafts among those compared, in which recent drafts
count more. The k-th draft is accepted with that fraction to the power of k. The cost of a draft, in
tokens, rises with the tokens of the step: few leave arithmetic units idle, many use all of them.
All drafts of a step together must gain more than their measured price (prices.py). Until it is
measured, a fixed estimate takes its place. Rows whose drafts fail stop within a dozen steps. They
probe again all together, in few steps, and less and less often while no draft is accepted. New rows
start with the average over all rows.

Decision: if drafts found by prompt lookup do not pay, or none of many rows has found any, a rest
begins. For up to MOST_SKIPPED steps nothing is decided again, and only the last two of these steps
look drafts up and report them. The decision takes the host a tenth of a millisecond. A copy of
drafts and their report take half as long, and the demo's step of 64 rows takes 0.4 ms in all. If
steps are short, a rest has up to LONGEST times this number.

Decision: the probability that a draft model gives to its draft has no part in it. A step is planned
before the drafts that it feeds are drawn. Only the probability of the previous draft is known then,
and it adds little to the history (results/drafts.md).

All values are columns, one element per slot, as in decoding.py.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nanovllm.plan import Int32
from nanovllm.sched.prices import DraftPrices
from nanovllm.speculate import Drafts

SlotIndices = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

FIRST_RATE = 0.7  # acceptance assumed for the very first rows
FIRST_WEIGHT, MOST_WEIGHT = 1.5, 8.0  # weight of a row's history, in compared drafts: first, most
KEPT_BY_ALL = 0.98  # decay of the average over all rows, per compared draft
# Cost of a draft in a step of few tokens, and in one of MANY_TOKENS or more.
LOW, HIGH, MANY_TOKENS = 0.1, 0.5, 512
# Cost of the drafts of a step as a fraction of the step, until it is measured: a fixed part, and
# each pass of a draft model.
STEP_COST, PASS_COST = 0.1, 0.05
PROBE_EVERY, PROBE_DRAFTS = 16, 2  # steps between probes, drafts per probe
MANY_ROWS = 128  # each further 128 rows put PROBE_EVERY more steps between probes
PROBE_SHARE = 0.01  # greatest share of the time for probes, which makes dear ones rarer
MOST_DOUBLED = 4  # times that the steps between probes double while none is accepted
MOST_SKIPPED = 16  # most steps without another decision after drafts did not pay
# Steps without another decision after no row had found a draft: one for this number of rows.
ROWS_OF_SKIPPED = 8
# Seconds. Rests of shorter steps have proportionally more, up to a factor of LONGEST.
SHORT_STEP_S, LONGEST = 1.6e-3, 4
# Steps that propose drafts before those are fed: one whose report arrives in time for the decision,
# and the one whose drafts are fed.
PROPOSED_BEFORE = 2


class Drafting:
    """Acceptance histories and latest drafts of the rows.

    Drafts are proposed only at the end of steps that ask for them. Prompt lookup reports how many
    it has found.
    """

    def __init__(self, num_slots: int, drafts: Drafts) -> None:
        most = self.most = drafts.most  # maximum drafts per row
        self.adapt, self.has_model = drafts.adapt, drafts.has_model
        self.prices = DraftPrices()
        self._skip_until = 0  # steps before this one feed no drafts
        self._failed_probes = 0  # in turn, since a draft was last accepted
        self._proposed = True  # whether the latest planned step proposes drafts
        self.reach = np.zeros(num_slots, np.int32)  # tokens: the end of the drafts fed so far
        self._found = np.zeros(num_slots, np.int32)  # real drafts among the latest reported ones
        self._tokens_ND = np.zeros((num_slots, most), np.int32)  # the reported drafts, then fillers
        self._rates = np.zeros(num_slots, np.float32)
        self._weights = np.zeros(num_slots, np.float32)  # of _rates, in compared drafts
        self._rate_of_all = FIRST_RATE
        self._accepted = np.zeros(most + 1, np.int64)  # rows with drafts, by number accepted
        self.draft_tokens = 0

    def begin(self, slot: int) -> None:
        """Reset the columns of a slot. A request's first drafts come with its first token."""
        self.reach[slot] = 0
        self._found[slot] = self.most
        self._rates[slot], self._weights[slot] = self._rate_of_all, FIRST_WEIGHT

    # -- planning ---------------------------------------------------------------------------

    def skips(self, step: int) -> bool:
        """Return whether a step feeds no drafts, as choose() decided for an earlier one."""
        return step < self._skip_until

    def choose(self, step: int, slots_R: SlotIndices, most_R: Int32, budget: int) -> Int32:
        """Return the number of drafts of each row: at most `most_R`, and `budget` in total.

        It is 0 for a row whose latest report has no drafts. A report may be one step old. Fillers
        that are then fed in place of missing drafts are not counted in the statistics.
        """
        if self.has_model:
            found_R = np.minimum(self.most * self._proposed, most_R).astype(np.int32)
        else:
            found_R = np.minimum(self._found[slots_R], most_R)
        drafts_R = self._adapted(step, slots_R, found_R) if self.adapt else found_R
        if int(drafts_R.sum()) > budget:  # the first rows have precedence
            before_R = drafts_R.cumsum(dtype=np.int32) - drafts_R
            drafts_R = np.clip(budget - before_R, 0, drafts_R)
        return drafts_R

    def _adapted(self, step: int, slots_R: SlotIndices, found_R: Int32) -> Int32:
        """Return the number of drafts that each row feeds. Begin a rest if there are none."""
        num_rows = len(slots_R)
        if not np.count_nonzero(found_R):
            num_steps = min(num_rows // ROWS_OF_SKIPPED, MOST_SKIPPED)
            self._rest(step, self._lengthened(num_steps, num_rows))
            return found_R
        drafts_R, is_probe = self._worthwhile(step, slots_R, found_R)
        if is_probe and drafts_R.any():
            self._failed_probes += 1
        elif is_probe:
            every = self._probe_every(num_rows)
            self._rest(step, min(self._lengthened(MOST_SKIPPED, num_rows), every - step % every))
        return drafts_R

    def _rest(self, step: int, num_steps: int) -> None:
        """Feed no drafts found by prompt lookup before step + num_steps."""
        if not self.has_model:
            self._skip_until = step + num_steps

    def _lengthened(self, num_steps: int, num_rows: int) -> int:
        """Return a proportionally larger number of steps if those without drafts are short."""
        plain_s = self.prices.plain_s(num_rows) or SHORT_STEP_S
        return int(num_steps * min(max(SHORT_STEP_S / plain_s, 1.0), LONGEST))

    def plan_proposals(self, step: int, slots_R: SlotIndices, num_fed: int) -> bool:
        """Return whether drafts are proposed at the end of a step with these rows.

        A draft model proposes drafts that would be fed in the next step. Prompt lookup does unless
        the host rests from drafts. `num_fed` is the number of drafts that the step feeds, after all
        limits. Called once for each planned step.
        """
        if not self.adapt or not self.most:
            return self._proposed
        num_rows = len(slots_R)
        if not self.has_model:
            self._proposed = step + PROPOSED_BEFORE >= self._skip_until
        elif num_rows:
            most_R = np.full(num_rows, self.most, np.int32)
            self._proposed = bool(self._worthwhile(step + 1, slots_R, most_R)[0].any())
        if not self.has_model or self._proposed == (num_fed > 0):
            self.prices.plan(step, num_rows, num_fed)
        return self._proposed

    def _worthwhile(self, step: int, slots_R: SlotIndices, found_R: Int32) -> tuple[Int32, bool]:
        """Return the number of drafts of each row that pay off, at most `found_R`.

        Also return whether none does, so that those returned are only a probe.
        """
        num_rows, rates_R = len(slots_R), self._rates[slots_R]
        if self.prices.is_due(step, num_rows):
            return np.zeros_like(found_R), False
        drafts_R = np.minimum(found_R, worthwhile(rates_R, self.most))
        if gain(rates_R, drafts_R) < self._price(num_rows, int(drafts_R.sum())):
            drafts_R[:] = 0
        is_probe = not drafts_R.any()
        if step % self._probe_every(num_rows) == 0:
            np.maximum(drafts_R, np.minimum(found_R, PROBE_DRAFTS), out=drafts_R)
        return drafts_R, is_probe

    def _price(self, num_rows: int, num_drafts: int) -> float:
        """Return the tokens that a step with drafts must gain to be worth its time."""
        if (ratio := self.prices.ratio(num_rows, num_drafts)) is not None:
            return (ratio - 1) * num_rows
        fixed = STEP_COST + PASS_COST * self.most * self.has_model
        return fixed * num_rows + cost(num_rows + num_drafts) * num_drafts

    def _probe_every(self, num_rows: int) -> int:
        """Return the number of steps between two probes."""
        ratio = self.prices.ratio(num_rows, PROBE_DRAFTS * num_rows) or 1.0
        least = PROBE_EVERY * (1 + num_rows // MANY_ROWS)
        every = max(least, int((ratio - 1) / PROBE_SHARE))
        return every << min(self._failed_probes, MOST_DOUBLED)

    def fed(self, slot: int, count: int) -> list[int]:
        """Return the first `count` of the latest reported drafts."""
        return list(self._tokens_ND[slot, :count].tolist())

    # -- completion -------------------------------------------------------------------------

    def compared(self, slots_R: SlotIndices, drafts_R: Int32, right_R: Int32) -> None:
        """Update the histories with the numbers of accepted drafts of a step.

        Call it before report() of the same step.
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
        if right_R.any():
            self._failed_probes = 0
        self._accepted += np.bincount(right_R, minlength=self.most + 1)
        self.draft_tokens += int(real_R.sum())

    def report(self, slots_R: SlotIndices, drafts_RD: Int32) -> None:
        """Store the drafts that the rows of a step feed next. `drafts_RD`: StepResult.drafts."""
        self._found[slots_R] = drafts_RD[:, 0]
        self._tokens_ND[slots_R] = drafts_RD[:, 1:]

    @property
    def num_drafts(self) -> int:
        """Number of rows with drafts, over all steps."""
        return int(self._accepted.sum())

    @property
    def accepted_by_position(self) -> list[int]:
        return list(self._accepted[::-1].cumsum()[::-1][1:].tolist())


def cost(num_tokens: int) -> float:
    """Return the cost, in tokens, of a draft in a step of `num_tokens`.

    This is the least probability of acceptance at which the draft pays.
    """
    return LOW + (HIGH - LOW) * min(num_tokens / MANY_TOKENS, 1.0)


def worthwhile(rates_R: Floats, most: int) -> Int32:
    """Return how many drafts of each row pay, at most `most`.

    Each draft is accepted at its row's rate. The tokens of the step are those of an equal number of
    drafts for all rows.
    """
    drafts_R, likely_R = np.zeros(len(rates_R), np.int32), rates_R
    for nth in range(1, most + 1):
        drafts_R += likely_R >= cost(len(rates_R) * (1 + nth))
        likely_R = likely_R * rates_R
    return drafts_R


def gain(rates_R: Floats, drafts_R: Int32) -> float:
    """Return the expected number of accepted drafts, if each is accepted at its row's rate."""
    rates_R = np.minimum(rates_R, 0.999)
    return float((rates_R * (1 - rates_R**drafts_R) / (1 - rates_R)).sum())
