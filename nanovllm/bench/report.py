"""Reports of a run: a console table, and a file with vLLM's key names.

Decision: the table has vLLM's layout and names, so that scripts for its output work here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from nanovllm.bench.measure import Outcome

WIDTH = 50
LINES = (  # label, metric or field of the load, digits, names in vLLM's files
    ("Successful requests", "completed", 0, "completed num_requests"),
    ("Failed requests", "failed", 0, "failed"),
    ("Maximum request concurrency", "concurrency", 0, "max_concurrency"),
    ("Request rate configured (RPS)", "request_rate", 2, "request_rate"),
    ("Benchmark duration (s)", "duration_s", 2, "duration elapsed_time"),
    ("Total input tokens", "input_tokens", 0, "total_input_tokens"),
    ("Total generated tokens", "output_tokens", 0, "total_output_tokens"),
    ("Request throughput (req/s)", "requests_per_s", 2, "request_throughput requests_per_second"),
    ("Request goodput (req/s)", "good_requests_per_s", 2, "request_goodput"),
    ("Output token throughput (tok/s)", "output_tokens_per_s", 2, "output_throughput"),
    ("Peak output token throughput (tok/s)", "peak_output_tokens_per_s", 2,
     "max_output_tokens_per_s"),
    ("Peak concurrent requests", "peak_concurrent", 0, "max_concurrent_requests"),
    ("Total token throughput (tok/s)", "total_tokens_per_s", 2,
     "total_token_throughput tokens_per_second"),
)  # fmt: skip
LATENCIES = (  # metric, short name, head
    ("ttft", "TTFT", "Time to First Token"),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    ("itl", "ITL", "Inter-token Latency"),
    ("e2e", "E2EL", "End-to-end Latency"),
)
SHOWN = {"Mean": "mean", "Median": "p50", "P90": "p90", "P95": "p95", "P99": "p99"}
IN_FILES = SHOWN | {"P50": "p50", "Std": "std"}
SPECULATION = (  # label, metric, digits, name in vLLM's files
    ("Acceptance rate (%)", "acceptance_rate_percent", 2, "spec_decode_acceptance_rate"),
    ("Acceptance length", "acceptance_length", 2, "spec_decode_acceptance_length"),
    ("Drafts", "num_drafts", 0, "spec_decode_num_drafts"),
    ("Draft tokens", "draft_tokens", 0, "spec_decode_draft_tokens"),
    ("Accepted tokens", "accepted_tokens", 0, "spec_decode_accepted_tokens"),
)
POSITION = "acceptance_percent_position_"  # prefix of the metrics by position
MAX_ERRORS = 5  # maximum kinds of errors listed
MEASURED = re.compile(
    r"\((%|s|ms)\)|\bus\b|\bper (second|minute)\b"
)  # in a label; others are counts
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
    for label, name, digits, _ in LINES:
        if values.get(name) is not None:
            lines.append(_line(label, values[name], digits))
    for name, short, head in LATENCIES:
        lines.append(head.center(WIDTH, "-"))
        for shown, key in (SHOWN | {"Max": "max"} if short == "ITL" else SHOWN).items():
            lines.append(_line(f"{shown} {short} (ms)", values.get(f"{name}_{key}_ms", 0.0)))
        if short == "ITL":
            lines.append(_line("Max gap between chunks (ms)", values.get("icl_max_ms", 0.0)))
    if "acceptance_length" in values:
        lines.append("Speculative Decoding".center(WIDTH, "-"))
        lines += [_line(label, values[name], digits) for label, name, digits, _ in SPECULATION]
        lines.append("Per-position acceptance (%):")
        lines += [_line(f"  Position {i}", rate) for i, rate in enumerate(positions_of(values))]
    if outcome.conversations:
        lines.append("Agents".center(WIDTH, "-"))
        lines += [
            _line(label, value, 2 if MEASURED.search(label) else 0)
            for label, value in outcome.conversations.items()
        ]
    if outcome.engine:
        lines.append("Engine (nanovllm)".center(WIDTH, "-"))
        for label, value in outcome.engine.items():
            lines.append(_line(label, value, 2 if MEASURED.search(label) else 0))
    lines.append("=" * WIDTH)
    lines += [f"{n} x {error}" for error, n in [*outcome.errors.items()][:MAX_ERRORS]]
    return "\n".join([*lines, record.notes]).rstrip()


def vllm_json(outcome: Outcome) -> dict[str, object]:
    """Return the content of `vllm bench serve --save-result`, with keys of `bench throughput`."""
    record = outcome.record
    values = record.workload | record.metrics
    fields: dict[str, Any] = {}
    for _, ours, digits, names in LINES:
        fields |= dict.fromkeys(names.split(), _whole(values.get(ours), digits))
    fields |= {"date": record.started_at, "backend": "nanovllm", "errors": outcome.errors}
    fields |= dict.fromkeys(("model_id", "tokenizer_id"), record.recipe["model"])
    fields |= {"num_prompts": round(values["completed"] + values["failed"])}
    fields["request_rate"] = fields["request_rate"] or "inf"
    for name, short, _ in LATENCIES:
        for key, ours in IN_FILES.items():
            fields[f"{key}_{short}_ms".lower()] = values.get(f"{name}_{ours}_ms", 0.0)
    if "acceptance_length" in values:
        fields |= {theirs: _whole(values[ours], digits) for _, ours, digits, theirs in SPECULATION}
        rates = [rate / 100 for rate in positions_of(values)]
        fields["spec_decode_per_position_acceptance_rates"] = rates
    return fields


def samples_of(page: str) -> dict[str, float]:
    """Return a metrics page's values by name and labels."""
    values: dict[str, float] = {}
    for line in page.splitlines():
        name, space, value = line.rpartition(" ")
        if line[:1] != "#" and space:
            with suppress(ValueError):  # of a server whose page has another form
                values[name] = float(value)
    return values


