"""Counters and histograms in Prometheus' text format.

Names are those that other engines made common, so that dashboards and gateways work unchanged; the
prefix `nanovllm:` marks our own. An engine's values are the same from all API processes, and the
counts of its requests are summed over these. Values without the label "engine" belong to the API
processes.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from nanovllm.server.metric_help import HELP
from nanovllm.server.process_facts import process_facts
from nanovllm.wire import FETCH_BYTES, FETCH_S, STEP_TOKENS, Ready, Stats, TransferStats

quoted = json.JSONEncoder(ensure_ascii=False).encode

# fmt: off
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
          10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
           1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
             120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
# fmt: on
TOKENS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))
TIER_EVENTS = ("stored", "loaded", "dropped", "evicted", "failed", "declined")
CHOICES = (1, 2, 5, 10, 20)
MOST_NAMES = 32  # adapters in one label
STATES = "running", "waiting"  # of the requests of an adapter
OTHER_PATH = "other"  # label of paths without a route and of malformed requests
SUMMED = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:lora_requests_info",
)
Sample = tuple[str, str, float]  # suffix of the metric's name, further labels, value
Samples = dict[str, dict[str, float]]  # by the metric's name, then by suffix and labels


class Histogram:
    """Prometheus histogram. `counts[i]` counts the observations up to `bounds[i]`."""

    def __init__(self, name: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def samples(self) -> Iterator[Sample]:
        count = 0
        for bound, bucket_count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            count += bucket_count
            yield "_bucket", f',le="{bound}"', count
        yield "_sum", "", self.total
        yield "_count", "", count


class Metrics:
    """Counts of one API process for the requests that it sends to one engine."""

    def __init__(self) -> None:
        self.time_to_first_token_s = Histogram("vllm:time_to_first_token_seconds", TTFT_S)
        self.inter_token_s = Histogram("vllm:inter_token_latency_seconds", TOKEN_S)
        per_token = "vllm:request_time_per_output_token_seconds"
        self.time_per_output_token_s = Histogram(per_token, TOKEN_S)
        self.e2e_s = Histogram("vllm:e2e_request_latency_seconds", REQUEST_S)
        self.queue_s = Histogram("vllm:request_queue_time_seconds", REQUEST_S)
        self.inference_s = Histogram("vllm:request_inference_time_seconds", REQUEST_S)
        self.prefill_s = Histogram("vllm:request_prefill_time_seconds", REQUEST_S)
        self.decode_s = Histogram("vllm:request_decode_time_seconds", REQUEST_S)
        self.prompt_tokens = Histogram("vllm:request_prompt_tokens", TOKENS)
        self.computed_prompt_tokens = Histogram("vllm:request_prefill_kv_computed_tokens", TOKENS)
        self.generation_tokens = Histogram("vllm:request_generation_tokens", TOKENS)
        self.params_n = Histogram("vllm:request_params_n", CHOICES)
        self.params_max_tokens = Histogram("vllm:request_params_max_tokens", TOKENS)
        self.finished: Counter[str] = Counter()  # choices, by finish reason
        self.rejected: Counter[str] = Counter()  # requests, by error code
        self.corrupted_requests = 0

    def histograms(self) -> list[Histogram]:
        return [value for value in vars(self).values() if isinstance(value, Histogram)]


class HttpCounts:
    """Counts of one API process that belong to no engine."""

    def __init__(self) -> None:
        self.rejected: Counter[str] = Counter()  # requests, by error code
        self.responses: Counter[tuple[str, int]] = Counter()  # by path and HTTP status
        self.num_slow_readers = 0  # connections dropped because the client read too slowly


class Seen(Struct, kw_only=True):
    """State of one engine as seen by an API process."""

    ready: Ready
    stats: Stats | None  # None: the engine is lost
    metrics: Metrics
    step_age_s: float = 0.0
    num_open: int = 0


def counted(
    engines: Sequence[Seen], http: HttpCounts, num_tasks: int = 0, worker: str = ""
) -> Samples:
    """Return the counts of one API process. `worker` labels those that must not be summed."""
    page = _Page()
    model = f"model_name={quoted(engines[0].ready.model)}"
    for index, engine in enumerate(engines):
        page.labels = f'{model},engine="{index}"'
        page.add("nanovllm:open_choices", engine.num_open)
        _requests(page, engine.metrics)
    page.labels = model
    page.add("nanovllm:asyncio_tasks", num_tasks)
    page.add("vllm:admission_rejections_total", _by("reason", http.rejected))
    responses = (
        ("", f',path={quoted(path)},status="{status}"', count)
        for (path, status), count in http.responses.items()
    )
    page.add("nanovllm:http_requests_total", responses)
    page.add("nanovllm:dropped_slow_readers_total", http.num_slow_readers)
    page.labels = worker
    for name, value in process_facts().items():
        page.add(name, value)
    return page.samples


def render(engines: Sequence[Seen], processes: Iterable[Samples], *, summed: bool = False) -> bytes:
    """Return the counts of all API processes in Prometheus' text format, version 0.0.4.

    For a lost engine, these counts are all there is. With `summed`, the gauges of SUMMED have one
    series for all engines. Routers that read them take the first series and ignore the others.
    """
    page = _Page()
    for index, engine in enumerate(engines):
        page.labels = f'model_name={quoted(engine.ready.model)},engine="{index}"'
        page.add("nanovllm:engine_up", engine.stats is not None)
        if engine.stats is not None:
            _engine(page, engine, engine.stats)
    if summed:
        _sum(page, [engine for engine in engines if engine.stats is not None])
    page.labels = ""
    for samples in processes:
        for name, values in samples.items():
            page.add(name, (("", series, value) for series, value in values.items()))
    return page.text().encode()


class _Page:
    """Samples of a page. Equal series are summed; `labels` apply to the samples added next."""

    def __init__(self) -> None:
        self.labels = ""
        self.samples: Samples = {}

    def add(self, name: str, samples: float | Iterable[Sample]) -> None:
        values = self.samples.setdefault(name, {})
        if isinstance(samples, int | float):
            samples = [("", "", samples)]
        for suffix, further, value in samples:
            named = f"{{{self.labels}{further}}}" if self.labels else further
            series = f"{suffix}{named}"
            values[series] = values.get(series, 0) + value

    def text(self) -> str:
        return "".join(f"{line}\n" for name in self.samples for line in self._lines(name))

    def _lines(self, name: str) -> Iterator[str]:
        """Yield the lines of one metric, whose samples must be adjacent."""
        values = self.samples[name]
        kind = "counter" if name.endswith("_total") else "gauge"
        if next(iter(values), "").startswith("_bucket"):
            kind = "histogram"
        yield f"# HELP {name} {HELP[name]}"
        yield f"# TYPE {name} {kind}"
        for series, value in values.items():
            yield f"{name}{series} {value:.17g}"


def _engine(page: _Page, engine: Seen, stats: Stats) -> None:
    sizes = {f"{engine.ready.page_tokens}/{engine.ready.num_pages}": 1}
    page.add("vllm:cache_config_info", _by("block_size/num_gpu_blocks", sizes))
    page.add("nanovllm:last_step_age_seconds", engine.step_age_s)
    _queue_and_cache(page, stats)
    if stats.tiers:
        _tiers(page, stats)
    if stats.transfer is not None:
        _transfers(page, stats.transfer)
    _steps(page, stats)
    if stats.accepted_by_position:
        _drafts(page, stats)
    _adapters(page, stats)
    if (load := stats.experts) is not None:
        page.add("nanovllm:expert_tokens_total", _by("rank", load.by_rank))
        page.add("nanovllm:expert_imbalance", _by("layer/among", load.imbalance))


def _sum(page: _Page, engines: Sequence[Seen]) -> None:
    """Replace the samples of SUMMED by one each. `engines` are those that run."""
    if not engines:
        return
    samples = [page.samples.pop(name, {}) for name in SUMMED]
    running, waiting, usage, _, adapters = [sum(values.values()) for values in samples]
    ready = engines[0].ready
    page.labels = f"model_name={quoted(ready.model)}"
    page.add("vllm:num_requests_running", running)
    page.add("vllm:num_requests_waiting", waiting)
    page.add("vllm:kv_cache_usage_perc", usage / len(engines))
    pages = sum(engine.ready.num_pages for engine in engines)
    page.add(
        "vllm:cache_config_info",
        _by("block_size/num_gpu_blocks", {f"{ready.page_tokens}/{pages}": 1}),
    )
    if adapters:
        each = [engine.stats for engine in engines if engine.stats is not None]
        _adapters_info(page, each)


def _requests(page: _Page, metrics: Metrics) -> None:
    page.add("vllm:request_success_total", _by("finished_reason", metrics.finished))
    page.add("vllm:admission_rejections_total", _by("reason", metrics.rejected))
    page.add("nanovllm:corrupted_requests_total", metrics.corrupted_requests)
    for histogram in metrics.histograms():
        page.add(histogram.name, histogram.samples())


def _queue_and_cache(page: _Page, stats: Stats) -> None:
    page.add("vllm:num_requests_running", stats.num_running)
    deferred = stats.waiting_by_reason.get("shared_prompt", 0) + stats.num_compiling
    waiting = stats.num_waiting + stats.num_compiling
    page.add("vllm:num_requests_waiting", waiting)
    reasons = {"capacity": waiting - deferred, "deferred": deferred}
    page.add("vllm:num_requests_waiting_by_reason", _by("reason", reasons))
    page.add("vllm:kv_cache_usage_perc", stats.kv_usage)
    page.add("nanovllm:checkpoints", _by("state", stats.checkpoints))
    page.add("nanovllm:checkpoint_events_total", _by("event", stats.checkpoint_events))
    page.add("vllm:num_preemptions_total", stats.num_preemptions)
    page.add("vllm:prompt_tokens_total", stats.prompt_tokens)
    page.add("vllm:prompt_tokens_cached_total", stats.cached_tokens)
    loaded = stats.tiers.get("loaded_tokens", 0.0)
    sources = {
        "local_compute": stats.prompt_tokens - stats.cached_tokens,
        "local_cache_hit": stats.cached_tokens - loaded,
    } | ({"external_kv_transfer": loaded} if stats.tiers else {})
    page.add("vllm:prompt_tokens_by_source_total", _by("source", sources))
    page.add("vllm:prefix_cache_queries_total", stats.prompt_tokens)
    page.add("vllm:prefix_cache_hits_total", stats.cached_tokens - loaded)
    page.add("nanovllm:grammar_compilations_waiting", stats.num_compiling)
    page.add("nanovllm:grammar_matchers", stats.num_matchers)
    page.add("nanovllm:grammar_cache_bytes", stats.grammar_cache_bytes)
    page.add("nanovllm:grammar_compilation_failures_total", _by("reason", stats.grammar_failures))


def _tiers(page: _Page, stats: Stats) -> None:
    """Add the samples of tiers below the device, under vLLM's names where it has some."""
    hits = _by_tier(stats, "hit_tokens")
    loaded = stats.tiers.get("loaded_tokens", 0.0)
    local = stats.cached_tokens - loaded
    page.add("vllm:external_prefix_cache_queries_total", stats.prompt_tokens - local)
    page.add("vllm:external_prefix_cache_hits_total", loaded)
    page.add("nanovllm:tier_hit_tokens_total", _by("tier", hits))
    page.add("nanovllm:arriving_requests", stats.tiers.get("arriving", 0))
    for tier, pages in _by_tier(stats, "pages").items():
        used = stats.tiers.get(f"{tier}.pages_used", 0)
        page.add(
            "nanovllm:tier_pages",
            _by("tier/state", {f"{tier}/capacity": pages, f"{tier}/used": used}),
        )
        if tier == "host":
            page.add("vllm:kv_offload_cpu_cache_usage_perc", used / max(pages, 1))
    events = {
        f"{tier}/{event}": count
        for event in TIER_EVENTS
        for tier, count in _by_tier(stats, event).items()
    }
    page.add("nanovllm:tier_events_total", _by("tier/event", events))
    page.add("vllm:kv_offload_stores_skipped_total", sum(_by_tier(stats, "dropped").values()))
    for kind in ("load", "store"):
        page.add(
            f"vllm:kv_offload_{kind}_bytes_total", _by("tier", _by_tier(stats, f"{kind}_bytes"))
        )
        page.add(f"vllm:kv_offload_{kind}_time_total", _by("tier", _by_tier(stats, f"{kind}_s")))


