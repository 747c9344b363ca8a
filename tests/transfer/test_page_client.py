"""Pages pass over a real socket. Every fault is a failed fetch, soon, with nothing left behind."""

from __future__ import annotations

import ast
import contextlib
import logging
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nanovllm.transfer.leases import Lease, Leases
from nanovllm.transfer.messages import EngineCard
from nanovllm.transfer.page_client import PageClient, ReaderLimits
from nanovllm.transfer.page_server import PageServer, PageSource
from nanovllm.transfer.tickets import VERSION, Ticket

SECRET = "the secret of these tests"
PAGE_BYTES = 20_000
ROOT = Path(__file__).parents[2]
LIMITS = ReaderLimits(
    layout=b"l", identity=b"m", page_bytes=PAGE_BYTES, silence_s=0.5, heartbeat_s=0.05
)


def eventually(holds: Callable[[], object], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.002)


class PrefillEngine:
    """P: a pool of pages with known content, leases, and a server."""

    def __init__(self, engine: str = "p1", port: int = 0, **changed: object) -> None:
        self.pool = [bytes([i]) * PAGE_BYTES for i in range(20)]
        self.released: list[Lease] = []
        self.now = 0.0
        self.leases = Leases(clock=lambda: self.now)
        self.going = threading.Event()
        self.going.set()
        self.engine = engine
        card = dict(engine=engine, layout=b"l", identity=b"m", page_bytes=PAGE_BYTES, num_ranks=1)
        own = {name: changed.pop(name) for name in list(changed) if name in card}
        self.server = PageServer(
            ("127.0.0.1", port), str(changed.pop("secret", SECRET)),
            EngineCard(**{**card, **own}),  # type: ignore[arg-type]
            leases=self.leases, source=PageSource(self.page, self.released.append),
            silence_s=0.5, **changed,  # type: ignore[arg-type]
        )  # fmt: skip

    def page(self, number: int, share: int = 0, shares: int = 1) -> memoryview:
        self.going.wait(30)
        return memoryview(self.pool[number])

    def ticket(self, *pages: int) -> Ticket:
        generation = self.leases.grant("r", pages)
        return Ticket(
            version=VERSION, engine=self.engine, generation=generation, request="r", pages=pages,
            text=b"", num_tokens=1, expires_at=0.0, layout=b"l", identity=b"m",
        )  # fmt: skip


@pytest.fixture
def p() -> Iterator[PrefillEngine]:
    engine = PrefillEngine()
    yield engine
    engine.going.set()
    engine.server.close()


@contextlib.contextmanager
def reader(*engines: PrefillEngine, secret: str = SECRET, peer: tuple[str, int] | None = None
           ) -> Iterator[PageClient]:  # fmt: skip
    peers = [engine.server.address for engine in engines] + ([peer] if peer else [])
    client = PageClient(peers, secret, LIMITS, lambda: None)
    try:
        yield client
    finally:
        client.close()


def fetch(client: PageClient, ticket: Ticket) -> tuple[bool, list[bytearray]]:
    buffers = [bytearray(PAGE_BYTES) for _ in ticket.pages]
    number = client.fetch(ticket, [memoryview(b) for b in buffers])
    return result(client, number), buffers


def result(client: PageClient, number: int) -> bool:
    assert client.wait(30), "no result"
    ((found, ok),) = client.poll()
    assert found == number
    return ok


def test_pages_arrive_and_the_lease_ends(p: PrefillEngine) -> None:
    with reader(p) as d:
        eventually(lambda: d.reads_from("p1"))
        pages = (3, 1, 2, 19, 5, 6, 7, 8, 9)
        ok, buffers = fetch(d, p.ticket(*pages))
        assert ok and buffers == [p.pool[page] for page in pages]
        eventually(lambda: [lease.pages for lease in p.released] == [pages])
        assert p.leases.counts == {"granted": 1, "done": 1} and d.counts == {"fetched": 1}
        assert p.server.counts["pages"] == 9 and p.server.counts["bytes"] == 9 * PAGE_BYTES


def test_unknown_engines_and_replays(p: PrefillEngine) -> None:
    other = PrefillEngine("p2")
    with reader(p) as d:
        eventually(lambda: d.reads_from("p1"))
        assert fetch(d, other.ticket(1))[0] is False  # not one of the peers
        ticket = p.ticket(4)
        assert fetch(d, ticket)[0] is True
        assert fetch(d, ticket)[0] is False  # replayed: the lease has ended
        eventually(lambda: p.leases.counts["late"] == 1)
        assert len(p.released) == 1 and p.server.counts["pages"] == 1
    other.server.close()


