"""Counters and histograms to Prometheus text. Knows neither who counts nor who asks.

Names are those other engines made common, so that dashboards and gateways work unchanged;
`nanovllm:` marks what only we have. With several API processes each reports its own requests,
and the engine's numbers are the same from all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

from nanovllm.wire import Stats

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
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Metrics:
    """What one API process counts by itself."""

    def __init__(self) -> None:
        self.time_to_first_token_s = Histogram(TTFT_S)
        self.inter_token_s = Histogram(TOKEN_S)
        self.time_per_output_token_s = Histogram(TOKEN_S)
        self.e2e_s = Histogram(REQUEST_S)
        self.queue_s = Histogram(REQUEST_S)
        self.inference_s = Histogram(REQUEST_S)
        self.prefill_s = Histogram(REQUEST_S)
        self.decode_s = Histogram(REQUEST_S)
        self.prompt_tokens = Histogram(TOKENS)
        self.generation_tokens = Histogram(TOKENS)
        self.params_n = Histogram(CHOICES)
        self.params_max_tokens = Histogram(TOKENS)
        self.finished: Counter[str] = Counter()  # choices, by finish reason
        self.rejected: Counter[str] = Counter()  # requests, by error code

    def histograms(self) -> Mapping[str, Histogram]:
        return {
            "vllm:time_to_first_token_seconds": self.time_to_first_token_s,
            "vllm:inter_token_latency_seconds": self.inter_token_s,
            "vllm:request_time_per_output_token_seconds": self.time_per_output_token_s,
            "vllm:e2e_request_latency_seconds": self.e2e_s,
            "vllm:request_queue_time_seconds": self.queue_s,
            "vllm:request_inference_time_seconds": self.inference_s,
            "vllm:request_prefill_time_seconds": self.prefill_s,
            "vllm:request_decode_time_seconds": self.decode_s,
            "vllm:request_prompt_tokens": self.prompt_tokens,
            "vllm:request_generation_tokens": self.generation_tokens,
            "vllm:request_params_n": self.params_n,
            "vllm:request_params_max_tokens": self.params_max_tokens,
        }


class Page:
    """Prometheus' text format, version 0.0.4."""

    def __init__(self, **labels: object) -> None:
        self._lines: list[str] = []
        self._labels = _listed(labels)

    def add(self, name: str, kind: str, samples: Mapping[str, float]) -> None:
        """`samples`: value by further labels, as `_listed` writes them ("" = none)."""
        self._lines.append(f"# TYPE {name} {kind}")
        for further, value in samples.items():
            labels = f"{self._labels},{further}" if further else self._labels
            self._lines.append(f"{name}{{{labels}}} {value:.17g}")

    def add_histogram(self, name: str, histogram: Histogram) -> None:
        self._lines.append(f"# TYPE {name} histogram")
        count = 0
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
    page.add("vllm:num_requests_running", "gauge", {"": stats.num_running})
    page.add("vllm:num_requests_waiting", "gauge", {"": stats.num_waiting})
    page.add("vllm:kv_cache_usage_perc", "gauge", {"": stats.kv_usage})
    sizes = _listed({"block_size": page_tokens, "num_gpu_blocks": num_pages})
    page.add("vllm:cache_config_info", "gauge", {sizes: 1})
    for name, value in (
        ("vllm:num_preemptions_total", stats.num_preemptions),
        ("vllm:prompt_tokens_total", stats.prompt_tokens),
        ("vllm:prompt_tokens_cached_total", stats.cached_tokens),
        ("vllm:prefix_cache_queries_total", stats.prompt_tokens),
        ("vllm:prefix_cache_hits_total", stats.cached_tokens),
        ("vllm:generation_tokens_total", stats.generated_tokens),
        ("nanovllm:steps_total", stats.num_steps),
        ("nanovllm:host_bubble_seconds_total", stats.host_bubble_s),
        ("nanovllm:graph_padded_tokens_total", stats.padded_tokens),
    ):
        page.add(name, "counter", {"": value})
    host_s = {_listed({"part": part}): spent for part, spent in stats.host_s.items()}
    page.add("nanovllm:host_seconds_total", "counter", host_s)
    page.add("nanovllm:host_step_p50_seconds", "gauge", {"": stats.host_step_p50_s})
    by_mode = {}
    for key, count in stats.steps_by_mode.items():
        mode, _, phase = key.partition("/")
        by_mode[_listed({"mode": mode, "phase": phase})] = count
    page.add("nanovllm:graph_steps_total", "counter", by_mode)
    finished = {_listed({"finished_reason": key}): n for key, n in metrics.finished.items()}
    page.add("vllm:request_success_total", "counter", finished)
    rejected = {_listed({"reason": key}): n for key, n in metrics.rejected.items()}
    page.add("vllm:admission_rejections_total", "counter", rejected)
    for name, histogram in metrics.histograms().items():
        page.add_histogram(name, histogram)
    return page.text()


def _listed(labels: Mapping[str, object]) -> str:
    """`a="1",b="two"`, escaped as the format wants it."""
    return ",".join(
        '{}="{}"'.format(
            key, str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        )
        for key, value in labels.items()
    )
