"""How a room is split: states of running requests, states kept for reuse, pages. Knows bytes.

The states of all slots come first, for without them nothing runs. Of what they leave, checkpoints
get cache.checkpoint_fraction, or what cache.checkpoints of them take, and pages the rest; or pages
get it all, and checkpoints cache.checkpoint_host_gib of the host's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nanovllm.config import Cache, ConfigError, Recipe, given_or
from nanovllm.kv.layout import CacheLayout


def running_bytes(layout: CacheLayout, recipe: Recipe) -> int:
    """The states of all slots and of the padding slot; with drafts, also what each fed last."""
    each, state = layout.bytes_per_state, layout.state
    if state is not None and recipe.speculate is not None:
        fed = (1 + recipe.speculate.tokens) * (state.channels + 2 * state.heads)
        each += len(state.layers) * fed * state.bytes_per_element
    return (int(recipe.schedule.slots) + 1) * each


def room_for_pages(left: int, cache: Cache, layout: CacheLayout) -> int:
    """The bytes for pages, of those that running states leave."""
    if cache.checkpoints == "auto" or cache.checkpoint_host_gib:
        return left - int(left * fraction_of(cache, layout))
    return left - cache.checkpoints * layout.bytes_per_state


def fraction_of(cache: Cache, layout: CacheLayout) -> float:
    """The share of checkpoints in what running states leave of the device."""
    reused = layout.state is not None and cache.prefix and not cache.checkpoint_host_gib
    return cache.checkpoint_fraction if reused else 0.0


def num_paged(layout: CacheLayout) -> int:
    """Layers whose work grows with the context."""
    return sum(len(group.layers) for group in layout.paged)


def decode_bytes(layout: CacheLayout, length: int) -> int:
    """What a decode row moves: its keys and values once, its state there and back."""
    return length * layout.bytes_per_token + 2 * layout.bytes_per_state


class Split(NamedTuple):
    """What there is beside running states."""

    pages: int
    cache: Cache
    layout: CacheLayout
    page_tokens: int

    @property
    def checkpoints(self) -> int:
        """None where nothing recurs, or nothing may be reused.

        Raises ConfigError if the host's memory that was asked for cannot hold them.
        """
        cache, layout, state = self.cache, self.layout, self.layout.bytes_per_state
        if state and (gib := cache.checkpoint_host_gib):
            fitting = int(gib * 2**30 / state)
            count = given_or(cache.checkpoints, fitting if cache.prefix else 0)
            if (least := max(1, count)) > fitting:
                taken = f"at least {-(-1000 * least * state // 2**30) / 1000} for {least} states"
                raise ConfigError(f"cache.checkpoint_host_gib is {gib:g}; it must be 0, or {taken}")
            return count
        share = fraction_of(cache, layout)
        pages = (self.pages + 1) * self.page_tokens * layout.bytes_per_token
        fitting = int(pages * share / (1 - share) / state) if share else 0
        return given_or(cache.checkpoints, fitting) if state else 0

    @property
    def host_bytes(self) -> int:
        """What checkpoints take of the host's memory."""
        return self.checkpoints * self.layout.bytes_per_state - self.bytes["checkpoints"]

    @property
    def bytes(self) -> dict[str, int]:
        """What takes how much of the device's memory, the padding page included."""
        pages = (self.pages + 1) * self.page_tokens * self.layout.bytes_per_token
        states = 0 if self.cache.checkpoint_host_gib else self.checkpoints
        return {"checkpoints": states * self.layout.bytes_per_state, "pages": pages}

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    @property
    def pin(self) -> str:
        """What a recipe says to have the same."""
        states = f", checkpoints: {self.checkpoints}" if self.layout.state is not None else ""
        states += f", checkpoint_host_gib: {self.cache.checkpoint_host_gib}" * bool(self.host_bytes)
        return f"pages: {self.pages}{states}"

    def numbers(self, lengths: Sequence[int], ranks: int) -> dict[str, float]:
        """By name and unit. Of a model with recurrent layers also what a request takes. `ranks`:
        how many share the host, of all engines.

        The least that it could take is its state, and its tokens' keys and values alone.
        """
        layout, size = self.layout, self.page_tokens
        found: dict[str, float] = {"pages": self.pages, "tokens": self.pages * size}
        if state := layout.bytes_per_state:
            found |= {"checkpoints": self.checkpoints, "a state, MiB": state / 2**20}
            found["all checkpoints in the host's memory, GiB"] = ranks * self.host_bytes / 2**30
            for length in lengths:
                taken = state - (-length // size) * size * layout.bytes_per_token
                least = state + length * layout.bytes_per_token
                found[f"a request of {length:,}, MiB"] = taken / 2**20
                found[f"a request of {length:,}, % above the least"] = 100 * (taken / least - 1)
        return found
