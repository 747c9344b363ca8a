"""`nanovllm bench`: run a load, print the table, write the record. Not how load is generated."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from nanovllm.bench import offline, online, record, report, sweep
from nanovllm.bench.measure import Advance, Outcome
from nanovllm.bench.started import LiveServer, NotStarted, started
from nanovllm.bench.workload import OFFLINE_NAMES, Workload
from nanovllm.cli.commands import FILE, config_of, numbers, recipe_options
from nanovllm.config import Config, ConfigError, given_api_key
from nanovllm.fleet import Fleet
from nanovllm.ipc.client import EngineLostError
from nanovllm.watch import TICK_S

DEFAULT_CONCURRENCY = 8
DEFAULT_URL = "http://127.0.0.1:8000"
BUSY = 0.9  # share of a run on the CPU above which a client process may be what limits it


# The command line by the options' names, as click has converted it: a load, and whom it is for.
# num_prompts is 0 where it says nothing.
Options = SimpleNamespace

OF_A_SERVER = ("url", "served_by", "sweep", "goodput", "processes")
ONLINE_ONLY = {*Workload.__struct_fields__, *OF_A_SERVER} - {"seed"}
OF_THE_RECIPE = ("overrides", "device", "tp", "dp", "load_format")
LOADS = ", ".join(OFFLINE_NAMES)
FOLDER = click.Path(file_okay=False, writable=True)
COUNT, POSITIVE = click.IntRange(min=0), click.IntRange(min=1)
POSITIVE_FLOAT = click.FloatRange(min=0, min_open=True)
SHARE = click.FloatRange(0, 1, max_open=True)


@click.command()
@recipe_options
@click.option("--offline", is_flag=True, help="drive RECIPE's engine directly, without HTTP")
@click.option("--start", is_flag=True, help="serve RECIPE for this run, and stop it afterwards")
@click.option("--workload", default="w1", metavar="NAME[,...]", help=f"--offline: {LOADS}")
@click.option("--ablate", multiple=True, metavar="KEY=VALUE[,...]", help="run again, so changed")
@click.option("--url", help=f"server to drive (default {DEFAULT_URL})")
@click.option("--served-by", default="", metavar="COMMAND", help="of that server, for the record")
@click.option("--api-key", help="bearer token of the server (or NANOVLLM_API_KEY)")
@click.option("--concurrency", type=POSITIVE, help="closed loop: requests in flight (default 8)")
@click.option("--sweep", metavar="1,4,16,64", help="one run for each concurrency, and a plot")
@click.option("--request-rate", type=POSITIVE_FLOAT, help="open loop: arrivals per second")
@click.option("--burstiness", type=POSITIVE_FLOAT, default=1.0, help="1: Poisson; less: bursty")
@click.option("--num-prompts", type=COUNT, default=0, help="default 8 per stream, at most 1024")
@click.option("--input-len", type=POSITIVE, default=1000, help="prompt tokens (default 1000)")
@click.option("--output-len", type=POSITIVE, default=256, help="tokens to generate (default 256)")
@click.option("--range-ratio", type=SHARE, default=0.0, help="lengths vary within +- this share")
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.6, help="default 0.6")
@click.option("--ignore-eos/--no-ignore-eos", default=True, help="default: exact output lengths")
@click.option("--structured", is_flag=True, help="every answer follows a JSON schema")
@click.option("--goodput", multiple=True, metavar="ttft|tpot|e2el:MS", help="count good requests")
@click.option("--processes", type=POSITIVE, help="client processes (default half the cores, <= 4)")
@click.option("--seed", type=int, default=0, help="of prompts, lengths and arrivals (default 0)")
@click.option("--warmup", type=COUNT, help="requests sent before (default: the concurrency)")
@click.option("--json-out", type=FILE, help="results with vLLM's key names")
@click.option("--expert-load", type=FILE, help="tokens by expert, and an experts.placement by them")
@click.option("--expert-ranks", type=POSITIVE, help="of that placement (default: parallel.ep)")
@click.option("--expert-copies", type=COUNT, default=1, help="more experts a rank (default 1)")
@click.option("--results-dir", type=FOLDER, default="results", help="of records (default results)")
@click.option("--commit", help="of a copy without .git: git describe --always --abbrev=40 --dirty")
@click.option("--compare", is_flag=True, help="the arguments are records: show their ratios")
@click.option("--plot", type=FILE, metavar="FILE", help="of --sweep or --compare")
@click.argument("more", nargs=-1)
@click.pass_context
def bench(ctx: click.Context, /, **given: object) -> None:
    """Measure a running server, or with --start or --offline one of RECIPE.

    With --compare, show records of earlier runs: bench --compare A.json B.json ...

    Exits with 1 when more than 1 % of the requests failed.
    """
    options = Options(**given)
    typed = [n for n in given if ctx.get_parameter_source(n) is ParameterSource.COMMANDLINE]
    if options.compare:
        compare(options, typed)
        return
    check(options, typed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what we started is stopped
    extras = [(), *(tuple(text.split(",")) for text in options.ablate)]
    configs = [engine_config(options, extra) for extra in extras]  # before anything is measured
    records: list[record.Record] = []
    died = 0
    for config in configs:
        try:
            run(options, config, records)
        except (launch.EngineDied, NotStarted, OSError) as error:  # files that cannot be, say
            click.echo(f"error: {error}", err=True)
            died += 1
    if len(records) > 1 and (options.ablate or options.sweep):
        conclude(options, records)
    if died or any(written.notes for written in records):
        sys.exit(1)


def conclude(options: Options, records: Sequence[record.Record]) -> None:
    """What several runs say together, beside their records: a table, of a sweep also a plot."""
    results, load = Path(options.results_dir), records[0].workload["name"]
    name = "sweep" if options.sweep else f"{load} ablation"
    path = sweep.place(records, results, name, ".txt")
    shared, found = sweep.curves(records)
    text = sweep.table(shared, found)
    command = " ".join(records[0].argv)
    path.write_text(f"{records[0].started_at}  {command}\n\n{text}\n")
    click.echo(f"\n{text}\ntable: {path}")
    if options.sweep is not None and (problem := sweep.missing()):
        click.echo(f"no plot: {problem}")
    elif options.sweep is not None:
        show_plot(options.plot or sweep.place(records, results, name, ".svg"), shared, found)


def compare(options: Options, typed: Sequence[str]) -> None:
    """Two records metric by metric, more of them load by load."""
    for name in typed:
        if name not in ("recipe", "more", "compare", "plot"):
            raise ConfigError(f"--compare measures nothing; {flags_of(typed)[name]} has no effect")
    records = [record.read(Path(one)) for one in (options.recipe, *options.more) if one is not None]
    if len(records) < 2:
        raise ConfigError("--compare needs two records or more: --compare A.json B.json")
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
    """Refuse combinations that would otherwise be silently ignored."""
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
        (has_sweep and has_load, "--sweep says the concurrencies; drop --concurrency"),
        (has_sweep and rate, "--sweep says the concurrencies; drop --request-rate"),
        (unknown, f"--workload {unknown}: {LOADS}, or several of them with commas"),
        (several and options.json_out, "--json-out holds one run"),
        (several and options.expert_load, "--expert-load holds one run"),
        (is_placed and not options.expert_load, "--expert-ranks and -copies are of --expert-load"),
        (options.served_by and own_recipe, "--served-by is of another engine; drop RECIPE"),
        (options.more, "one RECIPE and nothing else; records are for --compare"),
        (options.plot and not has_sweep, "--plot draws a --sweep, or records to --compare"),
        (options.plot and sweep.missing(), sweep.missing() or ""),
    ):
        if is_wrong:
            raise ConfigError(message)


def flags_of(typed: Sequence[str]) -> dict[str, str]:
    return {name: f"--{name.replace('_', '-')}" for name in typed} | {"overrides": "--set"}


def engine_config(options: Options, extra: Sequence[str]) -> Config | None:
    """The config of the engine to measure, as far as it is known. `extra`: an ablation."""
    if not (options.offline or options.start or options.recipe is not None):
        return None
    names = (*OF_THE_RECIPE[1:], *["api_key"] * options.start)
    flags = {name: vars(options)[name] for name in names}
    config = config_of(options.recipe, (*options.overrides, *extra), **flags)
    if options.offline and (dp := config.recipe.parallel.dp) > 1:
        raise ConfigError(f"--offline drives one engine; parallel.dp is {dp}")
    return config


def run(options: Options, config: Config | None, records: list[record.Record]) -> None:
    """Measure, print, write: one run, or one for each workload or concurrency. `records` gets
    theirs, also where a later one fails."""
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
    loads, goals_ms = loads_of(options), goals_of(options.goodput)  # before a server starts
    with server_of(options, config) as (url, server):
        outcomes = (online.measure_server(
            load, config, url=url, server=server, command=options.served_by,
            api_key=options.api_key or key, goals_ms=goals_ms, warmup=options.warmup,
            processes=options.processes or max(1, min(4, (os.cpu_count() or 2) // 2)),
            bar=progress_bar,
        ) for load in loads)  # fmt: skip
        records += (publish(options, outcome) for outcome in outcomes)


async def while_alive(fleet: Fleet, measuring: Coroutine[Any, Any, None]) -> None:
    """Raises EngineDied once a rank has ended, or hangs, which others would wait for."""
    task = asyncio.create_task(measuring)
    while not (why := fleet.lost(restarts=False)):
        await asyncio.sleep(TICK_S)
        if task.done() and not isinstance(task.exception(), EngineLostError):
            return task.result()
    raise launch.EngineDied(why)


@contextmanager
def server_of(options: Options, config: Config | None) -> Iterator[tuple[str, LiveServer | None]]:
    """The address of the server to drive, and its process if it is ours, until the block ends."""
    if config is None or not options.start:
        yield options.url or DEFAULT_URL, None
        return
    server = config.recipe.server
    if not server.port:
        raise ConfigError("server.port is 0; --start must know where the server will listen")
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
    click.echo(f"record: {record.write(written, Path(options.results_dir))}")
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
    """No two of a sweep send the same prompts, which would find their pages cached."""
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
        if not (found := re.fullmatch(r"(ttft|tpot|e2el):(\d+(?:\.\d+)?)", text)):
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
