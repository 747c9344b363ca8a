"""Pages from device to device between two processes: bytes, order, rate, faults and text.

All tests run on one GPU. With two GPUs, they run again with P and D on different ones.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from random import Random
from typing import Any

import httpx
import pytest
import torch

from nanovllm.kv.keys import PageKeys
from nanovllm.plan import Copies, Lent, Moved, Moves
from nanovllm.runner.caches import Caches, make_caches
from nanovllm.runner.cuda_ipc import CudaReader, shared_memory
from nanovllm.runner.page_shares import PageShares
from nanovllm.runner.transfer import HostPages, Mover
from nanovllm.transfer.lender import Lender
from nanovllm.transfer.page_client import ReaderLimits
from nanovllm.transfer.remote_pages import RemotePages
from tests.gpu.serving import SMALL, serving
from tests.gpu.test_transfer import QWEN3_8B
from tests.runner.test_nixl import needs_nixl

SECRET = "the secret of these tests"
COUNT = 64  # pages of a transfer: 8,192 tokens of Qwen3-8B, 1.2 GB
OF_P, OF_D = 160, 100  # pages of the caches
PAGE_TOKENS = 128
# Of the rate of a plain copy, by the number of GPUs. Inside one, a copy runs at 2 TB/s, ten times
# the rate of a link, and the copy of a layer's pages takes only microseconds.
LEAST = {1: 0.6, 2: 0.8}
LEAST_SCATTERED = {1: 0.35, 2: 0.8}
KEYS = PageKeys(array("i", range(COUNT * PAGE_TOKENS + 1)), "", PAGE_TOKENS)
IN_ORDER = list(range(17, 17 + COUNT)), list(range(30, 30 + COUNT))  # pages of P and of D
FREED = 2 << 30  # bytes of P's cache that are free after its death, at the least
BUSY_CYCLES = 2_000_000_000  # a second of the device
CHAT = "/v1/chat/completions"
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}
FLOAT32 = (*SMALL, "--set", "dtype=float32")
PLACES = [
    pytest.param((0, 0), id="one GPU"),
    pytest.param(
        (0, 1),
        id="two GPUs",
        marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU"),
    ),
]
pytestmark = pytest.mark.gpu


def eventually(holds: Callable[[], object], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.01)


def filled(device: torch.device) -> Caches:
    """Return P's caches, whose bytes depend on the place of each element only."""
    caches = make_caches(QWEN3_8B, OF_P, PAGE_TOKENS, torch.bfloat16, device=device)
    for nth, tensor in enumerate(caches.tensors):
        generator = torch.Generator(device).manual_seed(nth)
        tensor.view(torch.int16).random_(generator=generator)
    torch.cuda.synchronize(device)
    return caches


def prefill(pipe: Connection, index: int) -> None:
    """Run P: send its address, then a ticket for each list of pages."""
    torch.cuda.set_device(index)
    pages = HostPages(filled(torch.device("cuda", index)), 0)
    lender = Lender(
        ("127.0.0.1", 0), SECRET, layout=b"l", identity=b"m", page_bytes=pages.page_bytes,
        most_pages=OF_P, page=PageShares(pages, [2, 2]).page,
        memories=[shared_memory(pages.tensors)],
    )  # fmt: skip
    pipe.send(lender.server.address)
    with suppress(EOFError):
        while wanted := pipe.recv():
            params = json.loads(
                lender.lend("r", Lent(tuple(wanted), KEYS.full(len(wanted) - 1)), 1)
            )
            pipe.send(params["nanovllm_ticket"])


