"""Logits equal those of transformers, in float32 on the CPU, for any schedule of prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from nanovllm_kernels.norms.reference import rms_norm, silu_mul
from nanovllm_kernels.products import library_linear
from safetensors import safe_open
from torch import Tensor, _dynamo
from transformers import AutoConfig

from nanovllm.attention import latent
from nanovllm.config import Kernels
from nanovllm.layers.kernels import FUSED, select_ops
from nanovllm.layers.ops import Ops
from nanovllm.layers.products import preference
from nanovllm.layers.rope import cos_sin_table
from nanovllm.models.config import read_model_config
from nanovllm.models.weights import destinations
from nanovllm.parallel.mesh import Mesh
from tests.models.steps import CPU, Steps, load
from tests.models.tiny import CASES, LLAMA3_ROPE, YARN, config_of, make_tiny

Schedule = list[tuple[int, int]]  # per step, the number of tokens that each of two prompts feeds
SCHEDULES: dict[str, Schedule] = {
    "whole": [(33, 29)],
    "chunks": [(7, 3), (5, 5), (5, 5), (16, 16)],  # rows of equal counts and unequal lengths
    "one late": [(16, 0), (1, 8), (1, 20), (15, 1)],
    "decode": [(30, 26), (1, 1), (1, 1), (1, 1)],
    "token by token": [(1, 1)] * 29 + [(1, 0)] * 4,
}
LENGTHS = (33, 29)
YARN_ALONE = dict(  # as in Qwen3's model cards; cosines and sines are scaled
    rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=2000
)


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 200, (length,), generator=generator) for length in LENGTHS]


def expected_logits(reference: torch.nn.Module) -> list[Tensor]:
    with torch.inference_mode():
        return [reference(prompt[None]).logits[0] for prompt in prompts()]


def our_logits(steps: Steps, schedule: Schedule) -> list[Tensor]:
    """Return the logits of each prompt, concatenated over steps."""
    pieces: list[list[Tensor]] = [[], []]
    for counts in schedule:
        fed = iter(steps.feed(counts))
        for row, count in enumerate(counts):
            if count:
                pieces[row].append(next(fed))
    return [torch.cat(each) for each in pieces]


def assert_equal_logits(got: list[Tensor], expected: list[Tensor], case: str = "") -> None:
    """For recurrent layers, transformers' own results vary by 2e-4 with the number of steps."""
    atol = 5e-4 if case.startswith(("qwen3_next", "qwen3_5")) else 1e-4
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    expected = expected_logits(make_tiny(tmp_path, family, **overrides))
    model = load(tmp_path)
    for schedule in SCHEDULES.values():
        steps = Steps(tmp_path, model, prompts(), Mesh())
        assert_equal_logits(our_logits(steps, schedule), expected, case)


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_of_all_tokens_give_the_same_logits(case: str, tmp_path: Path) -> None:
    """Two tokens are sampled, one in the middle of a prompt and one at an end."""
    family, overrides = CASES[case]
    expected = torch.cat(
        [
            row[:n]
            for row, n in zip(
                expected_logits(make_tiny(tmp_path, family, **overrides)), (7, 3), strict=True
            )
        ]
    )
    model, predicting = load(tmp_path), torch.tensor([9, 2])
    found = []
    for all_hidden in (False, True):
        steps = Steps(tmp_path, model, prompts(), Mesh())
        batch = replace(steps.batch((7, 3)), sampled_at=predicting)
        found.append(steps.hidden(batch, all_hidden=all_hidden))
    narrow_SD, all_TD = found
    assert (len(narrow_SD), len(all_TD)) == (2, 10)
    assert_equal_logits([model.logits(narrow_SD)], [expected[predicting]], case)
    assert_equal_logits([model.logits(all_TD)], [expected], case)
    torch.testing.assert_close(batch.sampled(all_TD), narrow_SD, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("deepseek_v3")])
