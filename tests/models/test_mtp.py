"""States and logits of MTP layers equal those of transformers' MtpModel, in float32 on the CPU."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from nanovllm_kernels.fp8_reference import FP8, Scaled, quantise_weight
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from nanovllm.config import ConfigError, Kernels
from nanovllm.layers.kernels import select_ops
from nanovllm.models.config import read_model_config
from nanovllm.models.decoder import Decoder
from nanovllm.models.mtp import MtpHead
from nanovllm.models.names import text_tensors
from nanovllm.models.weights import default_dtype, destinations
from nanovllm.parallel.mesh import Mesh
from nanovllm.spec.mtp import MtpLoader
from tests.models.heads import HeadSteps
from tests.models.steps import CPU, MAX_TOKENS, Steps, fill, load
from tests.models.tiny import HYBRID, NEXT, V3, YARN, config_of, make_loud, make_tiny
from tests.parallel.test_mesh import Meeting, ThreadMesh

LENGTHS = 33, 29
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "deepseek_v3": ("deepseek_v3", dict(V3, rope_parameters=YARN)),
    "deepseek_v3, dense 2, q plain": (
        "deepseek_v3",
        dict(V3, first_k_dense_replace=2, q_lora_rank=None, tie_word_embeddings=True),
    ),
    "glm4_moe_lite": ("glm4_moe_lite", dict(V3, n_group=1, topk_group=1)),
    "qwen3_next": ("qwen3_next", dict(NEXT)),
    "qwen3_next, one dense": (
        "qwen3_next",
        dict(NEXT, mlp_only_layers=[1], linear_num_key_heads=4, num_experts_per_tok=1),
    ),
    "qwen3_5_text": ("qwen3_5_text", dict(HYBRID, tie_word_embeddings=True)),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", dict(NEXT)),
}
NAMES = {  # of transformers, and in checkpoints of Qwen3-Next and of DeepSeek
    "enorm.": ("pre_fc_norm_embedding.", "enorm."),
    "hnorm.": ("pre_fc_norm_hidden.", "hnorm."),
    "eh_proj.": ("fc.", "eh_proj."),
    "post_norm.": ("norm.", "shared_head.norm."),
    "mtp_block.": ("layers.0.", ""),
}

COPIES = ".embed_tokens.weight", ".shared_head.head.weight"


def make_mtp(folder: Path, family: str, **overrides: object) -> tuple[PreTrainedModel, MtpModel]:
    """Save a tiny checkpoint with a layer of MTP. Return the models of transformers."""
    model = make_tiny(folder, family, **overrides)
    model.config.num_mtp_layers = 1
    if family.startswith("qwen3_"):
        model.config.mtp_layer_types = ["full_attention"]
    model.config.mtp_mlp_layer_types = ["sparse"]
    shared = {id(each) for each in model.parameters()}
    torch.manual_seed(1)
    mtp = MtpModel(model, 1).float().eval()
    loud = torch.nn.ModuleDict({"layer": mtp.layers[0]})
    assert not shared & {id(each) for each in loud.parameters()}
    make_loud(loud)
    path = folder / "model.safetensors"
    depth = int(model.config.num_hidden_layers)
    save_file({**load_file(path), **mtp_tensors(mtp, family, depth)}, path)
    return model, mtp


def mtp_tensors(mtp: MtpModel, family: str, depth: int) -> dict[str, Tensor]:
    """Return the tensors of MTP with their names on the Hub. Qwen3.5 stacks all experts."""
    is_next = family.startswith("qwen3_")
    prefix = "mtp." if is_next else f"model.layers.{depth}."
    found: dict[str, Tensor] = {}
    for name, tensor in mtp.layers[0].state_dict().items():
        begin = next(begin for begin in NAMES if name.startswith(begin))
        own = NAMES[begin][not is_next] + name.removeprefix(begin)
        if family == "qwen3_5_moe_text" and ".experts." in own:
            found[own] = tensor.clone()
        elif own.endswith("experts.gate_up_proj"):
            for expert, gate_up in enumerate(tensor):
                gate, up = gate_up.chunk(2)
                at = own.replace("gate_up_proj", str(expert))
                found[f"{at}.gate_proj.weight"] = gate.contiguous()
                found[f"{at}.up_proj.weight"] = up.contiguous()
        elif own.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                at = own.replace("down_proj", str(expert))
                found[f"{at}.down_proj.weight"] = down.clone()
        else:
            found[own] = tensor.clone()
    if not is_next:  # the file repeats both, but other numbers in them must have no effect
        found["embed_tokens.weight"] = torch.zeros(200, 64)
        found["shared_head.head.weight"] = torch.zeros(200, 64)
    return {prefix + name: tensor for name, tensor in found.items()}


@torch.inference_mode()
def states_of_mtp(mtp: MtpModel, ids: Tensor, given: Tensor) -> Tensor:
    """Return transformers' states of a whole text of pairs."""
    positions = torch.arange(len(ids))[None]
    found: Tensor = mtp.forward_layer(0, given[None], positions, None, input_ids=ids[None])[0]
    return found


