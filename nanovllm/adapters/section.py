"""The recipe's section `adapters`: LoRA adapters that requests choose by the field `model`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from nanovllm.adapters.folder import CONFIG, DEMO, DUMMY, check_folder, check_name, names_in
from nanovllm.adapters.peft import Modules, PeftConfig, read_peft
from nanovllm.typed_yaml import ConfigError

RANK_PAGE = 16  # ranks of a page of adapter memory; a page belongs to one adapter
MOST_RANK, MOST_SLOTS = 512, 1024


class Adapters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Path of folders with PEFT adapters, relative to the recipe; with --set to the current folder.
    # "demo": those shipped. "dummy": `slots` random adapters of rank `max_rank`, for a model whose
    # load.format is dummy.
    folder: str
    names: list[str] | Literal["all"] = "all"  # folders to load at start
    slots: int = 8  # maximum number of adapters on the device at once
    max_rank: int = 64  # adapters of a higher rank are refused
    # Allow POST /v1/load_lora_adapter and /v1/unload_lora_adapter, for folders in `folder`.
    runtime: bool = False

    @property
    def is_dummy(self) -> bool:
        return self.folder == DUMMY


def located(
    adapters: Adapters, base: Path, other_names: Iterable[str], *, is_dummy_model: bool = False
) -> Adapters:
    """Return the section with an absolute folder and the names of all adapters to load.

    `other_names` are those of the model itself. Raise ConfigError if an adapter cannot be served.
    """
    for key, value, most in (
        ("slots", adapters.slots, MOST_SLOTS),
        ("max_rank", adapters.max_rank, MOST_RANK),
    ):
        if not 1 <= value <= most:
            raise ConfigError(f"adapters.{key} is {value}; it must be between 1 and {most}")
    if adapters.is_dummy:
        if not is_dummy_model:
            raise ConfigError(
                "adapters.folder is dummy, which needs a load.format of dummy; write ./dummy for a "
                "folder of this name"
            )
        return dummies(adapters)
    folder = DEMO if adapters.folder == "demo" else base / os.path.expanduser(adapters.folder)
    names = names_in(folder) if adapters.names == "all" else adapters.names
    check_folder(folder)
    if adapters.names == [] and not adapters.runtime:
        raise ConfigError("adapters.names is empty; list adapters, or drop it to load all")
    if not names and not adapters.runtime:
        raise ConfigError(f"adapters.folder: {folder} has no folder with an adapter_config.json")
    if len(set(names)) < len(names):
        raise ConfigError("adapters.names has a name twice")
    located_adapters = replace(adapters, folder=str(folder), names=names)
    for name in names:
        check_name(name)
        check_free(name, other_names)
        peft_of(located_adapters, name)
    return located_adapters


def dummies(adapters: Adapters) -> Adapters:
    """Return the section with the names of random adapters. Raise ConfigError if it has others."""
    names = [f"dummy-{at}" for at in range(adapters.slots)]
    if adapters.runtime or adapters.names not in ("all", names):
        raise ConfigError(
            "adapters.folder is dummy; then adapters.names and adapters.runtime must not be set"
        )
    return replace(adapters, names=names)


def check_runtime(adapters: Adapters, api_key: str | None, num_workers: int) -> None:
    """Raise ConfigError if adapters may change at run time, and the server does not allow that."""
    if adapters.runtime and api_key is None:
        raise ConfigError("adapters.runtime is true; it needs a server.api_key (--api-key)")
    if adapters.runtime and num_workers > 1:
        raise ConfigError(f"adapters.runtime is true; server.workers must be 1, not {num_workers}")


def check_free(name: str, other_names: Iterable[str], remedy: str = "rename its folder") -> None:
    """Raise ConfigError if an adapter has a name of the model itself."""
    if name in other_names:
        raise ConfigError(f"the adapter {name!r} has the model's name; {remedy}")


def peft_of(adapters: Adapters, name: str) -> PeftConfig:
    """Return the config of an adapter. Raise ConfigError if it is not supported."""
    if adapters.is_dummy:
        return PeftConfig(peft_type="LORA", r=adapters.max_rank)
    config = read_peft(Path(adapters.folder), name)
    if config.most_rank > adapters.max_rank:
        raise ConfigError(
            f"adapter {name}: its rank is {config.most_rank}; adapters.max_rank is "
            f"{adapters.max_rank}"
        )
    return config


def modules_of(adapters: Adapters, name: str) -> Modules:
    """Return the modules of an adapter. Raise ConfigError if its config is not supported."""
    return Modules(peft_of(adapters, name), f"adapter {name}: {CONFIG}")


def num_pages_of(rank: int) -> int:
    """Return the pages of adapter memory that an adapter of this rank takes."""
    return -(-rank // RANK_PAGE)


def num_rank_pages(adapters: Adapters, ranks: Iterable[int]) -> int:
    """Return the pages of adapter memory: enough for any `slots` adapters that may be loaded.

    `ranks` are those of the adapters of the start.
    """
    if adapters.runtime:
        return adapters.slots * num_pages_of(adapters.max_rank)
    sizes = sorted(map(num_pages_of, ranks))
    return sum(sizes[-adapters.slots :])
