"""Cache events of a server with two engines, as a router would read them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.end_to_end.demo_server import Server, start
from tests.kv.router_index import Index, Subscriber

PAGE = 16


def free_pair(after: int) -> int:
    """Return a port above `after` that is free, and so is the next one."""
    for port in range(after + 1, 65535):
        with (
            suppress(OSError),
            socket.create_server(("127.0.0.1", port)),
            socket.create_server(("127.0.0.1", port + 1)),
        ):
            return port
    raise AssertionError("no two free ports")


@pytest.fixture
def stopped_later() -> Iterator[list[Server]]:
    servers: list[Server] = []
    yield servers
    for server in servers:
        if server.process.poll() is None:
            server.stop()


def test_two_engines_publish_their_pages(stopped_later: list[Server]) -> None:
    """Each has its own port, with the salt and the adapter of each request."""
    events = free_pair(20_000 + os.getpid() % 5_000)
    replay = free_pair(events + 1)
    section = f"endpoint: 'tcp://127.0.0.1:{events}', replay: 'tcp://127.0.0.1:{replay}'"
    server = start(
        "--dp", "2", "--device", "cpu", "--set", f"cache.page_tokens={PAGE}",
        "--set", "adapters.folder=demo", "--set", f"kv_events={{{section}, topic: kv@pod@demo}}",
    )  # fmt: skip
    stopped_later.append(server)
    addresses = [
        (f"tcp://127.0.0.1:{events + at}", f"tcp://127.0.0.1:{replay + at}") for at in (0, 1)
    ]
    found: list[Index] = []
    with Subscriber(*addresses[0]) as first, Subscriber(*addresses[1]) as second:
        cached = 0
        for user in "ab" * 4:  # the user keeps a conversation on one engine
            body: dict[str, Any] = {
                "model": "pirate" if user == "b" else "demo",
                "messages": [{"role": "user", "content": f"I am {user}. What is nanovllm? " * 4}],
                "temperature": 0,
                "max_tokens": 24,
                "cache_salt": f"tenant {user}",
                "user": user,
            }
            usage = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
            cached = usage["usage"]["prompt_tokens_details"]["cached_tokens"]
        for rank, subscriber in enumerate((first, second)):
            subscriber.batches(0.2)
            assert subscriber.topics <= {"kv@pod@demo"}
            index = Index()
            for number, (_, happened, engine) in subscriber.replayed(0):
                assert engine == rank and (number > 0 or index.num_cleared == 0)
                index.apply(happened, PAGE, "full_attention")
            found.append(index)
        assert first.topics or second.topics
    assert server.stop() == 0
    assert [index.num_cleared for index in found] == [1, 1]
    keys = [key for index in found for key in index.extra_keys.values()]
    assert ["tenant a"] in keys and ["pirate", "tenant b"] in keys and ["pirate"] in keys
    longest = max(len(text) for index in found for text in index.texts.values())
    assert longest > cached >= 3 * PAGE  # the output fills pages, too
