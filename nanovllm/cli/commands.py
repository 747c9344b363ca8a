"""The commands that take a recipe and little else, and what every command shares.

Starting any of them, or `nanovllm --help`, imports no torch before it is needed. Not how anything
is measured.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from nanovllm import launch, log, recipes
from nanovllm.bench.record import of_this_machine, write_to
from nanovllm.config import Config, ConfigError, load_config, locate, read_recipe
from nanovllm.models.support import check_config
from nanovllm.parallel.places import num_ranks

Function = Callable[..., Any]
RECIPE_KEYS = {
    "device": "device", "tp": "parallel.tp", "dp": "parallel.dp", "load_format": "load.format",
    **{name: f"server.{name}" for name in ("host", "port", "api_key", "log_format")},
}  # fmt: skip


class NewFile(click.Path):
    """A file to write, which is known to be possible before anything is measured."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Path:  # noqa: ANN401
        path = Path(value)
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"{param.opts[0]} {path}: no file can be written there")
        return path


FILE = NewFile()
json_option = click.option("--json", "path", type=FILE, help="write the record here")
RANKS = click.option("--tp", type=int, help="tensor-parallel ranks")


def recipe_options(function: Function, ranks: Function = RANKS) -> Function:
    """RECIPE (as `nanovllm serve --help` says), --set, --device, --tp, --dp, --load-format."""
    for option in (
        click.option("--load-format", help="auto, safetensors, or dummy (random weights)"),
        click.option("--dp", type=int, help="engines, of --tp devices each"),
        ranks,
        click.option("--device", help="auto, cuda or cpu"),
        click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="a recipe key"),
        click.argument("recipe", required=False),
    ):
        function = option(function)
    return function


def config_of(recipe: str | None, overrides: Sequence[str], **flags: object) -> Config:
    """`flags`: by the names of RECIPE_KEYS."""
    named = {RECIPE_KEYS[name]: flags[name] for name in flags}
    return load_config(recipe, overrides, named, check_config)


def numbers(flag: str, text: str) -> tuple[int, ...]:
    """`1,4,16`, none of them twice. Raises ConfigError that names the flag."""
    found = tuple(map(int, re.findall(r"\d{1,9}", text)))
    if not re.fullmatch(r"[1-9]\d{0,8}(, ?[1-9]\d{0,8})*", text) or len({*found}) < len(found):
        raise ConfigError(f"{flag} {text}: write numbers from 1, none twice, as in 1,4,16,64")
    return found


def write_record(path: Path | None, began: datetime, **fields: Any) -> None:  # noqa: ANN401
    """Writes a record of what began then and has just ended; nothing without a path."""
    if path is not None:
        took_s = (datetime.now(UTC) - began).total_seconds()
        started_at = began.isoformat(timespec="seconds")
        write_to(path, of_this_machine(started_at=started_at, duration_s=took_s, **fields))


@click.command()
@recipe_options
@click.option("--host", help="address to listen on (default 127.0.0.1)")
@click.option("--port", type=int, help="port to listen on (default 8000; 0 picks a free one)")
@click.option("--api-key", help="bearer token; probes and the page need none (or NANOVLLM_API_KEY)")
@click.option("--log-format", help="text (default) or json, one object a line")
def serve(recipe: str | None, overrides: Sequence[str], **flags: object) -> None:
    """Serve RECIPE over HTTP; without one, the embedded demo model.

    RECIPE is a recipe file, a model's folder, the name of a shipped recipe (qwen3-8b), or a hub id
    (Qwen/Qwen3-8B), looked for in this order.

    The first SIGTERM or Ctrl-C lets running requests finish for server.shutdown_s seconds (60) and
    exits with 0, a second one exits at once with 143 or 130.
    """
    recipe = recipe or str(recipes.shipped()["demo"])
    checked = read_recipe(recipe, overrides, {RECIPE_KEYS[name]: flags[name] for name in flags})
    try:
        log.setup(checked.recipe.server.log_format)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    logging.getLogger("serve").info("starting %s, recipe %s", checked.recipe.model, checked.source)
    try:
        sys.exit(launch.serve(locate(checked, check_config)))
    except launch.EngineDied as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(launch.EXIT_CRASH)


@click.command("profile-kv")
@partial(recipe_options, ranks=click.option("--tp", metavar="1,2,4,8", help="ranks, each a GPU"))
@click.option("--gpu", metavar="NAME[:GIB]", help="h200, say; default: what is here")
@click.option("--lengths", metavar="500,2000", help="of requests, prompt and output together")
@click.option("--plot", type=FILE, help="what fills the memory")
@json_option
def profile_kv(path: Path | None, plot: Path | None, **given: Any) -> None:  # noqa: ANN401
    """Plan what has room beside RECIPE's weights, how fast it could be, and which lines pin it.

    No GPU is needed. One that is here also measures. No weights are read. Exits with 1 and the
    nearest recipe that fits if this one does not.
    """
    from nanovllm.bench import kv

    gpu, lengths, ranks = given.pop("gpu"), given.pop("lengths"), given.pop("tp")
    ranks = numbers("--tp", ranks) if ranks is not None else ()
    given |= {"load_format": "dummy", "tp": max(ranks, default=None)}
    config, began = config_of(**given), datetime.now(UTC)
    each = numbers("--lengths", lengths) if lengths is not None else ()
    found = kv.profile(config, gpu, ranks or (num_ranks(config.recipe.parallel),), each)
    click.echo(found.text)
    if plot is not None and found.plans:
        kv.draw(plot, found)
    elif plot is not None:
        click.echo("no plot: there is no plan to draw")
    write_record(
        path,
        began,
        kind="kv",
        recipe=msgspec.to_builtins(config.recipe),
        changed=config.changed,
        workload={"name": "profile-kv", "title": found.title, "said": found.said},
        metrics=found.metrics,
    )
    sys.exit(0 if found.fits else 1)


@click.command("capture-graphs")
@recipe_options
@click.option("--load", metavar="LO-HI", help="rows of decode steps (default 1 to all slots)")
@json_option
def capture_graphs(load: str | None, path: Path | None, **recipe: Any) -> None:  # noqa: ANN401
    """Capture what RECIPE would, replay each graph, and compare it with the eager run.

    Exits with 1 if a graph gives other logits.
    """
    from nanovllm.bench import graphs as bench
    from nanovllm.runner.build import build
    from nanovllm.runner.graphs import obstacles
    from nanovllm.runner.resolved import resolved

    config, began = config_of(**recipe), datetime.now(UTC)
    found = resolved(config)
    final = found.recipe
    click.echo(
        f"{final.model} on {found.device_name}, {final.dtype}, attention "
        f"{final.kernels.attention}, up to {final.schedule.slots} rows"
    )
    if found.passed_over:
        click.echo(f"attention not chosen: {found.passed_over}")
    rows, graphs = bench.rows_of(load, int(final.schedule.slots)), list[bench.GraphCost]()
    if reasons := obstacles(final):  # nothing need be loaded
        click.echo("\n  ".join(("no step is captured:", *reasons)))
        rows, steps = range(0), dict[str, str | None](all="; ".join(reasons))
    else:
        built = build(config)
        final, (filled, most) = built.recipe, bench.context_of(built.runner)
        graphs = list(bench.measure(built.runner, rows))
        percent = bench.metrics(graphs)["padding_percent"]
        click.echo(
            f"times of a forward pass over {filled} made-up requests of {most // 2} to {most} "
            f"tokens\n\n{bench.table(graphs)}\n\nif {rows[0]} to {rows[-1]} rows decode, equally "
            f"often, {percent:.1f}% of the rows computed are padding\n"
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
