"""Memory plans as a table, a record and a plot, and the same numbers measured on a GPU.

Decision: the share of rank 0 is measured alone, on one GPU, with random weights. The memory of a
full step depends neither on the weights nor on the other ranks. Only buffers between ranks are
missing.
"""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from msgspec.structs import replace

from nanovllm.bench.gpus import CPU, Gpu, gpu_of
from nanovllm.bench.plan import (
    GRAPHS,
    LOGPROBS,
    OTHERS,
    STEP,
    WEIGHTS,
    MemoryPlan,
    nearest,
    pins,
    plan_of,
)  # fmt: skip
from nanovllm.bench.sweep import COLOURS, new_figure, save
from nanovllm.config import Config, ConfigError, Recipe
from nanovllm.kv.costs import break_even
from nanovllm.kv.disk.format import file_bytes
from nanovllm.kv.split import host_page_bytes
from nanovllm.models.config import read_model_config
from nanovllm.parallel.cut import check_cut
from nanovllm.parallel.mesh import first_rank
from nanovllm.runner.build import largest_steps, load, run_padding, with_caches
from nanovllm.runner.resolved import GIB, resolve_config
from nanovllm.runner.room import need_of, remedy
from nanovllm.server.ranges import MAX_TOP_LOGPROBS
from nanovllm.speculate import rates_problem

USUAL_LENGTHS = 500, 2000
ROWS = 1, 64, 256  # sizes of steps whose lower bounds of time are shown


@dataclass(frozen=True)
class Profile:
    answer: str  # one sentence: if the model fits, and the number of requests
    title: str
    columns: dict[str, dict[str, float]]
    notes: list[str]  # lines below the table
    plans: dict[str, MemoryPlan]  # by column
    pinned: MemoryPlan | None  # the first plan that fits, otherwise the nearest one that would
    fits: bool

    @property
    def text(self) -> str:
        def shown(value: float) -> str:
            return f"{value:,.{0 if value.is_integer() else 2}f}"

        table = pd.DataFrame(self.columns).to_string(na_rep="-", float_format=shown)
        table = table if self.columns else "no plan"
        parts = [self.answer, "", self.title, "", table, "", *self.notes]
        if self.pinned is not None:
            about = "To pin this plan" if self.fits else "For the nearest plan that fits"
            parts += ["", f"{about}, add to the recipe:", pins(self.pinned)]
        return "\n".join(parts)

    @property
    def metrics(self) -> dict[str, float]:
        values = pd.DataFrame(self.columns).unstack().dropna()
        return {": ".join(key): float(value) for key, value in values.items()}


def profile(
    config: Config,
    name: str | None,
    ranks: Sequence[int],
    lengths: tuple[int, ...],
    accept: Sequence[float] = (),
) -> Profile:
    """Return a plan for each number of ranks, also measured if this machine has the GPU.

    `accept` replaces speculate.accept in times per token. Raise ConfigError for lengths beyond the
    context, for rates that do not fit the drafts, or for an invalid recipe.
    """
    accept = rates_of(config.recipe, accept)
    gpu_here = None
    if torch.cuda.is_available() and config.recipe.device != "cpu":
        total = torch.cuda.get_device_properties(0).total_memory / GIB
        gpu_here = gpu_of(f"{torch.cuda.get_device_name()}:{total:.2f}")
    gpu = gpu_of(name) if name is not None else gpu_here or CPU
    plans, lines, fitting = {}, [], []
    first, own = first_rank(config.recipe.parallel), read_model_config(config)[1]
    for size in ranks:
        head = f"{'ep' if first.lanes > 1 else 'tp'} {size}"
        try:
            check_cut(first.first_of(size), own)
        except ConfigError as error:
            lines.append(f"{head}: {error}")
            continue
        plan = plans[head] = plan_of(config, gpu, size)
        most = plan.resolved.max_model_tokens
        lengths = lengths or tuple(n for n in USUAL_LENGTHS if n <= most) or (most,)
        if max(lengths) > most:
            raise ConfigError(f"--lengths {max(lengths)}: server.max_model_tokens is {most}")
        problem = plan.problem(lengths)
        lines.append(f"{head}: does not fit: {problem}" if problem else f"{head}: fits")
        if not problem:
            fitting.append(plan)
            if gpu_here is not None and gpu_here.name == gpu.name:
                measured = plans[f"{head} measured"] = measure(config, plan)
                used = sum(plan.used.values()) / sum(measured.used.values())
                tokens = plan.tokens / measured.tokens
                lines[-1] += f"; computed / measured: taken {used:.4f}, tokens {tokens:.4f}"
    pinned = fitting[0] if fitting else nearest(config, gpu, lengths)
    return Profile(
        answer=answer(
            config.recipe.model,
            gpu,
            lines=lines,
            plans=plans,
            fitting=fitting,
            pinned=pinned,
            lengths=lengths,
        ),
        title=f"{config.recipe.model} on {gpu.facts}",
        columns={head: numbers(plan, lengths, accept) for head, plan in plans.items()},
        notes=lines,
        plans=plans,
        pinned=pinned,
        fits=bool(fitting),
    )


