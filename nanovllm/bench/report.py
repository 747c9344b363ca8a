"""How the numbers of a run are shown: as a console table, or a file with vLLM's names.

Decision: the table's layout and names are vLLM's, so that scripts written for its output read ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from nanovllm.bench.measure import Outcome

WIDTH = 50
LINES = (  # label, metric or part of the load, digits
    ("Successful requests", "completed", 0),
    ("Failed requests", "failed", 0),
    ("Maximum request concurrency", "concurrency", 0),
    ("Request rate configured (RPS)", "request_rate", 2),
    ("Benchmark duration (s)", "duration_s", 2),
    ("Total input tokens", "input_tokens", 0),
    ("Total generated tokens", "output_tokens", 0),
    ("Request throughput (req/s)", "requests_per_s", 2),
    ("Request goodput (req/s)", "good_requests_per_s", 2),
    ("Output token throughput (tok/s)", "output_tokens_per_s", 2),
    ("Peak output token throughput (tok/s)", "peak_output_tokens_per_s", 2),
    ("Peak concurrent requests", "peak_concurrent", 2),
    ("Total token throughput (tok/s)", "total_tokens_per_s", 2),
)
HEADS = {
    "TTFT": "Time to First Token",
    "TPOT": "Time per Output Token (excl. 1st token)",
    "ITL": "Inter-token Latency",
    "E2EL": "End-to-end Latency",
}
SHOWN = {"Mean": "mean", "Median": "p50", "P50": "p50", "P90": "p90", "P95": "p95", "P99": "p99"}
VLLM = {  # our names, and its
    "concurrency": ("max_concurrency",),
    "completed": ("completed", "num_requests"),
    "failed": ("failed",),
    "duration_s": ("duration", "elapsed_time"),
    "input_tokens": ("total_input_tokens",),
    "output_tokens": ("total_output_tokens",),
    "good_requests_per_s": ("request_goodput",),
    "requests_per_s": ("request_throughput", "requests_per_second"),
    "output_tokens_per_s": ("output_throughput",),
    "peak_output_tokens_per_s": ("max_output_tokens_per_s",),
    "peak_concurrent": ("max_concurrent_requests",),
    "total_tokens_per_s": ("total_token_throughput", "tokens_per_second"),
}
MAX_ERRORS = 5  # kinds of errors listed
STEPS = "nanovllm:graph_steps_total"
GAINS = {  # lines of the table: counters of the server
    "Preemptions": "vllm:num_preemptions_total",
    "Padded tokens": "nanovllm:graph_padded_tokens_total",
    "Host bubble (s)": "nanovllm:host_bubble_seconds_total",
}


def table(outcome: Outcome) -> str:
    record = outcome.record
    values = record.workload | record.metrics
    mode = "Offline" if record.kind == "offline" else "Serving"
    lines = [f" {mode} Benchmark Result ".center(WIDTH, "=")]
    for label, name, digits in LINES:
        if values.get(name) is not None:
            lines.append(_line(label, values[name], digits))
    for short, head in HEADS.items():
        lines.append(head.center(WIDTH, "-"))
        name = "e2e" if short == "E2EL" else short.lower()
        for shown, key in (SHOWN | {"Max": "max"} if short == "ITL" else SHOWN).items():
            lines.append(_line(f"{shown} {short} (ms)", values.get(f"{name}_{key}_ms", 0.0)))
    if outcome.engine:
        lines.append("Engine (nanovllm)".center(WIDTH, "-"))
        lines += [_line(label, value) for label, value in outcome.engine.items()]
    lines.append("=" * WIDTH)
    lines += [f"{n} x {error}" for error, n in [*outcome.errors.items()][:MAX_ERRORS]]
    return "\n".join([*lines, record.notes]).rstrip()


def vllm_json(outcome: Outcome) -> dict[str, object]:
    """The file of `vllm bench serve --save-result`, and the keys of `vllm bench throughput`."""
    record = outcome.record
    values = record.workload | record.metrics
    found = {theirs: values.get(ours) for ours, names in VLLM.items() for theirs in names}
    found |= {"date": record.started_at, "backend": "nanovllm", "errors": outcome.errors}
    found |= dict.fromkeys(("model_id", "tokenizer_id"), record.recipe["model"])
    found |= {"num_prompts": values["completed"] + values["failed"]}
    found["request_rate"] = values.get("request_rate") or "inf"
    for short in map(str.lower, HEADS):
        for key, ours in (SHOWN | {"Std": "std"}).items():
            name = "e2e" if short == "e2el" else short
            found[f"{key.lower()}_{short}_ms"] = values.get(f"{name}_{ours}_ms", 0.0)
    return found


def samples_of(page: str) -> dict[str, float]:
    """A metrics page's values by name and labels."""
    lines = (line.rsplit(" ", 1) for line in page.splitlines() if line and line[0] != "#")
    return {parts[0]: float(parts[1]) for parts in lines if len(parts) == 2}


def engine_facts(
    before: Mapping[str, float], after: Mapping[str, float], peaks: Mapping[str, float]
) -> dict[str, float]:
    """What the engine's metrics say of a run; only what it exports."""
    gains = {key: value - before.get(key, 0.0) for key, value in after.items()}

    def gained(name: str) -> float | None:
        found = [gains[key] for key, _ in labelled(gains, name)]
        return sum(found) if found else None

    facts: dict[str, float] = {}
    for key, labels in labelled(gains, STEPS):
        if gains[key]:
            facts[f"Steps {labels['mode']}/{labels['phase']}"] = gains[key]
    hits, asked = gained("vllm:prefix_cache_hits_total"), gained("vllm:prefix_cache_queries_total")
    if hits is not None and asked:
        facts["Prefix cache hits (%)"] = 100.0 * hits / asked
    facts |= {shown: total for shown, name in GAINS.items() if (total := gained(name)) is not None}
    if steps := gained("nanovllm:steps_total"):
        for key, labels in labelled(gains, "nanovllm:host_seconds_total"):
            facts[f"Host us/step {labels['part']}"] = 1e6 * gains[key] / steps
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


def _line(label: str, value: float, digits: int = 2) -> str:
    return f"{label + ':':<40} {value:<10.{digits}f}"
