"""Check that a checkpoint has exactly the model's tensors. All faults are reported in one line."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from nanovllm.config import ConfigError
from nanovllm.models.destination import Destination
from nanovllm.models.shards import Stored, tensors_in

log = logging.getLogger("engine")
SHOWN = 3  # names of each kind


def whole(
    wanted: dict[str, Destination],
    source: Path,
    paths: Iterable[Path],
    *,
    num_layers: int | None,
    takes: Callable[[str, Stored], bool],
) -> dict[str, Stored]:
    """Return by name the tensors that fill the model, and those that `takes` accepts.

    Tensors of layers from `num_layers` on, and of MTP, are left out, unless it is None. Raise
    ConfigError if there are faults. Its message begins with the `source`. For each kind it gives
    the number of faults and the first few.
    """
    found: dict[str, Stored] = {}
    faults: defaultdict[str, list[str]] = defaultdict(list)
    later = 0
    for path in paths:
        for name, tensor in sorted(tensors_in(path)):
            to, where = wanted.get(name), f"{name} in {path.name}"
            if to is None and num_layers is not None and is_later(name, num_layers):
                later += 1
            elif name in found:
                faults["duplicated"].append(f"{where} and {found[name].path.name}")
            elif to is None and not takes(name, tensor):
                faults["unexpected"].append(where)
            else:
                found[name] = tensor
                if to is not None and tensor.shape != to.shape:
                    shapes = f"{list(tensor.shape)}, expected {list(to.shape)}"
                    faults["with a wrong shape"].append(f"{where} is {shapes}")
                if to is not None and tensor.dtype not in to.dtypes:
                    types = f"{tensor.dtype}, expected {' or '.join(to.dtypes)}"
                    faults["with a wrong type"].append(f"{where} is {types}")
    if missing := [name for name in wanted if name not in found]:
        faults["missing"] = missing
    if faults:
        kinds = "; ".join(described(kind, tensors) for kind, tensors in faults.items())
        raise ConfigError(f"{source} does not fit the model: {kinds}")
    if later:
        log.info("left out %d tensors of layers after the model's last (later ones, or MTP)", later)
    return found


def described(kind: str, tensors: list[str]) -> str:
    count = "1 tensor" if len(tensors) == 1 else f"{len(tensors)} tensors"
    shown = ", ".join(tensors[:SHOWN])
    if len(tensors) > SHOWN:
        shown += ", ..."
    return f"{count} {kind}: {shown}"


def is_later(name: str, num_layers: int) -> bool:
    """Return True for a tensor of a layer that the recipe leaves out, or of an MTP layer."""
    match = re.match(r"model\.layers\.(\d+)\.|mtp\.", name)
    return match is not None and (match[1] is None or int(match[1]) >= num_layers)
