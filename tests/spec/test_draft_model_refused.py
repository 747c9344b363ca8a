"""Draft models that do not fit are refused with one line, and those that fit are planned for."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace

from nanovllm.bench.gpus import gpu_of
from nanovllm.bench.plan import WEIGHTS, plan_of
from nanovllm.config import Config, ConfigError, Load, Speculate, load_config
from nanovllm.runner.resolved import resolve_config
from nanovllm.runner.room import need_of
from tests.models.tiny import NEXT, config_of, make_tiny
from tests.whole_engine import GREEDY, WholeEngine

DUMMY = ("load.format=dummy", "speculate.method=draft_model")
SMALL = "recipes/configs/Qwen3-0.6B.json"


def given(config: Config, **keys: object) -> Config:
    speculate = Speculate(method="draft_model", **keys)
    return replace(config, recipe=replace(config.recipe, speculate=speculate))


def line_of(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_config(config)
    return str(caught.value)


def with_tokens(folder: Path, *tokens: str) -> None:
    vocabulary = {token: at for at, token in enumerate(tokens)}
    text = msgspec.json.encode({"model": {"vocab": vocabulary}, "version": str(folder)})
    (folder / "tokenizer.json").write_bytes(text)


def test_a_model_that_does_not_fit_is_one_line(tmp_path: Path) -> None:
    own, other, hybrid = (tmp_path / name for name in ("own", "other", "hybrid"))
    make_tiny(own, "qwen3")
    make_tiny(other, "llama", vocab_size=201)
    make_tiny(hybrid, "qwen3_next", **NEXT)
    config = config_of(own)
    assert line_of(given(config)) == (
        "speculate.model is missing; give the folder of a small model"
    )
    assert line_of(given(config, model="/nowhere")) == (
        "speculate.model: /nowhere is not a folder; give that of a small model"
    )
    for place in ("~nobody-at-all/x", "x" * 300):
        assert line_of(given(config, model=place)) == (
            f"speculate.model: {place} is not a folder; give that of a small model"
        )
    random = replace(config, recipe=replace(config.recipe, load=Load(format="dummy")))
    assert line_of(given(random, model=(place := "x" * 300 + ".json"))) == (
        f"speculate.model: {place} is not a folder; give that of a small model"
    )
    assert line_of(given(config, model=SMALL)) == (
        f"speculate.model: {SMALL} is not a folder; give that of a small model"
    )
    assert line_of(given(config, model=str(other))) == (
        f"speculate.model: {other} has a vocabulary of 201 tokens, the model one of 200; give a "
        "model of the same tokenizer"
    )
    assert line_of(given(config, model=str(hybrid))) == (
        f"speculate.model: {hybrid} has recurrent layers, which a draft model cannot have; give a "
        "model with attention in all layers"
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    assert str(empty) in line_of(given(config, model=str(empty)))


def test_the_tokens_are_compared_if_both_have_a_tokenizer(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own, other):
        make_tiny(folder, "qwen3")
    config = given(config_of(own), model=str(other))
    with_tokens(own, "a", "b")
    assert resolve_config(config).drafts is not None
    with_tokens(other, "a", "b")  # the same tokens in another file
    assert resolve_config(config).drafts is not None
    with_tokens(other, "b", "a")
    assert line_of(config) == (
        f"speculate.model: the tokens of {other}/tokenizer.json are not those of "
        f"{own}/tokenizer.json; give a model of the same tokenizer"
    )
    (other / "tokenizer.json").write_text("[]")
    assert "tokenizer.json is not a tokenizer" in line_of(config)


def test_weights_and_cache_of_both_models_are_planned_for() -> None:
    """Qwen3-8B with 0.6B: 147,456 + 114,688 bytes of cache a token."""
    plain = load_config("qwen3-8b", [DUMMY[0]])
    both = load_config("qwen3-8b", [*DUMMY, f"speculate.model={SMALL}"])
    gpu = gpu_of("h200")
    before, after = plan_of(plain, gpu, 1), plan_of(both, gpu, 1)
    small = plan_of(load_config("qwen3-0.6b", [DUMMY[0]]), gpu, 1)
    assert after.used[WEIGHTS] == before.used[WEIGHTS] + small.used[WEIGHTS]
    assert after.resolved.layout.bytes_per_token == 147_456 + 114_688
    assert [group.layers[0] for group in after.resolved.layout.paged] == [0, 36]
    assert after.resolved.own_layout == before.resolved.layout
    assert after.decode_s(1, 1000) == before.decode_s(1, 1000)
    one, two = (need_of(resolve_config(replace_device(config))) for config in (plain, both))
    assert (
        two.parameters - one.parameters
        == need_of(resolve_config(replace_device(load_config("qwen3-0.6b", [DUMMY[0]])))).parameters
    )


def replace_device(config: Config) -> Config:
    return replace(config, recipe=replace(config.recipe, device="cpu"))


def test_given_rates_are_the_share_of_accepted_drafts() -> None:
    """The rates of some hundred steps are within four standard errors."""
    config = load_config(None, ["device=cpu"])
    rates = [0.7, 0.5, 0.2]
    speculate = Speculate(method="draft_model", accept=rates, adapt=False)
    engine = WholeEngine(config, speculate=speculate, page_tokens=32)
    for i in range(8):
        engine.submit(i, [5 + i, 9, 11], 100, replace(GREEDY, seed=i))
    engine.run()
    stats = engine.scheduler.stats()
    assert all(len(text) == 100 for text in engine.text.values())
    for rate, accepted in zip(rates, stats.accepted_by_position, strict=True):
        error = (rate * (1 - rate) / stats.num_drafts) ** 0.5
        assert abs(accepted / stats.num_drafts - rate) < 4 * error


def test_pages_that_a_slot_does_not_have_are_the_padding_page(tmp_path: Path) -> None:
    """A slot's page table ends with zeros, also after a longer request in the same slot."""
    make_tiny(tmp_path, "qwen3")
    config = config_of(tmp_path)
    engine = WholeEngine(config, slots=1, page_tokens=4)
    for number, length in enumerate((40, 9)):
        engine.submit(number, [*range(3, 3 + length)], 2)
        engine.run()
        table_M = engine.runner.slots.pages_NM[0]
        num_pages = -(-(length + 1) // 4)
        assert bool((table_M[:num_pages] > 0).all()) and not table_M[num_pages:].any()
    assert torch.equal(engine.runner.slots.pages_NM[1], torch.zeros_like(table_M))
