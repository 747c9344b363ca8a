"""Each prompt token is counted once: as computed, or as a hit of the tier that it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanovllm.bench.agents import hits_by_tier
from nanovllm.bench.report import by_label, samples_of
from nanovllm.config import Disk
from nanovllm.kv.costs import TransferCosts
from nanovllm.server.metrics import Metrics, Seen, render
from nanovllm.wire import Abort, Ready, Stats
from tests.models.tiny import CASES, config_of, make_tiny
from tests.server.serving import eventually
from tests.whole_engine import WholeEngine

PAGE = 4
DEVICE_PAGES, HOST_PAGES = 48, 70
READY = Ready(
    worker=0,
    model="tiny",
    max_model_tokens=96,
    vocab_size=199,
    num_pages=DEVICE_PAGES,
    page_tokens=PAGE,
    num_slots=4,
)


def metrics_of(stats: Stats) -> dict[str, float]:
    """Return the samples of /metrics for one engine."""
    seen = Seen(ready=READY, stats=stats, metrics=Metrics())
    return samples_of(render([seen], []).decode())


def run(engine: WholeEngine) -> None:
    """Run all requests, and end all transfers, including those of their pages to disk."""
    engine.run()
    eventually(lambda: engine.loop.step() or not engine.scheduler.num_moving)


def serve(engine: WholeEngine, prompts: list[list[int]]) -> dict[int, int]:
    """Serve prompts that have hits on all tiers. Return the tokens of each prompt, by request.

    A request is aborted while its pages arrive from disk, and another one while it decodes.
    """
    lengths: dict[int, int] = {}

    def submit(prompt: list[int], max_new: int) -> int:
        request_id = len(lengths)
        lengths[request_id] = len(prompt)
        engine.submit(request_id, prompt, max_new)
        return request_id

    for prompt in (*prompts, *reversed(prompts)):  # the latest are on the device, then in host
        submit(prompt, 2)  # memory, and the first ones on disk only
        run(engine)
    for prompt in prompts[:4]:  # four texts of up to 23 pages preempt each other
        submit(prompt, 48)
    run(engine)
    leaving = submit(prompts[8], 2)
    engine.loop.step()
    assert leaving in engine.scheduler.queue.arriving
    engine.loop.handle(Abort(leaving))
    run(engine)
    del lengths[leaving]  # it has not started
    leaving = submit(prompts[9], 40)
    eventually(lambda: engine.loop.step() or len(engine.text.get(leaving, [])) > 3)
    engine.loop.handle(Abort(leaving))
    run(engine)
    assert len(engine.text[leaving]) < 40
    return lengths


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3 gqa 3, tied", {}),
        ("qwen3_next that repeats itself", dict(checkpoints=40)),
    ],
)
def test_computed_tokens_and_hits_of_all_tiers_are_the_prompts(
    name: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    case = tmp_path / "model"
    case.mkdir()
    family, overrides = CASES[name]
    make_tiny(case, family, **overrides)
    engine = WholeEngine(
        config_of(case), pages=DEVICE_PAGES, page_tokens=PAGE, slots=4, max_tokens=96,
        host_gib=HOST_PAGES * 4096 / 2**30, disk=Disk(path=str(tmp_path / "pages"), gib=0.1),
        **sizes,
    )  # fmt: skip
    assert engine.runner.disk.scanned.wait(20)
    engine.memory.tier.costs = TransferCosts(page_s=0, token_s=1, start_s=-1e9)  # always load
    rng = np.random.default_rng(0)
    lengths = serve(engine, [rng.integers(0, 199, 41).tolist() for _ in range(12)])
    stats = engine.scheduler.stats()
    tiers = stats.tiers
    assert stats.num_preemptions > 0 and tiers["host.evicted"] > 0
    assert min(tiers[f"{tier}.hit_tokens"] for tier in ("gpu", "host", "disk")) > 0
    assert engine.cached.keys() == lengths.keys()
    prompt, cached = sum(lengths.values()), sum(engine.cached.values())  # as usage has them
    check_metrics(metrics_of(stats), stats, prompt, cached)
    engine.runner.disk.close()


def check_metrics(page: dict[str, float], stats: Stats, prompt: int, cached: int) -> None:
    """Compare /metrics and the report of bench with the sums of usage over all requests."""
    tiers = stats.tiers
    hits = by_label(page, "nanovllm:tier_hit_tokens_total", "tier")
    assert hits == {tier: tiers[f"{tier}.hit_tokens"] for tier in ("host", "disk")}
    hits["gpu"] = by_label(page, "vllm:prefix_cache_hits_total")[""]
    assert hits["gpu"] == tiers["gpu.hit_tokens"]
    sources = by_label(page, "vllm:prompt_tokens_by_source_total", "source")
    assert sources == {
        "local_compute": prompt - cached,
        "local_cache_hit": hits["gpu"],
        "external_kv_transfer": hits["host"] + hits["disk"],
    }
    assert sum(sources.values()) == sources["local_compute"] + sum(hits.values()) == prompt
    counters = {
        "vllm:prompt_tokens_total": prompt,
        "vllm:prompt_tokens_cached_total": cached,
        "vllm:prefix_cache_queries_total": prompt,
        "vllm:external_prefix_cache_queries_total": prompt - hits["gpu"],
        "vllm:external_prefix_cache_hits_total": hits["host"] + hits["disk"],
    }
    assert {counter: by_label(page, counter)[""] for counter in counters} == counters
    assert tiers["asked_tokens"] == prompt
    shares = hits_by_tier({}, page)
    parts = [shares[f"Hits in {tier}"] for tier in ("host tier (%)", "disk tier (%)")]
    assert sum(parts) == pytest.approx(shares["Hits in other tiers (%)"])
    computed = 100 * sources["local_compute"] / prompt
    assert computed + shares["Hits in GPU memory (%)"] + sum(parts) == pytest.approx(100)
    # Loads after preemptions and for aborted requests also move bytes, but are not hits.
    moved = tiers["host.loaded"] + tiers["disk.loaded"]
    assert PAGE * moved > hits["host"] + hits["disk"]
    for kind, num_pages in (("load", moved), ("store", tiers["host.stored"])):
        num_bytes = by_label(page, f"vllm:kv_offload_{kind}_bytes_total", "tier")["host"]
        assert num_bytes >= num_pages * tiers["host.page_bytes"]
