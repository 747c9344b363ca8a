"""Checkpoint tensors into parameters: every tensor used once, every parameter filled once.

Knows no family: a model's WEIGHTS say which tensor fills what, its layers' `placements` which
slice of it. What is read are views of the mapped file: host memory never holds a second copy, nor
anything of the slices that other ranks keep.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nanovllm.attention.grouped import load_scale
from nanovllm.config import Config, ConfigError
from nanovllm.layers.linear import Placement
from nanovllm.log import Progress
from nanovllm.models.decoder import Decoder, Rule

log = logging.getLogger("engine")
INDEX = "model.safetensors.index.json"


def fill(model: Decoder, config: Config) -> None:
    """Every parameter, where it is.

    Raises ConfigError: one line naming the file, and the tensor where there is one.
    """
    if config.recipe.load.format == "dummy":
        fill_random(model, config.recipe.load.seed)
    else:
        assert config.model_dir is not None
        fill_from_files(model, Path(config.model_dir))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def fill_random(model: Decoder, seed: int) -> None:
    """Gains of one; matrices that keep the scale of what they multiply.

    Each tensor that a checkpoint would have is drawn whole, from the seed and its name, and the
    rank keeps its slice. So the model is the same over any number of ranks.
    """
    wanted = destinations(model, model.WEIGHTS)
    generator = torch.Generator(next(model.parameters()).device)
    progress = Progress(log, "random weights", num_bytes(wanted), "GB")
    for name, to in wanted.items():
        is_cut = to.into.shape != to.shape
        whole = to.into.new_empty(to.shape) if is_cut else to.into
        if whole.ndim == 1:
            whole.fill_(1)
        else:
            generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            whole.normal_(0, to.shape[-1] ** -0.5, generator=generator)
        if is_cut:
            put(whole, to, name)
        progress.advance(to.into.nbytes)
    progress.finish()


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a checkpoint tensor goes: `count` lines of it, from `start` on, along `dim`."""

    into: Tensor
    shape: tuple[int, ...]  # of the whole tensor
    dim: int
    start: int
    count: int


def num_bytes(wanted: dict[str, Destination]) -> int:
    return sum(to.into.nbytes for to in wanted.values())


def fill_from_files(model: Decoder, folder: Path) -> None:
    wanted = destinations(model, model.WEIGHTS)
    ignored, blocks = ignored_names(model), list[Any](model.layers)
    source, paths = shards(folder)
    filled: set[str] = set()
    progress = Progress(log, f"loading {folder}", num_bytes(wanted), "GB")
    for path in paths:
        for name, tensor in tensors(path):
            if ignored.fullmatch(name) or load_scale(name, tensor, blocks):
                continue
            if name not in wanted:
                raise ConfigError(f"{path}: unexpected tensor {name}")
            if name in filled:
                raise ConfigError(f"{path}: tensor {name} was in another file already")
            filled.add(name)
            put(tensor, wanted[name], f"{path}: tensor {name}")
            progress.advance(wanted[name].into.nbytes)
    missing = sorted(wanted.keys() - filled)
    if missing:
        more = f", and {len(missing) - 1} more" if missing[1:] else ""
        raise ConfigError(f"{source}: missing tensor {missing[0]}{more}")
    progress.finish()


def put(tensor: Tensor, to: Destination, what: str) -> None:
    if tuple(tensor.shape) != to.shape:
        raise ConfigError(f"{what} has shape {list(tensor.shape)}, expected {list(to.shape)}")
    to.into.copy_(tensor.narrow(to.dim, to.start, to.count))


def destinations(model: nn.Module, rules: Iterable[Rule]) -> dict[str, Destination]:
    """By checkpoint name; together they fill every parameter exactly once."""
    patterns = [(numbered(rule[1]), rule[0], "".join(rule[2:])) for rule in rules]
    found: dict[str, Destination] = {}
    for path, module in model.named_modules():
        for field, parameter in module.named_parameters(recurse=False):
            target = f"{path}.{field}".lstrip(".")
            sources = {}
            for pattern, source, part in patterns:
                if match := pattern.fullmatch(target):
                    sources[part] = source.format(*match.groups())
            slices = dict(destinations_in(parameter, getattr(module, "placements", {}).get(field)))
            assert sources.keys() == slices.keys(), f"WEIGHTS does not fill {target}"
            found.update((sources[part], slices[part]) for part in slices)
    return found


def destinations_in(
    parameter: Tensor, placement: Placement | None
) -> Iterator[tuple[str, Destination]]:
    """The named parts of one parameter, in order. Without a placement it is one uncut part."""
    if placement is None:
        yield "", Destination(parameter, tuple(parameter.shape), 0, 0, len(parameter))
        return
    at = 0
    for part, span in placement.parts:
        into = parameter.narrow(placement.dim, at, span.count)
        shape = list(into.shape)
        shape[placement.dim] = span.full
        yield part, Destination(into, tuple(shape), placement.dim, span.start, span.count)
        at += span.count


def ignored_names(model: Decoder) -> re.Pattern[str]:
    """Names that may be in a checkpoint unused: IGNORED, and second names of tied parameters."""
    own = dict(model.named_parameters())
    tied = dict(model.named_parameters(remove_duplicate=False)).keys() - own.keys()
    names = [*model.IGNORED, *(rule[0] for rule in model.WEIGHTS if rule[1] in tied)]
    return re.compile("|".join(numbered(name).pattern for name in names))


def numbered(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\{\}", r"(\d+)"))


class Index(Struct, frozen=True):
    weight_map: dict[str, str]  # tensor name -> file name


def shards(folder: Path) -> tuple[Path, list[Path]]:
    """What stands for the checkpoint in messages, and its files: the index's, the one, or all."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = set(msgspec.json.decode(index.read_bytes(), type=Index).weight_map.values())
        except msgspec.DecodeError as error:
            raise ConfigError(f"{index}: {error}") from None
        for name in sorted(names):
            if not (folder / name).is_file():
                raise ConfigError(f"{index}: names {name}, which is not there")
        return index, [folder / name for name in sorted(names)]
    single = folder / "model.safetensors"
    if single.is_file():
        return single, [single]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ConfigError(
            f"{folder} has no *.safetensors; --load-format dummy runs without weights"
        )
    return folder, found


def tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """In the order of the file, so that a disk is read forwards."""
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is not a whole safetensors file: {error}") from None
