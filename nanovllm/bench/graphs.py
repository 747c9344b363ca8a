"""Every captured graph against the eager run of the same step: time, memory, logits, padding.

Knows what a runner is, not how one is built.

Decision: the rows are made-up requests of random tokens, lengths and cached keys, not padding rows.
Padding rows are all alike, so a graph that reads another row's slot would give the right logits.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import msgspec
import numpy as np
import pandas as pd
import torch
from msgspec import Struct
from msgspec.structs import replace

from nanovllm.config import ConfigError, Recipe
from nanovllm.plan import Chunk, StepPlan
from nanovllm.runner.batch import StepRows
from nanovllm.runner.graphs import Captured
from nanovllm.runner.piecewise import CapturedPiecewise
from nanovllm.runner.runner import Forwarded, Runner
from nanovllm.runner.warm import padding_rows

CONTEXT = 1024  # longest made-up request, where the cache holds that many for every slot
ROUNDS, STEPS = 3, 10  # the median of so many times, each of so many steps
MOST_DECODES = 64  # beside prompt chunks
MOST_OFF = 0.05  # of the largest logit; rounding in bfloat16 stays well below


class GraphCost(Struct, frozen=True, kw_only=True):
    mode: str
    rows: int  # of piecewise ones: tokens
    capture_ms: float
    memory_mib: float
    replay_ms: float
    eager_ms: float
    max_logit_difference: float
    largest_logit: float
    used: float = 0.0  # share of the load's steps, which are decode steps
    padding: float = 0.0  # padding rows / rows in these steps

    @property
    def is_right(self) -> bool:
        return self.max_logit_difference <= MOST_OFF * self.largest_logit  # False for a NaN


def context_of(runner: Runner) -> tuple[int, int]:
    """How many slots are to be filled, and the most tokens in each: no two share a page.

    Behind the tokens there is room for drafts.
    """
    num_pages = runner.caches.tensors[0].shape[1] - 1
    filled = min(runner.slots.padding, num_pages)
    most = min(CONTEXT, num_pages // filled * runner.slots.page_tokens, runner.slots.max_tokens)
    return filled, most - runner.num_drafts


@torch.inference_mode()
def occupy(runner: Runner, seed: int = 0) -> None:
    """Made-up requests, each about to feed its newest token."""
    slots = runner.slots
    filled, most = context_of(runner)
    each = -(-(most + runner.num_drafts) // slots.page_tokens)
    random = torch.Generator(runner.device).manual_seed(seed)
    slots.tokens_NL[:filled].random_(0, runner.model.embed.weight.shape[0], generator=random)
    slots.lengths_N[:filled].random_(most // 2, most, generator=random)
    # Page 0 is for padding.
    slots.pages_NM[:filled, :each] = torch.arange(1, filled * each + 1).view(filled, each)
    for pages_LPSGA in runner.caches.tensors:
        pages_LPSGA[:, 1 : filled * each + 1].normal_(generator=random)
    runner.builder.static_slots_R[:filled] = torch.arange(filled, device=runner.device)


def spread(runner: Runner, num_tokens: int, width: int) -> int:
    """Ragged counts for decode rows of up to `width` tokens. Returns how many they feed in all."""
    counts = 1 + np.arange(min(context_of(runner)[0], num_tokens)) % width
    counts[counts.cumsum() > num_tokens] = 0
    runner.builder.static_counts_R[: len(counts)] = torch.from_numpy(counts.astype(np.int32))
    return int(counts.sum())


@torch.inference_mode()
def measure(runner: Runner, load: range) -> Iterator[GraphCost]:
    """Smallest graph first, then the piecewise ones. Spoils the runner's slots and caches.

    `load`: rows of the decode steps.
    """
    occupy(runner)
    for (size, width), captured in runner.graphs.captured.items():
        fed = [rows for rows in load if runner.graphs.fit(rows, 1) == (size, width)]
        decode = runner.builder.padded(size, width, runner.slots.max_tokens)
        padding = 1 - sum(fed) / (len(fed) * size) if fed else 0.0
        mode = "FULL/decode" if width == 1 else f"FULL/decode of {width}"
        runs = partial(runner.forward, decode), partial(runner.graphs.replay, (size, width))
        graph = compared(runner, mode, size, captured, *runs, spread(runner, size, width))
        yield replace(graph, used=len(fed) / len(load), padding=padding)
    runner.slots.lengths_N //= 2  # leaves the requests room for chunks
    for size, piecewise in runner.piecewise.captured.items():
        eager = partial(runner.forward, mixed_rows(runner, size))
        yield compared(runner, "PIECEWISE/mixed", size, piecewise, eager, partial(eager, size))


def compared(
    runner: Runner,
    mode: str,
    size: int,
    captured: Captured | CapturedPiecewise,
    eager: Callable[[], object],
    replay: Callable[[], object],
    num_fed: int | None = None,
) -> GraphCost:
    """`num_fed`: so many tokens, the first ones, are not padding."""
    expected, found = (logits(runner, step)[:num_fed] for step in (eager, replay))
    return GraphCost(
        mode=mode,
        rows=size,
        capture_ms=1e3 * captured.seconds,
        memory_mib=captured.bytes_used / 2**20,
        max_logit_difference=float((found - expected).abs().max()),
        largest_logit=float(expected.abs().max()),
        replay_ms=1e3 * seconds_of(replay, runner.device),
        eager_ms=1e3 * seconds_of(eager, runner.device),
    )


def mixed_rows(runner: Runner, num_tokens: int) -> StepRows:
    """Decode rows, and as many chunks of other requests as it takes."""
    filled, most = context_of(runner)
    num_decodes = min(MOST_DECODES, filled // 2, num_tokens // 2)
    starts = range(num_decodes, num_tokens, most // 2)
    chunks = [
        Chunk(slot, min(most // 2, num_tokens - start), True)
        for slot, start in zip(range(num_decodes, filled), starts, strict=False)
    ]
    decodes = np.arange(num_decodes, dtype=np.int32).tobytes()
    plan = StepPlan(0, [], [], num_decodes, decodes, chunks, runner.slots.max_tokens, [])
    return runner.builder.rows(plan)


def logits(runner: Runner, step: Callable[[], object]) -> torch.Tensor:
    """Those of the step, each time from the same recurrent states, if there are any: it moves them.

    Where drafts may come, the states lag behind by any number of tokens that they can.
    """
    random = torch.Generator(runner.device).manual_seed(1)
    lags_N = torch.arange(runner.slots.padding, device=runner.device) % (2 + runner.num_drafts)
    for *states, drafting, _ in runner.states.by_layer.values():
        drafting.lengths_N[:-1] = runner.slots.lengths_N[:-1] - lags_N
        for made_up in states:
            if made_up is not None and made_up.is_floating_point():  # are no tickets
                made_up[: len(lags_N)].normal_(generator=random)
    forwarded = step()
    assert isinstance(forwarded, Forwarded) and forwarded.logits_SV is not None
    return forwarded.logits_SV.float()


def seconds_of(step: Callable[[], object], device: torch.device) -> float:
    """The seconds of one step among many, enqueued one after another as the engine does."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = []
    for _ in range(ROUNDS):
        step()
        wait()
        started = time.perf_counter()
        for _ in range(STEPS):
            step()
        wait()
        times.append((time.perf_counter() - started) / STEPS)
    return median(times)


