"""Pages come back as they were written, in the order of use, within the limit, after a restart."""

from __future__ import annotations

import os
import re
import stat
import threading
from pathlib import Path

import msgspec
import pytest

from nanovllm.config import load_config
from nanovllm.kv.disk import folder as page_folder
from nanovllm.kv.disk.format import PageOwner, file_bytes
from nanovllm.launch import serve
from nanovllm.typed_yaml import ConfigError
from tests.kv.disk.stores import (
    LENGTH,
    OWNER,
    eventually,
    files,
    get,
    limits,
    opened,
    path_of,
    payload,
    put,
    result,
)  # fmt: skip


def test_a_page_comes_back_and_survives_a_restart(tmp_path: Path) -> None:
    woken = threading.Event()
    with opened(tmp_path, wake=woken.set) as store:
        assert not store.holds(b"a") and get(store, b"a") is None
        put(store, b"a", b"b")
        assert store.holds(b"a") and get(store, b"a") == payload(b"a")
        assert woken.is_set() and store.num_bytes == 2 * file_bytes(LENGTH)
        counted = store.counters()
        assert (counted.hits, counted.misses, counted.written) == (1, 1, 2)
        assert (counted.read_bytes, counted.written_bytes) == (LENGTH, 2 * LENGTH)
        assert counted.read_seconds > 0 and counted.write_seconds > 0 and store.faults() == {}
    with opened(tmp_path) as store:
        assert store.holds(b"b") and get(store, b"b") == payload(b"b")
        assert store.num_bytes == 2 * file_bytes(LENGTH)


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, LENGTH])
@pytest.mark.parametrize("is_direct", [True, False])
def test_any_length_with_and_without_direct_io(
    length: int, is_direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_direct:
        monkeypatch.setattr(page_folder, "O_DIRECT", 0)
    with opened(tmp_path) as store:
        assert is_direct or not store.is_direct
        assert result(store, store.write(b"k", payload(b"k", length)) or 0)
        eventually(lambda: store.holds(b"k"))
        into = bytearray(length)
        assert result(store, store.read(b"k", into)) and into == payload(b"k", length)
        assert not result(store, store.read(b"k", bytearray(length + 4096 if length < 5000 else 9)))


def test_names_and_modes_show_nothing(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    with opened(tmp_path) as store:
        put(store, b"secret key")
    (file,) = files(tmp_path)
    assert re.fullmatch(r"pages/([0-9a-f]{2})/\1[0-9a-f]{62}", str(file.relative_to(tmp_path)))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for folder in (file.parent, file.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    os.chmod(tmp_path / "pages", 0o777)
    with opened(tmp_path):
        assert stat.S_IMODE((tmp_path / "pages").stat().st_mode) == 0o700


CHANGED = [{"identity": b"n" * 32}, {"dtype": "float16"}, {"layout": b"k" * 32}, {"rank": 1}]


@pytest.mark.parametrize("changed", CHANGED, ids=lambda changed: next(iter(changed)))
def test_another_owner_finds_nothing(changed: dict[str, object], tmp_path: Path) -> None:
    other = msgspec.structs.replace(OWNER, **changed)
    with opened(tmp_path) as store:
        put(store, b"a")
    with opened(tmp_path, owner=other) as store:
        assert not store.holds(b"a") and store.num_bytes == file_bytes(LENGTH)
        put(store, b"a")
    # Even if the file is found under the name of the other.
    path_of(tmp_path, b"a").rename(path_of(tmp_path, b"a", other))
    with opened(tmp_path, owner=other) as store:
        assert store.holds(b"a") and get(store, b"a") is None and store.faults() == {"foreign": 1}


def test_the_page_unused_for_longest_goes_first(tmp_path: Path) -> None:
    with opened(tmp_path, limits(pages=3)) as store:
        put(store, b"a", b"b", b"c")
        assert get(store, b"a") is not None
        put(store, b"d")
        assert [store.holds(k) for k in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
        assert store.counters().evicted == 1 and len(files(tmp_path)) == 3
        put(store, b"c")  # a page that is stored: counts as a use, writes nothing
        assert store.counters().written == 4
    with opened(tmp_path, limits(pages=3)) as store:  # the order is in the files
        put(store, b"e")
        assert [store.holds(k) for k in (b"a", b"c", b"d", b"e")] == [True, False, True, True]


def test_a_smaller_limit_applies_to_files_of_all_owners(tmp_path: Path) -> None:
    other = PageOwner(identity=b"old", dtype="float16", layout=b"", rank=7)
    with opened(tmp_path, owner=other) as store:
        put(store, *(b"old %d" % i for i in range(5)))
    with opened(tmp_path) as store:
        put(store, *(b"new %d" % i for i in range(5)))
    with opened(tmp_path, limits(pages=6)) as store:
        eventually(lambda: len(files(tmp_path)) == 6)
        assert all(store.holds(b"new %d" % i) for i in range(5))
        assert path_of(tmp_path, b"old 4", other).exists()
        assert store.num_bytes == 6 * file_bytes(LENGTH)
        assert store.page_counts() == {"disk.pages": 6, "disk.pages_used": 6}


def test_files_that_are_no_pages_stay(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("text")
    with opened(tmp_path) as store:
        put(store, b"a")
    shard = path_of(tmp_path, b"a").parent
    (shard / "notes").write_text("text")
    (shard / ("A" * 64)).write_text("text")
    with opened(tmp_path, limits(pages=1)) as store:
        put(store, b"b")
        assert store.num_bytes == file_bytes(LENGTH)
    assert (tmp_path / "mine.txt").exists() and len([*shard.iterdir()]) >= 2


def test_a_page_in_another_shard_is_not_counted(tmp_path: Path) -> None:
    """No name leads to it, so it could be neither read nor evicted."""
    first, last = sorted([b"a", b"b"], key=lambda key: path_of(tmp_path, key))
    with opened(tmp_path) as store:
        put(store, first, last)
    moved = path_of(tmp_path, first)
    target = path_of(tmp_path, last).with_name(moved.name)
    moved.rename(target)
    with opened(tmp_path, limits(scan_s=100)) as store:
        assert store.num_bytes == file_bytes(LENGTH) and not store.holds(first)
        assert get(store, last) == payload(last) and target.exists()


def test_a_full_queue_drops_writes_and_closing_frees_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going, real = threading.Event(), os.pwrite
    with opened(tmp_path, limits(max_writes=2)) as store:
        monkeypatch.setattr(os, "pwrite", lambda *a: going.wait(30) and real(*a))
        put_first = store.write(b"0", payload(b"0"))
        assert put_first is not None and result(store, put_first)  # copied, so not borrowed
        assert store.write(b"0", payload(b"0")) is not None and store.poll()[0][1]  # queued once
        tickets = [store.write(b"%d" % i, payload(b"%d" % i)) for i in range(1, 5)]
        assert [ticket is None for ticket in tickets] == [False, False, True, True]
        assert store.counters().dropped_writes == 2
        threading.Timer(0.05, going.set).start()
        store._transfers.close()
        assert sorted(store.poll()) == [(tickets[0], False), (tickets[1], False)]
        assert store.write(b"9", b"") is None and not result(store, store.read(b"9", bytearray(9)))


def test_a_cancelled_load_never_writes_to_its_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going, real = threading.Event(), os.preadv
    with opened(tmp_path) as store:
        put(store, b"a", b"b", b"c")
        monkeypatch.setattr(os, "preadv", lambda *a: going.wait(30) and real(*a))
        buffers = [bytearray(LENGTH) for _ in range(3)]
        tickets = [store.read(key, into) for key, into in zip((b"a", b"b", b"c"), buffers)]  # noqa: B905
        eventually(lambda: len(store._transfers._working) == 2)  # two run, one is queued
        for ticket in tickets:
            store.cancel(ticket)
        going.set()
        eventually(lambda: not store._transfers._working)
        assert buffers == [bytes(LENGTH)] * 3 and store.poll() == []
        assert not store._transfers._open and get(store, b"c") == payload(b"c")


def test_a_removed_page_is_a_miss_at_once_and_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One page is on the disk, and another one is being written."""
    going, real = threading.Event(), os.pwrite
    with opened(tmp_path) as store:
        put(store, b"a", b"kept")
        monkeypatch.setattr(os, "pwrite", lambda *a: going.wait(30) and real(*a))
        ticket = store.write(b"b", payload(b"b"))
        assert ticket is not None and result(store, ticket)
        store.remove(b"a")
        store.remove(b"b")
        assert not store.holds(b"a") and get(store, b"a") is None
        assert store.write(b"b", payload(b"b")) is None and not store.holds(b"b")
        eventually(lambda: not path_of(tmp_path, b"a").exists())
        going.set()
        eventually(lambda: not store._unwanted)
        assert files(tmp_path) == {path_of(tmp_path, b"kept")} and store.faults() == {}
        put(store, b"a")  # the same text, computed again
        assert get(store, b"a") == payload(b"a")
    with opened(tmp_path) as store:
        assert [store.holds(key) for key in (b"a", b"b", b"kept")] == [True, False, True]


@pytest.mark.parametrize("rank", [0, 1])
def test_other_ranks_read_what_rank_0_has_found(rank: int, tmp_path: Path) -> None:
    """Rank 0's index decides. Another rank's scan may not have found its file yet."""
    owner = PageOwner(identity=b"", dtype="", layout=b"", rank=rank)
    with opened(tmp_path, limits(scan_s=100), owner=owner) as store:
        put(store, b"a")
        store._index.clear()
        assert not store.holds(b"a")
        assert get(store, b"a") == (payload(b"a") if rank else None)
        assert get(store, b"b") is None and store.faults() == {}
        store.remove(b"a")
        assert get(store, b"a") is None


def test_two_stores_share_a_folder(tmp_path: Path) -> None:
    own = limits(pages=4, scan_s=0.0005)
    with opened(tmp_path, own) as one, opened(tmp_path, own) as two:
        put(one, b"a", b"b")
        eventually(lambda: two.holds(b"a") and two.holds(b"b"))
        put(two, b"c", b"d")
        eventually(lambda: one.holds(b"c") and one.holds(b"d"))
        assert get(two, b"a") == payload(b"a")
        put(one, b"e")  # the other used `a`, so `b` is the oldest
        assert [path_of(tmp_path, k).exists() for k in (b"a", b"b", b"e")] == [True, False, True]
        assert get(two, b"b") is None and two.faults() == {}  # a plain miss
        eventually(lambda: two.num_bytes == one.num_bytes == 4 * file_bytes(LENGTH))


def test_clock_jumps_do_not_change_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [4 * 10**18]  # the year 2096
    monkeypatch.setattr("nanovllm.kv.disk.index.time.time_ns", lambda: now[0])
    with opened(tmp_path, limits(pages=3)) as store:
        put(store, b"a")
        now[0] = 10**15  # January 1970
        put(store, b"b", b"c", b"d")
        assert [store.holds(k) for k in (b"a", b"b", b"d")] == [False, True, True]
    with opened(tmp_path, limits(pages=3)) as store:
        put(store, b"e")
        assert [store.holds(k) for k in (b"b", b"c", b"d", b"e")] == [False, True, True, True]
        absurd = path_of(tmp_path, b"c")
        os.utime(absurd, ns=(2**63 - 1, 2**63 - 1))
    with opened(tmp_path, limits(pages=3)) as store:
        put(store, b"f")
        assert not absurd.exists() and store.holds(b"d") and store.holds(b"f")


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cache\.disk\.gib: 9 bytes are less than one page"):
        opened(tmp_path, limits(cap_bytes=9)).__enter__()
    with pytest.raises(ConfigError, match=r"page's file of 16384 bytes, and 2 more of its recurr"):
        opened(tmp_path, limits(2, state_parts=2)).__enter__()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot use .*file: it is not a folder; name a .*writ"):
        opened(tmp_path / "file").__enter__()
    (tmp_path / "pages").symlink_to("/tmp")
    with pytest.raises(ConfigError, match=r"cache\.disk\.path: .*: pages is not a folder; name"):
        opened(tmp_path).__enter__()


def test_the_folder_is_checked_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.launch.engine_processes", None)
    file = tmp_path / "file"
    file.write_text("")
    sets = [f"cache.disk={{path: {file}, gib: 1}}", "cache.host_gib=0.1"]
    with pytest.raises(ConfigError, match=rf"cache\.disk\.path: cannot use {file}: .*writ"):
        serve(load_config(None, sets))
