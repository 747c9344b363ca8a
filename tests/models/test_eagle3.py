"""States and logits of EAGLE-3 heads equal those of plain torch, in float32 on the CPU.

The oracle computes a whole text at once, without a cache. Traps that other engines fell into have
a test each; their tables are in the names of the tests.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace as struct_with
from nanovllm_kernels.fp8_reference import FP8
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from nanovllm.config import Kernels, Load
from nanovllm.layers.kernels import select_ops
from nanovllm.layers.ops import Ops
from nanovllm.models.config import read_model_config
from nanovllm.models.decoder import Decoder
from nanovllm.models.eagle3 import Eagle3Head
from nanovllm.models.eagle3_config import read_eagle3
from nanovllm.models.weights import default_dtype, destinations
from nanovllm.parallel import cut
from nanovllm.parallel.mesh import Mesh
from tests.models.heads import EAGLE3, HeadSteps, eagle3_tensors, save_head
from tests.models.steps import CPU, MAX_TOKENS, fill, load
from tests.models.test_parity import InPlace, ops_with
from tests.models.tiny import config_of, make_tiny
from tests.parallel.test_mesh import Meeting, ThreadMesh

FAMILY, DEPTH = "qwen3", 5
LENGTHS = 33, 29
SPECULATORS = dict(
    speculators_model_type="eagle3", norm_before_residual=True, eagle_config=None,
    eagle_aux_hidden_state_layer_ids=[2, 3, 4], rope_theta=None,
    transformer_layer_config={"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}},
)  # fmt: skip
# Fields of config.json, optional tensors, and beginnings of names with those in the file.
VARIANTS: dict[str, tuple[dict[str, object], tuple[str, ...], dict[str, str]]] = {
    "EAGLE": ({}, (), {"layers.0": "midlayer"}),
    "with a prefix": ({}, (), {"lm_head": "lm_head", "d2t": "d2t", "t2d": "t2d", "": "model."}),
    "speculators": (SPECULATORS, ("embed_tokens",), {}),
    "narrow": (
        dict(hidden_size=32, target_hidden_size=64, norm_before_residual=True),
        ("embed_tokens",),
        {"layers.0": "midlayer"},
    ),
    "a norm of each tap, output normed": (
        dict(fc_norm=True, norm_output=True),
        ("fc_norm",),
        {f"fc_norm.{tap}": f"aux_norm_{name}" for tap, name in enumerate(("low", "mid", "high"))},
    ),
    "one norm of all taps": (dict(norm_before_fc=True), ("input_norm",), {}),
    "a norm that only the file names": ({}, ("input_norm",), {}),
    "two layers": (dict(num_hidden_layers=2), (), {}),
    "two layers, as SGLang": (
        dict(num_hidden_layers=2),
        (),
        {"layers.1.input_layernorm": "layers.1.hidden_norm"},
    ),
    "two layers, as Model Optimizer": (
        dict(num_hidden_layers=2),
        (),
        {
            "layers.1.input_layernorm": "midlayer.1.hidden_norm",
            "layers.0": "midlayer.0",
            "layers.1": "midlayer.1",
        },
    ),
    "a part of each head rotated": (  # as heads of Qwen3.5
        dict(rope_theta=None)
        | dict(rope_parameters=dict(rope_theta=300.0, partial_rotary_factor=0.5)),
        (),
        {},
    ),
    "output normed, as TensorRT-LLM": (
        dict(eagle_config=dict(EAGLE3["eagle_config"], return_hidden_post_norm=True)),
        (),
        {},
    ),
    "norms of queries and keys": (dict(model_type="qwen3"), ("q_norm", "k_norm"), {}),
    "the target's vocabulary": (dict(draft_vocab_size=None), (), {}),
    "a whole vocabulary of its own": (dict(draft_vocab_size=200), ("embed_tokens",), {}),
    "scaled rope": (
        dict(
            rope_scaling=dict(
                rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=16,
            )
        ),
        (),
        {},
    ),
}  # fmt: skip


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def rotated(x: Tensor, frequencies: Tensor) -> Tensor:
    """Rotate x, [heads, tokens, elements]; halves of the rotated elements are pairs."""
    angles = torch.arange(x.shape[1])[:, None] * frequencies
    half = len(frequencies)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat(
        [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest], -1
    )


@dataclass
class Oracle:
    """Equations of EAGLE-3, for a whole text at once."""

    w: dict[str, Tensor]  # by canonical name, with the target's embedding and output if shared
    config: dict[str, object]

    def given(self, taps: list[Tensor]) -> Tensor:
        if "fc_norm.0.weight" in self.w:
            taps = [rms(tap, self.w[f"fc_norm.{i}.weight"]) for i, tap in enumerate(taps)]
        x = torch.cat(taps, -1)
        x = rms(x, self.w["input_norm.weight"]) if "input_norm.weight" in self.w else x
        return x @ self.w["fc.weight"].T

    def states(self, ids: Tensor, given: Tensor) -> Tensor:
        embedded = self.w["embed_tokens.weight"][ids]
        stream = given
        for layer in range(int(self.config["num_hidden_layers"])):
            w = {
                name.removeprefix(f"layers.{layer}."): tensor
                for name, tensor in self.w.items()
                if name.startswith(f"layers.{layer}.")
            }
            if layer:
                x = rms(stream, w["input_layernorm.weight"])
            else:
                x = rms(stream, w["hidden_norm.weight"])
                stream = x if self.config.get("norm_before_residual") else stream
                x = torch.cat([rms(embedded, w["input_layernorm.weight"]), x], -1)
            stream = stream + self.attention(w, x)
            y = rms(stream, w["post_attention_layernorm.weight"])
            y = F.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
            stream = stream + y @ w["mlp.down_proj.weight"].T
        return rms(stream, self.w["norm.weight"]) if self.norms_output else stream

    @property
    def norms_output(self) -> bool:
        inner = self.config.get("eagle_config") or {}
        return bool(self.config.get("norm_output") or inner.get("return_hidden_post_norm"))

    def attention(self, w: dict[str, Tensor], x: Tensor) -> Tensor:
        size = int(self.config["head_dim"])
        q, k, v = (
            (x @ w[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, size)).transpose(0, 1)
            for name in "qkv"
        )
        if "self_attn.q_norm.weight" in w:
            q, k = rms(q, w["self_attn.q_norm.weight"]), rms(k, w["self_attn.k_norm.weight"])
        part = self.config.get("rope_parameters", {}).get("partial_rotary_factor", 1)
        frequencies = self.frequencies(int(size * part))
        q, k = rotated(q, frequencies), rotated(k, frequencies)
        o = F.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, enable_gqa=True
        )
        return o[0].transpose(0, 1).flatten(1) @ w["self_attn.o_proj.weight"].T

    def frequencies(self, size: int) -> Tensor:
        rope = self.config.get("rope_parameters", {})
        theta = self.config.get("rope_theta") or rope.get("rope_theta", 700.0)  # of SPECULATORS
        frequencies = 1 / theta ** (torch.arange(0, size, 2) / size)
        if "rope_scaling" not in self.config:
            return frequencies
        turns = 16 * frequencies / (2 * torch.pi)
        kept = ((turns - 1) / (4 - 1)).clamp(0, 1)
        return (1 - kept) * frequencies / 8 + kept * frequencies

    def logits(self, states: Tensor) -> Tensor:
        x = states if self.norms_output else rms(states, self.w["norm.weight"])
        narrow = x @ self.w["lm_head.weight"].T
        if "d2t" not in self.w:
            return narrow
        wide = torch.full((len(x), int(self.config["vocab_size"])), -torch.inf)
        wide[:, torch.arange(narrow.shape[1]) + self.w["d2t"]] = narrow
        return wide


@dataclass
class Made:
    reference: PreTrainedModel
    target: Decoder
    head: Eagle3Head
    oracle: Oracle
    steps: HeadSteps


def made(folder: Path, variant: str, mesh: Mesh = Mesh(), **changes: object) -> Made:
    """Save a target and a head, and load both."""
    fields, own, rename = VARIANTS[variant]
    fields = {**fields, **changes}
    reference = make_tiny(folder / "target", FAMILY, num_hidden_layers=DEPTH)
    tensors = eagle3_tensors(own=own, **fields)
    save_head(folder / "head", tensors, rename, **fields)
    target = load(folder / "target", mesh)
    head = head_of(folder, target, mesh)
    tensors.setdefault("embed_tokens.weight", reference.get_input_embeddings().weight.data)
    tensors.setdefault("lm_head.weight", reference.lm_head.weight.data)
    layout = Decoder.cache_layout(head.spec.config, mesh, 4)
    steps = HeadSteps(head, layout, len(LENGTHS))
    return Made(reference, target, head, Oracle(tensors, {**EAGLE3, **fields}), steps)


def head_of(
    folder: Path, target: Decoder, mesh: Mesh = Mesh(), ops: Ops | None = None
) -> Eagle3Head:
    config = config_of(folder / "target")
    spec = read_eagle3(folder / "head", read_model_config(config)[1])
    ops = ops or select_ops(Kernels(), CPU)
    with CPU, default_dtype(torch.float32):
        head = Eagle3Head(spec, target, mesh, ops, max_tokens=MAX_TOKENS)
    fill(head, config, folder / "head")
    return head


def texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 200, (length + 1,), generator=generator) for length in LENGTHS]


def taps_of(made: Made, text: Tensor) -> list[Tensor]:
    """Return the streams that transformers has before the tapped layers."""
    with torch.inference_mode():
        found = made.reference(text[None, :-1], output_hidden_states=True).hidden_states
    return [found[layer][0] for layer in made.head.taps]


@pytest.mark.parametrize("variant", VARIANTS)
def test_states_and_two_further_drafts_match_plain_torch(variant: str, tmp_path: Path) -> None:
    """Texts in unequal chunks, then two passes of one pair each from the head's own states."""
    made_ = made(tmp_path, variant)
    head, oracle, steps = made_.head, made_.oracle, made_.steps
    taps = [taps_of(made_, text) for text in texts()]
    givens = [oracle.given(each) for each in taps]
    expected = [oracle.states(text[1:], given) for text, given in zip(texts(), givens, strict=True)]
    ours = [head.given(torch.empty(0), each) for each in taps]
    done = [0, 0]
    found: list[list[Tensor]] = [[], []]
    for counts in ((16, 3), (1, 20), (16, 6)):
        pairs = [
            (row, done[row], texts()[row][1 + done[row] :][:n], ours[row][done[row] :][:n])
            for row, n in enumerate(counts)
        ]
        for row, state in enumerate(steps.states(pairs)):
            found[row].append(state)
            done[row] += counts[row]
    for row in range(2):
        states = torch.cat(found[row])
        close(states, expected[row])
        close(head.logits(states), oracle.logits(expected[row]))
        ids, given, state = texts()[row][1:], givens[row], states[-1:]
        for position in range(LENGTHS[row], LENGTHS[row] + 2):
            draft = head.logits(state).argmax(1)
            assert draft.equal(oracle.logits(oracle.states(ids, given)[-1:]).argmax(1))
            given = torch.cat([given, oracle.states(ids, given)[-1:]])
            ids = torch.cat([ids, draft])
            (state,) = steps.states([(row, position, draft, state)])
            close(state, oracle.states(ids, given)[-1:])
            close(head.logits(state), oracle.logits(oracle.states(ids, given)[-1:]))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_tensor_of_a_head_is_invisible(variant: str, tmp_path: Path) -> None:
    """Removing any tensor of the file changes a logit. Norm weights become 1, others 0."""
    made_ = made(tmp_path, variant)
    head, text = made_.head, texts()[0]
    taps = taps_of(made_, text)

    def run() -> Tensor:
        given = head.given(torch.empty(0), taps)
        logits = head.logits(made_.steps.states([(0, 0, text[1:], given)])[0])
        return logits[logits.isfinite()]

    whole = run()
    places = destinations(head, head.WEIGHTS)
    stored = {head.spec.names[name] for name in head.spec.stored if name not in ("d2t", "t2d")}
    assert places.keys() == stored
    for name, place in places.items():
        kept = place.into.clone()
        place.into.fill_(1.0 if place.into.ndim == 1 else 0.0)
        moved = (run() - whole).abs().max() / whole.abs().mean()
        place.into.copy_(kept)
        assert moved > 1e-2, f"{name} moves the logits by {moved:.1e} only"


