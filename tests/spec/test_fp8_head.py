"""MTP drafts that are read from an fp8 copy of the output head: the text is the plain one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from nanovllm_kernels.fp8_reference import quantise_weight, spread

from nanovllm.bench.gpus import KNOWN
from nanovllm.bench.plan import WEIGHTS, plan_of
from nanovllm.config import Kernels, load_config
from nanovllm.layers.fp8 import COPIED
from nanovllm.layers.kernels import select_ops
from nanovllm.models.weights import default_dtype
from tests.engine.test_ranks import SMALL, cut, ranked, text_of
from tests.models.steps import load
from tests.models.test_mtp import CPU, MAX_TOKENS, loader_of, made
from tests.models.tiny import V3
from tests.spec.test_heads import CASES, GREEDY, HOT, Recorder, texts
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
    for head_dtype in ("own", "fp8"):
        recorder = Recorder(monkeypatch)
        speculate = replace(pair.speculate, head_dtype=head_dtype)
        assert texts(pair, speculate, sampling)[0] == plain
        drafts[head_dtype] = {tuple(text): found[0] for text, found in recorder.drafts}
    assert drafts["own"].keys() == drafts["fp8"].keys() and len(drafts["own"]) >= 30
    equal = [drafts["fp8"][text] == draft for text, draft in drafts["own"].items()]
    assert sum(equal) / len(equal) >= LEAST_EQUAL


def test_logits_are_those_of_the_head_in_fp8(tmp_path: Path) -> None:
    """More rows than are quantised at a time, and a number that blocks of 128 do not divide."""
    vocabulary = COPIED + 1000
    made(tmp_path, "deepseek_v3", vocab_size=vocabulary, **V3)
    target, loader = load(tmp_path), loader_of(tmp_path)
    with CPU, default_dtype(torch.float32):
        ops = select_ops(Kernels(), CPU)
        head = loader.empty(target, ops, MAX_TOKENS, fp8_head=True)
    loader.fill(head)
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
    speculate = replace(speculate, head_dtype="fp8")
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
    for head_dtype in ("auto", "fp8", "own"):
        config = load_config(recipe, [*flags, f"speculate.head_dtype={head_dtype}"])
        weights[head_dtype] = plan_of(config, KNOWN["h200"], tp).used[WEIGHTS]
    assert weights["auto"] == weights["fp8"] == weights["own"] + copied
