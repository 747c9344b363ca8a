"""Both sources of pages below host memory of a decode server: its prefill servers, and its disk.

Decision: a page that an unread ticket has is read from the prefill server, also if the disk has it.
The ticket has all of a prompt's pages, and they arrive together. Pages of earlier turns and of
preempted requests come from the disk, once their tickets have been read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from nanovllm.kv.disk.store import DiskStore
from nanovllm.kv.keys import Key
from nanovllm.plan import Availability
from nanovllm.transfer.device_pages import Arrivals
from nanovllm.transfer.remote_pages import RemotePages


class PeersAndDisk:
    """Tier of the pages of `remote` and of `disk`. See kv.below.Below.

    Numbers of transfers are those of the disk, which are positive, and those of `remote`, negated.
    """

    has_peers = True

    def __init__(self, remote: RemotePages, disk: DiskStore) -> None:
        self.remote = remote
        self.writable = disk

    @staticmethod
    def open(
        open_remote: Callable[[Callable[[], None]], RemotePages],
        open_disk: Callable[[Callable[[], None]], DiskStore],
        wake: Callable[[], None],
    ) -> PeersAndDisk:
        """Open the disk, and connect to the peers. Raise ConfigError if either is impossible."""
        disk = open_disk(wake)
        return PeersAndDisk(open_remote(wake), disk)

    def has_remote(self, keys: Iterable[Key]) -> bool:
        return self.remote.has_remote(keys)

    def holds(self, key: Key) -> bool:
        """Return True if a page can be read."""
        return self.remote.holds(key) or self.writable.holds(key)

    def is_listed(self, key: Key) -> bool:
        return self.remote.is_listed(key) or self.writable.is_listed(key)

    @property
    def availability(self) -> Availability:
        """Whether this rank's disk is in use."""
        return self.writable.availability

    @property
    def can_write(self) -> bool:
        """Return True if the disks of all ranks are written to."""
        return self.writable.can_write

    def note_rank(self, rank: int, availability: Availability) -> None:
        """Note whether another rank's disk is in use, on rank 0."""
        self.writable.note_rank(rank, availability)

    def page_counts(self) -> dict[str, float]:
        """Return how many pages the disk has room for, and how many there are."""
        return self.writable.page_counts()

    def keys_of_parts(self, key: Key) -> list[Key]:
        """Return the keys of the parts of the state after a page, which are the same for both."""
        return self.writable.keys_of_parts(key)

    def state_keys(self, key: Key) -> list[Key]:
        """Return `keys_of_parts` if a ticket ends at the page, or all of them are on the disk."""
        return self.remote.state_keys(key) or self.writable.state_keys(key)

    def read_all(
        self, pages: Sequence[tuple[Key, memoryview]], arrivals: Arrivals | None = None
    ) -> dict[int, list[Key]]:
        """Begin to read pages into buffers.

        Return the numbers of the reads, each with the keys to remove from the disk if it fails.
        """
        own = [page for page in pages if not self.remote.holds(page[0])]
        wanted = [page for page in pages if self.remote.holds(page[0])]
        reads = self.writable.read_all(own)
        return reads | {-number: [] for number in self.remote.read_all(wanted, arrivals)}

    def write(self, key: Key, buffer: memoryview) -> int | None:
        """Queue a page to be written to the disk; see DiskStore.write."""
        return self.writable.write(key, buffer)

    def remove(self, key: Key) -> None:
        """Remove a page from the disk."""
        self.writable.remove(key)

    def poll(self) -> list[tuple[int, bool]]:
        """Return the reads and writes that have ended since the last call."""
        fetched = [(-number, ok) for number, ok in self.remote.poll()]
        return [*self.writable.poll(), *fetched]

    def close(self) -> None:
        """Disconnect from the peers, and end the threads of the disk."""
        self.remote.close()
        self.writable.close()
