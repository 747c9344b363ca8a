"""Commands that take a recipe and few options, and functions shared by all commands.

Commands and `nanovllm --help` import torch only when it is needed.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial, wraps
from pathlib import Path
from typing import Any

import click
import msgspec

from nanovllm import launch, log, recipes
from nanovllm.bench.record import of_this_machine
from nanovllm.bench.store import put
from nanovllm.cli.command import Command, Function, option
from nanovllm.cli.other_flags import SERVERS
from nanovllm.config import Config, ConfigError, Recipe, load_config, locate, read_recipe
from nanovllm.models.support import check_config
from nanovllm.parallel.places import num_ranks

RECIPE_KEYS = {
    "device": "device", "tp": "parallel.tp", "dp": "parallel.dp", "load_format": "load.format",
    "eager": "kernels.eager",
    "role": "transfer.role",
    **{name: f"server.{name}" for name in ("host", "port", "api_key", "log_format")},
}  # fmt: skip


class NewFile(click.Path):
    """A file to write, or with `dir_okay` a folder. Checked before measurements start."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Path:  # noqa: ANN401
        path = Path(value)
        try:
            is_wrong = path.is_dir() and not self.dir_okay
            is_wrong = is_wrong or not os.access(path if path.exists() else path.parent, os.W_OK)
        except OSError:  # such as a name that is too long
            is_wrong = True
        if is_wrong:
            raise ConfigError(f"{param.opts[0]} {path}: no file can be written there")
        return path


FILE = NewFile(dir_okay=False)
json_option = option(
    "--json",
    "path",
    type=NewFile(),
    help="Write the record to this file, or append it to the records in this folder.",
)


def recipe_options(
    function: Function, *, tp: Function | None = None, model: bool = True
) -> Function:
    """Add RECIPE, --set, --device, --tp, --dp, --load-format and --eager to a command.

    `tp` is another option in place of --tp. With `model`, add --model as an alias of RECIPE.
    """

    @wraps(function)
    def call(*args: Any, recipe: str | None, model: str | None = None, **given: Any) -> Any:  # noqa: ANN401
        if recipe is not None and model is not None:
            raise ConfigError(f"RECIPE is {recipe} and --model is {model}; give one of them")
        return function(*args, recipe=recipe if model is None else model, **given)

    group = "Recipe"
    options = [
        click.argument("recipe", required=False),
        option(
            "--set", "overrides", multiple=True, metavar="KEY=VALUE", group=group,
            help="Override a key of the recipe. May be repeated.",
        ),
        option(
            "--device", metavar="NAME", group=group,
            help="Run on cuda or cpu. The default, auto, takes a GPU if there is one.",
        ),
        tp or option(
            "--tp", type=int, metavar="N", group=group,
            help="Number of GPUs that share the work on every token.",
        ),
        option(
            "--dp", type=int, metavar="N", group=group,
            help="Number of engine replicas, each on --tp GPUs.",
        ),
        option(
            "--load-format", metavar="FORMAT", group=group,
            help="Read safetensors (auto), or make random weights (dummy).",
        ),
        option(
            "--eager", is_flag=True, default=None, group=group,
            help="Compute everything in plain torch, without CUDA graphs: to debug a kernel.",
        ),
    ]  # fmt: skip
    if model:
        same = "The same as RECIPE, as other servers write it."
        options.append(
            option("--model", "--model-path", "model", metavar="RECIPE", group=group, help=same)
        )
    decorated: Function = call
    for add in reversed(options):
        decorated = add(decorated)
    return decorated


def recipe_or_demo(recipe: str | None) -> str:
    """Return RECIPE, or the recipe of the embedded demo model if there is none."""
    return recipe if recipe is not None else str(recipes.shipped()["demo"])


def config_of(recipe: str | None, overrides: Sequence[str], **flags: object) -> Config:
    """Return the config of RECIPE. `flags` are named like the keys of RECIPE_KEYS."""
    keys = {RECIPE_KEYS[name]: flags[name] for name in flags}
    return load_config(recipe_or_demo(recipe), overrides, keys, check_config)


def numbers(flag: str, text: str) -> tuple[int, ...]:
    """Return the distinct numbers in `1,4,16`. Raise ConfigError with the flag otherwise."""
    values = tuple(map(int, re.findall(r"\d{1,9}", text)))
    if not re.fullmatch(r"[1-9]\d{0,8}(, ?[1-9]\d{0,8})*", text) or len({*values}) < len(values):
        raise ConfigError(f"{flag} {text}: write numbers from 1, none twice, as in 1,4,16,64")
    return values


