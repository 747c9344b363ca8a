"""Comparison of records of several runs: metric by metric, as a table of ratios, as a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from nanovllm.bench import store
from nanovllm.bench.measure import COUNT
from nanovllm.bench.record import Record
from nanovllm.config import ConfigError

RATE, TPOT, TTFT = "output_tokens_per_s", "tpot_p50_ms", "ttft_p50_ms"
PANELS = {  # panels of the plot: title and unit
    TPOT: ("Against time per output token", "TPOT p50 (ms)"),
    TTFT: ("Against time to first token", "TTFT p50 (ms)"),
}
# The first rows of a comparison, and the direction that is better.
BETTER: Mapping[str, Literal["higher", "lower"]] = {
    RATE: "higher", TTFT: "lower", "ttft_p99_ms": "lower",
    TPOT: "lower", "tpot_p99_ms": "lower", "e2e_p50_ms": "lower",
}  # fmt: skip
EQUAL = 0.005  # largest distance of a ratio from 1 that counts as equal
LOADS = ("serve", "offline")  # kinds of records with throughput and latency
LOG_ABOVE = 20.0  # an axis is logarithmic if its values differ by more than this factor
INCHES = (7.0, 4.6)  # size of a panel
# Colours that colour-blind readers can distinguish (Okabe and Ito).
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#999999"]
LOOKS = [*zip(COLOURS, "osD^vP", strict=False)]  # markers distinguish them in print


Curves = Mapping[str, Sequence[Record]]  # by their differences; records by increasing load


def curves(records: Sequence[Record]) -> tuple[str, Curves]:
    """Return the common properties of records, and curves of records that differ in load only.

    Raise ConfigError for records without a load.
    """
    import pandas as pd  # takes a quarter of a second, which runs of `bench` need not wait for

    for record in records:
        if record.kind not in LOADS:
            raise ConfigError(f"a record of kind {record.kind} has no throughput to compare")
    common = set.intersection(*({*changes(record)} for record in records))
    own = [" ".join(one for one in changes(record) if one not in common) for record in records]
    keys = pd.DataFrame(map(facts, records)).assign(changed=[one or "unchanged" for one in own])
    loaded = keys.assign(load=[intensity(record)[0] for record in records])
    again = loaded.groupby([*loaded]).cumcount() + 1  # repeated measurements are separate curves
    keys["run"] = "run " + again.astype(str)
    differing = [name for name in keys if keys[name].nunique() > 1]
    shared = [keys[name][0] for name in keys if name not in (*differing, "changed", "run")]
    shared += [change for change in changes(records[0]) if change in common]
    groups: dict[str, list[Record]] = {}
    for names, record in zip(keys[differing or ["model"]].to_numpy(), records, strict=True):
        groups.setdefault(", ".join(names), []).append(record)
    for group in groups.values():
        group.sort(key=lambda record: intensity(record)[1])
    return ", ".join(shared), groups


def facts(record: Record) -> dict[str, str]:
    """Return the properties that all records of a curve share."""
    load = record.workload
    if "input_len" in load:
        lengths, forms = f"{load['input_len']} + {load['output_len']}", load["name"].split("-")[1:]
        work = " ".join([lengths, *forms, "tokens"])
    else:
        work = str(load["name"])
    return {
        "engine": record.engine,
        "model": record.model,
        "machine": record.machine.slug,
        "commit": record.version,
        "kind": "over HTTP" if record.kind == "serve" else "without HTTP",
        "work": work,
    }


def changes(record: Record) -> list[str]:
    """Return the changes of the recipe as KEY=VALUE."""
    return [f"{key}={value}" for key, value in record.altered.items()]


def intensity(record: Record) -> tuple[str, float]:
    """Return the load: `64` requests in flight, or `2.5/s` arrivals."""
    rate = record.workload.get("request_rate")
    if rate is not None:
        return f"{rate:g}/s", float(rate)
    count = record.workload["concurrency"]
    return str(count), float(count)


def table(shared: str, curves: Curves) -> str:
    """Return a table with each curve's speed and its ratio to the first curve, by load and work."""
    columns = ((RATE, "tok/s"), (TPOT, "TPOT p50 ms"), (TTFT, "TTFT p50 ms"))
    head = " ".join(f"{title:>12} {'ratio':>6}" for _, title in columns)
    lines = [shared, f"{'load':>6} {head}"]
    firsts: dict[tuple[str, str], Mapping[str, float]] = {}
    rows = [(name, record) for name, records in curves.items() for record in records]
    for name, record in sorted(rows, key=lambda row: intensity(row[1])[1]):
        load, metrics = intensity(record)[0], record.metrics
        first, text = firsts.setdefault((load, facts(record)["work"]), metrics), f"{load:>6}"
        for metric, _ in columns:
            value, base = metrics.get(metric), first.get(metric)
            ratio = f"{value / base:.3f}" if value and base and first is not metrics else ""
            text += f" {'-' if value is None else f'{value:,.2f}':>12} {ratio:>6}"
        lines.append(f"{text}  {name}")
    return "\n".join(lines)


