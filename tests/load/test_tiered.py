"""The measurements of tiers: their arithmetic, and each of them against one server of the demo."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from nanovllm.bench import store
from nanovllm.bench.measure import Sample
from nanovllm.bench.record import Record
from nanovllm.config import ConfigError
from tests.forks import with_server_packages
from tests.load import arriving, copies, disk_tier, returning
from tests.load.arriving import Round, Window, gaps_ms, num_steps, slowest
from tests.load.tiered import TieredServer, serving

PAGE = 16
PAGE_BYTES = PAGE * 8192  # of the demo model
LOAD = Namespace(prompts=2, tokens=160, streams=3, input_len=60, output_len=120, quiet=0.5)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TieredServer]:
    """Yield a server of 96 pages on the device, 160 in host memory, and a disk."""
    folder = tmp_path_factory.mktemp("disk")
    page_gib = PAGE_BYTES / 2**30
    sets = [
        *(f"cache.page_tokens={PAGE}", "cache.pages=96", f"cache.host_gib={160 * page_gib}"),
        "cache.disk=" + json.dumps({"path": str(folder), "gib": 0.1}),
    ]
    with ExitStack() as stack:
        with with_server_packages().starts():
            _, started = stack.enter_context(serving("demo", sets))
        assert (started.page_tokens, started.gpu_pages, started.pages("host")) == (PAGE, 96, 160)
        yield started


# -- returning conversations ---------------------------------------------------------------------


def test_a_prompt_returns_from_each_tier(server: TieredServer) -> None:
    """The times of the demo are small, so that only the source of the tokens is compared."""
    server.push_out(4, 30)  # the server measures what a token costs
    before = server.hit_tokens()
    found = returning.returns(server, "a", server.whole_pages(260), has_disk=True)
    assert [*found] == ["computed", "gpu", "host", "disk"]
    assert {one.input_tokens for one in found.values()} == {257}
    assert [one.cached_tokens for one in found.values()] == [0, 256, 256, 256]
    after = server.hit_tokens()
    assert {tier: n - before[tier] for tier, n in after.items()} == {"host": 256.0, "disk": 256.0}
    assert server.loaded()[0] >= 32 * PAGE_BYTES


def test_a_prompt_that_an_earlier_run_left_on_the_disk_is_refused(server: TieredServer) -> None:
    num_tokens = server.whole_pages(160)
    asyncio.run(server.ask(server.body("again", num_tokens)))
    with pytest.raises(RuntimeError, match="160 tokens of a new prompt were cached; use an empty"):
        returning.returns(server, "again", num_tokens, has_disk=True)


def test_ratios_compare_with_the_computed_prompt() -> None:
    def taking(seconds: float, cached: int) -> Sample:
        return Sample(1.0, [1.0 + seconds, 9.0], input_tokens=257, cached_tokens=cached)

    rounds = [{"computed": taking(0.8, 0), "host": taking(host, 256)} for host in (0.1, 0.4, 0.08)]
    found = returning.metrics_of(rounds)
    assert found["computed_ttft_ms"] == pytest.approx(800) and found["host_cached_tokens"] == 256
    assert found["host_ttft_ms"] == pytest.approx(100)
    assert found["host_to_computed"] == pytest.approx(0.125)


def test_tiers_that_are_too_small_are_refused(server: TieredServer) -> None:
    with pytest.raises(ConfigError, match="a prompt takes 102 pages; the device has 96"):
        returning.check(server, 100 * PAGE)
    with pytest.raises(ConfigError, match="host_gib needs 180 pages"):
        returning.check(server, 40 * PAGE)
    with pytest.raises(ConfigError, match="the prompts take 118 pages and the streams 39"):
        arriving.check(server, Namespace(**vars(LOAD) | {"tokens": 60 * PAGE}))


# -- arriving pages ------------------------------------------------------------------------------


def test_streams_run_while_pages_arrive(server: TieredServer) -> None:
    arriving.check(server, LOAD)
    before = server.hit_tokens()["host"]
    one = arriving.measured(server, LOAD, 0)
    assert [len(one.streams), len(one.returned)] == [3, 2]
    assert {sample.output_tokens for sample in one.streams} == {120}
    assert [sample.cached_tokens for sample in one.returned] == [160, 160]
    assert server.hit_tokens()["host"] - before == 320
    assert one.quiet.end == one.arrival.start < one.arrival.end < one.hits.start < one.hits.end
    lines = [line for window in (one.arrival, one.hits) for line in slowest(one.steps, window)]
    assert 2 <= len(lines) <= 2 * arriving.SHOWN
    assert any("2 admitted" in line or "1 admitted" in line for line in lines)


def test_gaps_are_those_that_overlap_a_window() -> None:
    """A stream has gaps of 10 ms while quiet, 30 ms when pages arrive, and 20 ms with hits."""
    stamps = [1.0, 1.01, 1.02, 1.03, 1.06, 1.07, 1.09, 1.1]
    stream = Sample(0.9, stamps, output_tokens=8)
    quiet, arrival, hits = Window(1.005, 1.03), Window(1.035, 1.05), Window(1.075, 1.08)
    assert gaps_ms([stream], quiet) == pytest.approx([10, 10, 10])
    assert gaps_ms([stream], arrival) == pytest.approx([30])
    one = Round([stream], [Sample(1.035, [1.05])], quiet, arrival, hits)
    found = arriving.metrics_of([one])
    assert (found["quiet_gaps"], found["arrival_gaps"], found["rounds_outlasted"]) == (3, 1, 1)
    assert found["gap_p99_ratio"] == pytest.approx(3.0) and found["arrival_ms"] == pytest.approx(15)
    assert found["gap_p99_over_hits"] == pytest.approx(1.5)
    steps = {name: found[f"{name}_steps"] for name in ("quiet", "arrival", "hits")}
    slow = {name: found[f"{name}_slow_steps"] for name in steps}
    assert steps == {"quiet": 3, "arrival": 1, "hits": 1}
    assert slow == {"quiet": 0, "arrival": 1, "hits": 1}
    late = one._replace(arrival=Window(2.0, 2.1))
    with pytest.raises(RuntimeError, match="no stream ran at the arrival time"):
        arriving.metrics_of([late])


def test_gaps_of_all_streams_that_end_together_are_one_step() -> None:
    """Two streams have steps of 10 ms, of which the third takes 30 ms. The last one is later."""
    ends = [1.0, 1.01, 1.02, 1.05, 1.06]
    streams = [Sample(0.9, ends), Sample(0.9, [end + 0.001 for end in ends])]
    window = Window(1.005, 1.055)
    assert [num_steps(streams, window, ms) for ms in (0, 15, 40)] == [4, 1, 0]


def test_the_slowest_steps_are_shown_with_their_times() -> None:
    step = dict(mode="FULL/decode", rows=32, chunks=[], admitted=[], host_s=1e-3, device_s=4e-3)
    steps = [dict(step, ended_s=1 + 0.005 * nth, bubble_s=0.0) for nth in range(9)]
    steps[5:] = [dict(one, ended_s=one["ended_s"] + 0.02, bubble_s=0.015) for one in steps[5:]]
    steps[5] |= dict(mode="PIECEWISE/mixed", chunks=[[7, 1]], admitted=[{}])
    lines = slowest(steps, Window(1.001, 1.05))
    assert len(lines) == arriving.SHOWN and lines[0] == (
        "25.0 ms: PIECEWISE/mixed, 32 decode rows, chunks [1], 1 admitted; host 1.0, device 4.0, "
        "device waited 15.0"
    )
    assert slowest(steps, Window(1.06, 1.07)) == []


# -- copies --------------------------------------------------------------------------------------


def recorded(folder: Path) -> Record:
    """Return the only record below a folder of results."""
    (found,) = store.records(folder)
    assert found.kind == "load"
    return found


def test_rates_of_copies_are_recorded(tmp_path: Path) -> None:
    sets = ["--set", "load.format=dummy", "--set", "cache.page_tokens=16"]
    copies.main(["demo", *sets, "--pages", "4", "--rounds", "1", "--results-dir", str(tmp_path)])
    record = recorded(tmp_path)
    found = record.metrics
    assert record.workload == {"name": "copies", "pages": 4, "rounds": 1}
    assert found["page_mib"] == PAGE_BYTES / 2**20
    ratio = found["stores_gb_per_s"] / found["pinned_stores_gb_per_s"]
    assert found["stores_to_pinned"] == pytest.approx(ratio) and found["loads_gb_per_s"] > 0
    assert found["loads_with_stores_gb_per_s"] > 0 and record.changed["cache.page_tokens"] == 16


def test_rates_of_a_disk_are_recorded(tmp_path: Path) -> None:
    """Five pages of 256 KiB, through the store and by plain files of one and of two threads."""
    sizes = ["--gib", str(5 / 2**12), "--mib", "0.25", "--threads", "2"]
    disk_tier.main([str(tmp_path), *sizes, "--results-dir", str(tmp_path / "results")])
    record = recorded(tmp_path / "results")
    assert (record.workload["name"], record.workload["threads"]) == ("disk_tier", 2)
    rates = {name for name, rate in record.metrics.items() if rate > 0 and name != "is_direct"}
    plain = {f"plain_{way}_{count}_gb_per_s" for way in ("read", "write") for count in (1, 2)}
    assert rates == plain | {
        "checksum_gb_per_s", "store_read_gb_per_s", "store_write_gb_per_s",
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="has no files"):
        disk_tier.read_rate(tmp_path / "other")
    assert record.model == "none" and {path.name for path in tmp_path.iterdir()} == {
        "results",
        "other",
    }
