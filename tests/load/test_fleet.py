"""The fleet on paper: times by hand, caches, ways to choose an engine, and parted prefill."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest

from nanovllm.bench.agents import AgentLoad, TurnPlan
from nanovllm.server.router import RequestRouter
from tests.load.fleet.__main__ import agents, main, parted
from tests.load.fleet.engine import (
    COPY_BYTES_PER_S,
    KV_BYTES,
    MIXED,
    Job,
    PaperEngine,
    decode_s,
    prompt_s,
)
from tests.load.fleet.routing import POLICIES
from tests.load.fleet.simulate import Fleet, alone, poisson


def run_all(engine: PaperEngine) -> list[tuple[float, Job]]:
    """Run an engine until it is idle. Return the ends of requests."""
    ended = []
    while (at := engine.next_event()) < float("inf"):
        ended += [(at, job) for job in engine.advance(at)]
    return ended


def test_measured_times() -> None:
    """Near the records that engine.py names."""
    assert prompt_s(4000, 0) * 16 == pytest.approx(16 * 4000 / 44_271, rel=0.15)
    assert decode_s(1, 384) == pytest.approx(4.2e-3, rel=0.05)
    assert decode_s(256, 256 * 256) == pytest.approx(10.8e-3, rel=0.15)


def test_one_request_by_hand() -> None:
    engine = PaperEngine()
    engine.add(Job(0, 8000, 101, 0.0))
    ((at, job),) = run_all(engine)
    assert job.first_s == pytest.approx(prompt_s(8000, 0))
    assert at - job.first_s == pytest.approx(100 * decode_s(1, 8050))
    assert (engine.held, engine.cached_tokens, engine.load) == (0, 8000, 0)


def test_a_prompt_slows_decode_and_is_slowed_by_it() -> None:
    engine = PaperEngine()
    engine.add(Job(0, 1000, 10_001, 0.0))
    engine.add(Job(1, 8000, 1, 0.0))
    first = engine.next_event()
    engine.advance(first)
    second = engine.next_event()
    assert second - first == pytest.approx(prompt_s(8000, 0) / (1 - 1 / MIXED))
    engine.advance(second)
    steps = (second - first) / (MIXED * decode_s(1, 6000))
    assert engine.ticks == pytest.approx(steps)


def test_what_is_cached_evicted_and_loaded() -> None:
    """Room for two sessions: the third evicts the end of the first. Host memory keeps it."""
    for host, loaded in ((0, 0), (10_000, 801)):
        engine = PaperEngine(capacity=2200, host=host)
        for session in (0, 1, 2):
            engine.add(Job(session, 1000, 1, 0.0, shared=100))
            run_all(engine)
        assert engine.cached_tokens <= 2200 and engine.held == 0
        assert engine.known(0, 100) == (1000 if host else 199)
        again = Job(0, 1100, 1, engine.now, shared=100)
        engine.add(again)
        run_all(engine)
        assert (again.cached, again.loaded) == (199, loaded)
        left = 1100 - 199 - loaded
        took = prompt_s(left, 199 + loaded) + loaded * KV_BYTES / COPY_BYTES_PER_S
        assert again.first_s - again.sent_s == pytest.approx(took)
    assert engine.known(9, 100) == 100  # of another session, the shared prefix


def two_turns(session: int) -> Iterator[TurnPlan]:
    yield TurnPlan(prompt=1000, answer=10, reusable=0, result=1000, pause_s=0.0)
    yield TurnPlan(prompt=1500, answer=10, reusable=1000, result=490, pause_s=1.0)


def test_hits_by_policy() -> None:
    """One session: in turn, its second request goes to the other engine and finds nothing."""
    hits = {}
    for name, policy in POLICIES.items():
        engines = [PaperEngine(), PaperEngine()]
        hits[name] = Fleet(engines, policy(engines)).run(two_turns, [0.0])["hits_percent"]
    found = pytest.approx(100 * 1000 / 2500)
    assert hits == {"round robin": 0, "least load": 0, "our estimate": found, "exact caches": found}


def test_the_estimate_chooses_as_the_servers_router_does() -> None:
    """Conversations of whole pages, of which each prompt repeats the previous one."""
    engines = [PaperEngine(capacity=4000) for _ in range(3)]
    ours = POLICIES["our estimate"](engines)
    router = RequestRouter([4000 // 10] * 3, 10, prefill_weight=1.0, load_weight=128.0)
    rng, sizes, texts = Random(5), dict.fromkeys(range(8), 0), {}
    same = 0
    for _ in range(60):
        session = rng.choice([*sizes])
        sizes[session] += 10 * rng.randint(1, 30)
        text = texts.setdefault(session, [session] * 9)
        text += [rng.randrange(1000) for _ in range(sizes[session] + 1 - len(text))]
        loads = [float(rng.randrange(4)) for _ in engines]
        routed = router.route(text, "", "", loads)
        router.sent(routed)
        router.done(routed, routed.num_cached * 10)
        for engine, load in zip(engines, loads, strict=True):
            engine.queue.clear()
            engine.queue.extend([Job(-1, 1, 1, 0.0)] * int(load))
        chosen = ours.choose(Job(session, sizes[session] + 1, 1, 0.0), np.array(loads, np.int64))
        same += chosen == routed.engine
    assert same >= 50  # ties, and whole conversations evicted instead of pages, differ


def test_prefill_apart_by_hand() -> None:
    fleet = parted(2, 1)
    found = fleet.run(alone(8000, 101), [0.0])
    copied_s = 8000 * KV_BYTES / COPY_BYTES_PER_S
    assert found["ttft_p50_s"] == pytest.approx(prompt_s(8000, 0) + copied_s)
    assert found["token_p50_ms"] == pytest.approx(1e3 * decode_s(1, 8050))
    both = parted(2).run(alone(8000, 256), poisson(40, 4.0))
    apart = parted(2, 1).run(alone(8000, 256), poisson(40, 4.0))
    assert apart["gap_p99_ms"] < both["gap_p99_ms"] and apart["ttft_p50_s"] > both["ttft_p50_s"]


def test_affinity_serves_agents_and_every_request_ends() -> None:
    load = AgentLoad(sessions=32)
    total = sum(len([*load.planned(session)]) for session in range(32))
    hits = {}
    for policy in POLICIES:
        fleet = parted(4, 0, policy, shared=load.shared_len)
        hits[policy] = fleet.run(load.planned, [0.0] * 32, 20)["hits_percent"]
        assert len(fleet.facts.ttft_s) == total
        assert all(engine.held == engine.load == 0 for engine in fleet.engines)
    reusable = load.reusable_percent
    assert hits["our estimate"] == pytest.approx(reusable, abs=1.0)
    assert hits["exact caches"] == pytest.approx(reusable, abs=1.0)
    assert hits["round robin"] < 75 and hits["least load"] < 75


def test_host_memory_serves_more_sessions() -> None:
    plain = agents(1, "our estimate", 18)
    tiered = agents(1, "our estimate", 18, host=3_000_000)
    assert plain["hits_percent"] < 80 and tiered["hits_percent"] > 90
    assert tiered["gpu_hits_percent"] < tiered["hits_percent"]
    assert tiered["requests_per_minute"] > 1.3 * plain["requests_per_minute"]


def test_the_command_writes_a_record_and_a_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = "tests.load.fleet.__main__"
    for name, value in {"LOADS": (4,), "RATES": (8.0,), "APART": (0, 2), "PER_ENGINE": 2}.items():
        monkeypatch.setattr(f"{short}.{name}", value)
    plot, path = tmp_path / "fleet.svg", tmp_path / "fleet.json"
    main(["--engines", "1,2", "--plot", str(plot), "--json", str(path)])
    record = json.loads(path.read_text())
    assert record["kind"] == "load" and record["workload"]["name"] == "fleet"
    assert record["metrics"]["2_engines,_our_estimate_hits_percent"] > 90
    assert (
        "our estimate" in plot.read_text() and "2 engines, round robin" in capsys.readouterr().out
    )
