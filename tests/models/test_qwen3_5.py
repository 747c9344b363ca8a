"""Qwen3.5's checkpoints: a text model inside one with images, stacked experts, and fp8."""

from __future__ import annotations

import json
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from nanovllm_kernels.fp8_reference import FP8, Scaled, quantise_weight
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from nanovllm.config import ConfigError, Parallel, Speculate, load_config
from nanovllm.engine.paper import Numbers
from nanovllm.models.config import read_model_config
from nanovllm.models.names import text_name
from nanovllm.models.support import check_config
from nanovllm.parallel.mesh import Mesh
from nanovllm.rank_check import divides, read_fields
from nanovllm.server.ends import EosFields, read
from nanovllm.wire import Sampling
from tests.models.steps import Steps, load
from tests.models.test_mtp import make_mtp
from tests.models.test_parity import SCHEDULES, assert_equal_logits, our_logits, prompts
from tests.models.tiny import COMMON, HYBRID, NEXT, config_of, make_loud
from tests.parallel.test_mesh import Meeting, ThreadMesh
from tests.whole_engine import WholeEngine, prompts_of

VISION = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64)
VISION |= dict(num_position_embeddings=16, patch_size=2)
MROPE = dict(  # the published spelling; sections count pairs of the rotated part
    rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[2, 1, 1],
    mrope_interleaved=True,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": dict(HYBRID, tie_word_embeddings=True),
    "qwen3_5_moe": dict(NEXT, num_experts=6),
}
PREFIX = "model.language_model."


def make_wrapped(folder: Path, family: str, **overrides: Any) -> PreTrainedModel:
    """Save a checkpoint with an image encoder, as on the Hub. Experts of a layer are stacked."""
    sizes = {**COMMON, **FAMILIES[family], "rope_parameters": MROPE, **overrides}
    tied = sizes.get("tie_word_embeddings", False)
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](
        text_config=sizes, vision_config=VISION, tie_word_embeddings=tied
    )
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    make_loud(model)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file(stacked(load_file(path)), path)
    return model


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with all experts of a layer in gate_up_proj and down_proj."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    layers = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    for layer in layers:
        count = sum(name.startswith(f"{layer}.experts.") for name in tensors) // 3

        def all_of(part: str, layer: str = layer, count: int = count) -> Tensor:
            names = [f"{layer}.experts.{expert}.{part}_proj.weight" for expert in range(count)]
            return torch.stack([tensors[name] for name in names])

        found[f"{layer}.experts.gate_up_proj"] = torch.cat([all_of("gate"), all_of("up")], 1)
        found[f"{layer}.experts.down_proj"] = all_of("down")
    return found


def over_ranks(folder: Path, tp: int, ep: int = 1) -> tuple[list[Any], list[Tensor]]:
    """Return the models of all ranks, and the logits of rank 0."""
    meeting = Meeting(tp)
    meshes = [ThreadMesh(rank, tp, meeting, ep_size=ep) for rank in range(tp)]
    models = [load(folder, mesh) for mesh in meshes]

    def run(rank: int) -> list[Tensor]:
        steps = Steps(folder, models[rank], prompts(), meshes[rank])
        return our_logits(steps, SCHEDULES["one late"])

    with ThreadPoolExecutor(tp) as pool:
        return models, next(iter([*pool.map(run, range(tp))]))


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_text_of_a_model_with_an_image_encoder(
    family: str, tp: int, ep: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = make_wrapped(tmp_path, family)
    if family == "qwen3_5" and ep > 1:
        with pytest.raises(ConfigError, match="the model has no experts"):
            read_and_cut(tmp_path, ep)
        return
    with torch.inference_mode():
        expected = [reference(prompt[None]).logits[0] for prompt in prompts()]
    visual = [name for name in load_file(tmp_path / "model.safetensors") if "visual." in name]
    with caplog.at_level(logging.INFO, "engine"):
        _, found = over_ranks(tmp_path, tp, ep)
    assert_equal_logits(found, expected, family)
    said = f"left out {len(visual)} tensors of the image encoder: only text is served"
    assert len(visual) == 21 and caplog.text.count(said) == tp


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_of_a_whole_engine(family: str, tmp_path: Path) -> None:
    """Prompts in chunks, a second turn with cache hits, and preemption. Some texts are masked."""
    model = make_wrapped(tmp_path, family)
    prompts = [[*prompt, *prompt][:60] for prompt in prompts_of(6, 5)]
    masked = {i: i % 3 == 2 for i in range(6)}
    expected = [text_of(model, prompt, 14, even=masked[i]) for i, prompt in enumerate(prompts)]
    for pages in (62, 300):
        engine = WholeEngine(config_of(tmp_path), pages=pages, slots=5, step_tokens=24)
        for turn in range(3):
            for i, prompt in enumerate(prompts):
                engine.submit(10 * turn + i, prompt, 14, grammar="even" if masked[i] else "")
            engine.run()
        for name, text in engine.text.items():
            assert text == expected[name % 10], name
        hits = [name for name, cached in engine.cached.items() if cached]
        assert engine.scheduler.stats().num_preemptions > 0 if pages == 62 else len(hits) >= 6


@torch.inference_mode()
def text_of(model: PreTrainedModel, prompt: list[int], count: int, *, even: bool) -> list[int]:
    """Return transformers' greedy text; of even tokens only, as WholeEngine's masks allow."""
    ids = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([ids])).logits[0, -1]
        logits[1::2] = -torch.inf if even else logits[1::2]
        best, second = logits.topk(2).values
        assert best - second > 1e-3, "a near tie: choose another prompt"
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def read_and_cut(folder: Path, ep: int) -> None:
    from nanovllm.parallel.cut import check_cut
    from nanovllm.parallel.mesh import first_rank

    check_cut(first_rank(Parallel(ep=ep)), read_model_config(config_of(folder))[1])


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_drafts_of_mtp_in_a_model_with_an_image_encoder(family: str, tmp_path: Path) -> None:
    """The same text model alone has the same text, drafts and accepted drafts."""
    alone, wrapped = tmp_path / "alone", tmp_path / "wrapped"
    make_mtp(alone, family, **(HYBRID if family == "qwen3_5_text" else NEXT))
    wrap(alone, wrapped)
    speculate = Speculate(method="mtp", tokens=2, adapt=False)
    found = []
    for folder, drafts in ((alone, None), (alone, speculate), (wrapped, speculate)):
        engine = WholeEngine(config_of(folder), speculate=drafts)
        for i, prompt in enumerate(prompts_of(6, 3)):
            engine.submit(i, prompt, 20, Sampling(temperature=1.0, seed=i))
        engine.run()
        stats = engine.scheduler.stats()
        found.append((engine.text, stats.accepted_by_position, stats.draft_tokens))
    plain, own, other = found
    assert plain[0] == own[0] and own == other
    assert sum(own[1]) > 3 and own[2] > 60


