"""Corrupted rows, and cleaning and copying of pages, on a GPU: kernels, backends and graphs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from nanovllm_kernels.sampling import draw as sampling, thresholds
from nanovllm_kernels.sampling.reference import CORRUPTED

from nanovllm.config import Cache, Config, Kernels, Schedule, Server
from nanovllm.kv.layout import CacheLayout, PagedGroup
from nanovllm.plan import StepPlan
from nanovllm.runner.build import build
from nanovllm.runner.caches import make_caches
from nanovllm.runner.runner import Runner
from nanovllm.wire import Sampling
from tests.gpu.test_engine import SHAPE
from tests.models.corrupted import POISON
from tests.models.tiny import config_of, make_tiny
from tests.runner.plans import Plans, admit

CUDA = torch.device("cuda")
WRONG = (math.nan, math.inf, -math.inf)  # the last one fills a whole row
MODES = {
    "flash, graphs": Kernels(attention="flash"),
    "flash, eager": Kernels(attention="flash", cuda_graphs=False),
    "flash, triton decodes": Kernels(attention="flash", decode="triton"),
    "triton, graphs": Kernels(attention="triton"),
    "torch, eager": Kernels(attention="torch", sample="torch", batch_prep="torch"),
}
PAGE_TOKENS, NUM_PAGES = 128, 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [151_936, 128_256, 5003, 2049])
@pytest.mark.parametrize("rows", [1, 7, 64, 256])
def test_a_bad_number_anywhere_corrupts_its_row_alone(
    rows: int, vocab: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator(CUDA).manual_seed(rows)
    logits_SV = (torch.randn(rows, vocab, device=CUDA, generator=generator) * 4).to(dtype)
    logits_SV[:, 5:17] = -math.inf
    slots_S = torch.randperm(rows, device=CUDA, generator=generator)
    inverses_N = torch.tensor([0.0, 1.0, 1.6, 30.0], device=CUDA).repeat(rows)[:rows].contiguous()
    top_ks_N = torch.tensor([0, 20, 0], device=CUDA, dtype=torch.int32).repeat(rows)[:rows]
    top_ps_N = torch.tensor([1.0, 1.0, 0.9, 0.5, 1.0], device=CUDA).repeat(rows)[:rows]
    gaps_N = torch.tensor([-math.inf] * 6 + [-3.0], device=CUDA).repeat(rows)[:rows]
    args = slots_S, slots_S * 77, inverses_N, slots_S << 40
    wishes = slots_S, inverses_N, top_ks_N.contiguous(), top_ps_N.contiguous(), gaps_N.contiguous()

    def drawn(truncated: bool) -> torch.Tensor:
        thresholds_S = thresholds.thresholds(logits_SV, *wishes) if truncated else None
        return sampling.draw(logits_SV, *args, thresholds_S)

    fine = [drawn(truncated) for truncated in (False, True)]
    assert all((tokens_S >= 0).all() and (tokens_S < vocab).all() for tokens_S in fine)
    is_wrong = torch.rand(rows, device=CUDA, generator=generator) < 0.5
    is_wrong[0] = True
    for at, row in enumerate(is_wrong.nonzero()[:, 0].tolist()):
        place = torch.randint(0, vocab, (), device=CUDA, generator=generator)
        value = WRONG[at % 3]
        logits_SV[row, slice(None) if value < 0 else place] = value
    for tokens_S, truncated in zip(fine, (False, True), strict=True):
        expected = tokens_S.where(~is_wrong, CORRUPTED)
        assert torch.equal(drawn(truncated), expected)


def test_pages_beyond_the_reach_of_32_bits() -> None:
    """Only the given pages at the end of the last layer change."""
    layout = CacheLayout((PagedGroup((0, 1, 2), 8, 128, 128, 2),))
    caches = make_caches(layout, 8000, 128, torch.bfloat16, CUDA)
    keys, values = caches.tensors
    assert keys.numel() > 1 << 31
    for cells in (keys, values):
        cells[:, 7990:] = torch.arange(11, device=CUDA)[:, None, None, None].to(cells) + 1
    clean, copies = [7993, 8000], [(7991, 7998), (7994, 1)]
    plan = StepPlan(
        step=1, admits=[], grants=[], num_decodes=0, decodes=b"", chunks=[], max_length=8,
        masked=[], clean=clean, copies=copies,
    )  # fmt: skip
    caches.apply(plan)
    for cells in (keys, values):
        for layer in range(3):
            for page, number in {
                1: 5,
                7990: 1,
                7992: 3,
                7993: 0,
                7998: 2,
                7999: 10,
                8000: 0,
            }.items():
                assert (cells[layer, page] == number).all()
            assert not cells[layer, 0].any() and not cells[layer, 2:7990].any()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder: Path = tmp_path_factory.mktemp("poisoned")
    model = make_tiny(folder, "qwen3", **SHAPE, max_position_embeddings=2048).bfloat16()
    model.get_input_embeddings().weight.data[POISON] = math.nan
    model.get_output_embeddings().weight.data[POISON] = 0  # the model rarely draws this token
    model.save_pretrained(folder)
    return config_of(folder)


@pytest.fixture(scope="module", params=MODES)
def runner(request: pytest.FixtureRequest, config: Config) -> Runner:
    recipe = replace(
        config.recipe,
        device="cuda",
        kernels=MODES[request.param],
        cache=Cache(pages=NUM_PAGES, page_tokens=PAGE_TOKENS),
        schedule=Schedule(slots=16, step_tokens=1024),
        server=Server(max_model_tokens=1024),
    )
    return build(replace(config, recipe=recipe)).runner


@pytest.fixture(autouse=True)
def clean_caches(request: pytest.FixtureRequest) -> None:
    if "runner" in request.fixturenames:
        for cells in request.getfixturevalue("runner").caches.tensors:
            cells.zero_()


def prompt_of(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(POISON + 1, SHAPE["vocab_size"], (count,), generator=generator).tolist()


def test_neighbours_of_a_corrupted_row_are_as_beside_a_sound_one(runner: Runner) -> None:
    """12 rows use the CuTe DSL kernel in decode steps. Steps have the same shape in both runs."""
    texts = []
    for poisoned in (False, True):
        plans, prompts = Plans(runner), [prompt_of(40 + 9 * i, i) for i in range(12)]
        if poisoned:
            prompts[3][20] = prompts[8][0] = POISON
        # At this temperature no row draws the poisoned token.
        asked = [Sampling(temperature=0.0), Sampling(temperature=0.2, seed=5)]
        admits = [
            admit(i, prompt, [1 + 2 * i, 2 + 2 * i], 0, asked[i % 2])
            for i, prompt in enumerate(prompts)
        ]
        steps = [plans.step(admits, (), {i: len(prompt) for i, prompt in enumerate(prompts)})]
        steps += [plans.step((), range(12)) for _ in range(20)]
        texts.append([[step[i] for step in steps] for i in range(12)])
        assert (runner.slots.tokens_NL >= 0).all()
    sound, beside = texts
    for i in range(12):
        assert CORRUPTED not in sound[i]
        assert beside[i] == ([CORRUPTED] * 21 if i in (3, 8) else sound[i])


def test_pages_with_nan_serve_again_once_they_are_cleaned(runner: Runner) -> None:
    poisoned, prompt = [*prompt_of(200, 1), POISON], prompt_of(150, 2)
    expected = Plans(runner).text(0, prompt, [9, 10], 30)
    assert CORRUPTED not in expected
    plans = Plans(runner)
    for _ in range(2):
        # All cells of these pages are NaN, since later tokens attend to the first.
        everywhere = [POISON, *prompt_of(255, 3)]
        assert plans.text(1, everywhere, [11, 12], 1) == [CORRUPTED]
        assert plans.text(1, poisoned, [13, 14], 3) == [CORRUPTED] * 3
        assert plans.text(2, prompt, [12, 11], 30, clean=[11, 12]) == expected
        assert plans.text(2, prompt, [14, 13], 30, clean=[13, 14]) == expected


def test_flash_attention_reads_past_the_end_so_cleaning_is_needed(config: Config) -> None:
    recipe = replace(
        config.recipe,
        device="cuda",
        kernels=Kernels(attention="flash", cuda_graphs=False),
        cache=Cache(pages=NUM_PAGES, page_tokens=PAGE_TOKENS),
        schedule=Schedule(slots=16, step_tokens=1024),
        server=Server(max_model_tokens=1024),
    )
    plans = Plans(build(replace(config, recipe=recipe)).runner)
    assert plans.text(1, [POISON, *prompt_of(255, 3)], [11, 12], 1) == [CORRUPTED]
    assert plans.text(2, prompt_of(150, 2), [12, 11], 2) == [CORRUPTED] * 2


@pytest.mark.parametrize("shared", [128, 100, 131, 150])
def test_a_copied_page_carries_a_prompt_on_from_any_token(runner: Runner, shared: int) -> None:
    """Steps have the same shapes, so results are equal bit for bit."""
    first = prompt_of(190, 4)
    second = [*first[:shared], *prompt_of(60, 5)]

    def go_on(plans: Plans, slot: int) -> list[int]:
        tokens = [plans.step((), (), {slot: 60})[slot]]
        return [*tokens, *(plans.step((), [slot])[slot] for _ in range(19))]

    whole = Plans(runner)
    whole.step([admit(0, second, [20, 21])], (), {0: shared}, partial=[0])
    expected = go_on(whole, 0)
    plans = Plans(runner)
    plans.step([admit(1, first, [22, 23])], (), {1: shared}, partial=[1])
    plans.step((), (), {1: 190 - shared})
    at, cut = divmod(shared, PAGE_TOKENS)
    copies = [([22, 23][at], 25)] if cut else []
    carried = admit(2, second, [22, 25] if at else [25, 26], shared)
    found = [plans.step([carried], (), {2: 60}, copies=copies)[2]]
    found += [plans.step((), [2])[2] for _ in range(19)]
    assert found == expected
    without = plans.text(3, second, [27, 28], 20, num_cached=shared)
    assert sum(a == b for a, b in zip(without, expected, strict=True)) < 5
