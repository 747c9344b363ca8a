"""Pages pass by the real NIXL between processes of this host, in the memory of a CPU."""

from __future__ import annotations

import json
import logging
import logging.config
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import pytest
import torch

from nanovllm.config import ConfigError, load_config
from nanovllm.engine.tickets import Tickets
from nanovllm.runner import nixl, roles
from nanovllm.runner.build import build
from nanovllm.runner.nixl import NixlReader, OpenNixlMemory, PageBlock, registered_memory
from nanovllm.transfer import page_client
from nanovllm.transfer.device_pages import (
    MAX_METADATA,
    AgentCard,
    DeviceMemory,
    MemoryPart,
    OfferedMemory,
    check_memory,
)
from nanovllm.transfer.sealed import PeerError
from tests.engine.test_ranks import ranked
from tests.kv.disk.stores import eventually
from tests.models.tiny import CASES, config_of, make_tiny
from tests.runner.nixl_prefill import SIZES, PrefillProcess
from tests.runner.test_cuda_ipc import check_direct
from tests.runner.test_roles import SECRET, noted_remotes, spec_of, with_role
from tests.whole_engine import WholeEngine, prompts_of

IS_INSTALLED = any(find_spec(name) for name in nixl.MODULES)
needs_nixl = pytest.mark.skipif(not IS_INSTALLED, reason="nixl-cu12 is not installed")


@pytest.fixture(autouse=True)
def no_agent_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that leaves an agent, since the thread of an agent of P takes a core."""
    agents: list[nixl.Agent] = []
    real = nixl.Agent.__init__

    def init(agent: nixl.Agent, *args: Any, **options: Any) -> None:
        real(agent, *args, **options)
        agents.append(agent)

    monkeypatch.setattr(nixl.Agent, "__init__", init)
    yield
    eventually(lambda: all(agent._agent is None for agent in agents))


def caches(rows: int) -> list[torch.Tensor]:
    """Return keys and values of 3 layers, in pages of 32 and 16 bytes a layer."""
    return [torch.rand(3, rows, 2, 1, size) for size in (4, 2)]


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def offered(tensors: list[torch.Tensor]) -> tuple[OfferedMemory, DeviceMemory]:
    """Return P's memory, and what D receives of it."""
    own = registered_memory(tensors)
    return own, msgspec.msgpack.decode(msgspec.msgpack.encode(own.memory), type=DeviceMemory)


