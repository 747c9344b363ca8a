"""Block fp8 from fp8 files, or quantised during loading, over any number of ranks."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from nanovllm_kernels.fp8_reference import FP8, Scaled, quantise_weight
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nanovllm.config import ConfigError, Kernels, Load
from nanovllm.layers.kernels import select_ops
from nanovllm.layers.linear import Linear, Placement
from nanovllm.models import shards
from nanovllm.models.config import read_model_config
from nanovllm.models.decoder import Decoder
from nanovllm.models.destination import Destination
from nanovllm.models.quantised import in_blocks
from nanovllm.models.shards import Stored, num_bytes, pieces_of, runs
from nanovllm.models.weights import default_dtype, destinations
from nanovllm.parallel.mesh import Mesh, Span
from tests.models.steps import fill
from tests.models.test_stacked import RULES, places_of
from tests.models.tiny import config_of, make_tiny
from tests.times import done_within

CPU = torch.device("cpu")
SIZES = dict(  # a rank's rows of q, k and v are no whole blocks, nor is the hidden size
    hidden_size=192, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4,
    head_dim=64,
)  # fmt: skip
FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128]}
KEPT = "model.layers.1.mlp.down_proj"


def load(folder: Path, mesh: Mesh = Mesh(), **more: object) -> Decoder:
    config = config_of(folder)
    config = replace(config, recipe=replace(config.recipe, **more))
    family, model_config = read_model_config(config)
    with CPU, default_dtype(torch.float32):
        model = family(model_config, mesh, select_ops(Kernels(), CPU), 64)
    fill(model, config)
    return model


def linears(model: Decoder) -> dict[str, Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear)}


def is_product(name: str) -> bool:
    return name.startswith("model.layers.") and name.endswith("_proj.weight")


def quantise_files(
    folder: Path,
    scale_dtype: torch.dtype,
    kept: tuple[str, ...] = (),
    key: str = "modules_to_not_convert",
) -> None:
    """Convert the checkpoint to block fp8 as found on the Hub."""
    path, found = folder / "model.safetensors", {}
    for name, tensor in load_file(path).items():
        found[name] = tensor
        if is_product(name) and name.removesuffix(".weight") not in kept:
            found[name], scales = quantise_weight(tensor)
            found[f"{name}_scale_inv"] = scales.to(scale_dtype)
    save_file(found, path)
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {**FP8_CONFIG, key: list(kept)}
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    "scale_dtype, key",
    [(torch.float32, "modules_to_not_convert"), (torch.bfloat16, "ignored_layers")],
)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_has_its_rows_of_numbers_and_of_scales(
    tp: int, scale_dtype: torch.dtype, key: str, tmp_path: Path
) -> None:
    make_tiny(tmp_path, "qwen3", **SIZES)
    quantise_files(tmp_path, scale_dtype, (KEPT,), key)
    stored = load_file(tmp_path / "model.safetensors")

    def whole(name: str) -> Tensor:
        scale = stored.get(f"{name}_scale_inv")
        return stored[name] if scale is None else Scaled(stored[name], scale.float()).dequantised()

    for rank in range(tp):
        found = linears(load(tmp_path, Mesh(rank, tp)))
        for layer in (0, 1):
            for target, sources in {
                "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                "attn.out": ("self_attn.o_proj",),
                "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
                "mlp.down": ("mlp.down_proj",),
            }.items():
                linear = found[f"layers.{layer}.{target}"]
                dim = linear.placements["weight"].dim
                parts = [
                    whole(f"model.layers.{layer}.{source}.weight").chunk(tp, dim)[rank]
                    for source in sources
                ]
                operand = linear.operand
                got = operand.dequantised() if isinstance(operand, Scaled) else operand
                assert torch.equal(got, torch.cat(parts)), f"layer {layer} {target}"
                is_kept = f"model.layers.{layer}.{sources[0]}" == KEPT
                assert (linear.weight.dtype == FP8) is not is_kept
        assert found["layers.0.attn.qkv"].operand.block_rows == (64 if tp == 4 else 128)


@pytest.mark.parametrize("staging", [1000, 1 << 20])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_what_is_made_while_loading_is_what_files_would_have(
    tp: int, staging: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One case has staging memory for a row of blocks only."""
    for name in ("plain", "fp8"):
        make_tiny(tmp_path / name, "qwen3", **SIZES)
    quantise_files(tmp_path / "fp8", torch.float32)
    monkeypatch.setattr(shards, "STAGING", staging)
    for rank in range(tp):
        made = load(tmp_path / "plain", Mesh(rank, tp), quantize="fp8")
        stored = dict(load(tmp_path / "fp8", Mesh(rank, tp)).named_parameters())
        assert stored.keys() == dict(made.named_parameters()).keys()
        for name, parameter in made.named_parameters():
            assert torch.equal(parameter.float(), stored[name].float()), name


