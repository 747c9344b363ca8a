"""Tensors of checkpoints by the names that a family's WEIGHTS use.

Checkpoints of models with an image encoder have `language_model.` in the names of their text model.
Some stack all experts of a layer in one tensor; each expert then is a part of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from nanovllm.models.shards import Stored, tensors_in

WRAPPED = re.compile(r"^(?:model\.language_model|language_model\.model)\.")
# Experts of a layer in one tensor [experts, out, in] -> names of its parts, which are rows of each.
STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def text_name(name: str) -> str:
    """Return a tensor's or module's name without the prefix of a model that contains it."""
    return WRAPPED.sub("model.", name).removeprefix("language_model.")


def text_tensors(path: Path) -> Iterator[tuple[str, Stored]]:
    """Yield the tensors in a file, those of stacked experts one by one. Raise ConfigError."""
    for name, tensor in tensors_in(path):
        yield from parts_of(text_name(name), tensor)


def parts_of(name: str, tensor: Stored) -> Iterator[tuple[str, Stored]]:
    """Yield the experts' tensors in a stacked one, or the tensor itself."""
    experts, _, last = name.rpartition(".")
    parts = STACKED.get(last, ()) if experts.endswith(".experts") else ()
    if not parts or len(tensor.shape) != 3 or tensor.shape[1] % len(parts):
        yield name, tensor
        return
    num_experts, rows, columns = tensor.shape
    shape = rows // len(parts), columns
    num_bytes = (tensor.end - tensor.begin) // (num_experts * len(parts))
    for at in range(num_experts * len(parts)):
        expert, part = divmod(at, len(parts))
        begin = tensor.begin + at * num_bytes
        stored = tensor._replace(begin=begin, end=begin + num_bytes, shape=shape)
        yield f"{experts}.{expert}.{parts[part]}.weight", stored
