"""Two ranks with a disk each: a transfer ends in every way, and rank 0 notes a disk out of use."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from nanovllm.config import Config, Disk
from nanovllm.kv.costs import TransferCosts
from nanovllm.kv.disk.format import PageOwner
from nanovllm.kv.disk.limits import DiskLimits
from nanovllm.kv.disk.store import DiskStore
from nanovllm.plan import Availability
from nanovllm.wire import Abort
from tests.engine.test_ranks import ranked
from tests.kv.disk.stores import eventually
from tests.models.tiny import CASES, config_of, make_tiny
from tests.whole_engine import WholeEngine, prompts_of

PROMPTS = [[i, *prompts_of(9)[1][:44], *prompts_of(9)[1][:45]] for i in range(3)]
FULL = (len(PROMPTS[0]) - 1) // 4 * 4  # tokens of a prompt that can be cached
MODELS = ["qwen3 gqa 8", "qwen3_next that repeats itself"]


class Kept(NamedTuple):
    """A model, and a folder in which both ranks have all pages of the prompts."""

    config: Config
    sizes: dict[str, Any]
    texts: list[list[int]]


class Stores(dict[int, DiskStore]):
    """The stores by rank. A disk hangs after 0.3 s, and is tried again when `retry` is called."""

    is_full = -1  # rank whose disk is out of use from the start

    def __init__(self) -> None:
        super().__init__()
        self.going = threading.Event()  # lets the reads go on that a test holds

    def open(
        self, path: Path, owner: PageOwner, limits: DiskLimits, wake: Callable[[], None]
    ) -> DiskStore:
        quick = replace(limits, slow_s=0.3, retry_s=1000.0, scan_s=0.01)
        store = self[owner.rank] = DiskStore(path, owner, quick, wake)
        if owner.rank == self.is_full:
            store._health.step_aside("full", "No space left on device")
        return store

    def retry(self, rank: int) -> None:
        self[rank]._health._retry_at = 0.0

    def in_use(self) -> Availability:
        """Return the operations that rank 0 plans."""
        return Availability(self[0]._on_others.reads, self[0].can_write)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stores]:
    found = Stores()
    monkeypatch.setattr("nanovllm.runner.disk.DiskStore", found.open)
    yield found
    found.going.set()
    for store in found.values():
        store.close()


@pytest.fixture(scope="module", params=MODELS)
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    where = tmp_path_factory.mktemp("kept")
    family, overrides = CASES[request.param]
    if family == "qwen3":
        overrides = {**overrides, "num_key_value_heads": 2}
    make_tiny(where, family, **overrides)
    config, alone = config_of(where), []
    disk = Disk(path=str(where / "pages"), gib=0.5)
    sizes = dict(host_gib=0.02, disk=disk, pages=90, checkpoints=20, max_tokens=200)
    engine = WholeEngine(config)
    for i, prompt in enumerate(PROMPTS):
        engine.submit(i, prompt, 8)
    engine.run()
    alone = [engine.text[i] for i in range(len(PROMPTS))]
    with ranked(config, 2, where, **sizes) as engine:
        for i, prompt in enumerate(PROMPTS):
            assert asked(engine, i, prompt) == (alone[i], 0)
        written = engine.runner.disk.counters
        eventually(lambda: written().written >= 3 * FULL // 4)
        engine.runner.disk.close()
    return Kept(config, sizes, alone)


def asked(engine: WholeEngine, name: int, prompt: list[int]) -> tuple[list[int], int]:
    """Return the text and the cached tokens of a request, after all transfers have ended."""
    engine.memory.tier.costs = TransferCosts(page_s=0, token_s=1, start_s=-1e9)  # always load
    engine.submit(name, prompt, 8)
    engine.run()
    eventually(lambda: engine.loop.step() or not engine.scheduler.num_moving)
    engine.scheduler.check()
    return engine.text[name], engine.cached[name]


def scanned(stores: Stores) -> None:
    for store in stores.values():
        assert store.scanned.wait(20)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def hold_reads(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no read of rank 1 end before the event."""
    going, real = threading.Event(), stores[1]._folder.read
    stores.going = going  # set at the end of the test, too
    monkeypatch.setattr(stores[1]._folder, "read", lambda *a: going.wait(20) and real(*a))
    return going


