"""From stamps to numbers, to the console table, to vLLM's names, to a comparison."""

from __future__ import annotations

import math

import msgspec
import pytest

from nanovllm.bench.measure import Sample, Spread, Summary, metrics, summarise
from nanovllm.bench.outcome import Outcome
from nanovllm.bench.report import compare, engine_facts, samples_of, table, vllm_json
from nanovllm.server.metrics import Metrics, render
from nanovllm.wire import Stats
from tests.unit.test_record import RECORD

# Two requests of 4 and 2 tokens; the first one's second chunk carries two tokens.
SAMPLES = [
    Sample(sent=10.0, stamps=[10.1, 10.2, 10.4], input_tokens=7, output_tokens=4, cached_tokens=3),
    Sample(sent=10.3, stamps=[10.5, 12.3], input_tokens=5, output_tokens=2),
]
LOST = Sample(sent=10.0, stamps=[10.1], input_tokens=9, output_tokens=9, error="HTTP 503: full")


def near(value: float) -> object:
    return pytest.approx(value, abs=1e-6)


def outcome(summary: Summary, **workload: object) -> Outcome:
    record = msgspec.structs.replace(RECORD, kind="serve", workload=workload)
    return Outcome(summary=summary, engine={"Preemptions": 3.0}, record=record)


def test_numbers_by_hand() -> None:
    summary = summarise([*SAMPLES, LOST])
    assert (summary.completed, summary.failed, summary.errors) == (2, 1, {"HTTP 503: full": 1})
    assert summary.duration_s == near(2.3)
    assert (summary.input_tokens, summary.output_tokens, summary.cached_tokens) == (12, 6, 3)
    assert summary.output_tokens_per_s == near(6 / 2.3)
    assert (summary.ttft.mean, summary.ttft.max) == (near(150.0), near(200.0))
    assert (summary.tpot.mean, summary.tpot.max) == (near((100 + 1800) / 2), near(1800.0))
    assert (summary.itl.count, summary.itl.mean) == (3, near((100 + 200 + 1800) / 3))
    assert summary.itl.std == near(math.sqrt(sum((x - 700) ** 2 for x in (100, 200, 1800)) / 3))
    assert (summary.e2el.p50, summary.e2el.p99) == (near(1200.0), near(400 + 0.99 * 1600))
    assert summary.peak_concurrent == 2
    assert summary.peak_tokens_per_s == near(5.0)  # all of the first, half of the second


def test_one_token_has_no_tpot_and_no_itl() -> None:
    summary = summarise([Sample(sent=0.0, stamps=[0.5], input_tokens=1, output_tokens=1)])
    assert (summary.ttft.p50, summary.tpot, summary.itl) == (near(500.0), Spread(), Spread())
    found = metrics(summary)
    assert found["ttft_p50_ms"] == near(500.0)
    assert not [name for name in found if name.startswith(("tpot", "itl"))]


def test_requests_that_do_not_overlap_are_not_concurrent() -> None:
    one, other = (Sample(sent=t, stamps=[t + 1.0], output_tokens=1) for t in (0.0, 1.0))
    assert summarise([one, other]).peak_concurrent == 1


def test_goodput_counts_requests_within_every_goal() -> None:
    assert summarise(SAMPLES).num_good is None
    assert summarise(SAMPLES, {"ttft": 150.0}).num_good == 1
    assert summarise(SAMPLES, {"ttft": 250.0}).num_good == 2
    assert summarise(SAMPLES, {"ttft": 250.0, "tpot": 500.0}).num_good == 1
    assert summarise([*SAMPLES, LOST], {"e2el": 9e9}).num_good == 2


def test_more_than_one_percent_of_failures_makes_a_run_invalid() -> None:
    assert summarise(SAMPLES[:1] * 99 + [LOST]).verdict == ""
    assert summarise(SAMPLES[:1] * 98 + [LOST] * 2).verdict == (
        "invalid: 2 of 100 requests failed, more than 1%"
    )
    assert summarise([LOST]).verdict.startswith("invalid: 1 of 1")
    assert summarise([]).is_valid is False


def test_metric_names_of_a_record() -> None:
    found = metrics(summarise(SAMPLES))
    assert found["output_tokens_per_s"] == near(6 / 2.3)
    assert found["duration_s"] == near(2.3)
    assert found["ttft_p50_ms"] == near(150.0)
    assert found["ttft_p99_ms"] == near(199.0)
    assert found["tpot_p50_ms"] == near(950.0)
    assert found["itl_p99_ms"] == near(200 + 0.98 * 1600)
    assert found["e2e_p50_ms"] == near(1200.0)


