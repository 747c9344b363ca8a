"""Qwen3-Next's checkpoints: fp8, shards, ignored tensors, refusals, and state sizes."""

from __future__ import annotations

import json
import logging
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from nanovllm_kernels.fp8_reference import FP8, Scaled, quantise_weight
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm.config import ConfigError, Load, load_config
from nanovllm.models.config import read_model_config
from nanovllm.models.qwen3_next import Qwen3Next
from nanovllm.parallel.cut import check_cut
from nanovllm.parallel.mesh import Mesh
from tests.models.steps import Steps, load
from tests.models.test_parity import LENGTHS, SCHEDULES, our_logits, prompts
from tests.models.tiny import NEXT, config_of, make_tiny
from tests.parallel.test_mesh import Meeting, ThreadMesh
from tests.whole_engine import WholeEngine, prompts_of

SIZES = dict(  # heads share blocks of 128, and ranks' shares begin at block boundaries
    NEXT, hidden_size=256, num_experts=6, head_dim=64, linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=64,
    shared_expert_intermediate_size=256,
)  # fmt: skip
KEPT = "embed", "lm_head", "norm", ".gate.", "in_proj_ba", "conv1d", "A_log", "dt_bias", "_gate."


def checkpoints(folder: Path, inner: int) -> tuple[Path, Path]:
    """Save a checkpoint in block fp8 as on the Hub, and one of the same values in float32."""
    plain, blocks = folder / "plain", folder / "blocks"
    for made in (plain, blocks):
        make_tiny(made, "qwen3_next", **{**SIZES, "moe_intermediate_size": inner})
    numbers = load_file(plain / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, tensor in list(numbers.items()):
        stored[name] = tensor
        if not any(word in name for word in KEPT):
            stored[name], stored[f"{name}_scale_inv"] = quantise_weight(tensor)
            numbers[name] = Scaled(stored[name], stored[f"{name}_scale_inv"]).dequantised()
    save_file(numbers, plain / "model.safetensors")
    save_file(stored, blocks / "model.safetensors")
    raw = json.loads((blocks / "config.json").read_text())
    raw["quantization_config"] = dict(
        activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128],
        modules_to_not_convert=[
            "lm_head", *(f"model.layers.{layer}.linear_attn.in_proj_ba" for layer in range(3)),
            *(f"model.layers.{layer}.mlp.shared_expert_gate" for layer in range(4)),
            *(f"model.layers.{layer}.input_layernorm" for layer in range(4)),
        ],
    )  # fmt: skip
    (blocks / "config.json").write_text(json.dumps(raw))
    return plain, blocks


@pytest.mark.parametrize(("tp", "ep", "inner"), [(1, 1, 136), (2, 1, 256), (2, 2, 72)])
def test_fp8_is_the_dequantised_model(tp: int, ep: int, inner: int, tmp_path: Path) -> None:
    plain, blocks = checkpoints(tmp_path, inner)
    expected = our_logits(Steps(plain, load(plain), prompts(), Mesh()), [LENGTHS])
    meeting = Meeting(tp)
    meshes = [ThreadMesh(rank, tp, meeting, ep_size=ep) for rank in range(tp)]
    models = [load(blocks, mesh) for mesh in meshes]
    attn = models[-1].layers[0].attn
    assert attn.qkvz.weight.dtype == FP8 and attn.ba.weight.dtype == torch.float32
    assert attn.qkvz.weight_scale.shape == ((64 + 64 + 256 + 256) // tp // 32, 2)

    def run(rank: int) -> list[Tensor]:
        steps = Steps(blocks, models[rank], prompts(), meshes[rank])
        return our_logits(steps, SCHEDULES["one late"])

    with ThreadPoolExecutor(tp) as pool:
        found = list(pool.map(run, range(tp)))
    for row, logits in enumerate(expected):
        torch.testing.assert_close(found[0][row], logits, rtol=1e-4, atol=5e-4)


def test_weights_made_fp8_are_those_of_an_fp8_checkpoint(tmp_path: Path) -> None:
    make_tiny(tmp_path / "whole", "qwen3_next", **{**SIZES, "moe_intermediate_size": 136})
    _, blocks = checkpoints(tmp_path, 136)
    made = config_of(tmp_path / "whole")
    made = replace(made, recipe=replace(made.recipe, quantize="fp8"))
    texts = []
    for config in (made, config_of(blocks)):
        engine = WholeEngine(config)
        for i, prompt in enumerate(prompts_of(4)):
            engine.submit(i, prompt, 12)
        engine.run()
        texts.append(engine.text)
    assert texts[0] == texts[1] and len(texts[0][3]) == 12


def test_shares_of_blocks_are_refused(tmp_path: Path) -> None:
    overrides = {**SIZES, "moe_intermediate_size": 256, "linear_value_head_dim": 32}
    make_tiny(tmp_path, "qwen3_next", **overrides)
    config = config_of(tmp_path)
    config = replace(config, recipe=replace(config.recipe, quantize="fp8"))
    with pytest.raises(ConfigError) as caught:
        check_cut(Mesh(0, 2), read_model_config(config)[1])
    assert str(caught.value) == (
        "parallel.tp is 2; it would cut the model's linear_num_key_heads 2 into shares of 64 "
        "inputs of weights in fp8, and 64 is not a multiple of 128; it can be 1"
    )


def test_tensors_of_mtp_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_tiny(tmp_path, "qwen3_next", **NEXT)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    mtp = {
        "mtp.fc.weight": torch.zeros(64, 128),
        "mtp.norm.weight": torch.zeros(64),
        "mtp.layers.0.self_attn.q_proj.weight": torch.zeros(128, 64),
        "mtp.layers.0.mlp.experts.3.up_proj.weight": torch.zeros(20, 64),
    }
    expected = our_logits(Steps(tmp_path, load(tmp_path), prompts(), Mesh()), [LENGTHS])
    save_file({**tensors, **mtp}, path)
    with caplog.at_level(logging.INFO, "engine"):
        found = our_logits(Steps(tmp_path, load(tmp_path), prompts(), Mesh()), [LENGTHS])
    assert "left out 4 tensors of layers after the model's last (later ones, or MTP)" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_is_amiss_in_a_checkpoint_is_told(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3_next", **NEXT)
    path, of = tmp_path / "model.safetensors", "model.layers.1.linear_attn"
    tensors = load_file(path)
    tensors[f"{of}.in_proj_qkvz.weight"] = tensors[f"{of}.in_proj_qkvz.weight"][1:].clone()
    del tensors[f"{of}.A_log"]
    tensors[f"{of}.conv1d.bias"] = torch.zeros(80)
    save_file(tensors, path)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert str(caught.value) == (
        f"{path} does not fit the model: 1 tensor unexpected: {of}.conv1d.bias in "
        f"model.safetensors; 1 tensor with a wrong shape: {of}.in_proj_qkvz.weight in "
        "model.safetensors is [127, 64], expected [128, 64]; 1 tensor missing: "
        f"{of}.A_log"
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"linear_num_value_heads": 3},
            "linear_num_value_heads 3 is not a multiple of linear_num_key_heads 2",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 of 4 layers"),
        (
            {"layer_types": ["full_attention", "linear_attention", "sliding", "full_attention"]},
            "layer_types has sliding",
        ),
        ({"linear_conv_kernel_dim": 0}, "Expected `int` >= 1"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok 6 exceeds num_experts 5"),
    ],
)
def test_configs_that_make_no_sense_are_refused(
    changes: dict[str, object], reason: str, tmp_path: Path
) -> None:
    make_tiny(tmp_path, "qwen3_next", **NEXT)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ConfigError) as caught:
        read_model_config(config_of(tmp_path))
    assert reason in str(caught.value)


