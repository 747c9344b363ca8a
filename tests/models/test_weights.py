"""Checkpoints on disk: the layouts that load, and the one line said about those that do not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm.config import ConfigError, Load
from nanovllm.models import weights
from nanovllm.models.weights import destinations
from nanovllm.parallel.mesh import Mesh
from tests.models.steps import MAX_TOKENS, load
from tests.models.tiny import make_tiny

GATE = "model.layers.0.mlp.gate_proj.weight"
HUGE_PAGE = 2 << 20  # bytes: the most that is mapped beside the end of what is read
Checkpoint = dict[str, Tensor]


def edit(folder: Path, change: Callable[[Checkpoint], object]) -> None:
    checkpoint = load_file(folder / "model.safetensors")
    change(checkpoint)
    save_file(checkpoint, folder / "model.safetensors")


def line_of(folder: Path) -> str:
    """What the user is told, with the folder's path as FOLDER."""
    with pytest.raises(ConfigError) as caught:
        load(folder)
    line = str(caught.value)
    assert "\n" not in line
    return line.replace(str(folder), "FOLDER")


def test_fused_parameters_hold_their_parts_in_order(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3")
    model, checkpoint = load(tmp_path), load_file(tmp_path / "model.safetensors")
    attn = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    assert torch.equal(
        model.get_parameter("layers.1.attn.qkv.weight"),
        torch.cat([checkpoint[name] for name in attn]),
    )
    mlp = [f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up")]
    assert torch.equal(
        model.get_parameter("layers.1.mlp.gate_up.weight"),
        torch.cat([checkpoint[name] for name in mlp]),
    )


@pytest.mark.parametrize("with_index", [True, False])
def test_many_files_load_as_one_does(with_index: bool, tmp_path: Path) -> None:
    make_tiny(tmp_path / "one", "qwen3")
    make_tiny(tmp_path / "many", "qwen3", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    if not with_index:
        (tmp_path / "many/model.safetensors.index.json").unlink()
    one, many = load(tmp_path / "one"), load(tmp_path / "many")
    for (name, expected), (_, got) in zip(
        one.named_parameters(), many.named_parameters(), strict=True
    ):
        assert torch.equal(got, expected), name


def test_weights_are_rounded_to_the_dtype_and_the_rope_table_is_not(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3")
    exact, rounded = load(tmp_path), load(tmp_path, dtype=torch.bfloat16)
    for (name, expected), (_, got) in zip(
        exact.named_parameters(), rounded.named_parameters(), strict=True
    ):
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, expected.bfloat16()), name
    assert torch.equal(rounded.cos_sin_LA, exact.cos_sin_LA)
    assert rounded.cos_sin_LA.dtype == torch.float32
    assert len(rounded.cos_sin_LA) == MAX_TOKENS
    assert torch.get_default_dtype() == torch.float32


def test_tensors_nobody_needs_are_ignored_by_name(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3", tie_word_embeddings=True)
    plain = load(tmp_path)
    extra = {
        "lm_head.weight": torch.full((200, 64), torch.nan),
        "model.layers.1.self_attn.rotary_emb.inv_freq": torch.full((8,), torch.nan),
    }
    edit(tmp_path, lambda checkpoint: checkpoint.update(extra))
    model = load(tmp_path)
    assert torch.equal(model.head.weight, plain.embed.weight)
    assert model.head is model.embed


def test_missing_tensor(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    edit(tmp_path, lambda checkpoint: checkpoint.pop(GATE))
    assert line_of(tmp_path) == f"FOLDER/model.safetensors: missing tensor {GATE}"
    edit(tmp_path, lambda checkpoint: checkpoint.pop("lm_head.weight"))
    assert (
        line_of(tmp_path) == "FOLDER/model.safetensors: missing tensor lm_head.weight, and 1 more"
    )


def test_unexpected_tensor(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    name = "model.layers.0.self_attn.q_norm.weight"
    edit(tmp_path, lambda checkpoint: checkpoint.update({name: torch.ones(16)}))
    assert line_of(tmp_path) == f"FOLDER/model.safetensors: unexpected tensor {name}"


def test_a_layer_beyond_the_config_is_unexpected(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    name = "model.layers.2.input_layernorm.weight"
    edit(tmp_path, lambda checkpoint: checkpoint.update({name: torch.ones(64)}))
    assert line_of(tmp_path) == f"FOLDER/model.safetensors: unexpected tensor {name}"


@pytest.mark.parametrize(
    "name, shape, expected",
    [
        (GATE, (95, 64), [96, 64]),
        ("model.layers.1.mlp.down_proj.weight", (96, 64), [64, 96]),
        ("model.norm.weight", (64, 1), [64]),
        ("model.layers.1.self_attn.k_proj.weight", (64, 64), [32, 64]),
    ],
)
def test_wrong_shape(
    name: str, shape: tuple[int, ...], expected: list[int], tmp_path: Path
) -> None:
    make_tiny(tmp_path, "llama")
    edit(tmp_path, lambda checkpoint: checkpoint.update({name: torch.zeros(shape)}))
    said = f"tensor {name} has shape {list(shape)}, expected {expected}"
    assert line_of(tmp_path) == f"FOLDER/model.safetensors: {said}"


def test_the_same_tensor_in_two_files(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    whole = tmp_path / "model.safetensors"
    save_file({GATE: load_file(whole)[GATE]}, tmp_path / "b.safetensors")
    whole.rename(tmp_path / "a.safetensors")
    assert line_of(tmp_path) == f"FOLDER/b.safetensors: tensor {GATE} was in another file already"


def test_truncated_file(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    whole = tmp_path / "model.safetensors"
    whole.write_bytes(whole.read_bytes()[:-1000])
    assert line_of(tmp_path) == (
        "FOLDER/model.safetensors is not a whole safetensors file: "
        "Error while deserializing header: incomplete metadata, file not fully covered"
    )


@pytest.mark.parametrize("content", [b"", b"garbage that is longer than a header's length field"])
def test_corrupt_file(content: bytes, tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes(content)
    assert line_of(tmp_path).startswith(
        "FOLDER/model.safetensors is not a whole safetensors file: "
    )


def test_index_names_a_file_that_is_not_there(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama", max_shard_size="60KB")
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    (tmp_path / names[1]).unlink()
    said = f"names {names[1]}, which is not there"
    assert line_of(tmp_path) == f"FOLDER/model.safetensors.index.json: {said}"


@pytest.mark.parametrize(
    "content, said",
    [
        ("{", "Input data was truncated"),
        ("{}", "Object missing required field `weight_map`"),
    ],
)
def test_broken_index(content: str, said: str, tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert line_of(tmp_path) == f"FOLDER/model.safetensors.index.json: {said}"


def test_missing_without_an_index_names_the_folder(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama", max_shard_size="60KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    next(path for path in tmp_path.glob("*.safetensors") if GATE in load_file(path)).unlink()
    assert line_of(tmp_path).startswith("FOLDER: missing tensor model.layers.0.")


def test_a_shard_without_its_tensor(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama", max_shard_size="60KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    path = tmp_path / index["weight_map"][GATE]
    shard = load_file(path)
    del shard[GATE]
    save_file(shard, path)
    assert line_of(tmp_path) == f"FOLDER/model.safetensors.index.json: missing tensor {GATE}"


def test_no_weights_at_all(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    assert line_of(tmp_path) == (
        "FOLDER has no *.safetensors; --load-format dummy runs without weights"
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_dummy_weights_are_the_same_over_any_number_of_ranks(
    tp: int, tied: bool, tmp_path: Path
) -> None:
    make_tiny(tmp_path, "qwen3", vocab_size=5003, tie_word_embeddings=tied)
    how = Load(format="dummy", seed=3)
    whole = load(tmp_path, how=how)
    for rank in range(tp):
        mesh = Mesh(rank, tp)
        model = load(tmp_path, mesh, how=how)
        for name, share in destinations(model, model.WEIGHTS).items():
            into = destinations(whole, whole.WEIGHTS)[name].into
            assert torch.equal(share.into, into.narrow(share.dim, share.start, share.count)), name


def resident(path: Path) -> int:
    """Bytes of the file that this process has touched where it is mapped."""
    found, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            is_ours = line.endswith(str(path))
        elif is_ours and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_reads_its_share_of_a_file_alone(
    tp: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It touches pages of embedding and head, nearly all of this file, that its rows lie on."""
    make_tiny(tmp_path, "llama", vocab_size=65536)
    path = tmp_path / "model.safetensors"
    touched: list[int] = []

    @contextmanager
    def watched(*args: object, **more: object) -> Iterator[object]:
        with safe_open(*args, **more) as file:
            yield file
            touched.append(resident(path))

    monkeypatch.setattr(weights, "safe_open", watched)
    caplog.set_level("INFO", "engine")
    for rank in range(tp):
        model = load(tmp_path, Mesh(rank, tp))
        wanted = destinations(model, model.WEIGHTS).values()
        share = sum(to.into.nbytes for to in wanted if to.into.nbytes > HUGE_PAGE)
        assert share * tp == 32 << 20
        assert share < touched[rank] < share + 4 * HUGE_PAGE
    total = {1: "0.03", 2: "0.02", 4: "0.01"}[tp]  # of what a rank is told that it loads
    assert caplog.messages.count(f"loading {tmp_path}: {total} GB") == tp


def test_dummy_weights_come_from_the_seed(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3")
    (tmp_path / "model.safetensors").unlink()
    one, same, other = (
        dict(load(tmp_path, how=Load(format="dummy", seed=seed)).named_parameters())
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["embed.weight"], other["embed.weight"])
    assert torch.equal(one["layers.0.attn.q_norm"], torch.ones(16))
    assert torch.equal(one["norm.weight"], torch.ones(64))
    for name, weight in one.items():
        if weight.ndim == 2:
            scale = weight.std() * weight.shape[1] ** 0.5
            assert 0.95 < scale < 1.05, f"{name} is scaled by {scale:.2f}"
