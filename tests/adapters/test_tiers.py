"""Pages of adapters in host memory and on disk: found by the adapter's bytes, not by its name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from nanovllm.config import Disk
from nanovllm.kv.costs import TransferCosts
from tests.adapters.peft_adapters import config_with, save_adapter, texts_of
from tests.models.tiny import make_tiny
from tests.server.serving import eventually
from tests.whole_engine import WholeEngine

PROMPTS = {name: [*range(at, at + 41)] for at, name in enumerate(("", "a", "b"))}
MAX_NEW = 5


def started(model: Path, adapters: Path, disk: Disk) -> WholeEngine:
    config = config_with(model, adapters)
    engine = WholeEngine(config, pages=30, slots=2, max_tokens=60, host_gib=0.002, disk=disk)
    engine.memory.tier.costs = TransferCosts(page_s=0, token_s=1, start_s=-1e9)
    assert engine.runner.disk is not None and engine.runner.disk.scanned.wait(20)
    return engine


def turn(engine: WholeEngine, first: int, names: dict[str, str]) -> list[tuple[list[int], int]]:
    """Return the text and the number of cached tokens for each prompt, with the adapter of a name.

    `names` are those of adapters, by the name of the prompt.
    """
    for at, (prompt, name) in enumerate(names.items(), first):
        engine.submit(at, PROMPTS[prompt], MAX_NEW, adapter=name)
        engine.run()
    return [(engine.text[at], engine.cached[at]) for at in range(first, first + len(names))]


def test_pages_of_adapters_survive_a_restart(tmp_path: Path) -> None:
    model, adapters = tmp_path / "model", tmp_path / "adapters"
    make_tiny(model, "qwen3")
    for seed, name in enumerate("abc"):
        save_adapter(model, adapters / name, seed)
    shutil.move(adapters / "c", tmp_path / "c")
    names = {"": "", "a": "a", "b": "b"}
    expected = [
        texts_of(model, adapters / name if name else None, [PROMPTS[name]], MAX_NEW)[0]
        for name in names
    ]
    disk = Disk(path=str(tmp_path / "pages"), gib=0.1)
    engine = started(model, adapters, disk)
    assert turn(engine, 0, names) == [(text, 0) for text in expected]
    found = turn(engine, 3, names)  # the pages of another one had to leave for each of them
    assert [text for text, _ in found] == expected
    assert all(cached >= 36 for _, cached in found)
    assert engine.scheduler.stats().tiers["host.loaded"] > 0
    eventually(lambda: engine.loop.step() or not engine.scheduler.num_moving)
    eventually(lambda: engine.runner.disk.counters().written >= 3 * 10)
    engine.runner.disk.close()

    # After the restart, the files of "a" have the name "x", and "b" has other files or settings.
    shutil.move(adapters / "a", adapters / "x")
    shutil.copytree(adapters / "b", adapters / "louder")
    config = adapters / "louder" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 9}))
    shutil.move(adapters / "b", tmp_path / "b")
    shutil.copytree(tmp_path / "c", adapters / "b")
    engine = started(model, adapters, disk)
    found = turn(engine, 0, {"": "", "a": "x"})
    assert [text for text, _ in found] == expected[:2]
    assert all(cached >= 36 for _, cached in found)
    assert engine.scheduler.stats().tiers["disk.hit_tokens"] >= 72
    for name, first in (("b", 10), ("louder", 20)):
        (text,) = texts_of(model, adapters / name, [PROMPTS["b"]], MAX_NEW)
        assert turn(engine, first, {"b": name}) == [(text, 0)]
    engine.runner.disk.close()
