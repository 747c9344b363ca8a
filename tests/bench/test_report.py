"""Metrics from timestamps, the console table, and comparisons."""

from __future__ import annotations

import msgspec
import pytest

from nanovllm.bench.measure import Outcome, Sample, concluded, summarise, verdict
from nanovllm.bench.report import engine_facts, samples_of, speculation, table, vllm_json
from nanovllm.bench.sweep import compare
from nanovllm.server.metrics import HttpCounts, Metrics, Seen, counted, render
from nanovllm.wire import Stats
from tests.bench.test_record import RECORD
from tests.server.fake_engine import READY

# Requests of 4 and 2 tokens. The second chunk of the first has two tokens.
SAMPLES = [
    Sample(sent=10.0, stamps=[10.1, 10.2, 10.4], input_tokens=7, output_tokens=4, cached_tokens=3),
    Sample(sent=10.3, stamps=[10.5, 12.3], input_tokens=5, output_tokens=2),
]
LOST = Sample(sent=10.0, stamps=[10.1], input_tokens=9, output_tokens=9, error="HTTP 503: full")


def near(value: float) -> object:
    return pytest.approx(value, abs=1e-6)


def outcome(samples: list[Sample], goals_ms: dict[str, float], **workload: object) -> Outcome:
    return concluded(
        kind="serve", started_at=RECORD.started_at, samples=samples, goals_ms=goals_ms,
        recipe=RECORD.recipe, changed={}, workload=workload, engine={"Preemptions": 3.0},
        extra={},
    )  # fmt: skip


def test_numbers_by_hand() -> None:
    found = summarise([*SAMPLES, LOST])
    assert (found["completed"], found["failed"]) == (2, 1)
    assert found["duration_s"] == near(2.3)
    tokens = [found[f"{name}_tokens"] for name in ("input", "output", "cached")]
    assert (tokens, found["output_chunks"]) == ([12, 6, 3], 5)
    assert found["output_tokens_per_s"] == near(6 / 2.3)
    assert (found["ttft_mean_ms"], found["ttft_max_ms"]) == (near(150.0), near(200.0))
    assert (found["ttft_p50_ms"], found["ttft_p99_ms"]) == (near(150.0), near(199.0))
    assert found["tpot_mean_ms"] == found["tpot_p50_ms"] == near((100 + 1800) / 2)
    assert found["tpot_max_ms"] == near(1800.0)
    # The first request's three tokens after the first chunk took 300 ms, two of them in one chunk.
    assert found["itl_mean_ms"] == near((2 * 100 / 1.5 + 2 * 200 / 1.5 + 1800) / 5)
    assert (found["icl_mean_ms"], found["icl_max_ms"]) == (near((100 + 200 + 1800) / 3), near(1800))
    assert found["icl_p99_ms"] == near(200 + 0.98 * 1600)
    assert (found["e2e_p50_ms"], found["e2e_p99_ms"]) == (near(1200.0), near(400 + 0.99 * 1600))
    assert found["peak_concurrent"] == 2
    # All tokens of the first request and half of those of the second.
    assert found["peak_output_tokens_per_s"] == near(5.0)


def test_a_gap_is_shared_by_the_tokens_that_end_it() -> None:
    """Counts come from the engine, or from the server in every chunk: 1, then 3 more, then 1."""
    known = Sample(sent=0.0, stamps=[0.1, 0.4, 0.5], counts=[1, 4, 5], output_tokens=5)
    assert known.itl_s == pytest.approx([0.1, 0.1, 0.1, 0.1])
    found = summarise([known])
    assert (found["itl_max_ms"], found["icl_max_ms"]) == (near(100.0), near(300.0))
    assert found["itl_mean_ms"] == near(1e3 * known.tpot_s)
    spread = msgspec.structs.replace(known, counts=[])  # without counts: 2 tokens in each of 2 gaps
    assert spread.itl_s == pytest.approx([0.15, 0.15, 0.05, 0.05])
    alone = Sample(sent=0.0, stamps=[0.1, 0.3, 0.4], output_tokens=3)
    assert alone.itl_s == pytest.approx([0.2, 0.1])


def test_one_token_has_no_tpot_and_no_itl() -> None:
    found = summarise([Sample(sent=0.0, stamps=[0.5], input_tokens=1, output_tokens=1)])
    assert found["ttft_p50_ms"] == near(500.0)
    assert not [name for name in found if name.startswith(("tpot", "itl"))]


