"""Loading of checkpoint tensors into parameters: each tensor used once, each parameter filled once.

No code here is specific to a family. A model's WEIGHTS map tensors to parameters, and its layers'
`placements` select the slice. All faults of a checkpoint are found from the files' headers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from nanovllm.models.head import DraftHead
from nanovllm.models.quantised import in_blocks, scale_rules
from nanovllm.models.scattered import joined, plus_one
from nanovllm.models.shards import Stored, contents, num_bytes, read, runs

log = logging.getLogger("engine")
SHARED = "shared"  # prefix of the parts of a shared expert


def filler(
    model: Decoder | DraftHead,
    config: Config,
    folder: Path | None = None,
    prefix: str = "",
    *,
    is_made: bool = False,
) -> Callable[[], None]:
    """Return a function that fills every parameter in place.

    `folder` has the weights; None: that of the config. The model has all of its tensors, or those
    whose names begin with `prefix`. `is_made`: fp8 weights are quantised from other floats while
    loading, as with `quantize` and for random weights. Raise ConfigError if tensors do not fit: one
    line with the files and all faults. The headers of the files show that, so no weight is read.
    """
    load = config.recipe.load
    wanted = plus_one(destinations(model, model.WEIGHTS), model.LESS_ONE)
    if any(to.into.dtype == FP8 for to in wanted.values()):
        is_made = is_made or load.format == "dummy" or config.recipe.quantize is not None
        wanted = in_blocks(wanted, made=is_made)
    read_all: Callable[[], None] = partial(fill_random, wanted, load.seed)
    if load.format != "dummy":
        assert folder is not None or config.model_dir is not None
        read_all = reader(model, wanted, folder or Path(str(config.model_dir)), prefix)

    def fill_all() -> None:
        read_all()
        for layer in (module for module in model.modules() if isinstance(module, Layer)):
            layer.after_load()

    return fill_all


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def reader(
    model: Decoder | DraftHead, wanted: dict[str, Destination], folder: Path, prefix: str
) -> Callable[[], None]:
    """Return a function that reads the tensors of a checkpoint into their destinations.

    Raise ConfigError like `filler`.
    """
    source, paths = weight_files(folder)
    blocks, ignored = list[Any](model.layers), ignored_names(model)
    is_head = isinstance(model, DraftHead)

    def takes(name: str, tensor: Stored) -> bool:
        if ignored.fullmatch(name) or not name.startswith(prefix):
            return True
        return not is_head and load_scale(name, partial(contents, tensor), blocks)

    num_layers = None if is_head else len(blocks)
    stored = whole(wanted, source, paths, num_layers=num_layers, takes=takes)
    order = runs((stored[name], to) for name, to in wanted.items())

    def read_all() -> None:
        progress = Progress(log, f"loading {folder}", sum(map(num_bytes, order)), "GB")
        for count in read(order, next(model.parameters()).device):
            progress.advance(count)
        progress.finish()

    return read_all


def destinations(model: nn.Module, rules: Sequence[Rule]) -> dict[str, Destination]:
    """Return destinations by checkpoint name. They fill every parameter exactly once.

    Experts of other ranks are included with a count of 0, so that their names are not unexpected.
    """
    rules = [*rules, *scale_rules(rules)]
    patterns = [(numbered(rule[1]), rule[0], "".join(rule[2:])) for rule in rules]
    by_name: dict[str, Destination] = {}
    for path, module in model.named_modules():
        for field, parameter in module.named_parameters(recurse=False):
            target = f"{path}.{field}".lstrip(".")
            sources = {}
            for pattern, source, part in patterns:
                if match := pattern.fullmatch(target):  # the placeholder of an expert stays
                    sources[part] = source.format(*match.groups(), "{}")
            placement = getattr(module, "placements", {}).get(field)
            slices = destinations_in(parameter, placement)
            assert sources.keys() >= slices.keys(), f"WEIGHTS does not fill {target}"
            stacked = getattr(placement, "experts", None) is not None
            for part, places in slices.items():
                source, is_one = sources[part], not stacked or part.startswith(SHARED)
                assert ("{}" in source) != is_one, f"{source} does not fill {target}"
                by_name.update((source.format(i), to) for i, to in enumerate(places))
    return by_name


def destinations_in(parameter: Tensor, placement: Placement | None) -> dict[str, list[Destination]]:
    """Return the destinations in one parameter by part: one each, or one per expert.

    Without a placement the parameter is one uncut part. Parts with the same name are spans of one
    tensor.
    """
    if placement is None:
        whole_parameter = Destination(
            parameter, shape=tuple(parameter.shape), dim=0, start=0, count=len(parameter)
        )
        return {"": [whole_parameter]}
    dim = placement.dim
    experts = placement.experts or (0,)
    own = parameter.unbind() if placement.experts else (parameter,)
    parts: dict[str, list[Destination]] = {}
    at = 0
    for part, span in placement.parts:
        shape = list(own[0].shape)
        shape[dim] = span.full
        of_other_rank = Destination(
            own[0].narrow(dim, at, 0), shape=tuple(shape), dim=dim, start=span.start, count=0
        )
        local = [
            replace(of_other_rank, into=tensor.narrow(dim, at, span.count), count=span.count)
            for tensor in own
        ]
        spans = [of_other_rank if place < 0 else local[place] for place in experts]
        parts[part] = [*map(joined, parts[part], spans)] if part in parts else spans
        if placement.has_shared:
            parts[f"{SHARED} {part}".strip()] = local[-1:]
        at += span.count
    return parts


def ignored_names(model: Decoder | DraftHead) -> re.Pattern[str]:
    """Return a pattern of names that may be unused: IGNORED, and aliases of tied parameters."""
    own = dict(model.named_parameters())
    tied = dict(model.named_parameters(remove_duplicate=False)).keys() - own.keys()
    names = [*model.IGNORED, *(rule[0] for rule in model.WEIGHTS if rule[1] in tied)]
    return re.compile("|".join(numbered(name).pattern for name in names))


def numbered(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\{\}", r"(\d+)"))
