"""Masker of an engine whose requests have no grammars."""

from __future__ import annotations

from nanovllm.plan import Masks
from nanovllm.wire import StepOutput


class NoGrammars:
    def fill(self, rows: list[tuple[int, list[int]]]) -> Masks:
        raise AssertionError("nothing is masked")

    def advance(self, output: StepOutput) -> tuple[int, ...]:
        return ()
