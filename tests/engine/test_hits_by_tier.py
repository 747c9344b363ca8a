"""Each prompt token is counted once: as computed, or as a hit of the tier that it came from."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanovllm.bench.agents import hits_by_tier
from nanovllm.bench.report import by_label, samples_of
from nanovllm.config import Disk
from nanovllm.engine.tickets import Tickets
from nanovllm.kv.costs import TransferCosts
from nanovllm.server.metrics import Metrics, Seen, render
from nanovllm.transfer.leases import Lease
from nanovllm.wire import Abort, Ready, Stats
from tests.models.tiny import CASES, config_of, make_tiny
from tests.runner.test_roles import spec_of, with_role
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


class Handovers:
    """A prefill engine P, and a decode engine D that reads its pages and has a small cache."""

    def __init__(self, model: Path, disk: Disk | None, **sizes: Any) -> None:
        config = config_of(model)
        sizes = dict(page_tokens=PAGE, slots=4, max_tokens=96) | sizes
        self.p = WholeEngine(with_role(config, "prefill", "127.0.0.1:0"), pages=200, **sizes)
        self.lender = self.p.runner.lender
        self.ended: list[Lease] = []
        self.lender.call_when_ended(self.ended.append)
        address = "{}:{}".format(*self.lender.server.address)
        self.d = WholeEngine(
            with_role(config, "decode", address), pages=DEVICE_PAGES,
            host_gib=HOST_PAGES * 4096 / 2**30, disk=disk, **sizes,
        )  # fmt: skip
        self.remote = self.d.runner.remote
        self.d.memory.tier.costs = TransferCosts(page_s=0, token_s=1, start_s=-1e9)
        self.lengths: dict[int, int] = {}
        self.readable, self.gate = True, threading.Event()
        self.gate.set()
        source = self.lender.server._source
        self.read_page = source.page
        self.lender.server._source = source._replace(page=self.page)

    def page(self, page: int, share: int, shares: int) -> memoryview:
        self.gate.wait(60)
        if not self.readable:
            raise OSError("the memory has been closed")
        return self.read_page(page, share, shares)

    def submit(self, prompt: list[int], max_new: int, *, has_ticket: bool = True) -> int:
        """Send a request to D, after P has computed its prompt if it has a ticket."""
        name, ticket = len(self.lengths), ""
        self.lengths[name] = len(prompt)
        if has_ticket:
            self.p.loop.handle(spec_of(name, prompt, 1, lends=True))
            self.p.run()
            ticket = json.loads(self.p.handovers[name])["nanovllm_ticket"]
        spec = spec_of(name, prompt, max_new, ticket=ticket)
        if ticket:
            eventually(lambda: self.remote._client.reads_from(self.lender.engine))
            Tickets(self.remote, PAGE).offer(spec, b"")
        self.d.loop.handle(spec)
        return name

    def run(self) -> None:
        """Run D's requests and transfers, and take back the pages of P whose leases have ended."""
        run(self.d)
        for name in self.lengths:
            self.remote.settle(name)
        eventually(lambda: not len(self.lender.leases))
        while self.ended:
            lease = self.ended.pop()
            self.p.scheduler.take_back(lease.pages, lease.state)

    def close(self) -> None:
        self.d.runner.disk.close()
        self.lender.close()

    def serve(self, prompts: list[list[int]]) -> None:
        """Serve prompts with hits on all tiers, failed transfers, aborts and preemptions."""
        for prompt in prompts[:6]:
            self.submit(prompt, 2)
            self.run()
        for prompt in reversed(prompts[:6]):  # the latest are on the device, the first in host
            self.submit(prompt, 2, has_ticket=False)
            self.run()
        for prompt in (prompts[0], prompts[5]):  # first pages of D's own, the others of P
            self.submit([*prompt[:20], *prompts[6][:21]], 2)
            self.run()
        self.readable = False
        for prompt in (prompts[7], [*prompts[1][:20], *prompts[8]]):
            failed = self.submit(prompt, 2)
            self.run()
            assert self.d.cached[failed] <= 20
        self.readable = True
        self.gate.clear()
        leaving = self.submit(prompts[8], 2)
        self.d.loop.step()
        assert leaving in self.d.scheduler.queue.arriving
        self.d.loop.handle(Abort(leaving))
        self.gate.set()
        self.run()
        self.lengths[leaving] = 0  # it has not started
        for prompt in prompts[9:13]:  # four texts of up to 23 pages preempt each other
            self.submit(prompt, 48)
        self.run()
        for prompt in prompts[:3]:  # on disk, if there is one
            self.submit(prompt, 2, has_ticket=False)
            self.run()


