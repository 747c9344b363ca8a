"""The whole path of pages from device to device on a CPU. Only libcuda and its streams are fake."""

from __future__ import annotations

import ctypes
import json
import logging
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch

from nanovllm.config import Config, ConfigError, load_config
from nanovllm.engine.tickets import Tickets
from nanovllm.roles import Backend
from nanovllm.runner import cuda_ipc, roles
from nanovllm.runner.build import build
from nanovllm.runner.cuda_ipc import Copy2D, CudaReader, DriverError, shared_memory
from nanovllm.transfer.device_pages import PeerMemory
from nanovllm.transfer.leases import Lease
from nanovllm.transfer.sealed import PeerError
from tests.kv.disk.stores import eventually
from tests.models.tiny import CASES, config_of, make_tiny
from tests.runner.test_roles import (
    SECRET,
    are_connected,
    check_shares,
    engine_of,
    noted_remotes,
    spec_of,
    with_role,
)
from tests.whole_engine import WholeEngine, prompts_of

BEFORE = 256  # bytes of an allocation before the tensor


class HostDriver:
    """Copies of this process's memory. A handle is an address."""

    sizes: ClassVar[dict[int, int]] = {}
    is_expandable = False
    refuses_pitches = False
    opened: ClassVar[list[int]] = []
    num_copies = 0

    def allocation(self, address: int) -> tuple[int, int]:
        if address in self.sizes:
            return address, self.sizes[address]
        return address - BEFORE, 0

    def is_shareable(self, address: int) -> bool:
        return not self.is_expandable

    def handle(self, first: int) -> bytes:
        self.sizes.setdefault(first, 1 << 40)
        return struct.pack("Q56x", first)

    def open(self, handle: bytes) -> int:
        (first,) = struct.unpack("Q56x", handle)
        self.opened.append(first)
        return int(first)

    def close(self, first: int) -> None:
        self.opened.remove(first)

    def copy(self, copy: Copy2D, stream: int) -> None:
        if self.refuses_pitches and copy.height > 1:
            raise DriverError("cuMemcpy2DAsync_v2: invalid argument (1)")
        assert copy.src_pitch >= copy.width <= copy.dst_pitch and not copy.src_x + copy.dst_x
        HostDriver.num_copies += 1
        for row in range(copy.height):
            to, source = copy.dst + row * copy.dst_pitch, copy.src + row * copy.src_pitch
            ctypes.memmove(to, source, copy.width)


class Moment:
    """A stream or an event, where all work is done at once."""

    cuda_stream = 0

    def __init__(self, **options: bool) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: object) -> float:
        return 1.0


@pytest.fixture(autouse=True)
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("sizes", {}), ("opened", []), ("num_copies", 0)):
        monkeypatch.setattr(HostDriver, name, value)
    monkeypatch.setattr(cuda_ipc, "Driver", HostDriver)
    monkeypatch.setattr(torch.cuda, "Stream", Moment)
    monkeypatch.setattr(torch.cuda, "Event", Moment)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def caches(rows: int) -> list[torch.Tensor]:
    """Return keys and values of 3 layers, in pages of 2 tokens, 1 head and 4 or 2 values."""
    return [torch.rand(3, rows, 2, 1, size) for size in (4, 2)]


@pytest.mark.parametrize("by_rows", [False, True])
def test_a_page_of_all_layers(by_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostDriver, "refuses_pitches", by_rows)
    of_p, of_d = caches(9), caches(5)
    before = [tensor.clone() for tensor in of_d]
    memory = shared_memory(of_p)
    assert [(part.start, part.rows, part.page_bytes) for part in memory.parts] == [
        (BEFORE, 9, 32), (BEFORE, 9, 16),
    ]  # fmt: skip
    opened = CudaReader(of_d, Event(), is_required=True).open(memory)
    assert opened.copy([(7, 1), (2, 4)], None) == 1e-3 and opened.link_rate() > 0
    for source, target, old in zip(of_p, of_d, before, strict=True):
        assert target[:, [1, 4]].equal(source[:, [7, 2]])
        assert target[:, [0, 2, 3]].equal(old[:, [0, 2, 3]])
    assert HostDriver.num_copies == (12 if by_rows else 4) + cuda_ipc.PROBES
    opened.close()
    opened.close()
    assert HostDriver.opened == []


