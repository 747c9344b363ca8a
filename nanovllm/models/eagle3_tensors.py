"""Tensors of an EAGLE-3 head's files: their names, and the target's ids of draft tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanovllm.checkpoint import PICKLED, is_weights, weight_files
from nanovllm.config import ConfigError
from nanovllm.models.shards import Stored, tensors_in

NORMS_BY_DEPTH = ("low", "mid", "high")  # other names of fc_norm.0, 1 and 2


def canonical(name: str) -> str:
    """Return the name that speculators would give a head's tensor.

    NVIDIA's Model Optimizer numbers the layers `midlayer.0`, `midlayer.1` if there are several.
    """
    name = name.removeprefix("model.")
    name = re.sub(r"^midlayer\.(?=\d+\.)", "layers.", name)
    name = re.sub(r"^midlayer\.", "layers.0.", name)
    for place, depth in enumerate(NORMS_BY_DEPTH):
        name = name.replace(f"aux_norm_{depth}.", f"fc_norm.{place}.")
    return name


def check_format(folder: Path) -> None:
    """Raise ConfigError if the folder has pickled weights only, as EAGLE's own heads.

    transformers has no class for a head, and so cannot convert it.
    """
    names = sorted(path.name for path in folder.glob("*"))
    pickled = [name for name in names if name.endswith(PICKLED)]
    if pickled and not any(is_weights(name) for name in names):
        raise ConfigError(
            f"{folder} has only pickled weights ({pickled[0]}), which can run code when they are "
            "loaded: convert them once to model.safetensors, with torch.load(weights_only=True) "
            "and safetensors.torch.save_file"
        )


def tensors_of(folder: Path) -> tuple[dict[str, str], dict[str, Stored]]:
    """Return the names in the files and the tensors, both by canonical name.

    The norm before a further layer is its input_layernorm, or its hidden_norm if it has no other.
    Raise ConfigError if two tensors have one canonical name.
    """
    names: dict[str, str] = {}
    stored: dict[str, Stored] = {}
    for path in weight_files(folder)[1]:
        for name, tensor in tensors_in(path):
            ours = canonical(name)
            if ours in names:
                raise ConfigError(f"{path}: {name} and {names[ours]} are the same tensor")
            names[ours], stored[ours] = name, tensor
    for name in [
        name for name in names if re.fullmatch(r"layers\.[1-9]\d*\.hidden_norm\.\w+", name)
    ]:
        usual = name.replace("hidden_norm", "input_layernorm")
        if usual not in names:
            names[usual], stored[usual] = names.pop(name), stored.pop(name)
    if "mask_hidden" in stored:
        raise ConfigError(f"{folder}: mask_hidden: heads for parallel drafting are not supported")
    return names, stored


def target_ids_in(stored: Mapping[str, Stored], draft_vocab: int, target_vocab: int) -> Tensor:
    """Return the target's id of each draft id, int64, from the offsets in the tensor d2t.

    Raise ConfigError if they do not increase, exceed the target's vocabulary, or are not the ids
    that the tensor t2d marks.
    """
    d2t = stored["d2t"]
    size = d2t.end - d2t.begin
    if d2t.shape != (draft_vocab,) or d2t.dtype != "I64" or size != 8 * draft_vocab:
        raise ConfigError(
            f"{d2t.path}: d2t is {d2t.dtype} {list(d2t.shape)}, expected I64 [{draft_vocab}]"
        )
    offsets = np.fromfile(d2t.path, np.int64, draft_vocab, offset=d2t.begin)
    ids = torch.arange(draft_vocab, device="cpu") + torch.from_numpy(offsets)
    rises = len(ids) < 2 or bool((ids[1:] > ids[:-1]).all())
    if not rises or not 0 <= int(ids[0]) <= int(ids[-1]) < target_vocab:
        raise ConfigError(
            f"{d2t.path}: d2t must be offsets from draft ids to increasing ids of the target, "
            f"below {target_vocab}"
        )
    t2d = stored.get("t2d")
    if t2d is not None and (t2d.dtype, t2d.shape) == ("BOOL", (target_vocab,)):
        marks = np.fromfile(t2d.path, np.bool_, target_vocab, offset=t2d.begin)
        if not np.array_equal(marks.nonzero()[0], ids.numpy()):
            raise ConfigError(
                f"{d2t.path}: d2t and t2d name different draft tokens; d2t must be offsets from "
                "draft ids to ids of the target"
            )
    return ids
