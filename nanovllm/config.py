"""A recipe becomes one frozen `Config`.

A recipe (YAML) says everything about one deployment of one model, in sections. Unknown keys are
errors that name the path and a near valid name; `--set section.key=value` overrides any key.
"auto" exists only here: whoever resolves one writes the concrete value into a new Config.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, field, structs

from nanovllm import checkpoint, experts, hosts, hub, recipes, speculate
from nanovllm.experts import Experts as Experts
from nanovllm.hub import Check
from nanovllm.speculate import Speculate as Speculate
from nanovllm.typed_yaml import (
    NOT_JSON as NOT_JSON,
    ConfigError as ConfigError,
    converted,
    parse,
    put,
    read,
)

DEMO = recipes.PACKAGE / "demo"  # the embedded default model: config, weights, tokenizer, template
Auto = Literal["auto"]
MOST_TOKENS = 32768  # context served by default, when the model's own is longer


class Load(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: Literal["auto", "safetensors", "dummy"] = "auto"
    seed: int = 0  # of dummy weights


class Parallel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tp: int = 1  # devices that work on every token
    # How many have whole experts of their own: 1, as tp, or beside a tp of 1 any number of devices,
    # each of which works on tokens of its own requests.
    ep: int = 1
    dp: int = 1  # engines of so many devices each, the larger of tp and ep, behind one server
    # Of several engines a request goes to the one where prefill_weight times the prompt tokens to
    # compute and load_weight times the requests in flight are least.
    prefill_weight: float = 1.0
    load_weight: float = 128.0
    # Restarts within an hour of each engine, where there are several, and of each API process. The
    # waits before them are 1, 2, 4 ... 60 s, so that 100 do not run out. 0: none.
    restarts: int = 100


class Cache(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dtype: Literal["auto", "fp8"] = "auto"  # auto: the model's; fp8: e4m3, a scale for each head
    # Of recurrent states. bfloat16: half the bytes, and rounded whenever a step ends.
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    page_tokens: int | Auto = "auto"
    pages: int | Auto = "auto"  # auto: what fits
    memory_fraction: float = 0.9  # of the device's memory, weights included
    cpu_gib: float = 2.0  # what "auto" pages may take on a CPU, of each rank
    # Of a model with recurrent layers: states kept for reuse; auto: what fits in this share of the
    # room that the states of running requests leave, or in so much of the host's memory, of each
    # rank, if that is not 0. Then they lie there, and pages get all of the device's room.
    checkpoints: int | Auto = "auto"
    checkpoint_fraction: float = 0.25
    checkpoint_host_gib: float = 0.0
    prefix: bool = True


class Schedule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    slots: int | Auto = "auto"  # most requests on the device at once; auto: 16 on a CPU, else 512
    # Token budget of a step; auto: 512 on a CPU, else 8192, of models with experts 16384.
    step_tokens: int | Auto = "auto"
    # Of a step that also decodes; auto: by the measured times of steps (engine/pace.py). A step
    # with prompts takes less than four without, and a prompt at most four times as long as its
    # tokens would alone; on a host so slow that both cannot hold, the latter does.
    mixed_step_tokens: int | Auto = "auto"
    depth: int = 1  # steps planned ahead of the device; 0 = never overlap
    max_queue: int = 4096  # waiting requests beyond which a new one is refused (503)
    ageing_s: float = 1.0  # a waiting request gains one priority level in so many seconds
    overtake_steps: int = 64  # in so many, others may be admitted past one that has no pages


class Kernels(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which implementation of each operation; "torch" is always the plain reference."""

    attention: Literal["auto", "torch", "triton", "flash"] = "auto"
    decode: Literal["auto", "torch", "triton", "cute"] = "auto"  # attention of decode rows
    rms_norm: Literal["auto", "torch", "triton", "compile"] = "auto"
    add_rms_norm: Literal["auto", "torch", "triton", "compile"] = "auto"
    silu_mul: Literal["auto", "torch", "triton", "compile"] = "auto"
    sigmoid_mul: Literal["auto", "torch", "triton", "compile"] = "auto"  # of gated attention
    rope_store: Literal["auto", "torch", "triton", "compile"] = "auto"
    gated_linear: Literal["auto", "torch", "cute"] = "auto"  # of steps of many rows
    skinny_linear: Literal["auto", "torch", "cute"] = "auto"  # of up to 128 rows, reading weights
    sliced_linear: Literal["auto", "torch", "library"] = "auto"  # of some hundred rows: split-K
    added_linear: Literal["auto", "torch", "library"] = "auto"  # of thousands, onto the residual
    # Of block fp8. cute: of few rows in Triton; tiled: of few rows, too, by the kernel of many.
    fp8_linear: Literal["auto", "torch", "tiled", "cute"] = "auto"
    experts: Literal["auto", "torch", "triton", "cute"] = "auto"  # cute: triton with few rows
    delta: Literal["auto", "torch", "triton"] = "auto"  # the gated delta rule, of recurrent layers
    sample: Literal["auto", "torch", "triton"] = "auto"
    batch_prep: Literal["auto", "torch", "triton"] = "auto"
    cuda_graphs: bool = True
    mixed_graph_tokens: int = 2048  # largest step with a prompt chunk that replays graphs; 0: none