def answer(
    model: str,
    gpu: Gpu,
    *,
    lines: Sequence[str],
    plans: Mapping[str, MemoryPlan],
    fitting: Sequence[MemoryPlan],
    pinned: MemoryPlan | None,
    lengths: Sequence[int],
) -> str:
    """Return the result in one sentence. `lines` are the lines below the table."""
    if fitting and pinned is not None:
        counts = ((requests_of(pinned, length), length) for length in lengths)
        room = " or ".join(
            f"{count:,} request{'' if count == 1 else 's'} of {length:,} tokens"
            for count, length in counts
        )
        cached = f"its cache of {pinned.tokens:,} tokens"
        return f"{model} fits on {place_of(pinned, gpu)}, and {cached} has room for {room}."
    first = next(iter(plans.values()), None)
    if pinned is not None:
        cure = f"the nearest plan that fits is for {place_of(pinned, gpu)}, below"
    elif gpu is CPU:
        cure = remedy(need_of(first.resolved)) if first is not None else "try another --tp"
    else:
        cure = "no number of these GPUs is enough"
    if first is None:
        return f"{model} cannot be split like this: {lines[0]}; {cure}."
    problem = first.problem(lengths)
    return f"{model} does not fit on {place_of(first, gpu)}: {problem}; {cure}."


def place_of(plan: MemoryPlan, gpu: Gpu) -> str:
    size = plan.resolved.mesh.size
    if gpu is CPU:
        return "this CPU" if size == 1 else f"this CPU with {size} ranks"
    return f"one {gpu.name}" if size == 1 else f"{size} {gpu.name}s"