def why_eager(runner: Runner, recipe: Recipe) -> dict[str, str | None]:
    """The runner's own answers for every kind of step. None: a graph is replayed."""
    slots, most = int(recipe.schedule.slots), int(recipe.schedule.step_tokens)
    captured = max(runner.piecewise.captured, default=1)
    decode = runner.builder.padded(slots, 1, runner.slots.max_tokens)
    found = {f"decode, 1 to {slots} rows": runner.why_eager(decode)}
    for low, high in ((1, captured), (captured + 1, most)):
        if high > low:
            why = runner.why_eager(padding_rows(runner, 1, high))
            found[f"prefill and mixed, {low} to {high} tokens"] = why
    return found | {"sampling, after either": "its launches depend on what the rows ask for"}


def metrics(graphs: Sequence[GraphCost]) -> dict[str, float]:
    """The metrics of a record. Padding: padding rows / rows over all replays of the load."""
    rows = sum(graph.used * graph.rows for graph in graphs)
    padding = sum(graph.used * graph.rows * graph.padding for graph in graphs)
    names = "replay_ms", "eager_ms", "max_logit_difference"
    return {
        "graphs": float(len(graphs)),
        "capture_s": sum(graph.capture_ms for graph in graphs) / 1e3,
        "memory_mib": sum(graph.memory_mib for graph in graphs),
        "padding_percent": 100 * padding / rows if rows else 0.0,
    } | {f"{g.mode} {g.rows}: {name}": getattr(g, name) for g in graphs for name in names}


def rows_of(load: str | None, slots: int) -> range:
    """Rows of decode steps, each as often as any other."""
    found = re.fullmatch(r"(\d+)-(\d+)", load or f"1-{slots}")
    if found is None:
        raise ConfigError(f"--load {load}: write the fewest and the most rows, as in 1-64")
    low, high = map(int, found.groups())
    if not 1 <= low <= high <= slots:
        raise ConfigError(f"--load {load}: a step has 1 to {slots} rows (schedule.slots)")
    return range(low, high + 1)


def table(graphs: Sequence[GraphCost]) -> str:
    """One row for each, and the sums of what they cost."""
    shown = pd.DataFrame(msgspec.to_builtins(graphs))
    sums = shown[["capture_ms", "memory_mib"]].sum().to_dict()
    shown["eager/replay"] = shown["eager_ms"] / shown["replay_ms"]
    shown[""] = ["" if graph.is_right else "FAIL" for graph in graphs]
    shown = pd.concat([shown, pd.DataFrame([{"mode": "all", "rows": len(graphs)} | sums])])
    return str(shown.to_string(index=False, na_rep="", float_format="{:,.3f}".format))
