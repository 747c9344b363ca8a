"""Adapters together with ranks, chunks, preemption, drafts, masks and the prefix cache."""

from __future__ import annotations

import shutil
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from msgspec.structs import replace

from nanovllm.config import Config, Kernels, Speculate
from nanovllm.engine.adapters import AdapterChanges, ReadAdapter
from nanovllm.wire import AdapterAnswer, LoadAdapter, Sampling, UnloadAdapter
from tests.adapters.peft_adapters import config_with, save_adapter, texts_of
from tests.engine.test_ranks import ranked
from tests.models.tiny import make_tiny
from tests.whole_engine import WholeEngine, prompts_of

PROMPTS = prompts_of(8, seed=5)
CHOSEN = ["", "a", "b", "a", "", "b", "a", "b"]
MAX_NEW = 9
TIGHT = dict(pages=26, slots=4, step_tokens=24, max_tokens=90)  # chunks and preemptions
Texts = list[list[int]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a model with one KV head, which two ranks copy, and its adapters."""
    root = tmp_path_factory.mktemp("features")
    make_tiny(root / "model", "qwen3", num_attention_heads=8, num_key_value_heads=1)
    save_adapter(root / "model", root / "adapters" / "a", 1, r=3)
    save_adapter(root / "model", root / "adapters" / "b", 2, r=18, lora_alpha=20)
    return root / "model", root / "adapters"


@pytest.fixture(scope="module")
def config(folders: tuple[Path, Path]) -> Config:
    return config_with(*folders, slots=2)


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> Texts:
    model, adapters = folders
    found: dict[int, list[int]] = {}
    for name in set(CHOSEN):
        own = [i for i, chosen in enumerate(CHOSEN) if chosen == name]
        texts = texts_of(
            model, adapters / name if name else None, [PROMPTS[i] for i in own], MAX_NEW
        )
        found |= dict(zip(own, texts, strict=True))
    return [found[i] for i in range(len(PROMPTS))]


def texts(engine: WholeEngine, **settings: Any) -> Texts:
    for i, (prompt, name) in enumerate(zip(PROMPTS, CHOSEN, strict=True)):
        engine.submit(i, prompt, MAX_NEW, adapter=name, **settings)
    engine.run()
    return [engine.text[i] for i in range(len(PROMPTS))]


def test_chunks_and_preempted_requests_keep_their_adapter(config: Config, expected: Texts) -> None:
    engine = WholeEngine(config, **TIGHT)
    assert texts(engine) == expected
    assert engine.scheduler.stats().num_preemptions > 0


def test_two_ranks_share_the_adapters(config: Config, expected: Texts, tmp_path: Path) -> None:
    with ranked(config, 2, tmp_path, **TIGHT) as engine:
        bank = engine.runner.adapters
        assert bank is not None
        # k and v are copies; q, gate and up are cut in B, and o and down in A.
        qkv, out, gate_up, down = 3 * 64 + 64 + 2 * 16, 64 + 64, 2 * 64 + 96, 48 + 64
        assert bank.layout.width == 2 * (qkv + out + gate_up + down)
        assert texts(engine) == expected


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_change_no_text(
    config: Config, folders: tuple[Path, Path], expected: Texts, method: str
) -> None:
    model = str(folders[0]) if method == "draft_model" else None
    speculate = Speculate(method=method, tokens=3, min_match=1, model=model)
    engine = WholeEngine(config, speculate=speculate)
    assert texts(engine) == expected
    assert engine.scheduler.stats().draft_tokens > 0


def test_masks_apply_to_rows_with_adapters(config: Config) -> None:
    together = texts(WholeEngine(config), grammar="even")
    alone = []
    for prompt, name in zip(PROMPTS, CHOSEN, strict=True):
        engine = WholeEngine(config)
        engine.submit(0, prompt, MAX_NEW, adapter=name, grammar="even")
        engine.run()
        alone.append(engine.text[0])
    assert together == alone and all(token % 2 == 0 for text in together for token in text)


def test_no_page_is_shared_between_adapters(config: Config) -> None:
    engine, prompt = WholeEngine(config), list(range(40))
    turns = [
        ("", "", 0),
        ("", "a", 0),
        ("", "b", 0),
        ("", "a", 36),
        ("", "", 36),
        ("a", "", 0),  # a salt is not an adapter
        ("\x01", "", 0),
        ("s", "a", 0),
        ("s", "a", 36),
    ]
    for i, (salt, adapter, _) in enumerate(turns):
        engine.submit(i, prompt, 1, salt=salt, adapter=adapter)
        engine.run()
    found = [engine.cached[i] // 4 * 4 for i in range(len(turns))]
    assert found == [num_cached for _, _, num_cached in turns]


def test_a_load_reaches_all_ranks_or_none(
    folders: tuple[Path, Path], expected: Texts, tmp_path: Path
) -> None:
    model, adapters = folders
    copies = tmp_path / "copies"
    shutil.copytree(adapters, copies)
    (tmp_path / "ring").mkdir()
    config = config_with(model, copies, names=[], slots=2, max_rank=32, runtime=True)
    with ranked(config, 2, tmp_path / "ring", **TIGHT) as engine:
        arrived: SimpleQueue[ReadAdapter] = SimpleQueue()
        changes = AdapterChanges(engine.scheduler, engine.loop.executor, arrived.put)

        def load(name: str, folder: str, *, replaces: bool = False) -> str:
            answer = changes.take(LoadAdapter(1, name, folder, replaces))
            answer = answer or changes.take(arrived.get(timeout=20))
            assert answer is not None
            assert bool(answer.error) == (not answer.digest)
            assert answer.error or changes.digests[name] == answer.digest
            return answer.error

        assert load("a", "a") == load("b", "b") == ""
        assert texts(engine) == expected
        assert load("a", "a") == "the adapter 'a' is already loaded"
        (copies / "b" / "adapter_model.safetensors").write_bytes(b"")
        assert "not a complete safetensors file" in load("b", "b", replaces=True)
        assert load("b", "a", replaces=True) == ""  # the name now has the other's ranks
        bank = engine.runner.adapters
        assert bank is not None and sorted(bank.host) == [1, 4]  # 2 is forgotten, 3 was broken
        for i, name in enumerate("ab"):
            engine.submit(90 + i, PROMPTS[1], MAX_NEW, adapter=name)
        engine.run()
        assert engine.text[90] == expected[1]
        assert engine.text[91] == expected[1]  # no page of the wider adapter has stayed
        assert changes.digests["a"] == changes.digests["b"]
        # Both names have the same bytes, so they share pages; `b` before had others.
        assert engine.cached[90] > 0 == engine.cached[1] and engine.cached[91] == engine.cached[90]
        assert changes.take(UnloadAdapter(1, "b")) == AdapterAnswer(1)
        assert [*changes.digests] == ["a"]
        assert sorted(bank.host) == [1]


def test_bits_do_not_depend_on_the_other_rows(folders: tuple[Path, Path]) -> None:
    config = config_with(*folders, slots=2)
    recipe = replace(config.recipe, kernels=Kernels(invariant=True))
    config, asked = replace(config, recipe=recipe), Sampling(temperature=0.0, logprobs=1)
    together = WholeEngine(config)
    texts(together, sampling=asked)
    for i, (prompt, name) in enumerate(zip(PROMPTS, CHOSEN, strict=True)):
        alone = WholeEngine(config)
        alone.submit(i, prompt, MAX_NEW, sampling=asked, adapter=name)
        alone.run()
        assert alone.logprobs[i] == together.logprobs[i], name
