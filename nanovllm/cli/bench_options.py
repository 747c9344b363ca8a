"""Options of `nanovllm bench`, their combinations, and the loads that they describe."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from nanovllm.bench import sweep
from nanovllm.bench.agents import AgentLoad
from nanovllm.bench.online import ServerLoad
from nanovllm.bench.workload import OFFLINE_NAMES, Workload
from nanovllm.cli.command import Function, option
from nanovllm.cli.commands import FILE, numbers
from nanovllm.config import ConfigError

DEFAULT_CONCURRENCY = 8
DEFAULT_URL = "http://127.0.0.1:8000"


class Options(Struct, frozen=True, kw_only=True):
    """Values of the command line, converted by click. None: not given, and without a default."""

    recipe: str | None
    more: tuple[str, ...]  # further arguments: records to compare
    overrides: tuple[str, ...]
    device: str | None
    tp: int | None
    dp: int | None
    load_format: str | None
    eager: bool | None
    url: str | None
    prefill_url: str
    api_key: str | None
    start: bool
    served_by: str
    offline: bool
    workload: str
    ablate: tuple[str, ...]
    concurrency: int | None
    sweep: str | None
    request_rate: float | None
    burstiness: float
    num_prompts: int | None
    warmup: int | None
    seed: int
    processes: int | None
    adapters: int
    sessions: int | None
    turns: int | None
    shared_len: int | None
    growth: tuple[float, float] | None
    answers: tuple[float, float] | None
    longest: int | None
    pauses: tuple[float, float] | None
    input_len: int
    output_len: int
    range_ratio: float
    temperature: float
    ignore_eos: bool
    structured: bool
    goodput: tuple[str, ...]
    results_dir: str
    json_out: Path | None
    commit: str | None
    expert_load: Path | None
    expert_ranks: int | None
    expert_copies: int
    compare: bool
    plot: Path | None


OF_A_SERVER = ("url", "prefill_url", "served_by", "sweep", "goodput", "processes")
OF_AGENTS = ("sessions", "turns", "shared_len", "growth", "answers", "longest", "pauses")
NOT_OF_AGENTS = {*Workload.__struct_fields__} - {*AgentLoad.__struct_fields__}
ONLINE_ONLY = {*Workload.__struct_fields__, *OF_A_SERVER, *OF_AGENTS} - {"seed", "adapters"}
OF_THE_RECIPE = ("overrides", "device", "tp", "dp", "load_format", "eager")
LOADS = ", ".join(OFFLINE_NAMES)
COUNT, POSITIVE = click.IntRange(min=0), click.IntRange(min=1)
GOAL = re.compile(r"(ttft|tpot|e2el):(\d+(?:\.\d+)?)")
SUBCOMMANDS = ("serve", "throughput", "latency", "sweep", "startup")  # those of vLLM's bench


class NumberRange(click.FloatRange):
    """A range without NaN, which no comparison finds outside of a range."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:  # noqa: ANN401
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


class SpanType(click.ParamType[tuple[float, float]]):
    """Two numbers, as in `200-4000`, as a tuple; one number is both."""

    name = "span"

    def __init__(self, kind: type[int] | type[float]) -> None:
        self.kind = kind

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, float]:
        if not (match := re.fullmatch(r"(\d+(?:\.\d+)?)(?:-(\d+(?:\.\d+)?))?", value)):
            self.fail(f"{value}: write two numbers, as in 200-4000", param, ctx)
        try:
            return self.kind(match[1]), self.kind(match[2] or match[1])
        except ValueError:
            self.fail(f"{value}: write whole numbers, as in 200-4000", param, ctx)


