"""Tensors of EAGLE-3 heads: names, and maps from draft tokens to those of the target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanovllm.config import ConfigError
from nanovllm.models.eagle3_config import Eagle3Spec, read_eagle3
from nanovllm.models.eagle3_tensors import canonical
from tests.models.heads import eagle3_tensors, save_head
from tests.models.test_eagle3_config import TARGET


def read(folder: Path, d2t: Tensor, t2d: Tensor | None = None) -> Eagle3Spec:
    """Return a head with 40 draft tokens and these maps."""
    tensors = eagle3_tensors()
    del tensors["t2d"]
    tensors["d2t"] = d2t
    if t2d is not None:
        tensors["t2d"] = t2d
    return read_eagle3(save_head(folder, tensors), TARGET)


def test_pickled_weights_are_refused_with_a_remedy_for_heads(tmp_path: Path) -> None:
    save_head(tmp_path, {})
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError) as caught:
        read_eagle3(tmp_path, TARGET)
    assert str(caught.value) == (
        f"{tmp_path} has only pickled weights (pytorch_model.bin), which can run code when they "
        "are loaded: convert them once to model.safetensors, with torch.load(weights_only=True) "
        "and safetensors.torch.save_file"
    )


@pytest.mark.parametrize(
    "d2t",
    [
        torch.arange(160, 200),  # absolute ids instead of offsets
        torch.arange(0, -40, -1),  # all are id 0
        torch.full((40,), -1),
    ],
)
def test_maps_that_are_no_offsets_are_refused(d2t: Tensor, tmp_path: Path) -> None:
    found = read(tmp_path, d2t=d2t)
    with pytest.raises(ConfigError) as caught:
        found.target_ids()
    assert str(caught.value) == (
        f"{tmp_path}/model.safetensors: d2t must be offsets from draft ids to increasing ids of "
        "the target, below 200"
    )


def test_a_map_of_another_type_is_refused(tmp_path: Path) -> None:
    d2t = torch.zeros(40, dtype=torch.int32)
    found = read(tmp_path, d2t=d2t)
    with pytest.raises(ConfigError) as caught:
        found.target_ids()
    assert str(caught.value) == (
        f"{tmp_path}/model.safetensors: d2t is I32 [40], expected I64 [40]"
    )


def test_draft_ids_with_holes(tmp_path: Path) -> None:
    ids = torch.tensor([3, 4, 9, *range(100, 137)])
    marks = torch.zeros(200, dtype=torch.bool).index_fill(0, ids, True)
    assert torch.equal(read(tmp_path, d2t=ids - torch.arange(40), t2d=marks).target_ids(), ids)


def test_maps_that_differ_are_refused(tmp_path: Path) -> None:
    """Ids in place of offsets may increase, too. The marks of t2d then show that they are wrong."""
    ids = torch.arange(0, 80, 2)
    marks = torch.zeros(200, dtype=torch.bool).index_fill(0, ids, True)
    assert torch.equal(read(tmp_path, d2t=ids - torch.arange(40), t2d=marks).target_ids(), ids)
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, d2t=ids, t2d=marks).target_ids()
    assert str(caught.value) == (
        f"{tmp_path}/model.safetensors: d2t and t2d name different draft tokens; d2t must be "
        "offsets from draft ids to ids of the target"
    )


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        ("model.midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        ("layers.0.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        ("midlayer.0.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        ("model.midlayer.1.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"),
        ("model.aux_norm_mid.weight", "fc_norm.1.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_names(name: str, ours: str) -> None:
    assert canonical(name) == ours
