"""Check that a checkpoint has exactly the model's tensors. All faults are reported in one line."""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from nanovllm.config import ConfigError
from nanovllm.models.destination import Destination
from nanovllm.models.names import text_tensors
from nanovllm.models.shards import Stored

log = logging.getLogger("engine")
LATER = "left out %d tensors of layers after the model's last (later ones, or MTP)"
VISUAL = "left out %d tensors of the image encoder: only text is served"
SHOWN = 3  # names of each kind


def whole(
    destinations: dict[str, Destination],
    source: Path,
    paths: Iterable[Path],
    *,
    num_layers: int | None,
    takes: Callable[[str, Stored], bool],
) -> dict[str, Stored]:
    """Return by name the tensors that fill the model, and those that `takes` accepts.

    Tensors of layers from `num_layers` on, of MTP and of an image encoder are left out, unless it
    is None. Raise ConfigError if there are faults. Its message begins with the `source`. For each
    kind it gives the number of faults and the first few.
    """
    stored: dict[str, Stored] = {}
    faults: defaultdict[str, list[str]] = defaultdict(list)
    left_out = Counter[str]()
    for path in paths:
        for name, tensor in sorted(text_tensors(path)):
            to, where = destinations.get(name), f"{name} in {path.name}"
            reason = "" if to is not None else reason_to_leave(name, num_layers)
            if reason:
                left_out[reason] += 1
            elif name in stored:
                faults["duplicated"].append(f"{where} and {stored[name].path.name}")
            elif to is None and not takes(name, tensor):
                faults["unexpected"].append(where)
            else:
                stored[name] = tensor
                if to is not None and tensor.shape != to.shape:
                    shapes = f"{list(tensor.shape)}, expected {list(to.shape)}"
                    faults["with a wrong shape"].append(f"{where} is {shapes}")
                if to is not None and tensor.dtype not in to.dtypes:
                    types = f"{tensor.dtype}, expected {' or '.join(to.dtypes)}"
                    faults["with a wrong type"].append(f"{where} is {types}")
    if missing := [name for name in destinations if name not in stored]:
        faults["missing"] = missing
    if faults:
        kinds = "; ".join(described(kind, tensors) for kind, tensors in faults.items())
        raise ConfigError(f"{source} does not fit the model: {kinds}")
    for reason, count in left_out.items():
        log.info(reason, count)
    return stored


def described(kind: str, tensors: list[str]) -> str:
    count = "1 tensor" if len(tensors) == 1 else f"{len(tensors)} tensors"
    shown = ", ".join(tensors[:SHOWN])
    if len(tensors) > SHOWN:
        shown += ", ..."
    return f"{count} {kind}: {shown}"


def reason_to_leave(name: str, num_layers: int | None) -> str:
    """Return the log line for a tensor that is left out, or "" if it is not."""
    if num_layers is None:
        return ""
    if re.match(r"(model\.)?visual\.", name):
        return VISUAL
    match = re.match(r"model\.layers\.(\d+)\.|mtp\.", name)
    is_later = match is not None and (match[1] is None or int(match[1]) >= num_layers)
    return LATER if is_later else ""