def wrap(folder: Path, wrapped: Path) -> None:
    """Save a text model with MTP as part of one with an image encoder."""
    wrapped.mkdir()
    text = json.loads((folder / "config.json").read_text())
    name = text["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    outer = dict(architectures=[name], text_config=text, vision_config=VISION)
    (wrapped / "config.json").write_text(json.dumps(outer))
    tensors = load_file(folder / "model.safetensors")
    mtp = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
    own = stacked({name: tensor for name, tensor in tensors.items() if name not in mtp})
    named = {re.sub(r"^model\.", PREFIX, name): tensor for name, tensor in (mtp | own).items()}
    named["model.visual.patch_embed.proj.weight"] = torch.zeros(4, 4)
    save_file(named, wrapped / "model.safetensors")


def test_stacked_experts_of_another_shape_are_faults(tmp_path: Path) -> None:
    """Some conversions store [experts, in, out], which must not be loaded."""
    make_wrapped(tmp_path, "qwen3_5_moe")
    path, name = tmp_path / "model.safetensors", f"{PREFIX}layers.1.mlp.experts.gate_up_proj"
    tensors = load_file(path)
    tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, path)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    first = "model.layers.1.mlp.experts.0.gate_proj.weight"
    assert str(caught.value).startswith(
        f"{path} does not fit the model: 12 tensors with a wrong shape: {first} in "
        "model.safetensors is [32, 40], expected [20, 64], "
    )


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("model.language_model.layers.0.mlp.gate", "model.layers.0.mlp.gate"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("mtp.layers.0.mlp.gate.weight", "mtp.layers.0.mlp.gate.weight"),
        ("model.layers.0.language_model.x", "model.layers.0.language_model.x"),
    ],
)
def test_names_of_text_models(name: str, ours: str) -> None:
    assert text_name(name) == ours


def test_fields_of_the_text_model_are_read_everywhere(tmp_path: Path) -> None:
    make_wrapped(tmp_path, "qwen3_5_moe", eos_token_id=7)
    path = tmp_path / "config.json"
    assert check_config(path)["num_experts"] == 6
    assert read(path, EosFields) == EosFields(7, 200)
    assert read(path, Numbers) == Numbers(200, 256)
    fields = read_fields(str(path))
    assert divides(fields, 2, 2) and not divides(fields, 4, 4)


