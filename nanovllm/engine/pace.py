"""How many prompt tokens go with decode rows, by the time that steps took. Reads no clock.

Decision: nothing is assumed of the device but that a step without prompts ("quiet") takes longer
for more rows, and that a prompt's tokens cost time besides. Both are medians of the latest steps,
so that one slow step changes nothing, and each new limit is tried at once: nonlinear costs
(attention over long contexts, launches, padding) are in the next measurement.

Bounds. Above: a step with prompts takes about TARGET quiet ones, below four with all noise. Below:
prompts keep SHARE of the pace that the device has for their tokens alone. A slow host adds time to
every step with a prompt, however few tokens it has; dividing the target by the average cost of a
token then shrinks the steps' tokens to the least, for nothing. So the time of a step is split into
a fixed part F and the cost c of one token more. Steps get F / c * SHARE / (1 - SHARE) tokens on
average, or more, which makes them a third longer than F: a prompt of L tokens is computed within
L * c / SHARE seconds, four times what its tokens take alone. Where F is above 2.5 quiet steps, this
bound comes before the one above.
"""

from __future__ import annotations

from collections import deque

from nanovllm.config import Schedule

TARGET = 2.5  # quiet steps that a mixed one takes: with all noise it stays below four
SHARE = 0.25  # of the pace of a prompt's tokens alone, which prompts keep at least
SWING = (0.5, 1.5)  # of the lower bound, in turns: steps of one size do not show what a token costs
UNITS = 64  # parts of step_tokens: prompts with decode rows get one at least
QUIET_WINDOW, COST_WINDOW, SIZES_WINDOW = 9, 5, 16  # steps
LATEST = 4  # steps with prompts: an even number, as their sizes swing
NEAR = 3  # steps: contexts are about as long in two that are no further apart
LEAST_PAIRS = 3  # of such steps, of different sizes
DIFFERENT = 1.5  # times the tokens: steps whose times show what a token costs
PROBE_STEPS = 16  # one step in this many has twice the least tokens, where those miss the target
STALE_STEPS = 64  # a quiet step is due after so many without one, for about as many rows


