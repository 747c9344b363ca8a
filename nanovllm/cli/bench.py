"""`nanovllm bench`: run a load, print the table, write the record. Not how load is generated."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec
import uvloop
from click.core import ParameterSource
from msgspec import Struct
from tqdm import tqdm

from nanovllm import launch
from nanovllm.bench import machine, offline, online, record, report, sweep
from nanovllm.bench.outcome import Advance, Outcome
from nanovllm.bench.started import Started, started
from nanovllm.bench.workload import OFFLINE_NAMES, Load
from nanovllm.cli.options import recipe_options
from nanovllm.config import Config, ConfigError, load_config

DEFAULT_CONCURRENCY = 8
DEFAULT_URL = "http://127.0.0.1:8000"
BUSY = 0.9  # share of a run on the CPU above which a client process may be what limits it


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The command line."""

    recipe: str | None
    overrides: tuple[str, ...]
    device: str | None
    tp: int | None
    load_format: str | None
    offline: bool
    start: bool
    workload: str
    ablate: tuple[str, ...]
    url: str | None
    api_key: str | None
    concurrency: int | None
    sweep: str | None
    request_rate: float | None
    burstiness: float
    num_prompts: int | None
    input_len: int
    output_len: int
    range_ratio: float
    temperature: float
    ignore_eos: bool
    goodput: tuple[str, ...]
    processes: int | None
    seed: int
    warmup: int | None
    json_out: str | None
    results_dir: str
    commit: str | None
    compare: bool
    more: tuple[str, ...]
    plot: Path | None


ONLINE_ONLY = (
    "url", "concurrency", "sweep", "request_rate", "burstiness", "num_prompts", "input_len",
    "output_len", "range_ratio", "temperature", "ignore_eos", "goodput", "processes",
)  # fmt: skip
OF_THE_RECIPE = ("overrides", "device", "tp", "load_format")
POSITIVE = click.IntRange(min=1)
POSITIVE_FLOAT = click.FloatRange(min=0, min_open=True)


