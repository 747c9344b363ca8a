"""A recipe becomes one frozen `Config`.

A recipe (YAML) says everything about one deployment of one model, in sections. Unknown keys are
errors that name the path and the nearest valid name; `--set section.key=value` overrides any key.
"auto" exists only here: whoever resolves one writes the concrete value into a new Config.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import yaml
from msgspec import Struct, structs

PACKAGE = Path(__file__).parent
DEMO = PACKAGE / "demo"  # the embedded default model: config, weights, tokenizer, template
Auto = Literal["auto"]


class ConfigError(ValueError):
    """The user's recipe, flags or checkpoint are wrong; the message is all they need to see."""


class Load(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: Literal["auto", "safetensors", "dummy"] = "auto"
    seed: int = 0  # of dummy weights


class Parallel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tp: int = 1


class Cache(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    page_tokens: int | Auto = "auto"
    pages: int | Auto = "auto"  # auto: what fits
    memory_fraction: float = 0.9  # of the device's memory, weights included
    cpu_gib: float = 2.0  # what "auto" pages may take on a CPU
    prefix: bool = True


class Schedule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    slots: int | Auto = "auto"  # most requests on the device at once; auto: 16 on a CPU, else 512
    step_tokens: int | Auto = "auto"  # token budget of a step; auto: 512 on a CPU, else 8192
    mixed_step_tokens: int | Auto = "auto"  # of a step that also decodes; auto: step_tokens
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
    rope_store: Literal["auto", "torch", "triton", "compile"] = "auto"
    small_linear: Literal["auto", "torch", "triton"] = "auto"  # products of steps of a few rows
    gated_linear: Literal["auto", "torch", "cute"] = "auto"  # of steps of many rows
    skinny_linear: Literal["auto", "torch", "cute"] = "auto"  # of up to 128 rows, reading weights
    sliced_linear: Literal["auto", "torch", "library"] = "auto"  # of some hundred rows: split-K
    added_linear: Literal["auto", "torch", "library"] = "auto"  # of thousands, onto the residual
    sample: Literal["auto", "torch", "triton"] = "auto"
    batch_prep: Literal["auto", "torch", "triton"] = "auto"
    cuda_graphs: bool = True
    mixed_graph_tokens: int = 2048  # largest step with a prompt chunk that replays graphs; 0: none


class Server(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    served_name: str | None = None  # None: the last part of the model's name
    parser: str = "auto"
    reasoning_content: bool = False  # name reasoning that way too, for clients that need it
    workers: int = 1
    max_model_tokens: int | Auto = "auto"  # auto: the model's own, at most 32768
    max_body_bytes: int = 32 * 1024 * 1024
    shutdown_s: float = 5.0  # how long running requests may finish after SIGTERM


class Paper(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `engine: paper`, which answers at a fixed rate without a model: the server by itself."""

    tokens_per_s: float = 250.0  # of each stream; a step takes the inverse


class Recipe(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str = "demo"  # "demo", a local folder, or a hub id
    engine: Literal["model", "paper"] = "model"
    config: str | None = None  # a config.json to use when the model's folder is not at hand
    device: Literal["auto", "cuda", "cpu"] = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # auto: bfloat16, on a CPU float32
    cpu_threads: int | Auto = "auto"  # of matrix products on a CPU; auto: by the model's size
    load: Load = Load()
    parallel: Parallel = Parallel()
    cache: Cache = Cache()
    schedule: Schedule = Schedule()
    kernels: Kernels = Kernels()
    server: Server = Server()
    paper: Paper = Paper()


class Config(Struct, frozen=True, kw_only=True):
    """A checked recipe, and what was derived from it."""

    recipe: Recipe
    source: str  # the recipe file, or "built in"
    changed: dict[str, Any]  # what flags and --set altered
    model_dir: str | None  # holds config.json, weights, tokenizer; None: dummy from `config_path`
    config_path: str  # the model's config.json
    tokenizer_dir: str
    served_name: str


def load_config(
    recipe_path: str | None, overrides: Iterable[str] = (), flags: Mapping[str, object] = {}
) -> Config:
    """Read a recipe (None = the embedded demo), apply `section.key=value` overrides.

    Raises ConfigError with one line for the user.
    """
    raw: dict[str, Any] = {}
    if recipe_path is not None:
        raw = _read_yaml(Path(recipe_path))
    changed: dict[str, Any] = {}
    for path, value in flags.items():
        if value is not None:
            changed[path] = value
    for text in overrides:
        path, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: write section.key=value")
        changed[path.strip()] = yaml.safe_load(value)
    for path, value in changed.items():
        _put(raw, path, value)
    _check_names(raw, Recipe, "")
    try:
        recipe = msgspec.convert(raw, Recipe)
    except msgspec.ValidationError as error:
        raise ConfigError(f"recipe: {error}") from None
    _check_ranges(recipe)
    base = Path(recipe_path).parent if recipe_path else Path()
    return _locate(recipe, base, recipe_path or "built in", changed)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read recipe {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"recipe {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"recipe {path}: expected sections such as 'model:' at the top")
    return raw


def _put(raw: dict[str, Any], path: str, value: object) -> None:
    *sections, key = path.split(".")
    for section in sections:
        raw = raw.setdefault(section, {})
        if not isinstance(raw, dict):
            raise ConfigError(f"--set {path}: {section!r} is not a section")
    raw[key] = value


def _check_names(raw: Mapping[str, Any], schema: type[Struct], path: str) -> None:
    """Refuse unknown keys with their path and the nearest valid name."""
    fields = {field.name: field.type for field in structs.fields(schema)}
    for key, value in raw.items():
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, 1, 0.0)
            raise ConfigError(f"unknown key {path}{key}; did you mean {path}{close[0]}?")
        section = fields[key]
        if isinstance(section, type) and issubclass(section, Struct):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{path}{key} is a section; write {path}{key}.<key>")
            _check_names(value, section, f"{path}{key}.")


RANGES: dict[str, tuple[float, float]] = {
    "parallel.tp": (1, 64),
    "cache.page_tokens": (1, 1024),
    "cache.pages": (2, 1 << 30),
    "cache.memory_fraction": (0.05, 0.99),
    "cache.cpu_gib": (0.001, 4096),
    "schedule.slots": (1, 4096),
    "schedule.step_tokens": (1, 1 << 20),
    "schedule.mixed_step_tokens": (1, 1 << 20),
    "schedule.depth": (0, 4),
    "schedule.max_queue": (0, 1 << 20),
    "schedule.ageing_s": (0.001, 86400),
    "schedule.overtake_steps": (0, 1 << 20),
    "kernels.mixed_graph_tokens": (0, 1 << 20),
    "server.port": (0, 65535),
    "server.workers": (1, 64),
    "server.max_model_tokens": (2, 1 << 24),
    "server.max_body_bytes": (1024, 1 << 31),
    "server.shutdown_s": (0, 3600),
    "paper.tokens_per_s": (0.01, 100_000),
}


def _check_ranges(recipe: Recipe) -> None:
    for path, (low, high) in RANGES.items():
        section, key = path.split(".")
        value = getattr(getattr(recipe, section), key)
        if value != "auto" and not low <= value <= high:
            raise ConfigError(f"{path} is {value}; it must be between {low} and {high}")


def given_or(value: int | Auto, otherwise: int) -> int:
    return otherwise if value == "auto" else value


def resolve_schedule(schedule: Schedule, *, on_cpu: bool) -> Schedule:
    """Without any "auto". No step has more than step_tokens."""
    most = given_or(schedule.step_tokens, 512 if on_cpu else 8192)
    mixed = min(given_or(schedule.mixed_step_tokens, most), most)
    slots = min(given_or(schedule.slots, 16 if on_cpu else 512), most)
    return structs.replace(schedule, slots=slots, step_tokens=most, mixed_step_tokens=mixed)


def _locate(recipe: Recipe, base: Path, source: str, changed: dict[str, Any]) -> Config:
    folder = DEMO if recipe.model == "demo" else Path(recipe.model).expanduser()
    dummy = recipe.load.format == "dummy"
    if not folder.is_dir():
        folder = _hub_folder(recipe.model, download=not dummy) or folder
    if folder.is_dir():
        config_path = folder / "config.json"
        if not config_path.is_file():
            raise ConfigError(f"{folder} has no config.json")
    elif recipe.config is not None and dummy:
        config_path = base / recipe.config
        if not config_path.is_file():
            raise ConfigError(f"config: {config_path} does not exist")
    else:
        raise ConfigError(
            f"model {recipe.model!r} is neither a folder nor a model that the hub or its local "
            "cache has; or use --load-format dummy with a recipe that names its config"
        )
    has_tokenizer = (folder / "tokenizer.json").is_file()
    if not has_tokenizer and not dummy:
        raise ConfigError(f"{folder} has no tokenizer.json")
    name = recipe.server.served_name or recipe.model.rstrip("/").rsplit("/", 1)[-1]
    return Config(
        recipe=recipe,
        source=source,
        changed=changed,
        model_dir=str(folder) if folder.is_dir() else None,
        config_path=str(config_path),
        tokenizer_dir=str(folder if has_tokenizer else DEMO),
        served_name=name,
    )


def _hub_folder(model: str, *, download: bool) -> Path | None:
    """A hub id's files in the local hub cache, brought there first if allowed and needed."""
    if model.count("/") != 1:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    wanted = ["*.json", "*.safetensors", "*.jinja"]
    try:
        found = snapshot_download(model, allow_patterns=wanted, local_files_only=not download)
    except (OSError, ValueError, HfHubHTTPError):  # no such model, no network, not an id
        return None
    return Path(found)


def cache_dir() -> Path:
    """Where compiled CuTe DSL kernels are kept between starts."""
    return Path(os.environ.get("NANOVLLM_CACHE", "~/.cache/nanovllm")).expanduser() / "cute"


def choices(section: type[Struct], key: str) -> tuple[str, ...]:
    """The literal values a key accepts, for messages and capability probes."""
    return next(get_args(field.type) for field in structs.fields(section) if field.name == key)
