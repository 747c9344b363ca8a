"""Publisher of cache events over ZMQ, in two threads, so that the step loop never waits.

    step loop --send--> queue --thread: encode--> PUB socket --> subscribers
                                     |
                                     '--> latest batches --thread: ROUTER socket--> replays

Frames are vLLM's: topic, number of the batch (8 bytes, big-endian), batch. A request for a replay
is an empty frame and the first number that is wanted. The answers have the same three frames after
an empty one; the last answer has the number -1 and an empty batch.

Everything is bounded by `buffer_steps`. A batch that the queue has no room for is dropped with its
number, so subscribers see a gap that no replay fills, and start anew. A slow subscriber loses
batches in its own socket, and may ask for a replay.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from itertools import count

import zmq

from nanovllm.config import ConfigError
from nanovllm.kv.events import AllBlocksCleared, EventBatch, EventWriter, encode
from nanovllm.kv.page_log import Change
from nanovllm.kv_events import KvEvents, address_of

log = logging.getLogger("kv_events")
END = (-1).to_bytes(8, "big", signed=True)  # number of the frame that ends a replay
Work = tuple[int, float, list[Change]]  # number of the batch, its time, its changes


class EventPublisher:
    """Owner of the sockets and threads of one engine."""

    def __init__(self, options: KvEvents, topic: str, engine: int, writer: EventWriter) -> None:
        """`engine` is the number of this engine. Raise ConfigError if a port cannot be used."""
        self._topic = topic.encode()
        self._rank = engine
        self._writer = writer
        self._most = options.buffer_steps
        self._numbers = count(1)  # 0 is the batch that clears
        self._dropped = False  # the warning has been logged
        self._queue = queue.SimpleQueue[Work | None]()
        self._latest: deque[tuple[int, bytes]] = deque(maxlen=self._most)
        self._lock = threading.Lock()  # of _latest
        self._context = zmq.Context()
        try:
            pub = self._bound(zmq.PUB, options.endpoint, "endpoint")
            replay = self._bound(zmq.ROUTER, options.replay, "replay")
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        assert pub is not None
        threads = [threading.Thread(target=self._publish, args=(pub,), name="kv-events")]
        if replay is not None:
            threads.append(threading.Thread(target=self._serve, args=(replay,), name="kv-replay"))
        self._threads = threads
        for thread in threads:
            thread.daemon = True
            thread.start()
        log.info("kv_events: %s is published at %s", topic, options.endpoint)

    def _bound(self, kind: int, address: str | None, key: str) -> zmq.Socket[bytes] | None:
        if address is None:
            return None
        own = address_of(address, self._rank)
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        # A replay is longer by its last frame. A peer that does not read it loses the rest.
        socket.setsockopt(zmq.SNDHWM, self._most + (kind == zmq.ROUTER))
        try:
            socket.bind(own)
        except zmq.ZMQError as error:
            raise ConfigError(f"kv_events.{key}: cannot listen on {own}: {error}") from None
        return socket

    def send(self, changes: list[Change]) -> None:
        """Publish the changes of a step. Return at once, and drop them if too many wait."""
        number = next(self._numbers)
        if self._queue.qsize() < self._most:
            self._queue.put((number, time.time(), changes))
        elif not self._dropped:
            self._dropped = True
            log.warning("kv_events: %d batches wait; later ones are dropped", self._most)

    def close(self) -> None:
        """Publish what waits, and end the threads."""
        self._queue.put(None)
        self._threads[0].join()
        self._context.term()  # ends the other thread's wait
        for thread in self._threads:
            thread.join()

    def _publish(self, pub: zmq.Socket[bytes]) -> None:
        """Publish until `close`. Batches without an event are sent, too, to leave no gap."""
        self._emit(pub, 0, EventBatch(time.time(), [AllBlocksCleared()], self._rank))
        while (work := self._queue.get()) is not None:
            number, at, changes = work
            self._emit(pub, number, EventBatch(at, self._writer.events(changes), self._rank))
        pub.close()

    def _emit(self, pub: zmq.Socket[bytes], number: int, batch: EventBatch) -> None:
        payload = encode(batch)
        with self._lock:
            self._latest.append((number, payload))
        pub.send_multipart([self._topic, number.to_bytes(8, "big"), payload])

    def _serve(self, replay: zmq.Socket[bytes]) -> None:
        """Answer requests for earlier batches until the context ends."""
        try:
            while True:
                peer, *request = replay.recv_multipart()
                if len(request) == 2 and len(request[1]) == 8:
                    self._replay(replay, peer, int.from_bytes(request[1], "big"))
        except zmq.ContextTerminated:
            replay.close()

    def _replay(self, replay: zmq.Socket[bytes], peer: bytes, first: int) -> None:
        with self._lock:
            batches = [batch for batch in self._latest if batch[0] >= first]
        for number, payload in batches:
            replay.send_multipart([peer, b"", self._topic, number.to_bytes(8, "big"), payload])
        replay.send_multipart([peer, b"", self._topic, END, b""])
