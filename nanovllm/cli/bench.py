"""`nanovllm bench`: run a load, print the table, write the record."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import msgspec
import uvloop
from click.core import ParameterSource
from msgspec.structs import replace
from tqdm import tqdm

from nanovllm import experts, launch
from nanovllm.bench import offline, online, record, report, store, sweep
from nanovllm.bench.measure import Advance, Outcome
from nanovllm.bench.started import LiveServer, NotStarted, started
from nanovllm.bench.workload import OFFLINE_NAMES, Workload
from nanovllm.cli.command import Command, Function, option
from nanovllm.cli.commands import FILE, config_of, numbers, recipe_options
from nanovllm.cli.other_flags import BENCH, SERVERS
from nanovllm.config import Config, ConfigError, given_api_key
from nanovllm.fleet import Fleet
from nanovllm.ipc.client import EngineLostError
from nanovllm.watch import TICK_S

DEFAULT_CONCURRENCY = 8
DEFAULT_URL = "http://127.0.0.1:8000"
BUSY = 0.9  # CPU time / wall time above which a client process may be the bottleneck


# Values of the command line by option, converted by click. num_prompts is 0 if it is not given.
Options = SimpleNamespace

OF_A_SERVER = ("url", "served_by", "sweep", "goodput", "processes")
ONLINE_ONLY = {*Workload.__struct_fields__, *OF_A_SERVER} - {"seed"}
OF_THE_RECIPE = ("overrides", "device", "tp", "dp", "load_format", "eager")
LOADS = ", ".join(OFFLINE_NAMES)
FOLDER = click.Path(file_okay=False, writable=True)
COUNT, POSITIVE = click.IntRange(min=0), click.IntRange(min=1)
POSITIVE_FLOAT = click.FloatRange(min=0, min_open=True)
SHARE = click.FloatRange(0, 1, max_open=True)
GOAL = re.compile(r"(ttft|tpot|e2el):(\d+(?:\.\d+)?)")
SUBCOMMANDS = ("serve", "throughput", "latency", "sweep", "startup")  # those of vLLM's bench


SERVED, LOAD, ANSWERS, OUTPUT = "Server", "Load", "Answers", "Results"
# fmt: off
GIVEN: tuple[Callable[[Function], Function], ...] = (
    option("--url", metavar="URL", group=SERVED,
           help=f"Drive the server at this address (default {DEFAULT_URL})."),
    option("--api-key", metavar="KEY", group=SERVED,
           help="Send this key (default: $NANOVLLM_API_KEY)."),
    option("--start", is_flag=True, group=SERVED,
           help="Serve RECIPE for this run, and stop it afterwards."),
    option("--served-by", default="", metavar="COMMAND", group=SERVED,
           help="Store this command line of another engine's server in the record."),
    option("--offline", is_flag=True, group="Without HTTP",
           help="Drive the engine of RECIPE directly."),
    option("--workload", default="w1", metavar="NAME[,...]", group="Without HTTP",
           help=f"Run one or more of {LOADS} (default w1)."),
    option("--ablate", multiple=True, metavar="KEY=VALUE[,...]", group="Without HTTP",
           help="Repeat the run with this override. Also with --start. May be repeated."),
    option("--concurrency", type=POSITIVE, metavar="N", group=LOAD,
           help="Keep N requests in flight, a closed loop (default 8)."),
    option("--sweep", metavar="1,4,16,64", group=LOAD,
           help="Run once for each of these concurrencies, and draw a plot."),
    option("--request-rate", type=POSITIVE_FLOAT, metavar="R", group=LOAD,
           help="Send R requests per second, an open loop."),
    option("--burstiness", type=POSITIVE_FLOAT, default=1.0, metavar="X", group=LOAD,
           help="Spread arrivals as a gamma distribution of this shape. 1 (default) is Poisson, "
                "less is burstier."),
    option("--num-prompts", type=COUNT, default=0, metavar="N", group=LOAD,
           help="Send N requests (default: 8 for each in flight, at most 1024)."),
    option("--warmup", type=COUNT, metavar="N", group=LOAD,
           help="Send N requests first that are not measured (default: the concurrency)."),
    option("--seed", type=int, default=0, metavar="N", group=LOAD,
           help="Seed of prompts, lengths and arrivals (default 0)."),
    option("--processes", type=POSITIVE, metavar="N", group=LOAD,
           help="Send from N processes (default: half the cores, at most 4)."),
    option("--input-len", type=POSITIVE, default=1000, metavar="N", group=ANSWERS,
           help="Send prompts of N tokens, template included (default 1000)."),
    option("--output-len", type=POSITIVE, default=256, metavar="N", group=ANSWERS,
           help="Generate N tokens (default 256)."),
    option("--range-ratio", type=SHARE, default=0.0, metavar="X", group=ANSWERS,
           help="Vary both lengths by up to this share, up and down (default 0)."),
    option("--temperature", type=click.FloatRange(0, 2), default=0.6, metavar="X", group=ANSWERS,
           help="Sample at this temperature (default 0.6)."),
    option("--ignore-eos/--no-ignore-eos", default=True, group=ANSWERS,
           help="Generate exactly --output-len tokens (default), or let answers end."),
    option("--structured", is_flag=True, group=ANSWERS,
           help="Let every answer follow a JSON schema."),
    option("--goodput", multiple=True, metavar="ttft|tpot|e2el:MS", group=OUTPUT,
           help="Count the requests per second within this limit. May be repeated."),
    option("--results-dir", type=FOLDER, default="results", metavar="FOLDER", group=OUTPUT,
           help="Write records under this folder (default results)."),
    option("--json-out", type=FILE, metavar="FILE", group=OUTPUT,
           help="Also write the results under vLLM's key names."),
    option("--commit", metavar="HASH", group=OUTPUT,
           help="Store this commit if there is no .git."),
    option("--expert-load", type=FILE, metavar="FILE", group=OUTPUT,
           help="Write the tokens of each expert, and an experts.placement for them."),
    option("--expert-ranks", type=POSITIVE, metavar="N", group=OUTPUT,
           help="Place the experts of --expert-load on N ranks (default: parallel.ep)."),
    option("--expert-copies", type=COUNT, default=1, metavar="N", group=OUTPUT,
           help="Give each rank of --expert-load N experts more (default 1)."),
    option("--compare", is_flag=True, group=OUTPUT,
           help="Measure nothing: compare records, given by id or by file."),
    option("--plot", type=FILE, metavar="FILE", group=OUTPUT,
           help="Draw --sweep or --compare into this file."),
)
# fmt: on


def load_options(function: Function) -> Function:
    for add in reversed(GIVEN):
        function = add(function)
    return function


@click.command(
    cls=Command,
    others={**BENCH, **SERVERS},
    example="nanovllm bench --start qwen3-8b --concurrency 64 --input-len 1000 --output-len 256",
)
@partial(recipe_options, model=False)
@load_options
@click.argument("more", nargs=-1)
@click.pass_context
def bench(ctx: click.Context, /, **given: object) -> None:
    """Measure a running server, or RECIPE with --start or --offline.

    A table is printed and a record is written. With --compare, earlier records are compared, as in
    nanovllm bench --compare 3f2a9c1b 77d0e4a2. Ids are looked up in --results-dir. A record may
    also be given by a file that contains it.

    Exit code 1: more than 1 % of the requests failed.
    """
    options = Options(**given)
    typed = [n for n in given if ctx.get_parameter_source(n) is ParameterSource.COMMANDLINE]
    if options.compare:
        compare(options, typed)
        return
    check(options, typed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that started processes are ended
    extras = [(), *(tuple(text.split(",")) for text in options.ablate)]
    configs = [engine_config(options, extra) for extra in extras]  # checked before measurements
    records: list[record.Record] = []
    died = 0
    for config in configs:
        try:
            run(options, config, records)
        except (launch.EngineDied, NotStarted, OSError) as error:  # OSError: unwritable files
            click.echo(f"error: {error}", err=True)
            died += 1
    if len(records) > 1 and (options.ablate or options.sweep):
        conclude(options, records)
    if died or any(written.notes for written in records):
        sys.exit(1)


def conclude(options: Options, records: Sequence[record.Record]) -> None:
    """Print the table of several runs and the command that repeats it. Plot a sweep."""
    results = Path(options.results_dir)
    shared, found = sweep.curves(records)
    again = sweep.command(records, results)
    click.echo(f"\n{sweep.table(shared, found)}\nthis table again: {again}")
    if options.sweep is not None and (problem := sweep.missing()):
        click.echo(f"no plot: {problem}")
    elif options.sweep is not None:
        show_plot(options.plot or sweep.plot_path(records, results, "sweep"), shared, found)


def compare(options: Options, typed: Sequence[str]) -> None:
    """Print two records metric by metric, or more of them load by load."""
    for name in typed:
        if name not in ("recipe", "more", "compare", "plot", "results_dir"):
            raise ConfigError(f"--compare measures nothing; {flags_of(typed)[name]} has no effect")
    results, names = Path(options.results_dir), (options.recipe, *options.more)
    records = [store.find(name, results) for name in names if name is not None]
    if len(records) < 2:
        raise ConfigError("--compare needs two records or more: --compare 3f2a9c1b 77d0e4a2")
    if len(records) == 2:
        click.echo(sweep.compare(*records))
    if len(records) > 2 or options.plot is not None:
        shared, found = sweep.curves(records)
        click.echo(f"\n{sweep.table(shared, found)}")
        if options.plot is not None:
            show_plot(options.plot, shared, found)


def show_plot(path: Path, shared: str, found: sweep.Curves) -> None:
    sweep.draw(path, shared, found)
    click.echo(f"plot: {path}")


def check(options: Options, typed: Sequence[str]) -> None:
    """Raise ConfigError for options without effect in the given combination."""
    own_engine, flags = options.offline or options.start, flags_of(typed)
    own_recipe = own_engine or options.recipe is not None
    for name in typed:
        if options.offline and name in ONLINE_ONLY:
            raise ConfigError(f"--offline runs a fixed --workload; {flags[name]} has no effect")
        if not own_recipe and name in OF_THE_RECIPE:
            raise ConfigError(f"{flags[name]} describes the server: name its RECIPE, or --start it")
    rate, has_sweep = options.request_rate, options.sweep is not None
    is_placed = not {*typed}.isdisjoint(("expert_ranks", "expert_copies"))
    names, has_load = options.workload.split(","), options.concurrency is not None
    unknown = ", ".join(name for name in names if name not in OFFLINE_NAMES)
    several = has_sweep or options.ablate or len(names) > 1
    for is_wrong, message in (
        (options.offline and options.start, "--offline and --start exclude each other"),
        (not options.offline and "workload" in typed, "--workload names a load of --offline"),
        (not own_engine and options.ablate, "--ablate needs an engine: --offline or --start"),
        (options.start and options.url, "--start serves at the recipe's server.host and .port"),
        (has_load and rate, "--concurrency (closed loop) or --request-rate (open loop): give one"),
        (has_sweep and has_load, "--sweep sets the concurrencies; drop --concurrency"),
        (has_sweep and rate, "--sweep sets the concurrencies; drop --request-rate"),
        (unknown, f"--workload {unknown}: {LOADS}, or several of them with commas"),
        (several and options.json_out, "--json-out takes one run"),
        (several and options.expert_load, "--expert-load takes one run"),
        (
            is_placed and not options.expert_load,
            "--expert-ranks and --expert-copies need --expert-load",
        ),
        (options.served_by and own_recipe, "--served-by describes another engine; drop RECIPE"),
        (
            options.recipe in SUBCOMMANDS and not os.path.exists(options.recipe),
            f"bench has no command {options.recipe}: it measures a server at --url, RECIPE with "
            "--start, or only its engine with --offline",
        ),
        (rate == math.inf, "--request-rate inf: write --concurrency N, as many as --num-prompts"),
        (
            any(GOAL.fullmatch(text) for text in (options.recipe or "", *options.more)),
            "--goodput takes one limit; repeat it, as in --goodput ttft:500 --goodput tpot:50",
        ),
        (options.more, "bench takes one RECIPE; records need --compare"),
        (options.plot and not has_sweep, "--plot draws a --sweep, or records to --compare"),
        (options.plot and sweep.missing(), sweep.missing() or ""),
    ):
        if is_wrong:
            raise ConfigError(message)


def flags_of(typed: Sequence[str]) -> dict[str, str]:
    return {name: f"--{name.replace('_', '-')}" for name in typed} | {"overrides": "--set"}


def engine_config(options: Options, extra: Sequence[str]) -> Config | None:
    """Return the config of the engine to measure; None if unknown. `extra` is an ablation."""
    if not (options.offline or options.start or options.recipe is not None):
        return None
    names = (*OF_THE_RECIPE[1:], *["api_key"] * options.start)
    flags = {name: vars(options)[name] for name in names}
    config = config_of(options.recipe, (*options.overrides, *extra), **flags)
    if options.offline and (dp := config.recipe.parallel.dp) > 1:
        raise ConfigError(f"--offline drives one engine; parallel.dp is {dp}")
    return config


def run(options: Options, config: Config | None, records: list[record.Record]) -> None:
    """Measure, print and write one run, or one for each workload or concurrency.

    Records are appended to `records`, so that they remain if a later run fails.
    """
    if config is not None and options.offline:
        begin = time.perf_counter()
        with launch.engine_processes(config) as (paths, fleet):
            launch.wait_ready(fleet.children)
            uvloop.run(while_alive(fleet, offline.measure_engine(
                paths[0], config, options.workload.split(","),
                ready_s=time.perf_counter() - begin, seed=options.seed,
                warm_up=options.warmup != 0, bar=progress_bar,
                publish=lambda outcome: records.append(publish(options, outcome)),
            )))  # fmt: skip
            return
    key = config.recipe.server.api_key if config is not None else given_api_key()
    loads, goals_ms = loads_of(options), goals_of(options.goodput)  # checked before the start
    with server_of(options, config) as (url, server):
        outcomes = (online.measure_server(
            load, config, url=url, server=server, command=options.served_by,
            api_key=options.api_key or key, goals_ms=goals_ms, warmup=options.warmup,
            processes=options.processes or max(1, min(4, (os.cpu_count() or 2) // 2)),
            bar=progress_bar,
        ) for load in loads)  # fmt: skip
        records += (publish(options, outcome) for outcome in outcomes)


async def while_alive(fleet: Fleet, measuring: Coroutine[Any, Any, None]) -> None:
    """Await `measuring`. Raise EngineDied if a rank ends or hangs meanwhile."""
    task = asyncio.create_task(measuring)
    while not (why := fleet.lost(restarts=False)):
        await asyncio.sleep(TICK_S)
        if task.done() and not isinstance(task.exception(), EngineLostError):
            return task.result()
    raise launch.EngineDied(why)


@contextmanager
def server_of(options: Options, config: Config | None) -> Iterator[tuple[str, LiveServer | None]]:
    """Yield the server's address, and its process if it is started here, for the block."""
    if config is None or not options.start:
        yield options.url or DEFAULT_URL, None
        return
    server = config.recipe.server
    if not server.port:
        raise ConfigError("server.port is 0; --start needs a fixed port")
    url = launch.url_of(server.host, server.port)
    with started(serve_command(options.recipe, config.changed), url) as process:
        yield url, process


