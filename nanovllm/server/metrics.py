"""Counters and histograms to Prometheus text. Knows neither who counts nor who asks.

Names are those other engines made common, so that dashboards and gateways work unchanged;
`nanovllm:` marks what only we have. With several API processes each reports its own requests,
and the engine's numbers are the same from all.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

from nanovllm.wire import Stats

quoted = json.JSONEncoder(ensure_ascii=False).encode

# fmt: off
TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)
# fmt: on
TOKENS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))
CHOICES = (1, 2, 5, 10, 20)


class Histogram:
    def __init__(self, name: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Metrics:
    """What one API process counts by itself."""

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
        self.generation_tokens = Histogram("vllm:request_generation_tokens", TOKENS)
        self.params_n = Histogram("vllm:request_params_n", CHOICES)
        self.params_max_tokens = Histogram("vllm:request_params_max_tokens", TOKENS)
        self.finished: Counter[str] = Counter()  # choices, by finish reason
        self.rejected: Counter[str] = Counter()  # requests, by error code

    def histograms(self) -> list[Histogram]:
        return [found for found in vars(self).values() if isinstance(found, Histogram)]


class Page:
    """Prometheus' text format, version 0.0.4."""

    def __init__(self, **labels: object) -> None:
        self._lines: list[str] = []
        self._labels = _listed(labels)

    def add(
        self, name: str, kind: str, samples: float | Mapping[str, float], labels: str = ""
    ) -> None:
        """`samples`: one, or by the values of their `labels`. Slashes part several of either."""
        self._lines.append(f"# TYPE {name} {kind}")
        if not isinstance(samples, Mapping):
            self._lines.append(f"{name}{{{self._labels}}} {samples:.17g}")
            return
        for values, sample in samples.items():
            further = _listed(dict(zip(labels.split("/"), values.split("/"), strict=True)))
            self._lines.append(f"{name}{{{self._labels},{further}}} {sample:.17g}")

    def add_histogram(self, histogram: Histogram) -> None:
        name, count = histogram.name, 0
        self._lines.append(f"# TYPE {name} histogram")
        for bound, here in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
            count += here
            self._lines.append(f'{name}_bucket{{{self._labels},le="{bound}"}} {count}')
        self._lines.append(f"{name}_sum{{{self._labels}}} {histogram.total:.17g}")
        self._lines.append(f"{name}_count{{{self._labels}}} {count}")

    def text(self) -> bytes:
        return ("\n".join(self._lines) + "\n").encode()


def render(
    metrics: Metrics, stats: Stats, *, model: str, page_tokens: int, num_pages: int
) -> bytes:
    page = Page(model_name=model, engine=0)
    page.add("vllm:num_requests_running", "gauge", stats.num_running)
    page.add("vllm:num_requests_waiting", "gauge", stats.num_waiting)
    page.add("vllm:kv_cache_usage_perc", "gauge", stats.kv_usage)
    sizes = {f"{page_tokens}/{num_pages}": 1}
    page.add("vllm:cache_config_info", "gauge", sizes, "block_size/num_gpu_blocks")
    page.add("vllm:num_preemptions_total", "counter", stats.num_preemptions)
    page.add("vllm:prompt_tokens_total", "counter", stats.prompt_tokens)
    page.add("vllm:prompt_tokens_cached_total", "counter", stats.cached_tokens)
    page.add("vllm:prefix_cache_queries_total", "counter", stats.prompt_tokens)
    page.add("vllm:prefix_cache_hits_total", "counter", stats.cached_tokens)
    page.add("vllm:generation_tokens_total", "counter", stats.generated_tokens)
    page.add("nanovllm:steps_total", "counter", stats.num_steps)
    page.add("nanovllm:host_bubble_seconds_total", "counter", stats.host_bubble_s)
    page.add("nanovllm:graph_padded_tokens_total", "counter", stats.padded_tokens)
    page.add("nanovllm:host_seconds_total", "counter", stats.host_s, "part")
    page.add("nanovllm:host_step_p50_seconds", "gauge", stats.host_step_p50_s)
    page.add("nanovllm:graph_steps_total", "counter", stats.steps_by_mode, "mode/phase")
    page.add("vllm:request_success_total", "counter", metrics.finished, "finished_reason")
    page.add("vllm:admission_rejections_total", "counter", metrics.rejected, "reason")
    for histogram in metrics.histograms():
        page.add_histogram(histogram)
    return page.text()


def _listed(labels: Mapping[str, object]) -> str:
    """`a="1",b="two"`, quoted as JSON is."""
    return ",".join(f"{key}={quoted(str(value))}" for key, value in labels.items())