def test_declined_and_cancelled(p: PrefillEngine) -> None:
    with reader(p) as d:
        eventually(lambda: d.reads_from("p1"))
        d.decline(p.ticket(1))
        eventually(lambda: p.leases.counts["not wanted"] == 1)
        p.going.clear()
        buffers = [bytearray(PAGE_BYTES) for _ in range(9)]
        first = d.fetch(p.ticket(*range(9)), [memoryview(b) for b in buffers])
        queued = d.fetch(p.ticket(*range(9)), [memoryview(b) for b in buffers])
        time.sleep(0.05)
        d.cancel(first)
        d.cancel(queued)
        for buffer in buffers:
            buffer[:] = b"n" * PAGE_BYTES  # used for something else
        p.going.set()
        eventually(lambda: p.leases.counts["not wanted"] == 3)
        assert buffers == [b"n" * PAGE_BYTES] * 9 and d.poll() == [] and len(p.leases) == 0
        assert p.server.counts["pages"] <= 4  # one window
        assert fetch(d, p.ticket(2))[0] is True


def test_a_lease_that_ends_during_the_read(p: PrefillEngine) -> None:
    """P's pages are reused while D reads; D must not use them."""
    with reader(p) as d:
        eventually(lambda: d.reads_from("p1"))
        ticket = p.ticket(1, 2, 3)
        real = p.page

        def page(number: int, share: int, shares: int) -> memoryview:
            if number == 3:
                p.now += 1000
                p.released += p.leases.scan()
                p.pool[3] = b"x" * PAGE_BYTES
            return real(number)

        p.server._source = PageSource(page, p.released.append)
        ok, buffers = fetch(d, ticket)
        assert not ok and buffers[2] == b"x" * PAGE_BYTES
        assert [lease.pages for lease in p.released] == [(1, 2, 3)]
        assert p.leases.counts["expired"] == 1 and fetch(d, p.ticket(1))[0] is True


def test_heartbeats_keep_queued_leases(p: PrefillEngine) -> None:
    with reader(p) as d:
        eventually(lambda: d.reads_from("p1"))
        first, second = p.ticket(*range(12)), p.ticket(1)
        real = p.page

        def page(number: int, share: int, shares: int) -> memoryview:
            p.now += 3  # slow: 12 pages take 36 s of P's clock
            time.sleep(0.03)
            return real(number)

        p.server._source = PageSource(page, p.released.append)
        numbers = [
            d.fetch(t, [memoryview(bytearray(PAGE_BYTES)) for _ in t.pages])
            for t in (first, second)
        ]
        found: dict[int, bool] = {}
        while len(found) < 2:
            assert d.wait(30)
            found.update(d.poll())
        assert found == dict.fromkeys(numbers, True) and p.now > 30


def break_connections(p: PrefillEngine) -> None:
    with p.server._lock:
        for sock in p.server._connections:
            sock.shutdown(socket.SHUT_RDWR)


def test_leases_of_waiting_requests_outlive_a_break(p: PrefillEngine) -> None:
    """Heartbeats go on. P also receives the ends of fetches that the break has failed."""
    with reader(p) as d:
        eventually(lambda: d.reads_from("p1"))
        kept, unread, failed = p.ticket(1), p.ticket(2), p.ticket(*range(9))
        d.keep(kept)
        d.keep(unread)
        p.going.clear()
        number = d.fetch(failed, [memoryview(bytearray(PAGE_BYTES)) for _ in range(9)])
        eventually(lambda: d._peers[0].fetches._running)
        break_connections(p)
        assert result(d, number) is False
        d.decline(unread)
        p.going.set()
        eventually(lambda: p.leases.counts["not wanted"] == 2)
        for _ in range(3):
            p.now += 20
            expires = p.leases.lease_of(kept.generation).expires
            eventually(lambda seen=expires: p.leases.lease_of(kept.generation).expires != seen)
        assert [lease.generation for lease in p.leases.scan()] == []
        assert fetch(d, kept)[0] is True and p.leases.counts["expired"] == 0


