"""Gaps between the tokens of running streams while pages arrive from host memory.

    python -m tests.load.arriving RECIPE --prompts 3 --tokens 25000 --set cache.host_gib=32

Serves the recipe. In each round, long prompts are computed, and other prompts then take their place
on the device. Streams start and are measured alone for a while, which is the quiet time. The long
prompts then return all at once, and their pages arrive. They return once more, with their pages on
the device. Gaps are compared between these times. A time ends with the last one's first token. Each
long prompt computes one token in a step of its own kind, which is longer than a decode step without
any transfer. So the ratio of both returns shows what the transfer does. Prints and records the
percentiles of all rounds, and the bytes that arrived.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from nanovllm.bench.measure import Sample, now
from nanovllm.config import ConfigError
from tests.load.tiered import TieredServer, arguments, conclude, log, serving

PERCENTILES = (50, 90, 99)
START_S = 0.2  # after their start, streams are not measured for this time
PAUSE_S = 0.1  # between the two returns of the long prompts
SLOW = 1.5  # times the quiet P99
SHOWN = 4  # slowest steps of a return that are printed


class Window(NamedTuple):
    """Times of the monotonic clock."""

    start: float
    end: float


class Round(NamedTuple):
    streams: list[Sample]
    returned: list[Sample]  # of the long prompts
    quiet: Window
    arrival: Window
    hits: Window  # of the second return, whose pages are on the device
    steps: Sequence[dict[str, Any]] = ()  # of /debug/steps, with both returns


def check(server: TieredServer, options: argparse.Namespace) -> None:
    """Raise ConfigError if the long prompts and the streams do not fit at the same time."""
    size = server.page_tokens
    long = options.prompts * -(-options.tokens // size + 1)
    streams = options.streams * (-(-(options.input_len + options.output_len) // size) + 1)
    gpu, host = server.gpu_pages, server.pages("host")
    if gpu < long + streams or host < 2 * long + gpu:
        raise ConfigError(
            f"the prompts take {long} pages and the streams {streams}; the device has {gpu}, and "
            f"host memory {host}, of which {2 * long + gpu} are needed"
        )


def measured(server: TieredServer, options: argparse.Namespace, nth: int) -> Round:
    """Run one round."""
    names = [f"round {nth} long {i}" for i in range(options.prompts)]
    num_tokens = server.whole_pages(options.tokens)
    bodies = [server.body(name, num_tokens) for name in names]
    before = server.settle()
    for body in bodies:
        asyncio.run(server.ask(body))
    server.push_out(server.gpu_pages, num_tokens)
    server.check_stored("host", before, options.prompts * (num_tokens // server.page_tokens))
    streams = [
        server.body(f"round {nth} stream {i}", options.input_len, options.output_len)
        for i in range(options.streams)
    ]
    return asyncio.run(beside(server, streams, bodies, options.quiet))


async def beside(
    server: TieredServer, streams: Sequence[bytes], bodies: Sequence[bytes], quiet_s: float
) -> Round:
    """Run streams. After `quiet_s` seconds, also send the other requests, all at once, twice."""
    running = [asyncio.create_task(server.ask(body)) for body in streams]
    await asyncio.sleep(quiet_s)
    returned, arrival = await sent_together(server, bodies)
    await asyncio.sleep(PAUSE_S)
    _, hits = await sent_together(server, bodies)
    steps = await asyncio.to_thread(server.steps)
    done = await asyncio.gather(*running)
    first = max(sample.stamps[0] for sample in done) + START_S
    return Round(done, returned, Window(first, arrival.start), arrival, hits, steps)


async def sent_together(
    server: TieredServer, bodies: Sequence[bytes]
) -> tuple[list[Sample], Window]:
    """Send requests all at once. Return them, and the time until the last one's first token."""
    sent = time.perf_counter()
    returned = await asyncio.gather(*map(server.ask, bodies))
    return returned, Window(sent, max(sample.stamps[0] for sample in returned))


def gaps_of(streams: Sequence[Sample], window: Window) -> list[Window]:
    """Return the gaps between chunks that overlap a window."""
    return [
        Window(before, after)
        for sample in streams
        for before, after in pairwise(sample.stamps)
        if before < window.end and after > window.start
    ]


def gaps_ms(streams: Sequence[Sample], window: Window) -> list[float]:
    """Return the lengths of the gaps that overlap a window, in milliseconds."""
    return [1e3 * (gap.end - gap.start) for gap in gaps_of(streams, window)]


