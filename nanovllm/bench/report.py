"""How the numbers of a run are shown: console table, JSON with vLLM's names, two records compared.

Decision: layout and names are vLLM's, so that scripts written for its output read ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from nanovllm.bench.measure import MAX_FAILED, Spread, Summary
from nanovllm.bench.record import Record
from nanovllm.wire import Stats

WIDTH = 50
HEADS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
SHOWN = ("mean", "median", "p50", "p90", "p95", "p99")
MAX_ERRORS = 5  # kinds of errors listed


def table(
    summary: Summary,
    *,
    title: str,
    concurrency: int | None,
    request_rate: float | None,
    engine: Mapping[str, float],
) -> str:
    duration = summary.duration_s
    lines = [
        title.center(WIDTH, "="),
        _line("Successful requests:", summary.completed),
        _line("Failed requests:", summary.failed),
    ]
    if concurrency is not None:
        lines.append(_line("Maximum request concurrency:", concurrency))
    if request_rate is not None:
        lines.append(_line("Request rate configured (RPS):", request_rate))
    lines += [
        _line("Benchmark duration (s):", duration),
        _line("Total input tokens:", summary.input_tokens),
        _line("Total generated tokens:", summary.output_tokens),
        _line("Request throughput (req/s):", summary.completed / duration),
    ]
    if summary.num_good is not None:
        lines.append(_line("Request goodput (req/s):", summary.num_good / duration))
    total = summary.input_tokens + summary.output_tokens
    lines += [
        _line("Output token throughput (tok/s):", summary.output_tokens_per_s),
        _line("Peak output token throughput (tok/s):", summary.peak_tokens_per_s),
        _line("Peak concurrent requests:", float(summary.peak_concurrent)),
        _line("Total token throughput (tok/s):", total / duration),
    ]
    for name, spread in summary.latencies().items():
        lines.append(HEADS[name].center(WIDTH, "-"))
        lines += _latency_lines(name.upper(), spread)
    if engine:
        lines.append("Engine (nanovllm)".center(WIDTH, "-"))
        lines += [_line(f"{name}:", value) for name, value in engine.items()]
    lines.append("=" * WIDTH)
    return "\n".join(lines + errors(summary))


def errors(summary: Summary) -> list[str]:
    """What failed how often, and what that means for the run."""
    worst = sorted(summary.errors.items(), key=lambda item: -item[1])[:MAX_ERRORS]
    lines = [f"{count} x {error}" for error, count in worst]
    return lines if summary.is_valid else [*lines, verdict(summary)]


def verdict(summary: Summary) -> str:
    """Empty for a valid run."""
    if summary.is_valid:
        return ""
    total = summary.completed + summary.failed
    return f"invalid: {summary.failed} of {total} requests failed, more than {MAX_FAILED:.0%}"


def vllm_json(
    summary: Summary,
    *,
    date: str,
    model: str,
    concurrency: int | None,
    request_rate: float | None,
    burstiness: float,
) -> dict[str, object]:
    """The file of `vllm bench serve --save-result`, and the keys of `vllm bench throughput`."""
    duration = summary.duration_s
    total = summary.input_tokens + summary.output_tokens
    num_good = summary.num_good
    found: dict[str, object] = {
        "date": date,
        "backend": "nanovllm",
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": summary.completed + summary.failed,
        "request_rate": "inf" if request_rate is None else request_rate,
        "burstiness": burstiness,
        "max_concurrency": concurrency,
        "duration": duration,
        "completed": summary.completed,
        "failed": summary.failed,
        "total_input_tokens": summary.input_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.completed / duration,
        "request_goodput": None if num_good is None else num_good / duration,
        "output_throughput": summary.output_tokens_per_s,
        "total_token_throughput": total / duration,
        "max_output_tokens_per_s": summary.peak_tokens_per_s,
        "max_concurrent_requests": summary.peak_concurrent,
        "elapsed_time": duration,
        "num_requests": summary.completed,
        "total_num_tokens": total,
        "requests_per_second": summary.completed / duration,
        "tokens_per_second": total / duration,
        "errors": summary.errors,
    }
    for name, spread in summary.latencies().items():
        for key in ("mean", "median", "std", "p50", "p90", "p95", "p99"):
            found[f"{key}_{name}_ms"] = getattr(spread, key)
    return found


def engine_facts(
    before: Mapping[str, float], after: Mapping[str, float], peaks: Mapping[str, float]
) -> dict[str, float]:
    """What the server's own metrics say of a run; only what it exports."""

    def gained(name: str) -> float | None:
        keys = [key for key in after if key.split("{", 1)[0] == name]
        return sum(after[key] - before.get(key, 0.0) for key in keys) if keys else None

    facts: dict[str, float] = {}
    for key, value in after.items():
        if key.startswith("nanovllm:graph_steps_total{") and value > before.get(key, 0.0):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', key))
            facts[f"Steps {labels['mode']}/{labels['phase']}"] = value - before.get(key, 0.0)
    hits, asked = gained("vllm:prefix_cache_hits_total"), gained("vllm:prefix_cache_queries_total")
    if hits is not None and asked:
        facts["Prefix cache hits (%)"] = 100.0 * hits / asked
    totals = {
        "Preemptions": "vllm:num_preemptions_total",
        "Padded tokens": "nanovllm:graph_padded_tokens_total",
        "Host bubble (s)": "nanovllm:host_bubble_seconds_total",
    }
    for shown, name in totals.items():
        total = gained(name)
        if total is not None:
            facts[shown] = total
    usage = [v for k, v in peaks.items() if k.startswith("vllm:kv_cache_usage_perc")]
    if usage:
        facts["Peak KV cache usage (%)"] = 100.0 * max(usage)
    return facts


