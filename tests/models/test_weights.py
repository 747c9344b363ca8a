"""Checkpoints on disk: supported layouts, and one-line refusals of others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm.config import ConfigError, Kernels
from nanovllm.layers.experts.router import Router
from nanovllm.layers.kernels import select_ops
from nanovllm.models import shards, weights
from nanovllm.models.config import read_model_config
from nanovllm.models.shards import read
from nanovllm.parallel.mesh import Mesh
from tests.models.steps import CPU, MAX_TOKENS, fill, load
from tests.models.test_quantised import quantise_files
from tests.models.tiny import CASES, config_of, make_tiny

GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.{}.mlp.up_proj.weight"
Checkpoint = dict[str, Tensor]


def edit(folder: Path, change: Callable[[Checkpoint], object]) -> None:
    checkpoint = load_file(folder / "model.safetensors")
    change(checkpoint)
    save_file(checkpoint, folder / "model.safetensors")


def line_of(folder: Path) -> str:
    """Return the error message, with the folder's path as FOLDER."""
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
        "lm_head.weight": plain.embed.weight,
        "model.layers.1.self_attn.rotary_emb.inv_freq": torch.full((8,), torch.nan),
        "model.rotary_emb.inv_freq": torch.full((8,), torch.nan),
    }
    edit(tmp_path, lambda checkpoint: checkpoint.update(extra))
    model = load(tmp_path)
    assert torch.equal(model.head.weight, plain.embed.weight)
    assert model.head is model.embed


