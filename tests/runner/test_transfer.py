"""Pages in host memory: a whole engine on a CPU that stores, evicts and loads them.

The text is that of an engine whose cache holds everything.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.config import Config, ConfigError, Disk, Speculate, load_config
from nanovllm.engine import paper
from nanovllm.kv.costs import TransferCosts
from nanovllm.kv.disk.format import PREFIX, PageHeader
from nanovllm.kv.hybrid import HybridMemory
from nanovllm.kv.layout import CacheLayout, PagedGroup
from nanovllm.kv.split import host_page_bytes
from nanovllm.parallel.mesh import first_rank
from nanovllm.plan import Copies, Moves
from nanovllm.runner.caches import make_caches
from nanovllm.runner.copy_stream import CopyStream, StartedCopies
from nanovllm.runner.resolved import resolve_config
from nanovllm.runner.transfer import HostPages, Mover
from tests.engine.test_ranks import ranked
from tests.kv.disk.stores import eventually
from tests.models.tiny import CASES, config_of, make_tiny
from tests.whole_engine import WholeEngine, prompts_of

NGRAM = Speculate(method="ngram", tokens=3)
SMALL: dict[str, Any] = dict(pages=24, slots=4, step_tokens=24, max_tokens=90)


def two_turns(engine: WholeEngine) -> WholeEngine:
    """Submit prompts, then each again with its answer and more."""
    if engine.memory.has_tiers:
        engine.memory.tier.costs = TransferCosts(page_s=0, token_s=1, start_s=-1e9)  # always load
    prompts = [prompt for prompt in prompts_of(9) if len(prompt) > 20]
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, 10)
        engine.loop.step()
    engine.run()
    for i, prompt in enumerate(prompts):
        engine.submit(10 + i, prompt + engine.text[i] + [3, 4, 5], 8)
        engine.loop.step()
        engine.scheduler.check()
    engine.run()
    return engine


def check_loads(engine: WholeEngine) -> None:
    engine.loop.step()  # ends the last store
    tiers, pool = engine.scheduler.stats().tiers, engine.memory.pool
    assert 4 * tiers["host.loaded"] >= tiers["host.hit_tokens"] >= 100  # of first starts only
    assert tiers["host.load_bytes"] == tiers["host.loaded"] * tiers["host.page_bytes"]
    assert pool.num_free == pool.num_pages and not engine.loop.executor.moved()


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("qwen3 gqa 3, tied", dict(depth=0)),
        ("qwen3 gqa 3, tied", dict(cache_dtype="fp8", speculate=NGRAM)),
        ("deepseek_v3 tied", dict()),
        ("deepseek_v3 tied", dict(cache_dtype="fp8")),
        ("qwen3_next that repeats itself", dict(checkpoints=30, checkpoint_fraction=0.0)),
        ("qwen3_next that repeats itself", dict(checkpoints=6, speculate=NGRAM)),
    ],
)
def test_the_text_is_the_same(case: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    family, overrides = CASES[case]
    make_tiny(tmp_path, family, **overrides)
    config = config_of(tmp_path)
    dtype = sizes.get("cache_dtype", "auto")
    alone = two_turns(WholeEngine(config, pages=400, slots=8, max_tokens=90, cache_dtype=dtype))
    engine = two_turns(WholeEngine(config, host_gib=0.01, **SMALL, **sizes))
    assert engine.text == alone.text
    if isinstance(engine.memory, HybridMemory):
        assert engine.scheduler.stats().tiers["host.loaded"] > 0
    else:
        check_loads(engine)


def test_two_ranks_move_their_own_shares(tmp_path: Path) -> None:
    family, overrides = CASES["qwen3 gqa 8"]
    make_tiny(tmp_path, family, **{**overrides, "num_key_value_heads": 2})
    config = config_of(tmp_path)
    alone = two_turns(WholeEngine(config, pages=400, slots=8, max_tokens=90))
    with ranked(config, 2, tmp_path, host_gib=0.01, **SMALL) as engine:
        assert two_turns(engine).text == alone.text
        check_loads(engine)


@pytest.mark.parametrize("name", ["qwen3 gqa 3, tied", "qwen3_next that repeats itself"])
def test_pages_come_back_from_disk_also_after_a_restart(name: str, tmp_path: Path) -> None:
    """Host memory has room for 30 pages, and the disk for all, with recurrent states."""
    case = tmp_path / "model"
    case.mkdir()
    family, overrides = CASES[name]
    make_tiny(case, family, **overrides)
    config, disk = config_of(case), Disk(path=str(tmp_path / "pages"), gib=0.1)
    alone = two_turns(WholeEngine(config, pages=400, slots=8, max_tokens=90))
    sizes = dict(host_gib=30 * 4096 / 2**30, disk=disk, checkpoints=12, **SMALL)
    for restarts in (False, True):
        engine = WholeEngine(config, **sizes)
        assert engine.runner.disk.scanned.wait(20)
        assert two_turns(engine).text == alone.text
        eventually(lambda e=engine: e.loop.step() or not e.scheduler.num_moving)
        tiers = engine.scheduler.stats().tiers
        assert tiers["disk.failed"] == tiers["host.failed"] == 0
        if restarts:
            assert 4 * tiers["disk.loaded"] >= tiers["disk.hit_tokens"] >= 100
            if isinstance(engine.memory, HybridMemory):
                assert engine.memory.checkpoint_events["restored"] >= 5
            assert engine.cached[0] > 0  # a first prompt
        else:
            assert tiers["disk.stored"] >= 50 and engine.cached[0] == 0
            eventually(lambda e=engine: e.runner.disk.counters().written >= 50)
        engine.runner.disk.close()
    other = replace(config, recipe=replace(config.recipe, quantize="fp8"))
    engine = WholeEngine(other, **sizes)
    engine.submit(0, prompts_of(9)[1], 4)
    engine.run()
    assert engine.cached[0] == 0 and engine.scheduler.stats().tiers["disk.hit_tokens"] == 0
    engine.runner.disk.close()


def test_a_page_that_is_damaged_on_disk_is_computed(tmp_path: Path) -> None:
    config, disk = demo(), Disk(path=str(tmp_path), gib=0.5)
    sizes = dict(host_gib=0.02, disk=disk, pages=40, page_tokens=8, max_tokens=200)
    texts = []
    for turn in range(2):
        engine = WholeEngine(config, **sizes)
        engine.memory.tier.costs = TransferCosts(page_s=0, token_s=1, start_s=-1e9)
        assert engine.runner.disk.scanned.wait(20)
        engine.submit(turn, list(range(5, 105)), 8)
        engine.run()
        eventually(lambda e=engine: e.loop.step() or not e.scheduler.num_moving)
        eventually(lambda e=engine, t=turn: e.runner.disk.counters().written >= 12 * (1 - t))
        engine.runner.disk.close()
        texts.append(engine.text[turn])
        if not turn:
            for path in tmp_path.glob("pages/*/*"):
                data = bytearray(path.read_bytes())
                data[5000] ^= 1
                path.write_bytes(data)
    assert texts[0] == texts[1] and engine.cached[1] == 0
    assert engine.scheduler.stats().tiers["disk.failed"] == 1


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_two_ranks_read_and_write_their_shares_on_disk(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A load fails as a whole if one rank cannot read its share, and is written again."""
    family, overrides = CASES["qwen3 gqa 8"]
    make_tiny(tmp_path, family, **{**overrides, "num_key_value_heads": 2})
    config, folder = config_of(tmp_path), tmp_path / "kept"
    sizes = dict(host_gib=0.02, disk=Disk(path=str(folder), gib=0.5), pages=60, max_tokens=200)
    prompt, found = prompts_of(9)[1][:45] * 2, []
    alone = WholeEngine(config)
    alone.submit(0, prompt, 8)
    alone.run()
    for turn in range(4):
        place = tmp_path / str(turn)
        place.mkdir()
        with ranked(config, 2, place, **sizes) as engine:
            engine.memory.tier.costs = TransferCosts(page_s=0, token_s=1, start_s=-1e9)
            assert engine.runner.disk.scanned.wait(20)
            engine.submit(turn, prompt, 8)
            engine.run()
            eventually(lambda e=engine: e.loop.step() or not e.scheduler.num_moving)
            tiers = engine.scheduler.stats().tiers
            found.append((engine.text[turn], engine.cached[turn], tiers["disk.failed"]))
            num_pages = len(prompt) // 4
            eventually(lambda n=num_pages: len(shares(folder, 1)) == len(shares(folder, 0)) >= n)
            engine.runner.disk.close()
        if turn == 1:
            damage_share(shares(folder, 1)[3], damage)
    texts, cached, failed = zip(*found, strict=True)
    assert all(text == alone.text[0] for text in texts)
    most = (len(prompt) - 1) // 4 * 4
    assert cached == (0, most, 0, most) and failed == (0, 0, 1, 0)
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == (damage == "flipped") and all("a page is corrupt" in w for w in warned)


