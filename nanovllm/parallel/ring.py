"""One process's messages to several others, through memory that all of them map. Imports no torch.

The memory holds bytes and nothing else. Two pipes lie between the writer and each reader: the bell,
into which the writer puts one byte for each part that lies in the ring, and the acks, which say how
far the reader has read. Each side looks at no memory but that of which a pipe told it. So the order
of loads and stores is right on every processor, x86 or ARM: what was stored before a write into a
pipe is seen by whoever has read what was written, because the kernel hands it over under a lock. No
flag in memory is waited for, as nothing in Python would put it into an order with its data.

Whoever has to wait sleeps in a pipe, and hears of the other side's death there. The memory has no
name in any folder: it is gone with the last process that has it open, however that ended.

Decision: no spinning before a sleep. To wake takes as long as the system needs for it: 0.12 ms for
a plan on a small virtual machine, where a bare pipe takes 0.1, but masks of 5 MB 2 ms instead of 7.
Rank 0 still prepares the same step for its own device meanwhile, and steps in flight hide it.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from multiprocessing.connection import Connection as Pipe

RING_BYTES = 1 << 20
PIPE_BYTES = 4096  # a pipe takes so many without a reader, however small the system makes it
HEADER = struct.Struct("<II")  # a part's bytes, and whether its message goes on in the next part
ACK = struct.Struct("<Q")  # how many bytes of the ring were read since the beginning
PATIENCE_S = 30.0


class End:
    """One end of a ring. It can be given to a child that is being spawned, and is closed then.

    `memory` is a Pipe because that is how multiprocessing hands a file descriptor to a child.
    """

    def __init__(self, memory: Pipe, size: int) -> None:
        self.memory = memory
        self.size = size
        self.most = size // 4  # bytes of a part and its header
        self.grain = size // PIPE_BYTES  # parts begin at its multiples, so that no bell gets full
        self.at = 0  # bytes written or read since the beginning

    @cached_property
    def view(self) -> memoryview:
        return memoryview(mmap.mmap(self.memory.fileno(), self.size))

    def go_on(self, length: int) -> None:
        """Behind a part of so many bytes."""
        self.at += -(-(HEADER.size + length) // self.grain) * self.grain


class RingWriter(End):
    """The end that sends, to all readers alike."""

    def __init__(
        self, memory: Pipe, size: int, bells: Sequence[Pipe], acks: Sequence[Pipe]
    ) -> None:
        super().__init__(memory, size)
        self.bells = bells
        self.acks = acks
        self.read = [0] * len(acks)  # as the acks say
        self.patience_s = PATIENCE_S

    def send(self, message: bytes) -> None:
        """To all readers; waits for the slowest one if the ring is full.

        Raises OSError if a reader has gone, or has read nothing for `patience_s` seconds.
        """
        rest = memoryview(message)
        goes_on = True
        while goes_on:
            begin = self.at % self.size
            data = begin + HEADER.size
            length = min(len(rest), self.most - HEADER.size, self.size - data)
            goes_on = length < len(rest)
            self._wait_for_room()
            HEADER.pack_into(self.view, begin, length, goes_on)
            self.view[data : data + length] = rest[:length]
            rest = rest[length:]
            self.go_on(length)
            for bell in self.bells:
                os.write(bell.fileno(), b"\0")

    def _wait_for_room(self) -> None:
        """Until every reader has left room for the longest part."""
        for reader, ack in enumerate(self.acks):
            while self.at + self.most > self.read[reader] + self.size:
                if not ack.poll(self.patience_s):
                    raise TimeoutError(f"reader {reader + 1} has not read for {self.patience_s} s")
                said = os.read(ack.fileno(), PIPE_BYTES)
                if not said:
                    raise BrokenPipeError(f"reader {reader + 1} has gone")
                (self.read[reader],) = ACK.unpack(said[-ACK.size :])

    def close(self) -> None:
        for pipe in (self.memory, *self.bells, *self.acks):
            pipe.close()


class RingReader(End):
    """An end that receives all that is sent, in its order."""

    def __init__(self, memory: Pipe, size: int, bell: Pipe, ack: Pipe) -> None:
        super().__init__(memory, size)
        self.bell = bell
        self.ack = ack
        self.acked = 0  # how much of `at` the writer knows
        self.num_parts = 0  # that lie in the ring, as the bell said

    def recv(self) -> bytes | None:
        """The next message, blocking; None when the writer has gone."""
        parts = []
        goes_on = True
        while goes_on:
            if not self.num_parts:
                self.num_parts = len(os.read(self.bell.fileno(), PIPE_BYTES))
                if not self.num_parts:
                    return None
            self.num_parts -= 1
            begin = self.at % self.size
            data = begin + HEADER.size
            length, goes_on = HEADER.unpack_from(self.view, begin)
            parts.append(bytes(self.view[data : data + length]))
            self.go_on(length)
            if self.at - self.acked >= self.most:  # the writer never needs to know better
                self.acked = self.at
                with suppress(BrokenPipeError):  # it has gone; what it said before is still here
                    os.write(self.ack.fileno(), ACK.pack(self.at))
        return b"".join(parts)

    def close(self) -> None:
        for pipe in (self.memory, self.bell, self.ack):
            pipe.close()


def ring(num_readers: int, size: int = RING_BYTES) -> tuple[RingWriter, list[RingReader]]:
    """The ends of a new ring of `size` bytes, a multiple of 64 KiB."""
    bells = [multiprocessing.Pipe(duplex=False) for _ in range(num_readers)]
    acks = [multiprocessing.Pipe(duplex=False) for _ in range(num_readers)]
    memory = os.memfd_create("nanovllm-ring")
    os.truncate(memory, size)
    readers = [
        RingReader(Pipe(os.dup(memory)), size, bell, ack)
        for (bell, _), (_, ack) in zip(bells, acks, strict=True)
    ]
    return RingWriter(Pipe(memory), size, [b for _, b in bells], [a for a, _ in acks]), readers
