"""Records of several runs side by side: which belong to one curve, a table of ratios, a plot.

Knows how a record is read, not how it was measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from msgspec.structs import replace

from nanovllm.bench import plot
from nanovllm.bench.plot import Panel, Point
from nanovllm.bench.record import UNNAMED, Record, new_path
from nanovllm.config import ConfigError

RATE, TPOT, TTFT = "output_tokens_per_s", "tpot_p50_ms", "ttft_p50_ms"
SPEED = "output tokens per second"
LOADS = ("serve", "offline")  # the kinds of record that have throughput and latency


Curves = Mapping[str, Sequence[Record]]  # named after their differences; least load first


def parse(text: str) -> tuple[int, ...]:
    """`1,4,16`: the concurrencies of a sweep. Raises ConfigError."""
    if not re.fullmatch(r"[1-9]\d*(, ?[1-9]\d*)*", text):
        raise ConfigError(f"--sweep {text}: write concurrencies, 1 or more each, as in 1,4,16,64")
    found = tuple(map(int, text.split(",")))
    if len(set(found)) < len(found):
        raise ConfigError(f"--sweep {text}: names a concurrency twice")
    return found


def curves(records: Sequence[Record]) -> tuple[str, Curves]:
    """What all records share, and curves of those that differ in concurrency or rate alone.

    Raises ConfigError for records without a load.
    """
    for record in records:
        if record.kind not in LOADS:
            raise ConfigError(f"a record of kind {record.kind} has no throughput to compare")
    common = set.intersection(*({*changes(record)} for record in records))
    own = [" ".join(one for one in changes(record) if one not in common) for record in records]
    keys = pd.DataFrame(map(facts, records)).assign(changed=[one or "unchanged" for one in own])
    loaded = keys.assign(load=[intensity(record)[0] for record in records])
    again = loaded.groupby([*loaded]).cumcount()  # the same measured twice is two curves
    keys["run"] = [f"run {count + 1}" for count in again]
    differing = [name for name in keys if keys[name].nunique() > 1]
    shared = [keys[name][0] for name in keys if name not in (*differing, "changed", "run")]
    shared += [change for change in changes(records[0]) if change in common]
    found: dict[str, list[Record]] = {}
    for names, record in zip(keys[differing or ["model"]].to_numpy(), records, strict=True):
        found.setdefault(", ".join(names), []).append(record)
    for group in found.values():
        group.sort(key=lambda record: intensity(record)[1])
    return ", ".join(shared), found


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


def table(shared: str, found: Curves) -> str:
    """Per load, every curve's speed and its ratio to the first curve that has this load."""
    columns = ((RATE, "tok/s"), (TPOT, "TPOT p50 ms"), (TTFT, "TTFT p50 ms"))
    head = " ".join(f"{title:>12} {'ratio':>6}" for _, title in columns)
    lines = [shared, f"{'load':>6} {head}"]
    firsts: dict[str, Mapping[str, float]] = {}
    rows = [(name, record) for name, records in found.items() for record in records]
    for name, record in sorted(rows, key=lambda row: intensity(row[1])[1]):
        load, metrics = intensity(record)[0], record.metrics
        first, text = firsts.setdefault(load, metrics), f"{load:>6}"
        for metric, _ in columns:
            value, base = metrics.get(metric), first.get(metric)
            ratio = f"{value / base:.3f}" if value and base and first is not metrics else ""
            text += f" {'-' if value is None else f'{value:,.2f}':>12} {ratio:>6}"
        lines.append(f"{text}  {name}")
    return "\n".join(lines)


def draw(path: Path, shared: str, found: Curves) -> None:
    """Throughput against both latencies; points are labelled with their loads.

    Raises ConfigError when there is nothing to draw, or no file to be written.
    """
    panels = []
    for metric, head, unit in (
        (TPOT, "Against time per output token", "TPOT p50 (ms)"),
        (TTFT, "Against time to first token", "TTFT p50 (ms)"),
    ):
        lines: dict[str, list[Point]] = {}
        for name, records in found.items():
            for one in records:
                if metric in one.metrics:
                    point = Point(one.metrics[metric], one.metrics[RATE], intensity(one)[0])
                    lines.setdefault(name, []).append(point)
        if lines:
            panels.append(Panel(head, unit, SPEED, lines))
    if not panels:
        raise ConfigError(f"no record has {TPOT} or {TTFT}: nothing to plot")
    plot.draw(path, f"Throughput against latency: {shared}", panels)


def place(records: Sequence[Record], results_dir: Path, name: str, suffix: str) -> Path:
    """Of what is said of these records together, beside them."""
    first = records[0]
    return new_path(replace(first, workload=first.workload | {"name": name}), results_dir, suffix)
