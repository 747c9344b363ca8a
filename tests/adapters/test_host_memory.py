"""Loads at run time that the host's memory cannot hold are refused with the arithmetic."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue

import pytest

from nanovllm.engine.adapters import AdapterChanges, ReadAdapter
from nanovllm.runner import host_memory as host
from nanovllm.wire import LoadAdapter
from tests.adapters.peft_adapters import config_with, save_adapter
from tests.models.tiny import make_tiny
from tests.whole_engine import WholeEngine


def test_a_load_must_fit_the_hosts_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny(tmp_path / "model", "qwen3")
    save_adapter(tmp_path / "model", tmp_path / "adapters" / "a", 1, r=17)
    config = config_with(tmp_path / "model", tmp_path / "adapters", names=[], runtime=True)
    engine, arrived = WholeEngine(config), SimpleQueue[ReadAdapter]()
    bank = engine.runner.adapters
    assert bank is not None
    needed = 32 * bank.layout.width * 4  # 17 ranks are two pages of 16, in float32
    changes = AdapterChanges(engine.scheduler, engine.loop.executor, arrived.put)

    def load() -> str:
        assert changes.take(LoadAdapter(1, "a", "a", replaces=False)) is None
        answer = changes.take(arrived.get(timeout=20))
        assert answer is not None
        return answer.error

    monkeypatch.setattr(host, "host_memory", lambda: needed - 1)
    assert load() == (
        f"the adapter takes 32 ranks x {needed / 32e6:.3f} MB = 0.0 GiB of each rank's host "
        "memory; this machine has 0.0 GiB available for it; unload another adapter first"
    )
    assert bank.host == {} and changes.folders == {}
    monkeypatch.setattr(host, "host_memory", lambda: needed)
    assert load() == ""
    assert [rows.nbytes for rows in bank.host.values()] == [needed]
