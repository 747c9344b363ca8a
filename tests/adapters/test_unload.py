"""Adapters that are unloaded or replaced while requests have them."""

from __future__ import annotations

import shutil
from pathlib import Path
from queue import SimpleQueue

from nanovllm.engine.adapters import AdapterChanges, ReadAdapter
from nanovllm.wire import LoadAdapter, RefusalKind, UnloadAdapter
from tests.adapters.peft_adapters import config_with, save_adapter, texts_of
from tests.models.tiny import make_tiny
from tests.whole_engine import WholeEngine, prompts_of

PROMPTS = [*prompts_of(3, seed=8), list(range(7, 47))]
MAX_NEW = 9


def test_requests_finish_with_the_adapter_that_they_have(tmp_path: Path) -> None:
    """Two run and two wait for a slot of the batch when their adapter is unloaded or replaced."""
    model, adapters = tmp_path / "model", tmp_path / "adapters"
    make_tiny(model, "qwen3")
    save_adapter(model, adapters / "a", 1, r=17)
    save_adapter(model, tmp_path / "other", 2)
    texts = [
        texts_of(model, folder, PROMPTS, MAX_NEW) for folder in (adapters / "a", tmp_path / "other")
    ]
    assert texts[0] != texts[1]
    config = config_with(model, adapters, names=[], slots=2, max_rank=32, runtime=True)
    engine, arrived = WholeEngine(config, slots=2), SimpleQueue[ReadAdapter]()
    changes = AdapterChanges(engine.scheduler, engine.loop.executor, arrived.put)
    bank = engine.runner.adapters
    assert bank is not None

    def load(*, replaces: bool = False) -> None:
        assert changes.take(LoadAdapter(1, "a", "a", replaces)) is None
        answer = changes.take(arrived.get(timeout=20))
        assert answer is not None and answer.error == ""

    def begin(first: int) -> None:
        for at, prompt in enumerate(PROMPTS, first):
            engine.submit(at, prompt, MAX_NEW, adapter="a")
        for _ in range(3):
            engine.loop.step()
        stats = engine.scheduler.stats()
        assert (stats.num_running, stats.num_waiting) == (2, 2)

    def end(first: int) -> tuple[list[list[int]], int]:
        """Return the texts, and the cached tokens of the last prompt."""
        engine.run()
        return [engine.text[first + at] for at in range(len(PROMPTS))], engine.cached[first + 3]

    load()
    begin(0)
    answer = changes.take(UnloadAdapter(2, "a"))
    assert answer is not None and answer.error == "" and [*bank.host] == [1]
    engine.submit(9, PROMPTS[0], MAX_NEW, adapter="a")
    (refusal,) = engine.scheduler.output().refused
    assert refusal.kind is RefusalKind.NO_ADAPTER
    assert refusal.message == "the adapter 'a' is not loaded"
    assert end(0) == (texts[0], 0)

    load()  # the same files
    assert [*bank.host] == [2]  # the former one has no request any more
    begin(10)
    found, cached = end(10)
    assert found == texts[0] and cached >= 36

    begin(20)
    shutil.rmtree(adapters / "a")
    shutil.copytree(tmp_path / "other", adapters / "a")
    load(replaces=True)
    assert [*bank.host] == [2, 3]
    for at, prompt in enumerate(PROMPTS, 30):
        engine.submit(at, prompt, MAX_NEW, adapter="a")
    assert end(30) == (texts[1], 0)
    assert end(20)[0] == texts[0]
