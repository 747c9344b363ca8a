"""`nanovllm profile-kv`: how much of the memory becomes KV cache, what fits into it, and why.

Not how it is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from nanovllm.cli.options import config_of, json_option, recipe_options, write_record
from nanovllm.config import ConfigError

if TYPE_CHECKING:
    from nanovllm.bench.kv import Budget, Fit
    from nanovllm.bench.resolved import Resolved


@click.command("profile-kv")
@recipe_options
@click.option(
    "--tokens-per-request",
    type=click.IntRange(min=1),
    help="prompt and output together (default server.max_model_tokens)",
)
@json_option
def profile_kv(tokens_per_request: int | None, path: Path | None, **recipe: Any) -> None:  # noqa: ANN401
    """Show what fits into RECIPE's cache on this machine. No weights are read."""
    from nanovllm.bench.kv import fit
    from nanovllm.bench.resolved import resolved

    config, began = config_of(**recipe), datetime.now(UTC)
    found = resolved(config)
    most = int(found.recipe.server.max_model_tokens)
    each = tokens_per_request or most
    if each > most:
        raise ConfigError(f"--tokens-per-request is {each}; server.max_model_tokens allows {most}")
    fitted = fit(config, found)
    for text in lines(found, fitted, each):
        click.echo(text)
    write_record(
        path,
        began,
        kind="kv",
        recipe=msgspec.to_builtins(found.recipe),
        changed=config.changed,
        workload={"name": "profile-kv", "tokens_per_request": each, "limit": fitted.limit},
        metrics=metrics(fitted, each),
    )


def lines(found: Resolved, fitted: Fit, each: int) -> Iterator[str]:
    recipe = found.recipe
    yield f"{recipe.model} on {found.device_name}, {recipe.dtype}"
    yield ""
    shapes = " + ".join(
        f"{len(group.layers)} layers x {group.num_heads} heads x ({group.k_width} + "
        f"{group.v_width}) x {group.bytes_per_element} bytes"
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
    names = ("token_bytes", "page_bytes", "weight_bytes", "room_bytes", "pages", "tokens")
    found = {name: getattr(fitted, name) for name in names} | {
        "pages_that_fit": fitted.fitting_pages,
        "requests": fitted.requests_of(each),
        "requests_at_once": min(fitted.requests_of(each), fitted.slots),
    }
    if fitted.budget is not None:
        found |= {"step_bytes": fitted.budget.step, "other_bytes": fitted.budget.others}
    return {name: float(value) for name, value in found.items()}
