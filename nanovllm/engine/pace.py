"""How many prompt tokens go beside decode rows, by the time that steps took. Reads no clock.

Decision: nothing is assumed of the device but that a step without prompts ("quiet") takes longer
for more rows, and that a prompt's tokens cost time besides. Both are medians of the newest steps,
so that one slow step changes nothing, and each new limit is tried at once: whatever is not linear
(attention over long contexts, launches, padding) is in the next measurement.
"""

from __future__ import annotations

from collections import deque

from nanovllm.config import Schedule

TARGET = 2.5  # quiet steps that a mixed one takes: with all noise it stays below four
UNITS = 64  # parts of step_tokens: prompts beside decode rows get one at least
QUIET_WINDOW, COST_WINDOW = 9, 5  # steps
STALE_STEPS = 64  # a quiet step is due after so many without one, for about as many rows


class PaceKeeper:
    """Asked before each plan, told of each plan, and told of each step's time."""

    def __init__(self, step_tokens: int, start: int) -> None:
        """`start`: prompt tokens beside decode rows as long as nothing is known."""
        self.step_tokens = step_tokens
        self.start = start
        self.unit = max(1, step_tokens // UNITS)
        self._quiet_s: dict[int, deque[float]] = {}  # by size_class of the rows
        self._token_s: deque[float] = deque(maxlen=COST_WINDOW)  # of a prompt's token
        self._quiet_at: dict[int, int] = {}  # by size_class: the newest plan without prompts
        self._num_plans = self._num_rows = 0  # so far; of the newest plan

    @property
    def mixed_step_tokens(self) -> int:
        """For the next plan: policy.prompt_budget makes of it what `prompt_tokens` says."""
        prompt = self.prompt_tokens
        return min(prompt + self._num_rows, 4 * prompt)

    @property
    def prompt_tokens(self) -> int:
        """Beside as many decode rows as the newest plan had. 0: to measure a quiet step."""
        kind = size_class(self._num_rows)
        is_stale = self._num_plans - self._quiet_at.get(kind, -STALE_STEPS) > STALE_STEPS
        if self._num_rows and is_stale:
            return 0
        quiet_s = self._quiet_step_s(kind)
        if not quiet_s or not self._token_s:
            return self.start
        fitting = (TARGET - 1) * quiet_s / middle(self._token_s)
        return min(max(1, int(fitting / self.unit)) * self.unit, self.step_tokens)

    def planned(self, num_rows: int, num_prompt: int) -> None:
        """A plan has so many tokens of decode rows (drafts count like rows), and of prompts."""
        self._num_plans += 1
        self._num_rows = num_rows
        if num_rows and not num_prompt:
            self._quiet_at[size_class(num_rows)] = self._num_plans

    def measured(self, num_rows: int, num_prompt: int, seconds: float) -> None:
        """So long the device worked on such a step."""
        kind = size_class(num_rows)
        if not num_prompt:
            self._quiet_s.setdefault(kind, deque(maxlen=QUIET_WINDOW)).append(seconds)
        elif num_prompt >= self.unit:  # fewer say nothing of what one costs
            # A step of prompts alone also reads the weights, as a quiet one does.
            more_s = max(seconds - self._quiet_step_s(kind), seconds / 8)
            self._token_s.append(more_s / num_prompt)

    def _quiet_step_s(self, kind: int) -> float:
        """The seconds of a step of the nearest known number of rows; 0: none is known."""
        if not self._quiet_s:
            return 0.0
        nearest = min(self._quiet_s, key=lambda known: (abs(known - kind), known))
        return middle(self._quiet_s[nearest])


def size_class(num_rows: int) -> int:
    """Numbers of rows within a factor of two count as one."""
    return num_rows.bit_length()


def middle(values: deque[float]) -> float:
    """The median, of an even number the upper one."""
    return sorted(values)[len(values) // 2]


def pace_of(schedule: Schedule, device: str) -> PaceKeeper | None:
    """The keeper of a resolved schedule; None where the recipe has a number.

    A CPU starts low: there a step of step_tokens takes a good part of a second.
    """
    if schedule.mixed_step_tokens != "auto":
        return None
    step_tokens = int(schedule.step_tokens)
    return PaceKeeper(step_tokens, start=step_tokens // 8 if device == "cpu" else step_tokens)
