"""Checks of a checkpoint's folder before loading.

Each kind of fault has its own sentence with a remedy. The module does not import torch, so that
errors appear immediately. Index entries and links must stay inside the folder, except for links to
the blobs of the same model in the Hub's cache.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from nanovllm.typed_yaml import NOT_JSON, ConfigError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
CONFIG, ADAPTER = "config.json", "adapter_config.json"
SUFFIXES = (".json", ".safetensors", ".jinja")  # suffixes of files that are read
TEMPLATES = "additional_chat_templates"  # a subfolder
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
LFS = b"version https://git-lfs.github.com/spec/"
# Fields of a whole model, which precede those of its text model unless they are null.
WHOLE = "architectures", "eos_token_id", "quantization_config", "tie_word_embeddings"
MOST_LFS_BYTES = 1024  # maximum size of a pointer file

QUANTISED = re.compile(
    r"[-_.](unsloth|bnb|awq|gptq|gguf|mlx|exl[23]|aqlm|hqq|fp8|nvfp4|mxfp4|[if]?n?t?[2348]-?bits?|"
    r"int[48]|w\d+a\d+|q\d\w*|g?\d{2,3}g|dynamic|quantized(\.\w+)?|marlin|autoround|sym|block)$",
    re.IGNORECASE,
)


class Index(Struct, frozen=True):
    weight_map: dict[str, str]  # tensor name -> file name


class Adapter(Struct, frozen=True):
    """The field of adapter_config.json that is read."""

    base_model_name_or_path: str | None = None


def check_names(names: Collection[str], where: str, base: str | None = None) -> None:
    """Raise ConfigError unless files with these names are a model with readable weights.

    `where` is the folder or Hub id. `base` is the base model of an adapter, if available.
    """
    plain = [name for name in names if "/" not in name]
    has_weights = any(is_weights(name) for name in names)
    if ADAPTER in plain and not (CONFIG in plain and has_weights):
        named = base or "its base model"
        raise ConfigError(
            f"{where} is a PEFT adapter, not a model: merge it into {named} with PEFT's "
            f"merge_and_unload and save_pretrained, and serve the result; or serve {named}"
        )
    if has_weights and CONFIG in plain:
        return
    if any(name.endswith(".gguf") for name in names):
        raise ConfigError(f"{where} has GGUF files, {no_gguf(where)}")
    if has_weights:
        raise no_config(where)
    if any(name.endswith(PICKLED) for name in plain):
        raise ConfigError(
            f"{where} has only pickled weights (such as pytorch_model.bin), which can run code "
            "when they are loaded: convert them once with transformers' save_pretrained, which "
            "writes safetensors, or serve a revision of the model that has *.safetensors"
        )
    if CONFIG in plain:
        raise ConfigError(f"{where} has no *.safetensors; --load-format dummy runs without weights")
    raise no_config(where)


def text_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json that describe the text model, at one level.

    Models with an image encoder have them in `text_config`. It takes precedence over fields next to
    it, except over those of WHOLE, as in transformers.
    """
    text = raw.get("text_config")
    if not isinstance(text, dict):
        return raw
    return {**raw, **text, **{name: raw[name] for name in WHOLE if raw.get(name) is not None}}


def no_config(where: str) -> ConfigError:
    return ConfigError(f"{where} has no config.json, so it is not a model")


def no_gguf(where: str) -> str:
    base = made_from(where)
    named = f", {base}" if base != where.rsplit("/", 1)[-1] else ""
    return (
        f"which nanovllm cannot read: serve the original model{named}, by its Hub "
        "id or its folder of *.safetensors"
    )


def made_from(name: str) -> str:
    """Return the last part of a model's name without suffixes of quantised versions."""
    base = name.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")
    while (shorter := QUANTISED.sub("", base)) != base:
        base = shorter
    return base


def is_weights(name: str) -> bool:
    return name.endswith(".safetensors") and not name.startswith("adapter_")