def test_requests_that_do_not_overlap_are_not_concurrent() -> None:
    one, other = (Sample(sent=t, stamps=[t + 1.0], output_tokens=1) for t in (0.0, 1.0))
    assert summarise([one, other])["peak_concurrent"] == 1


def test_goodput_counts_requests_within_every_goal() -> None:
    def num_good(samples: list[Sample], **goals_ms: float) -> float:
        found = summarise(samples, goals_ms)
        return found["good_requests_per_s"] * found["duration_s"]

    assert "good_requests_per_s" not in summarise(SAMPLES)
    assert num_good(SAMPLES, ttft=150.0) == near(1)
    assert num_good(SAMPLES, ttft=250.0) == near(2)
    assert num_good(SAMPLES, ttft=250.0, tpot=500.0) == near(1)
    assert num_good([*SAMPLES, LOST], e2el=9e9) == near(2)


def test_more_than_one_percent_of_failures_makes_a_run_invalid() -> None:
    assert verdict(summarise(SAMPLES[:1] * 99 + [LOST])) == ""
    assert verdict(summarise(SAMPLES[:1] * 98 + [LOST] * 2)) == (
        "invalid: 2 of 100 requests failed, more than 1%"
    )
    assert verdict(summarise([LOST])).startswith("invalid: 1 of 1")
    assert verdict(summarise([])).startswith("invalid: 0 of 0")


def test_table_has_vllms_layout() -> None:
    given = outcome([*SAMPLES, LOST], {"ttft": 150.0}, name="x", concurrency=2, request_rate=None)
    text = table(given)
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
        "Peak concurrent requests:                2",
        "Total token throughput (tok/s):          7.83",
    ]
    assert "---------------Time to First Token----------------" in lines
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    assert "---------------Inter-token Latency----------------" in lines
    assert "----------------End-to-end Latency----------------" in lines
    assert "----------------Engine (nanovllm)-----------------" in lines
    assert not [line for line in lines if line.startswith("P50 ")]  # P50 is shown as the median
    for line in (
        "Mean TTFT (ms):                          150.00",
        "P99 TTFT (ms):                           199.00",
        "Median TPOT (ms):                        950.00",
        "Max ITL (ms):                            1800.00",
        "Max gap between chunks (ms):             1800.00",
        "Median E2EL (ms):                        1200.00",
        "Preemptions:                             3",
    ):
        assert line in lines
    assert lines[-3:] == [
        "=" * 50,
        "1 x HTTP 503: full",
        "invalid: 1 of 3 requests failed, more than 1%",
    ]


def test_an_open_loop_shows_its_rate_and_the_worst_errors() -> None:
    failed = [Sample(0.0, [], error=f"E{kind}") for kind in range(7) for _ in range(kind + 1)]
    given = outcome([*SAMPLES, *failed], {}, name="x", concurrency=None, request_rate=2.5)
    lines = [line.rstrip() for line in table(given).splitlines()]
    assert lines[3] == "Request rate configured (RPS):           2.50"
    assert not [line for line in lines if "concurrency" in line or "goodput" in line]
    assert lines[-7:-1] == ["=" * 50, "7 x E6", "6 x E5", "5 x E4", "4 x E3", "3 x E2"]


def test_json_has_vllms_names() -> None:
    load = {"concurrency": None, "request_rate": 2.5}
    shown = vllm_json(outcome(SAMPLES, {}, **load))
    assert (shown["model_id"], shown["date"]) == ("Qwen/Qwen3-0.6B", RECORD.started_at)
    assert (shown["num_prompts"], shown["total_output_tokens"]) == (2, 6)
    assert shown["output_throughput"] == near(6 / 2.3)
    assert shown["total_token_throughput"] == near(18 / 2.3)
    assert (shown["request_rate"], shown["max_concurrency"]) == (2.5, None)
    assert (shown["mean_ttft_ms"], shown["median_ttft_ms"]) == (near(150.0), near(150.0))
    assert shown["p99_itl_ms"] == near(400 / 3 + 0.96 * (1800 - 400 / 3))
    counts = ("num_prompts", "completed", "total_input_tokens", "max_concurrent_requests")
    assert [shown[name] for name in counts] == [2, 2, 12, 2]
    assert all(type(shown[name]) is int for name in counts)
    assert (shown["std_e2el_ms"], shown["mean_e2el_ms"]) == (near(800.0), near(1200.0))
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


