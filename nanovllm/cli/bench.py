"""`nanovllm bench`: run a load, print the table, write the record."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
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
from nanovllm.cli.bench_options import (
    DEFAULT_URL,
    OF_THE_RECIPE,
    Options,
    check,
    flags_of,
    goals_of,
    load_options,
    loads_of,
)
from nanovllm.cli.command import Command
from nanovllm.cli.commands import config_of, recipe_options
from nanovllm.cli.other_flags import BENCH, SERVERS
from nanovllm.config import Config, ConfigError, given_api_key, usable_key
from nanovllm.fleet import Fleet
from nanovllm.ipc.client import EngineLostError
from nanovllm.watch import TICK_S

BUSY = 0.9  # CPU time / wall time above which a client process may be the bottleneck


@click.command(
    cls=Command,
    others={**BENCH, **SERVERS},
    example="nanovllm bench --start qwen3-8b --concurrency 64 --input-len 1000 --output-len 256",
)
@partial(recipe_options, model=False)
@load_options
@click.argument("more", nargs=-1)
@click.pass_context
def bench(ctx: click.Context, /, **given: Any) -> None:  # noqa: ANN401 - of the command line
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
    store.check_writable(Path(options.results_dir))
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
    shared, curves = sweep.curves(records)
    again = sweep.command(records, results)
    click.echo(f"\n{sweep.table(shared, curves)}\nthis table again: {again}")
    if options.sweep is not None and (problem := sweep.missing()):
        click.echo(f"no plot: {problem}")
    elif options.sweep is not None:
        show_plot(options.plot or sweep.plot_path(records, results, "sweep"), shared, curves)


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
        shared, curves = sweep.curves(records)
        click.echo(f"\n{sweep.table(shared, curves)}")
        if options.plot is not None:
            show_plot(options.plot, shared, curves)


def show_plot(path: Path, shared: str, curves: sweep.Curves) -> None:
    sweep.draw(path, shared, curves)
    click.echo(f"plot: {path}")


def engine_config(options: Options, extra: Sequence[str]) -> Config | None:
    """Return the config of the engine to measure; None if unknown. `extra` is an ablation."""
    if not (options.offline or options.start or options.recipe is not None):
        return None
    names = (*OF_THE_RECIPE[1:], *["api_key"] * options.start)
    flags = {name: getattr(options, name) for name in names}
    config = config_of(options.recipe, (*options.overrides, *extra), **flags)
    if options.offline and (dp := config.recipe.parallel.dp) > 1:
        raise ConfigError(f"--offline drives one engine; parallel.dp is {dp}")
    adapters = config.recipe.adapters
    num_adapters = 0 if adapters is None else len(adapters.names)
    if options.offline and options.adapters > num_adapters:
        raise ConfigError(
            f"--adapters {options.adapters}: the recipe has {num_adapters} adapters; add "
            f"--set adapters.folder=dummy --set adapters.slots={options.adapters} for random ones"
        )
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
                warm_up=options.warmup != 0, num_adapters=options.adapters, bar=progress_bar,
                publish=lambda outcome: records.append(publish(options, outcome)),
            )))  # fmt: skip
            return
    key = config.recipe.server.api_key if config is not None else given_api_key()
    if options.api_key:
        key = usable_key(options.api_key, "--api-key")
    loads, goals_ms = loads_of(options), goals_of(options.goodput)  # checked before the start
    with server_of(options, config) as (url, server):
        outcomes = (online.measure_server(
            load, config, url=url, server=server, command=options.served_by,
            api_key=key, goals_ms=goals_ms, warmup=options.warmup,
            processes=options.processes or max(1, min(4, (os.cpu_count() or 2) // 2)),
            bar=progress_bar, prefill_url=options.prefill_url,
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
    tree = record.commit(stated=options.commit)
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
