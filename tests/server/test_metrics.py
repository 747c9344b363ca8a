"""The metrics page is valid, complete and cheap."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from nanovllm.bench.agents import agent_facts
from nanovllm.bench.measure import Sample
from nanovllm.bench.report import by_label, samples_of
from nanovllm.experts import ExpertLoad
from nanovllm.server.metrics import Histogram, HttpCounts, Metrics, Seen, counted, render
from nanovllm.server.process_facts import process_facts
from nanovllm.wire import Stats, TransferStats
from tests.server.fake_engine import READY
from tests.times import done_within

STATS = Stats(
    num_running=3,
    num_waiting=4,
    waiting_by_reason={"capacity": 3, "shared_prompt": 1},
    num_compiling=2,
    kv_usage=0.5,
    num_preemptions=2,
    prompt_tokens=100,
    cached_tokens=60,
    steps_by_tokens=[30, 15, 4] + [0] * 10 + [1],
    step_tokens=300,
    generated_tokens=70,
    num_steps=50,
    host_bubble_s=0.25,
    host_s={"plan": 0.5},
    host_step_p50_s=0.001,
    steps_by_mode={"FULL/decode": 40, "NONE/mixed": 10},
    padded_tokens=8,
    num_matchers=5,
    grammar_cache_bytes=7000,
    checkpoints={"places": 9, "kept": 4},
    checkpoint_events={"saved": 6, "restored": 3, "evicted": 2},
)
LINE = re.compile(
    r"(?:process_[a-z_]+|[a-z]+:[a-z0-9_]+\{(\w+=\"(?:[^\"\\]|\\.)*\",?)+\}) -?[0-9.e+-]+(inf)?"
)


DONE = Sample(0.0, [1.0], input_tokens=100, output_tokens=1)
SIZED = replace(READY, page_tokens=16, num_pages=1000)


def test_an_observation_may_count_several_times() -> None:
    histogram = Histogram("x", (0.5, 1.0))
    histogram.observe(0.4, 3)
    histogram.observe(2.0)
    assert (histogram.counts, histogram.total) == ([3, 0, 1], 0.4 * 3 + 2.0)


def seen(metrics: Metrics, model: str = "demo", stats: Stats = STATS) -> Seen:
    ready = replace(SIZED, model=model)
    return Seen(ready=ready, stats=stats, metrics=metrics, num_open=9)


def whole(engines: list[Seen], http: HttpCounts, num_tasks: int = 0) -> bytes:
    """Return the page of a server with one API process."""
    return render(engines, [counted(engines, http, num_tasks)])


def page(metrics: Metrics, model: str = "demo", stats: Stats = STATS) -> str:
    return whole([seen(metrics, model, stats)], HttpCounts(), num_tasks=11).decode()


def test_the_engines_numbers_are_there_under_common_names() -> None:
    text = page(Metrics())
    labels = 'model_name="demo",engine="0"'
    for line in (
        f"vllm:num_requests_running{{{labels}}} 3",
        f"vllm:num_requests_waiting{{{labels}}} 6",
        f'vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} 3',
        f'vllm:num_requests_waiting_by_reason{{{labels},reason="deferred"}} 3',
        f'vllm:prompt_tokens_by_source_total{{{labels},source="local_compute"}} 40',
        f'vllm:prompt_tokens_by_source_total{{{labels},source="local_cache_hit"}} 60',
        f'vllm:iteration_tokens_total_bucket{{{labels},le="8"}} 45',
        f'vllm:iteration_tokens_total_bucket{{{labels},le="+Inf"}} 50',
        f"vllm:iteration_tokens_total_sum{{{labels}}} 300",
        f"vllm:iteration_tokens_total_count{{{labels}}} 50",
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.5",
        f'vllm:cache_config_info{{{labels},block_size="16",num_gpu_blocks="1000"}} 1',
        f"vllm:num_preemptions_total{{{labels}}} 2",
        f'nanovllm:checkpoints{{{labels},state="places"}} 9',
        f'nanovllm:checkpoints{{{labels},state="kept"}} 4',
        f'nanovllm:checkpoint_events_total{{{labels},event="restored"}} 3',
        f"vllm:prefix_cache_queries_total{{{labels}}} 100",
        f"vllm:prefix_cache_hits_total{{{labels}}} 60",
        f"vllm:generation_tokens_total{{{labels}}} 70",
        f'nanovllm:graph_steps_total{{{labels},mode="FULL",phase="decode"}} 40',
        f'nanovllm:host_seconds_total{{{labels},part="plan"}} 0.5',
        f"nanovllm:host_step_p50_seconds{{{labels}}} 0.001",
        f"nanovllm:host_bubble_seconds_total{{{labels}}} 0.25",
        f"nanovllm:graph_padded_tokens_total{{{labels}}} 8",
        f"nanovllm:grammar_matchers{{{labels}}} 5",
        f"nanovllm:grammar_cache_bytes{{{labels}}} 7000",
        f"nanovllm:open_choices{{{labels}}} 9",
        'nanovllm:asyncio_tasks{model_name="demo"} 11',
    ):
        assert line in text.splitlines()


def test_engines_are_told_apart_and_what_is_of_none_has_no_engine() -> None:
    first, second, http = Metrics(), Metrics(), HttpCounts()
    first.finished["stop"], second.finished["stop"] = 1, 2
    first.rejected["queue_full"] = 3
    http.rejected["invalid_value"] = 4
    http.responses["/health", 200] = 5
    gone = Seen(ready=SIZED, stats=None, metrics=second)
    text = whole([seen(first), gone], http).decode()
    found = samples_of(text)
    values = by_label(found, "vllm:request_success_total", "engine", "finished_reason")
    assert values == {"0/stop": 1, "1/stop": 2}
    values = by_label(found, "vllm:admission_rejections_total", "engine", "reason")
    assert values == {"0/queue_full": 3, "/invalid_value": 4}
    assert by_label(found, "nanovllm:engine_up", "engine") == {"0": 1, "1": 0}
    # A lost engine has no gauges, and its counters will start again.
    assert by_label(found, "vllm:num_requests_running", "engine") == {"0": 3}
    assert by_label(found, "vllm:generation_tokens_total", "engine") == {"0": 70}
    assert by_label(found, "nanovllm:http_requests_total", "engine", "path") == {"//health": 5}
    typed = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(typed) == len(set(typed))
    names = [line.split("{")[0] for line in text.splitlines() if "success_total" in line]
    assert names[2:] == ["vllm:request_success_total"] * 2  # adjacent


def test_what_several_processes_count_is_added_up() -> None:
    """Counts of processes are summed. An engine's values are the same from all processes."""
    ours, theirs, http, other = Metrics(), Metrics(), HttpCounts(), HttpCounts()
    ours.finished["stop"], theirs.finished["stop"], theirs.finished["length"] = 1, 2, 4
    ours.e2e_s.observe(0.4)
    theirs.e2e_s.observe(0.6)
    theirs.e2e_s.observe(10_000)
    http.responses["/health", 200], other.responses["/health", 200] = 5, 6
    other.responses["/health", 503] = 7
    mine = counted([seen(ours)], http, 11, 'worker="0"')
    text = render([seen(ours)], [mine, counted([seen(theirs)], other, 12, 'worker="1"')]).decode()
    found = samples_of(text)
    name = "vllm:request_success_total"
    assert by_label(found, name, "finished_reason") == {"stop": 3, "length": 4}
    name = "vllm:e2e_request_latency_seconds"
    buckets = by_label(found, f"{name}_bucket", "le")
    assert [buckets[le] for le in ("0.3", "0.5", "0.8", "7680.0", "+Inf")] == [0, 1, 2, 2, 3]
    assert by_label(found, f"{name}_sum") == {"": 10_001}
    assert by_label(found, f"{name}_count") == {"": 3}
    statuses = by_label(found, "nanovllm:http_requests_total", "path", "status")
    assert statuses == {"/health/200": 11, "/health/503": 7}
    assert by_label(found, "nanovllm:asyncio_tasks") == {"": 23}
    assert by_label(found, "vllm:generation_tokens_total", "engine") == {"0": 70}
    started = by_label(found, "process_start_time_seconds", "worker")
    assert set(started) == {"0", "1"} and len(set(started.values())) == 1
    lines = text.splitlines()
    assert all(LINE.fullmatch(line) for line in lines if not line.startswith(("#", "process")))
    assert len(lines) == len(set(lines))


