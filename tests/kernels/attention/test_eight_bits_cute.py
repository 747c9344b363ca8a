"""8-bit keys and values are at the right place for a tensor core, checked in plain Python.

The registers of 32 threads hold the indices of elements here. Their product is compared with the
direct product.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from nanovllm_kernels.attention import eight_bits_cute as eight_bits

WIDTH = 64


class Registers(dict):
    """A fragment, indexed as in the kernel, with `sizes` of its modes 1 and 2."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.sizes = sizes

    def fill(self, value: float) -> None:
        pass


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace registers by tuples: of four elements as bytes, of two as 16-bit pairs."""

    def widened(four: tuple, order: str) -> tuple[tuple, tuple]:
        turned = [four[int(nth)] for nth in reversed(order[2:])]
        return tuple(turned[:2]), tuple(turned[2:])

    fake = SimpleNamespace(recast_tensor=lambda x, _: x, size=lambda x, mode: x.sizes[mode[0] - 1])
    monkeypatch.setattr(eight_bits, "cute", fake)
    monkeypatch.setattr(eight_bits, "widened", widened)


def test_the_order_of_bytes_is_that_of_prmt() -> None:
    """The selectors of prmt have the index of the lowest byte in their lowest digit."""
    assert eight_bits.NEIGHBOURS == "0x3210" and eight_bits.TOKENS == "0x3120"
    assert eight_bits.widened((0, 1, 2, 3), eight_bits.NEIGHBOURS) == ((0, 1), (2, 3))
    assert eight_bits.widened((0, 1, 2, 3), eight_bits.TOKENS) == ((0, 2), (1, 3))


def test_keys_meet_the_elements_that_queries_have() -> None:
    for lane in range(32):
        token, j = lane // 4, lane % 4
        raw, wide = Registers(2, WIDTH // 32), Registers(2, WIDTH // 16)
        for half, n, step in np.ndindex(2, 2, WIDTH // 32):
            # The order is that of ldmatrix with 16-bit units. From a step's 16 units a thread has
            # 2j and 2j + 1, then the two that come 8 later.
            first = 32 * step + 2 * (8 * half + 2 * j)
            raw[(0, half), n, step] = tuple((8 * n + token, first + byte) for byte in range(4))
        eight_bits.widen_keys(raw, wide)
        for half, n, step, nth in np.ndindex(2, 2, WIDTH // 16, 2):
            # load_q puts the same element at this place of its fragment.
            element = (step * 4 + j) * 4 + 2 * half + nth
            assert wide[(0, half), n, step][nth] == (8 * n + token, element)
        seen = {pair for pairs in wide.values() for pair in pairs}
        assert len(seen) == 2 * 4 * WIDTH // 16


def test_queries_are_loaded_for_the_same_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    q = np.random.default_rng(0).normal(size=(16, WIDTH))

    class Line(np.ndarray):
        load = np.ndarray.copy
        to = lambda self, _: self  # noqa: E731

    def local_tile(line: np.ndarray, size: tuple[int], at: tuple[int]) -> Line:
        return line[size[0] * at[0] : size[0] * (at[0] + 1)].view(Line)

    class Number(float):
        to = lambda self, _: self  # noqa: E731

    class Queries:
        def __getitem__(self, at: tuple) -> np.ndarray:
            return q[at[0]]

    monkeypatch.setattr(eight_bits.cute, "local_tile", local_tile, raising=False)
    for lane in (0, 5, 31):
        arch = SimpleNamespace(
            lane_idx=lambda lane=lane: lane,
            fmax=lambda a, b: Number(max(a, b)),
            fmin=lambda a, b: Number(min(a, b)),
        )
        monkeypatch.setattr(eight_bits, "arch", arch)
        found = Registers(1, WIDTH // 16)
        eight_bits.load_q(Queries(), found, 2, 0.5)
        for half, r, nth, step in np.ndindex(2, 2, 2, WIDTH // 16):
            element = (step * 4 + lane % 4) * 4 + 2 * half + nth
            assert found[(nth, r, half), 0, step] == 0.5 * q[lane // 4 + 8 * r, element]


def test_values_of_even_and_odd_elements_are_tiles_of_their_own() -> None:
    for lane in range(32):
        column, j = lane // 4, lane % 4
        raw, wide = Registers(WIDTH // 16, 1), Registers(WIDTH // 8, 1)
        for half, tile in np.ndindex(2, WIDTH // 16):
            # The order is that of ldmatrix.trans: one unit of tokens 2j and 2j + 1, and 8 later.
            unit, tokens = 8 * tile + column, (8 * half + 2 * j, 8 * half + 2 * j + 1)
            raw[(0, half), tile, 0] = tuple((t, 2 * unit + odd) for t in tokens for odd in range(2))
        eight_bits.widen_values(raw, wide)
        for half, tile, nth in np.ndindex(2, WIDTH // 8, 2):
            element = eight_bits.element_of(tile, column)
            assert wide[(0, half), tile, 0][nth] == (8 * half + 2 * j + nth, element)
    elements = {eight_bits.element_of(n, column) for n in range(WIDTH // 8) for column in range(8)}
    assert elements == set(range(WIDTH))