@pytest.mark.parametrize(
    "scale", [torch.ones(1, dtype=torch.int64), torch.ones((), dtype=torch.float64), torch.ones(0)]
)
def test_a_scale_of_the_cache_that_is_none(scale: Tensor, tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    name = "model.layers.1.self_attn.v_scale"
    edit(tmp_path, lambda checkpoint: checkpoint.update({name: torch.tensor(0.5)}))
    assert load(tmp_path).layers[1].attn.attend.scales_2G[1].tolist() == [0.5, 0.5]  # type: ignore[union-attr]
    edit(tmp_path, lambda checkpoint: checkpoint.update({name: scale}))
    assert line_of(tmp_path) == f"{name} is not a positive number for one of the model's layers"


def test_missing_tensors(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    said = "FOLDER/model.safetensors does not fit the model: "
    edit(tmp_path, lambda checkpoint: checkpoint.pop(GATE))
    assert line_of(tmp_path) == f"{said}1 tensor missing: {GATE}"
    edit(tmp_path, lambda checkpoint: checkpoint.pop("lm_head.weight"))
    assert line_of(tmp_path) == f"{said}2 tensors missing: {GATE}, lm_head.weight"
    edit(tmp_path, lambda checkpoint: [checkpoint.pop(UP.format(layer)) for layer in (0, 1)])
    assert line_of(tmp_path) == (
        f"{said}4 tensors missing: {GATE}, {UP.format(0)}, {UP.format(1)}, ..."
    )


def test_unexpected_tensor(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    name = "model.layers.0.self_attn.q_norm.weight"
    edit(tmp_path, lambda checkpoint: checkpoint.update({name: torch.ones(16)}))
    assert line_of(tmp_path) == (
        "FOLDER/model.safetensors does not fit the model: "
        f"1 tensor unexpected: {name} in model.safetensors"
    )


def test_everything_that_is_amiss_is_told_at_once(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    wrong: Checkpoint = {
        GATE: torch.zeros(95, 64),
        UP.format(0): torch.zeros(96, 64).to(torch.float8_e4m3fn),
        UP.format(1): torch.zeros(96, 64, dtype=torch.int32),
        "model.norm.weight": torch.zeros(65, dtype=torch.int32),
        "model.norm.bias": torch.zeros(64),
    }
    edit(tmp_path, lambda checkpoint: [checkpoint.update(wrong), checkpoint.pop("lm_head.weight")])
    save_file({UP.format(0): torch.zeros(96, 64)}, tmp_path / "b.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    floats, where = "expected BF16 or F16 or F32", "in a.safetensors"
    assert set(line_of(tmp_path).removeprefix("FOLDER does not fit the model: ").split("; ")) == {
        f"2 tensors with a wrong shape: {GATE} {where} is [95, 64], expected [96, 64], "
        f"model.norm.weight {where} is [65], expected [64]",
        f"3 tensors with a wrong type: {UP.format(0)} {where} is F8_E4M3, {floats}, "
        f"{UP.format(1)} {where} is I32, {floats}, model.norm.weight {where} is I32, {floats}",
        f"1 tensor unexpected: model.norm.bias {where}",
        f"1 tensor duplicated: {UP.format(0)} in b.safetensors and a.safetensors",
        "1 tensor missing: lm_head.weight",
    }


def test_layers_that_do_not_run_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_tiny(tmp_path, "llama")
    plain = load(tmp_path)
    names = ["model.layers.2.enorm.weight", "model.layers.17.mlp.experts.0.up_proj.weight"]
    extra = {name: torch.ones(3, dtype=torch.int8) for name in (*names, "mtp.fc.weight")}
    edit(tmp_path, lambda checkpoint: checkpoint.update(extra))
    caplog.set_level("INFO", "engine")
    model = load(tmp_path)
    said = "left out 3 tensors of layers after the model's last (later ones, or MTP)"
    assert caplog.messages.count(said) == 1
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name)), name


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
    said = f"{name} in model.safetensors is {list(shape)}, expected {expected}"
    assert line_of(tmp_path) == (
        f"FOLDER/model.safetensors does not fit the model: 1 tensor with a wrong shape: {said}"
    )


def test_the_same_tensor_in_two_files(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    whole = tmp_path / "model.safetensors"
    save_file({GATE: load_file(whole)[GATE]}, tmp_path / "b.safetensors")
    whole.rename(tmp_path / "a.safetensors")
    assert line_of(tmp_path) == (
        f"FOLDER does not fit the model: 1 tensor duplicated: {GATE} in b.safetensors and "
        "a.safetensors"
    )


def test_truncated_file(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    whole = tmp_path / "model.safetensors"
    whole.write_bytes(whole.read_bytes()[:-1000])
    size = whole.stat().st_size
    assert line_of(tmp_path) == (
        "FOLDER/model.safetensors is not a complete safetensors file: "
        f"it has {size} bytes; its header requires {size + 1000}"
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage that is longer than a header's length field",
        b'\x08\0\0\0\0\0\0\0{"\xe9":1}',  # not UTF-8
        (100_000).to_bytes(8, "little") + b'{"a":' + b"[" * 99_995,
    ],
)
def test_corrupt_file(content: bytes, tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes(content)
    assert line_of(tmp_path).startswith(
        "FOLDER/model.safetensors is not a complete safetensors file: "
    )


def test_index_names_a_file_that_is_not_there(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama", max_shard_size="60KB")
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    (tmp_path / names[1]).unlink()
    said = f"names {names[1]}, which does not exist"
    assert line_of(tmp_path) == f"FOLDER/model.safetensors.index.json: {said}"


@pytest.mark.parametrize(
    "content, said",
    [
        ("{", "Input data was truncated"),
        ("{}", "Object missing required field `weight_map`"),
        (
            f'{{"weight_map": {{"a": "{"x" * 300}"}}}}',
            f"[Errno 36] File name too long: 'FOLDER/{'x' * 300}'",
        ),
    ],
)
def test_broken_index(content: str, said: str, tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors.index.json").write_text(content, "latin-1")
    assert line_of(tmp_path) == f"FOLDER/model.safetensors.index.json: {said}"


def test_an_index_in_another_encoding(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "\xe9"}}', "latin-1")
    said = line_of(tmp_path)
    assert said.startswith("FOLDER/model.safetensors.index.json: ") and "utf-8" in said.lower()


def test_missing_without_an_index_names_the_folder(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama", max_shard_size="60KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    next(path for path in tmp_path.glob("*.safetensors") if GATE in load_file(path)).unlink()
    assert re.match(r"FOLDER does not fit the model: \d+ tensors? missing: ", line_of(tmp_path))


def test_a_shard_without_its_tensor(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama", max_shard_size="60KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    path = tmp_path / index["weight_map"][GATE]
    shard = load_file(path)
    del shard[GATE]
    save_file(shard, path)
    assert line_of(tmp_path) == (
        f"FOLDER/model.safetensors.index.json does not fit the model: 1 tensor missing: {GATE}"
    )


def test_no_weights_at_all(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    assert line_of(tmp_path) == (
        "FOLDER has no *.safetensors; --load-format dummy runs without weights"
    )


def test_the_first_layers_of_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_tiny(tmp_path, "qwen3")
    everything = load(tmp_path)
    config = config_of(tmp_path)
    config = replace(config, recipe=replace(config.recipe, num_layers=1))
    family, model_config = read_model_config(config)
    model = family(model_config, Mesh(), select_ops(Kernels(), CPU), MAX_TOKENS)
    caplog.set_level("INFO", "engine")
    fill(model, config)
    assert any(line.startswith("left out 11 tensors of layers") for line in caplog.messages)
    found = dict(model.named_parameters())
    assert found.keys() == {
        name for name, _ in everything.named_parameters() if not name.startswith("layers.1.")
    }
    for name, parameter in found.items():
        assert torch.equal(parameter, everything.get_parameter(name)), name


def bytes_read() -> int:
    """Return the number of bytes that this process has read."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_reads_its_share_of_a_file_alone(
    tp: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Embedding and head are nearly all of this file, and a rank reads only its rows."""
    make_tiny(tmp_path, "llama", vocab_size=65536)
    caplog.set_level("INFO", "engine")
    for rank in range(tp):
        before = bytes_read()
        load(tmp_path, Mesh(rank, tp))
        share = (32 << 20) // tp
        assert share < bytes_read() - before < share + (1 << 20)
    total = {1: "0.03", 2: "0.02", 4: "0.01"}[tp]  # bytes that a rank loads, as logged
    assert caplog.messages.count(f"loading {tmp_path}: {total} GB") == tp


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_a_rank_reads_its_own_experts_alone(ep: int, tmp_path: Path) -> None:
    sizes = dict(num_experts=8, moe_intermediate_size=512, num_experts_per_tok=2)
    make_tiny(tmp_path, "qwen3_moe", **sizes)
    experts = 2 * 8 * 3 * 512 * 64 * 4  # layers, experts, tensors, bytes per tensor
    rest = (tmp_path / "model.safetensors").stat().st_size - experts
    for rank in range(ep):
        before = bytes_read()
        load(tmp_path, Mesh(rank, ep, ep_size=ep))
        read = bytes_read() - before
        assert experts // ep < read < experts // ep + rest + (1 << 20)


SHARED_BY_TWO = ("k_proj", "v_proj")  # two heads over four ranks, two copies of each


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_rank_takes_its_rows_and_its_columns_alone(
    tp: int, quantised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staged bytes are counted. Only those of whole rows are read by system calls."""
    monkeypatch.setattr(shards, "GAP", 0)
    sizes = dict(hidden_size=256, num_attention_heads=8, head_dim=64, intermediate_size=2048)
    make_tiny(tmp_path, "qwen3", vocab_size=8192, num_key_value_heads=2, **sizes)
    if quantised:
        quantise_files(tmp_path, torch.float32)
    rows = columns = 0
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        kept = 1 if tensor.ndim == 1 else 2 if name.split(".")[-2] in SHARED_BY_TWO else tp
        if "o_proj.weight" in name or "down_proj.weight" in name:
            columns += tensor.nbytes // kept
        else:
            rows += tensor.nbytes // kept
    staged: list[int] = []
    monkeypatch.setattr(
        weights, "read", lambda *given: (staged.append(n) or n for n in read(*given))
    )
    for rank in range(tp):
        staged.clear()
        before = bytes_read()
        model = load(tmp_path, Mesh(rank, tp))
        assert (
            rows + columns <= sum(staged) < rows + columns + 1000
        )  # plus scales of blocks that two ranks share
        assert rows < bytes_read() - before < rows + 100_000  # and headers
        for name, parameter in load(tmp_path).named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                share = parameter.chunk(tp, 1)[rank]
                assert torch.equal(model.get_parameter(name).float(), share.float()), name


@pytest.mark.parametrize("family", ["minimax_m2", "deepseek_v3"])
def test_routers_have_their_parts_once_weights_are_loaded(family: str, tmp_path: Path) -> None:
    """The parts exist before the first step of any engine, so sizing counts their memory."""
    make_tiny(tmp_path, family, **CASES[family][1])
    model = load(tmp_path, dtype=torch.bfloat16)
    routers = [module for module in model.modules() if isinstance(module, Router)]
    assert routers
    for router in routers:
        assert router.weight.dtype == torch.float32
        assert torch.equal(router.parts_IED.double().sum(0).float(), router.weight)