def test_drafts_are_told_of_where_the_recipe_speculates() -> None:
    assert "spec_decode" not in page(Metrics())
    drafted = replace(
        STATS, num_drafts=9, draft_tokens=25, accepted_tokens=12, accepted_by_position=[8, 4, 0]
    )
    found = samples_of(page(Metrics(), stats=drafted))
    total = "vllm:spec_decode_num_{}_total"
    assert by_label(found, total.format("drafts"), "model_name", "engine") == {"demo/0": 9}
    assert by_label(found, total.format("draft_tokens")) == {"": 25}
    assert by_label(found, total.format("accepted_tokens")) == {"": 12}
    each = by_label(found, total.format("accepted_tokens_per_pos"), "position")
    assert each == {"0": 8, "1": 4, "2": 0}
    nothing_yet = page(Metrics(), stats=replace(STATS, accepted_by_position=[0]))
    assert by_label(samples_of(nothing_yet), total.format("drafts")) == {"": 0}


TIERS = {
    "disk.pages": 90.0, "disk.pages_used": 30.0,
    "host.pages": 80.0, "host.pages_used": 20.0, "host.page_bytes": 4096.0, "arriving": 2.0,
    "host.queued": 1.0, "host.loading": 3.0, "asked_tokens": 100.0, "gpu.hit_tokens": 35.0,
    "host.hit_tokens": 15.0, "disk.hit_tokens": 10.0, "host.stored": 40.0, "host.loaded": 9.0,
    "host.dropped": 5.0, "host.evicted": 6.0, "host.failed": 1.0, "host.declined": 7.0,
    "host.store_bytes": 640.0, "host.load_bytes": 64.0, "host.store_s": 0.5, "host.load_s": 0.25,
    "loaded_tokens": 25.0,
}  # fmt: skip