def page(stats: Stats) -> dict[str, float]:
    seen = Seen(ready=READY, stats=stats, metrics=Metrics())
    return samples_of(render([seen], [counted([seen], HttpCounts())]).decode())


def test_engine_facts_come_from_our_own_metrics_page() -> None:
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


# -- drafts ----------------------------------------------------------------------------------

DRAFTED = {
    "acceptance_rate_percent": 50.0,
    "acceptance_length": 2.25,
    "num_drafts": 8.0,
    "draft_tokens": 20.0,
    "accepted_tokens": 10.0,
    "acceptance_percent_position_0": 87.5,
    "acceptance_percent_position_1": 37.5,
    "acceptance_percent_position_2": 0.0,
}


def test_drafts_come_from_our_own_metrics_page() -> None:
    before = page(
        Stats(num_drafts=2, draft_tokens=6, accepted_tokens=1, accepted_by_position=[1, 0, 0])
    )
    after = page(
        Stats(num_drafts=10, draft_tokens=26, accepted_tokens=11, accepted_by_position=[8, 3, 0])
    )
    assert speculation(before, after) == DRAFTED
    assert speculation(after, after) == speculation(page(Stats()), page(Stats())) == {}


def test_drafts_are_a_section_of_the_table_and_named_as_vllm_does() -> None:
    load = {"name": "x", "concurrency": 2, "request_rate": None}
    given = outcome(SAMPLES, {}, **load)
    assert "Speculative" not in table(given)
    assert not [key for key in vllm_json(given) if key.startswith("spec_decode")]
    metrics = given.record.metrics | DRAFTED
    drafted = msgspec.structs.replace(
        given, record=msgspec.structs.replace(given.record, metrics=metrics)
    )
    lines = [line.rstrip() for line in table(drafted).splitlines()]
    at = lines.index("---------------Speculative Decoding---------------")
    assert lines[at + 1 : at + 11] == [
        "Acceptance rate (%):                     50.00",
        "Acceptance length:                       2.25",
        "Drafts:                                  8",
        "Draft tokens:                            20",
        "Accepted tokens:                         10",
        "Per-position acceptance (%):",
        "  Position 0:                            87.50",
        "  Position 1:                            37.50",
        "  Position 2:                            0.00",
        "----------------Engine (nanovllm)-----------------",
    ]
    shown = {k: v for k, v in vllm_json(drafted).items() if k.startswith("spec_decode")}
    assert shown == {
        "spec_decode_acceptance_rate": 50.0,
        "spec_decode_acceptance_length": 2.25,
        "spec_decode_num_drafts": 8,
        "spec_decode_draft_tokens": 20,
        "spec_decode_accepted_tokens": 10,
        "spec_decode_per_position_acceptance_rates": [0.875, 0.375, 0.0],
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
    first = next(line for line in lines if line.endswith("(lower is better)"))
    assert first.split()[:5] == ["ttft_p50_ms", "20.000", "30.000", "1.500", "A"]
    assert rows["ttft_p50_ms"] == ["20.000", "30.000", "1.500"]
    assert (rows["duration_s"], rows["new_s"]) == (["5.000", "-", "-"], ["-", "1.000", "-"])


def test_a_comparison_begins_with_six_rows_and_the_better_side() -> None:
    names = {
        "output_tokens_per_s": "higher", "ttft_p50_ms": "lower", "ttft_p99_ms": "lower",
        "tpot_p50_ms": "lower", "tpot_p99_ms": "lower", "e2e_p50_ms": "lower",
    }  # fmt: skip
    one = msgspec.structs.replace(
        RECORD, metrics=dict.fromkeys(names, 100.0) | {"completed": 1234.0}
    )
    other = {"output_tokens_per_s": 110.0, "ttft_p50_ms": 90.0, "tpot_p50_ms": 100.1}
    lines = compare(
        one, msgspec.structs.replace(one, metrics=one.metrics | {"ttft_p99_ms": 150.0} | other)
    ).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("metric"))
    shown = [line.split(maxsplit=4) for line in lines[at + 1 : at + 7]]
    assert [row[0] for row in shown] == [*names]
    assert [row[4] for row in shown] == [
        "B (higher is better)", "B (lower is better)", "A (lower is better)",
        "equal (lower is better)", "equal (lower is better)", "equal (lower is better)",
    ]  # fmt: skip
    assert lines[at + 7] == "all metrics:"
    assert ["completed", "1,234", "1,234", "1.000"] in [line.split() for line in lines[at + 8 :]]
