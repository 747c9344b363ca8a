"""Checkpoints with an output head although tie_word_embeddings is true. All rows are compared."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nanovllm.models import tied
from tests.models.steps import load
from tests.models.test_weights import Checkpoint, edit, line_of
from tests.models.tiny import make_tiny


def put_head(checkpoint: Checkpoint, head: torch.Tensor) -> None:
    checkpoint["lm_head.weight"] = head


@pytest.mark.parametrize("where", ["model.safetensors", "a.safetensors", "z.safetensors"])
@pytest.mark.parametrize("row", [0, 100, 199])
def test_a_head_that_differs_in_one_row_is_loaded_untied(
    where: str, row: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fine-tunes that train only new tokens have such heads. transformers also unties them."""
    reference = make_tiny(tmp_path, "qwen3", tie_word_embeddings=True)
    weight = reference.model.embed_tokens.weight.detach()
    tensors = load_file(tmp_path / "model.safetensors")
    for factor in (1.0, 1.01):
        head = weight.clone()
        head[row] *= factor
        if where == "model.safetensors":
            save_file({**tensors, "lm_head.weight": head}, tmp_path / where)
        else:
            save_file({"lm_head.weight": head}, tmp_path / where)
            names = {**dict.fromkeys(tensors, "model.safetensors"), "lm_head.weight": where}
            index = tmp_path / "model.safetensors.index.json"
            index.write_text(json.dumps({"weight_map": names}))
        caplog.clear()
        with caplog.at_level("INFO", "engine"):
            model = load(tmp_path)
        assert torch.equal(model.head.weight, head)
        assert torch.equal(model.embed.weight, weight)
        assert (model.head is model.embed) == (factor == 1.0)
        assert ("lm_head.weight differs from the embedding" in caplog.text) == (factor != 1.0)


def test_an_untied_head_computes_what_transformers_does(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3", tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    head = embedding.clone()
    head[150:] = embedding[:50]
    edit(tmp_path, partial(put_head, head=head))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(reference.lm_head.weight, head)
    assert torch.equal(load(tmp_path).head.weight, head)


def test_heads_are_compared_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tied, "ELEMENTS", 999)  # the last elements are a smaller part
    make_tiny(tmp_path, "qwen3", tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    for dtype in (torch.float32, torch.bfloat16):
        for at in (None, 0, 998, 999, embedding.numel() - 1):
            head = embedding.to(dtype)
            if at is not None:
                head.view(-1)[at] += 1
            edit(tmp_path, partial(put_head, head=head))
            is_same = at is None and dtype == torch.float32
            assert tied.has_own_head(tmp_path) == (not is_same)


@pytest.mark.parametrize(
    ("dtype", "type_"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int32, "I32")]
)
def test_a_tied_head_of_another_type(dtype: torch.dtype, type_: str, tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3", tie_word_embeddings=True)
    head = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].to(dtype)
    edit(tmp_path, partial(put_head, head=head))
    assert line_of(tmp_path).endswith(
        f"lm_head.weight in model.safetensors is {type_}, expected BF16 or F16 or F32"
    )
