"""Drafts by heads of EAGLE-3 in fp8, and by fp8 copies of an output head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from nanovllm_kernels.fp8_reference import BLOCK, FP8, quantise_weight, spread
from torch import Tensor

from nanovllm.bench.gpus import KNOWN
from nanovllm.bench.plan import WEIGHTS, plan_of
from nanovllm.config import Config, Kernels, Speculate, load_config
from nanovllm.layers.fp8 import COPIED
from nanovllm.layers.kernels import select_ops
from nanovllm.layers.residual import Added
from nanovllm.models.config import read_model_config
from nanovllm.models.decoder import Decoder
from nanovllm.models.eagle3 import Eagle3Head
from nanovllm.models.weights import default_dtype
from nanovllm.parallel.mesh import Mesh
from nanovllm.spec.eagle3 import Eagle3Loader
from nanovllm.wire import Sampling
from results.rows import eagle_head
from tests.engine.test_ranks import SMALL, cut, ranked, text_of
from tests.models.heads import EAGLE3, HeadSteps, eagle3_tensors, save_head
from tests.models.steps import load
from tests.models.test_mtp import CPU, MAX_TOKENS, loader_of, made
from tests.models.tiny import V3, config_of, make_tiny
from tests.spec.test_heads import CASES, GREEDY, HOT, PROMPTS, Recorder, texts
from tests.spec.test_heads_ranks import mtp
from tests.whole_engine import WholeEngine

LEAST_EQUAL = 0.8  # share of drafts that the copy leaves as they are, of 64 random inputs


@pytest.mark.parametrize("case", ["mtp deepseek_v3", "mtp qwen3_next", "mtp qwen3_5_text"])
@pytest.mark.parametrize("sampling", [GREEDY, HOT])
def test_the_text_is_the_plain_one_and_most_drafts_are_the_same(
    case: str, sampling: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, family = CASES[case]
    pair = make(tmp_path, family)
    plain = texts(pair, None, sampling)[0]
    drafts = {}
    for dtype in ("own", "fp8"):
        recorder = Recorder(monkeypatch)
        speculate = replace(pair.speculate, dtype=dtype)
        assert texts(pair, speculate, sampling)[0] == plain
        drafts[dtype] = {tuple(text): found[0] for text, found in recorder.drafts}
    assert drafts["own"].keys() == drafts["fp8"].keys() and len(drafts["own"]) >= 30
    equal = [drafts["fp8"][text] == draft for text, draft in drafts["own"].items()]
    assert sum(equal) / len(equal) >= LEAST_EQUAL


def test_a_draft_model_keeps_its_type_if_the_target_is_quantised(tmp_path: Path) -> None:
    """A copy of the target in its own type drafts most of the text of the fp8 target."""
    make_tiny(tmp_path, "qwen3", hidden_size=128, intermediate_size=256)
    config = config_of(tmp_path)
    config = replace(config, recipe=replace(config.recipe, quantize="fp8"))
    texts = []
    speculate = Speculate(method="draft_model", model=str(tmp_path), tokens=3, adapt=False)
    for drafts in (None, speculate):
        engine = WholeEngine(config, speculate=drafts, page_tokens=64)
        for i, prompt in enumerate(PROMPTS):
            engine.submit(i, prompt, 20, GREEDY)
        engine.run()
        texts.append(engine.text)
    assert texts[0] == texts[1]
    stats, draft_model = engine.scheduler.stats(), engine.runner.draft_model
    assert stats.draft_tokens > stats.accepted_tokens > 0.5 * stats.draft_tokens
    assert engine.runner.model.layers[0].mlp.down.weight.dtype == FP8
    assert {one.dtype for one in draft_model.parameters()} == {torch.float32}


def test_logits_are_those_of_the_head_in_fp8(tmp_path: Path) -> None:
    """More rows than are quantised at a time, and a number that blocks of 128 do not divide."""
    vocabulary = COPIED + 1000
    made(tmp_path, "deepseek_v3", vocab_size=vocabulary, **V3)
    target, loader = load(tmp_path), loader_of(tmp_path)
    with CPU, default_dtype(torch.float32):
        ops = select_ops(Kernels(), CPU)
        head = loader.empty(target, ops, MAX_TOKENS, fp8=True)
    loader.filler(head)()
    weight = target.head.weight
    state_SD = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(1))
    numbers, scales = quantise_weight(weight)
    expected = state_SD @ (numbers.float() * spread(scales, *weight.shape)).T
    found = head.logits(state_SD)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    error = (found - target.logits(state_SD)).norm() / found.norm()
    assert 0.005 < error < 0.04  # e4m3 has a mantissa of three bits
    assert head.head_copy.num_bytes == numbers.nbytes + scales.nbytes


def test_ranks_draft_from_their_shares(tmp_path: Path) -> None:
    """A share of 5,003 rows on two ranks begins inside a block of the whole head."""
    config, speculate = mtp(tmp_path, "deepseek_v3")
    expected = text_of(WholeEngine(config, **SMALL))
    speculate = replace(speculate, dtype="fp8")
    with ranked(cut(config, 1, 1), 2, tmp_path, speculate=speculate, **SMALL) as engine:
        assert text_of(engine) == expected
        assert engine.scheduler.stats().num_drafts > 50


@pytest.mark.parametrize(
    ("recipe", "copied"),
    [
        ("qwen3.5-35b-a3b", 248320 * 2048 + 4 * 1940 * 16),
        ("qwen3-next-80b-a3b", 38912 * 2048 + 4 * 304 * 16),  # the largest share of four
    ],
)
def test_a_plan_has_the_bytes_of_the_copy(recipe: str, copied: int) -> None:
    flags = ["load.format=dummy", "speculate.method=mtp", "speculate.tokens=2"]
    tp = 4 if "next" in recipe else 1
    weights = {}
    for dtype in ("auto", "fp8", "own"):
        config = load_config(recipe, [*flags, f"speculate.dtype={dtype}"])
        weights[dtype] = plan_of(config, KNOWN["h200"], tp).used[WEIGHTS]
    assert weights["auto"] == weights["fp8"] == weights["own"] + copied


# -- EAGLE-3 --------------------------------------------------------------------------------------

WIDE = dict(  # whole blocks of 128 in each product
    hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=4,
    head_dim=32, draft_vocab_size=64,
)  # fmt: skip


def eagle3(folder: Path, **fields: object) -> tuple[Config, dict[str, Tensor]]:
    """Save a target and a head with whole blocks, unless `fields` say otherwise."""
    given = {**WIDE, **fields}
    size = dict(hidden_size=128, vocab_size=given.get("vocab_size", EAGLE3["vocab_size"]))
    make_tiny(folder / "target", "qwen3", num_hidden_layers=5, **size)
    tensors = eagle3_tensors(target_size=128, **given)
    save_head(folder / "head", tensors, **given)
    return config_of(folder / "target"), tensors


def head_of(config: Config, folder: Path, *, fp8: bool) -> Eagle3Head:
    speculate = Speculate(method="eagle3", model=str(folder))
    config = replace(config, recipe=replace(config.recipe, speculate=speculate))
    loader = Eagle3Loader(config, read_model_config(config)[1], Mesh(), element_bytes=4)
    target = load(Path(str(config.model_dir)))
    with CPU, default_dtype(torch.float32):
        head = loader.empty(target, select_ops(Kernels(), CPU), MAX_TOKENS, fp8=fp8)
    loader.filler(head)()
    return head


@torch.inference_mode()
def outputs(head: Eagle3Head) -> list[Tensor]:
    """Return the first state of the taps, the states of 24 pairs, and their logits."""
    random = torch.Generator().manual_seed(4)
    ids, taps = torch.randint(0, 200, (24,), generator=random), []
    for _ in head.taps:
        taps.append(torch.randn(24, 128, generator=random))
    given = head.given(torch.empty(0), taps)
    steps = HeadSteps(head, Decoder.cache_layout(head.spec.config, Mesh(), 4), 1)
    (states,) = steps.states([(0, 0, ids, given)])
    logits = head.logits(states)
    return [given, states, logits[logits.isfinite()]]


@pytest.mark.parametrize("num_layers", [1, 2])
def test_every_product_of_a_head_is_that_of_its_rounded_weight(
    num_layers: int, tmp_path: Path
) -> None:
    config, tensors = eagle3(tmp_path, num_hidden_layers=num_layers)
    head = head_of(config, tmp_path / "head", fp8=True)
    types = {name: parameter.dtype for name, parameter in head.named_parameters()}
    assert {name for name, dtype in types.items() if dtype != FP8} == {
        name for name in types if name.endswith(("norm.weight", "norm_weight", "weight_scale"))
    }
    assert sum(dtype == FP8 for dtype in types.values()) == 2 + 4 * num_layers
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            numbers, scales = quantise_weight(tensor)
            tensors[name] = numbers.float() * spread(scales, *tensor.shape)
    fields = {**WIDE, "num_hidden_layers": num_layers}
    save_head(tmp_path / "rounded", tensors, **fields)
    found = outputs(head)
    for ours, same, exact in zip(
        found,
        outputs(head_of(config, tmp_path / "rounded", fp8=False)),
        outputs(head_of(config, tmp_path / "head", fp8=False)),
        strict=True,
    ):
        torch.testing.assert_close(ours, same, rtol=1e-4, atol=1e-4)
        assert 0.005 < (ours - exact).norm() / exact.norm() < 0.2


def test_a_head_without_an_output_head_reads_a_copy_of_the_targets(tmp_path: Path) -> None:
    config, _ = eagle3(tmp_path, draft_vocab_size=None)
    head = head_of(config, tmp_path / "head", fp8=True)
    assert head.head is None and head.head_copy is not None
    x_SD = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    normed_SD = head.norm(Added(x_SD))[0]
    torch.testing.assert_close(head.logits(x_SD), head.head_copy.product(normed_SD))
    assert not head.logits(x_SD).equal(load(tmp_path / "target").logits(normed_SD))


def texts_of(
    config: Config, speculate: Speculate | None, sampling: Sampling
) -> dict[int, list[int]]:
    engine = WholeEngine(config, speculate=speculate)
    for i, prompt in enumerate(PROMPTS):
        engine.submit(i, prompt, 12, sampling)
    engine.run()
    return engine.text


@pytest.mark.parametrize("sampling", [GREEDY, HOT])
def test_the_text_with_an_fp8_head_is_the_plain_one(
    sampling: Sampling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = eagle3(tmp_path)
    speculate = Speculate(
        method="eagle3", model=str(tmp_path / "head"), tokens=3, adapt=False, dtype="fp8"
    )
    plain = texts_of(config, None, sampling)
    recorder = Recorder(monkeypatch)
    assert texts_of(config, speculate, sampling) == plain
    assert len(recorder.drafts) >= 30


def test_products_that_ranks_cut_inside_a_block_keep_their_type(tmp_path: Path) -> None:
    """Two ranks halve 128 inputs of `out`, but 256 of `down` in whole blocks."""
    fields = dict(vocab_size=5003, draft_vocab_size=600)
    config, _ = eagle3(tmp_path, **fields)
    speculate = Speculate(
        method="eagle3", model=str(tmp_path / "head"), tokens=2, adapt=False, dtype="fp8"
    )
    expected = text_of(WholeEngine(config, **SMALL))
    with ranked(cut(config, 1, 1), 2, tmp_path, speculate=speculate, **SMALL) as engine:
        assert text_of(engine) == expected
        assert engine.scheduler.stats().num_drafts > 50
        head = engine.runner.draft_model
        layer = head.layers[0]
        assert layer.mlp.down.weight.dtype == layer.mlp.gate_up.weight.dtype == FP8
        assert layer.attn.out.weight.dtype == layer.attn.qkv.weight.dtype == torch.float32


def test_a_plan_has_the_bytes_of_a_head_in_fp8() -> None:
    folder = eagle_head("qwen3-8b")
    mlp, output = ((4096, 24576), (12288, 4096)), (4096, 32000)
    saved = 0
    for width, num_rows in ((3 * 4096, 4096), (2 * 4096, 6144), (4096, 4096), *mlp, output):
        saved += width * num_rows - 4 * width * num_rows // BLOCK**2
    flags = ["load.format=dummy", "speculate.method=eagle3", f"speculate.model={folder}"]
    weights = {}
    for dtype in ("auto", "fp8", "own"):
        config = load_config("qwen3-8b", [*flags, f"speculate.dtype={dtype}"])
        weights[dtype] = plan_of(config, KNOWN["h200"], 1).used[WEIGHTS]
    assert weights["auto"] == weights["fp8"] == weights["own"] - saved