def test_latents_expanded_for_chunks_give_the_same_logits(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent, "FEW", 4)
    monkeypatch.setattr(latent, "PIECE", 9)
    family, overrides = CASES[case]
    expected = expected_logits(make_tiny(tmp_path, family, **overrides))
    model = load(tmp_path)
    for schedule in SCHEDULES.values():
        steps = Steps(tmp_path, model, prompts(), Mesh())
        assert_equal_logits(our_logits(steps, schedule), expected)


def ops_with(**kernels: object) -> Ops:
    """Return the operations of a CPU with further kernels of products."""
    return replace(select_ops(Kernels(), CPU), products=preference(kernels))


class InPlace:
    """Stand-in for products of few rows that adds to the residual stream in place."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def fits(self, num_rows: int, weight_ND: Tensor, **kind: bool) -> bool:
        return num_rows <= 8

    def linear(self, x_TD: Tensor, weight_ND: Tensor) -> Tensor:
        self.calls.append("linear")
        return x_TD @ weight_ND.T

    def linear_add(self, x_TD: Tensor, weight_ND: Tensor, residual_TN: Tensor) -> Tensor:
        self.calls.append("add")
        return residual_TN.add_(x_TD @ weight_ND.T)

    def norm_linear(
        self,
        x_TD: Tensor,
        norm_weight_D: Tensor,
        eps: float,
        weight_ND: Tensor,
        *,
        gated: bool = False,
    ) -> Tensor:
        self.calls.append("gated" if gated else "normed")
        y_TN = rms_norm(x_TD, norm_weight_D, eps) @ weight_ND.T
        return silu_mul(y_TN) if gated else y_TN


@pytest.mark.parametrize("case", ["qwen3", "llama gqa 1, tied"])
def test_products_of_few_rows_add_to_the_residual_stream(case: str, tmp_path: Path) -> None:
    """Some steps use these products and others do not; a layer uses all or none."""
    family, overrides = CASES[case]
    expected = expected_logits(make_tiny(tmp_path, family, **overrides))
    products = InPlace()
    model = load(tmp_path, ops=ops_with(skinny_linear=products))
    steps = Steps(tmp_path, model, prompts(), Mesh())
    assert_equal_logits(our_logits(steps, SCHEDULES["one late"]), expected)
    # These steps have 16, 9, 21 and 16 tokens, so none has few.
    assert products.calls == []
    steps = Steps(tmp_path, model, prompts(), Mesh())
    assert_equal_logits(our_logits(steps, SCHEDULES["decode"]), expected)
    assert products.calls == [*["normed", "add", "gated", "add"] * 2, "linear"] * 3


@pytest.mark.parametrize(("case", "num_sliced"), [("qwen3", 3), ("llama gqa 1, tied", 2)])
def test_products_in_slices_and_onto_the_stream(
    case: str, num_sliced: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One case slices all products but gate and up, and large qkv. The other adds o and down."""
    family, overrides = CASES[case]
    expected = expected_logits(make_tiny(tmp_path, family, **overrides))
    monkeypatch.setattr(library_linear, "LEAST_SLICED_ROWS", 1)
    monkeypatch.setattr(library_linear, "LEAST_ADDED_WORK", 1)
    for field, product, times in (
        ("sliced_linear", library_linear.SLICED_LINEAR, num_sliced),
        ("added_linear", library_linear.ADDED_LINEAR, 2),
    ):
        counted = Mock(wraps=product, fits=product.fits)
        model = load(tmp_path, ops=ops_with(**{field: counted}))
        for schedule in ("one late", "decode"):
            steps = Steps(tmp_path, model, prompts(), Mesh())
            assert_equal_logits(our_logits(steps, SCHEDULES[schedule]), expected)
        assert counted.call_count == times * 2 * (4 + 4)  # layers, steps


