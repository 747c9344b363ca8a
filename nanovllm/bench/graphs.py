"""Every captured graph against the eager run of the same step: time, memory, logits, padding.

Knows what a runner is, not how results are shown.

Decision: the rows are made-up requests of random tokens, lengths and cached keys, not dead rows.
Dead rows are all alike, so a graph that reads another row's slot would give the right logits.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch
from msgspec import Struct

from nanovllm.config import Recipe
from nanovllm.runner.graphs import decode_rows
from nanovllm.runner.runner import Forwarded, Runner
from nanovllm.runner.warm import dead_rows

CONTEXT = 1024  # longest made-up request, where the cache holds that many for every slot
ROUNDS, STEPS = 3, 10  # the median of so many times, each of so many steps
MOST_OFF = 0.05  # of the largest logit; rounding in bfloat16 stays well below


class Graph(Struct, frozen=True, kw_only=True):
    mode: str
    rows: int
    capture_s: float
    memory_bytes: int
    replay_s: float
    eager_s: float
    difference: float  # largest, of any logit
    largest_logit: float
    used: float  # share of the load's steps
    padding: float  # dead rows / rows in these steps

    @property
    def is_right(self) -> bool:
        return self.difference <= MOST_OFF * self.largest_logit  # False for a NaN


class Kind(Struct, frozen=True, kw_only=True):
    """Steps that run alike."""

    steps: str
    why_eager: str | None  # None: a graph is replayed


def longest(runner: Runner) -> int:
    """Tokens of a request, at most."""
    return runner.slots.tokens_NL.shape[1] - 1


def context_of(runner: Runner) -> tuple[int, int]:
    """How many slots are to be filled, and the most tokens in each: no two share a page."""
    num_pages = runner.caches[0].k_PSGA.shape[0] - 1
    filled = min(runner.slots.dead, num_pages)
    return filled, min(CONTEXT, num_pages // filled * runner.slots.page_tokens, longest(runner))


@torch.inference_mode()
def occupy(runner: Runner, seed: int = 0) -> None:
    """Made-up requests, each about to feed its newest token."""
    slots = runner.slots
    filled, most = context_of(runner)
    each = -(-most // slots.page_tokens)
    random = torch.Generator(runner.device).manual_seed(seed)
    slots.tokens_NL[:filled].random_(0, runner.model.embed.weight.shape[0], generator=random)
    slots.lengths_N[:filled].random_(most // 2, most, generator=random)
    pages = torch.arange(1, filled * each + 1, device=runner.device)  # page 0 is the dead one
    slots.pages_NM[:filled, :each] = pages.view(filled, each)
    for cache in runner.caches:
        for cells in (cache.k_PSGA, cache.v_PSGA):
            cells[1 : filled * each + 1].normal_(generator=random)
    runner.graphs.static_slots_R[:filled] = torch.arange(filled, device=runner.device)


@torch.inference_mode()
def measure(runner: Runner, load: range) -> Iterator[Graph]:
    """Smallest graph first. Spoils the runner's slots and caches. `load`: rows of the steps."""
    occupy(runner)
    steps = Counter(runner.graphs.fit(rows) for rows in load)
    for size, captured in sorted(runner.graphs.captured.items()):

        def replay(size: int = size) -> object:
            return runner.graphs.replay(size)

        def eager(size: int = size) -> object:
            rows = decode_rows(runner.graphs.static_slots_R[:size], longest(runner))
            return runner.graphs.run(rows)

        expected, found = logits(eager()).float(), logits(replay()).float()
        fed = sum(rows for rows in load if runner.graphs.fit(rows) == size)
        yield Graph(
            mode="FULL/decode",
            rows=size,
            capture_s=captured.seconds,
            memory_bytes=captured.bytes_used,
            difference=float((found - expected).abs().max()),
            largest_logit=float(expected.abs().max()),
            replay_s=seconds_of(replay, runner.device),
            eager_s=seconds_of(eager, runner.device),
            used=steps[size] / len(load),
            padding=1 - fed / (steps[size] * size) if steps[size] else 0.0,
        )


def logits(forwarded: object) -> torch.Tensor:
    assert isinstance(forwarded, Forwarded) and forwarded.logits_SV is not None
    return forwarded.logits_SV


def seconds_of(step: Callable[[], object], device: torch.device) -> float:
    """Of one step among many, enqueued one after another as the engine does."""
    times = []
    for _ in range(ROUNDS):
        step()
        wait(device)
        started = time.perf_counter()
        for _ in range(STEPS):
            step()
        wait(device)
        times.append((time.perf_counter() - started) / STEPS)
    return median(times)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kinds(runner: Runner, recipe: Recipe) -> list[Kind]:
    """Every kind of step, as the runner itself answers for it."""
    slots = int(recipe.schedule.slots)
    decode = decode_rows(runner.graphs.static_slots_R, longest(runner))
    mixed = dead_rows(runner, 1, 2)
    return [
        Kind(
            steps=f"decode, 1 to {slots} rows",
            why_eager=runner.graphs.why_eager(decode),
        ),
        Kind(
            steps="prefill and mixed, any prompt chunk",
            why_eager=runner.graphs.why_eager(mixed),
        ),
        Kind(
            steps="sampling, after either",
            why_eager="its launches depend on what the rows ask for",
        ),
    ]


def padded_share(graphs: Sequence[Graph]) -> float:
    """Dead rows / rows over all replays of the load."""
    rows = sum(graph.used * graph.rows for graph in graphs)
    dead = sum(graph.used * graph.rows * graph.padding for graph in graphs)
    return dead / rows if rows else 0.0
