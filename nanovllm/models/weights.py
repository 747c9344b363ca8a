"""Checkpoint tensors into parameters: every tensor used once, every parameter filled once.

Knows no family: a model's WEIGHTS say which tensor fills what, its layers' `placements` which
slice of it. All of a checkpoint's faults are found before anything of it is read but headers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.attention.grouped import load_scale
from nanovllm.checkpoint import weight_files
from nanovllm.config import Config
from nanovllm.layers.linear import Layer, Placement
from nanovllm.log import Progress
from nanovllm.models.decoder import Decoder, Rule
from nanovllm.models.destination import FP8, Destination
from nanovllm.models.dummy import fill_random
from nanovllm.models.faults import whole
from nanovllm.models.quantised import in_blocks, scale_rules
from nanovllm.models.scattered import joined, plus_one
from nanovllm.models.shards import Stored, contents, num_bytes, read, runs

log = logging.getLogger("engine")
SHARED = "shared"  # how parts begin that belong to what every token gets beside its experts


def fill(model: Decoder, config: Config) -> None:
    """Fills every parameter, where it is.

    Raises ConfigError: one line naming the file or files, and what is wrong with their tensors.
    """
    load = config.recipe.load
    wanted = plus_one(destinations(model, model.WEIGHTS), model.LESS_ONE)
    if any(to.into.dtype == FP8 for to in wanted.values()):
        is_made = load.format == "dummy" or config.recipe.quantize is not None
        wanted = in_blocks(wanted, made=is_made)
    if load.format == "dummy":
        fill_random(wanted, load.seed)
    else:
        assert config.model_dir is not None
        fill_from_files(model, wanted, Path(config.model_dir))
    for layer in (module for module in model.modules() if isinstance(module, Layer)):
        layer.finish()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def fill_from_files(model: Decoder, wanted: dict[str, Destination], folder: Path) -> None:
    """Reads the tensors of a checkpoint into their places. Raises ConfigError as `fill` does."""
    source, paths = weight_files(folder)
    blocks, ignored = list[Any](model.layers), ignored_names(model)

    def takes(name: str, tensor: Stored) -> bool:
        return bool(ignored.fullmatch(name)) or load_scale(name, partial(contents, tensor), blocks)

    stored = whole(wanted, source, paths, len(blocks), takes)
    order = runs((stored[name], to) for name, to in wanted.items())
    progress = Progress(log, f"loading {folder}", sum(map(num_bytes, order)), "GB")
    for count in read(order, next(model.parameters()).device):
        progress.advance(count)
    progress.finish()


def destinations(model: nn.Module, rules: Sequence[Rule]) -> dict[str, Destination]:
    """By checkpoint name; together they fill every parameter exactly once.

    Experts of other ranks are among them, with a count of 0: their names are known, too.
    """
    rules = [*rules, *scale_rules(rules)]
    patterns = [(numbered(rule[1]), rule[0], "".join(rule[2:])) for rule in rules]
    found: dict[str, Destination] = {}
    for path, module in model.named_modules():
        for field, parameter in module.named_parameters(recurse=False):
            target = f"{path}.{field}".lstrip(".")
            sources = {}
            for pattern, source, part in patterns:
                if match := pattern.fullmatch(target):  # an expert's number stays open
                    sources[part] = source.format(*match.groups(), "{}")
            placement = getattr(module, "placements", {}).get(field)
            slices = destinations_in(parameter, placement)
            assert sources.keys() >= slices.keys(), f"WEIGHTS does not fill {target}"
            stacked = getattr(placement, "experts", None) is not None
            for part, places in slices.items():
                source, is_one = sources[part], not stacked or part.startswith(SHARED)
                assert ("{}" in source) != is_one, f"{source} does not fill {target}"
                found.update((source.format(i), to) for i, to in enumerate(places))
    return found


def destinations_in(parameter: Tensor, placement: Placement | None) -> dict[str, list[Destination]]:
    """The named parts of one parameter: of the one tensor, or of every expert's.

    Without a placement it is one uncut part. Parts of one name are spans of one tensor.
    """
    if placement is None:
        return {"": [Destination(parameter, tuple(parameter.shape), 0, 0, len(parameter))]}
    dim, experts = placement.dim, placement.experts or (0,)
    own = parameter.unbind() if placement.experts else (parameter,)
    parts: dict[str, list[Destination]] = {}
    at = 0
    for part, span in placement.parts:
        shape = list(own[0].shape)
        shape[dim] = span.full
        elsewhere = Destination(own[0].narrow(dim, at, 0), tuple(shape), dim, span.start, 0)
        cut = tuple(shape), dim, span.start, span.count
        here = [Destination(tensor.narrow(dim, at, span.count), *cut) for tensor in own]
        found = [elsewhere if place < 0 else here[place] for place in experts]
        parts[part] = [*map(joined, parts[part], found)] if part in parts else found
        if placement.has_shared:
            parts[f"{SHARED} {part}".strip()] = here[-1:]
        at += span.count
    return parts


def ignored_names(model: Decoder) -> re.Pattern[str]:
    """Names that may be in a checkpoint unused: IGNORED, and second names of tied parameters."""
    own = dict(model.named_parameters())
    tied = dict(model.named_parameters(remove_duplicate=False)).keys() - own.keys()
    names = [*model.IGNORED, *(rule[0] for rule in model.WEIGHTS if rule[1] in tied)]
    return re.compile("|".join(numbered(name).pattern for name in names))


def numbered(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\{\}", r"(\d+)"))
