"""How the numbers of a run are shown: console table, JSON with vLLM's names, two records compared.

Decision: layout and names are vLLM's, so that scripts written for its output read ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from nanovllm.bench.measure import Summary
from nanovllm.bench.outcome import Outcome
from nanovllm.bench.record import Record

WIDTH = 50
HEADS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
SHOWN = ("mean", "median", "p50", "p90", "p95", "p99")
MAX_ERRORS = 5  # kinds of errors listed
STEPS = "nanovllm:graph_steps_total"
GAINS = {  # lines of the table: counters of the server
    "Preemptions": "vllm:num_preemptions_total",
    "Padded tokens": "nanovllm:graph_padded_tokens_total",
    "Host bubble (s)": "nanovllm:host_bubble_seconds_total",
}


def table(outcome: Outcome) -> str:
    summary, load = outcome.summary, outcome.record.workload
    mode = "Offline" if outcome.record.kind == "offline" else "Serving"
    duration, total = summary.duration_s, summary.input_tokens + summary.output_tokens
    lines = [
        f" {mode} Benchmark Result ".center(WIDTH, "="),
        _line("Successful requests:", summary.completed),
        _line("Failed requests:", summary.failed),
    ]
    if load["concurrency"] is not None:
        lines.append(_line("Maximum request concurrency:", load["concurrency"]))
    if load["request_rate"] is not None:
        lines.append(_line("Request rate configured (RPS):", load["request_rate"]))
    lines += [
        _line("Benchmark duration (s):", duration),
        _line("Total input tokens:", summary.input_tokens),
        _line("Total generated tokens:", summary.output_tokens),
        _line("Request throughput (req/s):", summary.completed / duration),
    ]
    if summary.num_good is not None:
        lines.append(_line("Request goodput (req/s):", summary.num_good / duration))
    lines += [
        _line("Output token throughput (tok/s):", summary.output_tokens_per_s),
        _line("Peak output token throughput (tok/s):", summary.peak_tokens_per_s),
        _line("Peak concurrent requests:", float(summary.peak_concurrent)),
        _line("Total token throughput (tok/s):", total / duration),
    ]
    for name, spread in summary.latencies().items():
        lines.append(HEADS[name].center(WIDTH, "-"))
        for key in (*SHOWN, "max") if name == "itl" else SHOWN:
            label = f"{key.capitalize()} {name.upper()} (ms):"
            lines.append(_line(label, float(getattr(spread, key))))
    if outcome.engine:
        lines.append("Engine (nanovllm)".center(WIDTH, "-"))
        lines += [_line(f"{name}:", value) for name, value in outcome.engine.items()]
    return "\n".join([*lines, "=" * WIDTH, *errors(summary)])


def errors(summary: Summary) -> list[str]:
    """What failed how often, and what that means for the run."""
    worst = sorted(summary.errors.items(), key=lambda item: -item[1])[:MAX_ERRORS]
    lines = [f"{count} x {error}" for error, count in worst]
    return lines if summary.is_valid else [*lines, summary.verdict]


def vllm_json(outcome: Outcome) -> dict[str, object]:
    """The file of `vllm bench serve --save-result`, and the keys of `vllm bench throughput`."""
    summary, load, model = outcome.summary, outcome.record.workload, outcome.record.recipe["model"]
    duration, total = summary.duration_s, summary.input_tokens + summary.output_tokens
    good, rate = summary.num_good, load["request_rate"]
    found: dict[str, object] = {
        "date": outcome.record.started_at,
        "backend": "nanovllm",
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": summary.completed + summary.failed,
        "request_rate": "inf" if rate is None else rate,
        "burstiness": load["burstiness"],
        "max_concurrency": load["concurrency"],
        "completed": summary.completed,
        "failed": summary.failed,
        "total_input_tokens": summary.input_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_goodput": None if good is None else good / duration,
        "output_throughput": summary.output_tokens_per_s,
        "max_output_tokens_per_s": summary.peak_tokens_per_s,
        "max_concurrent_requests": summary.peak_concurrent,
        "num_requests": summary.completed,
        "total_num_tokens": total,
        "errors": summary.errors,
    }
    for value, names in (
        (duration, ("duration", "elapsed_time")),
        (summary.completed / duration, ("request_throughput", "requests_per_second")),
        (total / duration, ("total_token_throughput", "tokens_per_second")),
    ):
        found |= dict.fromkeys(names, value)
    for name, spread in summary.latencies().items():
        for key in (*SHOWN, "std"):
            found[f"{key}_{name}_ms"] = getattr(spread, key)
    return found


def samples_of(page: str) -> dict[str, float]:
    """A metrics page's values by name and labels."""
    lines = (line.rsplit(" ", 1) for line in page.splitlines() if line and line[0] != "#")
    return {parts[0]: float(parts[1]) for parts in lines if len(parts) == 2}


def engine_facts(
    before: Mapping[str, float], after: Mapping[str, float], peaks: Mapping[str, float]
) -> dict[str, float]:
    """What the engine's metrics say of a run; only what it exports."""

    def gained(name: str) -> float | None:
        keys = [key for key in after if key.split("{", 1)[0] == name]
        return sum(after[key] - before.get(key, 0.0) for key in keys) if keys else None

    facts: dict[str, float] = {}
    for key, labels in labelled(after, STEPS):
        if after[key] > before.get(key, 0.0):
            facts[f"Steps {labels['mode']}/{labels['phase']}"] = after[key] - before.get(key, 0.0)
    hits, asked = gained("vllm:prefix_cache_hits_total"), gained("vllm:prefix_cache_queries_total")
    if hits is not None and asked:
        facts["Prefix cache hits (%)"] = 100.0 * hits / asked
    facts |= {shown: total for shown, name in GAINS.items() if (total := gained(name)) is not None}
    if steps := gained("nanovllm:steps_total"):
        for key, labels in labelled(after, "nanovllm:host_seconds_total"):
            spent = after[key] - before.get(key, 0.0)
            facts[f"Host us/step {labels['part']}"] = 1e6 * spent / steps
    for key, _ in labelled(after, "nanovllm:host_step_p50_seconds"):
        facts["Host us/step p50"] = 1e6 * after[key]
    usage = [peaks[key] for key, _ in labelled(peaks, "vllm:kv_cache_usage_perc")]
    if usage:
        facts["Peak KV cache usage (%)"] = 100.0 * max(usage)
    return facts


def labelled(samples: Mapping[str, float], name: str) -> list[tuple[str, dict[str, str]]]:
    """The keys of one metric, with their labels."""
    found = [key for key in samples if key.split("{", 1)[0] == name]
    return [(key, dict(re.findall(r'(\w+)="([^"]*)"', key))) for key in found]


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


def _line(label: str, value: float) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {shown:<10}"