def first_draft(made_: Made, state: Tensor, position: int = 33) -> Tensor:
    """Return the logits of the second draft of the first text, from the state of its last pair."""
    draft = made_.head.logits(state).argmax(1)
    return made_.head.logits(made_.steps.states([(0, position, draft, state)])[0])


@pytest.mark.parametrize("norm_output", [False, True])
def test_the_recycled_state_is_normed_only_if_the_config_says_so(
    norm_output: bool, tmp_path: Path
) -> None:
    """The other state gives another second draft. Logits include the residual."""
    made_ = made(tmp_path, "EAGLE", norm_output=norm_output)
    text = texts()[0]
    given = made_.head.given(torch.empty(0), taps_of(made_, text))
    state = made_.steps.states([(0, 0, text[1:], given)])[0][-1:]
    gain = made_.oracle.w["norm.weight"]
    root_mean_square = (state / gain if norm_output else state).square().mean().sqrt()
    assert (abs(float(root_mean_square) - 1) < 1e-3) == norm_output
    other = state * 2 if norm_output else rms(state, gain)
    assert (first_draft(made_, state) - first_draft(made_, other)).nan_to_num(
        0, 0, 0
    ).abs().max() > 1


@pytest.mark.parametrize("variant", ["EAGLE", "speculators", "two layers"])
def test_products_of_few_rows_add_to_the_states(variant: str, tmp_path: Path) -> None:
    """These products add to the given states in place. 8 pairs are few rows, the first 25 not."""
    made_ = made(tmp_path, variant)
    products, text = InPlace(), texts()[0]
    head = head_of(tmp_path, made_.target, ops=ops_with(skinny_linear=products))
    steps = HeadSteps(head, Decoder.cache_layout(head.spec.config, Mesh(), 4), 1)
    taps = taps_of(made_, text)
    given, ids = head.given(torch.empty(0), taps), text[1:]
    found = [steps.states([(0, 0, ids[:25], given[:25])])[0]]
    assert products.calls == []
    found.append(steps.states([(0, 25, ids[25:], given[25:])])[0])
    assert products.calls.count("add") == 2 * len(head.layers)
    states = torch.cat(found)
    expected = made_.oracle.states(ids, made_.oracle.given(taps))
    close(states, expected)
    close(head.logits(states[-4:]), made_.oracle.logits(expected[-4:]))