def num_steps(streams: Sequence[Sample], window: Window, over_ms: float = 0.0) -> int:
    """Return the number of steps that end the gaps of a window, of those longer than `over_ms`.

    Gaps that end within half of the shortest gap are those of one step.
    """
    gaps = gaps_of(streams, window)
    apart = min((gap.end - gap.start for gap in gaps), default=0.0) / 2
    ends = sorted(gap.end for gap in gaps if 1e3 * (gap.end - gap.start) > over_ms)
    return len(ends[:1]) + sum(after - before > apart for before, after in pairwise(ends))


def slowest(steps: Sequence[dict[str, Any]], window: Window) -> list[str]:
    """Return a line for each of the SHOWN steps of a window that took longest."""
    periods = [
        (1e3 * (step["ended_s"] - before["ended_s"]), step)
        for before, step in pairwise(steps)
        if window.start < step["ended_s"] and before["ended_s"] < window.end
    ]
    periods.sort(key=lambda one: -one[0])
    return [
        f"{ms:.1f} ms: {step['mode']}, {step['rows']} decode rows, chunks "
        f"{[num_tokens for _, num_tokens in step['chunks']]}, {len(step['admitted'])} admitted; "
        f"host {1e3 * step['host_s']:.1f}, device {1e3 * step['device_s']:.1f}, "
        f"device waited {1e3 * step['bubble_s']:.1f}"
        for ms, step in periods[:SHOWN]
    ]


def metrics_of(rounds: Sequence[Round]) -> dict[str, float]:
    """Return percentiles over all rounds of the three times, and ratios of these.

    Raise RuntimeError if a time has no gaps, since the streams were then too short.
    """
    found: dict[str, float] = {}
    for name in ("quiet", "arrival", "hits"):
        gaps = [gap for one in rounds for gap in gaps_ms(one.streams, getattr(one, name))]
        if not gaps:
            raise RuntimeError(f"no stream ran at the {name} time; raise --output-len")
        for percent in PERCENTILES:
            found[f"{name}_gap_p{percent}_ms"] = float(np.percentile(gaps, percent))
        found[f"{name}_gap_max_ms"] = max(gaps)
        found[f"{name}_gaps"] = len(gaps)
        for key, over_ms in (("steps", 0.0), ("slow_steps", SLOW * found["quiet_gap_p99_ms"])):
            found[f"{name}_{key}"] = sum(
                num_steps(one.streams, getattr(one, name), over_ms) for one in rounds
            )
    for percent in PERCENTILES:
        key = f"gap_p{percent}_ms"
        found[f"gap_p{percent}_ratio"] = found[f"arrival_{key}"] / found[f"quiet_{key}"]
        found[f"gap_p{percent}_over_hits"] = found[f"arrival_{key}"] / found[f"hits_{key}"]
    lengths = [one.arrival.end - one.arrival.start for one in rounds]
    found["arrival_ms"] = 1e3 * float(np.median(lengths))
    ended = [min(sample.stamps[-1] for sample in one.streams) for one in rounds]
    found["rounds_outlasted"] = sum(
        one.hits.end < end for one, end in zip(rounds, ended, strict=True)
    )
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=200, help="tokens of a stream's prompt")
    parser.add_argument("--output-len", type=int, default=768)
    parser.add_argument("--prompts", type=int, default=3, help="number of long prompts")
    parser.add_argument("--tokens", type=int, default=25_000, help="of each long prompt")
    parser.add_argument("--quiet", type=float, default=2.0, help="seconds before they return")
    options = parser.parse_args(words)
    started_at = now()
    with serving(options.recipe, options.sets) as (config, server):
        check(server, options)
        measured(server, options, -1)  # the round that is not measured
        before = server.loaded()
        rounds = [measured(server, options, nth) for nth in range(options.rounds)]
        num_bytes, seconds = (a - b for a, b in zip(server.loaded(), before, strict=True))
    for nth, one in enumerate(rounds):
        for name, window in (("arrival", one.arrival), ("hits", one.hits)):
            for line in slowest(one.steps, window):
                log.info("round %d, %s: a step of %s", nth, name, line)
    metrics = metrics_of(rounds) | {
        "arrived_gib": num_bytes / len(rounds) / 2**30,
        "load_gb_per_s": num_bytes / seconds / 1e9 if seconds else 0.0,
        "cached_tokens": sum(one.cached_tokens for one in rounds[-1].returned),
    }
    names = ("streams", "input_len", "output_len", "prompts", "tokens", "quiet", "rounds")
    load = {name: getattr(options, name) for name in names}
    conclude(options, config, started_at, metrics, {"name": "arriving", **load})


if __name__ == "__main__":
    main()
