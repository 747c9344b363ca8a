"""A consumer of cache events: a plain ZMQ subscriber, and the index that a router makes of them."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import msgspec
import zmq

Batch = tuple[int, list[Any]]  # its number, and the decoded array


class Subscriber:
    """Sockets of a consumer, as vLLM's documentation describes them. Topics begin with "kv@"."""

    def __init__(self, endpoint: str, replay: str = "") -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self.sub.connect(endpoint)
        self.topics: set[str] = set()
        self._replay = replay

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self.context.destroy(linger=0)

    def batches(self, timeout_s: float) -> list[Batch]:
        """Return the batches that arrive until none has come for `timeout_s`."""
        found = []
        while self.sub.poll(timeout_s * 1000):
            topic, number, payload = self.sub.recv_multipart()
            self.topics.add(topic.decode())
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))
        return found

    def replayed(self, first: int) -> list[Batch]:
        """Return the batches from `first` on that the replay endpoint still has."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.connect(self._replay)
        dealer.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while True:
            assert dealer.poll(30_000), "the replay does not end"
            empty, topic, number, payload = dealer.recv_multipart()
            assert empty == b"" and topic.startswith(b"kv@")
            if int.from_bytes(number, "big", signed=True) == -1:
                assert payload == b""
                dealer.close()
                return found
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))


class Index:
    """Pages that an engine has announced: tokens from the start of the text, by hash."""

    def __init__(self) -> None:
        self.texts: dict[int, tuple[int, ...]] = {}
        self.extra_keys: dict[int, list[str] | None] = {}
        self.num_cleared = 0

    def apply(self, events: list[dict[str, Any]], page_tokens: int, kind: str) -> None:
        """Follow the events of a batch. Assert what a router relies on."""
        for event in events:
            if event["type"] == "BlockStored":
                assert event["block_size"] == page_tokens and event["kv_cache_spec_kind"] == kind
                self._store(event, page_tokens)
            elif event["type"] == "BlockRemoved":
                for page in event["block_hashes"]:
                    del self.texts[page], self.extra_keys[page]
            else:
                assert event == {"type": "AllBlocksCleared"}
                self.texts.clear()
                self.num_cleared += 1

    def _store(self, event: dict[str, Any], size: int) -> None:
        parent, tokens = event["parent_block_hash"], event["token_ids"]
        before = () if parent is None else self.texts[parent]
        assert len(tokens) == size * len(event["block_hashes"])
        for at, page in enumerate(event["block_hashes"]):
            assert page not in self.texts, "announced twice"
            before = (*before, *tokens[at * size : (at + 1) * size])
            self.texts[page] = before
            self.extra_keys[page] = event["extra_keys"][at]
