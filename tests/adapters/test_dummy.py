"""Random adapters without files, for measurements."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from nanovllm.adapters.section import Adapters, located, num_rank_pages
from nanovllm.bench import offline
from nanovllm.bench.workload import TokenLoad
from nanovllm.cli.bench import bench
from nanovllm.config import Config, ConfigError, Load, load_config
from nanovllm.wire import Sampling
from tests.bench.test_online import PaperEngine
from tests.models.tiny import config_of, make_tiny
from tests.whole_engine import GREEDY, WholeEngine

DUMMIES = Adapters(folder="dummy", slots=3, max_rank=17)


def with_dummies(folder: Path) -> Config:
    make_tiny(folder, "qwen3")
    config = config_of(folder)
    adapters = located(DUMMIES, Path(), (), is_dummy_model=True)
    recipe = replace(config.recipe, adapters=adapters, load=Load(format="dummy"))
    return replace(config, recipe=recipe)


def test_dummies_change_every_product_and_are_alike(tmp_path: Path) -> None:
    config = with_dummies(tmp_path)
    assert (
        config.recipe.adapters is not None and num_rank_pages(config.recipe.adapters, [17] * 3) == 6
    )
    engine = WholeEngine(config)
    bank = engine.runner.adapters
    assert bank is not None and [*bank.host] == [1, 2, 3]
    assert bank.host[1] is bank.host[3]  # 64 of them are one copy on the host
    assert bank.layout.width == 2 * (3 * 64 + 64 + 2 * 32 + 2 * 64 + 2 * 64 + 2 * 96 + 96 + 64)
    assert bank.host[1][:17].std().item() == pytest.approx(0.02, rel=0.02)
    assert not bank.host[1][17:].any()
    for i, name in enumerate(("", "dummy-0", "dummy-2")):
        engine.submit(i, [5, 6, 7], 3, Sampling(temperature=0.0, logprobs=1), adapter=name)
    engine.run()
    found = [[entry.logprob for entry in engine.logprobs[i]] for i in range(3)]
    assert found[1] == pytest.approx(found[2], abs=1e-6)
    assert max(abs(a - b) for a, b in zip(found[0], found[1], strict=True)) > 1e-3


def test_requests_of_an_offline_load_use_the_adapters_in_turn() -> None:
    async def main() -> list[str]:
        engine = PaperEngine()
        load = TokenLoad("x", [[1, 2]] * 5, [3] * 5, GREEDY)
        await offline.run(engine, load, lambda *_: None, ["a", "b"])
        return [request.adapter for request in engine.requests]

    assert asyncio.run(main()) == ["a", "b", "a", "b", "a"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["adapters.folder=dummy"], "needs a load.format of dummy; write ./dummy"),
        (["adapters={folder: dummy, names: [a]}", "load.format=dummy"], "adapters.names and"),
    ],
)
def test_dummies_are_for_dummy_models(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, settings)


def test_more_adapters_than_there_are_is_refused_before_the_start() -> None:
    error = CliRunner().invoke(bench, ["--offline", "--adapters", "9"]).exception
    assert isinstance(error, ConfigError)
    assert str(error).startswith("--adapters 9: the recipe has 0 adapters; add --set")
