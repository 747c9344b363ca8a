"""Each abuse of the hostile load, once, against a real API process."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket

import httpx
import pytest

from tests.load.hostile import ABUSES, PATIENCE_S, first_token_s, waits_s
from tests.load.refused import EARLY, HEADS, PAGES
from tests.load.soak.abuses import (
    WRONG,
    Target,
    ask_for_refusals,
    early_refusals,
    forbidden_heads,
    foreign_pages,
)
from tests.server.serving import eventually
from tests.times import least


@pytest.mark.parametrize("name", ABUSES)
def test_others_are_served_after(api, name) -> None:
    act, _ = ABUSES[name]

    async def once() -> None:
        with contextlib.suppress(OSError, TimeoutError):
            address = ("127.0.0.1", httpx.URL(api.url).port or 0)
            await asyncio.wait_for(act(address, 0), 0.3)

    asyncio.run(once())
    assert 0 < least(lambda: first_token_s(api.http), 2) < 2
    eventually(lambda: api.engine.running == {})
    assert "Traceback" not in api.log()


def test_waits_are_measured_until_the_time_is_over(api) -> None:
    found = waits_s(api.url, 0.2)
    assert len(found) >= 3 and max(found) < PATIENCE_S


def test_what_must_be_refused_is_and_with_the_right_status(api) -> None:
    """All of them, against a server that allows `localhost` and its own pages."""
    port = httpx.URL(api.url).port
    for raw, status in (*PAGES, *HEADS, *EARLY):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
            sock.sendall(raw)
            assert sock.recv(1000).startswith(b"HTTP/1.1 %d " % status), raw[:300]
    assert api.engine.generates == []


@pytest.mark.parametrize("abuse", [foreign_pages, forbidden_heads, early_refusals])
def test_an_abuse_counts_an_answer_as_wrong(api, abuse) -> None:
    target = Target("127.0.0.1", httpx.URL(api.url).port or 0, random.Random(0))
    assert WRONG not in asyncio.run(abuse(target))
    answered = asyncio.run(ask_for_refusals(target, [(b"GET /health HTTP/1.0\r\n\r\n", 403)]))
    assert answered == [WRONG]
