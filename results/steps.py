"""Decode steps with other constants of the kernels, one variant after another in one engine.

    python results/steps.py RECIPE [--set KEY=VALUE ...] [--rows N] [--context N] NAME:CHANGE ...

A CHANGE is a list of assignments with ";" between them, which name modules of nanovllm_kernels.
It is undone before the next one. An empty CHANGE is the code without changes:

    python results/steps.py qwen3-30b-a3b --set load.format=dummy --set experts.routing=uniform \\
        "now:" "late:attention.paged_decode.STAGES = 2" \\
        "deep:experts.products.SHAPES[16, 2] = experts.products.Shape(64, 128, 5, 4)" "now again:"

For each variant the forward pass of N rows is captured and replayed. The output is the least time
of a step and the largest difference from the first logits, as a share of the largest logit. A
variant takes a second or two, plus compilation. Kernels that are launched early overlap, so the
time of one kernel alone is not its share of the step. On a CPU, without graphs, only the variant
itself is tested.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import click
import nanovllm_kernels
import torch
from torch import Tensor

from nanovllm.bench import graphs as bench
from nanovllm.cli.commands import config_of
from nanovllm.layers.products import RowTable
from nanovllm.runner.build import build
from nanovllm.runner.graphs import DecodeGraphs
from nanovllm.runner.runner import Runner, share_outputs

SMALL = ["schedule.slots=8", "kernels.mixed_graph_tokens=0", "cache.pages=64"]  # quick to build
ROUNDS = 5


@click.command()
@click.argument("recipe")
@click.argument("variants", nargs=-1, required=True)
@click.option("--set", "overrides", multiple=True, help="KEY=VALUE of the recipe")
@click.option("--rows", default=1, help="rows of the step, up to schedule.slots (8 here)")
@click.option(
    "--context", default=384, type=click.IntRange(1), help="largest number of tokens of a row"
)
def main(recipe: str, variants: tuple[str, ...], overrides: tuple[str, ...], **sizes: int) -> None:
    config = config_of(recipe, [*SMALL, *overrides])
    if not 1 <= sizes["rows"] <= int(config.recipe.schedule.slots):
        slots = config.recipe.schedule.slots
        raise click.BadParameter(
            f"--rows {sizes['rows']}: a step has 1 to {slots} (schedule.slots)"
        )
    runner = build(config).runner
    first = None
    for variant in variants:
        name, _, change = variant.partition(":")
        try:
            with changed(change):
                taken_us, logits_SV = measured(runner, **sizes)
        except Exception as error:  # the other variants still run
            click.echo(f"{name:24} {type(error).__name__}: {str(error)[:200]}")
            continue
        first = logits_SV if first is None else first
        off = float((logits_SV - first).abs().max() / first.abs().max())
        click.echo(f"{name:24} {taken_us:9.1f} us, off by {off:.4f}  {change.strip()}")


@contextmanager
def changed(change: str) -> Iterator[None]:
    """Apply a change to the modules that it names, and undo it after the block."""
    names = {*re.findall(r"\b([a-z]\w*\.[a-z]\w*)\.[A-Z]", change)}
    modules = [importlib.import_module(f"nanovllm_kernels.{name}") for name in names]
    folders = {name.split(".")[0] for name in names}
    before = [(module, constants_of(module)) for module in modules]
    try:
        exec(change.strip(), {name: getattr(nanovllm_kernels, name) for name in folders})
        forget(modules)
        yield
    finally:
        for module, constants in before:
            for name, (value, entries) in constants.items():
                setattr(module, name, value)
                if entries is not None:
                    value.clear()
                    value.update(entries)
        forget(modules)


def constants_of(module: ModuleType) -> dict[str, tuple[Any, dict[Any, Any] | None]]:
    """Return each constant, and a copy of its entries if it is a table that modules share."""
    constants = ((name, value) for name, value in vars(module).items() if name.isupper())
    return {
        name: (value, {**value} if isinstance(value, dict) else None) for name, value in constants
    }


def forget(modules: list[ModuleType]) -> None:
    """Clear the caches that depend on constants."""
    for module in modules:
        for value in vars(module).values():
            if callable(clear := getattr(value, "cache_clear", None)):
                clear()


@torch.inference_mode()
def measured(runner: Runner, rows: int, context: int) -> tuple[float, Tensor]:
    """Return the microseconds of a forward pass, and the logits of the first one."""
    for layer in runner.model.modules():  # the best product may be another one now
        for table in vars(layer).values():
            if isinstance(table, RowTable):
                table.clear()
    bench.occupy(runner)
    runner.slots.lengths_N.clamp_(max=context)
    step = partial(runner.forward, runner.builder.padded(rows, 1, runner.slots.max_tokens))
    if runner.device.type == "cuda":
        graphs = DecodeGraphs(runner.forward, runner.builder, share_outputs)
        graphs.capture([(rows, 1)], runner.slots.max_tokens)
        step = partial(graphs.replay, (rows, 1))
    logits_SV = bench.logits(runner, step).clone()
    seconds = min(bench.seconds_of(step, runner.device) for _ in range(ROUNDS))
    return 1e6 * seconds, logits_SV


if __name__ == "__main__":
    main()