def test_the_first_layers_alone_write_the_text_of_a_model_of_them(tmp_path: Path) -> None:
    """Four of eight layers run, and tensors of later layers are ignored."""
    make_tiny(tmp_path / "eight", "qwen3_next", **{**NEXT, "num_hidden_layers": 8})
    make_tiny(tmp_path / "four", "qwen3_next", **NEXT)
    kept = load_file(tmp_path / "four" / "model.safetensors").keys()
    tensors = load_file(tmp_path / "eight" / "model.safetensors")
    save_file({name: tensors[name] for name in kept}, tmp_path / "four" / "model.safetensors")
    first = config_of(tmp_path / "eight")
    first = replace(first, recipe=replace(first.recipe, num_layers=4))
    texts = []
    for config in (first, config_of(tmp_path / "four")):
        engine = WholeEngine(config)
        engine.submit(0, prompts_of(1)[0], 20)
        engine.run()
        texts.append(engine.text)
    assert texts[0] == texts[1] and len(texts[0][0]) == 20
    with pytest.raises(ConfigError) as caught:
        WholeEngine(replace(first, recipe=replace(first.recipe, num_layers=3)))
    assert str(caught.value) == "the first 3 layers have no attention layer; raise model.num_layers"


def test_dummy_weights_are_the_same_over_ranks(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3_next", **{**NEXT, "num_experts": 6})
    how = Load(format="dummy", seed=3)
    whole = load(tmp_path, how=how).layers[0].attn
    ranks = [load(tmp_path, Mesh(rank, 2), how=how).layers[0].attn for rank in range(2)]
    assert whole.norm.tolist() == [1.0] * 12 == ranks[1].norm.tolist()
    assert (whole.qkvzba.norm_weight == 1).all() and (whole.a_log == 1).all()
    sizes = 8, 8, 24, 24, 2, 2  # rows per key head: q, k, v, z, b, a
    heads = [each.qkvzba.weight.split([*sizes], 0) for each in ranks]
    both = [torch.cat(pair) for pair in zip(*heads, strict=True)]
    assert torch.equal(torch.cat(both), whole.qkvzba.weight)
    channels = [each.conv.split([8, 8, 24], 0) for each in ranks]
    assert torch.equal(torch.cat([torch.cat(p) for p in zip(*channels, strict=True)]), whole.conv)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_state_takes_77_mb_of_all_ranks_together(tp: int) -> None:
    config = load_config("qwen3-next-80b-a3b", ["load.format=dummy"])
    family, model_config = read_model_config(config)
    assert family is Qwen3Next
    layout = family.cache_layout(model_config, Mesh(0, tp), 2)
    assert layout.state is not None and len(layout.state.layers) == 36
    assert layout.paged[0].layers == (*range(3, 48, 4),)
    assert layout.bytes_per_token == 24_576 // math.gcd(tp, 2)  # 2 key/value heads
    assert tp * layout.bytes_per_state == 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2) == 77_266_944
    eight_bits = family.cache_layout(model_config, Mesh(0, tp), 1)
    assert eight_bits.bytes_per_state == layout.bytes_per_state
    assert 2 * eight_bits.bytes_per_token == layout.bytes_per_token