def test_recurrent_states_of_two_ranks_come_back_from_disk(tmp_path: Path) -> None:
    family, overrides = CASES["qwen3_next that repeats itself"]
    make_tiny(tmp_path, family, **overrides)
    config, disk = config_of(tmp_path), Disk(path=str(tmp_path / "kept"), gib=0.1)
    alone = two_turns(WholeEngine(config, pages=400, slots=8, max_tokens=90))
    sizes = dict(host_gib=30 * 4096 / 2**30, disk=disk, checkpoints=12, **SMALL)
    for restarts in (False, True):
        place = tmp_path / str(restarts)
        place.mkdir()
        with ranked(config, 2, place, **sizes) as engine:
            assert engine.runner.disk.scanned.wait(20)
            assert two_turns(engine).text == alone.text
            eventually(lambda e=engine: e.loop.step() or not e.scheduler.num_moving)
            tiers = engine.scheduler.stats().tiers
            assert tiers["disk.failed"] == tiers["host.failed"] == 0
            if restarts:
                assert 4 * tiers["disk.loaded"] >= tiers["disk.hit_tokens"] >= 100
                assert engine.memory.checkpoint_events["restored"] >= 5 and engine.cached[0] > 0
            else:
                eventually(lambda e=engine: e.runner.disk.counters().written >= 50)
            engine.runner.disk.close()