@dataclass
class MadeMtp:
    reference: PreTrainedModel
    mtp: MtpModel
    target: Decoder
    head: MtpHead
    steps: HeadSteps

    def expected(self, ids: Tensor, given: Tensor) -> Tensor:
        return states_of_mtp(self.mtp, ids, given)

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        return self.mtp.shared_head(states)


def made(folder: Path, family: str, **overrides: object) -> MadeMtp:
    reference, mtp = make_mtp(folder, family, **overrides)
    target = load(folder)
    head, steps = head_of(folder, target)
    return MadeMtp(reference, mtp, target, head, steps)


def loader_of(folder: Path, mesh: Mesh = Mesh()) -> MtpLoader:
    config = config_of(folder)
    return MtpLoader(config, read_model_config(config)[1], mesh, 4)


def head_of(folder: Path, target: Decoder, mesh: Mesh = Mesh()) -> tuple[MtpHead, HeadSteps]:
    loader = loader_of(folder, mesh)
    with CPU, default_dtype(torch.float32):
        head = loader.empty(target, select_ops(Kernels(), CPU), MAX_TOKENS)
    loader.filler(head)()
    return head, HeadSteps(head, loader.layout, len(LENGTHS))


def texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 200, (length + 1,), generator=generator) for length in LENGTHS]


def hidden_of(folder: Path, target: Decoder) -> list[Tensor]:
    """Return our target's hidden states of all tokens of the texts but the last."""
    steps = Steps(folder, target, [text[:-1] for text in texts()], Mesh())
    return list(steps.hidden(steps.batch(LENGTHS), all_hidden=True).split(LENGTHS))


@pytest.mark.parametrize("case", CASES)
def test_states_and_two_further_drafts_match_transformers(case: str, tmp_path: Path) -> None:
    """Texts in unequal chunks, then two passes of one pair each from the head's own states."""
    family, overrides = CASES[case]
    made_ = made(tmp_path, family, **overrides)
    head, steps = made_.head, made_.steps
    hidden = hidden_of(tmp_path, made_.target)
    done = [0, 0]
    found: list[list[Tensor]] = [[], []]
    for counts in ((16, 3), (1, 20), (16, 6)):
        pairs = [
            (
                row,
                done[row],
                texts()[row][1 + done[row] :][:n],
                head.given(hidden[row], ())[done[row] :][:n],
            )
            for row, n in enumerate(counts)
        ]
        for row, state in enumerate(steps.states(pairs)):
            found[row].append(state)
            done[row] += counts[row]
    for row in range(2):
        with torch.inference_mode():
            given = made_.reference.model(texts()[row][None, :-1]).last_hidden_state[0]
        ids, state = texts()[row][1:], torch.cat(found[row])
        close(state, made_.expected(ids, given))
        close(head.logits(state), made_.logits(made_.expected(ids, given)))
        state = state[-1:]
        for position in range(LENGTHS[row], LENGTHS[row] + 2):
            draft = head.logits(state).argmax(1)
            assert draft.equal(made_.logits(made_.expected(ids, given)[-1:]).argmax(1))
            given = torch.cat([given, made_.expected(ids, given)[-1:]])
            ids = torch.cat([ids, draft])
            (state,) = steps.states([(row, position, draft, state)])
            close(state, made_.expected(ids, given)[-1:])


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=5e-4)


@pytest.mark.parametrize("case", CASES)
def test_no_tensor_of_mtp_is_invisible(case: str, tmp_path: Path) -> None:
    """Removing any tensor of MTP changes a logit. Norm weights become 1, others 0."""
    family, overrides = CASES[case]
    made_ = made(tmp_path, family, **overrides)
    head, ids = made_.head, texts()[0][1:]
    (given, _) = hidden_of(tmp_path, made_.target)

    def run() -> Tensor:
        for layer, cache in made_.steps.caches.items():
            head.bind_caches({layer: cache})  # also computes what latent attention derives
        return head.logits(made_.steps.states([(0, 0, ids, given)])[0])

    whole = run()
    places = destinations(head, head.WEIGHTS)
    prefix = "mtp." if family.startswith("qwen3_") else "model.layers.2."
    assert places.keys() == {
        name
        for name, _ in text_tensors(tmp_path / "model.safetensors")
        if name.startswith(prefix) and not name.endswith(COPIES)
    }
    for name, place in places.items():
        kept = place.into.clone()
        place.into.fill_(1.0 if place.into.ndim == 1 else 0.0)
        moved = (run() - whole).abs().max() / whole.abs().mean()
        place.into.copy_(kept)
        assert moved > 1e-2, f"{name} moves the logits by {moved:.1e} only"