def stats_facts(before: Stats, after: Stats) -> dict[str, float]:
    """The same from the engine's own counters, which it sends with its results."""
    facts: dict[str, float] = {
        f"Steps {mode}": count - before.steps_by_mode.get(mode, 0)
        for mode, count in after.steps_by_mode.items()
        if count > before.steps_by_mode.get(mode, 0)
    }
    facts["Preemptions"] = after.num_preemptions - before.num_preemptions
    facts["Padded tokens"] = after.padded_tokens - before.padded_tokens
    facts["Host bubble (s)"] = after.host_bubble_s - before.host_bubble_s
    return facts


def compare(a: Record, b: Record) -> str:
    """Every metric of both with b/a, under what else differs between the two."""
    lines = [f"A  {_origin(a)}", f"B  {_origin(b)}"]
    lines += _differences("changed", a.changed, b.changed)
    lines += _differences("workload", a.workload, b.workload)
    if a.machine.slug != b.machine.slug:
        lines.append(f"machine: {a.machine.slug} -> {b.machine.slug}")
    names = [name for name in a.metrics if name in b.metrics]
    width = max((len(name) for name in names), default=6)
    lines.append(f"{'metric':<{width}} {'A':>14} {'B':>14} {'B/A':>8}")
    for name in names:
        left, right = a.metrics[name], b.metrics[name]
        ratio = f"{right / left:.3f}" if left else "-"
        lines.append(f"{name:<{width}} {left:>14,.3f} {right:>14,.3f} {ratio:>8}")
    for side, mine, other in (("A", a, b), ("B", b, a)):
        lost = [name for name in mine.metrics if name not in other.metrics]
        if lost:
            lines.append(f"only in {side}: {', '.join(lost)}")
    return "\n".join(lines)


def _origin(record: Record) -> str:
    state = "-dirty" if record.dirty else ""
    note = f"  ({record.notes})" if record.notes else ""
    when = f"{record.started_at} {record.commit[:7] or 'unknown'}{state}"
    return f"{when} {record.machine.slug} {record.recipe['model']}{note}"


def _differences(label: str, a: Mapping[str, object], b: Mapping[str, object]) -> list[str]:
    keys = [key for key in {**a, **b} if a.get(key) != b.get(key)]
    return [f"{label}.{key}: {a.get(key, '-')} -> {b.get(key, '-')}" for key in keys]


def _latency_lines(name: str, spread: Spread) -> list[str]:
    keys = (*SHOWN, "max") if name == "ITL" else SHOWN
    return [_line(f"{key.capitalize()} {name} (ms):", float(getattr(spread, key))) for key in keys]


def _line(label: str, value: float) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {shown:<10}"
