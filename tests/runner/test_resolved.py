"""Number of pages from the measured peak of a step, on a simulated GPU."""

from __future__ import annotations

import pytest
import torch

from nanovllm.config import Cache, Recipe, Schedule
from nanovllm.runner.resolved import GIB, num_pages_that_fit
from tests.kv.test_split import NEXT, PAGE

GPU = torch.device("cuda", 0)


class MadeUpGpu:
    """GPU of 140 GiB. Another program uses 2 GiB; freed memory stays reserved."""

    def __init__(self, weights: int) -> None:
        self.allocated = self.peak = self.reserved = weights
        self.said: list[str] = []

    def step(self, num_bytes: int) -> None:
        self.said.append("step")
        self.peak = self.reserved = self.allocated + num_bytes

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, run in {
            "reset_peak_memory_stats": lambda device: self.said.append("reset"),
            "synchronize": lambda device: None,
            "max_memory_allocated": lambda device: self.peak,
            "memory_reserved": lambda device: self.reserved,
            "mem_get_info": lambda device: (138 * GIB - self.reserved, 140 * GIB),
            "empty_cache": self.empty_cache,
        }.items():
            monkeypatch.setattr(torch.cuda, name, run)

    def empty_cache(self) -> None:
        self.said.append("empty")
        self.reserved = self.allocated


def test_what_a_step_took_is_free_again_before_anything_is_allocated(monkeypatch) -> None:
    """The states of 512 slots are one block of 37 GiB, which must fit after measuring.

    Pages allocated earlier would lie in the middle of the measured memory.
    """
    gpu = MadeUpGpu(76 * GIB)
    gpu.stand_in(monkeypatch)
    recipe = Recipe(
        model="x", schedule=Schedule(slots=512), cache=Cache(checkpoints=0, page_tokens=PAGE)
    )
    pages = num_pages_that_fit(
        recipe, NEXT, useful_pages=1 << 30,
        full_step=lambda: gpu.step(45 * GIB), device=GPU,
    )  # fmt: skip
    room = int(140 * GIB * recipe.cache.memory_fraction) - (76 + 45) * GIB - 2 * GIB - GIB
    assert pages == room // (PAGE * NEXT.bytes_per_token) - 1 > 0
    assert gpu.said == ["reset", "step", "empty"] and gpu.reserved == 76 * GIB