def shares(folder: Path, rank: int) -> list[Path]:
    """Return the files of a rank's pages. The header names the rank."""
    found = []
    for path in sorted(folder.glob("pages/*/" + "?" * 64)):
        data = path.read_bytes()
        _, length = PREFIX.unpack_from(data)
        body = data[PREFIX.size : PREFIX.size + length]
        if msgspec.msgpack.decode(body, type=PageHeader).owner.rank == rank:
            found.append(path)
    return found


def damage_share(path: Path, damage: str) -> None:
    if damage == "missing":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["cache.disk={path: x}"], "cache.disk needs cache.host_gib, through which its pages go; "),
        (
            ["cache.disk={path: x, gib: 0}", "cache.host_gib=1"],
            "cache.disk.gib is 0.0; it must be ",
        ),
        (["cache.disk={path: ''}", "cache.host_gib=1"], "cache.disk.path is empty; name a folder"),
        (
            ["cache.disk={path: ~nobody-at-all/x}", "cache.host_gib=1"],
            "cache.disk.path is '~nobody-at-all/x'; ~nobody-at-all has no home folder; write the ",
        ),
    ],
)
def test_what_is_wrong_with_a_disk_is_one_line(settings: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        demo(*settings)
    assert line in str(caught.value)


def test_a_folder_whose_name_begins_with_a_tilde_can_be_written() -> None:
    disk = demo("cache.disk={path: ./~x}", "cache.host_gib=1").recipe.cache.disk
    assert disk is not None and disk.folder == Path("~x")


def test_without_the_key_there_are_no_transfers_and_no_copies() -> None:
    engine = WholeEngine(demo(), **SMALL)
    engine.submit(0, [5] * 40, 10)
    engine.run()
    assert engine.scheduler.stats().tiers == {} and not engine.scheduler.num_moving
    with pytest.raises(ValueError, match=r"has transfers, but cache\.host_gib is 0"):
        engine.runner.move(Moves([], [], []))


def demo(*changes: str) -> Config:
    return load_config(None, ["device=cpu", *changes])


def test_lanes_and_paper_refuse_the_key() -> None:
    asked = ["device=cpu", "cache.host_gib=1", "parallel.ep=2", "load.format=dummy"]
    moe = load_config("qwen3-30b-a3b", asked)
    with pytest.raises(ConfigError, match=r"^cache.host_gib needs parallel.ep of at most tp; drop"):
        resolve_config(moe, first_rank(moe.recipe.parallel))
    with pytest.raises(ConfigError, match=r"^cache.host_gib is for engine: model; engine: paper"):
        paper.build(demo("cache.host_gib=0.1", "engine=paper"))


def test_a_slot_has_all_layers_of_its_page_and_nothing_else() -> None:
    groups = PagedGroup((0, 2), 2, 8, 4, 4), PagedGroup((1,), 1, 12, 0, 4, "latent")
    layout, cpu = CacheLayout(groups), torch.device("cpu")
    caches = make_caches(layout, 5, 3, torch.float32, device=cpu)
    for nth, tensor in enumerate(caches.tensors):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 1000 * nth)
    before = [tensor.clone() for tensor in caches.tensors]
    host = HostPages(caches, 4)
    assert host.page_bytes == host_page_bytes(layout, 3) == 4096
    mover = Mover(host)
    mover.move(Moves([], [Copies(1, [(2, 3), (5, 0)])], []))
    mover.move(Moves([1], [], [Copies(2, [(3, 1), (0, 4)])]))
    for tensor, old in zip(caches.tensors, before, strict=True):
        assert tensor[:, [1, 4]].equal(old[:, [2, 5]])
        assert tensor[:, [0, 2, 3, 5]].equal(old[:, [0, 2, 3, 5]])
    assert [(one.ticket, one.ok, one.num_bytes) for one in mover.moved()] == [
        (1, True, 8192),
        (2, True, 8192),
    ]
    assert (
        host.row(3)[: 4 * 144]
        .view(torch.float32)
        .equal(torch.cat([old[:, 2].flatten() for old in before])[:144])
    )
    woken: list[int] = []
    mover.call_when_moved(lambda: woken.append(1))
    mover.move(Moves([2], [Copies(3, [(1, 1)])], []))
    eventually(lambda: woken)
    assert [one.ticket for one in mover.moved()] == [3]