def positions_of(values: Mapping[str, float]) -> list[float]:
    """Return the percentage of steps with drafts that accepted the draft at each position."""
    return [value for name, value in values.items() if name.startswith(POSITION)]


def speculation(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return a run's metrics of drafts; {} without drafts.

    The definitions are vLLM's. The length is the number of tokens per request and step with drafts.
    Rates by position are fractions of these steps.
    """
    gains = {key: value - before.get(key, 0.0) for key, value in after.items()}
    total = "vllm:spec_decode_num_{}_total"
    names = ("drafts", "draft_tokens", "accepted_tokens")
    steps, drafts, accepted = (by_label(gains, total.format(n)).get("", 0.0) for n in names)
    if not steps:
        return {}
    each = by_label(gains, total.format("accepted_tokens_per_pos"), "position")
    return {
        "acceptance_rate_percent": 100.0 * accepted / drafts,
        "acceptance_length": 1.0 + accepted / steps,
        "num_drafts": steps,
        "draft_tokens": drafts,
        "accepted_tokens": accepted,
    } | {f"{POSITION}{at}": 100.0 * count / steps for at, count in each.items()}


def engine_facts(
    before: Mapping[str, float], after: Mapping[str, float], peaks: Mapping[str, float]
) -> dict[str, float]:
    """Return the table's lines from the engine's metrics, as far as they are exported."""
    gains = {key: value - before.get(key, 0.0) for key, value in after.items()}
    by_kind = by_label(gains, "nanovllm:graph_steps_total", "mode", "phase")
    facts = {f"Steps {kind}": count for kind, count in by_kind.items() if count}
    hits = by_label(gains, "vllm:prefix_cache_hits_total").get("")
    num_queries = by_label(gains, "vllm:prefix_cache_queries_total").get("")
    if hits is not None and num_queries:
        facts["Prefix cache hits (%)"] = 100.0 * hits / num_queries
    for shown, name in GAINS.items():
        if (gain := by_label(gains, name).get("")) is not None:
            facts[shown] = gain
    if steps := by_label(gains, "nanovllm:steps_total").get(""):
        by_part = by_label(gains, "nanovllm:host_seconds_total", "part")
        facts |= {f"Host us/step {part}": 1e6 * s / steps for part, s in by_part.items()}
    if p50 := by_label(after, "nanovllm:host_step_p50_seconds", "engine"):
        facts["Host us/step p50"] = 1e6 * max(p50.values())
    if usage := by_label(peaks, "vllm:kv_cache_usage_perc", "engine"):
        facts["Peak KV cache usage (%)"] = 100.0 * max(usage.values())
    return facts


def by_label(samples: Mapping[str, float], name: str, *labels: str) -> dict[str, float]:
    """Return sums of a metric's samples by label values (`FULL/decode`); one sum without labels."""
    sums: dict[str, float] = {}
    for key, value in samples.items():
        if key.split("{", 1)[0] == name:
            values = dict(re.findall(r'(\w+)="([^"]*)"', key))
            group = "/".join(values.get(label, "") for label in labels)
            sums[group] = sums.get(group, 0.0) + value
    return sums


def _whole(value: float | None, digits: int) -> float | None:
    """Return a count as an integer."""
    return round(value) if value is not None and digits == 0 else value


def _line(label: str, value: float, digits: int = 2) -> str:
    return f"{label + ':':<40} {value:<10.{digits}f}"
