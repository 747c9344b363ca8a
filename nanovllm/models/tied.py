"""Check of tie_word_embeddings: compare a checkpoint's output head with its embedding.

Decision: if both tensors exist, they are compared completely, because a fine-tune may have changed
few rows of one of them. A head that differs is loaded untied, as in transformers.
"""

from __future__ import annotations

from pathlib import Path

import torch

from nanovllm.checkpoint import weight_files
from nanovllm.config import ConfigError
from nanovllm.models.names import text_tensors
from nanovllm.models.shards import DTYPES, Stored, contents

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ELEMENTS = 16 << 20  # elements per comparison


def has_own_head(folder: Path) -> bool:
    """Return whether the folder's checkpoint has a head that differs from its embedding.

    Return False if files are missing or broken; loading reports those.
    """
    try:
        heads = {
            name: tensor
            for path in weight_files(folder)[1]
            for name, tensor in text_tensors(path)
            if name in (HEAD, EMBEDDING)
        }
    except ConfigError:
        return False
    return len(heads) == 2 and differ(heads[HEAD], heads[EMBEDDING])


def differ(head: Stored, embedding: Stored) -> bool:
    """Compare two tensors, element by element if their types differ."""
    if head.dtype not in DTYPES or embedding.dtype not in DTYPES or head.shape != embedding.shape:
        return True
    count = (head.end - head.begin) // DTYPES[head.dtype].itemsize
    parts = ((part(head, at), part(embedding, at)) for at in range(0, count, ELEMENTS))
    return not all(alike(ours, other) for ours, other in parts)


def alike(ours: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare numbers, unless the bytes are alike, which is ten times as fast to find out."""
    if ours.dtype == other.dtype:
        word = torch.int64 if ours.nbytes % 8 == 0 else torch.uint8
        if torch.equal(ours.view(word), other.view(word)):
            return True
    return torch.equal(ours.float(), other.float())


def part(tensor: Stored, first: int) -> torch.Tensor:
    """Return ELEMENTS elements of a tensor, or fewer at its end."""
    size = DTYPES[tensor.dtype].itemsize
    begin = tensor.begin + first * size
    return contents(tensor._replace(begin=begin, end=min(begin + ELEMENTS * size, tensor.end)))