def test_table_has_vllms_layout() -> None:
    summary = summarise([*SAMPLES, LOST], {"ttft": 150.0})
    text = table(outcome(summary, concurrency=2, request_rate=None))
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[:6] == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     2",
        "Failed requests:                         1",
        "Maximum request concurrency:             2",
        "Benchmark duration (s):                  2.30",
        "Total input tokens:                      12",
    ]
    assert lines[6:13] == [
        "Total generated tokens:                  6",
        "Request throughput (req/s):              0.87",
        "Request goodput (req/s):                 0.43",
        "Output token throughput (tok/s):         2.61",
        "Peak output token throughput (tok/s):    5.00",
        "Peak concurrent requests:                2.00",
        "Total token throughput (tok/s):          7.83",
    ]
    assert "---------------Time to First Token----------------" in lines
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    assert "---------------Inter-token Latency----------------" in lines
    assert "----------------End-to-end Latency----------------" in lines
    assert "----------------Engine (nanovllm)-----------------" in lines
    for line in (
        "Mean TTFT (ms):                          150.00",
        "P99 TTFT (ms):                           199.00",
        "Median TPOT (ms):                        950.00",
        "Max ITL (ms):                            1800.00",
        "P50 E2EL (ms):                           1200.00",
        "Preemptions:                             3.00",
    ):
        assert line in lines
    assert lines[-3:] == [
        "=" * 50,
        "1 x HTTP 503: full",
        "invalid: 1 of 3 requests failed, more than 1%",
    ]


def test_json_has_vllms_names() -> None:
    load = {"concurrency": None, "request_rate": 2.5, "burstiness": 1.0}
    shown = vllm_json(outcome(summarise(SAMPLES), **load))
    assert (shown["model_id"], shown["date"]) == ("Qwen/Qwen3-0.6B", RECORD.started_at)
    assert shown["total_output_tokens"] == 6
    assert shown["output_throughput"] == near(6 / 2.3)
    assert shown["total_token_throughput"] == near(18 / 2.3)
    assert (shown["request_rate"], shown["max_concurrency"]) == (2.5, None)
    assert (shown["mean_ttft_ms"], shown["median_ttft_ms"]) == (near(150.0), near(150.0))
    assert shown["p99_itl_ms"] == near(200 + 0.98 * 1600)
    assert shown["std_e2el_ms"] == near(800.0)
    assert shown["tokens_per_second"] == near(18 / 2.3)
    keys = {f"{s}_{m}_ms" for s in ("mean", "median", "std", "p50", "p90", "p95", "p99")
            for m in ("ttft", "tpot", "itl", "e2el")}  # fmt: skip
    assert keys <= shown.keys()


def test_engine_facts_are_gains_since_before() -> None:
    before = {
        'vllm:num_preemptions_total{engine="0"}': 4.0,
        'nanovllm:graph_steps_total{model_name="m",engine="0",mode="FULL",phase="decode"}': 10.0,
        'nanovllm:graph_steps_total{model_name="m",engine="0",mode="NONE",phase="mixed"}': 5.0,
    }
    after = {
        'vllm:num_preemptions_total{engine="0"}': 6.0,
        "vllm:prefix_cache_hits_total": 30.0,
        "vllm:prefix_cache_queries_total": 120.0,
        'nanovllm:graph_steps_total{model_name="m",engine="0",mode="FULL",phase="decode"}': 110.0,
        'nanovllm:graph_steps_total{model_name="m",engine="0",mode="NONE",phase="mixed"}': 5.0,
        "unrelated": 1.0,
    }
    peaks = {'vllm:kv_cache_usage_perc{engine="0"}': 0.75}
    assert engine_facts(before, after, peaks) == {
        "Steps FULL/decode": 100.0,
        "Prefix cache hits (%)": 25.0,
        "Preemptions": 2.0,
        "Peak KV cache usage (%)": 75.0,
    }
    assert engine_facts({}, {}, {}) == {}


def test_engine_facts_come_from_our_own_metrics_page() -> None:
    def page(stats: Stats) -> dict[str, float]:
        return samples_of(render(Metrics(), stats, model="m", page_tokens=64, num_pages=9).decode())

    before = page(Stats(num_preemptions=1, host_bubble_s=0.5, steps_by_mode={"FULL/decode": 3},
                        num_steps=3, host_s={"plan": 1.0}))  # fmt: skip
    after = page(Stats(num_preemptions=1, host_bubble_s=0.75, padded_tokens=8, num_steps=11,
                       host_s={"plan": 1.0004, "launch": 0.0008}, host_step_p50_s=150e-6,
                       steps_by_mode={"FULL/decode": 9, "NONE/structured": 2}))  # fmt: skip
    found = engine_facts(before, after, {})
    assert {name: round(value, 6) for name, value in found.items()} == {
        "Steps FULL/decode": 6,
        "Steps NONE/structured": 2,
        "Preemptions": 0,
        "Padded tokens": 8,
        "Host bubble (s)": 0.25,
        "Host us/step plan": 50.0,
        "Host us/step launch": 100.0,
        "Host us/step p50": 150.0,
    }


def test_compare_shows_the_ablation_and_the_ratios() -> None:
    other = msgspec.structs.replace(
        RECORD,
        changed={"load.format": "dummy", "schedule.depth": 0},
        metrics={"output_tokens_per_s": 50.0, "ttft_p50_ms": 30.0, "new_s": 1.0},
    )
    lines = compare(RECORD, other).splitlines()
    assert "changed.schedule.depth: - -> 0" in lines
    assert not [line for line in lines if line.startswith(("workload.", "machine"))]
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert rows["output_tokens_per_s"] == ["100.000", "50.000", "0.500"]
    assert rows["ttft_p50_ms"] == ["20.000", "30.000", "1.500"]
    assert "only in A: duration_s" in lines and "only in B: new_s" in lines