def rates(flag: str, text: str) -> tuple[float, ...]:
    """Return the numbers in `0.8,0.55`. Raise ConfigError with the flag otherwise."""
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?(, ?\d{1,9}(\.\d{1,9})?)*", text):
        raise ConfigError(f"{flag} {text}: write a number for each draft, as in 0.8,0.55,0.3")
    return tuple(map(float, text.split(",")))


def write_record(path: Path | None, began: datetime, **fields: Any) -> None:  # noqa: ANN401
    """Write a record of a measurement from `began` until now; do nothing without a path."""
    if path is not None:
        took_s = (datetime.now(UTC) - began).total_seconds()
        started_at = began.isoformat(timespec="seconds")
        put(of_this_machine(started_at=started_at, duration_s=took_s, **fields), path)


@click.command(
    cls=Command, others=SERVERS, example="nanovllm serve Qwen/Qwen3-8B --tp 2 --port 8080"
)
@recipe_options
@option(
    "--host",
    metavar="ADDRESS",
    group="Server",
    help="Listen on this address (default 127.0.0.1, which only this machine can reach).",
)
@option(
    "--port",
    type=int,
    metavar="N",
    group="Server",
    help="Listen on this port (default 8000). 0 picks a free one.",
)
@option(
    "--role",
    metavar="ROLE",
    group="Server",
    help="With a recipe's section transfer: prefill computes prompts for other servers, decode "
    "reads their pages.",
)
@option(
    "--api-key",
    metavar="KEY",
    group="Server",
    help="Refuse clients that do not send this key (default: $NANOVLLM_API_KEY). Probes and the "
    "page need none.",
)
@option(
    "--log-format",
    metavar="FORMAT",
    group="Server",
    help="Write the log as text (default) or as json, one object a line.",
)
def serve(recipe: str | None, overrides: Sequence[str], **flags: object) -> None:
    """Serve a model over HTTP, with OpenAI's chat API.

    RECIPE is a recipe file, a model folder, a Hub id (Qwen/Qwen3-8B) or a built-in recipe
    (qwen3-8b). Without one, the embedded demo model is served.

    The first SIGTERM, SIGHUP or Ctrl-C lets running requests finish, for server.shutdown_s seconds
    (60) at most, and exits with 0. A second SIGTERM or Ctrl-C exits at once with 143 or 130.
    """
    checked = read_recipe(
        recipe_or_demo(recipe), overrides, {RECIPE_KEYS[name]: flags[name] for name in flags}
    )
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


TP_LIST = option(
    "--tp", metavar="1,2,4,8", group="Recipe",
    help="Plan for each of these numbers of GPUs. By default, the recipe's.",
)  # fmt: skip


@click.command(
    "profile-kv", cls=Command, others=SERVERS,
    example="nanovllm profile-kv qwen3-32b --gpu h200 --tp 1,2,4",
)  # fmt: skip
@partial(recipe_options, tp=TP_LIST)
@option(
    "--gpu",
    metavar="NAME[:GIB]",
    group="Plan",
    help="Plan for this GPU, say h200 or mine:48. By default, for the one that is here.",
)
@option(
    "--lengths",
    metavar="500,2000",
    group="Plan",
    help="Count the requests of these lengths that fit. Prompt and output are added.",
)
@option(
    "--accept",
    metavar="0.8,0.55,0.3",
    group="Plan",
    help="Acceptance rates of drafts, for times per token (by default, speculate.accept).",
)
@option("--plot", type=FILE, group="Plan", help="Draw what fills the memory.")
@json_option
def profile_kv(path: Path | None, plot: Path | None, **given: Any) -> None:  # noqa: ANN401
    """Compute if a model fits, the requests that its cache holds, and its best speed.

    No GPU is needed, and no model is loaded. If the GPU is here, memory is measured as well. Exit
    code 1: it does not fit; the nearest plan that does is shown.
    """
    from nanovllm.bench import kv

    gpu, lengths, ranks = given.pop("gpu"), given.pop("lengths"), given.pop("tp")
    accept = given.pop("accept")
    ranks = numbers("--tp", ranks) if ranks is not None else ()
    given |= {"load_format": "dummy", "tp": max(ranks, default=None)}
    config, began = config_of(**given), datetime.now(UTC)
    each = numbers("--lengths", lengths) if lengths is not None else ()
    accepted = rates("--accept", accept) if accept is not None else ()
    ranks = ranks or (num_ranks(config.recipe.parallel),)
    profile = kv.profile(config, gpu, ranks, lengths=each, accept=accepted)
    click.echo(profile.text)
    if plot is not None and profile.plans:
        kv.draw(plot, profile)
    elif plot is not None:
        click.echo("no plot: there is no plan to draw")
    write_record(
        path,
        began,
        kind="kv",
        recipe=msgspec.to_builtins(config.recipe),
        changed=config.changed,
        workload={"name": "profile-kv", "title": profile.title, "said": profile.notes},
        metrics=profile.metrics,
    )
    sys.exit(0 if profile.fits else 1)