@pytest.mark.parametrize("fault", ["killed", "frozen"])
def test_p_is_killed_or_frozen(fault: str, p: PrefillEngine,
                               caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    with reader(p) as d:
        eventually(lambda: d.reads_from("p1"))
        p.going.clear()
        number = d.fetch(p.ticket(1), [memoryview(bytearray(PAGE_BYTES))])
        time.sleep(0.05)
        began = time.monotonic()
        if fault == "killed":
            port = p.server.address[1]
            p.server.close()
        assert result(d, number) is False and time.monotonic() - began < 15
        eventually(lambda: not d.reads_from("p1"))
        assert fetch(d, p.ticket(1))[0] is False  # at once
        warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert len(warned) == 1 and warned[0].startswith("transfer.peers: no pages from 127.0.0.1:")
        if fault == "killed":  # it starts again, with the same generations
            again = PrefillEngine("p2", port)
            eventually(lambda: d.reads_from("p2"))
            old = p.ticket(7)
            again.leases.grant("other", [9])
            assert fetch(d, old)[0] is False and again.server.counts["pages"] == 0
            assert fetch(d, again.ticket(1))[0] is True
            again.server.close()
        else:
            p.going.set()
            eventually(lambda: d.reads_from("p1"))
            assert fetch(d, p.ticket(1))[0] is True


PROCESS = """
import sys, time
from tests.transfer.test_page_client import PrefillEngine
p = PrefillEngine()
p.page = lambda number, *share: time.sleep(0.02) or memoryview(p.pool[number % 20])
p.server._source = p.server._source._replace(page=p.page)
p.ticket(*range(500)), p.ticket(1)
print(p.server.address[1], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_signal_to_the_process_of_p(sent: signal.Signals, p: PrefillEngine) -> None:
    command, pipe = [sys.executable, "-c", PROCESS], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        with reader(peer=("127.0.0.1", int(process.stdout.readline()))) as d:
            eventually(lambda: d.reads_from("p1"))
            long, short = p.ticket(*range(500)), p.ticket(1)  # equal to those of the process
            number = d.fetch(long, [memoryview(bytearray(PAGE_BYTES)) for _ in range(500)])
            time.sleep(0.1)
            process.send_signal(sent)
            began = time.monotonic()
            assert result(d, number) is False and time.monotonic() - began < 15
            if sent == signal.SIGSTOP:
                process.send_signal(signal.SIGCONT)
                eventually(lambda: d.reads_from("p1"))
                ok, buffers = fetch(d, short)
                assert ok and buffers == [p.pool[1]]
        process.kill()


def test_a_dead_reader_leaves_a_lease_that_expires(p: PrefillEngine) -> None:
    with reader(p) as d:
        eventually(lambda: d.reads_from("p1"))
        p.going.clear()
        d.fetch(p.ticket(1, 2), [memoryview(bytearray(PAGE_BYTES)) for _ in range(2)])
        time.sleep(0.05)
    p.going.set()
    eventually(lambda: not p.server._connections)
    assert p.leases.num_pages == 2 and p.released == []
    p.now += 30
    assert [lease.pages for lease in p.leases.scan()] == [(1, 2)]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"secret": "another secret of tests"}, "refused this engine's secret"),
        ({"identity": b"M"}, "its identity differs: serve the same model and recipe"),
        ({"layout": b"L"}, "its layout differs"),
        (
            {"layout": b"L", "num_ranks": 2},
            "model and recipe; a speculate.method draft_model needs its parallel.tp of 2$",
        ),
        ({"page_bytes": 5}, "its page_bytes differs"),
    ],
)
def test_a_peer_that_does_not_fit(
    changed: dict[str, object], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    p = PrefillEngine(**changed)  # type: ignore[arg-type]
    with reader(p) as d:
        eventually(lambda: any(r.levelno == logging.WARNING for r in caplog.records))
        time.sleep(0.05)
        assert not d.reads_from("p1") and fetch(d, p.ticket(1))[0] is False
    of_d = [r.getMessage() for r in caplog.records if "transfer.peers: no pages" in r.getMessage()]
    assert len(of_d) == 1
    assert re.search(said, of_d[0]), of_d
    p.server.close()


def test_a_peer_that_starts_late_and_does_not_fit_is_named_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Otherwise the remedy would be missing from the log of a D that starts before P."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with reader(peer=("127.0.0.1", port)):
        eventually(lambda: f"no pages from 127.0.0.1:{port}: [Errno" in caplog.text)
        p = PrefillEngine(port=port, layout=b"L")
        eventually(lambda: f"127.0.0.1:{port}: its layout differs: serve the same" in caplog.text)
    p.server.close()


def test_an_altered_byte_is_noticed(p: PrefillEngine) -> None:
    """A proxy between the engines flips one bit of a page."""
    flips = [True]

    def pump(source: socket.socket, sink: socket.socket, is_from_p: bool) -> None:
        total = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(4096)):
                total += len(data)
                if is_from_p and total > 10_000 and flips:
                    flips.clear()
                    data[-1] ^= 1
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)

    listener = socket.create_server(("127.0.0.1", 0))
    opened = [listener]

    def accept_all() -> None:
        with contextlib.suppress(OSError):
            while True:
                inner, outer = listener.accept()[0], socket.create_connection(p.server.address)
                opened.extend((inner, outer))
                for args in ((inner, outer, False), (outer, inner, True)):
                    threading.Thread(target=pump, args=args, daemon=True).start()

    threading.Thread(target=accept_all, daemon=True).start()
    with reader(peer=listener.getsockname()) as d:
        eventually(lambda: d.reads_from("p1"))
        ok, buffers = fetch(d, p.ticket(1))
        assert not ok and buffers == [bytes(PAGE_BYTES)] and not flips
        eventually(lambda: d.reads_from("p1"))
        assert fetch(d, p.ticket(1))[0] is True
    for sock in opened:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in it
        sock.close()


def test_bytes_of_a_peer_are_decoded_by_msgpack_alone() -> None:
    """NIXL's deserialize_descs reads pickles."""
    package = ROOT / "nanovllm"
    runner = [package / "runner" / f"{name}.py" for name in ("nixl", "cuda_ipc", "page_shares")]
    for path in (*(package / "transfer").glob("*.py"), *runner):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        names |= {node.id for node in nodes if isinstance(node, ast.Name)}
        names |= {node.name for node in nodes if isinstance(node, ast.alias)}
        assert not names & {"pickle", "marshal", "loads", "deserialize_descs", "eval"}, path.name
