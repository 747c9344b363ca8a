"""Comparison of each captured graph with the eager step: time, memory, results, padding.

Forward passes are compared by their logits. Draws are compared by bench/draws.py.

Decision: the rows are synthetic requests with random tokens, lengths and cached keys, not padding
rows. Padding rows are all equal, so a graph that reads another row's slot would compute the correct
logits. In steps with adapters the rows have random ones, and some rows have none.
"""

from __future__ import annotations

import dataclasses
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

from nanovllm.bench.draws import compare, restored, size_of
from nanovllm.config import ConfigError, Recipe
from nanovllm.plan import Chunk, StepPlan
from nanovllm.runner.adapters import AdapterBank
from nanovllm.runner.batch import StepRows
from nanovllm.runner.build import padding_rows
from nanovllm.runner.graphs import Captured, CapturedPiecewise, DecodeGraphs, Size
from nanovllm.runner.runner import Forwarded, Runner

CONTEXT = 1024  # longest synthetic request, if the cache can hold one per slot
ROUNDS, STEPS = 3, 10  # a time is the median of ROUNDS means of STEPS steps
MOST_DECODES = 64  # maximum decode rows next to prompt chunks
ADAPTER_SCALE = 0.05  # standard deviation of random adapters, whose deltas are like the products
FINITE_BYTES = 0x30, 0x40  # any such bytes are finite as fp8, bfloat16 and float32
MOST_OFF = 0.05  # tolerance relative to the largest logit; bfloat16 rounding is far less


class GraphCost(Struct, frozen=True, kw_only=True):
    mode: str
    rows: int  # tokens for piecewise graphs
    capture_ms: float
    memory_mib: float
    replay_ms: float
    eager_ms: float
    max_logit_difference: float = 0.0  # of a forward pass
    largest_logit: float = 0.0
    differences: int | None = None  # of a draw, see draws.compare; None: a forward pass
    # Fraction of the load's decode steps that use the graph. 0 for draws and adapters, which also
    # depend on the requests' parameters.
    used: float = 0.0
    padding: float = 0.0  # padding rows / rows in these steps

    @property
    def is_right(self) -> bool:
        if self.differences is not None:
            return self.differences == 0
        return self.max_logit_difference <= MOST_OFF * self.largest_logit  # False for a NaN

    @property
    def measured(self) -> list[tuple[str, float]]:
        """The times, and the difference from the eager step, by name."""
        times = [("replay_ms", self.replay_ms), ("eager_ms", self.eager_ms)]
        if self.differences is not None:
            return [*times, ("differences", self.differences)]
        return [*times, ("max_logit_difference", self.max_logit_difference)]


