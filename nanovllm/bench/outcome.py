"""One measured run, whatever measured it, before it is printed and recorded.

Knows neither HTTP nor the engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from nanovllm.bench import measure, report
from nanovllm.bench.machine import Commit, Machine, versions
from nanovllm.bench.record import Kind, Record, hide_secrets, without_secrets

Advance = Callable[[int, int], None]  # requests finished and tokens received since the last call
ProgressBar = Callable[[int, str], AbstractContextManager[Advance]]  # of so many requests, label


class Outcome(Struct, frozen=True, kw_only=True):
    kind: Kind
    model: str
    started_at: str
    summary: measure.Summary
    recipe: dict[str, Any]
    changed: dict[str, Any]
    workload: dict[str, Any]  # at least name, concurrency, request_rate, burstiness
    metrics: dict[str, float]  # beside those of the summary
    engine: dict[str, float]  # lines of the table's last section
    machine: Machine

    def table(self) -> str:
        mode = "Offline" if self.kind == "offline" else "Serving"
        return report.table(
            self.summary,
            title=f" {mode} Benchmark Result ",
            concurrency=self.workload["concurrency"],
            request_rate=self.workload["request_rate"],
            engine=self.engine,
        )

    def vllm_json(self) -> dict[str, object]:
        return report.vllm_json(
            self.summary,
            date=self.started_at,
            model=self.model,
            concurrency=self.workload["concurrency"],
            request_rate=self.workload["request_rate"],
            burstiness=self.workload["burstiness"],
        )

    def as_record(self, commit: Commit, argv: list[str]) -> Record:
        engine = {metric_name(label): value for label, value in self.engine.items()}
        return Record(
            kind=self.kind,
            machine=self.machine,
            commit=commit.hash,
            dirty=commit.is_dirty,
            started_at=self.started_at,
            duration_s=self.summary.duration_s,
            argv=without_secrets(argv),
            recipe=hide_secrets(self.recipe),
            changed=hide_secrets(self.changed),
            workload=self.workload,
            metrics=measure.metrics(self.summary) | self.metrics | engine,
            versions=versions(),
            notes=report.verdict(self.summary),
        )


def metric_name(label: str) -> str:
    """`Peak KV cache usage (%)` -> `peak_kv_cache_usage_percent`."""
    return re.sub(r"[^a-z0-9]+", "_", label.lower().replace("%", "percent")).strip("_")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
