"""PEFT's adapter_config.json: ranks, scales and targets, and what is refused.

Source of keys and rules: tuners/lora/config.py and tuners_utils.py of PEFT 0.21.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from math import sqrt
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from nanovllm.adapters.folder import CONFIG, file_of
from nanovllm.adapters.patterns import ExpressionError, Patterns, parsed
from nanovllm.typed_yaml import NOT_JSON, ConfigError

MOST_BYTES = 1 << 22  # of the file
ALL_LINEAR = "all-linear"  # in target_modules
T = TypeVar("T")
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


class Modules:
    """Ranks, scales and targets of an adapter's modules, by their full names without PEFT's prefix.

    `what` begins the message of an error. Methods raise ConfigError if the config's regular
    expressions take too long to match.
    """

    def __init__(self, config: PeftConfig, what: str) -> None:
        self.config, self._what = config, what
        self._patterns = Patterns()
        self._ranks: dict[str, int] = {}

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's pair of matrices."""
        if module not in self._ranks:
            pattern_rank = self._first(self.config.rank_pattern, module)
            self._ranks[module] = self.config.r if pattern_rank is None else pattern_rank
        return self._ranks[module]

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's delta: alpha / r, or alpha / sqrt(r) with rsLoRA."""
        pattern_alpha, rank = self._first(self.config.alpha_pattern, module), self.rank_of(module)
        alpha = self.config.lora_alpha if pattern_alpha is None else pattern_alpha
        return alpha / (sqrt(rank) if self.config.use_rslora else rank)

    def targets(self, module: str) -> bool:
        """Return True if the config names a module."""
        config = self.config
        if not self._names(config.target_modules, module):
            return False
        if self._names(config.exclude_modules, module):
            return False
        layers = config.layers_to_transform
        if layers is None or isinstance(config.target_modules, str):
            return True
        return self._layer_of(module) in ([layers] if isinstance(layers, int) else layers)

    def allows(self, module: str) -> bool:
        """Return True if the config names a module, or may have named it when it was saved.

        'all-linear' is saved as a list, but a file written by hand may still have it.
        """
        rule = self.config.target_modules
        is_every = isinstance(rule, str) and rule.lower() == ALL_LINEAR
        return is_every or self.targets(module)

    def _names(self, rule: list[str] | str | None, module: str) -> bool:
        if not isinstance(rule, str):
            return is_listed(rule or (), module)
        with self._limited():
            return self._patterns.is_whole(rule, module)

    def _layer_of(self, module: str) -> int | None:
        """Return the index of a module's layer, after a name in layers_pattern if there is one.

        It is the last number that follows such a name, and that a dot follows.
        """
        layers_pattern, parts = self.config.layers_pattern, module.split(".")
        names = [layers_pattern] if isinstance(layers_pattern, str) else layers_pattern or ["[^.]*"]
        with self._limited():
            for name, at in product(names, range(len(parts) - 2, 0, -1)):
                is_after = parts[at].isdecimal() and self._patterns.is_whole(
                    rf".*\.({name})", ".".join(parts[:at])
                )
                if is_after:
                    return int(parts[at])
        return None

    def _first(self, values: dict[str, T], module: str) -> T | None:
        """Return the value of the first pattern that matches the end of a module's name."""
        with self._limited():
            matching = (key for key in values if self._patterns.is_end(key, module))
            return next((values[key] for key in matching), None)

    @contextmanager
    def _limited(self) -> Iterator[None]:
        try:
            yield
        except ExpressionError as error:
            raise ConfigError(f"{self._what}: {error}") from None


def is_listed(names: Iterable[str], module: str) -> bool:
    """Return True if a module's name is one of the names, or ends with a dot and one of them."""
    return any(module == name or module.endswith(f".{name}") for name in names)


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
        fields = {key: value for key, value in raw.items() if value is not None}
        config = msgspec.convert(fields, PeftConfig)
    except (*NOT_JSON, OSError) as error:
        raise ConfigError(f"{what}: {error}") from None
    check_keys(fields, what)
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
    """Raise ConfigError if a regular expression is not supported, or nothing is targeted."""
    rules = (config.target_modules, config.exclude_modules, config.layers_pattern)
    patterns = [rule for rule in rules if isinstance(rule, str)]
    patterns += [*config.rank_pattern, *config.alpha_pattern]
    if isinstance(config.layers_pattern, list):
        patterns += config.layers_pattern
    try:
        for pattern in patterns:
            parsed(pattern)
    except ExpressionError as error:
        raise ConfigError(f"{what}: {error}") from None
    if not config.target_modules and not config.target_parameters:
        raise ConfigError(f"{what}: target_modules is empty")
    if config.layers_to_transform is not None and isinstance(config.target_modules, str):
        raise ConfigError(f"{what}: layers_to_transform needs a list in target_modules")