SERVED, LOAD, ANSWERS, OUTPUT = "Server", "Load", "Answers", "Results"
AGENTS = "Agents (--workload agents)"
# fmt: off
GIVEN: tuple[Callable[[Function], Function], ...] = (
    option("--url", metavar="URL", group=SERVED,
           help=f"Drive the server at this address (default {DEFAULT_URL})."),
    option("--prefill-url", default="", metavar="URL", group=SERVED,
           help="Send each request to this prefill server first, as a router does. --url, or the "
                "server of --start, is the decode server."),
    option("--api-key", metavar="KEY", group=SERVED,
           help="Send this key (default: $NANOVLLM_API_KEY)."),
    option("--start", is_flag=True, group=SERVED,
           help="Serve RECIPE for this run, and stop it afterwards."),
    option("--served-by", default="", metavar="COMMAND", group=SERVED,
           help="Store this command line of another engine's server in the record."),
    option("--offline", is_flag=True, group="Without HTTP",
           help="Drive the engine of RECIPE directly."),
    option("--workload", default="w1", metavar="NAME[,...]", group="Without HTTP",
           help=f"Run one or more of {LOADS} (default w1). Over HTTP: agents, conversations that "
                "grow by tool results."),
    option("--ablate", multiple=True, metavar="KEY=VALUE[,...]", group="Without HTTP",
           help="Repeat the run with this override. Also with --start. May be repeated."),
    option("--concurrency", type=POSITIVE, metavar="N", group=LOAD,
           help="Keep N requests in flight, a closed loop (default 8)."),
    option("--sweep", metavar="1,4,16,64", group=LOAD,
           help="Run once for each of these concurrencies, and draw a plot."),
    option("--request-rate", type=NumberRange(0, min_open=True), metavar="R", group=LOAD,
           help="Send R requests per second, an open loop."),
    option("--burstiness", type=NumberRange(0, 1e6, min_open=True), default=1.0,
           metavar="X", group=LOAD,
           help="Spread arrivals as a gamma distribution of this shape. 1 (default) is Poisson, "
                "less is burstier."),
    option("--num-prompts", type=POSITIVE, metavar="N", group=LOAD,
           help="Send N requests (default: 8 for each in flight, at most 1024)."),
    option("--warmup", type=COUNT, metavar="N", group=LOAD,
           help="Send N requests first that are not measured (default: the concurrency)."),
    option("--seed", type=int, default=0, metavar="N", group=LOAD,
           help="Seed of prompts, lengths and arrivals (default 0)."),
    option("--processes", type=POSITIVE, metavar="N", group=LOAD,
           help="Send from N processes (default: half the cores, at most 4)."),
    option("--adapters", type=COUNT, default=0, metavar="N", group=LOAD,
           help="Use N of the LoRA adapters in turn (default 0: the model alone). With --set "
                "adapters.folder=dummy there are adapters.slots random ones of adapters.max_rank."),
    option("--sessions", type=POSITIVE, metavar="N", group=AGENTS,
           help="Hold N conversations (default: --concurrency, all at once)."),
    option("--turns", type=POSITIVE, metavar="N", group=AGENTS,
           help="Send at most N requests in each (default 40)."),
    option("--shared-len", type=POSITIVE, metavar="N", group=AGENTS,
           help="Begin all of them with the same N tokens (default 8000)."),
    option("--growth", type=SpanType(int), metavar="A-B", group=AGENTS,
           help="Add A to B tokens per turn: answer and tool result (default 200-4000)."),
    option("--answers", type=SpanType(int), metavar="A-B", group=AGENTS,
           help="Generate A to B tokens per turn (default 50-1500)."),
    option("--longest", type=POSITIVE, metavar="N", group=AGENTS,
           help="End a conversation at prompts of N tokens (default 85000)."),
    option("--pauses", type=SpanType(float), metavar="A-B", group=AGENTS,
           help="Let tools run A to B seconds between turns (default 0.5-20)."),
    option("--input-len", type=POSITIVE, default=1000, metavar="N", group=ANSWERS,
           help="Send prompts of N tokens, template included (default 1000)."),
    option("--output-len", type=POSITIVE, default=256, metavar="N", group=ANSWERS,
           help="Generate N tokens (default 256)."),
    option("--range-ratio", type=NumberRange(0, 1, max_open=True), default=0.0,
           metavar="X", group=ANSWERS,
           help="Vary both lengths by up to this share, up and down (default 0)."),
    option("--temperature", type=NumberRange(0, 2), default=0.6, metavar="X", group=ANSWERS,
           help="Sample at this temperature (default 0.6)."),
    option("--ignore-eos/--no-ignore-eos", default=True, group=ANSWERS,
           help="Generate exactly --output-len tokens (default), or let answers end."),
    option("--structured", is_flag=True, group=ANSWERS,
           help="Let every answer follow a JSON schema."),
    option("--goodput", multiple=True, metavar="ttft|tpot|e2el:MS", group=OUTPUT,
           help="Count the requests per second within this limit. May be repeated."),
    option("--results-dir", default="results", metavar="FOLDER", group=OUTPUT,
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


def check(options: Options, typed: Sequence[str]) -> None:
    """Raise ConfigError for options without effect in the given combination."""
    own_engine, flags = options.offline or options.start, flags_of(typed)
    is_agents = options.workload == "agents"
    own_recipe = own_engine or options.recipe is not None
    for name in typed:
        if options.offline and name in ONLINE_ONLY:
            raise ConfigError(f"--offline runs a fixed --workload; {flags[name]} has no effect")
        if not own_recipe and name in OF_THE_RECIPE:
            raise ConfigError(f"{flags[name]} describes the server: name its RECIPE, or --start it")
        if is_agents and name in NOT_OF_AGENTS:
            raise ConfigError(
                f"--workload agents has sizes of its own; {flags[name]} has no effect"
            )
        if not is_agents and name in OF_AGENTS:
            raise ConfigError(f"{flags[name]} needs --workload agents")
    rate, has_sweep = options.request_rate, options.sweep is not None
    is_placed = not {*typed}.isdisjoint(("expert_ranks", "expert_copies"))
    names, has_load = options.workload.split(","), options.concurrency is not None
    unknown = ", ".join(name for name in names if name not in OFFLINE_NAMES)
    several = has_sweep or options.ablate or len(names) > 1
    for is_wrong, message in (
        (options.offline and options.start, "--offline and --start exclude each other"),
        (is_agents and options.offline, "--workload agents needs a server: drop --offline"),
        (
            not options.offline and "workload" in typed and not is_agents,
            "--workload names a load of --offline; over HTTP, only agents",
        ),
        (not own_engine and options.ablate, "--ablate needs an engine: --offline or --start"),
        (options.start and options.url, "--start serves at the recipe's server.host and .port"),
        (has_load and rate, "--concurrency (closed loop) or --request-rate (open loop): give one"),
        (has_sweep and has_load, "--sweep sets the concurrencies; drop --concurrency"),
        (has_sweep and rate, "--sweep sets the concurrencies; drop --request-rate"),
        (
            not is_agents and unknown,
            f"--workload {unknown}: {LOADS}, or several of them with commas",
        ),
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


def loads_of(options: Options) -> list[ServerLoad]:
    """Return the loads. Those of a sweep have different prompts, which are thus not cached."""
    seeds: dict[int | None, int] = {options.concurrency: options.seed}
    if options.sweep is not None:
        seeds = {count: options.seed + count for count in numbers("--sweep", options.sweep)}
    elif options.concurrency is None and options.request_rate is None:
        seeds = {options.sessions or DEFAULT_CONCURRENCY: options.seed}
    make = agent_load if options.workload == "agents" else plain_load
    return [make(options, concurrency, seed) for concurrency, seed in seeds.items()]


def plain_load(options: Options, concurrency: int | None, seed: int) -> Workload:
    num_prompts = options.num_prompts or min(8 * (concurrency or 16), 1024)
    chosen = {"concurrency": concurrency, "seed": seed, "num_prompts": num_prompts}
    return msgspec.convert(asdict(options) | chosen, Workload)


def agent_load(options: Options, concurrency: int | None, seed: int) -> AgentLoad:
    names = (*OF_AGENTS, "temperature", "ignore_eos", "adapters")
    stated = {name: value for name in names if (value := getattr(options, name)) is not None}
    chosen = {"concurrency": concurrency, "seed": seed}
    chosen["sessions"] = options.sessions or concurrency
    return AgentLoad(**stated | chosen)


def goals_of(goodput: Sequence[str]) -> dict[str, float]:
    goals = {}
    for text in goodput:
        if not (match := GOAL.fullmatch(text)):
            raise ConfigError(f"--goodput {text}: write ttft, tpot or e2el, a colon, and the ms")
        goals[match[1]] = float(match[2])
    return goals