@pytest.mark.parametrize("case", ["deepseek_v3", "qwen3_next"])
def test_the_recycled_state_is_normed(case: str, tmp_path: Path) -> None:
    """Trap 5: the state before the norm has another size. The given state is normed, too."""
    family, overrides = CASES[case]
    made_ = made(tmp_path, family, **overrides)
    (given, _) = hidden_of(tmp_path, made_.target)
    assert torch.equal(made_.head.given(given, ()), given)
    sizes = []
    for state, gain in (
        (given, made_.target.norm.weight),
        (made_.steps.states([(0, 0, texts()[0][1:], given)])[0], made_.head.norm.weight),
    ):
        sizes += (state / gain).square().mean(-1).sqrt().tolist()
    assert all(0.97 < size < 1.001 for size in sizes)  # below 1 by the eps of the norm


def test_copies_of_embedding_and_head_are_shared(tmp_path: Path) -> None:
    made_ = made(tmp_path, "deepseek_v3", **V3)
    assert made_.head.embedding is made_.target.embed
    own = {id(parameter) for parameter in made_.head.parameters()}
    assert not own & {id(parameter) for parameter in made_.target.parameters()}


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("case", ["deepseek_v3", "qwen3_next"])
def test_mtp_over_two_ranks(case: str, tp: int, ep: int, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    count = {"deepseek_v3": "n_routed_experts", "qwen3_next": "num_experts"}[family]
    expected = made(tmp_path, family, **{**overrides, count: 8})
    (given, _) = hidden_of(tmp_path, expected.target)
    ids = texts()[0][1:]
    states = expected.steps.states([(0, 0, ids, given)])[0]
    meeting = Meeting(tp)
    meshes = [ThreadMesh(rank, tp, meeting, ep_size=ep) for rank in range(tp)]
    heads = [head_of(tmp_path, load(tmp_path, mesh), mesh) for mesh in meshes]

    def run(rank: int) -> Tensor:
        return heads[rank][1].states([(0, 0, ids, given)])[0]

    with ThreadPoolExecutor(tp) as pool:
        found = list(pool.map(run, range(tp)))
    assert torch.equal(found[0], found[1])
    close(found[0], states)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3", {}),
        ("deepseek_v3", dict(V3, num_nextn_predict_layers=0)),
    ],
)
def test_models_without_mtp_are_refused(
    family: str, overrides: dict[str, object], tmp_path: Path
) -> None:
    make_tiny(tmp_path, family, **overrides)
    with pytest.raises(ConfigError) as caught:
        loader_of(tmp_path)
    assert str(caught.value) == (
        f"speculate.method is mtp, but {tmp_path}/config.json has no MTP layer; use ngram, eagle3 "
        "or draft_model"
    )


@pytest.mark.parametrize(
    ("family", "prefix"), [("deepseek_v3", "model.layers.2."), ("qwen3_next", "mtp.")]
)
def test_checkpoints_that_lost_mtp_are_refused(family: str, prefix: str, tmp_path: Path) -> None:
    """Trap 12: 4-bit and other repackaged checkpoints often drop its tensors."""
    make_tiny(tmp_path, family, **(V3 if family == "deepseek_v3" else NEXT))
    with pytest.raises(ConfigError) as caught:
        loader_of(tmp_path)
    assert str(caught.value) == (
        f"speculate.method is mtp, but {tmp_path}/model.safetensors has no tensor {prefix}*: some "
        "repackaged checkpoints drop them; use the original checkpoint, or another method"
    )


def test_faults_of_mtp_are_those_of_a_checkpoint(tmp_path: Path) -> None:
    make_mtp(tmp_path, "qwen3_next", **NEXT)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["mtp.norm.weight"]
    tensors["mtp.fc.weight"] = torch.zeros(64, 64)
    tensors["mtp.fc.bias"] = torch.zeros(64)
    save_file(tensors, path)
    with pytest.raises(ConfigError) as caught:
        head_of(tmp_path, load(tmp_path))
    assert str(caught.value) == (
        f"{path} does not fit the model: 1 tensor unexpected: mtp.fc.bias in model.safetensors; "
        "1 tensor with a wrong shape: mtp.fc.weight in model.safetensors is [64, 64], expected "
        "[64, 128]; 1 tensor missing: mtp.norm.weight"
    )


