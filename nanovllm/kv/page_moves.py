"""Stores of pages to host memory, and loads from there, that have not ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from nanovllm.kv.keys import Key
from nanovllm.plan import Copies

Source: TypeAlias = Literal["disk", "peer"]  # of fetched pages; peer: another engine


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
    source: Source = "disk"  # of the fetched pages; "peer" if other engines have some of them

    def copies(self, ticket: int) -> Copies:
        """Return what the device does for it."""
        return Copies(
            ticket,
            pairs=list(zip(self.slots, self.pages, strict=True)),
            fetches=[*self.fetched.items()],
            state_fetches=[*self.state.items()],
            state_to=self.state_to,
        )