def test_tiers_have_the_names_of_vllm() -> None:
    """STATS: of 100 prompt tokens 60 are cached, of which 15 come from the host, 10 from disk."""
    plain = samples_of(page(Metrics()))
    assert by_label(plain, "vllm:prefix_cache_hits_total") == {"": 60}
    assert "tier" not in page(Metrics()) and "external" not in page(Metrics())
    found = samples_of(page(Metrics(), stats=replace(STATS, tiers=TIERS)))
    assert by_label(found, "vllm:prefix_cache_queries_total") == {"": 100}
    assert by_label(found, "vllm:prefix_cache_hits_total") == {"": 35}
    assert by_label(found, "vllm:external_prefix_cache_queries_total") == {"": 65}
    assert by_label(found, "vllm:external_prefix_cache_hits_total") == {"": 25}
    sources = by_label(found, "vllm:prompt_tokens_by_source_total", "source")
    assert sources == {"local_compute": 40, "local_cache_hit": 35, "external_kv_transfer": 25}
    hits = by_label(found, "nanovllm:tier_hit_tokens_total", "tier")
    assert hits == {"host": 15, "disk": 10}
    pages = by_label(found, "nanovllm:tier_pages", "tier", "state")
    assert pages == {"host/capacity": 80, "host/used": 20, "disk/capacity": 90, "disk/used": 30}
    assert by_label(found, "vllm:kv_offload_cpu_cache_usage_perc") == {"": 0.25}
    events = by_label(found, "nanovllm:tier_events_total", "event")
    assert events == {"stored": 40, "loaded": 9, "dropped": 5, "evicted": 6, "failed": 1,
                      "declined": 7}  # fmt: skip
    total = "vllm:kv_offload_{}_total"
    names = ("stores_skipped", "load_bytes", "load_time", "store_bytes", "store_time")
    values = [by_label(found, total.format(name))[""] for name in names]
    assert values == [5, 64, 0.25, 640, 0.5]
    assert by_label(found, "nanovllm:arriving_requests") == {"": 2}
    told = agent_facts([DONE], {}, found)
    assert told["Hits in GPU memory (%)"] == 35.0 and told["Hits in other tiers (%)"] == 25.0
    assert (told["Hits in host tier (%)"], told["Hits in disk tier (%)"]) == (15.0, 10.0)


