"""Interface of the tier below host memory: a disk, other engines, or both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from nanovllm.kv.keys import Key
from nanovllm.plan import Availability


class Below(Protocol):
    """The tier below host memory. Pages are written to a disk only."""

    @property
    def writable(self) -> Below | None:
        """The disk, which is all or a part of this tier, or None."""
        ...

    @property
    def has_peers(self) -> bool:
        """True if pages of other engines can be read."""
        ...

    def has_remote(self, keys: Iterable[Key]) -> bool:
        """Return True if some of these pages would be read from other engines.

        They were computed for a request, so they are read without a comparison of costs.
        """
        ...

    def holds(self, key: Key) -> bool:
        """Return True if a page can be read. Do not wait."""
        ...

    def is_listed(self, key: Key) -> bool:
        """Return True if a page is there, even if it cannot be read at present."""
        ...

    @property
    def availability(self) -> Availability:
        """Return whether this rank can use its tier."""
        ...

    @property
    def can_write(self) -> bool:
        """Return True if pages can be written on all ranks at present."""
        ...

    def note_rank(self, rank: int, availability: Availability) -> None:
        """Note the availability on another rank. Pages are in use only if all ranks can use them.

        May be called from any thread.
        """
        ...

    def page_counts(self) -> dict[str, float]:
        """Return how many pages there is room for, and how many there are, for wire.Stats.tiers."""
        ...

    def keys_of_parts(self, key: Key) -> list[Key]:
        """Return the keys of the parts of the state after a page. Each takes a host slot.

        Return an empty list if the model has no recurrent states.
        """
        ...

    def state_keys(self, key: Key) -> list[Key]:
        """Return `keys_of_parts` if the state can be read, otherwise an empty list."""
        ...