def missing() -> str | None:
    """Return the reason why plots are impossible, or None."""
    return None if find_spec("matplotlib") else "plots need matplotlib: pip install nanovllm[plot]"


def draw(path: Path, shared: str, curves: Curves) -> None:
    """Plot throughput over both latencies, with loads as labels of points.

    Raise ConfigError like `save`, or if no record has latencies.
    """
    import pandas as pd

    runs = pd.DataFrame(
        {"curve": name, "load": intensity(record)[0], **record.metrics}
        for name, records in curves.items()
        for record in records
    )
    panels = [metric for metric in PANELS if metric in runs]
    if not panels:
        raise ConfigError(f"no record has {TPOT} or {TTFT}: nothing to plot")
    figure = new_figure(INCHES[0] * len(panels), INCHES[1] + 0.25 * len(curves))
    figure.suptitle(f"Throughput against latency: {shared}")
    looks = dict(zip(curves, cycle(LOOKS), strict=False))  # the same in all panels
    for at, metric in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), at + 1)
        title, unit = PANELS[metric]
        measured = runs.dropna(subset=metric)
        axes.set(title=title, xlabel=unit, ylabel="output tokens per second")
        axes.set(xscale=scale(measured[metric]), yscale=scale(measured[RATE]))
        for name, curve in measured.groupby("curve", sort=False):
            colour, marker = looks[name]
            axes.plot(curve[metric], curve[RATE], label=name, color=colour, marker=marker)
            for load, *point in curve[["load", metric, RATE]].to_numpy():
                axes.annotate(load, point, (4, 4), textcoords="offset points", fontsize=8)
        axes.grid(visible=True, alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower left")
    save(figure, path)


def new_figure(width: float, height: float) -> Any:  # noqa: ANN401
    """Return an empty figure; sizes are inches. Raise ConfigError without matplotlib."""
    if problem := missing():
        raise ConfigError(problem)
    from matplotlib.figure import Figure

    return Figure((width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:  # noqa: ANN401
    """Save an SVG, PNG or PDF, by the suffix. Raise ConfigError if it cannot be written."""
    import matplotlib

    try:
        with matplotlib.rc_context({"svg.fonttype": "none"}):  # text instead of outlines
            figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # no such folder, or no such format
        raise ConfigError(f"--plot {path}: {error}") from None


def scale(values: Sequence[float]) -> str:
    return "log" if 0 < min(values) * LOG_ABOVE < max(values) else "linear"


def plot_path(records: Sequence[Record], results_dir: Path, name: str) -> Path:
    """Return the path of a new plot, with the name of the first record."""
    first = records[0]
    return store.plot_path(replace(first, workload=first.workload | {"name": name}), results_dir)


def command(records: Sequence[Record], results_dir: Path) -> str:
    """Return the command that prints these records' table again."""
    ids = " ".join(store.entry_of(record).id for record in records)
    folder = "" if results_dir == Path("results") else f" --results-dir {results_dir}"
    return f"nanovllm bench --compare {ids}{folder}"


def compare(a: Record, b: Record) -> str:
    """Return the differences of two records: six main metrics, then all metrics."""
    import pandas as pd

    lines = [f"A  {_origin(a)}", f"B  {_origin(b)}"]
    for label, left, right in (
        ("changed.", a.changed, b.changed),
        ("workload.", a.workload, b.workload),
        ("", {"machine": a.machine.slug}, {"machine": b.machine.slug}),
    ):
        keys = [key for key in left | right if left.get(key) != right.get(key)]
        lines += [f"{label}{key}: {left.get(key, '-')} -> {right.get(key, '-')}" for key in keys]
    metrics = pd.DataFrame({"A": a.metrics, "B": b.metrics})
    ratios = (metrics["B"] / metrics["A"]).where(metrics["A"] != 0)
    shown = metrics.apply(lambda row: [number(row.name, value) for value in row], axis="columns")
    table = pd.DataFrame([*shown], index=metrics.index, columns=["A", "B"])
    table["B/A"] = ["-" if pd.isna(ratio) else f"{ratio:,.3f}" for ratio in ratios]
    table.columns.name = "metric"
    if present := [name for name in BETTER if name in metrics.dropna().index]:
        first = table.loc[present].copy()
        first["better"] = [verdict(ratios[name], BETTER[name]) for name in present]
        lines += [first.to_string(), "all metrics:"]
    return "\n".join([*lines, table.to_string()])


def number(metric: object, value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if COUNT.fullmatch(str(metric)) else f"{value:,.3f}"


def verdict(ratio: float, better: Literal["higher", "lower"]) -> str:
    """Return which record is better by a metric, and the direction that is better."""
    if math.isnan(ratio) or abs(ratio - 1) < EQUAL:
        return f"equal ({better} is better)"
    return f"{'B' if (ratio > 1) == (better == 'higher') else 'A'} ({better} is better)"


def _origin(record: Record) -> str:
    note = f"  ({record.notes})" if record.notes else ""
    where = f"{record.version} {record.machine.slug}"
    return f"{record.started_at} {where} {record.recipe['model']}{note}"
