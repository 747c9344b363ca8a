"""Messages between P and D on a sealed connection, in msgpack. Page bytes follow the messages."""

from __future__ import annotations

from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from nanovllm.transfer.device_pages import DeviceMemory
from nanovllm.transfer.leases import End
from nanovllm.transfer.sealed import LENGTH, PeerError

MAX_REQUEST = 1 << 18  # bytes of a message to P; a heartbeat for 20,000 leases has less
MAX_HEADER = 1 << 20  # bytes of a message to D besides the page
MOST_WAIT_MS = 100  # of `ReadyPages`; no other message passes meanwhile
MOST_COPIED = 1 << 44  # bytes of one prompt, so that their sum stays a number of 64 bits


class EngineCard(Struct, frozen=True, tag="engine"):
    """The first message of P: the engine that this connection leads to."""

    engine: str  # new at each start
    layout: bytes
    identity: bytes
    page_bytes: int  # of a rank
    num_ranks: int = 1
    state_parts: int = 0  # of page_bytes each, of a rank's recurrent state
    memories: list[DeviceMemory] = []  # of each rank, that D's ranks can open; empty: by socket


class ReadPages(Struct, frozen=True, tag="read"):
    """Request of D for pages `first` to `first + count - 1` of a lease.

    P sends each as `PageBytes`, or one `EndedLeases`. D waits for pages with `WaitForPages` before.
    The parts of the lease's recurrent state follow its last page, and count as pages.

    D cannot name a page of P's cache, only places in the list of the lease. Each of the `shares`
    ranks of D reads the heads that it has.
    """

    generation: int
    first: int
    count: int
    share: int = 0
    shares: int = 1


class PageBytes(Struct, frozen=True, tag="page"):
    generation: int
    place: int  # in the list of the lease


class WaitForPages(Struct, frozen=True, tag="wait"):
    """Request of D to wait until the first `count` pages of a lease are complete.

    The answer is `ReadyPages`, with fewer pages after `most_ms` milliseconds, or `EndedLeases`.
    """

    generation: int
    count: int
    most_ms: Annotated[int, Meta(ge=0, le=MOST_WAIT_MS)] = MOST_WAIT_MS


class ReadyPages(Struct, frozen=True, tag="ready"):
    generation: int
    count: int  # leading pages that are complete


class CheckLease(Struct, frozen=True, tag="check"):
    """Sent by D after the last page. The answer is `LeaseAnswer`: whether the lease still holds."""

    generation: int


class LeaseAnswer(Struct, frozen=True, tag="checked"):
    generation: int
    is_held: bool


class Heartbeat(Struct, frozen=True, tag="heartbeat"):
    """Extends these leases of D. The answer is `EndedLeases`, also if none has ended."""

    generations: list[int]


class EndedLeases(Struct, frozen=True, tag="ended"):
    generations: list[int]


class FinishLease(Struct, frozen=True, tag="finish"):
    """Ends a lease of D: at once if it is not wanted, else once all of its `shares` are done.

    There is no answer. P does not take part in copies between devices, so D reports their bytes.
    They count once for each share, and only for a lease that has not ended.
    """

    generation: int
    end: End
    share: int = 0
    shares: int = 1
    copied_bytes: Annotated[int, Meta(ge=0, le=MOST_COPIED)] = 0


ToP: TypeAlias = WaitForPages | ReadPages | CheckLease | Heartbeat | FinishLease
ToD: TypeAlias = EngineCard | ReadyPages | PageBytes | LeaseAnswer | EndedLeases
T = TypeVar("T")


def encode(message: ToP | ToD) -> bytes:
    """Return the start of a frame's body: the length of the message, and the message."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def decode(frame: memoryview, decoder: msgspec.msgpack.Decoder[T]) -> tuple[T, memoryview]:
    """Return a message and the bytes that follow it. Raise PeerError if it is not readable."""
    try:
        end = LENGTH.size + LENGTH.unpack_from(frame)[0]
        return decoder.decode(frame[LENGTH.size : end]), frame[end:]
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, IndexError) as error:
        raise PeerError("protocol", f"a message is not readable: {error}") from None
    except Exception as error:  # struct.error has no other base
        raise PeerError("protocol", f"a frame is too short: {error}") from None