def test_fields_next_to_the_text_model_do_not_replace_its_own(tmp_path: Path) -> None:
    """transformers builds the text model from `text_config` alone, but ties as the whole does."""
    make_wrapped(tmp_path, "qwen3_5_moe", eos_token_id=7)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    stale = dict(rms_norm_eps=0.5, num_experts_per_tok=1, head_dim=8, eos_token_id=None)
    raw["text_config"] |= dict(architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True)
    path.write_text(json.dumps({**raw, **stale}))
    assert read(path, EosFields) == EosFields(7, 200)
    family, config = read_model_config(config_of(tmp_path))
    assert family.__name__ == "Qwen35Moe"
    assert not config.tie_word_embeddings
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = [theirs(prompt[None]).logits[0] for prompt in prompts()]
    steps = Steps(tmp_path, load(tmp_path), prompts(), Mesh())
    assert_equal_logits(our_logits(steps, SCHEDULES["whole"]), expected, "qwen3_5_moe")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attn_output_gate": False}, "attn_output_gate is false; only true is supported"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"; only "silu" is supported'),
        ({"num_experts": None}, "num_experts or num_local_experts must be given"),
        ({"norm_topk_prob": False}, "norm_topk_prob is false; only true is supported"),
    ],
)
def test_configs_of_other_models_are_refused(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    make_wrapped(tmp_path, "qwen3_5_moe")
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw["text_config"] |= change
    path.write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=says):
        read_model_config(config_of(tmp_path))


def test_all_layers_have_experts_whatever_fields_of_qwen3_next_are_left(tmp_path: Path) -> None:
    make_wrapped(tmp_path, "qwen3_5_moe")
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw["text_config"] |= dict(mlp_only_layers=[0], decoder_sparse_step=2, norm_topk_prob=True)
    path.write_text(json.dumps(raw))
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = [theirs(prompt[None]).logits[0] for prompt in prompts()]
    for schedule in SCHEDULES.values():
        steps = Steps(tmp_path, load(tmp_path), prompts(), Mesh())
        assert_equal_logits(our_logits(steps, schedule), expected, "qwen3_5_moe")


@pytest.mark.parametrize(
    ("recipe", "layers", "per_token", "values", "tp"),
    [
        ("qwen3.5-27b", 64, 65_536, 48, 1),
        ("qwen3.5-35b-a3b", 40, 20_480, 32, 1),
        ("qwen3.5-397b-a17b", 60, 30_720, 64, 4),  # 2 key/value heads: each rank has one of them
    ],
)
def test_sizes_of_caches(recipe: str, layers: int, per_token: int, values: int, tp: int) -> None:
    """A value head has 128 x 128 elements, and the convolution stores 3 inputs of each channel."""
    config = load_config(recipe, ["load.format=dummy"])
    assert config.recipe.parallel.tp == tp
    family, model_config = read_model_config(config)
    layout = family.cache_layout(model_config, Mesh(0, tp), 2)
    assert layout.paged[0].layers == (*range(3, layers, 4),)
    assert layout.bytes_per_token * min(tp, 2) == per_token
    state = values * 128 * 128 * 4 + (2 * 16 + values) * 128 * 3 * 2
    assert layout.bytes_per_state * tp == layers * 3 // 4 * state
    mtp = model_config.mtp()
    assert mtp is not None and mtp.config.attends(layers)  # type: ignore[attr-defined]


# -- fp8 -----------------------------------------------------------------------------------------

SIZES = dict(  # heads share blocks of 128, and ranks' shares begin at block boundaries
    hidden_size=256, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=64, linear_value_head_dim=64, num_experts=6,
    shared_expert_intermediate_size=256, moe_intermediate_size=256, intermediate_size=256,
)  # fmt: skip
FLOATS = "embed", "lm_head", "norm", ".gate.", "in_proj_b", "in_proj_a", "conv1d", "A_log"
FLOATS += "dt_bias", "_gate.", "visual"


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_is_the_dequantised_model(family: str, tp: int, tmp_path: Path) -> None:
    """In fp8 checkpoints, experts are separate and modules that stay have the wrapper's names."""
    make_wrapped(tmp_path, family, **SIZES)
    path = tmp_path / "model.safetensors"
    plain, blocks = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in unstacked(load_file(path)).items():
        plain[name] = blocks[name] = tensor
        if not any(word in name for word in FLOATS):
            blocks[name], blocks[f"{name}_scale_inv"] = quantise_weight(tensor)
            plain[name] = Scaled(blocks[name], blocks[f"{name}_scale_inv"]).dequantised()
    save_file(plain, path)
    expected = over_ranks(tmp_path, 1)[1]
    save_file(blocks, path)
    raw = json.loads((tmp_path / "config.json").read_text())
    kept = [
        name.removesuffix(".weight")
        for name in blocks
        if name.endswith(".weight") and blocks[name].dtype != FP8
    ]
    raw["quantization_config"] = dict(
        activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128],
        modules_to_not_convert=kept,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    models, found = over_ranks(tmp_path, tp)
    attn = models[-1].layers[0].attn
    assert attn.qkvz.weight.dtype == FP8 and attn.ba.weight.dtype == torch.float32
    assert attn.qkvz.weight_scale.shape[0] * attn.qkvz.block_rows == 2 * 384 // tp
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=5e-4)


def unstacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with one for each expert, gate, up and down."""
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        before, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
            continue
        parts = ("gate", "up") if last == "gate_up_proj" else ("down",)
        for expert, whole in enumerate(tensor):
            for part, own in zip(parts, whole.chunk(len(parts)), strict=True):
                found[f"{before}.{expert}.{part}_proj.weight"] = own.contiguous()
    return found
