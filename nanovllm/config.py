"""Recipes (YAML) and the frozen `Config` that is read from one.

A recipe describes one deployment of one model, in sections. An unknown key is an error with its
path and the nearest valid name. `--set section.key=value` overrides any key. Code that resolves an
"auto" writes the concrete value to a new Recipe.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, field, structs

from nanovllm import checkpoint, disk_cache, experts, hosts, hub, recipes, roles, speculate
from nanovllm.adapters.section import Adapters as Adapters, check_runtime, located
from nanovllm.disk_cache import Disk as Disk
from nanovllm.experts import Experts as Experts
from nanovllm.hub import Check
from nanovllm.kv_events import KvEvents as KvEvents, check_events
from nanovllm.roles import TransferRole as TransferRole
from nanovllm.schedule import Auto, Schedule as Schedule
from nanovllm.speculate import Drafts as Drafts, Speculate as Speculate
from nanovllm.typed_yaml import (
    NOT_JSON as NOT_JSON,
    ConfigError as ConfigError,
    converted,
    parse,
    put,
    read,
)

DEMO = recipes.PACKAGE / "demo"  # the embedded default model: config, weights, tokenizer, template
MOST_TOKENS = 32768  # default context length, if the model's own is longer


class Load(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: Literal["auto", "safetensors", "dummy"] = "auto"
    seed: int = 0  # seed of dummy weights


class Parallel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tp: int = 1  # number of devices that share every token
    # Number of devices with whole experts: 1 or tp. With a tp of 1 it may be any number; each
    # device then computes the tokens of its own requests.
    ep: int = 1
    dp: int = 1  # number of engine replicas of one server, each on max(tp, ep) devices
    # A request goes to the engine with the least
    # prefill_weight * (prompt tokens to compute) + load_weight * (requests in flight).
    prefill_weight: float = 1.0
    load_weight: float = 128.0
    # Maximum restarts within an hour of each engine (if there are several) and of each API process.
    # The delays before them are 1, 2, 4 ... 60 s, so 100 restarts suffice for an hour. 0: none.
    restarts: int = 100


class Cache(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dtype: Literal["auto", "fp8"] = "auto"  # auto: the model's; fp8: e4m3, one scale per head
    # Dtype of recurrent states. bfloat16 halves the bytes, and rounds at the end of each step.
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    page_tokens: int | Auto = "auto"
    pages: int | Auto = "auto"  # auto: as memory allows
    memory_fraction: float = 0.9  # usable part of the device's memory, including weights
    cpu_gib: float = 2.0  # memory of "auto" pages on a CPU, per rank
    # Number of recurrent states kept for reuse. auto: the number that fits in checkpoint_fraction
    # of the memory for pages and checkpoints. Without recurrent layers there are none. With a
    # checkpoint_fraction of 0 and a host_gib, they are part of that, and the device has pages only.
    checkpoints: int | Auto = "auto"
    checkpoint_fraction: float = 0.25
    # Host memory per rank for pages that leave the device (kv/tiers.py), and for recurrent states
    # with a checkpoint_fraction of 0 (kv/split.py); pinned on a GPU. 0: none.
    host_gib: float = 0.0
    disk: Disk | None = None  # below host memory; see disk_cache.py
    prefix: bool = True


class Kernels(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Implementation of each operation; "torch" is always the plain reference."""

    attention: Literal["auto", "torch", "triton", "flash"] = "auto"
    decode: Literal["auto", "torch", "triton", "cute"] = "auto"  # attention in decode rows
    rms_norm: Literal["auto", "torch", "triton", "compile"] = "auto"
    add_rms_norm: Literal["auto", "torch", "triton", "compile"] = "auto"
    silu_mul: Literal["auto", "torch", "triton", "compile"] = "auto"
    sigmoid_mul: Literal["auto", "torch", "triton", "compile"] = "auto"  # for gated attention
    rope_store: Literal["auto", "torch", "triton", "compile"] = "auto"
    gated_linear: Literal["auto", "torch", "cute"] = "auto"  # for steps of many rows
    skinny_linear: Literal["auto", "torch", "cute"] = "auto"  # for up to 128 rows
    sliced_linear: Literal["auto", "torch", "library"] = "auto"  # split-K, for some hundred rows
    added_linear: Literal["auto", "torch", "library"] = "auto"  # thousands of rows, adds residual
    # Block fp8. cute: kernels for few rows and for many; tiled: the kernel for many, for all rows.
    fp8_linear: Literal["auto", "torch", "tiled", "cute"] = "auto"
    experts: Literal["auto", "torch", "triton", "cute"] = "auto"  # cute: Triton for few rows
    delta: Literal["auto", "torch", "triton"] = "auto"  # gated delta rule of recurrent layers
    add_deltas: Literal["auto", "torch", "triton"] = "auto"  # of LoRA adapters
    sample: Literal["auto", "torch", "triton"] = "auto"
    batch_prep: Literal["auto", "torch", "triton"] = "auto"
    exchange: Literal["auto", "torch", "triton"] = "auto"  # sums over GPUs; torch: by NCCL alone
    # For debugging (--eager): auto is torch everywhere, and there are no CUDA graphs.
    eager: bool = False
    # No bit of a result depends on other requests, chunks, the cache or drafts.
    invariant: bool = False
    cuda_graphs: bool = True
    mixed_graph_tokens: int = 2048  # largest step with prompts that uses CUDA graphs; 0: none


