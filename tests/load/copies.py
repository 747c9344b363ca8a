"""Rates of copies between pages and host memory, beside the rate of one large pinned copy.

    python -m tests.load.copies RECIPE --pages 64

Moves pages of the recipe's layout as the engine does: a store of all, then a load of all, then a
store and a load at the same time. Needs no weights. Checks that the content came back. On a CPU the
same operations are done at once, and the numbers are those of its memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from nanovllm.bench.measure import now
from nanovllm.config import load_config
from nanovllm.plan import Copies, Moved, Moves
from nanovllm.runner.caches import Caches, make_caches
from nanovllm.runner.resolved import Resolved, resolve_config
from nanovllm.runner.results import HostEvent
from nanovllm.runner.transfer import HostPages, Mover
from tests.load.tiered import arguments, conclude, show_progress

LARGE_BYTES = 1 << 29
KINDS = ("stores", "loads")


class Copier:
    """Pages 1 to `count` and their slots, and pages after them to load to."""

    def __init__(self, found: Resolved, count: int) -> None:
        self.count = count
        size, dtype, device = found.page_tokens, found.dtype, found.device
        self.caches: Caches = make_caches(found.layout, 2 * count, size, dtype, device=device)
        self._words = [tensor.view(torch.uint8) for tensor in self.caches.tensors]
        for words in self._words:
            words.random_(0, 100)
        self.mover = Mover(HostPages(self.caches, 2 * count))
        self._ticket = 0

    def copies(self, pairs: Sequence[tuple[int, int]]) -> Copies:
        self._ticket += 1
        return Copies(self._ticket, [*pairs])

    def stores(self) -> Copies:
        """Return a store of the first half of the pages, to the slots in reverse order."""
        return self.copies([(1 + i, self.count - 1 - i) for i in range(self.count)])

    def loads(self) -> Copies:
        """Return a load of these slots to the other half of the pages."""
        return self.copies([(self.count - 1 - i, 1 + self.count + i) for i in range(self.count)])

    def run(self, stores: Sequence[Copies], loads: Sequence[Copies]) -> list[Moved]:
        """Do transfers to their end. Return their bytes and times."""
        self.mover.move(Moves([], [*stores], [*loads]))
        found: list[Moved] = []
        while len(found) < len(stores) + len(loads):
            found += self.mover.moved()
            time.sleep(0.0005)
        self.mover.move(Moves([moved.ticket for moved in found], [], []))
        return found

    def has_come_back(self) -> bool:
        """Return True if the pages that were loaded have the content of those stored."""
        middle = 1 + self.count
        return all(one[:, 1:middle].equal(one[:, middle:]) for one in self._words)


def pinned_rate(kind: str, device: torch.device) -> float:
    """Return the bytes per second of one large copy, the best of three."""
    on_gpu = device.type == "cuda"
    host = torch.empty(LARGE_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
    there = torch.empty(LARGE_BYTES, dtype=torch.uint8, device=device)
    source, target = (there, host) if kind == "stores" else (host, there)
    times = []
    for _ in range(3):
        begin, end = (event(on_gpu) for _ in range(2))
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return LARGE_BYTES / (1e-3 * float(min(times)))


def event(on_gpu: bool) -> Any:
    return torch.cuda.Event(enable_timing=True) if on_gpu else HostEvent()


def rates_of(copier: Copier, rounds: int) -> dict[str, float]:
    """Return medians in GB/s: alone, and of each direction while the other one runs."""
    found: dict[str, list[float]] = {}

    def note(name: str, moved: Moved) -> None:
        found.setdefault(name, []).append(moved.num_bytes / moved.seconds / 1e9)

    for _ in range(rounds):
        note("stores", *copier.run([copier.stores()], []))
        note("loads", *copier.run([], [copier.loads()]))
        if not copier.has_come_back():
            raise RuntimeError("pages came back with other content")
        # Slots from `count` on are free. A store to them may run at the same time as a load.
        first, load = copier.count, copier.loads()
        store = copier.copies([(1 + i, first + i) for i in range(copier.count)])
        for moved in copier.run([store], [load]):
            note("loads_with_stores" if moved.ticket == load.ticket else "stores_with_loads", moved)
    return {f"{name}_gb_per_s": median(values) for name, values in found.items()}


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--pages", type=int, default=64)
    options: argparse.Namespace = parser.parse_args(words)
    show_progress()
    started_at = now()
    config = load_config(options.recipe, options.sets)
    found = resolve_config(config)
    if found.device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # as the engine's steps; not the default one
    copier = Copier(found, options.pages)
    metrics = rates_of(copier, options.rounds)
    for kind in KINDS:
        pinned = metrics[f"pinned_{kind}_gb_per_s"] = pinned_rate(kind, found.device) / 1e9
        metrics[f"{kind}_to_pinned"] = metrics[f"{kind}_gb_per_s"] / pinned
    metrics["page_mib"] = copier.mover.host.page_bytes / 2**20
    conclude(
        options,
        config,
        started_at,
        metrics,
        {"name": "copies", "pages": options.pages, "rounds": options.rounds},
    )


if __name__ == "__main__":
    main()