def test_keys_of_drafts_are_replaced_by_those_of_true_pairs(tmp_path: Path) -> None:
    """After two passes of wrong drafts, states are those of a fresh cache, bit for bit."""
    made_ = made(tmp_path, "EAGLE")
    text = texts()[0]
    given = made_.head.given(torch.empty(0), taps_of(made_, text))
    fresh = HeadSteps(made_.head, Decoder.cache_layout(made_.head.spec.config, Mesh(), 4), 2)
    first = fresh.states([(0, 0, text[1:21], given[:20])])[0]
    expected = fresh.states([(0, 20, text[21:], given[20:])])[0]
    steps = made_.steps
    made_.head.bind_caches(steps.caches)
    state = steps.states([(0, 0, text[1:21], given[:20])])[0]
    assert torch.equal(state, first)
    state = state[-1:]
    for position in (20, 21):
        (state,) = steps.states([(0, position, torch.tensor([7]), state)])
    assert torch.equal(steps.states([(0, 20, text[21:], given[20:])])[0], expected)


def test_a_head_has_its_own_rotary_table(tmp_path: Path) -> None:
    """The target keeps its table. That of the head exceeds the head's length."""
    made_ = made(tmp_path, "EAGLE", max_position_embeddings=8)
    assert made_.head.spec.config.max_position_embeddings == 8
    assert len(made_.head.cos_sin_LA) == MAX_TOKENS > max(LENGTHS) > 8
    assert made_.head.cos_sin_LA[1, 1].item() == pytest.approx(torch.tensor(500 ** (-1 / 6)).cos())
    assert made_.target.cos_sin_LA[1, 1].item() == pytest.approx(
        torch.tensor(10000 ** (-1 / 8)).cos()
    )
    text = texts()[0]
    given = made_.head.given(torch.empty(0), taps_of(made_, text))
    close(
        made_.steps.states([(0, 0, text[1:], given)])[0],
        made_.oracle.states(text[1:], made_.oracle.given(taps_of(made_, text))),
    )