def context_of(runner: Runner) -> tuple[int, int]:
    """Return the number of slots to fill and the maximum tokens in each, without shared pages.

    There is room for drafts after the tokens.
    """
    num_pages = runner.caches.tensors[0].shape[1] - 1
    filled = min(runner.slots.padding, num_pages)
    most = min(CONTEXT, num_pages // filled * runner.slots.page_tokens, runner.slots.max_tokens)
    return filled, most - runner.num_drafts


@torch.inference_mode()
def occupy(runner: Runner, seed: int = 0) -> None:
    """Fill slots with synthetic requests whose next token is due.

    Every second one is drawn by temperature, the others are greedy.
    """
    slots = runner.slots
    filled, most = context_of(runner)
    each = -(-(most + runner.num_drafts) // slots.page_tokens)
    random = torch.Generator(runner.device).manual_seed(seed)
    slots.tokens_NL[:filled].random_(0, runner.model.embed.weight.shape[0], generator=random)
    slots.lengths_N[:filled].random_(most // 2, most, generator=random)
    # Page 0 is for padding.
    slots.pages_NM[:filled, :each] = torch.arange(1, filled * each + 1).view(filled, each)
    for pages_LPSGA in runner.caches.tensors:
        made_up = pages_LPSGA[:, 1 : filled * each + 1]
        if made_up.dtype == torch.uint8:  # an fp8 cache
            made_up.random_(*FINITE_BYTES, generator=random)
        else:
            made_up.normal_(generator=random)
    slots_F = torch.arange(filled, device=runner.device)
    runner.builder.static_slots_R[:filled] = slots_F
    runner.sampler.seeds_N[:filled] = slots_F
    runner.sampler.inverse_temperatures_N[:filled] = (slots_F % 2).float()


def spread(runner: Runner, rows: StepRows) -> int:
    """Set ragged token counts, up to `rows.width`, for decode rows. Return their sum.

    Rows for which no tokens are left are padding, as in a step.
    """
    counts = 1 + np.arange(min(context_of(runner)[0], len(rows.slots_R))) % rows.width
    counts[counts.cumsum() > rows.num_tokens] = 0
    slots = np.where(counts > 0, np.arange(len(counts)), runner.slots.padding)
    builder = runner.builder
    builder.static_counts_R.zero_()
    builder.static_counts_R[: len(counts)] = torch.from_numpy(counts.astype(np.int32))
    builder.static_slots_R.fill_(runner.slots.padding)
    builder.static_slots_R[: len(counts)] = torch.from_numpy(slots)
    return int(counts.sum())


def adapt(runner: Runner, bank: AdapterBank) -> None:
    """Give adapters of random numbers to most rows, and pages of ranks to these adapters."""
    random = torch.Generator(runner.device).manual_seed(2)
    bank.ranks_RX.normal_(0, ADAPTER_SCALE, generator=random)
    num_pages, filled = len(bank.owner_P), context_of(runner)[0]
    num_adapters = min(bank.options.slots, num_pages)
    bank.owner_P.copy_(torch.arange(num_pages) % num_adapters)
    bank.adapter_N[:filled] = torch.arange(filled, device=runner.device) % (1 + num_adapters) - 1


@torch.inference_mode()
def measure(runner: Runner, load: range) -> Iterator[GraphCost]:
    """Yield the costs of all graphs, at first of those without adapters.

    The runner's slots, caches and adapters are overwritten. `load` has the rows of the decode
    steps.
    """
    yield from measured(runner, load, adapted=False)
    if runner.adapters is not None:
        adapt(runner, runner.adapters)
        yield from measured(runner, load, adapted=True)


def measured(runner: Runner, load: range, *, adapted: bool) -> Iterator[GraphCost]:
    """Yield the costs of forward passes of decode rows, of draws, and of mixed forward passes.

    Each by increasing size.
    """
    occupy(runner)
    graphs, end = runner.graphs.of(adapted=adapted), " with adapters" * adapted
    decodes = graphs.decode
    for (size, width), captured in decodes.captured.items():
        fits = [rows for rows in load if decodes.fit(rows, 1) == (size, width)]
        fed = [] if adapted else fits
        decode = padded(runner, decodes, (size, width), adapted=adapted)
        padding = 1 - sum(fed) / (len(fed) * size) if fed else 0.0
        graph = compared(
            runner,
            mode=mode_of("decode", width) + end,
            size=size,
            captured=captured,
            eager=partial(runner.forward, decode),
            replay=partial(decodes.replay, (size, width)),
            num_fed=spread(runner, decode),
        )
        yield replace(graph, used=len(fed) / len(load), padding=padding)
    for name, draws in graphs.draws.items():
        for fixed in draws.captured:
            rows = padded(runner, draws, fixed, adapted=adapted)
            yield compared_draw(runner, mode_of(name, width=fixed[1]) + end, rows, draws)
    runner.slots.lengths_N //= 2  # so that requests have room for chunks
    for size, piecewise in graphs.mixed.captured.items():
        mixed = dataclasses.replace(mixed_rows(runner, size), adapted=adapted)
        eager = partial(runner.forward, mixed)
        yield compared(
            runner,
            mode="PIECEWISE/mixed" + end,
            size=size,
            captured=piecewise,
            eager=eager,
            replay=partial(eager, size),
        )


def padded(runner: Runner, graphs: DecodeGraphs, size: Size, *, adapted: bool) -> StepRows:
    """Return the rows of a graph."""
    rows = graphs.padded(size, runner.slots.max_tokens)
    return dataclasses.replace(rows, adapted=adapted)


def compared(
    runner: Runner,
    *,
    mode: str,
    size: int,
    captured: Captured | CapturedPiecewise,
    eager: Callable[[], object],
    replay: Callable[[], object],
    num_fed: int | None = None,
) -> GraphCost:
    """Compare a graph with the eager step. The first `num_fed` tokens are not padding."""
    expected, actual = (logits(runner, step)[:num_fed] for step in (eager, replay))
    return GraphCost(
        mode=mode,
        rows=size,
        capture_ms=1e3 * captured.seconds,
        memory_mib=captured.bytes_used / 2**20,
        max_logit_difference=float((actual - expected).abs().max()),
        largest_logit=float(expected.abs().max()),
        replay_ms=1e3 * seconds_of(replay, runner.device),
        eager_ms=1e3 * seconds_of(eager, runner.device),
    )


def mode_of(name: str, width: int) -> str:
    """Return the mode of a graph of decode rows with up to `width` tokens each."""
    return f"FULL/{name}" if width == 1 else f"FULL/{name} of {width}"


def compared_draw(runner: Runner, mode: str, rows: StepRows, draws: DecodeGraphs) -> GraphCost:
    """Compare a graph that draws for such rows with the eager draw from the same logits."""
    size = size_of(rows)
    captured, decodes = draws.captured[size], runner.graphs.of(adapted=rows.adapted).decode
    spread(runner, rows)
    logits(runner, partial(decodes.replay, size))  # the inputs of the draw
    eager, replay = partial(draws.run, rows), partial(draws.replay, size)
    with restored(runner.slots):
        differences = compare(runner, rows, eager, replay)
        return GraphCost(
            mode=mode,
            rows=size[0],
            capture_ms=1e3 * captured.seconds,
            memory_mib=captured.bytes_used / 2**20,
            replay_ms=1e3 * seconds_of(replay, runner.device),
            eager_ms=1e3 * seconds_of(eager, runner.device),
            differences=differences,
        )


def mixed_rows(runner: Runner, num_tokens: int) -> StepRows:
    """Return decode rows, and chunks of other requests up to `num_tokens`."""
    filled, most = context_of(runner)
    num_decodes = min(MOST_DECODES, filled // 2, num_tokens // 2)
    starts = range(num_decodes, num_tokens, most // 2)
    chunks = [
        Chunk(slot, min(most // 2, num_tokens - start), True)
        for slot, start in zip(range(num_decodes, filled), starts, strict=False)
    ]
    decodes = np.arange(num_decodes, dtype=np.int32).tobytes()
    plan = StepPlan(
        step=0,
        admits=[],
        grants=[],
        num_decodes=num_decodes,
        decodes=decodes,
        chunks=chunks,
        max_length=runner.slots.max_tokens,
        masked=[],
    )
    return runner.builder.rows(plan)


def logits(runner: Runner, step: Callable[[], object]) -> torch.Tensor:
    """Return the logits of a step. Reset the recurrent states first, since a step changes them.

    With drafts, the rows' states lag by all possible numbers of tokens.
    """
    random = torch.Generator(runner.device).manual_seed(1)
    lags_N = torch.arange(runner.slots.padding, device=runner.device) % (2 + runner.num_drafts)
    for *states, drafting, _ in runner.states.by_layer.values():
        drafting.lengths_N[:-1] = runner.slots.lengths_N[:-1] - lags_N
        for made_up in states:
            if made_up is not None and made_up.is_floating_point():  # skips integer tensors
                made_up[: len(lags_N)].normal_(generator=random)
    forwarded = step()
    assert isinstance(forwarded, Forwarded) and forwarded.logits_SV is not None
    return forwarded.logits_SV.float()


def seconds_of(step: Callable[[], object], device: torch.device) -> float:
    """Return the mean time of a step when many are enqueued, as in the engine."""
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


def eager_reason(runner: Runner, recipe: Recipe) -> dict[str, str | None]:
    """Return the runner's reasons to run each kind of step eagerly; None: a graph is replayed."""
    slots, most = int(recipe.schedule.slots), int(recipe.schedule.step_tokens)
    captured = max(runner.graphs.plain.mixed.captured, default=1)
    decode = runner.builder.padded(slots, 1, runner.slots.max_tokens)
    reasons = {f"decode, 1 to {slots} rows": runner.graphs.plain.eager_reason(decode)}
    for low, high in ((1, captured), (captured + 1, most)):
        if high > low:
            why = runner.graphs.plain.eager_reason(padding_rows(runner, 1, high))
            reasons[f"prefill and mixed, {low} to {high} tokens"] = why
    return reasons | {"sampling, after either": "its launches depend on the rows' parameters"}


def metrics(graphs: Sequence[GraphCost]) -> dict[str, float]:
    """Return the metrics of a record. Padding is padding rows / rows over the load's replays."""
    rows = sum(graph.used * graph.rows for graph in graphs)
    padding = sum(graph.used * graph.rows * graph.padding for graph in graphs)
    return {
        "graphs": float(len(graphs)),
        "capture_s": sum(graph.capture_ms for graph in graphs) / 1e3,
        "memory_mib": sum(graph.memory_mib for graph in graphs),
        "padding_percent": 100 * padding / rows if rows else 0.0,
    } | {f"{g.mode} {g.rows}: {name}": float(value) for g in graphs for name, value in g.measured}


def rows_of(load: str | None, slots: int) -> range:
    """Return the rows of the load's decode steps, which are equally frequent."""
    match = re.fullmatch(r"(\d+)-(\d+)", load or f"1-{slots}")
    if match is None:
        raise ConfigError(f"--load {load}: write the fewest and the most rows, as in 1-64")
    low, high = map(int, match.groups())
    if not 1 <= low <= high <= slots:
        raise ConfigError(f"--load {load}: a step has 1 to {slots} rows (schedule.slots)")
    return range(low, high + 1)


def table(graphs: Sequence[GraphCost]) -> str:
    """Return a table with one row per graph, and a row of sums."""
    shown = pd.DataFrame(msgspec.to_builtins(graphs))
    sums = shown[["capture_ms", "memory_mib"]].sum().to_dict()
    shown["differences"] = [
        "" if graph.differences is None else str(graph.differences) for graph in graphs
    ]
    shown["eager/replay"] = shown["eager_ms"] / shown["replay_ms"]
    shown[""] = ["" if graph.is_right else "FAIL" for graph in graphs]
    shown = pd.concat([shown, pd.DataFrame([{"mode": "all", "rows": len(graphs)} | sums])])
    return str(shown.to_string(index=False, na_rep="", float_format="{:,.3f}".format))