@needs_nixl
@pytest.mark.parametrize(("half_bytes", "num_reads"), [(1 << 20, 1), (70, 8)])
def test_pages_of_all_layers(
    half_bytes: int, num_reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small halves make several reads of a copy. After the end no thread of NIXL is left."""
    monkeypatch.setattr(nixl, "HALF_BYTES", half_bytes)
    reads = []
    monkeypatch.setattr(OpenNixlMemory, "_start", noted(OpenNixlMemory._start, reads))
    before = num_threads()
    of_p, of_d = caches(9), caches(5)
    old = [tensor.clone() for tensor in of_d]
    own, memory = offered(of_p)
    reader = NixlReader(of_d, Event())
    check_memory(memory, reader.own)
    opened = reader.open(memory)
    assert num_threads() > before
    for _ in range(2):
        assert opened.copy([(7, 1), (2, 3), (3, 4)], None) > 0
        for source, target, first in zip(of_p, of_d, old, strict=True):
            assert target[:, [1, 3, 4]].equal(source[:, [7, 2, 3]])
            assert target[:, [0, 2]].equal(first[:, [0, 2]])
            target.copy_(first)
    assert opened.copy([], None) < 1 and opened.link_rate() == 0.0
    assert len(reads) == 2 * num_reads
    opened.close()
    own.close()
    own.close()
    eventually(lambda: num_threads() <= before)  # others may have ended as well


def noted(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    """Return the function, which also appends its arguments to `calls`."""

    def wrapper(*arguments: Any) -> Any:
        calls.append(arguments)
        return function(*arguments)

    return wrapper


def test_blocks_and_batches() -> None:
    parts = [MemoryPart(b"", 0, 3, 9, 32), MemoryPart(b"", 0, 2, 9, 100)]
    blocks = list(nixl.blocks_of(parts, [(2, 3, 5), (8, 1, 1)], 100))
    assert blocks[:4] == [
        PageBlock(0, 0, 1, 2, 3, 3, 96), PageBlock(0, 1, 1, 2, 3, 3, 96),
        PageBlock(0, 2, 1, 2, 3, 3, 96), PageBlock(0, 0, 1, 5, 6, 2, 64),
    ]  # fmt: skip
    assert blocks[6:8] == [PageBlock(0, 0, 3, 8, 1, 1, 96), PageBlock(1, 0, 1, 2, 3, 1, 100)]
    assert sum(block.num_bytes for block in blocks) == 6 * (3 * 32 + 2 * 100)
    sizes = [[one.num_bytes for one in batch] for batch in nixl.batches(iter(blocks[2:6]), 200)]
    assert sizes == [[96, 64], [64, 64]]
    assert list(nixl.batches(iter([]), 200)) == []


AGENT = AgentCard(b"metadata", "DRAM", 0)
PART = MemoryPart(b"", 4096, 3, 9, 32)
OWN = DeviceMemory("", "", [PART], backend="nixl")


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        (dict(backend="cuda_ipc", agent=None), "its transfer.backend is cuda_ipc: set nixl there"),
        (dict(agent=None), "its agent has no metadata, or too much"),
        (dict(agent=AgentCard(bytes(MAX_METADATA + 1), "DRAM", 0)), "no metadata, or too much"),
        (dict(agent=AgentCard(b"", "VRAM", -1)), "the description of its agent is malformed"),
        (dict(parts=[PART, PART]), "its cache has other tensors: serve the same recipe"),
        (dict(parts=[MemoryPart(b"", 2**64 - 863, 3, 9, 32)]), "its cache is malformed"),
        (dict(parts=[MemoryPart(b"", -1, 3, 9, 32)]), "its cache is malformed"),
        (dict(parts=[MemoryPart(b"", 0, 3, 2**62, 32)]), "its cache is malformed"),
    ],
)
def test_a_forged_description(changed: dict[str, Any], error: str) -> None:
    memory = msgspec.structs.replace(OWN, **{"agent": AGENT, **changed})
    with pytest.raises(PeerError, match=error):
        check_memory(memory, OWN)
    check_memory(msgspec.structs.replace(OWN, agent=AGENT), OWN)


@needs_nixl
def test_a_range_that_p_has_not_registered() -> None:
    """NIXL refuses it, and D's pages stay. So does metadata that is none."""
    of_p, of_d = caches(9), caches(5)
    old = [tensor.clone() for tensor in of_d]
    own, memory = offered(of_p)
    reader = NixlReader(of_d, Event())
    parts = [msgspec.structs.replace(part, start=part.start + (1 << 30)) for part in memory.parts]
    opened = reader.open(msgspec.structs.replace(memory, parts=parts))
    with pytest.raises(PeerError, match="a read could not be started: "):
        opened.copy([(7, 1)], None)
    opened.close()
    assert all(map(torch.equal, of_d, old)) and not reader.num_late
    agent = AgentCard(b"no metadata", "DRAM", 0)
    with pytest.raises(PeerError, match="its memory cannot be opened: "):
        reader.open(msgspec.structs.replace(memory, agent=agent))
    own.close()


@needs_nixl
@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("qwen3 gqa 3, tied", dict()),
        ("deepseek_v3 tied", dict(cache_dtype="fp8")),
        ("qwen3_next", dict(checkpoints=8)),
    ],
)
def test_the_text_is_that_of_one_engine(case: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    family, overrides = CASES[case]
    make_tiny(tmp_path, family, **overrides)
    before = num_threads()
    check_direct(config_of(tmp_path), sizes, tmp_path, backend="nixl")
    eventually(lambda: num_threads() <= before)


@needs_nixl
def test_each_rank_reads_from_the_memory_of_its_own_rank(tmp_path: Path) -> None:
    """The states of a hybrid model go by socket, in parts of each rank."""
    family, overrides = CASES["qwen3_next"]
    make_tiny(tmp_path, family, **overrides)
    check_direct(config_of(tmp_path), dict(checkpoints=8), tmp_path, backend="nixl", ranks=2)


@needs_nixl
def test_other_numbers_of_ranks_do_not_pair(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """D warns once, although it tries again, and computes."""
    make_tiny(tmp_path, "qwen3")
    config = config_of(tmp_path)
    sizes: dict[str, Any] = dict(pages=64, **SIZES)
    with ranked(
        with_role(config, "prefill", "127.0.0.1:0", backend="nixl"), 2, tmp_path, **sizes
    ) as p:
        lender = p.runner.lender
        assert lender is not None
        host, port = lender.server.address
        asked = with_role(config, "decode", f"{host}:{port}", backend="nixl")
        with noted_remotes() as remotes:
            d = WholeEngine(asked, host_gib=0.01, **sizes)
            refusal = f"no pages from {host}:{port}: "
            eventually(lambda: refusal in caplog.text)
            prompt = next(prompt for prompt in prompts_of(6) if len(prompt) > 12)
            p.loop.handle(spec_of(0, prompt, 1, lends=True))
            p.run()
            ticket = json.loads(p.handovers[0])["nanovllm_ticket"]
            spec = spec_of(0, prompt, 10, ticket=ticket)
            Tickets(remotes[0], 4).offer(spec, b"")
            d.loop.handle(spec)
            d.run()
            assert d.cached[0] == 0 and len(d.text[0]) == 10
            assert remotes[0].counts == {"unconnected": 1}
        lender.close()
    (line,) = (r.getMessage() for r in caplog.records if refusal in r.getMessage())
    assert line.partition(refusal)[2] == (
        "its parallel.tp is 2, and 1 here; nixl needs equal ones: set one number on both, or use "
        "transfer.backend socket"
    )


@pytest.fixture
def started() -> Iterator[list[PrefillProcess]]:
    """Yield a list of processes, which are killed after the test."""
    processes: list[PrefillProcess] = []
    yield processes
    for process in processes:
        process.kill()


@needs_nixl
def test_p_is_frozen_and_dies_in_a_read(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    started: list[PrefillProcess],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """D computes the text. A read that ends late writes to no page, and a new P is read again."""
    monkeypatch.setenv("UCX_TLS", "tcp")  # by which P takes part in a read
    monkeypatch.setattr(page_client, "MAX_RETRY_S", 0.5)
    monkeypatch.setattr(roles, "NixlReader", partial(NixlReader, silence_s=0.5))
    before = Before(monkeypatch)
    make_tiny(tmp_path, "qwen3")
    started += [PrefillProcess(tmp_path), PrefillProcess(tmp_path)]
    p, again = started
    port = p.listen()
    asked = with_role(config_of(tmp_path), "decode", f"127.0.0.1:{port}", backend="nixl")
    d = DecodeEngine(WholeEngine(asked, pages=48, host_gib=0.01, **SIZES))
    request.addfinalizer(d.remote.close)
    alone = WholeEngine(config_of(tmp_path), pages=64, **SIZES)
    prompts = [prompt for prompt in prompts_of(12) if len(prompt) > 12]
    for i, prompt in enumerate(prompts[:5]):
        alone.submit(i, prompt, 10)
        alone.run()

    assert d.run(0, prompts[0], p) > 0
    before.action = p.freeze
    assert d.run(1, prompts[1], p) == 0 and "a read has not ended within 0.5 s" in caplog.text
    p.go_on()
    before.action = None
    assert d.run(2, prompts[2], p) > 0
    eventually(lambda: "transfer-late" not in thread_names())

    def kill() -> None:
        p.freeze()
        before.after = p.kill

    before.action = kill
    assert d.run(3, prompts[3], p) == 0 and "a read failed: ERR" in caplog.text
    before.action = before.after = None
    again.listen(port)
    assert d.run(4, prompts[4], again) > 0
    assert d.engine.text == alone.text
    d.engine.memory.check()


class Before:
    """Actions directly before and after the start of D's next read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.action: Callable[[], None] | None = None
        self.after: Callable[[], None] | None = None
        real = nixl.Agent.post

        def post(agent: nixl.Agent, read: Any) -> None:
            if self.action is not None:
                self.action()
            real(agent, read)
            if self.after is not None:
                self.after()

        monkeypatch.setattr(nixl.Agent, "post", post)


class DecodeEngine:
    """D, with a request at a time."""

    def __init__(self, engine: WholeEngine) -> None:
        assert engine.runner.remote is not None
        self.engine, self.remote = engine, engine.runner.remote
        self.tickets = Tickets(self.remote, 4)

    def run(self, request_id: int, prompt: list[int], p: PrefillProcess) -> int:
        """Compute a text with pages of P. Return the number of tokens that were read."""
        ticket = p.ticket(prompt)
        connected = [peer.fetches for peer in self.remote._client._peers]
        eventually(lambda: all(one.engine for one in connected))
        spec = spec_of(request_id, prompt, 10, ticket=ticket)
        self.tickets.offer(spec, b"")
        self.engine.loop.handle(spec)
        self.engine.run()
        return self.engine.cached[request_id]


def thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_the_package_is_missing_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "MODULES", ("nixl_missing", "nixl_missing_too"))
    keys = ["device=cpu", "transfer.backend=nixl", "transfer.listen=127.0.0.1:1"]
    keys += ["transfer.peers=[127.0.0.1:1]", "cache.host_gib=0.01", f"transfer.secret={SECRET}"]
    for role in ("prefill", "decode"):
        config = load_config(None, keys, {"transfer.role": role})
        with pytest.raises(ConfigError, match=r"nixl needs the package nixl-cu12 .*nanovllm\[nixl"):
            build(config)
    (tmp_path / "nixl_without_a_library.py").write_text('raise OSError("libcuda.so.1")')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(nixl, "MODULES", ("nixl_without_a_library",))
    with pytest.raises(ConfigError, match=r"\(libcuda.so.1\): pip install"):
        nixl.nixl_library()


def test_a_library_that_configures_logging_closes_no_handler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's log goes on after the import of NIXL."""
    lines = ["import logging.config", 'logging.config.dictConfig({"version": 1})']
    (tmp_path / "nixl_that_configures.py").write_text(
        "\n".join([*lines, "logging.raiseExceptions = 0"])
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(nixl, "MODULES", ("nixl_that_configures",))
    handler, closed = logging.StreamHandler(), []
    configure = logging.config.dictConfig
    monkeypatch.setattr(handler, "close", lambda: closed.append(1))
    assert nixl.nixl_library().__name__ == "nixl_that_configures" and not closed
    assert logging.config.dictConfig is configure and logging.raiseExceptions


@needs_nixl
def test_the_library_leaves_logging_as_it_was() -> None:
    nixl.nixl_library()
    own = logging.getLogger("nixl")
    assert logging.raiseExceptions and own.propagate and own.handlers == []
