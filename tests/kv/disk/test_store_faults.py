"""Every fault is a miss with one warning. No exception, no wrong byte, and the tier comes back."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from nanovllm.kv.disk.folder import PageFile, PageFolder
from nanovllm.kv.disk.format import BLOCK, file_bytes
from tests.kv.disk.stores import (
    LENGTH,
    eventually,
    files,
    get,
    limits,
    opened,
    path_of,
    payload,
    put,
    result,
)

ROOT = Path(__file__).parents[3]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def flip(at: int) -> Callable[[Path, Path], None]:
    def flip_in(file: Path, other: Path) -> None:
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)

    return flip_in


def cut(file: Path, other: Path) -> None:
    os.truncate(file, file.stat().st_size - BLOCK)


def empty(file: Path, other: Path) -> None:
    os.truncate(file, 0)


def lengthen(file: Path, other: Path) -> None:
    os.truncate(file, file.stat().st_size + BLOCK)


def swap(file: Path, other: Path) -> None:
    other.rename(file)


def foreign(file: Path, other: Path) -> None:
    file.write_bytes(os.urandom(file.stat().st_size))


def zeros(file: Path, other: Path) -> None:  # after a power failure
    file.write_bytes(bytes(file.stat().st_size))


def link(file: Path, other: Path) -> None:
    target = file.with_name("target")
    file.rename(target)
    file.symlink_to(target)


def pipe(file: Path, other: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def unix_socket(file: Path, other: Path) -> None:
    file.unlink()
    listener = socket.socket(socket.AF_UNIX)
    there = os.getcwd()
    os.chdir(file.parent)
    listener.bind(file.name)
    os.chdir(there)


def folder(file: Path, other: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: list[tuple[str, Callable[[Path, Path], None]]] = [
    ("corrupt", flip(BLOCK + 5000)), ("corrupt", flip(BLOCK + LENGTH - 1)),
    ("corrupt", flip(9)), ("foreign", flip(0)), ("foreign", flip(40)),
    ("truncated", cut), ("truncated", empty), ("truncated", lengthen),
    ("foreign", swap), ("foreign", foreign), ("foreign", zeros),
    ("foreign", link), ("foreign", pipe), ("foreign", unix_socket), ("foreign", folder),
]  # fmt: skip


@pytest.mark.parametrize("is_shard", [False, True])
def test_a_page_that_cannot_have_its_name_leaves_others_alone(
    is_shard: bool, tmp_path: Path
) -> None:
    """A folder is where the page's file should be, or a file where its folder should be."""
    with opened(tmp_path, limits(scan_s=100)) as store:
        path = path_of(tmp_path, b"a")
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.write_bytes(b"") if is_shard else path.mkdir(parents=True)
        ticket = store.write(b"a", payload(b"a"))
        assert ticket is not None and result(store, ticket)  # copied, but not written
        eventually(lambda: store.faults() == {"foreign": 1})
        put(store, b"b")
        assert get(store, b"b") == payload(b"b") and not store.holds(b"a")