@click.command(
    "capture-graphs", cls=Command, others=SERVERS,
    example="nanovllm capture-graphs qwen3-8b --load 1-64",
)  # fmt: skip
@recipe_options
@option(
    "--load",
    metavar="LO-HI",
    group="Graphs",
    help="Rows of the decode steps for which padding is counted (default: 1 to all slots).",
)
@json_option
def capture_graphs(load: str | None, path: Path | None, **recipe: Any) -> None:  # noqa: ANN401
    """Capture all CUDA graphs of a model, and compare them with eager runs.

    Shows the time and memory of each graph, and the padding of decode steps. Forward passes are
    compared by their logits. Draws are compared by their tokens and drafts, and by the keys and
    values of a draft model. Graphs of steps with adapters are compared with random adapters. Exit
    code 1: a graph differs.
    """
    config, began = config_of(**recipe), datetime.now(UTC)
    if load is None and (why := lacks_gpu(config.recipe.device)) is not None:
        click.echo(f"Nothing is captured: CUDA graphs need a GPU, and {why}.")
        nothing = {"name": "capture-graphs", "rows": [], "graphs": [], "steps": {"all": why}}
        write_graphs(path, began, config, final=config.recipe, workload=nothing, metrics={})
        return
    from nanovllm.bench import graphs as bench
    from nanovllm.runner.build import build
    from nanovllm.runner.graphs import obstacles
    from nanovllm.runner.resolved import resolve_config

    resolved = resolve_config(config)
    final = resolved.recipe
    click.echo(
        f"{final.model} on {resolved.device_name}, {final.dtype}, attention "
        f"{final.kernels.attention}, up to {final.schedule.slots} rows"
    )
    if resolved.passed_over:
        click.echo(f"attention not chosen: {resolved.passed_over}")
    rows, graphs = bench.rows_of(load, int(final.schedule.slots)), list[bench.GraphCost]()
    if reasons := obstacles(final):  # without loading the weights
        click.echo(f"Nothing is captured: {'; '.join(reasons)}.")
        rows, steps = range(0), dict[str, str | None](all="; ".join(reasons))
    else:
        built = build(config)
        final, (filled, most) = built.recipe, bench.context_of(built.runner)
        graphs = list(bench.measure(built.runner, rows))
        percent = bench.metrics(graphs)["padding_percent"]
        click.echo(
            f"times of forward passes and of draws for {filled} synthetic requests of "
            f"{most // 2} to {most} tokens\n\n{bench.table(graphs)}\n\n"
            f"if {rows[0]} to {rows[-1]} rows decode, equally often, {percent:.1f}% of the rows "
            "computed are padding\n"
        )
        steps = bench.eager_reason(built.runner, final)
        for step, why in steps.items():
            click.echo(f"{step}: " + ("replayed" if why is None else f"not captured: {why}"))
    workload: dict[str, Any] = {
        "name": "capture-graphs",
        "rows": [rows.start, rows.stop - 1] if rows else [],
        "graphs": msgspec.to_builtins(graphs),
        "steps": steps,
    }
    metrics = bench.metrics(graphs)
    write_graphs(path, began, config, final=final, workload=workload, metrics=metrics)
    if not all(graph.is_right for graph in graphs):
        click.echo("FAIL: the results of a graph differ from those of the eager step", err=True)
        sys.exit(1)


def lacks_gpu(device: str) -> str | None:
    """Return the reason why no GPU can be used, or None.

    Only device files are checked, since importing torch takes seconds.
    """
    if device == "cpu":
        return "device is cpu"
    has_file = Path("/dev/dxg").exists() or any(Path("/dev").glob("nvidia[0-9]*"))
    return None if has_file or device == "cuda" else "this machine has none"


def write_graphs(
    path: Path | None,
    began: datetime,
    config: Config,
    *,
    final: Recipe,
    workload: dict[str, Any],
    metrics: dict[str, float],
) -> None:
    write_record(
        path,
        began,
        kind="graphs",
        recipe=msgspec.to_builtins(final),
        changed=config.changed,
        workload=workload,
        metrics=metrics,
    )