@pytest.mark.parametrize(
    ("case", "backend"),
    [("minimax_m2", "aot_eager"), ("deepseek_v3", "aot_eager"), ("qwen3_next", "inductor")],
)
def test_compiled_operations_give_the_same_logits(
    case: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each operation is compiled at most eight times, which is torch's limit, in one family.

    One family uses each operation, and it alone takes the time to compile them in C++.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    family, overrides = CASES[case]
    expected = expected_logits(make_tiny(tmp_path, family, **overrides))
    _dynamo.reset()
    model = load(tmp_path, ops=select_ops(Kernels(**dict.fromkeys(FUSED, "compile")), CPU))
    with _dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for schedule in SCHEDULES.values():
            steps = Steps(tmp_path, model, prompts(), Mesh())
            assert_equal_logits(our_logits(steps, schedule), expected, case)
    num_frames = _dynamo.utils.counters["frames"]
    assert num_frames["ok"] == num_frames["total"] >= 6
    assert not _dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("case", CASES)
def test_no_tensor_is_invisible(case: str, tmp_path: Path) -> None:
    """Removing any tensor of the checkpoint changes a logit. Norm weights become 1, others 0."""
    family, overrides = CASES[case]
    make_tiny(tmp_path, family, **overrides)
    model = load(tmp_path)
    lengths = LENGTHS if "top 1" in case else (17, 9)  # enough for each expert to have tokens
    few = [prompt[:length] for prompt, length in zip(prompts(), lengths, strict=True)]

    def run() -> Tensor:
        return torch.cat(our_logits(Steps(tmp_path, model, few, Mesh()), [lengths]))

    whole = run()
    places = destinations(model, model.WEIGHTS)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert places.keys() == set(file.keys())
    for name, place in places.items():
        kept = place.into.clone()
        place.into.fill_(1.0 if place.into.ndim == 1 else 0.0)
        moved = (run() - whole).abs().max() / whole.abs().mean()
        place.into.copy_(kept)
        assert moved > 1e-2, f"{name} moves the logits by {moved:.1e} only"


@pytest.mark.parametrize(
    "overrides",
    [{}, *({"rope_parameters": rope} for rope in (LLAMA3_ROPE, YARN, YARN_ALONE))],
    ids=["plain", "llama3", "yarn", "yarn of other models"],
)
def test_rope_table_is_transformers(overrides: dict[str, object], tmp_path: Path) -> None:
    reference = make_tiny(tmp_path, "llama", **overrides)
    _, config = read_model_config(config_of(tmp_path))
    positions = torch.arange(5000)[None]
    cos, sin = reference.model.rotary_emb(torch.zeros(1), positions)
    half = config.head_size // 2
    expected = torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=1)
    table = cos_sin_table(config.rope_parameters, config.head_size, 5000)
    torch.testing.assert_close(table, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("case", "rope"), [("llama", LLAMA3_ROPE), ("deepseek_v3", YARN)])
def test_scaling_matters_in_these_tests(case: str, rope: dict[str, object], tmp_path: Path) -> None:
    family, overrides = CASES[case]
    scaled = expected_logits(make_tiny(tmp_path, family, **{**overrides, "rope_parameters": rope}))
    plain = expected_logits(make_tiny(tmp_path, family, **{**overrides, "rope_parameters": None}))
    assert (scaled[0] - plain[0]).abs().max() > 0.1


def test_the_older_rope_spelling_is_the_same_model(tmp_path: Path) -> None:
    """The Hub has rope_theta and rope_scaling; transformers 5 saves rope_parameters."""
    expected = expected_logits(make_tiny(tmp_path, "llama", rope_parameters=LLAMA3_ROPE))
    raw = AutoConfig.from_pretrained(tmp_path).to_dict()
    scaling = raw.pop("rope_parameters")
    raw["rope_theta"] = scaling.pop("rope_theta")
    raw["rope_scaling"] = scaling
    del raw["head_dim"]  # Llama: hidden_size / num_attention_heads, 16 in both cases
    (tmp_path / "config.json").write_text(json.dumps(raw))
    steps = Steps(tmp_path, load(tmp_path), prompts(), Mesh())
    assert_equal_logits(our_logits(steps, [LENGTHS]), expected)
