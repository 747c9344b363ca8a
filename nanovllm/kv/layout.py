"""Sizes of a model's cache: paged keys and values, and recurrent states of fixed size.

Each model file computes its layout. Sizing, the page allocator and the device side read it.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

# Kind of a paged cache: keys and values of heads that share them, or latents of all heads (MLA).
CacheKind = Literal["grouped", "latent"]


class PagedGroup(Struct, frozen=True):
    """Layers whose keys and values have the same shape (per rank).

    Latents are stored as one key head, and `v_size` is 0, since values come from the same latents.
    In 8 bits, an element is one byte of a token's row, whose format is in
    nanovllm_kernels.attention.latent_reference.
    """

    layers: tuple[int, ...]
    num_heads: int  # key/value heads of this rank
    k_size: int  # elements per head
    v_size: int
    bytes_per_element: int
    kind: CacheKind = "grouped"

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers of the group."""
        per_layer = self.num_heads * (self.k_size + self.v_size) * self.bytes_per_element
        return per_layer * len(self.layers)


class StateGroup(Struct, frozen=True):
    """Layers with a recurrent state of fixed size (per rank).

    A layer stores the latest `taps` inputs of its convolution, [channels, taps], and the state of
    its recurrence, [heads, key_size, value_size].
    """

    layers: tuple[int, ...]
    channels: int
    taps: int
    heads: int
    key_size: int
    value_size: int
    bytes_per_element: int  # of the convolution's inputs: the model's dtype
    recurrent_bytes: int = 4  # of an element of the recurrence: 4 float32, 2 bfloat16

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one layer's state."""
        inputs = self.channels * self.taps * self.bytes_per_element
        return inputs + self.recurrent_bytes * self.heads * self.key_size * self.value_size


class CacheLayout(Struct, frozen=True):
    """All groups of a model. A page id is an index that is valid in every paged layer."""

    paged: tuple[PagedGroup, ...]
    state: StateGroup | None = None

    @property
    def bytes_per_token(self) -> int:
        return sum(group.bytes_per_token for group in self.paged)

    @property
    def bytes_per_state(self) -> int:
        return len(self.state.layers) * self.state.bytes_per_state if self.state else 0

    @property
    def num_layers(self) -> int:
        recurrent = len(self.state.layers) if self.state else 0
        return recurrent + sum(len(group.layers) for group in self.paged)

    def followed_by(self, other: CacheLayout) -> CacheLayout:
        """Return the layout with the paged layers of another model after those of this one."""
        first = self.num_layers
        shifted = [replace(g, layers=tuple(first + n for n in g.layers)) for g in other.paged]
        return replace(self, paged=(*self.paged, *shifted))
