"""Tiny checkpoints with a layer of MTP whose drafts are often accepted, and often not.

Random weights accept nothing. Here the layers add little to the embedding, and MTP passes it on as
well. Rows of the output head are those of the embedding in another order. So texts often go round
in circles of CIRCLE tokens.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.models.test_mtp import make_mtp

CIRCLE = 5
ADDED = re.compile(r"(o_proj|out_proj|down_proj)(\.weight)?$")  # added to the stream


def make_repeating(folder: Path, family: str, share: float = 0.06, **overrides: object) -> None:
    """Save a checkpoint. `share` scales what the target's layers add to the embedding."""
    model, _ = make_mtp(folder, family, **{**overrides, "tie_word_embeddings": False})
    path, depth = folder / "model.safetensors", int(model.config.num_hidden_layers)
    prefix = "mtp." if family.startswith("qwen3_") else f"model.layers.{depth}."
    tensors, size = load_file(path), int(model.config.hidden_size)
    for name, tensor in tensors.items():
        if ADDED.search(name):
            tensors[name] = tensor * (share if not name.startswith(prefix) else 0.15)
    proj, *norms = (
        ("fc", "pre_fc_norm_embedding", "norm")
        if prefix == "mtp."
        else ("eh_proj", "enorm", "shared_head.norm")
    )
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding[[before(i) for i in range(len(embedding))]]
    own = tensors["model.norm.weight"]
    gain = torch.zeros(size) if prefix == "mtp." else torch.ones(size)
    given = 0.1 * tensors[f"{prefix}{proj}.weight"][:, size:]  # little of the hidden state
    tensors[f"{prefix}{proj}.weight"] = torch.cat([torch.eye(size), given], 1)
    for name, weight in zip(norms, (gain, own), strict=True):
        tensors[f"{prefix}{name}.weight"] = weight.clone()
    save_file(tensors, path)


def before(token: int) -> int:
    """Return the token that this one follows in its circle."""
    start = token // CIRCLE * CIRCLE
    return start + (token - start - 1) % CIRCLE
