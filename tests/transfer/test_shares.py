"""Shares of pages: reads of other ranks, and tickets on D's other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.context import AuthenticationError
from pathlib import Path

import pytest

from nanovllm.transfer import shares
from nanovllm.transfer.remote_pages import Announcement, RemotePages
from nanovllm.transfer.shares import OtherRank, ShareServer
from tests.kv.disk.stores import eventually
from tests.transfer.test_remote_pages import KEYS, LIMITS, SECRET, Pair, content


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / "s")
    server = ShareServer(
        path,
        SECRET,
        lambda page: memoryview(content(page)),
        lambda checkpoint, spans: memoryview(bytes([checkpoint, *(n for s in spans for n in s)])),
    )
    yield path
    server.close()


def test_pages_and_states_of_another_rank(path: str) -> None:
    share = OtherRank(path, SECRET)
    assert bytes(share.page(7)) == content(7)
    assert bytes(share.state(3, [(2, 9), (20, 1)])) == bytes([3, 2, 9, 20, 1])
    assert Path(path).stat().st_mode & 0o777 == 0o600


def test_a_secret_may_have_any_bytes() -> None:
    """Random bytes in the environment are not UTF-8, and have surrogates in Python."""
    assert shares.key_of("\udcff" * 16).hex().startswith("74f57e1da88665bf")
    assert shares.key_of("sixteen characters, or more").hex().startswith("51085303f54ed8b6")


def test_a_client_without_the_secret_gets_nothing(path: str) -> None:
    with pytest.raises(AuthenticationError):
        OtherRank(path, SECRET + "!").page(7)
    assert bytes(OtherRank(path, SECRET).page(8)) == content(8)  # others are served


def test_a_rank_that_has_ended_is_an_error_and_may_come_back(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "CONNECT_S", 0.1)
    share = OtherRank(path, SECRET)
    share.page(1)
    assert share._connection is not None
    share._connection.close()
    with pytest.raises(OSError, match="has ended"):
        share.page(1)
    assert bytes(share.page(2)) == content(2)
    with pytest.raises(FileNotFoundError):
        OtherRank(path + ".gone", SECRET).page(1)


def test_another_rank_of_d_reads_what_rank_0_announces() -> None:
    """P's lease ends after both shares. Rank 1 fails to read a ticket that it refused."""
    pair = Pair(share=0, shares=2)
    limits = {"layout": b"l", "identity": b"m", "share": 1, "shares": 2}
    own = type(LIMITS)(page_bytes=LIMITS.page_bytes, silence_s=0.5, heartbeat_s=0.05, **limits)
    other = RemotePages([pair.p.server.address], SECRET, own, lambda: None)
    announced: list[Announcement] = []
    pair.d.announce_by(announced.append)
    pair.connect()
    eventually(lambda: other._client.reads_from(pair.p.engine))
    pair.offer(pair.ticket())
    other.follow(announced.pop())
    buffer = bytearray(LIMITS.page_bytes)
    assert pair.read(0, 1, 2)[0] and not pair.ended
    other.read_all([(KEYS.full(1), memoryview(buffer))])
    assert other._client.wait(30) and [ok for _, ok in other.poll()] == [True]
    assert bytes(buffer) == content(1)
    eventually(lambda: [lease.pages for lease in pair.ended] == [(3, 1, 2)])
    pair.d.settle(7)
    assert announced == [Announcement(7)]
    other.follow(announced.pop())
    assert not other.holds(KEYS.full(0))
    pair.offer(pair.ticket())
    other.follow(announced.pop()._replace(text="forged"))
    (number,) = other.read_all([(KEYS.full(0), memoryview(buffer))])
    assert other._client.wait(30) and other.poll() == [(number, False)]
    assert other.counts == {"read": 1, "malformed": 1}
    for end in (other, pair.d, pair.p):
        end.close()
