"""One measured run, whatever measured it, before it is printed and written.

Knows neither HTTP nor the engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from nanovllm.bench.measure import Summary, metrics
from nanovllm.bench.record import Kind, Record, of_this_machine

Advance = Callable[[int, int], None]  # requests finished and tokens received since the last call
ProgressBar = Callable[[int, str], AbstractContextManager[Advance]]  # of so many requests, label


class Outcome(Struct, frozen=True, kw_only=True):
    summary: Summary
    engine: dict[str, float]  # lines of the table's last section
    record: Record  # its workload has at least name, concurrency, request_rate, burstiness


def concluded(
    kind: Kind,
    *,
    started_at: str,
    summary: Summary,
    recipe: Mapping[str, Any],
    changed: Mapping[str, Any],
    workload: dict[str, Any],
    engine: dict[str, float],
    **more: float,
) -> Outcome:
    """`more`: metrics that the table does not show."""
    labelled = {metric_name(label): value for label, value in engine.items()}
    record = of_this_machine(
        kind=kind,
        started_at=started_at,
        duration_s=summary.duration_s,
        recipe=recipe,
        changed=changed,
        workload=workload,
        metrics=metrics(summary) | more | labelled,
        notes=summary.verdict,
    )
    return Outcome(summary=summary, engine=engine, record=record)


def metric_name(label: str) -> str:
    """`Peak KV cache usage (%)` -> `peak_kv_cache_usage_percent`."""
    return re.sub(r"[^a-z0-9]+", "_", label.lower().replace("%", "percent")).strip("_")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