class Calls(TorchDispatchMode):
    """Count of the operations of torch. Each gives up the interpreter's lock."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_page_takes_six_calls_of_torch_with_memory_on_the_device() -> None:
    """Threads that copy compete for the lock with the thread of the steps.

    Views that are made anew for each page would take six more.
    """
    layout = CacheLayout((PagedGroup((0, 1, 2), 2, 8, 8, 2),))
    caches = make_caches(layout, 5, 4, torch.bfloat16, device=torch.device("cpu"))
    for tensor in caches.tensors:
        tensor.copy_(torch.randn(tensor.shape))
    mover, before = Mover(HostPages(caches, 4)), [tensor.clone() for tensor in caches.tensors]
    staging = mover.host.staging()
    for copy, pairs in ((mover._store, [(2, 3), (5, 0)]), (mover._load, [(3, 1), (0, 4)])):
        copies = Copies(1, pairs)
        with Calls() as calls:
            for nth in range(2):
                copy(staging, copies, nth)
        assert calls.count == 2 * 6
    for tensor, old in zip(caches.tensors, before, strict=True):
        assert tensor[:, [1, 4]].equal(old[:, [2, 5]])
        assert tensor[:, [2, 5]].equal(old[:, [2, 5]])


@pytest.mark.parametrize("is_pinned", [False, True])
def test_memory_that_cannot_be_had_is_one_line_with_the_arithmetic(
    is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three pieces of memory cannot be allocated, or not be pinned."""
    layout = CacheLayout((PagedGroup((0,), 2, 128, 128, 4),))  # 2,048 bytes per token
    caches = make_caches(layout, 5, 4, torch.float32, device=torch.device("cpu"))
    pieces, real = list[torch.Tensor](), torch.zeros

    def zeros(count: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        pieces.append(real(count, size, dtype=dtype))
        if not is_pinned and len(pieces) == 2:
            raise RuntimeError("not enough memory")
        return pieces[-1]

    cuda = SimpleNamespace(
        cudaHostRegister=lambda *args: 2 * (len(pieces) == 2),
        cudaHostUnregister=lambda address: None,
        cudaError=SimpleNamespace(success=0),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "CudaError", lambda code: f"out of memory({code})")
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr("nanovllm.runner.transfer.PIECE_BYTES", 1 << 27)
    whole = r"\(of 40,000 pages x 8,192 bytes = 0.3 GiB\)"
    line = rf"cannot allocate 0.1 GiB {whole}: not enough memory"
    if is_pinned:
        line = rf"0.1 GiB of pinned memory {whole}: out of memory\(2\)"
        caches = SimpleNamespace(tensors=[OnGpu(tensor) for tensor in caches.tensors])
    with pytest.raises(ConfigError, match=f"^cache.host_gib: {line}$"):
        HostPages(caches, 40_000)


class OnGpu:
    """A tensor whose device is a GPU by name."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self.device = tensor, torch.device("cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)

    def __getitem__(self, at: Any) -> torch.Tensor:
        return self._tensor[at]


def test_a_transfer_that_starts_while_its_thread_fails_is_an_error() -> None:
    """The thread has looked for transfers to end just before this one was added."""

    class Failing(deque[StartedCopies]):
        def append(self, started: StartedCopies) -> None:
            stream._error = RuntimeError("the device has failed")
            super().append(started)

    stream = CopyStream(lambda *_: None, torch.device("cpu"))
    stream._started = Failing()
    with pytest.raises(RuntimeError, match="the device has failed"):
        stream.start(Copies(1, [(0, 0)]), 4096, None)
