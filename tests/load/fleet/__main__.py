"""A fleet of engines on paper: which way to choose an engine, and when to part prefill and decode.

    python -m tests.load.fleet [--engines 1,8,64,1000] [--sessions 10000] [--plot FILE.svg]
        [--json PATH]

Sessions of the load "agents" (nanovllm/bench/agents.py) run on simulated engines. Three studies:
ways to choose an engine over the number of engines, with ten sessions an engine; sessions per
engine, with and without a cache in host memory; and eight engines that do everything against some
that compute prompts only and others that decode only.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import click

from nanovllm.bench.agents import AgentLoad
from nanovllm.bench.record import of_this_machine
from nanovllm.bench.store import put
from nanovllm.bench.sweep import new_figure, save
from tests.load.fleet.engine import CACHE_TOKENS, KV_BYTES, PaperEngine
from tests.load.fleet.routing import POLICIES
from tests.load.fleet.simulate import Fleet, alone, poisson

PER_ENGINE = 10  # sessions at a time
LOADS = (6, 10, 14, 18, 24, 32)  # sessions per engine of the second study
HOST_GIB = 400
SPREAD_S = 300.0  # first sessions start within this time, and requests in it are not measured
APART = (0, 2, 4, 6)  # of eight engines, those that only compute prompts; 0: all do everything
PROMPT, ANSWER = 8_000, 256  # of single requests
RATES = (4.0, 8.0, 16.0, 24.0, 32.0, 40.0)  # of single requests per second, on eight engines
SHOWN = ("hits_percent", "ttft_p50_s", "ttft_p99_s", "token_p50_ms", "gap_p99_ms",
         "requests_per_minute")  # fmt: skip
Found = dict[str, dict[str, float]]  # metrics by case


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", default="1,8,64,1000")
    parser.add_argument("--sessions", type=int, default=10_000, help="at most, in a run")
    parser.add_argument("--plot", type=Path, help="SVG file to write")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    began = datetime.now(UTC)
    sizes = [int(text) for text in options.engines.split(",")]
    found = by_policy(sizes, options.sessions) | by_load() | by_parts()
    if options.plot is not None:
        plot(sizes, found, options.plot)
    if options.json is not None:
        metrics = {f"{case}_{name}".replace(" ", "_"): value
                   for case, row in found.items() for name, value in row.items()}  # fmt: skip
        record = of_this_machine(
            kind="load",
            started_at=began.isoformat(timespec="seconds"),
            duration_s=(datetime.now(UTC) - began).total_seconds(),
            recipe={"model": "Qwen/Qwen3-8B", "engine": "paper"},
            changed={},
            workload={"name": "fleet", "sessions": options.sessions, "per_engine": PER_ENGINE},
            metrics=metrics,
        )
        put(record, options.json)


def by_policy(sizes: Sequence[int], most: int) -> Found:
    return {
        f"{size} engines, {policy}": told(
            f"{size} engines, {policy}", agents(size, policy, PER_ENGINE, most)
        )
        for size in sizes
        for policy in POLICIES
    }


def by_load(size: int = 8) -> Found:
    """Return the study of sessions per engine, by our estimate."""
    found: Found = {}
    for host_gib in (0, HOST_GIB):
        for per_engine in LOADS:
            case = f"{per_engine} sessions, {host_gib} GiB"
            host = int(host_gib * 2**30 / KV_BYTES)
            found[case] = told(case, agents(size, "our estimate", per_engine, host=host))
    return found


def by_parts(size: int = 8, count: int = 4_000) -> Found:
    """Return the study of engines for prompts and for decode, by single requests and agents."""
    found: Found = {}
    for apart in APART:
        for rate in RATES:
            case = f"{apart} of {size} for prompts, {rate:g} per s"
            fleet = parted(size, apart)
            found[case] = told(case, fleet.run(alone(PROMPT, ANSWER), poisson(count, rate)))
        case = f"{apart} of {size} for prompts, agents"
        found[case] = told(case, agents(size, "our estimate", PER_ENGINE, apart=apart))
    return found


def agents(
    size: int, policy: str, per_engine: int, most: int = 10_000, *, host: int = 0, apart: int = 0
) -> dict[str, float]:
    """Run sessions of agents, four for each that runs at a time but at most `most`."""
    at_once = size * per_engine
    total = max(at_once, min(4 * at_once, most))
    load, rng = AgentLoad(sessions=total), Random(f"starts {size}")
    starts_s = [SPREAD_S * rng.random() for _ in range(at_once)] + [0.0] * (total - at_once)
    fleet = parted(size, apart, policy, host, shared=load.shared_len, from_s=SPREAD_S)
    return fleet.run(load.planned, starts_s, at_once)


def parted(
    size: int, apart: int = 0, policy: str = "our estimate", host: int = 0, *,
    shared: int = 0, from_s: float = 0.0,
) -> Fleet:  # fmt: skip
    """Return a fleet in which `apart` engines only compute prompts; 0: all do everything."""
    engines = [PaperEngine(CACHE_TOKENS, host) for _ in range(apart or size)]
    decoders = [PaperEngine(computes=False) for _ in range(size - len(engines))]
    chosen = POLICIES[policy](engines)
    return Fleet(engines, chosen, decoders, shared=shared, from_s=from_s)


def told(case: str, metrics: dict[str, float]) -> dict[str, float]:
    """Print the metrics of a case, and return them."""
    click.echo(f"{case:<40}" + " ".join(f"{metrics[name]:10.2f}" for name in SHOWN))
    return metrics


def plot(sizes: Sequence[int], found: Found, path: Path) -> None:
    """Draw hits and first-token times by policy, host memory, and parts."""
    figure = new_figure(12, 7)
    hits, first, host, parts, gaps, agent = figure.subplots(2, 3).flat
    for policy in POLICIES:
        rows = [found[f"{size} engines, {policy}"] for size in sizes]
        hits.plot(sizes, [row["hits_percent"] for row in rows], "o-", label=policy)
        first.plot(sizes, [row["ttft_p50_s"] for row in rows], "o-", label=policy)
    for host_gib in (0, HOST_GIB):
        rows = [found[f"{load} sessions, {host_gib} GiB"] for load in LOADS]
        host.plot(LOADS, [row["ttft_p50_s"] for row in rows], "o-", label=f"{host_gib} GiB")
        agent.plot(
            LOADS, [row["requests_per_minute"] / 8 for row in rows], "o-", label=f"{host_gib} GiB"
        )
    for apart in APART:
        label = f"{apart} for prompts, {8 - apart} for decode" if apart else "8 for all"
        rows = [found[f"{apart} of 8 for prompts, {rate:g} per s"] for rate in RATES]
        parts.plot(RATES, [row["ttft_p50_s"] for row in rows], "o-", label=label)
        gaps.plot(RATES, [row["gap_p99_ms"] for row in rows], "o-", label=label)
    titles = {
        hits: ("Prompt tokens found cached", "engines", "%"),
        first: ("First token, median", "engines", "s"),
        host: ("First token, median, 8 engines", "sessions per engine", "s"),
        parts: ("8,000 in and 256 out: first token, median", "requests per second", "s"),
        gaps: ("8,000 in and 256 out: token gap, P99", "requests per second", "ms"),
        agent: ("Requests of agents", "sessions per engine", "per minute and engine"),
    }
    for axes, (title, x, y) in titles.items():
        axes.set(title=title, xlabel=x, ylabel=y)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=8)
    for axes in (hits, first):
        axes.set_xscale("log")
    for axes in (first, host, parts):
        axes.set_yscale("log")
    save(figure, path)


if __name__ == "__main__":
    main()