@pytest.mark.parametrize("variant", ["EAGLE", "two layers", "the target's vocabulary"])
def test_heads_over_two_ranks(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks have equal states, and together the logits of one rank, in spans of 128 and 72."""
    expected = made(tmp_path, variant)
    text = texts()[0]
    taps = taps_of(expected, text)
    given = expected.head.given(torch.empty(0), taps)
    states = expected.steps.states([(0, 0, text[1:], given)])[0]
    logits = expected.head.logits(states)
    monkeypatch.setattr(cut, "BLOCK", 64)
    meeting = Meeting(2)
    meshes = [ThreadMesh(rank, 2, meeting) for rank in range(2)]
    heads = [head_of(tmp_path, load(tmp_path / "target", mesh), mesh) for mesh in meshes]

    def run(rank: int) -> tuple[Tensor, Tensor]:
        head = heads[rank]
        layout = Decoder.cache_layout(head.spec.config, meshes[rank], 4)
        assert layout.paged[0].num_heads == 1
        steps = HeadSteps(head, layout, 2)
        given = head.given(torch.empty(0), taps)
        state = steps.states([(0, 0, text[1:], given)])[0]
        return state, head.logits(state)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(2)))
    assert torch.equal(found[0][0], found[1][0])
    close(found[0][0], states)
    assert [part.shape[1] for _, part in found] == [128, 72]
    close(torch.cat([part for _, part in found], 1), logits)


def test_a_rank_without_draft_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 40 draft tokens are among the first 64, which are those of rank 0."""
    made_ = made(tmp_path, "EAGLE")
    tensors = eagle3_tensors()
    tensors["d2t"] = torch.full((40,), 5)
    del tensors["t2d"]
    save_head(tmp_path / "head", tensors)
    monkeypatch.setattr(cut, "BLOCK", 64)
    state = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    expected = head_of(tmp_path, made_.target).logits(state)
    found = []
    for rank in range(4):
        mesh = Mesh(rank, 4)
        fields = dict(num_key_value_heads=4)
        save_head(tmp_path / "head", {**tensors, **wide_keys(tensors)}, **fields)
        target = load(tmp_path / "target", mesh)
        found.append(head_of(tmp_path, target, mesh).logits(state))
    assert [part.shape[1] for part in found] == [64, 64, 64, 8]
    assert torch.isneginf(torch.cat(found[1:], 1)).all()
    torch.testing.assert_close(torch.cat(found, 1), expected)
    assert int(found[0].isfinite().sum()) == 3 * 40


def wide_keys(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of keys and values with twice the heads, so that 4 ranks can share them."""
    names = [name for name in tensors if name.endswith(("k_proj.weight", "v_proj.weight"))]
    return {name: tensors[name].repeat(2, 1) for name in names}


def test_random_heads_are_the_same_over_ranks(tmp_path: Path) -> None:
    """With load.format dummy a folder needs config.json only. Draft tokens are spread evenly."""
    made(tmp_path, "EAGLE")
    (tmp_path / "head" / "model.safetensors").unlink()
    config = config_of(tmp_path / "target", Load(format="dummy", seed=3))
    spec = read_eagle3(tmp_path / "head", read_model_config(config)[1], is_dummy=True)
    heads = []
    for mesh in (Mesh(), Mesh(0, 2), Mesh(1, 2)):
        target = load(tmp_path / "target", mesh)
        with CPU, default_dtype(torch.float32):
            head = Eagle3Head(spec, target, mesh, select_ops(Kernels(), CPU), max_tokens=80)
        fill(head, config, tmp_path / "head")
        heads.append(head)
    whole, *ranks = heads
    ids = whole.draft_ids
    assert ids is not None and ids.columns_X.tolist() == list(range(0, 200, 5))
    assert all(torch.equal(rank.fc.weight, whole.fc.weight) for rank in ranks)
    down = torch.cat([rank.layers[0].mlp.down.weight for rank in ranks], 1)
    assert torch.equal(down, whole.layers[0].mlp.down.weight) and float(down.std()) > 0.1


def test_heads_of_quantised_targets_stay_as_they_are(tmp_path: Path) -> None:
    """Trap 13: the weights of a head keep the model's dtype if the target is quantised to fp8."""
    fields = dict(hidden_size=128, intermediate_size=256)
    make_tiny(tmp_path / "target", FAMILY, num_hidden_layers=DEPTH, **fields)
    save_head(tmp_path / "head", eagle3_tensors(target_size=128, **fields), **fields)
    config = config_of(tmp_path / "target")
    config = struct_with(config, recipe=struct_with(config.recipe, quantize="fp8"))
    family, model_config = read_model_config(config)
    with CPU, default_dtype(torch.float32):
        target = family(model_config, Mesh(), select_ops(Kernels(), CPU), MAX_TOKENS)
        spec = read_eagle3(tmp_path / "head", model_config)
        head = Eagle3Head(spec, target, Mesh(), select_ops(Kernels(), CPU), max_tokens=MAX_TOKENS)
    fill(head, config, tmp_path / "head")
    assert target.layers[0].mlp.down.weight.dtype == FP8
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float32}
