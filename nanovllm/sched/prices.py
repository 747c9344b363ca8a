"""Time of decode steps with drafts next to that of steps without, measured while serving.

Decision: a price is a ratio of medians of the latest steps of one class of rows (numbers within a
factor of four), so that one slow step changes nothing. It contains all that drafts cost: the wider
verification, the passes of a draft model, and the host's share where the host is slower than the
device. A step's time is therefore the device's, or the host's for its plan, its launch and its
results, whichever is longer. The device's idle time before a step would not do: the host spends it
on the steps before as well, so that steps without drafts seem as slow as those with drafts. Drafts
that always pay would leave the time without drafts unknown. So a few steps of each class have no
drafts: one of the first steps, and then one in MEASURE_EVERY.
"""

from __future__ import annotations

from collections import deque

from nanovllm.kv.costs import median

WINDOW = 9  # latest steps of a kind whose median is used
LEAST = 3  # steps of a kind before its median is used
MEASURE_EVERY = 256  # steps between two measured steps without drafts
MEASURE_FIRST = 4  # steps between two such steps until there are LEAST of them


class DraftPrices:
    """Periods of steps by class of the rows and of the drafts. Class 0 is without drafts."""

    def __init__(self) -> None:
        self._periods_s: dict[tuple[int, int], deque[float]] = {}
        self._medians_s: dict[tuple[int, int], float] = {}  # of those with at least LEAST steps
        self._plain_at: dict[int, int] = {}  # index of the latest planned step without drafts
        self._planned: dict[int, tuple[int, int]] = {}  # classes of the steps to be measured

    def is_due(self, step: int, num_rows: int) -> bool:
        """Return whether a step should have no drafts, so that its time is measured.

        It is only worth it if steps with drafts have been measured.
        """
        rows = row_class(num_rows)
        if not any(kind[0] == rows and kind[1] for kind in self._periods_s):
            return False
        is_known = len(self._periods_s.get((rows, 0), ())) >= LEAST
        latest = self._plain_at.get(rows, 0)
        return step - latest >= (MEASURE_EVERY if is_known else MEASURE_FIRST)

    def plan(self, step: int, num_rows: int, num_drafts: int) -> None:
        """Note a step whose time will be measured. All of its drafts are fed, or it has none."""
        rows = row_class(num_rows)
        self._planned[step] = rows, size_class(num_drafts)
        if not num_drafts:
            self._plain_at[rows] = step

    def measure(self, step: int, period_s: float) -> None:
        """Add the time of a completed step, in seconds. 0: it has not been measured.

        Steps complete in order.
        """
        kind = self._planned.pop(step, None)
        if kind is not None and period_s > 0:
            periods_s = self._periods_s.setdefault(kind, deque(maxlen=WINDOW))
            periods_s.append(period_s)
            if len(periods_s) >= LEAST:
                self._medians_s[kind] = median(periods_s)

    def plain_s(self, num_rows: int) -> float | None:
        """Return the period of a step without drafts, in seconds, or None if it is not known."""
        return self._medians_s.get((row_class(num_rows), 0))

    def ratio(self, num_rows: int, num_drafts: int) -> float | None:
        """Return the period of a step with these drafts in periods of one without.

        The nearest measured size class of drafts is used. Return None before enough steps of these
        rows have been measured.
        """
        rows, drafts = row_class(num_rows), size_class(num_drafts)
        known = {kind[1]: value_s for kind, value_s in self._medians_s.items() if kind[0] == rows}
        plain_s = known.pop(0, None)
        if plain_s is None or not known:
            return None
        return known[min(known, key=lambda other: (abs(other - drafts), other))] / plain_s


def row_class(num_rows: int) -> int:
    """Return the class of rows: 1 row, 2 to 7, 8 to 31, 32 to 127, 128 to 511 and so on."""
    return size_class(num_rows) // 2


def size_class(count: int) -> int:
    """Return the size class: 0 for 0, else numbers within a factor of two share one."""
    return count.bit_length()