class Server(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 8000
    # Without a key, the gauges that llm-d reads are sums over engines. metrics_port: a second port
    # for /metrics, /health and /ready only, which needs no key. None: there is none.
    metrics_key: bool = True  # False: /metrics needs no key on `port`, either
    metrics_port: int | None = None
    api_key: str | None = None  # None: the value of NANOVLLM_API_KEY
    # Origins of further web pages that may use the server, such as https://chat.example. "*": all
    # pages, for the API only. The server's own page and pages of this machine are always allowed.
    allowed_origins: list[str] = field(default_factory=list)
    # Names allowed in Host on a loopback address without a key, next to addresses and localhost.
    allowed_hosts: list[str] = field(default_factory=list)
    served_name: str | None = None  # additional model name; None: the last part of its name
    parser: str = "auto"
    page: bool | Auto = "auto"  # also /debug/steps; auto: if only this machine can open it
    reasoning_content: bool = False  # also send reasoning under this older name
    raise_priority: bool = False  # accept priorities from -100 to -1 of clients
    workers: int = 1
    max_model_tokens: int | Auto = "auto"  # auto: least of the model's, 32768 and the cache's
    max_body_bytes: int = 32 * 1024 * 1024
    stall_s: float = 10.0  # silence of the engine or delay of a step that /health reports
    max_header_bytes: int = 64 * 1024  # limit of a request's first line and headers
    max_headers: int = 100
    header_timeout_s: float = 10.0  # from the start of a connection or a request's first byte
    body_timeout_s: float = 60.0  # for receiving a body, and for sending the end of a response
    max_unread_bytes: int = 1024 * 1024  # per stream; clients that read more slowly are dropped
    shutdown_s: float = 60.0  # time after SIGTERM for running requests to finish
    log_format: Literal["text", "json"] = "text"  # json: one object per line


class StructuredOutputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    compile_s: float = 10.0  # CPU time to compile a grammar; one that takes more is refused (400)


class Paper(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `engine: paper`, which answers at a fixed rate without a model."""

    tokens_per_s: float = 250.0  # rate of each stream; a step takes the inverse


class Recipe(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str = "demo"  # "demo", a local folder, or a Hub id; may be written model.name
    num_layers: int | Auto = "auto"  # run only the first layers; written model.num_layers
    engine: Literal["model", "paper"] = "model"
    config: str | None = None  # config.json to use if there is no folder of the model
    device: Literal["auto", "cuda", "cpu"] = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # auto: bfloat16, on a CPU float32
    quantize: Literal["fp8"] | None = None  # fp8: quantise other weights while loading
    cpu_threads: int | Auto = "auto"  # per rank, on a CPU; auto: by size of weights and cores
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
    adapters: Adapters | None = None  # LoRA adapters, which requests choose by `model`
    transfer: TransferRole | None = None  # prefill and decode on two servers; see roles.py
    kv_events: KvEvents | None = None  # changes of the cache for routers; see kv_events.py

    @property
    def num_drafts(self) -> int:
        return self.speculate.tokens if self.speculate is not None else 0

    @property
    def drafts(self) -> Drafts:
        """The scheduler's part of `speculate`."""
        return self.speculate.drafts if self.speculate is not None else Drafts()


class Config(Struct, frozen=True, kw_only=True):
    """A checked recipe, and the values derived from it."""

    recipe: Recipe
    source: str  # the recipe file, or "built in"
    changed: dict[str, Any]  # values from flags and --set
    model_dir: str | None  # has config.json, weights, tokenizer; None: dummy by `config_path`
    config_path: str  # the model's config.json
    tokenizer_dir: str
    served_name: str
    eos_ids: tuple[int, ...] | None = None  # ids that end a text (server/ends.py); None: unread

    @property
    def model_names(self) -> list[str]:
        """Return the model's names, as listed by /v1/models: its Hub id first, then the others.

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
        """Return the local paths that are accepted as the model's name. They are not published."""
        paths = {self.recipe.model, self.recipe.model.rstrip("/")}
        if Path(self.source).suffix in recipes.SUFFIXES:
            paths |= {self.source, os.path.join(".", self.source)}
        return paths - {""}


class Checked(Struct, frozen=True):
    """A valid recipe whose model has not been located yet."""

    recipe: Recipe
    source: str  # same as Config.source
    base: Path  # base of the recipe's relative paths
    changed: dict[str, Any]

    def base_of(self, key: str) -> Path:
        """Return the base of a path in this key: the recipe's folder; with --set, the current."""
        return Path() if {key, key.partition(".")[0]} & self.changed.keys() else self.base


def load_config(
    named: str | None,
    overrides: Iterable[str] = (),
    flags: Mapping[str, object] = {},
    check: Check | None = None,
) -> Config:
    """Return the config of a recipe file, built-in recipe, model folder or Hub id; None: the demo.

    `check` is called with the model's config.json. Raise ConfigError with one line for the user.
    """
    return locate(read_recipe(named, overrides, flags), check)


def read_recipe(
    named: str | None, overrides: Iterable[str] = (), flags: Mapping[str, object] = {}
) -> Checked:
    """Return the recipe with `section.key=value` overrides, without using the network."""
    raw, source, base = _find(named)
    changed = {path: value for path, value in flags.items() if value is not None}
    for text in overrides:
        key, equals, written = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: write section.key=value")
        if not written.strip():  # of an unset variable
            raise ConfigError(f"--set {key}: the value is empty; write null, or '\"\"' for no text")
        changed[key.strip()] = parse(written, f"--set {key}: the value")  # may be a secret
    for path, value in (*_keys_of_model(raw), *changed.items()):
        if path.startswith("model.") and path not in MODEL_KEYS:
            raise ConfigError(f"unknown key {path}; a model has {', '.join(MODEL_KEYS)}")
        put(raw, MODEL_KEYS.get(path, path), value)
    if isinstance(cache := raw.get("cache"), dict) and "checkpoint_host_gib" in cache:
        cure = "set cache.host_gib, and cache.checkpoint_fraction=0 to put recurrent states there"
        raise ConfigError(
            f"cache.checkpoint_host_gib was removed; states share cache.host_gib: {cure}"
        )
    recipe = converted(raw, Recipe)
    _check_ranges(recipe)
    stated, where = recipe.server.api_key, "server.api_key (--api-key)"
    api_key = given_api_key() if stated is None else usable_key(stated, where)
    server = structs.replace(recipe.server, api_key=api_key)
    recipe = structs.replace(recipe, server=server, kernels=without_eager(recipe.kernels))
    return Checked(recipe, source, base, changed)


MODEL_KEYS = {"model.name": "model", "model.num_layers": "num_layers"}


def _keys_of_model(raw: dict[str, Any]) -> list[tuple[str, object]]:
    """Remove a section `model: {name: ..., num_layers: ...}`, and return its keys and values."""
    if not isinstance(raw.get("model"), dict):
        return []
    return [(f"model.{key}", value) for key, value in raw.pop("model").items()]


def _find(named: str | None) -> tuple[dict[str, Any], str, Path]:
    """Return the recipe's content before overrides, its source, and the base of its paths."""
    if named is None:
        return {}, "built in", Path()
    path, model = recipes.find(named)
    if path is not None:
        checkpoint.check_file(path)
        return read(path), str(path), path.parent
    if model is not None:
        return {"model": model}, model, Path()
    if os.path.isdir(named):
        checkpoint.check(Path(named))  # its error describes the folder's content
    known = recipes.shipped()
    near = difflib.get_close_matches(named, known, 1)
    raise ConfigError(
        f"{named!r} is not a recipe file, a model folder, a Hub id (owner/name) or a "
        f"built-in recipe ({', '.join(known)})" + (f"; did you mean {near[0]}?" if near else "")
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
    "cache.host_gib": (0, 4096),
    "schedule.slots": (1, 4096),
    "schedule.step_tokens": (1, 1 << 20),
    "schedule.mixed_step_tokens": (1, 1 << 20),
    "schedule.depth": (0, 4),
    "schedule.max_queue": (1, 1 << 20),  # every request waits at least for the next step
    "schedule.ageing_s": (0.001, 86400),
    "schedule.overtake_steps": (0, 1 << 20),
    "kernels.mixed_graph_tokens": (0, 1 << 20),
    "server.port": (0, 65535),
    "server.metrics_port": (0, 65535),
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
        if value not in ("auto", None) and not low <= value <= high:
            raise ConfigError(f"{path} is {value}; it must be between {low} and {high}")
    server = recipe.server
    hosts.check(server.host, server.allowed_origins, server.allowed_hosts)
    experts.check(recipe.experts, recipe.load.format, recipe.parallel.tp, recipe.parallel.ep)
    disk_cache.check(recipe.cache.disk, host_gib=recipe.cache.host_gib)
    roles.check(recipe.transfer, recipe.cache.host_gib, recipe.parallel.dp)
    check_events(recipe.kv_events, prefix=recipe.cache.prefix, num_engines=recipe.parallel.dp)
    if recipe.speculate is not None:
        speculate.check(recipe.speculate, recipe.engine)


def without_eager(kernels: Kernels) -> Kernels:
    """Return the choices that kernels.eager stands for.

    Operations that the recipe names keep their implementation, so that a single kernel can be
    tried. Decode rows follow kernels.attention.
    """
    if not kernels.eager:
        return kernels
    names = (name for name in kernels.__struct_fields__ if getattr(kernels, name) == "auto")
    chosen = {name: "torch" for name in names if name != "decode"}
    return structs.replace(kernels, **chosen, cuda_graphs=False)


def resolve_context(wanted: int | Auto, model_tokens: int, cache_tokens: int, cure: str) -> int:
    """Return `server.max_model_tokens` as a number within the model's context and the cache.

    Raise ConfigError if the given value exceeds one of them. `cure` is the remedy for the cache.
    """
    if wanted == "auto":
        return min(model_tokens, MOST_TOKENS, cache_tokens)
    if wanted > model_tokens:
        raise ConfigError(
            f"server.max_model_tokens is {wanted}; the model's context is {model_tokens} tokens"
        )
    if wanted > cache_tokens:
        raise ConfigError(
            f"server.max_model_tokens is {wanted}, but the cache holds {cache_tokens} tokens "
            f"({cure}, or --set server.max_model_tokens={cache_tokens})"
        )
    return wanted


def locate(checked: Checked, check: Check | None = None) -> Config:
    """Find the model's files; download missing ones from the Hub, except for dummy weights.

    `check` is called with config.json and the model's name before weights are downloaded. Raise
    ConfigError if there is no such model, or it cannot be served.
    """
    recipe, check = checked.recipe, check or (lambda *_: None)
    dummy = recipe.load.format == "dummy"
    folder = DEMO if recipe.model == "demo" else _folder_of(recipe.model, check, dummy=dummy)
    if folder is not None:
        checkpoint.check(folder, has_weights=not dummy)
        config_path = folder / "config.json"
    elif recipe.config is not None and dummy:
        config_path = checked.base_of("config") / recipe.config
        if not os.path.isfile(config_path):
            raise ConfigError(f"config: {config_path} does not exist")
    else:
        raise ConfigError(
            f"cannot find model {recipe.model!r}: it is not a folder, and neither the Hub nor its "
            "cache has it; random weights need --load-format dummy and a recipe with config"
        )
    check(config_path, recipe.model)
    has_tokenizer = folder is not None and (folder / "tokenizer.json").is_file()
    if not has_tokenizer and not dummy:
        raise ConfigError(f"{folder} has no tokenizer.json")
    config = Config(
        recipe=recipe,
        source=checked.source,
        changed=checked.changed,
        model_dir=str(folder) if folder is not None else None,
        config_path=str(config_path),
        tokenizer_dir=str(folder if has_tokenizer else DEMO),
        served_name=recipe.server.served_name or last_part(recipe.model),
    )
    if recipe.adapters is None:
        return config
    other_names = {*config.model_names, *config.model_paths}
    base = checked.base_of("adapters.folder")
    adapters = located(recipe.adapters, base, other_names, is_dummy_model=dummy)
    check_runtime(adapters, recipe.server.api_key, recipe.server.workers)
    return structs.replace(config, recipe=structs.replace(recipe, adapters=adapters))


def _folder_of(model: str, check: Check, *, dummy: bool) -> Path | None:
    """Return a local folder, or that of a Hub id, downloaded if needed; None if there is none."""
    local = Path(os.path.expanduser(model))
    if os.path.isdir(local):
        return local
    if os.path.isfile(local):
        checkpoint.check_file(local)
    if not recipes.is_hub_id(model):
        return None
    return hub.cached(model) if dummy else hub.fetched(model, check, recipes.models())


def last_part(model: str) -> str:
    """Return the last part of a Hub id, or the name of a folder."""
    last = model.rstrip("/").rsplit("/", 1)[-1]
    return Path(model).resolve().name if last in ("", ".", "..") else last


def without_api_key(config: Config) -> Config:
    """Return the config with the API key hidden, for processes that do not check it."""
    server = config.recipe.server
    hidden = structs.replace(server, api_key=None if server.api_key is None else "...")
    return structs.replace(config, recipe=structs.replace(config.recipe, server=hidden))


def given_api_key() -> str | None:
    """Return the key of the environment, which `ps` does not show; None if it is unset or empty.

    The key is never printed or recorded.
    """
    key = os.environ.get("NANOVLLM_API_KEY")
    return usable_key(key, "NANOVLLM_API_KEY") if key else None


def given_transfer_secret() -> str | None:
    return os.environ.get("NANOVLLM_TRANSFER_SECRET")


def usable_key(key: str, named: str) -> str:
    """Return a key without surrounding white space, such as the newline at the end of a file.

    Raise ConfigError if the result is empty, or cannot be sent in a header.
    """
    bare = key.strip()
    if not bare:
        cure = "leave it out, and the server needs no key, or give one"
        raise ConfigError(f"{named} is empty; {cure}")
    if not bare.isprintable():
        raise ConfigError(f"{named} has control characters, which a header cannot contain")
    return bare


def given_gpus() -> str | None:
    """Return CUDA_VISIBLE_DEVICES; None if all GPUs are visible."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def cache_dir() -> Path:
    """Return the folder of compiled CuTe DSL kernels."""
    return Path(os.environ.get("NANOVLLM_CACHE", "~/.cache/nanovllm")).expanduser() / "cute"
