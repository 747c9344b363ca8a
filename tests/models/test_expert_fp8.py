"""Experts in block fp8 give the results of their dequantised weights, over any number of ranks."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from nanovllm_kernels.fp8_reference import FP8, Scaled, quantise_weight
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm.config import ConfigError
from nanovllm.models.config import read_model_config
from nanovllm.parallel.cut import check_cut
from nanovllm.parallel.mesh import Mesh
from tests.models.steps import Steps, load
from tests.models.test_parity import LENGTHS, SCHEDULES, our_logits, prompts
from tests.models.tiny import config_of, make_tiny
from tests.parallel.test_mesh import Meeting, ThreadMesh

SIZES = dict(  # hidden sizes, and sometimes inner sizes, that are no multiple of a block
    hidden_size=200, num_attention_heads=8, head_dim=32, num_key_value_heads=2,
    num_experts_per_tok=2, max_position_embeddings=128,
)  # fmt: skip
FAMILIES = {
    "qwen3_moe": dict(num_experts=6, intermediate_size=256, mlp_only_layers=[1]),
    "minimax_m2": dict(num_local_experts=6, rotary_dim=16),
}
V3 = dict(  # with 64 rows in a last block, like R1's kv_a_proj_with_mqa
    num_key_value_heads=8, head_dim=64, n_routed_experts=6, n_group=3, topk_group=2,
    n_shared_experts=1, first_k_dense_replace=1, intermediate_size=256, kv_lora_rank=128,
    qk_nope_head_dim=40, qk_rope_head_dim=64, v_head_dim=32,
)  # fmt: skip
KEPT = "embed_tokens", "lm_head", "norm", "gate.", "e_score_correction_bias"


def checkpoints(folder: Path, family: str, inner: int, **more: object) -> tuple[Path, Path]:
    """Save a checkpoint in block fp8, and one of the same values in float32."""
    plain, blocks = folder / "plain", folder / "blocks"
    width = "intermediate_size" if family == "minimax_m2" else "moe_intermediate_size"
    overrides = {**SIZES, **{**FAMILIES, "deepseek_v3": V3}[family], width: inner, **more}
    for made in (plain, blocks):
        make_tiny(made, family, **overrides)
    numbers = load_file(plain / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, tensor in list(numbers.items()):
        if any(word in name for word in KEPT):
            stored[name] = tensor
            continue
        stored[name], stored[f"{name}_scale_inv"] = quantise_weight(tensor)
        numbers[name] = Scaled(stored[name], stored[f"{name}_scale_inv"]).dequantised()
    save_file(numbers, plain / "model.safetensors")
    save_file(stored, blocks / "model.safetensors")
    raw = json.loads((blocks / "config.json").read_text())
    # Like MiniMax-M2, without a module's name.
    named = ["gate", "e_score_correction_bias", "lm_head"]
    if family == "qwen3_moe":  # like Qwen, with norms and router of every layer
        parts = "input_layernorm", "mlp.gate", "post_attention_layernorm"
        named = ["lm_head", *(f"model.layers.{n}.{part}" for n in (0, 1) for part in parts)]
    raw["quantization_config"] = dict(
        activation_scheme="dynamic", fmt="float8_e4m3fn", quant_method="fp8",
        weight_block_size=[128, 128], modules_to_not_convert=named,
    )  # fmt: skip
    (blocks / "config.json").write_text(json.dumps(raw))
    return plain, blocks


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("tp", "ep", "inner"), [(1, 1, 136), (2, 1, 256), (2, 2, 72)])
def test_logits_are_those_of_the_dequantised_model(
    family: str, tp: int, ep: int, inner: int, tmp_path: Path
) -> None:
    plain, blocks = checkpoints(tmp_path, family, inner)
    expected = our_logits(Steps(plain, load(plain), prompts(), Mesh()), [LENGTHS])
    meeting = Meeting(tp)
    meshes = [ThreadMesh(rank, tp, meeting, ep_size=ep) for rank in range(tp)]
    models = [load(blocks, mesh) for mesh in meshes]
    experts = models[-1].layers[0].mlp.experts  # type: ignore[union-attr]
    assert experts.gate_up.dtype == experts.down.dtype == FP8
    own = 256 // 2 if (tp, ep) == (2, 1) else inner
    num_blocks = -(-own // 128)
    assert list(experts.gate_up_scale.shape) == [6 // ep, 2 * num_blocks, 2]
    assert list(experts.down_scale.shape) == [6 // ep, 2, num_blocks]
    assert models[-1].layers[0].mlp.router.weight.dtype == torch.float32  # type: ignore[union-attr]

    def run(rank: int) -> list[Tensor]:
        steps = Steps(blocks, models[rank], prompts(), meshes[rank])
        return our_logits(steps, SCHEDULES["one late"])

    with ThreadPoolExecutor(tp) as pool:
        found = list(pool.map(run, range(tp)))
    for row, logits in enumerate(expected):
        torch.testing.assert_close(found[0][row], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_shares_of_blocks_are_refused(family: str, tmp_path: Path) -> None:
    _, blocks = checkpoints(tmp_path, family, 384)
    model_config = read_model_config(config_of(blocks))[1]
    check_cut(Mesh(0, 1), model_config)
    check_cut(Mesh(0, 2, ep_size=2), model_config)
    with pytest.raises(ConfigError) as caught:
        check_cut(Mesh(0, 2), model_config)
    name = "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
    assert str(caught.value) == (
        f"parallel.tp is 2; it would cut the model's {name} 384 into shares of 192 inputs of "
        "weights in fp8, and 192 is not a multiple of 128; it can be 1"
    )


@pytest.mark.parametrize("query_rank", [None, 256, 72])
@pytest.mark.parametrize(("tp", "ep", "inner"), [(1, 1, 136), (2, 1, 256), (2, 2, 256)])
def test_latent_attention_is_that_of_the_dequantised_model(
    query_rank: int | None, tp: int, ep: int, inner: int, tmp_path: Path
) -> None:
    plain, blocks = checkpoints(tmp_path, "deepseek_v3", inner, q_lora_rank=query_rank)
    expected = our_logits(Steps(plain, load(plain), prompts(), Mesh()), [LENGTHS])
    meeting = Meeting(tp)
    meshes = [ThreadMesh(rank, tp, meeting, ep_size=ep) for rank in range(tp)]
    models = [load(blocks, mesh) for mesh in meshes]
    attn = models[-1].layers[0].attn
    products = [attn.kv_b, attn.out, attn.qkv if query_rank is None else attn.latents]
    assert {product.weight.dtype for product in products} == {FP8}
    assert attn.kv_b.whole_ND.shape == attn.kv_b.weight.shape == (8 // tp * 72, 128)
    if query_rank == 256:
        assert attn.latents.weight_scale.shape == (2 + 2, 2)

    def run(rank: int) -> list[Tensor]:
        steps = Steps(blocks, models[rank], prompts(), meshes[rank])
        return our_logits(steps, SCHEDULES["one late"])

    with ThreadPoolExecutor(tp) as pool:
        found = list(pool.map(run, range(tp)))
    for row, logits in enumerate(expected):
        torch.testing.assert_close(found[0][row], logits, rtol=1e-4, atol=1e-4)
