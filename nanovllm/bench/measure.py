"""From the stamps of each request to the numbers of a run.

TTFT: from sending to the first chunk with text. TPOT: (last - first chunk) / (tokens - 1) of one
request. ITL: every gap between chunks. E2EL: from sending to the last chunk. Knows neither HTTP nor
the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

MAX_FAILED = 0.01  # share of failed requests above which a run says nothing


class Sample(Struct):
    """One request as its client saw it; times are seconds of the machine's monotonic clock."""

    sent: float
    stamps: list[float]  # arrival of every chunk with text
    input_tokens: int = 0  # these three as the server counted them
    output_tokens: int = 0
    cached_tokens: int = 0
    late_s: float | None = None  # how long after it was due it was sent (open loop)
    error: str = ""


class Spread(Struct, frozen=True):
    """A distribution in milliseconds; all zero when count is."""

    count: int = 0
    mean: float = 0.0
    std: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @property
    def median(self) -> float:
        return self.p50


class Summary(Struct, frozen=True, kw_only=True):
    completed: int
    failed: int
    duration_s: float  # first request sent to last chunk
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    peak_tokens_per_s: float  # the best of the run's whole seconds
    peak_concurrent: int
    num_good: int | None  # requests within every target; None: no targets
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2el: Spread
    late: Spread
    errors: dict[str, int]

    @property
    def is_valid(self) -> bool:
        return self.completed > 0 and self.failed <= MAX_FAILED * (self.completed + self.failed)

    @property
    def verdict(self) -> str:
        """Empty for a valid run."""
        if self.is_valid:
            return ""
        total = self.completed + self.failed
        return f"invalid: {self.failed} of {total} requests failed, more than {MAX_FAILED:.0%}"

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s

    def latencies(self) -> dict[str, Spread]:
        return {"ttft": self.ttft, "tpot": self.tpot, "itl": self.itl, "e2el": self.e2el}


def summarise(samples: Sequence[Sample], goals_ms: Mapping[str, float] = {}) -> Summary:
    """`goals_ms`: the most that "ttft", "tpot" or "e2el" of a good request may be."""
    good = [sample for sample in samples if not sample.error]
    lasts = [sample.stamps[-1] for sample in good]
    start = min((sample.sent for sample in samples), default=0.0)
    return Summary(
        completed=len(good),
        failed=len(samples) - len(good),
        duration_s=max(max(lasts, default=start) - start, 1e-9),
        input_tokens=sum(sample.input_tokens for sample in good),
        output_tokens=sum(sample.output_tokens for sample in good),
        cached_tokens=sum(sample.cached_tokens for sample in good),
        peak_tokens_per_s=_peak_tokens_per_s(good, start),
        peak_concurrent=_peak_concurrent(good),
        num_good=sum(_is_within(sample, goals_ms) for sample in good) if goals_ms else None,
        ttft=_spread(_ttft_s(sample) for sample in good),
        tpot=_spread(_tpot_s(sample) for sample in good if sample.output_tokens > 1),
        itl=_spread(gap for sample in good for gap in np.diff(sample.stamps)),
        e2el=_spread(_e2el_s(sample) for sample in good),
        late=_spread(sample.late_s for sample in samples if sample.late_s is not None),
        errors=dict(Counter(sample.error for sample in samples if sample.error)),
    )


def metrics(summary: Summary) -> dict[str, float]:
    """The numbers of a record, with units in their names."""
    found = {
        "output_tokens_per_s": summary.output_tokens_per_s,
        "input_tokens_per_s": summary.input_tokens / summary.duration_s,
        "requests_per_s": summary.completed / summary.duration_s,
        "peak_output_tokens_per_s": summary.peak_tokens_per_s,
        "duration_s": summary.duration_s,
        "completed": summary.completed,
        "failed": summary.failed,
        "input_tokens": summary.input_tokens,
        "output_tokens": summary.output_tokens,
        "cached_tokens": summary.cached_tokens,
        "peak_concurrent": summary.peak_concurrent,
    }
    if summary.num_good is not None:
        found["good_requests_per_s"] = summary.num_good / summary.duration_s
    for name, spread in (*summary.latencies().items(), ("client_late", summary.late)):
        if spread.count:
            name = "e2e" if name == "e2el" else name
            for key in ("mean", "p50", "p90", "p95", "p99", "max"):
                found[f"{name}_{key}_ms"] = getattr(spread, key)
    return {name: float(value) for name, value in found.items()}


def _ttft_s(sample: Sample) -> float:
    return sample.stamps[0] - sample.sent


def _tpot_s(sample: Sample) -> float:
    return (sample.stamps[-1] - sample.stamps[0]) / max(sample.output_tokens - 1, 1)


def _e2el_s(sample: Sample) -> float:
    return sample.stamps[-1] - sample.sent


def _is_within(sample: Sample, goals_ms: Mapping[str, float]) -> bool:
    actual = {"ttft": _ttft_s(sample), "tpot": _tpot_s(sample), "e2el": _e2el_s(sample)}
    return all(1e3 * actual[name] <= goal for name, goal in goals_ms.items())


def _spread(seconds: Iterable[float]) -> Spread:
    ms: npt.NDArray[np.float64] = 1e3 * np.fromiter(seconds, np.float64)
    if not ms.size:
        return Spread()
    p50, p90, p95, p99 = map(float, np.percentile(ms, (50, 90, 95, 99)))
    return Spread(ms.size, float(ms.mean()), float(ms.std()), p50, p90, p95, p99, float(ms.max()))


def _peak_tokens_per_s(samples: Sequence[Sample], start: float) -> float:
    """A chunk counts for its request's tokens divided by its chunks."""
    if not samples:
        return 0.0
    at = np.concatenate([np.asarray(sample.stamps) for sample in samples]) - start
    per_chunk = [sample.output_tokens / len(sample.stamps) for sample in samples]
    weights = np.repeat(per_chunk, [len(sample.stamps) for sample in samples])
    return float(np.bincount(at.astype(np.int64), weights).max())


def _peak_concurrent(samples: Sequence[Sample]) -> int:
    changes = [(sample.sent, 1) for sample in samples]
    changes += [(sample.stamps[-1], -1) for sample in samples]
    running = peak = 0
    for _, change in sorted(changes):
        running += change
        peak = max(peak, running)
    return peak