def serve_command(recipe: str | None, changed: Mapping[str, Any]) -> list[str]:
    command = [sys.executable, "-m", "nanovllm", "serve", *([recipe] if recipe else [])]
    for key, value in changed.items():
        command += ["--set", f"{key}={msgspec.json.encode(value).decode()}"]  # JSON is YAML
    return command


def publish(options: Options, outcome: Outcome) -> record.Record:
    click.echo(report.table(outcome))
    tree = record.commit(given=options.commit)
    written = replace(outcome.record, commit=tree.hash, dirty=tree.is_dirty)
    click.echo(f"record: {store.write(written, Path(options.results_dir))}")
    if options.json_out is not None:
        shown = msgspec.json.encode(report.vllm_json(outcome))
        options.json_out.write_bytes(msgspec.json.format(shown))
    if options.expert_load is not None:
        ranks = options.expert_ranks or outcome.record.recipe.get("parallel", {}).get("ep", 1)
        experts.write_placement(outcome.experts, options.expert_load, ranks, options.expert_copies)
    if (busy := written.metrics.get("client_busy", 0.0)) > BUSY:
        click.echo(
            f"warning: a client process was busy {busy:.0%} of the time, so the client may be the "
            "limit; raise --processes",
            err=True,
        )
    return written


def loads_of(options: Options) -> list[Workload]:
    """Return the loads. Those of a sweep have different prompts, which are thus not cached."""
    seeds: dict[int | None, int] = {options.concurrency: options.seed}
    if options.sweep is not None:
        seeds = {count: options.seed + count for count in numbers("--sweep", options.sweep)}
    elif options.concurrency is None and options.request_rate is None:
        seeds = {DEFAULT_CONCURRENCY: options.seed}
    loads = []
    for concurrency, seed in seeds.items():
        num_prompts = options.num_prompts or min(8 * (concurrency or 16), 1024)
        chosen = {"concurrency": concurrency, "seed": seed, "num_prompts": num_prompts}
        loads.append(msgspec.convert(vars(options) | chosen, Workload))
    return loads


def goals_of(goodput: Sequence[str]) -> dict[str, float]:
    goals = {}
    for text in goodput:
        if not (found := GOAL.fullmatch(text)):
            raise ConfigError(f"--goodput {text}: write ttft, tpot or e2el, a colon, and the ms")
        goals[found[1]] = float(found[2])
    return goals


@contextmanager
def progress_bar(total: int, label: str) -> Iterator[Advance]:
    received = 0
    with tqdm(total=total, desc=label, unit="req", mininterval=0.5) as bar:

        def advance(requests: int, tokens: int) -> None:
            nonlocal received
            received += tokens
            rate = received / max(bar.format_dict["elapsed"], 1e-3)
            bar.set_postfix_str(f"{rate:,.0f} tok/s", refresh=False)
            bar.update(requests)

        yield advance
