"""Control of the number of prompt tokens in steps with decode rows, from measured step times.

Reads no clock.

Decision: the controller assumes only two things of the device. A step without prompts (a "quiet"
step) takes longer for more rows, and a prompt's tokens add to that. Both costs are medians of the
latest steps, so one slow step changes nothing. Each new limit is tried immediately; nonlinear costs
(attention over long contexts, launches, padding) are part of the next measurement.

Upper bound: a step with prompts takes about TARGET quiet steps, and less than four with all noise.
Lower bound: prompts keep SHARE of the speed that the device reaches for their tokens alone. A slow
host adds time to every step with a prompt, even one with few tokens. Dividing the target by the
average cost of a token would then shrink steps to the minimum without any gain. Therefore the time
of a step is split into a fixed part F and the cost c of one more token. Steps get at least
F / c * SHARE / (1 - SHARE) tokens on average, which makes them a third longer than F. A prompt of L
tokens is then computed within L * c / SHARE seconds, four times the cost of its tokens alone. If F
is more than 2.5 quiet steps, the lower bound takes precedence over the upper one.
"""

from __future__ import annotations

from collections import deque

from nanovllm.config import Schedule
from nanovllm.kv.costs import median
from nanovllm.sched.prices import size_class

TARGET = 2.5  # duration of a mixed step in quiet steps; with all noise it stays below four
SHARE = 0.25  # least fraction of the speed of a prompt's tokens alone
SWING = (0.5, 1.5)  # alternating factors of the lower bound; equal sizes do not give a slope
UNITS = 64  # parts of step_tokens; prompts with decode rows get at least one
QUIET_WINDOW, COST_WINDOW, SIZES_WINDOW = 9, 5, 16  # steps
LATEST = 4  # steps with prompts; an even number, because their sizes alternate
NEAR = 3  # largest distance of two compared steps, which then have similar contexts
LEAST_PAIRS = 3  # pairs of such steps with different sizes
DIFFERENT = 1.5  # least ratio of the sizes of two compared steps
PROBE_STEPS = 16  # period of steps with twice the least tokens, if the target is missed
STALE_STEPS = 64  # longest run of plans without a quiet step for about this number of rows


class MixedCosts:
    """Cost of prompts in steps with decode rows, in excess of quiet steps.

    It is a fixed part and the cost of one more token, estimated from steps of different sizes.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=SIZES_WINDOW)  # tokens, seconds
        self.token_s = 0.0  # latest estimate; 0 before the first
        self._seen_at = 0  # tokens of the smallest step of that estimate, or of the first step

    def add(self, num_prompt: int, more_s: float) -> None:
        self._steps.append((num_prompt, more_s))
        self._seen_at = self._seen_at or num_prompt
        steps, slopes = list(self._steps), deque[float]()
        for at, (num, num_s) in enumerate(steps):
            for other, other_s in steps[at + 1 : at + 1 + NEAR]:
                if max(num, other) >= DIFFERENT * min(num, other):
                    slopes.append((other_s - num_s) / (other - num))
        if len(slopes) >= LEAST_PAIRS:
            self.token_s, self._seen_at = median(slopes), min(num for num, _ in steps)

    @property
    def most_tokens(self) -> int:
        """Return the tokens of the largest of the latest steps; 0 before the first."""
        return max((num for num, _ in list(self._steps)[-LATEST:]), default=0)

    @property
    def latest_tokens(self) -> int:
        """Return the tokens of the latest step; 0 before the first."""
        return self._steps[-1][0] if self._steps else 0

    @property
    def have_shrunk(self) -> bool:
        """Return whether steps are much smaller than at the latest estimate of a token's cost."""
        return 0 < DIFFERENT * self.latest_tokens <= self._seen_at

    def lower_bound(self, quiet_s: float) -> float:
        """Return the average tokens per step that keep prompts at SHARE of their speed alone.

        Return 0 while it is unknown. The cost of a token is at least SHARE / 2 of the average.
        This limit is less than the cost at the bound; without it, noise could make the cost 0.
        """
        if not self.token_s or not quiet_s:
            return 0.0
        latest = list(self._steps)[-LATEST:]
        average_s = sum(more_s for _, more_s in latest) / sum(num for num, _ in latest)
        token_s = max(self.token_s, SHARE / 2 * average_s)
        fixed_s = median(more_s - token_s * num for num, more_s in latest)
        return SHARE / (1 - SHARE) * (quiet_s + max(0.0, fixed_s)) / token_s


