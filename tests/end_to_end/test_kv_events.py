"""Cache events of a server with two engines, as a router would read them."""

from __future__ import annotations

import socket
from typing import Any

import httpx

from tests.end_to_end.demo_server import start
from tests.kv.router_index import Index, Subscriber

PAGE = 16


def ports() -> tuple[int, int]:
    """Return two free ports, each with a free one after it."""
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("", 0)) as second:
        return first.getsockname()[1], second.getsockname()[1]


def test_two_engines_publish_their_pages() -> None:
    """Each has its own port, with the salt and the adapter of each request."""
    events, replay = ports()
    section = f"endpoint: 'tcp://127.0.0.1:{events}', replay: 'tcp://127.0.0.1:{replay}'"
    server = start(
        "--dp", "2", "--device", "cpu", "--set", f"cache.page_tokens={PAGE}",
        "--set", "adapters.folder=demo", "--set", f"kv_events={{{section}, topic: kv@pod@demo}}",
    )  # fmt: skip
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
