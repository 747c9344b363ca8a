"""/health reports a stalled engine, and /metrics has every metric of the dashboard."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from nanovllm.bench.report import samples_of
from nanovllm.ipc.channel import frame
from nanovllm.server.metrics import HttpCounts, Metrics, Seen, counted, render
from nanovllm.wire import Beat, Stats
from tests.end_to_end.demo_server import Server, start
from tests.server.fake_engine import READY
from tests.server.serving import Api, eventually, serving

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"(?:vllm|nanovllm):\w+|process_\w+")


@pytest.fixture(scope="module")
def paper() -> Iterator[Server]:
    server = start(str(ROOT / "recipes" / "paper.yaml"), "--set", "server.stall_s=2")
    yield server
    assert server.stop() == 0


def test_a_stopped_engine_is_a_stall_until_it_goes_on(paper: Server) -> None:
    pid = paper.engine_pid()
    with httpx.Client(base_url=paper.url, trust_env=False, timeout=20) as http:
        assert http.get("/health").status_code == 200
        os.kill(pid, signal.SIGSTOP)
        try:
            eventually(lambda: http.get("/health").status_code == 503, 30.0)
            assert http.get("/health").json()["error"]["code"] == "stalled"
        finally:
            os.kill(pid, signal.SIGCONT)
        eventually(lambda: http.get("/health").status_code == 200, 30.0)


def test_an_idle_engine_is_healthy_for_longer_than_a_stall_takes(paper: Server) -> None:
    deadline = time.monotonic() + 3.0
    with httpx.Client(base_url=paper.url, trust_env=False) as http:
        while time.monotonic() < deadline:
            assert http.get("/health").status_code == 200
            age = [v for k, v in samples_of(http.get("/metrics").text).items() if "step_age" in k]
            assert age == [0.0]
            time.sleep(0.25)


@pytest.fixture(scope="module")
def beaten(tmp_path_factory) -> Iterator[Api]:
    """Yield an API process whose engine sends its beats on request."""
    with serving(tmp_path_factory.mktemp("api")) as api:
        yield api


def beat(api: Api, step_age_s: float, late_s: float) -> None:
    data = frame(msgspec.msgpack.Encoder(), Beat(step_age_s, late_s))

    async def send() -> None:
        for peer in api.engine._peers:
            peer.write(data)

    asyncio.run_coroutine_threadsafe(send(), api.engine._loop).result()


def test_a_step_that_hangs_is_a_stall(beaten: Api) -> None:
    beat(beaten, 8.0, 3.0)
    assert beaten.http.get("/health").status_code == 200  # a long prompt, just within the limit
    beat(beaten, 20.0, 10.5)
    eventually(lambda: beaten.http.get("/health").status_code == 503)
    assert "longer than any earlier one" in beaten.http.get("/health").text
    ages = [v for k, v in samples_of(beaten.http.get("/metrics").text).items() if "step_age" in k]
    assert len(ages) == 1 and 20.0 <= ages[0] < 25.0
    beat(beaten, 0.0, 0.0)
    eventually(lambda: beaten.http.get("/health").status_code == 200)


# -- the dashboard ---------------------------------------------------------------------------


def expressions() -> list[str]:
    board = json.loads((ROOT / "recipes" / "grafana.json").read_text())
    panels = [p for p in board["panels"] if p["type"] != "row"]
    assert len({p["id"] for p in panels}) == len(panels)
    for panel in panels:
        assert panel["title"] and panel["targets"] and panel["gridPos"]["w"] <= 24
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_every_expression_of_the_dashboard_finds_its_metric(paper: Server) -> None:
    with httpx.Client(base_url=paper.url, trust_env=False, timeout=20) as http:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        assert http.post("/v1/chat/completions", json={"messages": 1}).status_code == 400
        samples: dict[str, set[str]] = {}

        def tell(page: str) -> None:
            for key in samples_of(page):
                name, _, labels = key.partition("{")
                samples.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))

        def has_told() -> bool:
            tell(http.get("/metrics").text)
            return "nanovllm:graph_steps_total" in samples

        eventually(has_told)
        assert not [name for name in samples if "spec_decode" in name]
        # Of a recipe that speculates, and has host memory for pages and adapters.
        tiers = {"host.pages": 1.0, "host.hit_tokens": 0.0, "host.load_bytes": 0.0}
        tiers |= {"host.store_bytes": 0.0, "host.stored": 0.0}
        adapters = {"running": {"pirate": 1}, "waiting": {"pirate": 0}}
        slots = {"capacity": 2, "loaded": 1, "in_use": 1}
        stats = Stats(accepted_by_position=[0], tiers=tiers, adapter_slots=slots, adapters=adapters)
        seen = Seen(ready=READY, stats=stats, metrics=Metrics())
        tell(render([seen], [counted([seen], HttpCounts())]).decode())
    asked = expressions()
    named = {name for expression in asked for name in NAME.findall(expression)}
    assert named <= samples.keys() and len(named) > 20
    for expression in asked:
        assert expression.count("(") == expression.count(")")
        has = set().union(*(samples[name] for name in NAME.findall(expression)))
        by = [
            part
            for group in re.findall(r"by \(([^)]*)\)", expression)
            for part in group.split(", ")
        ]
        matched = re.findall(r"(\w+)=~?\"", expression)
        assert set(by) | set(matched) <= has, expression


def test_the_dashboard_shows_what_an_operator_asks_for() -> None:
    named = {name for expression in expressions() for name in NAME.findall(expression)}
    assert named >= {
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:num_requests_waiting_by_reason",
        "vllm:kv_cache_usage_perc",
        "nanovllm:host_bubble_seconds_total",
        "nanovllm:graph_steps_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:external_prefix_cache_hits_total",
        "nanovllm:tier_pages",
        "nanovllm:adapter_requests",
        "nanovllm:adapter_slots",
    }