class Server(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None  # None: what NANOVLLM_API_KEY says
    # Web pages that may use the server besides its own and those of this machine: the origins, as
    # https://chat.example, or "*": all pages, for the API alone.
    allowed_origins: list[str] = field(default_factory=list)
    # On a loopback host without a key: names in the header Host, besides addresses and localhost.
    allowed_hosts: list[str] = field(default_factory=list)
    served_name: str | None = None  # one more name of the model; None: the last part of its name
    parser: str = "auto"
    page: bool | Auto = "auto"  # and /debug/steps; auto: where only this machine can open it
    reasoning_content: bool = False  # name reasoning that way too, for clients that need it
    raise_priority: bool = False  # clients may ask for a priority below 0, down to -100
    workers: int = 1
    max_model_tokens: int | Auto = "auto"  # auto: the model's own, 32768, or what the cache holds
    max_body_bytes: int = 32 * 1024 * 1024
    stall_s: float = 10.0  # silence of the engine, or delay of a step, that /health calls a stall
    max_header_bytes: int = 64 * 1024  # of a request's first line and headers
    max_headers: int = 100
    header_timeout_s: float = 10.0  # from a connection's start, or a request's first byte
    body_timeout_s: float = 60.0  # for a body to come, and for a finished response to be read
    max_unread_bytes: int = 1024 * 1024  # of a stream; one that is read more slowly is dropped
    shutdown_s: float = 60.0  # after SIGTERM, running requests may finish for this long
    log_format: Literal["text", "json"] = "text"  # json: one object a line


class StructuredOutputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    compile_s: float = 10.0  # a grammar that takes more CPU time to compile is refused (400)


class Paper(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `engine: paper`, which answers at a fixed rate without a model: the server by
    itself."""

    tokens_per_s: float = 250.0  # of each stream; a step takes the inverse


class Recipe(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str = "demo"  # "demo", a local folder, or a hub id; may be written model.name
    num_layers: int | Auto = "auto"  # the first of so many; written model.num_layers
    engine: Literal["model", "paper"] = "model"
    config: str | None = None  # a config.json to use when the model's folder is not at hand
    device: Literal["auto", "cuda", "cpu"] = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # auto: bfloat16, on a CPU float32
    quantize: Literal["fp8"] | None = None  # fp8: made of other weights while they load
    cpu_threads: int | Auto = "auto"  # of products on a CPU, of each rank; auto: by weights, cores
    load: Load = Load()
    parallel: Parallel = Parallel()
    experts: Experts = Experts()
    cache: Cache = Cache()
    schedule: Schedule = Schedule()
    kernels: Kernels = Kernels()
    server: Server = Server()
    structured_outputs: StructuredOutputs = StructuredOutputs()
    paper: Paper = Paper()
    speculate: Speculate | None = None


class Config(Struct, frozen=True, kw_only=True):
    """A checked recipe, and what was derived from it."""

    recipe: Recipe
    source: str  # the recipe file, or "built in"
    changed: dict[str, Any]  # what flags and --set altered
    model_dir: str | None  # holds config.json, weights, tokenizer; None: dummy from `config_path`
    config_path: str  # the model's config.json
    tokenizer_dir: str
    served_name: str
    eos_ids: tuple[int, ...] | None = None  # that end a text (server/ends.py); None: not known yet

    @property
    def model_names(self) -> list[str]:
        """The names of the model, as /v1/models lists them: its hub id first, then the others.

        A model in a folder has the folder's name instead of an id, so that no path is published.
        """
        model, source = self.recipe.model, Path(self.source)
        names = [self.served_name, last_part(model)]
        if model == "demo" or recipes.is_hub_id(model):
            names.insert(0, model)
        if source.suffix in recipes.SUFFIXES:
            names.append(source.stem)
        return list(dict.fromkeys(names))

    @property
    def model_paths(self) -> set[str]:
        """The paths of this machine that are accepted as the model's name, and not published."""
        paths = {self.recipe.model, self.recipe.model.rstrip("/")}
        if Path(self.source).suffix in recipes.SUFFIXES:
            paths |= {self.source, os.path.join(".", self.source)}
        return paths - {""}


class Checked(Struct, frozen=True):
    """A recipe without mistakes, whose model was not looked for yet."""

    recipe: Recipe
    source: str  # as Config.source
    base: Path  # what the recipe's paths start from
    changed: dict[str, Any]


def load_config(
    named: str | None,
    overrides: Iterable[str] = (),
    flags: Mapping[str, object] = {},
    check: Check | None = None,
) -> Config:
    """A recipe file, the name of a shipped one, a model's folder or hub id, or None: the demo.

    `check`: of its config.json. Raises ConfigError with one line for the user.
    """
    return locate(read_recipe(named, overrides, flags), check)


def read_recipe(
    named: str | None, overrides: Iterable[str] = (), flags: Mapping[str, object] = {}
) -> Checked:
    """The recipe with `section.key=value` overrides. The network is not asked for anything."""
    raw, source, base = _find(named)
    changed = {path: value for path, value in flags.items() if value is not None}
    for text in overrides:
        key, equals, written = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: write section.key=value")
        changed[key.strip()] = parse(written, f"--set {key}: the value")  # maybe a secret
    for path, value in (*_keys_of_model(raw), *changed.items()):
        if path.startswith("model.") and path not in MODEL_KEYS:
            raise ConfigError(f"unknown key {path}; a model has {', '.join(MODEL_KEYS)}")
        put(raw, MODEL_KEYS.get(path, path), value)
    recipe = converted(raw, Recipe)
    _check_ranges(recipe)
    given = recipe.server.api_key
    api_key = given_api_key() if given is None else usable_key(given, "server.api_key (--api-key)")
    recipe = structs.replace(recipe, server=structs.replace(recipe.server, api_key=api_key))
    return Checked(recipe, source, base, changed)


MODEL_KEYS = {"model.name": "model", "model.num_layers": "num_layers"}


def _keys_of_model(raw: dict[str, Any]) -> list[tuple[str, object]]:
    """What `model: {name: ..., num_layers: ...}` says, which is not among the sections any more."""
    if not isinstance(raw.get("model"), dict):
        return []
    return [(f"model.{key}", value) for key, value in raw.pop("model").items()]


def _find(named: str | None) -> tuple[dict[str, Any], str, Path]:
    """What a recipe says before any override, where that is, and what its paths start from."""
    if named is None:
        return {}, "built in", Path()
    path, model = recipes.find(named)
    if path is not None:
        checkpoint.check_file(path)
        return read(path), str(path), path.parent
    if model is not None:
        return {"model": model}, model, Path()
    if os.path.isdir(named):
        checkpoint.check(Path(named))  # which names what it is instead of a model
    known = recipes.shipped()
    near = difflib.get_close_matches(named, known, 1)
    raise ConfigError(
        f"{named!r} is no recipe file, no model's folder, no hub id (owner/name) and no shipped "
        f"recipe ({', '.join(known)})" + (f"; did you mean {near[0]}?" if near else "")
    )


RANGES: dict[str, tuple[float, float]] = {
    "cpu_threads": (1, 1024),
    "parallel.tp": (1, 64),
    "parallel.ep": (1, 64),
    "parallel.dp": (1, 64),
    "parallel.prefill_weight": (0, 1e6),
    "parallel.load_weight": (0, 1e6),
    "parallel.restarts": (0, 1000),
    "cache.page_tokens": (1, 1024),
    "cache.pages": (2, 1 << 30),
    "cache.memory_fraction": (0.05, 0.99),
    "cache.cpu_gib": (0.001, 4096),
    "cache.checkpoints": (0, 1 << 20),
    "cache.checkpoint_fraction": (0, 0.9),
    "cache.checkpoint_host_gib": (0, 4096),
    "schedule.slots": (1, 4096),
    "schedule.step_tokens": (1, 1 << 20),
    "schedule.mixed_step_tokens": (1, 1 << 20),
    "schedule.depth": (0, 4),
    "schedule.max_queue": (1, 1 << 20),  # whoever comes waits at least for the next step
    "schedule.ageing_s": (0.001, 86400),
    "schedule.overtake_steps": (0, 1 << 20),
    "kernels.mixed_graph_tokens": (0, 1 << 20),
    "server.port": (0, 65535),
    "server.workers": (1, 64),
    "server.max_model_tokens": (2, 1 << 24),
    "server.max_body_bytes": (1024, 1 << 31),
    "server.stall_s": (2, 3600),
    "server.max_header_bytes": (1024, 1 << 24),
    "server.max_headers": (8, 10_000),
    "server.header_timeout_s": (0.1, 3600),
    "server.body_timeout_s": (0.1, 3600),
    "server.max_unread_bytes": (1024, 1 << 31),
    "server.shutdown_s": (0, 3600),
    "structured_outputs.compile_s": (0.1, 600),
    "paper.tokens_per_s": (0.01, 100_000),
}


def _check_ranges(recipe: Recipe) -> None:
    for path, (low, high) in RANGES.items():
        value = attrgetter(path)(recipe)
        if value != "auto" and not low <= value <= high:
            raise ConfigError(f"{path} is {value}; it must be between {low} and {high}")
    hosts.check(recipe.server.allowed_origins, recipe.server.allowed_hosts)
    experts.check(recipe.experts, recipe.load.format, recipe.parallel.tp, recipe.parallel.ep)
    if recipe.speculate is not None:
        speculate.check(recipe.speculate, recipe.engine)


def given_or(value: int | Auto, otherwise: int) -> int:
    return otherwise if value == "auto" else value


def resolve_schedule(schedule: Schedule, *, on_cpu: bool, most: int = 8192) -> Schedule:
    """Without any "auto" but that of mixed_step_tokens. No step has more than step_tokens.

    `most`: the tokens of a GPU's step, where the schedule leaves them open.
    """
    most = given_or(schedule.step_tokens, 512 if on_cpu else most)
    mixed = schedule.mixed_step_tokens
    mixed = mixed if mixed == "auto" else min(mixed, most)
    slots = min(given_or(schedule.slots, 16 if on_cpu else 512), most)
    return structs.replace(schedule, slots=slots, step_tokens=most, mixed_step_tokens=mixed)


def resolve_context(asked: int | Auto, model_tokens: int, cache_tokens: int, cure: str) -> int:
    """`server.max_model_tokens` as a number: no longer than the model's context, nor the cache.

    Raises ConfigError if what was asked for is; `cure` says how a larger cache is had.
    """
    if asked == "auto":
        return min(model_tokens, MOST_TOKENS, cache_tokens)
    if asked > model_tokens:
        raise ConfigError(
            f"server.max_model_tokens is {asked}; the model's context is {model_tokens} tokens"
        )
    if asked > cache_tokens:
        raise ConfigError(
            f"server.max_model_tokens is {asked}, but the cache holds {cache_tokens} tokens "
            f"({cure}, or --set server.max_model_tokens={cache_tokens})"
        )
    return asked


def locate(checked: Checked, check: Check | None = None) -> Config:
    """Find the model's files; the hub is asked for what is not here, unless weights are dummies.

    `check`: of config.json and the model's name, before weights are downloaded. Raise ConfigError.
    """
    recipe, check = checked.recipe, check or (lambda *_: None)
    dummy = recipe.load.format == "dummy"
    folder = DEMO if recipe.model == "demo" else _folder_of(recipe.model, check, dummy=dummy)
    if folder is not None:
        checkpoint.check(folder, has_weights=not dummy)
        config_path = folder / "config.json"
    elif recipe.config is not None and dummy:
        config_path = checked.base / recipe.config
        if not os.path.isfile(config_path):
            raise ConfigError(f"config: {config_path} does not exist")
    else:
        raise ConfigError(
            f"model {recipe.model!r} is neither a folder nor a model that the hub or its local "
            "cache has; or use --load-format dummy with a recipe that names its config"
        )
    check(config_path, recipe.model)
    has_tokenizer = folder is not None and (folder / "tokenizer.json").is_file()
    if not has_tokenizer and not dummy:
        raise ConfigError(f"{folder} has no tokenizer.json")
    return Config(
        recipe=recipe,
        source=checked.source,
        changed=checked.changed,
        model_dir=str(folder) if folder is not None else None,
        config_path=str(config_path),
        tokenizer_dir=str(folder if has_tokenizer else DEMO),
        served_name=recipe.server.served_name or last_part(recipe.model),
    )


def _folder_of(model: str, check: Check, *, dummy: bool) -> Path | None:
    """A local folder as it is, or a hub id's files, brought here first if allowed and needed."""
    local = Path(os.path.expanduser(model))
    if local.is_dir():
        return local
    if local.is_file():
        checkpoint.check_file(local)
    if not recipes.is_hub_id(model):
        return None
    return hub.cached(model) if dummy else hub.fetched(model, check, recipes.models())


def last_part(model: str) -> str:
    """Return the last part of a hub id, or the name of a folder."""
    last = model.rstrip("/").rsplit("/", 1)[-1]
    return Path(model).resolve().name if last in ("", ".", "..") else last


def without_api_key(config: Config) -> Config:
    """For processes that need to know no more than that there is one."""
    server = config.recipe.server
    hidden = structs.replace(server, api_key=None if server.api_key is None else "...")
    return structs.replace(config, recipe=structs.replace(config.recipe, server=hidden))


def given_api_key() -> str | None:
    """Return the key in the environment, which `ps` does not show; None if it is not set or empty.

    It is never printed or recorded.
    """
    key = os.environ.get("NANOVLLM_API_KEY")
    return usable_key(key, "NANOVLLM_API_KEY") if key else None


def usable_key(key: str, named: str) -> str:
    """Return a key without the white space around it, such as the newline at the end of a file.

    Raises ConfigError if nothing is left, or nothing that a header can carry.
    """
    bare = key.strip()
    if not bare:
        cure = "leave it out, and the server needs no key, or give one"
        raise ConfigError(f"{named} is empty; {cure}")
    if not bare.isprintable():
        raise ConfigError(f"{named} has control characters, which no header can carry")
    return bare


def given_gpus() -> str | None:
    """CUDA_VISIBLE_DEVICES; None where all GPUs are visible."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def cache_dir() -> Path:
    """Where compiled CuTe DSL kernels are kept between starts."""
    return Path(os.environ.get("NANOVLLM_CACHE", "~/.cache/nanovllm")).expanduser() / "cute"