def test_mtp_of_a_model_of_which_some_layers_run(tmp_path: Path) -> None:
    """The head is still the checkpoint's layer 4, with experts, after two layers that run."""
    make_mtp(tmp_path, "deepseek_v3", **{**V3, "num_hidden_layers": 4, "first_k_dense_replace": 3})
    config = config_of(tmp_path)
    config = replace(config, recipe=replace(config.recipe, num_layers=2))
    family, model_config = read_model_config(config)
    loader = MtpLoader(config, model_config, Mesh(), 4)
    assert loader.spec.prefix == "model.layers.4."
    with CPU, default_dtype(torch.float32):
        ops = select_ops(Kernels(), CPU)
        head = loader.empty(family(model_config, Mesh(), ops, MAX_TOKENS), ops, MAX_TOKENS)
    loader.filler(head)()
    gate = load_file(tmp_path / "model.safetensors")["model.layers.4.mlp.gate.weight"]
    moe = head.layers[0].mlp
    assert torch.equal(moe.router.weight[:8], gate) and moe.layer == 2 and moe.is_last


# -- fp8 -----------------------------------------------------------------------------------------

WIDE = dict(  # as in tests/models/test_qwen3_next.py
    NEXT, hidden_size=256, num_experts=6, head_dim=64, linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=64,
    shared_expert_intermediate_size=256, moe_intermediate_size=128,
)  # fmt: skip
FLOATS = "embed", "lm_head", "norm", ".gate.", "in_proj_ba", "conv1d", "A_log", "dt_bias", "_gate."


@pytest.mark.parametrize("stored", ["fp8", "float", "made"])
def test_mtp_of_fp8_checkpoints(stored: str, tmp_path: Path) -> None:
    """Trap 13: types are those of the file, not of the list in config.json. Trap 14: fc stays.

    With `made`, the file has floats, and quantize makes fp8 of the layer's products but not of fc.
    """
    make_mtp(tmp_path, "qwen3_next", **WIDE)
    path = tmp_path / "model.safetensors"
    tensors, plain = {}, {}
    for name, tensor in load_file(path).items():
        is_mtp = name.startswith("mtp.")
        is_kept = any(word in name for word in FLOATS) or name == "mtp.fc.weight"
        tensors[name] = plain[name] = tensor
        if is_kept or (is_mtp and stored == "float"):
            continue
        numbers, scales = quantise_weight(tensor)
        plain[name] = Scaled(numbers, scales).dequantised()
        if stored != "made":
            tensors[name], tensors[f"{name}_scale_inv"] = numbers, scales
    save_file(plain, path)
    expected_head, expected_steps = head_of(tmp_path, load(tmp_path))
    given = torch.randn(33, 256, generator=torch.Generator().manual_seed(4))
    ids = texts()[0][1:]
    expected = expected_head.logits(expected_steps.states([(0, 0, ids, given)])[0])
    save_file(tensors, path)
    config = config_of(tmp_path)
    if stored == "made":
        config = replace(config, recipe=replace(config.recipe, quantize="fp8"))
    else:
        config_path = tmp_path / "config.json"
        raw = json.loads(config_path.read_text())
        raw["quantization_config"] = dict(
            activation_scheme="dynamic", fmt="e4m3", quant_method="fp8",
            weight_block_size=[128, 128],
            modules_to_not_convert=["lm_head", "mlp", "mtp.layers"],  # the file decides for MTP
        )  # fmt: skip
        config_path.write_text(json.dumps(raw))
    family, model_config = read_model_config(config)
    loader = MtpLoader(config, model_config, Mesh(), 4)
    with CPU, default_dtype(torch.float32):
        ops = select_ops(Kernels(), CPU)
        target = family(model_config, Mesh(), ops, MAX_TOKENS)
        head = loader.empty(target, ops, MAX_TOKENS)
    fill(target, config)
    loader.filler(head)()
    block = head.layers[0]
    is_fp8 = {block.attn.qkv.weight.dtype == FP8, block.mlp.experts.down.dtype == FP8}
    assert is_fp8 == {stored != "float"}
    assert head.proj.weight.dtype == torch.float32
    assert target.layers[0].mlp.experts.down.dtype == FP8
    steps = HeadSteps(head, loader.layout, 1)
    found = head.logits(steps.states([(0, 0, ids, given)])[0])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-3)
