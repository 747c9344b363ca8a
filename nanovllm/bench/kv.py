"""How much of a device's memory becomes cache, what fits into it, and why, in lines of text.

Knows bytes and tokens, not requests.

Decision: on a GPU the model is built with random weights: what a full step takes does not depend
on them, and nothing is read from a disk. On a CPU nothing is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from msgspec import Struct
from msgspec.structs import replace

from nanovllm.config import Config
from nanovllm.runner.build import load, with_caches
from nanovllm.runner.resolved import Resolved
from nanovllm.runner.room import weight_bytes
from nanovllm.runner.runner import Runner
from nanovllm.runner.sizing import GIB, num_pages_that_fit
from nanovllm.runner.warm import largest_steps


class Budget(Struct, frozen=True, kw_only=True):
    """A GPU's memory in bytes. What is left of `share` becomes pages."""

    total: int
    share: float  # cache.memory_fraction
    weights: int
    step: int  # the most a step takes beside the weights, measured
    others: int  # what is not ours, and what CUDA itself takes
    graphs: int  # kept free for them

    @property
    def room(self) -> int:
        taken = self.weights + self.step + self.others + self.graphs
        return int(self.total * self.share) - taken


class Fit(Struct, frozen=True, kw_only=True):
    token_bytes: int
    page_tokens: int
    weight_bytes: int
    room_bytes: int
    budget: Budget | None  # None on a CPU, where cache.cpu_gib says how much
    fitting_pages: int  # what room allows, and slots could use
    useful_pages: int  # of all slots' longest requests together
    asked_pages: int | None  # cache.pages, if the recipe says it
    slots: int
    context: int  # what server.max_model_tokens becomes

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_tokens

    @property
    def pages(self) -> int:
        return self.fitting_pages if self.asked_pages is None else self.asked_pages

    @property
    def tokens(self) -> int:
        return self.pages * self.page_tokens

    @property
    def limit(self) -> str:
        """What keeps it from being more pages."""
        if self.asked_pages is not None:
            return "cache.pages"
        if self.pages == self.useful_pages:
            return "schedule.slots x server.max_model_tokens"
        return "cache.cpu_gib" if self.budget is None else "cache.memory_fraction"

    def pages_of(self, num_tokens: int) -> int:
        """How many pages one request of so many tokens takes."""
        return -(-num_tokens // self.page_tokens)

    def requests_of(self, num_tokens: int) -> int:
        """How many such requests have room in the cache together; slots may allow fewer."""
        return self.pages // self.pages_of(num_tokens)


def fit(config: Config, found: Resolved) -> Fit:
    """Raises ConfigError when not even one page fits."""
    recipe, device = found.recipe, found.device
    slots = int(recipe.schedule.slots)
    useful_pages = slots * -(-found.max_model_tokens // found.page_tokens)
    runner = None if device.type == "cpu" else runner_of(config, found)
    pages = num_pages_that_fit(
        recipe,
        found.layout,
        page_tokens=found.page_tokens,
        useful_pages=useful_pages,
        full_step=lambda: None if runner is None else largest_steps(runner, recipe),
        device=device,
    )
    weights = weight_bytes(found)
    budget = None if runner is None else budget_of(found, weights)
    asked_pages = None if recipe.cache.pages == "auto" else int(recipe.cache.pages)
    return Fit(
        token_bytes=found.layout.bytes_per_token,
        page_tokens=found.page_tokens,
        weight_bytes=weights,
        room_bytes=int(recipe.cache.cpu_gib * GIB) if budget is None else budget.room,
        budget=budget,
        fitting_pages=pages,
        useful_pages=useful_pages,
        asked_pages=asked_pages,
        slots=slots,
        context=found.context_in(asked_pages or pages),
    )


def runner_of(config: Config, found: Resolved) -> Runner:
    """With random weights and one page."""
    recipe = config.recipe
    random = replace(config, recipe=replace(recipe, load=replace(recipe.load, format="dummy")))
    one_page = replace(found.recipe, cache=replace(found.recipe.cache, pages=1))
    return with_caches(dataclasses.replace(found, recipe=one_page), load(random, found))[0]


def budget_of(found: Resolved, weights: int) -> Budget:
    """While the runner that took the full steps is still there."""
    free, total = torch.cuda.mem_get_info(found.device)
    return Budget(
        total=total,
        share=found.recipe.cache.memory_fraction,
        weights=weights,
        step=torch.cuda.max_memory_allocated(found.device) - weights,
        others=total - free - torch.cuda.memory_reserved(found.device),
        graphs=GIB,
    )


def lines(found: Resolved, fitted: Fit, each: int) -> Iterator[str]:
    recipe = found.recipe
    yield f"{recipe.model} on {found.device_name}, {recipe.dtype}"
    yield ""
    shapes = " + ".join(
        f"{len(group.layers)} layers x {group.num_heads} heads x ({group.k_size} + "
        f"{group.v_size}) x {group.bytes_per_element} bytes"
        for group in found.layout.paged
    )
    yield row("a token", size(fitted.token_bytes), shapes)
    yield row("a page", size(fitted.page_bytes), f"{fitted.page_tokens} tokens")
    yield ""
    if fitted.budget is None:
        yield row("weights", size(fitted.weight_bytes), "beside the cache")
        yield row("room for pages", size(fitted.room_bytes), "cache.cpu_gib")
    else:
        yield from budget_lines(fitted.budget, found)
    yield ""
    yield row("pages", f"{fitted.pages:,}", f"limited by {fitted.limit}")
    if fitted.asked_pages is not None:
        yield row("pages that would fit", f"{fitted.fitting_pages:,}", "")
    yield row("tokens", f"{fitted.tokens:,}", "")
    own = found.model_config.max_position_embeddings
    yield row("context", f"{fitted.context:,}", f"of one request; the model's own is {own:,}")
    requests = fitted.requests_of(each)
    slots = f"but schedule.slots is {fitted.slots}" if requests > fitted.slots else ""
    yield row(f"requests of {each:,}", f"{requests:,}", f"{fitted.pages_of(each)} pages each")
    running = min(requests, fitted.slots)
    yield row("of them at once", f"{running:,}", slots or "as many as have room")


def budget_lines(budget: Budget, found: Resolved) -> Iterator[str]:
    schedule = found.recipe.schedule
    steps = f"measured: {schedule.step_tokens} prompt tokens, or {schedule.slots} decode rows"
    yield row("device memory", size(budget.total), "")
    yield row("of it ours", size(budget.total * budget.share), f"{budget.share:g} of it")
    yield row("- weights", size(budget.weights), "")
    yield row("- a full step", size(budget.step), steps)
    yield row("- others", size(budget.others), "CUDA itself, and other processes")
    yield row("- graphs", size(budget.graphs), "kept free for them")
    yield row("room for pages", size(budget.room), "")


def row(name: str, value: str, why: str) -> str:
    return f"{name:22} {value:>14}  {why}".rstrip()


def size(num_bytes: float) -> str:
    for unit in ("KiB", "MiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:.2f} GiB"


def metrics(fitted: Fit, each: int) -> dict[str, float]:
    names = (
        "token_bytes",
        "page_bytes",
        "weight_bytes",
        "room_bytes",
        "pages",
        "tokens",
        "context",
    )
    found = {name: getattr(fitted, name) for name in names} | {
        "pages_that_fit": fitted.fitting_pages,
        "requests": fitted.requests_of(each),
        "requests_at_once": min(fitted.requests_of(each), fitted.slots),
    }
    if fitted.budget is not None:
        found |= {"step_bytes": fitted.budget.step, "other_bytes": fitted.budget.others}
    return {name: float(value) for name, value in found.items()}