def test_reads_that_a_rank_gives_up_end_the_load_and_rank_0_starts_no_other(
    kept: Kept, stores: Stores, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with ranked(kept.config, 2, tmp_path, **kept.sizes) as engine:
        scanned(stores)
        num_files = len(stores[0]._index)
        going = hold_reads(stores, monkeypatch)
        assert asked(engine, 0, PROMPTS[0]) == (kept.texts[0], 0)
        eventually(lambda: stores.in_use() == (False, False))
        assert asked(engine, 1, PROMPTS[1]) == (kept.texts[1], 0)
        tiers = engine.scheduler.stats().tiers
        assert tiers["disk.failed"] == 1 and tiers["disk.loaded"] == 0
        assert len(stores[0]._index) == num_files  # no page is lost
        (said,) = warned(caplog)
        assert ", rank 1: the disk is slow (a page took over 0.3 s)" in said
        going.set()
        stores.retry(1)
        eventually(lambda: stores.in_use() == (True, True))
        assert asked(engine, 2, PROMPTS[2]) == (kept.texts[2], FULL)
        assert engine.scheduler.stats().tiers["disk.failed"] == 1
    assert len(warned(caplog)) == 1


def test_a_disk_that_is_full_on_one_rank_gets_no_more_writes_of_any(
    kept: Kept, stores: Stores, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    empty = {**kept.sizes, "disk": Disk(path=str(tmp_path / "empty"), gib=0.5)}

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with ranked(kept.config, 2, tmp_path, **empty) as engine:
        scanned(stores)
        with monkeypatch.context() as patch:
            patch.setattr(stores[1]._folder, "write", fail)
            assert asked(engine, 0, PROMPTS[0]) == (kept.texts[0], 0)
            eventually(lambda: stores.in_use() == (True, False))
        idle = stores[0]._transfers
        eventually(lambda: not idle._working and not idle._writing)
        before = stores[0].counters(), engine.scheduler.stats().tiers
        assert asked(engine, 1, PROMPTS[1]) == (kept.texts[1], 0)
        tiers = engine.scheduler.stats().tiers
        assert stores[0].counters() == before[0]
        assert tiers["disk.stored"] == before[1]["disk.stored"]
        assert tiers["disk.dropped"] - before[1]["disk.dropped"] >= FULL // 4
        (said,) = warned(caplog)
        assert ", rank 1: the disk is full (No space left on device)" in said
        stores.retry(1)
        eventually(lambda: stores.in_use() == (True, True))
        assert asked(engine, 2, PROMPTS[2]) == (kept.texts[2], 0)
        assert engine.scheduler.stats().tiers["disk.stored"] - tiers["disk.stored"] >= FULL // 4
    assert len(warned(caplog)) == 1


def test_a_rank_reports_a_disk_that_is_out_of_use_from_the_start(
    kept: Kept, stores: Stores, tmp_path: Path
) -> None:
    stores.is_full = 1
    with ranked(kept.config, 2, tmp_path, **kept.sizes) as engine:
        scanned(stores)
        eventually(lambda: stores.in_use() == (True, False))
        assert asked(engine, 0, PROMPTS[0]) == (kept.texts[0], FULL)  # it can be read


def test_pages_of_an_aborted_load_are_free_after_the_last_rank_has_ended(
    kept: Kept, stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ranked(kept.config, 2, tmp_path, **kept.sizes) as engine:
        scanned(stores)
        pool, ends = engine.memory.pool, engine.loop.executor._ends
        engine.memory.tier.costs = TransferCosts(page_s=0, token_s=1, start_s=-1e9)
        for name in range(3):
            going = hold_reads(stores, monkeypatch)
            engine.submit(name, PROMPTS[name], 8)
            engine.loop.step()
            assert engine.scheduler.num_moving == 1
            engine.loop.handle(Abort(name))
            for _ in range(20):
                engine.loop.step()
                engine.scheduler.check()
            assert pool.num_pages - pool.num_free == FULL // 4  # rank 1 still reads them
            going.set()
            eventually(lambda: engine.loop.step() or not engine.scheduler.num_moving)
            engine.scheduler.check()
            assert pool.num_free == pool.num_pages
            assert ends._first == ends._others == {}
            assert asked(engine, 10 + name, PROMPTS[name]) == (kept.texts[name], FULL)
