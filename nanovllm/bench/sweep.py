"""Records of several runs side by side: which belong to one curve, a table of ratios, a plot.

Knows how a record is read, not how it was measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from nanovllm.bench import plot
from nanovllm.bench.plot import Panel, Point
from nanovllm.bench.record import UNNAMED, Record, new_path
from nanovllm.config import ConfigError

RATE, TPOT, TTFT = "output_tokens_per_s", "tpot_p50_ms", "ttft_p50_ms"
SPEED = "output tokens per second"
LOADS = ("serve", "offline")  # the kinds of record that have throughput and latency


class Curve(Struct, frozen=True):
    """Runs that differ in their concurrency (or arrival rate) alone, least first."""

    name: str  # in what it differs from the other curves
    records: tuple[Record, ...]


def parse(text: str) -> tuple[int, ...]:
    """`1,4,16`: the concurrencies of a sweep. Raises ConfigError."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--sweep {text}: write concurrencies, 1 or more each, as in 1,4,16,64")
    found = tuple(int(part) for part in parts)
    if len(set(found)) < len(found):
        raise ConfigError(f"--sweep {text}: names a concurrency twice")
    return found


def curves(records: Sequence[Record]) -> tuple[str, list[Curve]]:
    """What all records share, and the curves. Raises ConfigError for records without a load."""
    common = set.intersection(*({*changes(record)} for record in records))
    groups: dict[tuple[tuple[str, str], ...], list[Record]] = {}
    seen: Counter[str] = Counter()
    for record in records:
        if record.kind not in LOADS:
            raise ConfigError(f"a record of kind {record.kind} has no throughput to compare")
        own = [change for change in changes(record) if change not in common]
        found = facts(record) | {"changed": " ".join(own) or "unchanged"}
        again = f"{found} {intensity(record)}"
        seen[again] += 1
        found["run"] = f"run {seen[again]}"  # the same measured twice is two curves
        groups.setdefault(tuple(found.items()), []).append(record)
    keys = [dict(group) for group in groups]
    differing = [name for name in keys[0] if len({key[name] for key in keys}) > 1]
    shared = [v for k, v in keys[0].items() if k not in (*differing, "changed", "run")]
    shared += [change for change in changes(records[0]) if change in common]
    named = [
        Curve(
            ", ".join(key[name] for name in differing) or key["model"],
            tuple(sorted(group, key=lambda record: intensity(record)[1])),
        )
        for key, group in zip(keys, groups.values(), strict=True)
    ]
    return ", ".join(shared), named


def facts(record: Record) -> dict[str, str]:
    """What a curve has in common."""
    load = record.workload
    if "input_len" in load:
        kind = " structured" if load.get("structured") else ""
        work = f"{load['input_len']} + {load['output_len']}{kind} tokens"
    else:
        work = str(load["name"])
    return {
        "model": str(record.recipe["model"]).rstrip("/").rsplit("/", 1)[-1],
        "machine": record.machine.slug,
        "commit": (record.commit[:7] or "unknown") + ("-dirty" if record.dirty else ""),
        "kind": "over HTTP" if record.kind == "serve" else "without HTTP",
        "work": work,
    }


def changes(record: Record) -> list[str]:
    """What was altered in the recipe."""
    return [f"{k}={v}" for k, v in record.changed.items() if not k.startswith(UNNAMED)]


def intensity(record: Record) -> tuple[str, float]:
    """`64` requests in flight, or `2.5/s` arriving."""
    rate = record.workload.get("request_rate")
    if rate is not None:
        return f"{rate:g}/s", float(rate)
    count = record.workload["concurrency"]
    return str(count), float(count)


def table(shared: str, found: Sequence[Curve]) -> str:
    """Per load, every curve's speed and its ratio to the first curve that has this load."""
    columns = ((RATE, "tok/s"), (TPOT, "TPOT p50 ms"), (TTFT, "TTFT p50 ms"))
    head = " ".join(f"{title:>12} {'ratio':>6}" for _, title in columns)
    lines = [shared, f"{'load':>6} {head}"]
    firsts: dict[str, Mapping[str, float]] = {}
    rows = [(curve.name, record) for curve in found for record in curve.records]
    for name, record in sorted(rows, key=lambda row: intensity(row[1])[1]):
        load, metrics = intensity(record)[0], record.metrics
        cells = []
        for metric, _ in columns:
            value, first = metrics.get(metric), firsts.get(load, {}).get(metric)
            cells.append("-" if value is None else f"{value:,.2f}")
            cells.append(f"{value / first:.3f}" if value is not None and first else "")
        firsts.setdefault(load, metrics)
        shown = " ".join(f"{cell:>{(12, 6)[at % 2]}}" for at, cell in enumerate(cells))
        lines.append(f"{load:>6} {shown}  {name}")
    return "\n".join(lines)


def draw(path: Path, shared: str, found: Sequence[Curve]) -> None:
    """Throughput against both latencies; points are labelled with their loads.

    Raises ConfigError when there is nothing to draw, or no file to be written.
    """

    def lines(metric: str) -> dict[str, list[Point]]:
        points = {
            curve.name: [
                Point(record.metrics[metric], record.metrics[RATE], intensity(record)[0])
                for record in curve.records
                if metric in record.metrics
            ]
            for curve in found
        }
        return {name: line for name, line in points.items() if line}

    panels = [
        Panel("Against time per output token", "TPOT p50 (ms)", SPEED, lines(TPOT)),
        Panel("Against time to first token", "TTFT p50 (ms)", SPEED, lines(TTFT)),
    ]
    drawn = [panel for panel in panels if panel.lines]
    if not drawn:
        raise ConfigError(f"no record has {TPOT} or {TTFT}: nothing to plot")
    plot.draw(path, f"Throughput against latency: {shared}", drawn)


def place(records: Sequence[Record], results_dir: Path, name: str, suffix: str) -> Path:
    """Of what is said of these records together, beside them."""
    first = records[0]
    return new_path(replace(first, workload=first.workload | {"name": name}), results_dir, suffix)