TRANSFER = TransferStats(
    num_leases=2, num_leased_pages=9, sent_bytes=640, num_failed=4, fetched_bytes=5000,
    leases={"granted": 8, "done": 3, "not wanted": 1, "expired": 2, "late": 5},
    tickets={"read": 2, "forged": 1}, fetch_s=0.5,
    fetches_by_bytes=[1, 1, *[0] * 11], fetches_by_s=[0, 2, *[0] * 11],
)  # fmt: skip


def test_transfers_have_the_names_of_vllm() -> None:
    assert "nixl" not in page(Metrics()) and "transfer" not in page(Metrics())
    found = samples_of(page(Metrics(), stats=replace(STATS, transfer=TRANSFER)))
    names = ("num_kv_expired_reqs_total", "num_notifications_after_expiry_total",
             "num_failed_transfers_total", "bytes_transferred_sum", "bytes_transferred_count",
             "xfer_time_seconds_sum", "xfer_time_seconds_count")  # fmt: skip
    values = [by_label(found, f"vllm:nixl_{name}")[""] for name in names]
    assert values == [2, 5, 4, 5000, 2, 0.5, 2]
    times = by_label(found, "vllm:nixl_xfer_time_seconds_bucket", "le")
    assert (times["0.001"], times["0.005"], times["+Inf"]) == (0, 2, 2)
    own = [by_label(found, f"nanovllm:transfer_{name}")[""] for name in ("leases", "leased_pages")]
    assert own == [2, 9] and by_label(found, "nanovllm:transfer_sent_bytes_total") == {"": 640}
    ends = by_label(found, "nanovllm:transfer_lease_events_total", "event")
    assert ends == {"granted": 8, "done": 3, "not wanted": 1, "expired": 2}
    assert by_label(found, "nanovllm:transfer_tickets_total", "result") == {"read": 2, "forged": 1}


def test_experts_are_told_of_by_rank_and_by_layer() -> None:
    assert "expert" not in page(Metrics())
    imbalance = {"3/experts": 2.5, "3/ranks": 1.25, "4/experts": 4.0, "4/ranks": 1.0}
    by_expert, by_rank = ([5, 1, 2, 0], [8, 0, 0, 0]), ([5, 3], [2**40, 2**40])
    tokens, at_ranks = (np.array(counts).tobytes() for counts in (by_expert, by_rank))
    load = ExpertLoad([3, 4], tokens, at_ranks)
    found = samples_of(page(Metrics(), stats=replace(STATS, experts=load)))
    of_ranks = by_label(found, "nanovllm:expert_tokens_total", "rank")
    assert of_ranks == {"0": 5 + 2.0**40, "1": 3 + 2.0**40}
    assert by_label(found, "nanovllm:expert_imbalance", "layer", "among") == imbalance


