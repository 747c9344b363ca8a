"""Ends of transfers with the disk, of which each rank moves its own share.

    1. rank 0 decides, and sends the transfer to all ranks       (engine/ranks.py)
    2. each rank reads or writes its share, and copies it        (runner/transfer.py)
    3. the other ranks report each end through a ring            (EndReporter)
    4. after the last report, the transfer has ended on rank 0   (TransferEnds)

A rank reports every transfer that it has taken, once, however it has ended: with success, with a
failure, or given up since its disk hangs. A rank that cannot report any more closes its ring, which
raises RankLostError on rank 0. So rank 0 never waits for a report that does not come.

A report also has the availability of the rank's disk. While a rank's disk cannot be used, rank 0
plans no loads or writes with the disk of any rank.

A transfer is successful if it was on all ranks. A load of which one share failed thus fails as a
whole, and its request computes. Its pages and host slots are not reused before all ranks have
ended. No rank waits for another one, so a slow disk delays no step.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from queue import SimpleQueue

import msgspec
import torch
from msgspec import Struct

from nanovllm.engine.executor import Executor
from nanovllm.kv.below import Below
from nanovllm.parallel.places import Place, RankLostError
from nanovllm.parallel.ring import RingReader, RingWriter
from nanovllm.plan import Availability, Moved, Moves

log = logging.getLogger("engine")


class Report(Struct, frozen=True, array_like=True):
    """Message of a rank other than 0: transfers that have ended, and whether its disk is in use."""

    ends: list[Moved]
    disk: Availability = Availability()


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Report).decode


def disk_tickets(moves: Moves) -> Iterator[int]:
    """Yield the tickets of transfers with the disk, which all ranks report."""
    for copies in moves.loads:
        if copies.fetches or copies.state_fetches:
            yield copies.ticket
    for write in moves.writes:
        yield write.ticket


def joined(ends: Sequence[Moved]) -> Moved:
    """Return the end of a transfer of all ranks. The first is that of rank 0.

    Bytes and seconds of copies are those of rank 0. The time of reads is that of the slowest rank.
    A host slot is blank if it is blank on any rank, so it is stored again before it is loaded.
    """
    return replace(
        ends[0],
        ok=all(end.ok for end in ends),
        fetch_s=max(end.fetch_s for end in ends),
        blank=frozenset().union(*(end.blank for end in ends)),
        lost=tuple(dict.fromkeys(key for end in ends for key in end.lost)),
    )


class TransferEnds:
    """Reports of all ranks, on rank 0. A thread for each other rank receives them.

    `wake` is called from these threads after each report. `disk` is the store of rank 0.
    """

    def __init__(self, place: Place, disk: Below | None = None) -> None:
        assert isinstance(place.back, list)
        self._disk = disk
        self.wake: Callable[[], object] = lambda: None
        self._first: dict[int, Moved | None] = {}  # rank 0's end by ticket, of those in progress
        self._others: dict[int, list[Moved]] = {}
        self._num_others = len(place.back)
        self._received: SimpleQueue[list[Moved] | None] = SimpleQueue()
        for rank, ring in enumerate(place.back, 1):
            threading.Thread(target=self._receive, args=(rank, ring), daemon=True).start()

    def start(self, moves: Moves) -> None:
        """Expect the ends of the transfers with the disk, before they are sent."""
        for ticket in disk_tickets(moves):
            self._first[ticket], self._others[ticket] = None, []

    def taken(self, own: Sequence[Moved]) -> list[Moved]:
        """Return the transfers that have ended. `own` have ended on rank 0 since the last call.

        Raise RankLostError if another rank has ended.
        """
        ended = [moved for moved in own if moved.ticket not in self._first]
        changed = [moved for moved in own if moved.ticket in self._first]
        self._first.update((moved.ticket, moved) for moved in changed)
        while not self._received.empty():
            if (reported := self._received.get()) is None:
                raise RankLostError("a rank no longer reports the ends of transfers")
            for moved in reported:
                self._others[moved.ticket].append(moved)
            changed += reported
        for ticket in dict.fromkeys(moved.ticket for moved in changed):
            first, others = self._first[ticket], self._others[ticket]
            if first is not None and len(others) == self._num_others:
                ended.append(joined([first, *others]))
                del self._first[ticket], self._others[ticket]
        return ended

    def _receive(self, rank: int, ring: RingReader) -> None:
        latest = Availability()
        try:
            while (message := ring.recv()) is not None:
                report = decode(message)
                if self._disk is not None and report.disk != latest:
                    latest = report.disk
                    self._disk.note_rank(rank, latest)
                self._received.put(report.ends)
                self.wake()
        except OSError:  # closed, since the engine ends
            return
        except Exception:
            log.exception("the reports of rank %d cannot be read", rank)
        self._received.put(None)
        self.wake()


class EndReporter:
    """Mover of a rank other than 0, whose transfers with the disk are reported to rank 0.

    The thread of the steps starts transfers. Another thread ends them, for which a rank is woken.
    """

    def __init__(self, own: Executor, place: Place) -> None:
        self._own, self._place = own, place
        self._moving = threading.Lock()
        self._tickets: set[int] = set()  # to be reported
        self._woken = threading.Event()
        self._woken.set()  # the disk may be out of use from the start
        own.call_when_moved(self._woken.set)
        threading.Thread(target=self._run, daemon=True).start()

    def move(self, moves: Moves) -> None:
        """Start transfers after all launched plans."""
        with self._moving:
            self._tickets.update(disk_tickets(moves))
            self._own.move(moves)
        self._woken.set()

    def _run(self) -> None:
        if torch.cuda.is_initialized():  # the default of a new thread is the first GPU
            torch.cuda.set_device(self._place.device)
        latest = Availability()
        try:
            while True:
                self._woken.wait()
                self._woken.clear()
                with self._moving:
                    moved = [end for end in self._own.moved() if end.ticket in self._tickets]
                    self._tickets.difference_update(end.ticket for end in moved)
                disk = latest if self._own.disk is None else self._own.disk.availability
                if moved or disk != latest:
                    latest = disk
                    self._place.reply(encode(Report(moved, disk)))
        except OSError:  # rank 0 has ended, or has read nothing for long
            assert isinstance(self._place.back, RingWriter)
            self._place.back.close()
        except BaseException:
            log.exception("rank %d", self._place.rank)
            os._exit(1)
