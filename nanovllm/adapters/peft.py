"""PEFT's adapter_config.json: ranks, scales and targets, and what is refused.

Source of keys and rules: tuners/lora/config.py and tuners_utils.py of PEFT 0.21.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from math import sqrt
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from nanovllm.adapters.folder import CONFIG, file_of
from nanovllm.typed_yaml import NOT_JSON, ConfigError

MOST_BYTES = 1 << 22  # of the file
Rank = Annotated[int, Meta(ge=1, le=1 << 16)]
# Initialisations that leave the base model as it is. Others change it.
HARMLESS_INITS = (True, False, "true", "gaussian", "eva", "orthogonal", "mica")
# Keys without an effect on a trained adapter's result.
UNUSED = frozenset(
    (
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "revision",
        "task_type",
        "target_parameters",
    )
)


class PeftConfig(Struct, frozen=True):
    """The keys that define an adapter's products."""

    peft_type: str
    r: Rank = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, Rank] = {}
    alpha_pattern: dict[str, float] = {}
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None

    @property
    def most_rank(self) -> int:
        return max(self.r, *self.rank_pattern.values(), 1)

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's pair of matrices."""
        key = pattern_key(self.rank_pattern, module)
        return self.r if key is None else self.rank_pattern[key]

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's delta: alpha / r, or alpha / sqrt(r) with rsLoRA."""
        key, rank = pattern_key(self.alpha_pattern, module), self.rank_of(module)
        alpha = self.lora_alpha if key is None else self.alpha_pattern[key]
        return alpha / (sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str) -> bool:
        """Return True if the config names a module, by its full name without PEFT's prefix."""
        if is_named(self.exclude_modules, module) or not is_named(self.target_modules, module):
            return False
        if isinstance(self.target_modules, str) or self.layers_to_transform is None:
            return True
        layers = self.layers_to_transform
        return layer_of(module, self.layers_pattern) in (
            [layers] if isinstance(layers, int) else layers
        )


def is_named(rule: list[str] | str | None, module: str) -> bool:
    """Return True if a list of names or ends of names, or a regular expression, has a module."""
    if isinstance(rule, str):
        return re.fullmatch(rule, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in rule or ())


def layer_of(module: str, pattern: list[str] | str | None) -> int | None:
    """Return the index of a module's layer, after a name in `pattern` if there is one."""
    names = [pattern] if isinstance(pattern, str) else pattern or [r"[^.]*"]
    found = (re.match(rf".*\.{name}\.(\d+)\.", module) for name in names)
    return next((int(match[1]) for match in found if match), None)


def pattern_key(patterns: Iterable[str], module: str) -> str | None:
    """Return the first pattern that matches the end of a module's name, from a dot on."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), None)


def is_set(value: object) -> bool:
    return value not in (None, False, [], {}, "", "none")


def changes_base(value: object) -> bool:
    return value is not None and value not in HARMLESS_INITS


# Keys that are refused if their value has an effect, and why.
REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "use_dora": (is_set, "DoRA is not supported"),
    "bias": (is_set, "biases are not supported"),
    "lora_bias": (is_set, "biases are not supported"),
    "modules_to_save": (is_set, "whole modules are not supported"),
    "trainable_token_indices": (is_set, "embeddings of tokens are not supported"),
    "fan_in_fan_out": (is_set, "it is for models with transposed weights"),
    "layer_replication": (is_set, "copies of layers are not supported"),
    "alora_invocation_tokens": (is_set, "aLoRA is not supported"),
    "init_lora_weights": (
        changes_base,
        "it changes the weights of the model; save a converted adapter instead",
    ),
}


def read_peft(folder: Path, name: str) -> PeftConfig:
    """Return an adapter's config. Raise ConfigError, which names the key, if it is refused."""
    path, what = file_of(folder, name, CONFIG), f"adapter {name}: {CONFIG}"
    if path.stat().st_size > MOST_BYTES:
        raise ConfigError(f"{what} has more than {MOST_BYTES} bytes")
    try:
        raw = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        given = {key: value for key, value in raw.items() if value is not None}
        config = msgspec.convert(given, PeftConfig)
    except (*NOT_JSON, OSError) as error:
        raise ConfigError(f"{what}: {error}") from None
    check_keys(given, what)
    check_patterns(config, what)
    return config


def check_keys(raw: dict[str, Any], what: str) -> None:
    """Raise ConfigError if a key is refused, or unknown and set."""
    if str(raw["peft_type"]).upper() != "LORA":
        raise ConfigError(f"{what}: peft_type is {raw['peft_type']!r}; only LORA is supported")
    for key, value in raw.items():
        is_refused, reason = REFUSED.get(key, (None, ""))
        if is_refused is not None and is_refused(value):
            raise ConfigError(f"{what}: {key} is {str(value)[:80]}; {reason}")
        is_known = key in UNUSED or key in REFUSED or key in PeftConfig.__struct_fields__
        if not is_known and is_set(value):
            raise ConfigError(f"{what}: the key {key} is set, but not supported")


def check_patterns(config: PeftConfig, what: str) -> None:
    """Raise ConfigError if a pattern is not a regular expression, or nothing is targeted."""
    rules = [rule for rule in (config.target_modules, config.exclude_modules) if rule is not None]
    patterns = [rule for rule in rules if isinstance(rule, str)]
    inner = [*config.rank_pattern, *config.alpha_pattern]  # parts of patterns, so without flags
    names = config.layers_pattern or []
    inner += [names] if isinstance(names, str) else names
    try:
        for pattern in patterns:
            re.compile(pattern)
        for pattern in inner:
            re.compile(f"({pattern})")
    except (re.error, RecursionError) as error:
        raise ConfigError(
            f"{what}: {pattern[:80]!r} is not a regular expression: {error}"
        ) from None
    if not config.target_modules and not config.target_parameters:
        raise ConfigError(f"{what}: target_modules is empty")
    if config.layers_to_transform is not None and isinstance(config.target_modules, str):
        raise ConfigError(f"{what}: layers_to_transform needs a list in target_modules")