class Pair:
    """P in another process, and the caches and the Mover of D."""

    def __init__(self, p: int, d: int) -> None:
        self.device_of_p, self.device = (torch.device("cuda", index) for index in (p, d))
        torch.cuda.set_device(self.device)
        torch.cuda.set_stream(torch.cuda.Stream())
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=prefill, args=(there, p), daemon=True)
        self.process.start()
        there.close()
        assert self.pipe.poll(120), "P did not start"
        address = self.pipe.recv()
        caches = make_caches(QWEN3_8B, OF_D, PAGE_TOKENS, torch.bfloat16, device=self.device)
        self.tensors = caches.tensors
        host = HostPages(caches, COUNT)
        usable = threading.Event()
        usable.set()
        limits = ReaderLimits(
            layout=b"l", identity=b"m", page_bytes=host.page_bytes, heartbeat_s=0.2,
            memory=CudaReader(host.tensors, usable, is_required=True),
        )  # fmt: skip
        self.remote = RemotePages([address], SECRET, limits, lambda: None)
        self.mover = Mover(host, lambda wake: self.remote)
        self.num_bytes = COUNT * host.page_bytes
        self.number = 0
        (self.reader,) = self.remote._client._peers
        eventually(lambda: self.reader.fetches.engine)

    def start(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Start the load of a ticket for P's pages `sources`."""
        self.pipe.send(list(sources))
        assert self.pipe.poll(10)
        ended, self.number = [self.number] if self.number else [], self.number + 1
        self.remote.offer(self.number, self.pipe.recv(), KEYS.full, COUNT)
        pairs = list(enumerate(targets))
        fetches = [(KEYS.full(slot), slot) for slot, _ in pairs]
        self.mover.move(Moves(ended, [], [Copies(self.number, pairs, fetches)]))

    def end(self) -> Moved:
        found: list[Moved] = []
        eventually(lambda: found.extend(self.mover.moved()) or found)
        self.remote.settle(self.number)
        (moved,) = found
        return moved

    def rate(self, sources: Sequence[int], targets: Sequence[int]) -> float:
        """Return the bytes per second of the copies alone."""
        memory = self.reader._memory
        assert memory is not None
        pairs = list(zip(sources, targets, strict=True))
        return self.num_bytes / min(memory._opened.copy(pairs, None) for _ in range(5))

    def plain_rate(self) -> float:
        """Return the bytes per second of one large copy from P's device to D's."""
        source = torch.zeros(self.num_bytes, dtype=torch.uint8, device=self.device_of_p)
        target = torch.zeros(self.num_bytes, dtype=torch.uint8, device=self.device)
        seconds = []
        for _ in range(6):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            seconds.append(1e-3 * begin.elapsed_time(end))
        return self.num_bytes / min(seconds)

    def close(self) -> None:
        self.remote.close()
        self.process.kill()
        self.process.join(30)


@pytest.fixture(scope="module", params=PLACES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(*request.param)
    yield pair
    pair.close()
    torch.cuda.empty_cache()


def scattered() -> tuple[list[int], list[int]]:
    rng = Random(1)
    return rng.sample(range(1, OF_P + 1), COUNT), rng.sample(range(1, OF_D + 1), COUNT)


@pytest.mark.parametrize("places", [IN_ORDER, scattered()], ids=["in order", "scattered"])
def test_pages_arrive_after_the_steps_that_used_them(
    pair: Pair, places: tuple[list[int], list[int]]
) -> None:
    sources, targets = places
    others = sorted({*range(OF_D + 1)} - {*targets})
    before = [tensor[:, others].clone() for tensor in pair.tensors]
    torch.cuda._sleep(50_000_000)  # the steps' stream is busy, and then writes the pages
    for tensor in pair.tensors:
        tensor[:, targets] = 0
    pair.start(sources, targets)
    moved = pair.end()
    assert moved.ok and moved.blank == frozenset(range(COUNT)) and moved.num_bytes == 0
    expected = filled(pair.device)
    for own, theirs, old in zip(pair.tensors, expected.tensors, before, strict=True):
        ints, theirs = own.view(torch.int16), theirs.view(torch.int16)
        assert ints[:, targets].equal(theirs[:, sources])
        assert ints[:, others].equal(old.view(torch.int16))
        assert not theirs[:, sources[0]].equal(theirs[:, sources[1]])


def test_the_rate_is_that_of_a_plain_copy(
    pair: Pair, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = pair.plain_rate()
    rates = {"in order": pair.rate(*IN_ORDER), "scattered": pair.rate(*scattered())}
    pair.remote.taken_reads()
    for _ in range(5):
        pair.start(*IN_ORDER)
        pair.end()
    seconds = [one for _, one in pair.remote.taken_reads()]
    rates["with all messages"] = pair.num_bytes / min(seconds)
    is_one = pair.device == pair.device_of_p
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    said = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in rates.items())
    place = "one GPU" if is_one else "two GPUs"
    size = f"{place}, {pair.num_bytes / 1e9:.2f} GB"
    with capsys.disabled():
        reporter.write_line(f"\n{size} in GB/s: a plain copy {plain / 1e9:.0f}, {said}")
    num_gpus = 1 if is_one else 2
    assert rates["in order"] > LEAST[num_gpus] * plain, rates
    assert rates["scattered"] > LEAST_SCATTERED[num_gpus] * plain, rates


def test_p_dies_during_a_copy_and_its_memory_is_freed(pair: Pair) -> None:
    """Runs last. The device ends the copy of a dead process's memory. Its pages are not used."""
    free, _ = torch.cuda.mem_get_info(pair.device_of_p)
    torch.cuda._sleep(BUSY_CYCLES)
    pair.start(*IN_ORDER)
    pair.process.kill()
    pair.process.join(30)
    began = time.monotonic()
    moved = pair.end()
    assert not moved.ok and time.monotonic() - began < 6
    eventually(lambda: pair.reader._memory is None)
    eventually(lambda: torch.cuda.mem_get_info(pair.device_of_p)[0] > free + FREED)
    torch.cuda.synchronize()
    for tensor in pair.tensors:  # the device still works
        tensor.zero_()
        assert not tensor.any()


# -- servers ---------------------------------------------------------------------------------------


def question(name: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{name}: tell me all about pages. " * 40}]
    return {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 24}


def post(url: str, body: dict[str, Any]) -> Any:
    found = httpx.post(url + CHAT, json=body, timeout=60)
    assert found.status_code == 200, found.text
    return found.json()


def answer_of(found: Any) -> tuple[str, int]:
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found["choices"][0]["message"]["content"], cached


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("backend", ["cuda_ipc", pytest.param("nixl", marks=needs_nixl)])
def test_two_servers_answer_as_one_does(backend: str, places: tuple[int, int]) -> None:
    """Each server sees its own GPU only."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    of_p, of_d = (
        {"NANOVLLM_TRANSFER_SECRET": SECRET, "CUDA_VISIBLE_DEVICES": str(index)} for index in places
    )
    own = f"transfer.backend={backend}"
    to_p = ("--role", "prefill", "--set", f"transfer.listen={address}", "--set", own)
    to_d = ("--role", "decode", "--set", f"transfer.peers=[{address}]", "--set", own)
    with (
        serving(*FLOAT32, *to_p, environment=of_p) as p,
        serving(*FLOAT32, *to_d, "--set", "cache.host_gib=0.2", environment=of_d) as d,
    ):
        eventually(lambda: any("is engine" in line for line in d.lines), 40)
        assert any("are copied from its device" in line for line in d.lines), d.lines
        for name in ("Ada", "Grace", "Emmy"):
            body = question(name)
            leg = body | {"max_tokens": 1, "kv_transfer_params": ASKED}
            params = post(p.url, leg)["kv_transfer_params"]
            text, cached = answer_of(post(d.url, body | {"kv_transfer_params": params}))
            alone, none = answer_of(post(d.url, body | {"cache_salt": "alone"}))
            assert cached == params["remote_num_tokens"] >= PAGE_TOKENS and none == 0
            assert text == alone and text
            again, reused = answer_of(post(d.url, body))
            assert again == text and reused >= cached  # the pages stay usable
        assert any("first copy of" in line for line in d.lines)
        assert not any("computes its prompt here" in line for line in d.lines)
        body = question("Alan")
        params = post(p.url, body | {"max_tokens": 1, "kv_transfer_params": ASKED})
        for pid in [*p.children(), p.process.pid]:
            os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        text, cached = answer_of(post(d.url, body | {"kv_transfer_params": params}))
        assert cached == 0 and time.monotonic() - began < 8
        assert text == answer_of(post(d.url, body | {"cache_salt": "alone"}))[0]