@pytest.mark.parametrize("tp", [2, 4])
def test_dummies_are_the_same_over_any_number_of_ranks(tp: int, tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3", **SIZES)
    more = dict(load=Load(format="dummy", seed=3), quantize="fp8")
    everything = load(tmp_path, **more)
    exact = load(tmp_path, load=Load(format="dummy", seed=3))
    for name, linear in linears(everything).items():
        if isinstance(linear.operand, Scaled):
            error = (linear.operand.dequantised() - linears(exact)[name].weight).abs().max()
            assert error < 0.07 * linears(exact)[name].weight.abs().max(), name
    down = linears(everything)["layers.1.mlp.down"].operand.dequantised()
    for rank in range(tp):
        share = linears(load(tmp_path, Mesh(rank, tp), **more))["layers.1.mlp.down"]
        assert torch.equal(share.operand.dequantised(), down.chunk(tp, 1)[rank])


def test_a_checkpoint_without_scales_is_not_taken_for_fp8(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3", **SIZES)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": FP8_CONFIG}))
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert "; 14 tensors missing: model.layers.0.self_attn.q_proj.weight_scale_inv" in str(
        caught.value
    )
    assert (
        "14 tensors with a wrong type: model.layers.0.mlp.down_proj.weight in model.safetensors is "
        "F32, expected F8_E4M3, "
    ) in str(caught.value)