@click.command()
@recipe_options
@click.option("--offline", is_flag=True, help="drive RECIPE's engine directly, without HTTP")
@click.option("--start", is_flag=True, help="serve RECIPE for this run, and stop it afterwards")
@click.option("--workload", type=click.Choice(OFFLINE_NAMES), default="w1", help="of --offline")
@click.option(
    "--ablate", multiple=True, metavar="KEY=VALUE", help="run again with this; may be repeated"
)
@click.option("--url", help=f"server to drive (default {DEFAULT_URL})")
@click.option("--api-key", help="bearer token of the server")
@click.option(
    "--concurrency", type=POSITIVE, help="closed loop: requests in flight, all the time (default 8)"
)
@click.option("--sweep", metavar="1,4,16,64", help="one run for each concurrency, and a plot")
@click.option("--request-rate", type=POSITIVE_FLOAT, help="open loop: arrivals per second")
@click.option(
    "--burstiness", type=POSITIVE_FLOAT, default=1.0, help="of arrivals: 1 = Poisson, less = bursty"
)
@click.option("--num-prompts", type=POSITIVE, help="default 8 per stream, at most 1024")
@click.option("--input-len", type=POSITIVE, default=1000, help="prompt tokens (default 1000)")
@click.option("--output-len", type=POSITIVE, default=256, help="tokens to generate (default 256)")
@click.option(
    "--range-ratio",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    help="lengths vary within +- this share (default 0)",
)
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.6, help="default 0.6")
@click.option("--ignore-eos/--no-ignore-eos", default=True, help="default: exact output lengths")
@click.option("--goodput", multiple=True, metavar="ttft|tpot|e2el:MS", help="count good requests")
@click.option("--processes", type=POSITIVE, help="client processes (default half the cores, <= 4)")
@click.option("--seed", type=int, default=0, help="of prompts, lengths and arrivals (default 0)")
@click.option(
    "--warmup", type=click.IntRange(min=0), help="requests sent before (default: the concurrency)"
)
@click.option("--json-out", metavar="FILE", help="results with vLLM's key names")
@click.option("--results-dir", default="results", help="where records go (default results)")
@click.option("--commit", help="of a copy without .git: git describe --always --abbrev=40 --dirty")
@click.option("--compare", is_flag=True, help="the arguments are records: show their ratios")
@click.option(
    "--plot", type=click.Path(path_type=Path), metavar="FILE.svg", help="of --sweep or --compare"
)
@click.argument("more", nargs=-1)
@click.pass_context
def bench(ctx: click.Context, /, **given: object) -> None:
    """Measure a running server, or with --start or --offline one of RECIPE.

    With --compare, show records of earlier runs: bench --compare A.json B.json ...

    Exits with 1 when more than 1 % of the requests failed.
    """
    options = msgspec.convert(given, Options)
    typed = [n for n in given if ctx.get_parameter_source(n) is ParameterSource.COMMANDLINE]
    if options.compare:
        compare(options, typed)
        return
    check(options, typed)
    check_load(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what we started is stopped
    try:
        runs = [run(options, extra) for extra in ((), *((key,) for key in options.ablate))]
    except launch.EngineDied as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(launch.EXIT_CRASH)
    records = [written for measured in runs for written in measured]
    if options.sweep is not None:
        show_curves(records, options.plot or sweep.place(records, Path(options.results_dir)))
    else:
        for changed in records[1:]:
            click.echo(f"\n{report.compare(records[0], changed)}")
    if any(written.notes for written in records):
        sys.exit(1)


def compare(options: Options, typed: Sequence[str]) -> None:
    """Two records metric by metric, more of them load by load."""
    for name in typed:
        if name not in ("recipe", "more", "compare", "plot"):
            raise ConfigError(f"--compare measures nothing; {flags_of(typed)[name]} has no effect")
    paths = (options.recipe, *options.more)
    records = [record.read(Path(path)) for path in paths if path is not None]
    if len(records) < 2:
        raise ConfigError("--compare needs two records or more: --compare A.json B.json")
    if len(records) == 2:
        click.echo(report.compare(*records))
    if len(records) > 2 or options.plot is not None:
        show_curves(records, options.plot)


def show_curves(records: Sequence[record.Record], path: Path | None) -> None:
    shared, found = sweep.curves(records)
    click.echo(f"\n{shared}\n{sweep.table(found)}")
    if path is not None:
        sweep.write(path, shared, found)
        click.echo(f"plot: {path}")


def check(options: Options, typed: Sequence[str]) -> None:
    """Refuse combinations that would otherwise be silently ignored."""
    own_engine, flags = options.offline or options.start, flags_of(typed)
    if options.offline and options.start:
        raise ConfigError("--offline and --start exclude each other")
    for name in typed:
        if options.offline and name in ONLINE_ONLY:
            raise ConfigError(f"--offline runs a fixed --workload; {flags[name]} has no effect")
        if not options.offline and name == "workload":
            raise ConfigError("--workload names a load of --offline")
        if not own_engine and name == "ablate":
            raise ConfigError("--ablate needs an engine of its own: --offline or --start")
        if not own_engine and options.recipe is None and name in OF_THE_RECIPE:
            raise ConfigError(f"{flags[name]} describes the server: name its RECIPE, or --start it")
    if options.start and options.url is not None:
        raise ConfigError("--start serves where the recipe says; set server.host and server.port")


def check_load(options: Options) -> None:
    """The same of how much is sent, and of files."""
    if options.concurrency is not None and options.request_rate is not None:
        raise ConfigError("--concurrency (closed loop) and --request-rate (open loop): give one")
    loads = (options.concurrency, options.request_rate)
    if options.sweep is not None and loads != (None, None):
        raise ConfigError("--sweep says the concurrencies; drop --concurrency and --request-rate")
    if (options.ablate or options.sweep) and options.json_out is not None:
        raise ConfigError("--json-out holds one run; drop it, or --ablate and --sweep")
    if options.more:
        raise ConfigError(f"one RECIPE, not also {options.more[0]}; records are for --compare")
    if options.plot is not None and options.sweep is None:
        raise ConfigError("--plot draws a --sweep, or records to --compare")


def flags_of(typed: Sequence[str]) -> dict[str, str]:
    return {name: f"--{name.replace('_', '-')}" for name in typed} | {"overrides": "--set"}


def run(options: Options, extra: tuple[str, ...]) -> list[record.Record]:
    """Measure, print, write: one run, or one for each concurrency. `extra`: an ablation."""
    config = None
    if options.offline or options.start or options.recipe is not None:
        flags = {
            "device": options.device,
            "parallel.tp": options.tp,
            "load.format": options.load_format,
            "server.api_key": options.api_key if options.start else None,
        }
        config = load_config(options.recipe, (*options.overrides, *extra), flags)
    if config is not None and options.offline:
        return [publish(options, offline_outcome(options, config))]
    loads = loads_of(options)
    with server_of(options, config, extra) as (url, process):
        return [
            publish(options, online_outcome(options, load, config, url, process)) for load in loads
        ]


@contextmanager
def server_of(
    options: Options, config: Config | None, extra: tuple[str, ...]
) -> Iterator[tuple[str, Started | None]]:
    """The address of the server to drive, and its process if it is ours, until the block ends."""
    if config is None or not options.start:
        yield options.url or DEFAULT_URL, None
        return
    server = config.recipe.server
    if not server.port:
        raise ConfigError("server.port is 0; --start must know where the server will listen")
    url = f"http://{server.host}:{server.port}"
    with started(serve_command(options, extra), url) as process:
        yield url, process


def serve_command(options: Options, extra: tuple[str, ...]) -> list[str]:
    command = [sys.executable, "-m", "nanovllm", "serve"]
    command += [] if options.recipe is None else [options.recipe]
    for override in (*options.overrides, *extra):
        command += ["--set", override]
    for flag, value in (
        ("--device", options.device),
        ("--tp", options.tp),
        ("--load-format", options.load_format),
        ("--api-key", options.api_key),
    ):
        command += [] if value is None else [flag, str(value)]
    return command


def offline_outcome(options: Options, config: Config) -> Outcome:
    begin = time.perf_counter()
    with launch.engine_process(config) as path:
        ready_s = time.perf_counter() - begin
        outcome = uvloop.run(
            offline.measure_engine(
                path,
                config,
                options.workload,
                seed=options.seed,
                warm_up=options.warmup != 0,
                bar=progress_bar,
            )
        )
    return msgspec.structs.replace(outcome, metrics={"start_to_ready_s": ready_s})


def online_outcome(
    options: Options, load: Load, config: Config | None, url: str, process: Started | None
) -> Outcome:
    outcome = online.measure_server(
        load,
        config,
        url=url,
        supervisor=None if process is None else process.pid,
        api_key=options.api_key,
        goals_ms=goals_of(options.goodput),
        warmup=options.warmup,
        processes=options.processes or max(1, min(4, (os.cpu_count() or 2) // 2)),
        bar=progress_bar,
    )
    if (busy := outcome.metrics["client_busy"]) > BUSY:
        click.echo(
            f"warning: a client process was busy {busy:.0%} of the time, so the client may be the "
            "limit; raise --processes",
            err=True,
        )
    if process is None:
        return outcome
    metrics = outcome.metrics | {"start_to_ready_s": process.ready_s}
    return msgspec.structs.replace(outcome, metrics=metrics)


def publish(options: Options, outcome: Outcome) -> record.Record:
    click.echo(outcome.table())
    if options.json_out is not None:
        shown = msgspec.json.encode(outcome.vllm_json())
        Path(options.json_out).write_bytes(msgspec.json.format(shown))
    commit = machine.commit(given=options.commit)
    written = outcome.as_record(commit, ["nanovllm", *sys.argv[1:]])
    click.echo(f"record: {record.write(written, Path(options.results_dir))}")
    return written


def loads_of(options: Options) -> list[Load]:
    """No two of a sweep send the same prompts, which would find their pages cached."""
    if options.sweep is None:
        concurrency = options.concurrency
        if concurrency is None and options.request_rate is None:
            concurrency = DEFAULT_CONCURRENCY
        return [load_of(options, concurrency, options.seed)]
    return [load_of(options, each, options.seed + each) for each in sweep.parse(options.sweep)]


def load_of(options: Options, concurrency: int | None, seed: int) -> Load:
    return Load(
        num_prompts=options.num_prompts or min(8 * (concurrency or 16), 1024),
        input_len=options.input_len,
        output_len=options.output_len,
        range_ratio=options.range_ratio,
        concurrency=concurrency,
        request_rate=options.request_rate,
        burstiness=options.burstiness,
        seed=seed,
        temperature=options.temperature,
        ignore_eos=options.ignore_eos,
    )


def goals_of(goodput: Sequence[str]) -> dict[str, float]:
    goals = {}
    for text in goodput:
        name, _, value = text.partition(":")
        if name not in ("ttft", "tpot", "e2el") or not re.fullmatch(r"\d+(\.\d+)?", value):
            raise ConfigError(
                f"--goodput {text}: write ttft, tpot or e2el, a colon, and the most ms"
            )
        goals[name] = float(value)
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