class MixedCosts:
    """The time of steps with decode rows and prompts beyond that of quiet steps: a fixed part, and
    the cost of one token more, which steps of different sizes show."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=SIZES_WINDOW)  # tokens, seconds
        self.token_s = 0.0  # as last seen; 0: not yet
        self._seen_at = 0  # tokens of the smallest step by then; before, of the first step

    def add(self, num_prompt: int, more_s: float) -> None:
        self._steps.append((num_prompt, more_s))
        self._seen_at = self._seen_at or num_prompt
        steps, slopes = list(self._steps), deque[float]()
        for at, (num, num_s) in enumerate(steps):
            for other, other_s in steps[at + 1 : at + 1 + NEAR]:
                if max(num, other) >= DIFFERENT * min(num, other):
                    slopes.append((other_s - num_s) / (other - num))
        if len(slopes) >= LEAST_PAIRS:
            self.token_s, self._seen_at = middle(slopes), min(num for num, _ in steps)

    @property
    def most_tokens(self) -> int:
        """The tokens of the largest of the latest steps; 0 before the first."""
        return max((num for num, _ in list(self._steps)[-LATEST:]), default=0)

    @property
    def latest_tokens(self) -> int:
        """The tokens of the latest step; 0 before the first."""
        return self._steps[-1][0] if self._steps else 0

    @property
    def have_shrunk(self) -> bool:
        """Steps are much smaller than when the cost of a token was last seen."""
        return 0 < DIFFERENT * self.latest_tokens <= self._seen_at

    def lower_bound(self, quiet_s: float) -> float:
        """Return the tokens on average that keep prompts at SHARE of their pace alone; 0 while
        this is unknown.

        A token costs at least half of SHARE of the average: without this limit, which is below the
        cost at the bound, noise could make it 0.
        """
        if not self.token_s or not quiet_s:
            return 0.0
        latest = list(self._steps)[-LATEST:]
        average_s = sum(more_s for _, more_s in latest) / sum(num for num, _ in latest)
        token_s = max(self.token_s, SHARE / 2 * average_s)
        fixed_s = middle(deque(more_s - token_s * num for num, more_s in latest))
        return SHARE / (1 - SHARE) * (quiet_s + max(0.0, fixed_s)) / token_s


class PaceKeeper:
    """Asked before each plan, told of each plan, and told of each step's time."""

    def __init__(self, step_tokens: int, start: int) -> None:
        """`start`: prompt tokens beside decode rows as long as nothing is known."""
        self.step_tokens = step_tokens
        self.start = start
        self.unit = max(1, step_tokens // UNITS)
        self._quiet_s: dict[int, deque[float]] = {}  # by size_class of the rows
        self._token_s: deque[float] = deque(maxlen=COST_WINDOW)  # of a prompt's token
        self._mixed = MixedCosts()
        self._least = 0.0  # tokens of the lower bound; 0 while it is unknown
        self._num_mixed = 0  # plans with rows and prompts so far
        self._quiet_at: dict[int, int] = {}  # by size_class: the newest plan without prompts
        self._num_plans = self._num_rows = 0  # so far; of the newest plan

    @property
    def mixed_step_tokens(self) -> int:
        """For the next plan: policy.prompt_budget makes of it what `prompt_tokens` says."""
        prompt = self.prompt_tokens
        return min(prompt + self._num_rows, 4 * prompt)

    @property
    def prompt_tokens(self) -> int:
        """With as many decode rows as the latest plan had. 0: to measure a quiet step."""
        kind = size_class(self._num_rows)
        is_stale = self._num_plans - self._quiet_at.get(kind, -STALE_STEPS) > STALE_STEPS
        if self._num_rows and is_stale:
            return 0
        quiet_s = self._quiet_step_s(kind)
        if not quiet_s or not self._token_s:
            return self.start
        fitting = (TARGET - 1) * quiet_s / middle(self._token_s)
        fitting = max(fitting, self._least_tokens(fitting))
        return min(max(1, int(fitting / self.unit)) * self.unit, self.step_tokens)

    def _least_tokens(self, fitting: float) -> float:
        """Return the tokens of the next step by the lower bound, where that is above `fitting`.

        A step has at most twice the tokens of the latest ones. Where steps shrink, or have the
        least tokens, one is larger, to see what a token costs.
        """
        most, is_large = self._mixed.most_tokens, self._num_mixed % 2
        if fitting < self._least:
            swung = self._least * SWING[is_large]
            return min(max(swung, 2 * self.unit), 2 * most) if is_large else swung
        if self._mixed.have_shrunk:
            return DIFFERENT * self._mixed.latest_tokens + self.unit - 1
        every = PROBE_STEPS if fitting < self.unit else 4 * PROBE_STEPS
        is_due = not self._mixed.token_s or self._num_mixed % every == 0
        return 2 * self.unit if 0 < most < 2 * self.unit and is_due else 0.0

    def planned(self, num_rows: int, num_prompt: int) -> None:
        """A plan has so many tokens of decode rows (drafts count like rows), and of prompts."""
        self._num_plans += 1
        self._num_rows = num_rows
        self._num_mixed += num_rows > 0 and num_prompt > 0
        if num_rows and not num_prompt:
            self._quiet_at[size_class(num_rows)] = self._num_plans

    def measured(self, num_rows: int, num_prompt: int, seconds: float) -> None:
        """So long the device worked on such a step."""
        kind = size_class(num_rows)
        if not num_prompt:
            self._quiet_s.setdefault(kind, deque(maxlen=QUIET_WINDOW)).append(seconds)
        elif num_prompt >= self.unit:  # fewer say nothing of what one costs
            # A step of prompts alone also reads the weights, as a quiet one does.
            quiet_s = self._quiet_step_s(kind)
            more_s = max(seconds - quiet_s, seconds / 8)
            self._token_s.append(more_s / num_prompt)
            if num_rows:
                self._mixed.add(num_prompt, seconds - quiet_s)
                self._least = self._mixed.lower_bound(quiet_s)

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
