"""`nanovllm capture-graphs`: every CUDA graph of a recipe in one table, and what has none, and why.

Not how they are captured or measured.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
import pandas as pd

from nanovllm.cli.options import config_of, json_option, recipe_options, write_record
from nanovllm.config import ConfigError

if TYPE_CHECKING:
    from nanovllm.bench.graphs import Graph


@click.command("capture-graphs")
@recipe_options
@click.option("--load", metavar="LO-HI", help="rows of decode steps (default 1 to all slots)")
@json_option
def capture_graphs(load: str | None, path: Path | None, **recipe: Any) -> None:  # noqa: ANN401
    """Capture what RECIPE would, replay each graph, and compare it with the eager run.

    Exits with 1 if a graph gives other logits.
    """
    from nanovllm.bench import graphs as bench
    from nanovllm.bench.resolved import resolved
    from nanovllm.runner.build import build
    from nanovllm.runner.graphs import obstacles

    config, began = config_of(**recipe), datetime.now(UTC)
    found = resolved(config)
    final = found.recipe
    click.echo(
        f"{final.model} on {found.device_name}, {final.dtype}, attention "
        f"{final.kernels.attention}, up to {final.schedule.slots} rows"
    )
    if found.passed_over:
        click.echo(f"attention not chosen: {found.passed_over}")
    graphs: list[Graph] = []
    steps: dict[str, str | None]
    if reasons := obstacles(final):  # nothing need be loaded
        click.echo("\n  ".join(("no step is captured:", *reasons)))
        rows, steps = range(0), {"all": "; ".join(reasons)}
    else:
        rows, built = rows_of(load, int(final.schedule.slots)), build(config)
        final, (filled, most) = built.recipe, bench.context_of(built.runner)
        graphs = list(bench.measure(built.runner, rows))
        percent = bench.metrics(graphs)["padding_percent"]
        click.echo(
            f"times of a forward pass over {filled} made-up requests of {most // 2} to {most} "
            f"tokens\n\n{table(graphs)}\n\nif {rows[0]} to {rows[-1]} rows decode, equally often, "
            f"{percent:.1f}% of the rows computed are padding\n"
        )
        steps = bench.why_eager(built.runner, final)
        for step, why in steps.items():
            click.echo(f"{step}: " + ("replayed" if why is None else f"not captured: {why}"))
    write_record(
        path,
        began,
        kind="graphs",
        recipe=msgspec.to_builtins(final),
        changed=config.changed,
        workload={
            "name": "capture-graphs",
            "rows": [rows.start, rows.stop - 1] if rows else [],
            "graphs": msgspec.to_builtins(graphs),
            "steps": steps,
        },
        metrics=bench.metrics(graphs),
    )
    if not all(graph.is_right for graph in graphs):
        click.echo("FAIL: a graph gives other logits than the same step without it", err=True)
        sys.exit(1)


def rows_of(load: str | None, slots: int) -> range:
    """Rows of decode steps, each as often as any other."""
    if load is None:
        return range(1, slots + 1)
    if not re.fullmatch(r"\d+-\d+", load):
        raise ConfigError(f"--load {load}: write the fewest and the most rows, as in 1-64")
    low, high = map(int, load.split("-"))
    if not 1 <= low <= high <= slots:
        raise ConfigError(f"--load {load}: a step has 1 to {slots} rows (schedule.slots)")
    return range(low, high + 1)


def table(graphs: Sequence[Graph]) -> str:
    """One row for each, and the sums of what they cost."""
    found = pd.DataFrame(msgspec.to_builtins(graphs))
    shown = pd.DataFrame(
        {
            "mode": found["mode"],
            "rows": found["rows"],
            "capture ms": 1e3 * found["capture_s"],
            "memory MiB": found["memory_bytes"] / 2**20,
            "replay ms": 1e3 * found["replay_s"],
            "eager ms": 1e3 * found["eager_s"],
            "eager/replay": found["eager_s"] / found["replay_s"],
            "max |logit diff|": found["difference"],
            "steps %": 100 * found["used"],
            "padding %": 100 * found["padding"],
            "": ["" if graph.is_right else "FAIL" for graph in graphs],
        }
    )
    total = {"mode": "all", "rows": len(graphs)}
    sums = shown[["capture ms", "memory MiB"]].sum()
    shown = pd.concat([shown, pd.DataFrame([total | sums.to_dict()])])
    return str(shown.to_string(index=False, na_rep="", float_format="{:,.3f}".format))