def requests_of(plan: MemoryPlan, length: int) -> int:
    """Return the number of requests of a length that fit; slots limit recurrent states."""
    slots = int(plan.resolved.recipe.schedule.slots) if plan.resolved.layout.state else plan.pages
    return min(slots, plan.pages // plan.pages_of(length)) * plan.resolved.mesh.lanes


def rates_of(recipe: Recipe, accept: Sequence[float]) -> Sequence[float]:
    """Return `accept`, or the recipe's rates if it is empty. Raise ConfigError if it is invalid."""
    speculate = recipe.speculate
    if speculate is None:
        if accept:
            raise ConfigError("--accept: the recipe has no drafts; add --set speculate.method=NAME")
        return ()
    if accept and (problem := rates_problem(accept, speculate.tokens)):
        raise ConfigError(f"--accept is {', '.join(map('{:g}'.format, accept))}; {problem}")
    return accept or speculate.accept


def numbers(
    plan: MemoryPlan, lengths: Sequence[int], accept: Sequence[float] = ()
) -> dict[str, float]:
    """Return a plan's numbers by name and unit. Times are lower bounds, for rows that have room.

    `accept` is as in the recipe's section `speculate`; empty if it is unknown.
    """
    row = {f"{name}, GiB": num / GIB for name, num in plan.used.items() if num}
    row["room for the cache, GiB"] = plan.room / GIB
    for group in plan.resolved.layout.paged:
        layers = f"{len(group.layers)} layers"
        row[f"key/value heads, {layers}"] = group.num_heads
        row[f"a token, {layers}, KiB"] = group.bytes_per_token / 1024
        row[f"a page, {layers}, MiB"] = group.bytes_per_token * plan.resolved.page_tokens / 2**20
    lanes, ranks = plan.resolved.mesh.lanes, plan.resolved.mesh.size * plan.recipe.parallel.dp
    row |= plan.split.numbers(lengths, ranks) | {"lanes": lanes, "context": plan.context}
    if plan.adapters.host_bytes:
        row["all adapters in the host's memory, GiB"] = ranks * plan.adapters.host_bytes / GIB
    row |= numbers_below(plan, max(lengths))
    if accept:
        row["tokens of a request in a step"] = 1 + sum(accept)
    for length in lengths:
        fitting = requests_of(plan, length)
        row[f"requests of {length:,}"] = fitting
        for name, least in (("decode", plan.decode_s), ("prefill", plan.prefill_s)):
            for rows in ROWS if plan.gpu.gb_per_s else ():
                time = least(rows, length) if rows <= fitting else float("nan")
                row[f"{name} {rows} x {length:,}, ms"] = 1e3 * time
        for rows in ROWS if plan.gpu.gb_per_s and plan.recipe.num_drafts else ():
            if rows <= fitting:
                row |= drafted_numbers(plan, rows, length, accept)
    return {name: float(value) for name, value in row.items()}


def drafted_numbers(
    plan: MemoryPlan, rows: int, length: int, accept: Sequence[float]
) -> dict[str, float]:
    """Return the least time of a decode step with all drafts, and per token of a request.

    Without rates, return the number of accepted drafts in a step from which drafts save time.
    """
    drafted_s, name = plan.drafted_s(rows, length), f"{rows} x {length:,}"
    row = {f"decode with {plan.recipe.num_drafts} drafts {name}, ms": 1e3 * drafted_s}
    if accept:
        token_s = drafted_s / (1 + sum(accept))
        return row | {f"a token with {plan.recipe.num_drafts} drafts {name}, ms": 1e3 * token_s}
    pays = drafted_s / plan.decode_s(rows, length) - 1
    return row | {f"drafts pay from, accepted a step {name}": pays}


def numbers_below(plan: MemoryPlan, length: int) -> dict[str, float]:
    """Return the pages that fit on disk, and lengths in tokens from which loads pay.

    `length`: tokens of a prompt whose computation is compared. The ranks of an engine share the
    disk, and engines share its pages. Rates are those that an engine assumes at its start.
    """
    cache, size, layout = plan.recipe.cache, plan.resolved.page_tokens, plan.resolved.layout
    if not cache.host_gib:
        return {}
    page_bytes = host_page_bytes(layout, size)
    row: dict[str, float] = {}
    if cache.disk is not None:
        pages = int(cache.disk.gib * GIB) // file_bytes(page_bytes) // plan.resolved.mesh.size
        row |= {"pages on disk": pages, "tokens on disk": pages * size}
    if plan.gpu.gb_per_s:
        token_s = plan.prefill_s(1, length) / length
        parts = -(-layout.bytes_per_state // page_bytes)  # each is read like a page
        pays = break_even(token_s, page_bytes / size, parts * page_bytes)
        row |= {f"loads from {name} pay from, tokens": math.ceil(n) for name, n in pays.items()}
    return row


def draw(path: Path, profile: Profile) -> None:
    """Draw the parts of memory, one bar per plan. Raise ConfigError like `sweep.save`."""
    figure = new_figure(8.0, 1.8 + 0.4 * len(profile.plans))
    axes = figure.add_subplot()
    plans = profile.plans.items()
    parts = {name: plan.used | plan.split.bytes for name, plan in plans}
    bars = pd.DataFrame(parts).T[::-1] / GIB
    bars[LOGPROBS] = bars.pop(LOGPROBS)  # last: beyond the dashed line
    bars.loc[:, bars.any()].plot.barh(stacked=True, ax=axes, color=COLOURS, legend=False)
    axes.set(title=profile.title, xlabel="GiB; dashed: cache.memory_fraction of what there is")
    for _, plan in plans:
        axes.axvline(plan.share / GIB, color="black", linestyle="dashed")
        axes.axvline((plan.share + plan.spare) / GIB, color="black")
    figure.legend(loc="outside lower left", ncols=4)
    save(figure, path)


def measure(config: Config, plan: MemoryPlan) -> MemoryPlan:
    """Return the plan with sizes measured on this GPU. Raise ConfigError if memory is too small."""
    parallel = replace(config.recipe.parallel, tp=1)  # other ranks are not needed
    config = replace(config, recipe=replace(config.recipe, parallel=parallel))
    resolved = resolve_config(config, plan.resolved.mesh)
    clear_workspaces()  # the step takes a new one, which is part of its memory
    held = torch.cuda.memory_allocated(resolved.device)  # what earlier measurements have left
    (model, draft_model), device = load(config, resolved), resolved.device
    weights = torch.cuda.memory_allocated(device) - held
    one_page = replace(resolved.recipe, cache=replace(resolved.recipe.cache, pages=1))
    runner = with_caches(dataclasses.replace(resolved, recipe=one_page), model, draft_model)[0]
    most = peak(partial(largest_steps, runner, resolved.recipe))
    used = {WEIGHTS: weights, STEP: most - weights - held}
    free, total = torch.cuda.mem_get_info(device)
    used |= {OTHERS: total - free - torch.cuda.memory_reserved(device), GRAPHS: GIB}
    columns, before = runner.sampler.columns.host, torch.cuda.memory_allocated(device)
    columns["num_logprobs"][:], columns["special"][:] = 1 + MAX_TOP_LOGPROBS, True
    used[LOGPROBS] = peak(partial(run_padding, runner, runner.slots.padding, 1)) - before
    del model, draft_model, runner
    gc.collect()
    torch.cuda.empty_cache()
    share = int(total * resolved.recipe.cache.memory_fraction)
    return dataclasses.replace(plan, share=share, spare=total - share, used=used)


def clear_workspaces() -> None:
    """Free the workspaces of cuBLAS, for which torch has no public name."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def peak(step: Callable[[], None]) -> int:
    """Return the maximum allocated bytes while `step` runs."""
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
