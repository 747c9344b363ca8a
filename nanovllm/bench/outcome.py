"""One measured run, whatever measured it, before it is printed and written.

Knows neither HTTP nor the engine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from nanovllm.bench.measure import Sample, summarise, verdict
from nanovllm.bench.record import Kind, Record, of_this_machine

Advance = Callable[[int, int], None]  # requests finished and tokens received since the last call
ProgressBar = Callable[[int, str], AbstractContextManager[Advance]]  # of so many requests, label


class Outcome(Struct, frozen=True, kw_only=True):
    record: Record
    engine: dict[str, float]  # lines of the table's last section
    errors: dict[str, int]  # how often each came


def concluded(
    kind: Kind,
    *,
    started_at: str,
    samples: Sequence[Sample],
    goals_ms: Mapping[str, float] = {},
    recipe: Mapping[str, Any],
    changed: Mapping[str, Any],
    workload: dict[str, Any],
    engine: dict[str, float],
    **more: float,
) -> Outcome:
    """`more`: metrics that the table does not show."""
    metrics = summarise(samples, goals_ms)
    labelled = {metric_name(label): value for label, value in engine.items()}
    record = of_this_machine(
        kind=kind,
        started_at=started_at,
        duration_s=metrics["duration_s"],
        recipe=recipe,
        changed=changed,
        workload=workload,
        metrics=metrics | more | labelled,
        notes=verdict(metrics),
    )
    errors = Counter(sample.error for sample in samples if sample.error)
    return Outcome(record=record, engine=engine, errors=dict(errors.most_common()))


def metric_name(label: str) -> str:
    """`Peak KV cache usage (%)` -> `peak_kv_cache_usage_percent`."""
    return re.sub(r"[^a-z0-9]+", "_", label.lower().replace("%", "percent")).strip("_")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