def _transfers(page: _Page, transfer: TransferStats) -> None:
    """Add the samples of transfers between engines, under the names of vLLM's NixlConnector."""
    leases = dict(transfer.leases)
    late, expired = leases.pop("late", 0), leases.get("expired", 0)
    page.add("vllm:nixl_num_kv_expired_reqs_total", expired)
    page.add("vllm:nixl_num_notifications_after_expiry_total", late)
    page.add("vllm:nixl_num_failed_transfers_total", transfer.num_failed)
    for name, bounds, counts, total in (
        ("bytes_transferred", FETCH_BYTES, transfer.fetches_by_bytes, transfer.fetched_bytes),
        ("xfer_time_seconds", FETCH_S, transfer.fetches_by_s, transfer.fetch_s),
    ):
        fetches = Histogram(f"vllm:nixl_{name}", bounds)
        fetches.counts, fetches.total = counts or fetches.counts, total
        page.add(fetches.name, fetches.samples())
    page.add("nanovllm:transfer_leases", transfer.num_leases)
    page.add("nanovllm:transfer_leased_pages", transfer.num_leased_pages)
    page.add("nanovllm:transfer_lease_events_total", _by("event", leases))
    page.add("nanovllm:transfer_sent_bytes_total", transfer.sent_bytes)
    page.add("nanovllm:transfer_tickets_total", _by("result", transfer.tickets))


