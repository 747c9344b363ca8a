"""Metrics of a run, computed from the stamps of its requests, and the record.

TTFT: from sending to the first chunk with text. TPOT: (last - first chunk) / (tokens - 1) of one
request. ITL: each gap between chunks, divided by the tokens of the chunk that ends it, counted once
per token. ICL, inter-chunk latency: the undivided gaps. E2E: from sending to the last chunk.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from nanovllm.bench.record import Record, of_this_machine

MAX_FAILED = 0.01  # fraction of failed requests above which a run is invalid
PERCENTILES = (50, 90, 95, 99)
# Metrics that are whole numbers; records store them as floats.
COUNT = re.compile(r"completed|failed|peak_concurrent|preemptions|output_chunks|num_drafts|"
                   r"steps_\w+|\w+_tokens")  # fmt: skip
Advance = Callable[[int, int], None]  # requests finished and tokens received since the last call
Gaps = npt.NDArray[np.float64]
ProgressBar = Callable[[int, str], AbstractContextManager[Advance]]  # number of requests, label


class Sample(Struct):
    """One request measured by its client. Times are seconds of the machine's monotonic clock."""

    sent: float
    stamps: list[float]  # arrival of every chunk with text
    # Output tokens up to each stamp; empty if the server's chunks have no counts.
    counts: list[int] = []
    input_tokens: int = 0  # this and the next two: as counted by the server
    output_tokens: int = 0
    cached_tokens: int = 0
    session: int = 0  # number of the conversation
    turn: int = 0  # number of the request in it
    reusable_tokens: int = 0  # leading prompt tokens that an earlier request also has
    late_s: float | None = None  # delay of sending after the due time (open loop)
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.stamps[0] - self.sent

    @property
    def tpot_s(self) -> float:
        return (self.stamps[-1] - self.stamps[0]) / max(self.output_tokens - 1, 1)

    @property
    def itl_s(self) -> Gaps:
        """Return the time of each token after the first chunk.

        Without counts, a request's tokens are spread evenly over its chunks.
        """
        gaps = np.diff(self.stamps)
        if len(self.counts) == len(self.stamps):
            tokens = np.maximum(np.diff(self.counts), 1)
            return np.repeat(gaps / tokens, tokens)
        each = max(self.output_tokens - 1, 1) / max(len(gaps), 1)
        return np.repeat(gaps / each, max(1, round(each)))

    @property
    def e2el_s(self) -> float:
        return self.stamps[-1] - self.sent


class Outcome(Struct, frozen=True, kw_only=True):
    record: Record
    engine: dict[str, float]  # lines of the table's last section
    conversations: dict[str, float]  # lines of the section of agents; {} for other loads
    errors: dict[str, int]  # number of occurrences of each
    experts: bytes  # tokens routed to each, as from experts.ExpertLoad.lines; may be empty


def concluded(
    samples: Sequence[Sample],
    engine: dict[str, float],
    goals_ms: Mapping[str, float],
    extra: dict[str, float],
    experts: bytes = b"",
    conversations: Mapping[str, float] = {},
    **fields: Any,  # noqa: ANN401
) -> Outcome:
    """Return the outcome of a run.

    `engine` has the lines of the table's last section, `conversations` those of the section of
    agents, `extra` further metrics, and `fields` the other fields of the record.
    """
    metrics = summarise(samples, goals_ms)
    lines = {**engine, **conversations}
    labelled = {metric_name(label): value for label, value in lines.items()}
    record = of_this_machine(
        duration_s=metrics["duration_s"],
        metrics=metrics | extra | labelled,
        notes=verdict(metrics),
        **fields,
    )
    errors = dict(Counter(one.error for one in samples if one.error).most_common())
    return Outcome(
        record=record, engine=engine, conversations={**conversations}, errors=errors,
        experts=experts,
    )  # fmt: skip


def summarise(samples: Sequence[Sample], goals_ms: Mapping[str, float] = {}) -> dict[str, float]:
    """Return the metrics of a record, without latencies that no request has.

    `goals_ms` has upper limits of "ttft", "tpot" or "e2el" for good requests.
    """
    done = [sample for sample in samples if not sample.error]
    start = min((sample.sent for sample in samples), default=0.0)
    end = max((sample.stamps[-1] for sample in done), default=start)
    duration_s = max(end - start, 1e-9)
    input_tokens = sum(sample.input_tokens for sample in done)
    output_tokens = sum(sample.output_tokens for sample in done)
    values: dict[str, float] = {
        "output_tokens_per_s": output_tokens / duration_s,
        "input_tokens_per_s": input_tokens / duration_s,
        "total_tokens_per_s": (input_tokens + output_tokens) / duration_s,
        "requests_per_s": len(done) / duration_s,
        "peak_output_tokens_per_s": peak_tokens_per_s(done, start),
        "duration_s": duration_s,  # first request sent to last chunk
        "completed": len(done),
        "failed": len(samples) - len(done),
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "output_chunks": sum(len(sample.stamps) for sample in done),
        "cached_tokens": sum(sample.cached_tokens for sample in done),
        "peak_concurrent": peak_concurrent(done),
    }
    if goals_ms:
        good = [all(1e3 * getattr(one, f"{k}_s") <= goals_ms[k] for k in goals_ms) for one in done]
        values["good_requests_per_s"] = sum(good) / duration_s
    for name, seconds in {
        "ttft": [sample.ttft_s for sample in done],
        "tpot": [sample.tpot_s for sample in done if sample.output_tokens > 1],
        "itl": [gap for sample in done for gap in sample.itl_s],
        "icl": [gap for sample in done for gap in np.diff(sample.stamps)],
        "e2e": [sample.e2el_s for sample in done],
        "client_late": [sample.late_s for sample in samples if sample.late_s is not None],
    }.items():
        if seconds:
            ms = 1e3 * np.array(seconds)
            spread = {f"p{at}": np.percentile(ms, at) for at in PERCENTILES}
            spread |= {"mean": ms.mean(), "std": ms.std(), "max": ms.max()}
            values |= {f"{name}_{key}_ms": value for key, value in spread.items()}
    return {name: float(value) for name, value in values.items()}


def verdict(metrics: Mapping[str, float]) -> str:
    """Return the reason why a run is invalid, or ""."""
    failed, total = metrics["failed"], metrics["failed"] + metrics["completed"]
    if metrics["completed"] and failed <= MAX_FAILED * total:
        return ""
    return f"invalid: {failed:.0f} of {total:.0f} requests failed, more than {MAX_FAILED:.0%}"


def peak_tokens_per_s(samples: Sequence[Sample], start: float) -> float:
    """Return the maximum over whole seconds. A chunk counts as tokens / chunks of its request."""
    if not samples:
        return 0.0
    at = np.concatenate([np.asarray(sample.stamps) for sample in samples]) - start
    per_chunk = [sample.output_tokens / len(sample.stamps) for sample in samples]
    weights = np.repeat(per_chunk, [len(sample.stamps) for sample in samples])
    return float(np.bincount(at.astype(np.int64), weights).max())


def peak_concurrent(samples: Sequence[Sample]) -> int:
    changes = [(sample.sent, 1) for sample in samples]
    changes += [(sample.stamps[-1], -1) for sample in samples]
    return int(np.cumsum([change for _, change in sorted(changes)]).max(initial=0))


def metric_name(label: str) -> str:
    """Return `peak_kv_cache_usage_percent` for `Peak KV cache usage (%)`."""
    return re.sub(r"[^a-z0-9]+", "_", label.lower().replace("%", "percent")).strip("_")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
