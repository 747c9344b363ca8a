"""Owner of the pages on disk: each setting that changes keys and values is a part of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nanovllm.config import Speculate, load_config
from nanovllm.kv.disk.format import PageOwner
from nanovllm.parallel.mesh import Mesh
from nanovllm.runner.disk import owner_of
from nanovllm.runner.resolved import resolve_config
from nanovllm.runner.roles import digests
from tests.models.heads import eagle3_tensors, save_head
from tests.models.tiny import config_of, make_tiny

INVARIANT = "kernels.invariant=true"


def owner(*settings: str, mesh: Mesh | None = None, recipe: str | None = None) -> PageOwner:
    """Return the owner of pages of the demo, or of another recipe, on a CPU."""
    config = load_config(recipe, ["device=cpu", *settings])
    return owner_of(config, resolve_config(config, mesh or Mesh()))


def test_settings_that_change_no_page_keep_the_owner() -> None:
    settings = "schedule.slots=3", "server.port=1", "cache.pages=77", "kernels.cuda_graphs=false"
    assert owner() == owner(*settings) == owner("kernels.rms_norm=compile")
    assert owner(INVARIANT) == owner(INVARIANT, *settings)


@pytest.mark.parametrize(
    ("field", "setting"),
    [
        ("identity", "quantize=fp8"),
        ("identity", "load.format=dummy"),
        ("identity", "cache.dtype=fp8"),
        ("identity", "speculate={method: draft_model, tokens: 2}"),
        ("identity", INVARIANT),
        ("dtype", "dtype=bfloat16"),
        ("layout", "cache.page_tokens=32"),
    ],
)
def test_a_setting_that_changes_pages_is_another_owner(field: str, setting: str) -> None:
    one, other = owner(), owner(setting)
    assert getattr(one, field) != getattr(other, field)
    assert one.name(b"key") != other.name(b"key")


def test_random_weights_are_known_by_seed_layers_and_routing() -> None:
    settings = ["load.format=dummy", "parallel.tp=1", "load.seed=0", "experts.routing=auto"]
    changes = ("load.seed=1", "num_layers=2", "experts.routing=uniform")
    found = [
        owner(*settings, change, recipe="qwen3-30b-a3b").identity
        for change in ("dtype=auto", *changes)
    ]
    assert len(set(found)) == 4


def test_a_rank_has_pages_of_its_own() -> None:
    meshes = [Mesh(), Mesh(0, 2), Mesh(1, 2)]
    assert len({owner(mesh=mesh).name(b"key") for mesh in meshes}) == 3


def owner_with_head(target: Path, head: Path, **stated: Any) -> PageOwner:
    speculate = Speculate(method="eagle3", model=str(head), tokens=2, **stated)
    config = config_of(target)
    config = replace(config, recipe=replace(config.recipe, speculate=speculate))
    return owner_of(config, resolve_config(config, Mesh()))


def test_the_weights_of_a_draft_head_count(tmp_path: Path) -> None:
    make_tiny(tmp_path / "own", "qwen3", num_hidden_layers=5)
    owners = []
    for at in range(2):
        tensors = eagle3_tensors()
        first = min(tensors)
        tensors[first] = tensors[first] + at
        save_head(tmp_path / f"head{at}", tensors)
        owners.append(owner_with_head(tmp_path / "own", tmp_path / f"head{at}"))
    assert owners[0].identity != owners[1].identity and owners[0].layout == owners[1].layout


def test_what_a_recipe_states_of_a_draft_head_counts(tmp_path: Path) -> None:
    """Other taps and rotary positions give other keys of the head. The file has taps 2, 3, 4."""
    own, head = tmp_path / "own", tmp_path / "head"
    make_tiny(own, "qwen3", num_hidden_layers=5)
    save_head(head, eagle3_tensors())
    owners = [
        owner_with_head(own, head, **stated)
        for stated in ({}, {"drafts_by": "argmax"}, {"taps": [1, 2, 3]}, {"rope_theta": 9.0})
    ]
    assert owners[0] == owners[1]
    assert len({owner.identity for owner in owners}) == 3


def test_bits_of_other_kernels_are_found_by_no_invariant_server() -> None:
    """Otherwise a folder, or a prefill server, would bring bits that this server never computes."""
    assert owner(INVARIANT) != owner(INVARIANT, "kernels.rms_norm=compile")
    experts = ["load.format=dummy", INVARIANT]
    whole, cut = (
        owner(*experts, mesh=Mesh(0, 2, ep_size=size), recipe="qwen3-30b-a3b") for size in (2, 1)
    )
    assert whole.identity != cut.identity
    models = []
    for mesh in (Mesh(), Mesh(0, 2)):  # a decode server of one rank, and a prefill server of two
        config = load_config(None, ["device=cpu", INVARIANT])
        models.append(digests(config, resolve_config(config, mesh))[1])
    assert models[0] != models[1]