@pytest.mark.parametrize("name", ["00", "3f"])
@pytest.mark.parametrize("damage", [folder, pipe, link, unix_socket])
def test_a_foreign_file_with_the_name_of_a_shard_stops_no_other_shard(
    name: str, damage: Callable[[Path, Path], None], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The first trial uses shard 00. The first scan has to pass all shards."""
    blocked = tmp_path / "pages" / name
    blocked.parent.mkdir(mode=0o700)
    blocked.write_bytes(b"")
    if damage is not folder:
        damage(blocked, blocked)
    keys = [key for key in (b"a", b"b", b"c") if path_of(tmp_path, key).parent != blocked]
    with opened(tmp_path, limits(quiet_s=600)) as store:
        assert store.scanned.is_set()
        put(store, *keys)
    with opened(tmp_path, limits(quiet_s=600)) as store:
        assert [get(store, key) for key in keys] == [payload(key) for key in keys]
        assert store.availability == (True, True) and set(store.faults()) == {"foreign"}
    text = f"a page is foreign (pages/{name} is not a folder), so it is computed again"
    assert [text in line for line in warnings(caplog)] == [True, True]  # one of each store


def test_a_scan_that_fails_is_repeated_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A shard that cannot be read takes no time of other threads."""
    numbers: list[int] = []

    def scan(folder: PageFolder, number: int) -> dict[str, PageFile]:
        numbers.append(number)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(PageFolder, "scan", scan)
    began = time.monotonic()
    with opened(tmp_path, limits(scan_s=0.05, retry_s=30)):
        time.sleep(0.5)
    assert len(numbers) <= 2 + (time.monotonic() - began) / 0.05 and set(numbers) == {0}
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize(("kind", "damage"), DAMAGES)
def test_a_damaged_file_is_a_miss(
    kind: str, damage: Callable[[Path, Path], None], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with opened(tmp_path, limits(scan_s=100)) as store:
        put(store, b"a", b"b", b"c")
        damage(path_of(tmp_path, b"a"), path_of(tmp_path, b"b"))
        assert get(store, b"a") is None and not store.holds(b"a")
        assert store.faults() == {kind: 1} and get(store, b"c") == payload(b"c")
        (said,) = warnings(caplog)
        assert said.startswith(f"cache.disk {tmp_path}: a page is {kind} (")
        if damage is not folder:
            put(store, b"a")
            assert get(store, b"a") == payload(b"a")
    assert len(warnings(caplog)) == 1


def test_all_bytes_of_a_header_are_checked(tmp_path: Path) -> None:
    with opened(tmp_path, limits(scan_s=100, quiet_s=0)) as store:
        put(store, b"a")
        path, used = path_of(tmp_path, b"a"), 160
        whole = path.read_bytes()
        assert whole[used:BLOCK] == bytes(BLOCK - used)
        last = len(whole[:BLOCK].rstrip(b"\0"))
        for at in range(last):
            put(store, b"a")
            flip(at)(path, path)
            assert get(store, b"a") is None, f"byte {at}"


def test_one_warning_per_kind_until_quiet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path, limits(quiet_s=1000)) as store:
        for _ in range(3):
            put(store, b"a", b"b")
            flip(BLOCK)(path_of(tmp_path, b"a"), tmp_path)
            cut(path_of(tmp_path, b"b"), tmp_path)
            assert get(store, b"a") is None and get(store, b"b") is None
        assert store.faults() == {"corrupt": 3, "truncated": 3}
        assert len(warnings(caplog)) == 2


class Fault:
    """Function of `os` that fails with an error, as long as `is_on`, for threads of a store."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, number: int) -> None:
        self.is_on = True
        self._number = number
        self._real = getattr(os, name)
        patch.setattr(os, name, self)

    def __call__(self, *args: object, **named: object) -> object:
        if self.is_on and threading.current_thread().name.startswith("disk-"):
            raise OSError(self._number, os.strerror(self._number))
        return self._real(*args, **named)


STOPS = [
    ("full", "pwrite", errno.ENOSPC), ("full", "pwrite", errno.EDQUOT),
    ("failing", "pwrite", errno.EIO),
    ("read-only", "open", errno.EROFS), ("unreadable", "open", errno.EACCES),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "function", "number"), STOPS)
def test_a_disk_that_cannot_be_written(
    kind: str, function: str, number: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, "disk")
    with opened(tmp_path, limits(scan_s=0.01, slow_s=60)) as store:
        put(store, b"a")
        fault = Fault(monkeypatch, function, number)
        ticket = store.write(b"b", payload(b"b"))
        assert ticket is not None and result(store, ticket)
        eventually(lambda: store.faults().get(kind, 0) >= 3)  # the trials fail, too
        assert store.write(b"c", payload(b"c")) is None and not store.holds(b"b")
        assert store.counters().failed_writes == 1 and store.counters().dropped_writes == 1
        assert warnings(caplog) == [
            f"cache.disk {tmp_path}: the disk is {kind} ({os.strerror(number)}); "
            "the disk tier stops its writes and tries again every 0.05 s"
        ]
        if function != "open":
            assert get(store, b"a") == payload(b"a")
        fault.is_on = False
        eventually(lambda: store._health.can_write)
        put(store, b"d")
        assert get(store, b"d") == payload(b"d") and get(store, b"a") == payload(b"a")
        assert not any(".part" in str(path) for path in files(tmp_path))
    assert f"cache.disk {tmp_path}: the disk tier reads and writes again" in caplog.messages


@pytest.mark.parametrize(("kind", "number"), [("failing", errno.EIO), ("unreadable", errno.EACCES)])
def test_an_unreadable_file(
    kind: str, number: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with opened(tmp_path) as store:
        put(store, b"a", b"b", b"c")
        fault = Fault(monkeypatch, "preadv", number)
        assert get(store, b"a") is None and get(store, b"b") is None
        fault.is_on = False
        assert get(store, b"c") == payload(b"c") and store.faults() == {kind: 2}
        assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("function", ["preadv", "pwrite"])
def test_a_disk_that_hangs(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    going, real = threading.Event(), getattr(os, function)
    with opened(tmp_path, limits(slow_s=0.3, max_writes=9)) as store:
        put(store, b"a")
        monkeypatch.setattr(os, function, lambda *a: going.wait(30) and real(*a))
        began = time.monotonic()
        writes = [store.write(key, payload(key)) for key in (b"b", b"c", b"d")]
        assert None not in writes
        if function == "pwrite":
            found = {}
            while len(found) < 3:
                assert store.wait(30)
                found.update(store.poll())
            assert [found[ticket] for ticket in writes] == [True, False, False]
        else:
            assert get(store, b"a") is None
        eventually(lambda: not store.holds(b"a"))  # reading is stopped, too
        assert store.write(b"e", payload(b"e")) is None and get(store, b"a") is None
        assert time.monotonic() - began < 20
        assert [said for said in warnings(caplog) if "the disk is slow" in said] == warnings(caplog)
        assert len(warnings(caplog)) == 1
        going.set()
        eventually(lambda: store.holds(b"a"))
        put(store, b"f")
        assert get(store, b"f") == payload(b"f") and get(store, b"a") == payload(b"a")


def test_a_folder_removed_while_running(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    where = tmp_path / "cache"
    with opened(where) as store:
        put(store, b"a", b"b")
        shutil.rmtree(where / "pages" / path_of(where, b"a").parent.name)
        assert get(store, b"a") is None and store.faults() == {}
        shutil.rmtree(where)
        assert get(store, b"b") is None
        assert len(warnings(caplog)) == 1 and "the disk is removed" in warnings(caplog)[0]
        eventually(lambda: store._health.can_write and store.scanned.is_set())
        assert store.num_bytes == 0
        put(store, b"c")
        assert get(store, b"c") == payload(b"c") and path_of(where, b"c").exists()


def test_a_file_system_that_is_not_mounted_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "cache") as store:
        put(store, b"a")
        monkeypatch.setattr(store._folder, "_device", 12345)
        shutil.rmtree(tmp_path / "cache")
        assert get(store, b"a") is None
        eventually(lambda: store.faults().get("failing", 0) >= 2)
        assert not (tmp_path / "cache" / "pages").exists()


def test_a_full_disk_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as store:
        put(store, b"a")
    real, is_full = os.pwrite, threading.Event()
    is_full.set()

    def pwrite(*args: object) -> object:
        if is_full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwrite", pwrite)
    with opened(tmp_path) as store:
        eventually(store.scanned.is_set)
        assert get(store, b"a") == payload(b"a") and store.write(b"b", payload(b"b")) is None
        is_full.clear()
        eventually(lambda: store._health.can_write)
        put(store, b"b")


KILLED = """
import sys
from pathlib import Path
from tests.kv.disk.stores import limits, opened, payload
with opened(Path(sys.argv[1]), limits(pages=12, write_threads=2)) as store:
    for number in range(10**6):
        key = b"%d" % number
        if store.write(key, payload(key)) and number == 30:
            print("writing", flush=True)
        store.wait(0.1), store.poll()
"""


def test_kill_amid_writes_beside_a_living_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = limits(pages=12, scan_s=0.005)
    with opened(tmp_path, own) as living:
        for _ in range(3):
            command = [sys.executable, "-c", KILLED, str(tmp_path)]
            with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None and process.stdout.readline() == b"writing\n"
                process.send_signal(signal.SIGKILL)
            with opened(tmp_path, own) as store:
                put(living, b"mine")
                left = files(tmp_path)
                assert not any(path.suffix == ".part" for path in left) and len(left) <= 14
                held = [b"%d" % n for n in range(10**4) if store.holds(b"%d" % n)]
                assert held
                for key in held:
                    assert get(store, key) in (payload(key), None)
                assert get(living, b"mine") in (payload(b"mine"), None)
                assert store.faults() == living.faults() == {}
    assert warnings(caplog) == []


def test_a_file_being_written_is_not_a_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going, real = threading.Event(), os.pwrite
    with opened(tmp_path, limits(scan_s=0.001)) as one:

        def pwrite(*args: object) -> object:
            if threading.current_thread().name.startswith("disk-write"):
                going.wait(30)
            return real(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "pwrite", pwrite)
        assert result(one, one.write(b"a", payload(b"a")) or 0)
        eventually(lambda: [p for p in files(tmp_path) if p.suffix == ".part"])
        (left,) = files(tmp_path)
        crashed = left.with_name(f"{left.name[:64]}.{'0' * 16}.part")
        crashed.write_bytes(b"")
        with opened(tmp_path, limits(scan_s=0.001)) as two:
            eventually(lambda: not crashed.exists())
            assert two.scanned.is_set()
            going.set()
            eventually(lambda: one.holds(b"a"))
            eventually(lambda: two.holds(b"a"))
            assert get(two, b"a") == payload(b"a")


def test_a_scan_between_the_creation_and_the_lock_of_a_file_stops_no_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The scan of another server takes the file for that of a crashed one, and removes it."""
    real, other, num_scans = fcntl.flock, PageFolder(tmp_path), 0
    other.open()

    def flock(fd: int, operation: int) -> None:
        nonlocal num_scans
        if operation == fcntl.LOCK_EX and num_scans < 2:
            num_scans += 1
            other.scan(int(path_of(tmp_path, b"a").parent.name, 16))
        real(fd, operation)

    with opened(tmp_path, limits(scan_s=100)) as store:
        monkeypatch.setattr(fcntl, "flock", flock)
        put(store, b"a")
        assert num_scans == 2 and get(store, b"a") == payload(b"a")
        assert files(tmp_path) == {path_of(tmp_path, b"a")}
    assert warnings(caplog) == []
    other.close()


def test_no_limit_is_passed_with_many_writers(tmp_path: Path) -> None:
    own = limits(pages=5, write_threads=4, read_threads=2)
    with opened(tmp_path, own) as store:
        tickets = [store.write(b"%d" % i, payload(b"%d" % i)) for i in range(80)]
        most = 0
        while store._transfers._working or store._transfers._queues["write"]:
            most = max(most, store.num_bytes)
        assert None not in tickets and most <= 5 * file_bytes(LENGTH)
        counted = store.counters()
        assert counted.written == 80 and counted.evicted >= 75 and len(files(tmp_path)) == 5


def test_a_failing_wake_function_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def wake() -> None:
        raise ValueError("a fault of the caller")

    with opened(tmp_path, wake=wake) as store:
        put(store, b"a")
        assert get(store, b"a") == payload(b"a")
    assert "the wake function of the disk tier failed" in caplog.messages


def test_a_thousand_aborts_leave_nothing(tmp_path: Path) -> None:
    """Random writes, loads, aborts and damages; the seed is fixed."""
    random = Random(38)
    own = limits(pages=12, max_writes=4, quiet_s=0, scan_s=0.001)
    keys = [b"%d" % i for i in range(20)]
    with opened(tmp_path, own) as store:
        open_reads: dict[int, tuple[bytes, bytearray]] = {}
        num_hits = num_aborts = 0
        while num_aborts < 1000:
            key, chance = random.choice(keys), random.random()
            if chance < 0.2:
                store.write(key, payload(key))
            elif chance < 0.6:
                into = bytearray(LENGTH)
                open_reads[store.read(key, into)] = key, into
            elif chance < 0.61 and store.holds(key):
                with suppress(OSError):
                    flip(BLOCK + random.randrange(LENGTH))(path_of(tmp_path, key), tmp_path)
            elif chance < 0.65:
                store.wait(0.002)
            elif open_reads:
                ticket = random.choice([*open_reads])
                num_aborts += ticket in store._transfers._open
                store.cancel(ticket)
                key, into = open_reads.pop(ticket)
                assert into in (bytes(LENGTH), payload(key))
                into[:] = payload(b"next")  # the buffer is used for something else
            for ticket, ok in store.poll():
                if ticket in open_reads:
                    key, into = open_reads.pop(ticket)
                    assert into == (payload(key) if ok else bytes(LENGTH))
                    num_hits += ok
        transfers = store._transfers
        eventually(lambda: not transfers._open and not transfers._working)
        assert num_hits > 50 and store.faults().keys() <= {"corrupt", "truncated", "foreign"}
        assert not transfers._writing and not any(transfers._queues.values())
        assert store._index._reserved == 0 and store.num_bytes <= own.cap_bytes
