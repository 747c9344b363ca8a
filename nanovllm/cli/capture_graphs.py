"""`nanovllm capture-graphs`: every CUDA graph of a recipe in one table, and what has none, and why.

Not how they are captured or measured.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from nanovllm.bench.outcome import now
from nanovllm.bench.record import of_this_machine, write_to
from nanovllm.cli.options import recipe_options
from nanovllm.config import Config, ConfigError, Recipe, load_config

if TYPE_CHECKING:
    from nanovllm.bench.graphs import Graph, Kind

HEAD = (
    f"{'mode':12} {'rows':>5} {'capture ms':>11} {'memory MiB':>11} {'replay ms':>10} "
    f"{'eager ms':>9} {'eager/replay':>13} {'max |logit diff|':>17} {'steps %':>8} "
    f"{'padding %':>10}"
)


@click.command("capture-graphs")
@recipe_options
@click.option("--concurrency", type=click.IntRange(min=1), help="padding if so many rows decode")
@click.option("--load", metavar="LO-HI", help="or any of LO to HI (default 1 to all slots)")
@click.option("--json", "path", type=click.Path(path_type=Path), help="write the record here")
def capture_graphs(
    recipe: str | None,
    overrides: tuple[str, ...],
    device: str | None,
    tp: int | None,
    load_format: str | None,
    concurrency: int | None,
    load: str | None,
    path: Path | None,
) -> None:
    """Capture what RECIPE would, replay each graph, and compare it with the eager run.

    Exits with 1 if a graph gives other logits.
    """
    from nanovllm.bench.graphs import Kind
    from nanovllm.bench.resolved import resolved
    from nanovllm.runner.graphs import obstacles

    flags = {"device": device, "parallel.tp": tp, "load.format": load_format}
    config = load_config(recipe, overrides, flags)
    started, clock = now(), time.monotonic()
    found = resolved(config)
    click.echo(
        f"{found.recipe.model} on {found.device_name}, {found.recipe.dtype}, attention "
        f"{found.recipe.kernels.attention}, up to {found.recipe.schedule.slots} rows"
    )
    if found.passed_over:
        click.echo(f"attention not chosen: {found.passed_over}")
    if reasons := obstacles(found.recipe):  # nothing need be loaded
        click.echo("\n  ".join(("no step is captured:", *reasons)))
        rows, built = range(0), found.recipe
        graphs: list[Graph] = []
        kinds = [Kind(steps="all", why_eager="; ".join(reasons))]
    else:
        rows = rows_of(concurrency, load, int(found.recipe.schedule.slots))
        built, graphs, kinds = examine(config, rows)
    if path is not None:
        record = of_this_machine(
            kind="graphs",
            started_at=started,
            duration_s=time.monotonic() - clock,
            recipe=msgspec.to_builtins(built),
            changed=config.changed,
            workload={
                "name": "capture-graphs",
                "rows": [rows.start, rows.stop - 1] if rows else [],
                "graphs": msgspec.to_builtins(graphs),
                "steps": msgspec.to_builtins(kinds),
            },
            metrics=metrics(graphs),
        )
        write_to(path, record)
    if not all(graph.is_right for graph in graphs):
        click.echo("FAIL: a graph gives other logits than the same step without it", err=True)
        sys.exit(1)


def examine(config: Config, rows: range) -> tuple[Recipe, list[Graph], list[Kind]]:
    """Capture, measure, and print as it goes."""
    from nanovllm.bench import graphs as bench
    from nanovllm.runner.build import build

    built = build(config)
    runner = built.runner
    filled, most = bench.context_of(runner)
    click.echo(
        f"times of a forward pass over {filled} made-up requests of {most // 2} to {most} tokens"
    )
    click.echo(f"\n{HEAD}")
    graphs = []
    for graph in bench.measure(runner, rows):
        graphs.append(graph)
        click.echo(line(graph))
    click.echo(total(graphs))
    click.echo(f"\n{padding(graphs, rows)}\n")
    kinds = bench.kinds(runner, built.recipe)
    for kind in kinds:
        how = "replayed" if kind.why_eager is None else f"not captured: {kind.why_eager}"
        click.echo(f"{kind.steps}: {how}")
    return built.recipe, graphs, kinds


def rows_of(concurrency: int | None, load: str | None, slots: int) -> range:
    """Rows of decode steps, each as often as any other."""
    if concurrency is not None and load is not None:
        raise ConfigError("--concurrency (always so many rows) and --load (any of them): give one")
    low, high = (1, slots) if concurrency is None else (concurrency, concurrency)
    if load is not None:
        if not re.fullmatch(r"\d+-\d+", load):
            raise ConfigError(f"--load {load}: write the fewest and the most rows, as in 1-64")
        low, high = map(int, load.split("-"))
    if not 1 <= low <= high <= slots:
        flag = f"--concurrency {concurrency}" if load is None else f"--load {load}"
        raise ConfigError(f"{flag}: a step has 1 to {slots} rows (schedule.slots)")
    return range(low, high + 1)


def line(graph: Graph) -> str:
    text = (
        f"{graph.mode:12} {graph.rows:5} {1e3 * graph.capture_s:11.1f} "
        f"{graph.memory_bytes / 2**20:11.1f} {1e3 * graph.replay_s:10.3f} "
        f"{1e3 * graph.eager_s:9.3f} {graph.eager_s / graph.replay_s:13.2f} "
        f"{graph.difference:17.5f} {100 * graph.used:8.1f} {100 * graph.padding:10.1f}"
    )
    return text if graph.is_right else f"{text} FAIL"


def total(graphs: Sequence[Graph]) -> str:
    seconds = sum(graph.capture_s for graph in graphs)
    memory = sum(graph.memory_bytes for graph in graphs)
    return f"{'all':12} {len(graphs):5} {1e3 * seconds:11.1f} {memory / 2**20:11.1f}"


def padding(graphs: Sequence[Graph], rows: range) -> str:
    from nanovllm.bench.graphs import padded_share

    low, high = rows.start, rows.stop - 1
    steps = f"steady {low}" if low == high else f"any of {low} to {high}, equally often"
    worst = max((graph for graph in graphs if graph.used), key=lambda graph: graph.padding)
    return (
        f"decode rows {steps}: {padded_share(graphs):.1%} of the rows computed are padding "
        f"(most: {worst.padding:.1%}, in the graph of {worst.rows})"
    )


def metrics(graphs: Sequence[Graph]) -> dict[str, float]:
    from nanovllm.bench.graphs import padded_share

    found: dict[str, float] = {
        "graphs": len(graphs),
        "capture_s": sum(graph.capture_s for graph in graphs),
        "memory_mib": sum(graph.memory_bytes for graph in graphs) / 2**20,
        "padding_percent": 100 * padded_share(graphs),
    }
    for graph in graphs:
        name = f"{graph.mode} {graph.rows}"
        found[f"{name}: replay_ms"] = 1e3 * graph.replay_s
        found[f"{name}: eager_ms"] = 1e3 * graph.eager_s
        found[f"{name}: max_logit_difference"] = graph.difference
    return found