def test_every_line_is_a_sample_or_a_type_said_once() -> None:
    metrics = Metrics()
    metrics.finished["stop"] += 1
    metrics.rejected["queue_full"] += 2
    load = ExpertLoad([0], bytes(16), bytes(8))
    stats = replace(STATS, accepted_by_position=[3, 0], experts=load, tiers=TIERS,
                    transfer=TRANSFER)  # fmt: skip
    text = page(metrics, model='a "b"\\c\nd', stats=stats)
    assert r'model_name="a \"b\"\\c\nd"' in text
    said = [line.split(" ", 3) for line in text.splitlines() if line.startswith("#")]
    assert [word for _, word, *_ in said] == ["HELP", "TYPE"] * (len(said) // 2)
    helped = [name for _, word, name, text in said if word == "HELP" and text.endswith(".")]
    typed = [name for _, word, name, _ in said if word == "TYPE"]
    assert helped == typed and len(typed) == len(set(typed)) > 20
    for line in text.splitlines():
        assert line.startswith("#") or LINE.fullmatch(line), line


def test_the_process_is_described_as_by_other_exporters() -> None:
    facts = dict(line.rsplit(" ", 1) for line in page(Metrics()).splitlines())
    assert 1e6 < float(facts["process_resident_memory_bytes"]) < 1e11
    assert 0 < time.time() - float(facts["process_start_time_seconds"]) < 86400
    before = float(facts["process_open_fds"])
    with Path("/dev/null").open(), Path("/dev/null").open():
        opened = dict(line.rsplit(" ", 1) for line in page(Metrics()).splitlines())
    assert float(opened["process_open_fds"]) == before + 2
    starts = [process_facts()["process_start_time_seconds"] for _ in range(50)]
    assert len({*starts}) == 1  # changes only with the process


def test_histograms_are_cumulative_and_bounds_inclusive() -> None:
    metrics = Metrics()
    name = "vllm:time_to_first_token_seconds"
    metrics.time_to_first_token_s = Histogram(name, (0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 3.0):
        metrics.time_to_first_token_s.observe(value)
    got = dict(line.rsplit(" ", 1) for line in page(metrics).splitlines() if name in line)
    labels = 'model_name="demo",engine="0"'
    assert got[f'{name}_bucket{{{labels},le="0.1"}}'] == "2"
    assert got[f'{name}_bucket{{{labels},le="1.0"}}'] == "3"
    assert got[f'{name}_bucket{{{labels},le="+Inf"}}'] == "4"
    assert got[f"{name}_count{{{labels}}}"] == "4"
    assert float(got[f"{name}_sum{{{labels}}}"]) == 0.05 + 0.1 + 0.5 + 3.0


def test_a_page_takes_a_few_milliseconds_at_most() -> None:
    """A page takes about 0.7 ms of CPU time; the limit allows for a busy machine."""
    metrics = Metrics()
    done_within(5e-3, lambda: page(metrics))


def test_gauges_of_several_engines_are_summed_for_routers() -> None:
    """A router takes the first series of a name. A lost engine has none, and counts for none."""
    adapters = {"running": {"legal": 1, "other": 0}, "waiting": {"legal": 2}}
    slots = {"capacity": 4, "loaded": 2, "in_use": 1}
    first = replace(STATS, adapter_slots=slots, adapters=adapters)
    second = replace(first, kv_usage=0.1, adapters={"running": {"other": 1}, "waiting": {}})
    engines = [seen(Metrics(), stats=one) for one in (first, second)]
    engines.append(replace(seen(Metrics()), stats=None))
    text = render(engines, [counted(engines, HttpCounts())], summed=True).decode()
    model = 'model_name="demo"'
    for line in (
        f"vllm:num_requests_running{{{model}}} 6",
        f"vllm:num_requests_waiting{{{model}}} 12",
        f'vllm:cache_config_info{{{model},block_size="16",num_gpu_blocks="2000"}} 1',
    ):
        assert line in text.splitlines()
    usage = next(line for line in text.splitlines() if line.startswith("vllm:kv_cache_usage_perc{"))
    assert float(usage.split()[1]) == 0.3
    names = 'running_lora_adapters="legal,other",waiting_lora_adapters="legal"'
    assert f'\nvllm:lora_requests_info{{{model},max_lora="4",{names}}} ' in text
    for name in ("num_requests_running", "kv_cache_usage_perc", "lora_requests_info"):
        assert f'vllm:{name}{{model_name="demo",engine="' not in text
    assert 'vllm:prompt_tokens_total{model_name="demo",engine="1"} 100' in text.splitlines()
    for state, count in slots.items():
        line = f'nanovllm:adapter_slots{{model_name="demo",engine="1",state="{state}"}} {count}'
        assert line in text.splitlines()
    none = [replace(engine, stats=None) for engine in engines]
    assert b"num_requests_running" not in render(none, [], summed=True)
