"""What a model keeps between steps: paged keys and values, and recurrent states of fixed size.

A model file computes its layout; sizing, the allocator and the device side all read it.
"""

from __future__ import annotations

from msgspec import Struct


class PagedGroup(Struct, frozen=True):
    """Layers whose keys and values share a geometry (per rank).

    Latents are one head of keys, and values of no elements, which are made of the same. In 8 bits
    their elements are the bytes of a token's row: nanovllm_kernels.latent_reference.
    """

    layers: tuple[int, ...]
    num_heads: int  # key/value heads of this rank
    k_size: int  # elements per head
    v_size: int
    bytes_per_element: int

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a token in all layers of the group together."""
        per_layer = self.num_heads * (self.k_size + self.v_size) * self.bytes_per_element
        return per_layer * len(self.layers)


class StateGroup(Struct, frozen=True):
    """Layers with a recurrent state of fixed size (per rank).

    A layer keeps the newest `taps` inputs of its convolution, [channels, taps], and what its
    recurrence has seen, [heads, key_size, value_size].
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
        """The bytes of one layer's."""
        inputs = self.channels * self.taps * self.bytes_per_element
        return inputs + self.recurrent_bytes * self.heads * self.key_size * self.value_size


class CacheLayout(Struct, frozen=True):
    """One page id serves every paged layer: each group has that page at the same index."""

    paged: tuple[PagedGroup, ...]
    state: StateGroup | None = None

    @property
    def bytes_per_token(self) -> int:
        return sum(group.bytes_per_token for group in self.paged)

    @property
    def bytes_per_state(self) -> int:
        return len(self.state.layers) * self.state.bytes_per_state if self.state else 0
