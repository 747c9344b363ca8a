"""Records of several runs side by side: which belong to one curve, a table of ratios, a plot.

Knows how a record is read, not how it was measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from nanovllm.bench.plot import Panel, Point, Series, draw
from nanovllm.bench.record import UNNAMED, Record, new_path
from nanovllm.config import ConfigError

RATE, TPOT, TTFT = "output_tokens_per_s", "tpot_p50_ms", "ttft_p50_ms"
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
        work = f"{load['input_len']} + {load['output_len']} tokens"
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


def table(found: Sequence[Curve]) -> str:
    """Per load, every curve's speed and its ratio to the first curve that has this load."""
    letters = [chr(ord("A") + at % 26) for at in range(len(found))]
    lines = [f"{letter}  {curve.name}" for letter, curve in zip(letters, found, strict=True)]
    lines.append(
        f"{'load':>6} {'':2} {'tok/s':>11} {'ratio':>6} {'tok/s/user':>11} {'TPOT p50 ms':>12} "
        f"{'ratio':>6} {'TTFT p50 ms':>12} {'ratio':>6}"
    )
    loads = {intensity(record): None for curve in found for record in curve.records}
    for load in sorted(loads, key=lambda load: load[1]):
        first: Mapping[str, float] | None = None
        for letter, curve in zip(letters, found, strict=True):
            for record in curve.records:
                if intensity(record) == load:
                    lines.append(f"{load[0]:>6} {letter:2} {cells(record.metrics, first)}")
                    first = first or record.metrics
    return "\n".join(lines)


def cells(metrics: Mapping[str, float], first: Mapping[str, float] | None) -> str:
    def of(name: str, width: int) -> str:
        value = metrics.get(name)
        return f"{'-':>{width}}" if value is None else f"{value:>{width},.2f}"

    def ratio(name: str) -> str:
        base = first.get(name) if first else None
        return f"{metrics[name] / base:6.3f}" if base and name in metrics else f"{'':6}"

    tpot = metrics.get(TPOT)
    per_user = f"{1e3 / tpot:>11,.1f}" if tpot else f"{'-':>11}"
    return (
        f"{of(RATE, 11)} {ratio(RATE)} {per_user} {of(TPOT, 12)} {ratio(TPOT)} {of(TTFT, 12)} "
        f"{ratio(TTFT)}"
    ).rstrip()


def plot(shared: str, found: Sequence[Curve]) -> str:
    """An SVG of throughput against both latencies; the labels of points are their loads."""

    def series(metric: str) -> tuple[Series, ...]:
        lines = []
        for curve in found:
            points = [
                Point(record.metrics[metric], record.metrics[RATE], intensity(record)[0])
                for record in curve.records
                if metric in record.metrics
            ]
            if points:
                lines.append(Series(curve.name, tuple(points)))
        return tuple(lines)

    panels = [
        Panel(
            title="Against time per output token",
            x_label="TPOT p50 (ms)",
            y_label="output tokens per second",
            series=series(TPOT),
            also=lambda ms: 1e3 / ms,
            also_label="tokens per second and user",
        ),
        Panel(
            title="Against time to first token",
            x_label="TTFT p50 (ms)",
            y_label="output tokens per second",
            series=series(TTFT),
        ),
    ]
    drawn = [panel for panel in panels if panel.series]
    if not drawn:
        raise ConfigError(f"no record has {TPOT} or {TTFT}: nothing to plot")
    return draw("Throughput against latency", f"{shared}; points: requests in flight", drawn)


def place(records: Sequence[Record], results_dir: Path) -> Path:
    """Of the plot, beside its records."""
    first = records[0]
    return new_path(
        replace(first, workload=first.workload | {"name": "sweep"}), results_dir, ".svg"
    )


def write(path: Path, shared: str, found: Sequence[Curve]) -> None:
    """Raises ConfigError when the file cannot be written."""
    drawing = plot(shared, found)
    try:
        path.write_text(drawing)
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror}") from None