def _by_tier(stats: Stats, field: str) -> dict[str, float]:
    """Return a field of each tier below the device."""
    names = ((*key.rpartition("."), value) for key, value in stats.tiers.items())
    return {
        tier: value for tier, _, name, value in names if name == field and tier not in ("", "gpu")
    }


def _steps(page: _Page, stats: Stats) -> None:
    page.add("vllm:generation_tokens_total", stats.generated_tokens)
    fed = Histogram("vllm:iteration_tokens_total", STEP_TOKENS)
    fed.counts, fed.total = stats.steps_by_tokens or fed.counts, stats.step_tokens
    page.add(fed.name, fed.samples())
    page.add("nanovllm:steps_total", stats.num_steps)
    page.add("nanovllm:host_bubble_seconds_total", stats.host_bubble_s)
    page.add("nanovllm:graph_padded_tokens_total", stats.padded_tokens)
    page.add("nanovllm:host_seconds_total", _by("part", stats.host_s))
    page.add("nanovllm:host_step_p50_seconds", stats.host_step_p50_s)
    page.add("nanovllm:graph_steps_total", _by("mode/phase", stats.steps_by_mode))


def _drafts(page: _Page, stats: Stats) -> None:
    page.add("vllm:spec_decode_num_drafts_total", stats.num_drafts)
    page.add("vllm:spec_decode_num_draft_tokens_total", stats.draft_tokens)
    page.add("vllm:spec_decode_num_accepted_tokens_total", stats.accepted_tokens)
    positions = {str(at): count for at, count in enumerate(stats.accepted_by_position)}
    page.add("vllm:spec_decode_num_accepted_tokens_per_pos_total", _by("position", positions))


