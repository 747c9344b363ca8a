"""Products of few rows with fp8 weights, without a GPU: how weights are cut, and that all of it
compiles.

What they compute is checked on a GPU only (check-kernels, tests/gpu). What warps wait for is played
here, in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import pytest
from nanovllm_kernels.skinny_fp8_cute import phases

from tests.kernels.test_skinny_linear import printed

LAYERS = """
import torch
from nanovllm_kernels.fp8_reference import FP8, Scaled
from nanovllm_kernels.skinny_fp8_cute import SKINNY_FP8, Product, compile_product, cut_of, shape_of
for num_lines, width, kind, num_rows in (
    (6144, 4096, normed, 8),
    (4096, 12288, added, 16),
    (24576, 4096, gated, 1),
    (24576, 4096, gated, 32),
    (3072, 6144, added, 32),
):
    weight = Scaled(torch.empty(num_lines, width, dtype=FP8, device="meta"), None, 64)
    shape = shape_of(num_lines, width, kind, num_rows)
    product = Product(shape, kind, *cut_of(weight, shape))
    run = compile_product(*shape, *kind, *cut_of(weight, shape))
    print(*shape, product.stages, product.warps, callable(run))
"""
CHOICE = """
for num_lines, width, num_rows, block_rows in (
    (4096, 4096, 32, 128),
    (4096, 4096, 33, 128),
    (4096, 4096, 1, 8),
    (4096, 4096, 1, 4),  # fewer lines than a product has share a scale
    (4096, 4160, 1, 128),  # not whole blocks of inputs
    (4096, 4224, 1, 128),  # nor of both slices
    (5003, 4096, 1, 128),
):
    weight = Scaled(torch.empty(num_lines, width, dtype=FP8, device="meta"), None, block_rows)
    print(SKINNY_FP8.fits(num_rows, weight))
"""


def test_it_compiles_and_says_what_fits() -> None:
    """Lines, slices, alone on a multiprocessor, tiles of 8 rows; stages; warps that share them."""
    lines = printed(LAYERS + CHOICE)
    assert lines[:5] == [
        "96 2 False 1 7 7 True",
        "64 2 True 2 12 8 True",
        "96 1 False 1 7 4 True",
        "64 1 False 4 6 4 True",
        "32 4 False 4 8 4 True",
    ]
    assert lines[5:] == ["True", "False", "True", "False", "False", "False", "False"]


Waits = list[tuple[str, int]]  # for which barrier, and which parity


class Barrier:
    """One of the GPU's: who waits for a phase by its parity can't tell it from the one before the
    last."""

    def __init__(self) -> None:
        self.num_over = 0

    def is_over(self, parity: int) -> bool:
        return self.num_over % 2 != parity


def play(
    seed: int, num_steps: int, num_stages: int, num_warps: int, waits: Callable[[int], Waits]
) -> list[int]:
    """The steps that warps have read of a ring of stages, until nobody can go on. Raises
    AssertionError if one reads what is not its step.

    `waits`: in a round of the ring.
    """
    full, empty = ([Barrier() for _ in range(num_stages)] for _ in range(2))
    ring, on_their_way, read = [-1] * num_stages, [], []

    def loader() -> Iterator[bool]:
        for step in range(num_steps):
            stage, nth_round = step % num_stages, step // num_stages
            while nth_round and not empty[stage].is_over((nth_round - 1) % 2):
                yield False
            on_their_way.append(step)
            yield True

    def warp(nth: int) -> Iterator[bool]:
        for step in range(nth, num_steps, num_warps):
            stage = step % num_stages
            for kind, parity in waits(step // num_stages):
                while not {"empty": empty, "full": full}[kind][stage].is_over(parity):
                    yield False
            assert ring[stage] == step, (ring[stage], step)
            yield True
            read.append(step)
            empty[stage].num_over += 1

    draw, going = Random(seed), [loader(), *map(warp, range(num_warps))]
    weights = [draw.random() ** 3 for _ in going]  # some are slow
    idle, pace = 0, draw.choice((0.02, 0.5))
    while going and idle < 60 * len(going):
        if on_their_way and draw.random() < pace:  # they come in any order
            step = on_their_way.pop(draw.randrange(len(on_their_way)))
            ring[step % num_stages] = step
            full[step % num_stages].num_over += 1
            idle = 0
            continue
        (one,) = draw.choices(range(len(going)), weights[: len(going)])
        moved = next(going[one], None)
        if moved is None:
            del going[one]
        idle = 0 if moved or moved is None or on_their_way else idle + 1
        if idle == 30 * len(going):  # so slow they may be that nobody saw them move
            weights = [1.0] * len(weights)
    return sorted(read)


def as_it_is(nth_round: int) -> Waits:
    return [*zip(("empty", "full"), phases(nth_round), strict=True)]


@pytest.mark.parametrize(("stages", "warps"), [(7, 7), (12, 8), (7, 4), (6, 4), (2, 2), (5, 1)])
def test_no_warp_waits_for_ever_or_reads_another_step(stages: int, warps: int) -> None:
    for seed in range(60):
        assert play(seed, 48, stages, warps, as_it_is) == [*range(48)]


@pytest.mark.parametrize(
    "waits",
    [
        lambda nth_round: [("full", (nth_round + 1) % 2), ("full", nth_round % 2)],  # never ends
        lambda nth_round: [("full", nth_round % 2)],  # reads too early
    ],
)
def test_what_has_come_does_not_tell_which_step_it_is(waits: Callable[[int], Waits]) -> None:
    with pytest.raises(AssertionError):
        for seed in range(60):
            assert play(seed, 48, 12, 8, waits) == [*range(48)]
