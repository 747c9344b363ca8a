"""Stores of pages to host memory, and loads from there, that have not ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from nanovllm.kv.keys import Key
from nanovllm.plan import Copies

Source: TypeAlias = Literal["disk", "peer"]  # of a fetched page; peer: another engine


@dataclass(slots=True)
class PageStore:
    """A transfer of pages to host slots."""

    keys: list[Key]
    pages: list[int]
    slots: list[int]
    void: set[Key] = field(default_factory=set)  # invalidated since its start


@dataclass(slots=True)
class PageLoad:
    """A transfer to pages of a request: those of its text from index `first` on."""

    request_id: int  # -1 once the request has left; the pages are then in quarantine
    first: int
    keys: list[Key]
    pages: list[int]
    slots: list[int]
    fetched: dict[Key, int]  # slots that the tier below fills first
    state: dict[Key, int] = field(default_factory=dict)  # slots for the parts of a recurrent state
    state_to: int = -1  # checkpoint that they are copied to
    is_void: bool = False  # a key was invalidated since its start
    remote: frozenset[Key] = frozenset()  # of the fetched keys, those that other engines have

    @property
    def source(self) -> Source:
        """Return "peer" if other engines have a part of what is fetched."""
        return "peer" if self.remote else "disk"

    @property
    def num_by_source(self) -> Counter[Source]:
        """Return the numbers of fetched pages by their source."""
        return Counter("peer" if key in self.remote else "disk" for key in self.fetched)

    def copies(self, ticket: int) -> Copies:
        """Return what the device does for it."""
        return Copies(
            ticket,
            pairs=list(zip(self.slots, self.pages, strict=True)),
            fetches=[*self.fetched.items()],
            state_fetches=[*self.state.items()],
            state_to=self.state_to,
        )