@pytest.mark.parametrize(
    ("name", "sizes", "below"),
    [
        ("qwen3 gqa 3, tied", {}, ["host", "peer"]),
        (
            "qwen3_next that repeats itself",
            dict(checkpoints=40),
            ["host", "disk", "peer"],
        ),
    ],
)
def test_computed_tokens_and_hits_with_those_of_prefill_servers_are_the_prompts(
    name: str, sizes: dict[str, Any], below: list[str], tmp_path: Path
) -> None:
    case = tmp_path / "model"
    case.mkdir()
    family, overrides = CASES[name]
    make_tiny(case, family, **overrides)
    disk = Disk(path=str(tmp_path / "pages"), gib=0.1) if "disk" in below else None
    pair = Handovers(case, disk, **sizes)
    rng = np.random.default_rng(0)
    pair.serve([rng.integers(0, 199, 41).tolist() for _ in range(13)])
    engine, lengths = pair.d, pair.lengths
    stats = engine.scheduler.stats()
    tiers = stats.tiers
    assert {key.partition(".")[0] for key in tiers if "." in key} == {"gpu", *below}
    assert stats.num_preemptions > 0 and tiers["peer.failed"] == 2
    assert min(tiers[f"{tier}.hit_tokens"] for tier in ("gpu", *below)) > 0
    prompt, cached = sum(lengths.values()), sum(engine.cached.values())
    check_metrics(metrics_of(stats), stats, prompt, cached, below)
    pair.close()


def check_metrics(
    page: dict[str, float],
    stats: Stats,
    prompt: int,
    cached: int,
    below: Sequence[str] = ("host", "disk"),
) -> None:
    """Compare /metrics and the report of bench with the sums of usage over all requests."""
    tiers = stats.tiers
    hits = by_label(page, "nanovllm:tier_hit_tokens_total", "tier")
    assert hits == {tier: tiers[f"{tier}.hit_tokens"] for tier in below}
    loaded = sum(hits.values())
    hits["gpu"] = by_label(page, "vllm:prefix_cache_hits_total")[""]
    assert hits["gpu"] == tiers["gpu.hit_tokens"]
    sources = by_label(page, "vllm:prompt_tokens_by_source_total", "source")
    assert sources == {
        "local_compute": prompt - cached,
        "local_cache_hit": hits["gpu"],
        "external_kv_transfer": loaded,
    }
    assert sum(sources.values()) == sources["local_compute"] + sum(hits.values()) == prompt
    counters = {
        "vllm:prompt_tokens_total": prompt,
        "vllm:prompt_tokens_cached_total": cached,
        "vllm:prefix_cache_queries_total": prompt,
        "vllm:external_prefix_cache_queries_total": prompt - hits["gpu"],
        "vllm:external_prefix_cache_hits_total": loaded,
    }
    assert {counter: by_label(page, counter)[""] for counter in counters} == counters
    assert tiers["asked_tokens"] == prompt
    shares = hits_by_tier({}, page)
    parts = [shares.get(f"Hits in {tier} tier (%)", 0.0) for tier in below]
    assert sum(parts) == pytest.approx(shares["Hits in other tiers (%)"])
    computed = 100 * sources["local_compute"] / prompt
    assert computed + shares["Hits in GPU memory (%)"] + sum(parts) == pytest.approx(100)
    # Loads after preemptions and for aborted requests also move bytes, but are not hits.
    moved = sum(tiers[f"{tier}.loaded"] for tier in below)
    assert PAGE * moved > loaded
    for kind, num_pages in (("load", moved), ("store", tiers["host.stored"])):
        num_bytes = by_label(page, f"vllm:kv_offload_{kind}_bytes_total", "tier")["host"]
        assert num_bytes >= num_pages * tiers["host.page_bytes"]