def check_file(path: Path) -> None:
    """Raise ConfigError if a file given as a model or recipe contains weights."""
    suffix = path.suffix.lower()
    if suffix == ".gguf" or head_of(path, 4) == b"GGUF":
        raise ConfigError(f"{path} is a GGUF file, {no_gguf(path.name)}")
    if suffix in (".safetensors", *PICKLED):
        raise ConfigError(f"{path} is a file of weights: name its folder, which has a config.json")


def check(folder: Path, *, has_weights: bool = True) -> None:
    """Raise ConfigError if the folder's files cannot be loaded.

    `has_weights` is False for a model that runs with random weights.
    """
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise ConfigError(f"cannot read {folder}: {error.strerror}") from None
    if has_weights:
        check_names(names, str(folder), base_of(folder))
    elif CONFIG not in names:
        raise no_config(str(folder))
    for path in read_files(folder):
        check_inside(folder, path)
        if head_of(path, len(LFS)) == LFS and path.stat().st_size <= MOST_LFS_BYTES:
            raise ConfigError(
                f"{path} is a Git LFS pointer instead of the file itself: run `git lfs pull` in "
                f"{folder}, or serve the model by its Hub id"
            )
    if has_weights:
        weight_files(folder)


def read_files(folder: Path) -> Iterator[Path]:
    """Yield the paths of a folder that are read: files, and the subfolder of templates."""
    for path in sorted(folder.iterdir()):
        if path.name == TEMPLATES:
            yield path
            if path.is_dir():
                yield from sorted(path.glob("*.jinja"))
        elif path.name.endswith(SUFFIXES):
            yield path


def check_inside(folder: Path, path: Path) -> None:
    """Raise ConfigError if the file, with all links resolved, is outside the folder.

    In the Hub's cache a snapshot's files are links to blobs: snapshots/COMMIT/x -> blobs/HASH.
    """
    home, target = folder.resolve(), path.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(target.is_relative_to(place) for place in allowed):
        raise ConfigError(
            f"{path} is a link to {target}, outside the model's folder: copy the file there"
        )
    if not path.exists():
        raise ConfigError(f"{path} is a link to {target}, which does not exist")


def head_of(path: Path, count: int) -> bytes:
    """Return the first bytes of a file; no bytes if it is not a readable file."""
    try:
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            return file.read(count)
    except OSError:
        return b""


def base_of(folder: Path) -> str | None:
    """Return the base model in an adapter's config, or None."""
    try:
        adapter = msgspec.json.decode((folder / ADAPTER).read_bytes(), type=Adapter)
    except (*NOT_JSON, OSError):
        return None
    return adapter.base_model_name_or_path


def weight_files(folder: Path) -> tuple[Path, list[Path]]:
    """Return the path to name in messages, and the weight files.

    The files are those of the index, the single file, or all. Raise ConfigError if there are none,
    or if the index lists files outside the folder.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(
                set(msgspec.json.decode(index.read_bytes(), type=Index).weight_map.values())
            )
            for name in names:
                check_named(folder, index, name)
        except (*NOT_JSON, OSError) as error:
            raise ConfigError(f"{index}: {error}") from None
        return index, [folder / name for name in names]
    single = folder / SINGLE
    if single.is_file():
        return single, [single]
    files = sorted(path for path in folder.glob("*.safetensors") if is_weights(path.name))
    if not files:
        raise ConfigError(
            f"{folder} has no *.safetensors; --load-format dummy runs without weights"
        )
    return folder, files


def check_named(folder: Path, index: Path, name: str) -> None:
    """Raise ConfigError unless a file of the index exists inside the folder."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ConfigError(f"{index}: names {json.dumps(name)}, which is outside the folder")
    if not (folder / name).is_file():
        raise ConfigError(f"{index}: names {name}, which does not exist")
    check_inside(folder, folder / name)