def _adapters(page: _Page, stats: Stats) -> None:
    """Add the requests by adapter and the slots by state."""
    if not stats.adapter_slots:
        return
    for state in STATES:
        counts = stats.adapters.get(state, {})
        by_name = {f"{name}/{state}": count for name, count in counts.items()}
        page.add("nanovllm:adapter_requests", _by("adapter/state", by_name))
    page.add("nanovllm:adapter_slots", _by("state", stats.adapter_slots))
    _adapters_info(page, [stats])


def _adapters_info(page: _Page, engines: Sequence[Stats]) -> None:
    """Add vllm:lora_requests_info. Its value is the time.

    Its labels are lists of names, cut to MOST_NAMES, and the adapters that fit in one engine.
    """
    capacity = str(engines[0].adapter_slots["capacity"])
    labels = f",max_lora={quoted(capacity)}"
    for state in STATES:
        each = [stats.adapters.get(state, {}) for stats in engines]
        names = sorted({name for counts in each for name, count in counts.items() if count})
        labels += f",{state}_lora_adapters={quoted(','.join(names[:MOST_NAMES]))}"
    page.add("vllm:lora_requests_info", [("", labels, time.time())])


def _by(labels: str, values: Mapping[str, float]) -> Iterator[Sample]:
    """Yield one sample per value, labelled by its key. Slashes separate several labels."""
    for key, value in values.items():
        named = zip(labels.split("/"), key.split("/"), strict=True)
        yield "", "".join(f",{label}={quoted(text)}" for label, text in named), value
