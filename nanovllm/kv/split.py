"""Division of the cache's memory into running states, checkpoints and pages, in bytes.

The states of all slots come first, since no request runs without one. Checkpoints get
`cache.checkpoint_fraction` of the rest, or the bytes of `cache.checkpoints` states. Pages get the
remainder. Pages in host memory get `cache.host_gib`.

Decision: a fraction of 0 puts checkpoints in host memory, if there is any. Device memory is then
all pages, and `cache.host_gib` is the budget of states and pages. By default there is a state for
each EVERY tokens of the larger tier of pages, but those of the device's pages take at most half of
the budget. The largest `cache.checkpoints` that fits leaves no pages in host memory. The default
fraction keeps checkpoints on the device: there, saving one takes no time, and 1.3 ms in host memory
(Qwen3-Next).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nanovllm.config import Cache, ConfigError, Recipe
from nanovllm.kv.layout import CacheLayout
from nanovllm.schedule import given_or

HOST_ALIGNED = 4096  # bytes; most file systems need it for direct I/O
# Tokens between states of one prompt; computing these takes several times as long as a decode step.
EVERY = 4096


def running_bytes(layout: CacheLayout, recipe: Recipe) -> int:
    """Return the bytes of the states of all slots and of the padding slot.

    With drafts, each slot also stores the inputs of its last step, to replay the accepted ones.
    """
    each, state = layout.bytes_per_state, layout.state
    if state is not None and recipe.speculate is not None:
        fed = (1 + recipe.speculate.tokens) * (state.channels + 2 * state.heads)
        each += len(state.layers) * fed * state.bytes_per_element
    return (int(recipe.schedule.slots) + 1) * each


def are_checkpoints_in_host(cache: Cache, layout: CacheLayout) -> bool:
    """Return True if checkpoints are part of `cache.host_gib`, and device memory is all pages."""
    return layout.state is not None and cache.host_gib > 0 and not cache.checkpoint_fraction


def room_for_pages(left: int, cache: Cache, layout: CacheLayout) -> int:
    """Return the bytes for pages. `left` is the memory that running states do not use."""
    if cache.checkpoints == "auto" or are_checkpoints_in_host(cache, layout):
        return left - int(left * fraction_of(cache, layout))
    return left - cache.checkpoints * layout.bytes_per_state


def fraction_of(cache: Cache, layout: CacheLayout) -> float:
    """Return the fraction of device memory, without running states, that checkpoints get."""
    return cache.checkpoint_fraction if layout.state is not None and cache.prefix else 0.0


def host_page_bytes(layout: CacheLayout, page_tokens: int) -> int:
    """Return the bytes of a page of all layers in host memory, aligned for direct I/O."""
    return host_aligned(layout.bytes_per_token * page_tokens)


def host_aligned(num_bytes: int) -> int:
    """Return the bytes of a page in host memory, with its padding."""
    return -(-num_bytes // HOST_ALIGNED) * HOST_ALIGNED


def num_paged(layout: CacheLayout) -> int:
    """Return the number of layers with paged attention, whose work grows with the context."""
    return sum(len(group.layers) for group in layout.paged)


def decode_bytes(layout: CacheLayout, length: int) -> int:
    """Return the bytes that a decode row moves: keys and values once, its state twice."""
    return length * layout.bytes_per_token + 2 * layout.bytes_per_state


class Split(NamedTuple):
    """Numbers of pages and checkpoints, and the bytes that they take."""

    pages: int
    cache: Cache
    layout: CacheLayout
    page_tokens: int

    @property
    def checkpoints(self) -> int:
        """The number of checkpoints; 0 without recurrent layers or without prefix reuse."""
        cache, layout, state = self.cache, self.layout, self.layout.bytes_per_state
        if are_checkpoints_in_host(cache, layout):
            return given_or(cache.checkpoints, self._balanced_checkpoints)
        share = fraction_of(cache, layout)
        pages = (self.pages + 1) * self.page_tokens * layout.bytes_per_token
        fitting = int(pages * share / (1 - share) / state) if share else 0
        return given_or(cache.checkpoints, fitting) if state else 0

    @property
    def _balanced_checkpoints(self) -> int:
        """The number of checkpoints in host memory, one for each EVERY tokens of either tier.

        Those of the device's pages take at most half of the budget. There is at least one, and room
        for at least one page.
        """
        budget, state = self._host_budget, self.layout.bytes_per_state
        own = min(self.pages * self.page_tokens // EVERY, budget // 2 // state)
        below = budget // (state + EVERY * self.layout.bytes_per_token)
        fitting = (budget - host_page_bytes(self.layout, self.page_tokens)) // state
        return max(1, min(max(own, below), fitting))

    @property
    def _host_budget(self) -> int:
        return int(self.cache.host_gib * 2**30)

    @property
    def host_pages(self) -> int:
        """The number of pages in host memory, per rank; 0 without `cache.host_gib`.

        Raise ConfigError if it is too small for a page or for the checkpoints, or if nothing could
        be reused.
        """
        cache, size = self.cache, self.page_tokens
        if not cache.host_gib:
            return 0
        if not cache.prefix:
            raise ConfigError("cache.host_gib needs cache.prefix, which is false; drop one of them")
        each, taken = host_page_bytes(self.layout, size), self.host_bytes
        least = 0 if taken and cache.checkpoints != "auto" else 1
        if (count := (self._host_budget - taken) // each) >= least:
            return count
        lacking = -(-(10**6) * (taken + least * each) // 2**30) / 10**6
        page = f"a page of {size} tokens, {self.layout.bytes_per_token / 1024:g} KiB each"
        count_of_states = self.checkpoints
        states = f"{count_of_states} recurrent " + ("states" if count_of_states > 1 else "state")
        parts = [states] * (taken > 0) + [page] * least
        raise ConfigError(
            f"cache.host_gib is {cache.host_gib:g}; it must be 0, or at least {lacking} for "
            f"{' and '.join(parts)}"
        )

    @property
    def host_bytes(self) -> int:
        """Bytes of checkpoints in host memory."""
        return self.checkpoints * self.layout.bytes_per_state - self.bytes["checkpoints"]

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of device memory by use, with the padding page."""
        pages = (self.pages + 1) * self.page_tokens * self.layout.bytes_per_token
        states = 0 if are_checkpoints_in_host(self.cache, self.layout) else self.checkpoints
        return {"checkpoints": states * self.layout.bytes_per_state, "pages": pages}

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    @property
    def pin(self) -> str:
        """The recipe keys that give the same split."""
        states = f", checkpoints: {self.checkpoints}" if self.layout.state is not None else ""
        if are_checkpoints_in_host(self.cache, self.layout):
            states += ", checkpoint_fraction: 0"
        if self.cache.host_gib:
            states += f", host_gib: {self.cache.host_gib}"
        return f"pages: {self.pages}{states}"

    def numbers(self, lengths: Sequence[int], ranks: int) -> dict[str, float]:
        """Return numbers for a report, by name and unit.

        `ranks` is the number of ranks on this host, of all engines. For a model with recurrent
        layers, a request's memory is also compared with its minimum. The minimum is one state, and
        keys and values of its tokens without unused room in the last page.
        """
        layout, size = self.layout, self.page_tokens
        numbers: dict[str, float] = {"pages": self.pages, "tokens": self.pages * size}
        if below := self.host_pages:
            each = host_page_bytes(layout, size)
            numbers |= {"pages in host memory": below, "tokens in host memory": below * size}
            numbers["all pages in the host's memory, GiB"] = ranks * below * each / 2**30
        if state := layout.bytes_per_state:
            numbers |= {"checkpoints": self.checkpoints, "a state, MiB": state / 2**20}
            numbers["all checkpoints in the host's memory, GiB"] = ranks * self.host_bytes / 2**30
            for length in lengths:
                needed = state + -(-length // size) * size * layout.bytes_per_token
                least = state + length * layout.bytes_per_token
                numbers[f"a request of {length:,}, MiB"] = needed / 2**20
                numbers[f"a request of {length:,}, % above the least"] = 100 * (needed / least - 1)
        return numbers