class PaceKeeper:
    """The controller. Read its limit before each plan; report each plan and each step's time."""

    def __init__(self, step_tokens: int, start: int) -> None:
        """`start`: prompt tokens next to decode rows before the first measurements."""
        self.step_tokens = step_tokens
        self.start = start
        self.unit = max(1, step_tokens // UNITS)
        self._quiet_s: dict[int, deque[float]] = {}  # seconds by size_class of the rows
        self._token_s: deque[float] = deque(maxlen=COST_WINDOW)  # seconds per prompt token
        self._mixed = MixedCosts()
        self._least = 0.0  # lower bound in tokens; 0 while it is unknown
        self._num_mixed = 0  # plans with rows and prompts until now
        self._quiet_at: dict[int, int] = {}  # index of the latest quiet plan by size_class
        self._num_plans = self._num_rows = 0  # plans until now; rows of the latest plan

    @property
    def mixed_step_tokens(self) -> int:
        """Return the next plan's limit, from which policy.prompt_budget gets `prompt_tokens`."""
        prompt = self.prompt_tokens
        return min(prompt + self._num_rows, 4 * prompt)

    @property
    def prompt_tokens(self) -> int:
        """Return the prompt tokens for the rows of the latest plan; 0 to measure a quiet step."""
        kind = size_class(self._num_rows)
        is_stale = self._num_plans - self._quiet_at.get(kind, -STALE_STEPS) > STALE_STEPS
        if self._num_rows and is_stale:
            return 0
        quiet_s = self._quiet_step_s(kind)
        if not quiet_s or not self._token_s:
            return self.start
        fitting = (TARGET - 1) * quiet_s / median(self._token_s)
        fitting = max(fitting, self._least_tokens(fitting))
        return min(max(1, int(fitting / self.unit)) * self.unit, self.step_tokens)

    def _least_tokens(self, fitting: float) -> float:
        """Return the tokens of the next step by the lower bound if it exceeds `fitting`, or 0.

        A step has at most twice the tokens of the latest ones. If steps shrink, or have the least
        tokens, occasional steps are larger, to measure the cost of a token.
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
        """Record a plan by its tokens of decode rows (including drafts) and of prompts."""
        self._num_plans += 1
        self._num_rows = num_rows
        self._num_mixed += num_rows > 0 and num_prompt > 0
        if num_rows and not num_prompt:
            self._quiet_at[size_class(num_rows)] = self._num_plans

    def measured(self, num_rows: int, num_prompt: int, seconds: float) -> None:
        """Record the device time of a step with this number of rows and prompt tokens."""
        kind = size_class(num_rows)
        if not num_prompt:
            self._quiet_s.setdefault(kind, deque(maxlen=QUIET_WINDOW)).append(seconds)
        elif num_prompt >= self.unit:  # fewer tokens give no estimate of their cost
            # A step of prompts alone also reads the weights, like a quiet step.
            quiet_s = self._quiet_step_s(kind)
            more_s = max(seconds - quiet_s, seconds / 8)
            self._token_s.append(more_s / num_prompt)
            if num_rows:
                self._mixed.add(num_prompt, seconds - quiet_s)
                self._least = self._mixed.lower_bound(quiet_s)

    def _quiet_step_s(self, kind: int) -> float:
        """Return the time of a quiet step of the nearest measured size class; 0 without any."""
        if not self._quiet_s:
            return 0.0
        nearest = min(self._quiet_s, key=lambda known: (abs(known - kind), known))
        return median(self._quiet_s[nearest])


def pace_of(schedule: Schedule, device: str) -> PaceKeeper | None:
    """Return the controller of a resolved schedule; None if the recipe has a fixed number.

    On a CPU the start is low, because a step of step_tokens takes a large part of a second.
    """
    if schedule.mixed_step_tokens != "auto":
        return None
    step_tokens = int(schedule.step_tokens)
    return PaceKeeper(step_tokens, start=step_tokens // 8 if device == "cpu" else step_tokens)