def test_fp8_is_not_taken_for_a_plain_checkpoint(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3", **SIZES)
    raw = (tmp_path / "config.json").read_text()
    quantise_files(tmp_path, torch.float32)
    with pytest.raises(
        ConfigError, match=r"quantize is fp8, but .*config\.json is already quantised"
    ):
        load(tmp_path, quantize="fp8")
    (tmp_path / "config.json").write_text(raw)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert "is F8_E4M3, expected BF16 or F16 or F32, " in str(caught.value)
    assert "14 tensors unexpected: model.layers.0.mlp.down_proj.weight_scale_inv" in str(
        caught.value
    )


class Experts(nn.Module):
    """Parameters of stacked experts, as in layers/experts/moe.py."""

    def __init__(self, experts: Span, inner: Span, hidden_size: int) -> None:
        super().__init__()
        num_experts, width = experts.count, inner.count

        def empty(dtype: torch.dtype, *shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

        rows, columns = -(-width // 128), -(-hidden_size // 128)
        self.gate_up = empty(FP8, num_experts, 2 * width, hidden_size)
        self.gate_up_scale = empty(torch.float32, num_experts, 2 * rows, columns)
        self.down = empty(FP8, num_experts, hidden_size, width)
        self.down_scale = empty(torch.float32, num_experts, columns, rows)
        blocks = Span(-(-inner.full // 128), inner.start // 128, rows)
        places = places_of(experts)
        self.placements = {
            "gate_up": Placement(0, (("gate", inner), ("up", inner)), places),
            "gate_up_scale": Placement(0, (("gate", blocks), ("up", blocks)), places),
            "down": Placement(1, (("", inner),), places),
            "down_scale": Placement(1, (("", blocks),), places),
        }


def deliver(tensor: Tensor, to: Destination) -> None:
    """Pass a tensor in pieces, as if read from a file."""
    dtype = next(name for name, known in shards.DTYPES.items() if known == tensor.dtype)
    for piece in pieces_of(Stored(Path(), 0, tensor.nbytes, dtype, tuple(tensor.shape)), to):
        to.take(tensor[piece.first :][: piece.rows.shape[0]], piece.first)


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("tp, ep, inner", [(1, 1, 320), (2, 1, 256), (4, 1, 512), (2, 2, 200)])
def test_experts_have_scales_of_their_own(
    tp: int, ep: int, inner: int, made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_experts, hidden_size = 4, 136
    generator = torch.Generator().manual_seed(1)
    plain = {
        f"model.layers.0.mlp.experts.{e}.{part}_proj.weight": torch.randn(
            (hidden_size, inner) if part == "down" else (inner, hidden_size), generator=generator
        )
        for e in range(num_experts)
        for part in ("gate", "up", "down")
    }
    stored = {name: quantise_weight(tensor) for name, tensor in plain.items()}
    monkeypatch.setattr(shards, "STAGING", 128 * hidden_size)
    for rank in range(tp):
        own = Mesh(rank, tp).span("experts", num_experts) if ep > 1 else Span(4, 0, 4)
        cut = Span(inner, 0, inner) if ep > 1 else Mesh(rank, tp).span("inner", inner)
        experts, model = Experts(own, cut, hidden_size), nn.Module()
        model.layers = nn.ModuleList([nn.ModuleDict({"experts": experts})])
        rules = [rule for rule in RULES if "experts" in rule[1]]
        wanted = in_blocks(destinations(model, rules), made=made)
        assert len(wanted) == 12 if made else 24
        for name, to in wanted.items():
            if made:
                deliver(plain[name], to)
            else:
                numbers, scales = stored[name.removesuffix("_scale_inv")]
                deliver(scales if name.endswith("_scale_inv") else numbers, to)
        for at, e in enumerate(range(own.start, own.start + own.count)):
            gate, up, down = (
                Scaled(*stored[f"model.layers.0.mlp.experts.{e}.{part}_proj.weight"]).dequantised()
                for part in ("gate", "up", "down")
            )
            taken = slice(cut.start, cut.start + cut.count)
            rows = experts.gate_up_scale.shape[1] // 2
            for part, expected in enumerate((gate, up)):
                got = Scaled(
                    experts.gate_up[at].chunk(2)[part],
                    experts.gate_up_scale[at, rows * part : rows * (part + 1)],
                ).dequantised()
                assert torch.equal(got, expected[taken]), f"expert {e}"
            got = Scaled(experts.down[at], experts.down_scale[at]).dequantised()
            assert torch.equal(got, down[:, taken]), f"expert {e}"


def test_scales_of_a_hundred_thousand_tensors_are_planned_at_once() -> None:
    """Planning covers the scales of MiniMax-M2's experts, and the grouping of reads."""
    whole = Span(1536, 0, 1536)
    with torch.device("meta"):
        layers = [{"experts": Experts(Span(256, 64, 64), whole, 3072)} for _ in range(62)]
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleDict(layer) for layer in layers)

    def plan() -> tuple[dict[str, Destination], list[list[shards.Piece]]]:
        wanted = in_blocks(destinations(model, [r for r in RULES if "experts" in r[1]]), made=False)
        stored, at = {}, 0
        for name, to in wanted.items():
            dtype = "F32" if name.endswith("_scale_inv") else "F8_E4M3"
            size = prod(to.shape) * shards.DTYPES[dtype].itemsize
            stored[name] = Stored(Path("a"), at, at + size, dtype, to.shape)
            at += size
        return wanted, runs((stored[name], to) for name, to in wanted.items())

    wanted, order = done_within(8, plan)  # 2 s
    assert len(wanted) == 62 * 256 * 6
    own = sum(tensor.nbytes for tensor in model.parameters())
    assert own <= sum(map(num_bytes, order)) < 1.01 * own