def test_consecutive_pages_are_one_copy() -> None:
    pages = [(4, 2), (3, 1), (7, 5), (8, 4), (5, 3), (9, 5 + 20)]
    assert cuda_ipc.runs(pages) == [(3, 1, 3), (7, 5, 1), (8, 4, 1), (9, 25, 1)]
    assert cuda_ipc.runs([]) == []
    of_p, of_d = caches(9), caches(5)
    CudaReader(of_d, Event(), is_required=True).open(shared_memory(of_p)).copy(
        [(7, 3), (6, 2)], None
    )
    assert of_d[0][:, 2:4].equal(of_p[0][:, 6:8]) and HostDriver.num_copies == 2


def test_rows_that_are_too_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "MAX_PITCH", 100)
    of_p, of_d = caches(9), caches(5)
    CudaReader(of_d, Event(), is_required=True).open(shared_memory(of_p)).copy([(7, 1)], None)
    assert of_d[0][:, 1].equal(of_p[0][:, 7]) and of_d[1][:, 1].equal(of_p[1][:, 7])
    assert HostDriver.num_copies == 6


def test_memory_that_cannot_be_shared_or_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    of_p = caches(9)
    memory = shared_memory(of_p)
    first = of_p[1].data_ptr() - BEFORE
    HostDriver.sizes[first] = BEFORE + of_p[1].nbytes - 1
    with pytest.raises(PeerError, match=r"its cache ends after its allocation of \d+ bytes"):
        CudaReader(caches(5), Event(), is_required=True).open(memory)
    assert HostDriver.opened == []  # also the first one was closed
    monkeypatch.setattr(HostDriver, "is_expandable", True)
    with pytest.raises(ConfigError, match=r"drop expandable_segments of PYTORCH_CUDA_ALLOC_CONF"):
        shared_memory(of_p)


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("qwen3 gqa 3, tied", dict()),
        ("deepseek_v3 tied", dict(cache_dtype="fp8")),
        ("qwen3_next", dict(checkpoints=8)),
    ],
)
def test_the_text_is_that_of_one_engine(
    case: str, sizes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No page passes through D's host memory, only states do. Pages are stored there later."""
    monkeypatch.setattr(roles, "uses_device", lambda asked, pages: asked.backend != "socket")
    family, overrides = CASES[case]
    make_tiny(tmp_path, family, **overrides)
    check_direct(config_of(tmp_path), sizes, tmp_path)
    assert not HostDriver.opened


@pytest.fixture
def two_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Return a model whose two key/value heads two ranks share, and let CPUs pass for GPUs."""
    monkeypatch.setattr(roles, "uses_device", lambda asked, pages: asked.backend != "socket")
    family, overrides = CASES["qwen3 gqa 8"]
    make_tiny(tmp_path, family, **overrides | {"num_key_value_heads": 2})
    return config_of(tmp_path)


def test_each_rank_copies_from_the_memory_of_its_own_rank(
    two_heads: Config, tmp_path: Path
) -> None:
    check_direct(two_heads, {}, tmp_path, ranks=2)
    assert not HostDriver.opened


@pytest.mark.parametrize("ranks", [(2, 1), (2, 2)])
def test_pages_come_by_socket_where_ranks_cannot_copy(
    ranks: tuple[int, int],
    two_heads: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The numbers of ranks differ, or rank 1 of P cannot share its memory."""
    caplog.set_level(logging.INFO)
    reason = "its parallel.tp is 2, and 1 here; cuda_ipc needs equal ones"
    if ranks == (2, 2):
        reason = "it offers no memory for cuda_ipc"

        def is_shareable(driver: HostDriver, address: int) -> bool:
            return threading.current_thread() is threading.main_thread()

        monkeypatch.setattr(HostDriver, "is_shareable", is_shareable)
    folders = [tmp_path / name for name in ("meet_p", "meet_d")]
    for folder in folders:
        folder.mkdir()
    check_shares(two_heads, {}, ranks, folders)
    assert HostDriver.num_copies == 0 and reason in caplog.text
    unshared = "pages are sent by socket: another rank offers no memory"
    assert (unshared in caplog.text) == (ranks == (2, 2))


def check_direct(
    config: Config,
    sizes: dict[str, Any],
    folder: Path,
    *,
    backend: Backend = "auto",
    ranks: int = 1,
) -> None:
    """Check the texts of D, and that only states pass through its host memory.

    Each rank copies all pages, from the memory of one rank of P.
    """
    sizes = dict(slots=4, step_tokens=24, max_tokens=90) | sizes
    folders = [folder / name for name in ("meet_p", "meet_d")]
    for each in folders:
        each.mkdir()
    alone = WholeEngine(config, pages=64, **sizes)
    asked = with_role(config, "prefill", "127.0.0.1:0", backend=backend)
    with noted_copies() as copied, engine_of(asked, ranks, folders[0], pages=64, **sizes) as p:
        lender, ended = p.runner.lender, list[Lease]()
        assert lender is not None
        lender.call_when_ended(ended.append)
        address = "{}:{}".format(*lender.server.address)
        asked = with_role(config, "decode", address, backend=backend)
        with (
            noted_remotes() as remotes,
            engine_of(asked, ranks, folders[1], pages=48, host_gib=0.01, **sizes) as d,
        ):
            assert d.runner.remote is not None
            remote, tickets = d.runner.remote, Tickets(d.runner.remote, 4)
            eventually(lambda: are_connected(remotes, ranks, lender.engine))
            prompts = [prompt for prompt in prompts_of(6) if len(prompt) > 12]
            for i, prompt in enumerate(prompts):
                alone.submit(i, prompt, 10)
                alone.run()
                p.loop.handle(spec_of(i, prompt, 1, lends=True))
                p.run()
                spec = spec_of(i, prompt, 10, ticket=json.loads(p.handovers[i])["nanovllm_ticket"])
                tickets.offer(spec, b"")
                d.loop.handle(spec)
                d.run()
                remote.settle(i)
                assert d.cached[i] == (len(prompt) - 1) // 4 * 4
                eventually(lambda count=i + 1: len(ended) == count)
                p.scheduler.take_back(ended[i].pages, ended[i].state)
            assert d.text == alone.text and len(prompts) >= 4
            assert sorted(copied.values()) == ranks * [sum(d.cached.values()) // 4]
            num_parts = len(prompts) * remote._limits.state_parts
            assert remote.counts == {"read": len(prompts)}
            assert lender.server.counts["pages"] == ranks * num_parts
            memory: Any = remote._client._peers[0]._memory
            num_bytes = ranks * num_parts * remote._limits.page_bytes  # by socket
            assert lender.sent_bytes == num_bytes + sum(copied.values()) * memory._page_bytes
            eventually(lambda: d.loop.step() or not d.scheduler.num_moving)
            tiers = d.scheduler.stats().tiers
            assert tiers["peer.hit_tokens"] == sum(d.cached.values())
            assert tiers["host.load_bytes"] == num_parts * tiers["host.page_bytes"]
            assert tiers["host.stored"] >= tiers["peer.loaded"] > 0
            d.memory.check()
        lender.close()


@contextmanager
def noted_copies() -> Iterator[Counter[tuple[bytes, int]]]:
    """Yield the number of pages that were copied between devices, by the place of P's cache."""
    copied: Counter[tuple[bytes, int]] = Counter()
    real = PeerMemory.copy

    def copy(memory: PeerMemory, pages: Sequence[tuple[int, int]], ready: object) -> int:
        opened: Any = memory._opened
        copied[opened._parts[0].handle, opened._parts[0].start] += len(pages)
        return real(memory, pages, ready)

    with patch.object(PeerMemory, "copy", copy):
        yield copied


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_without_a_gpu_the_backend_is_refused(role: str) -> None:
    keys = ["device=cpu", "transfer.backend=cuda_ipc", "transfer.listen=127.0.0.1:1"]
    keys += ["transfer.peers=[127.0.0.1:1]", "cache.host_gib=0.01", f"transfer.secret={SECRET}"]
    config = load_config(None, keys, {"transfer.role": role})
    with pytest.raises(ConfigError, match=r"transfer\.backend cuda_ipc needs a GPU; use auto or"):
        build(config)
