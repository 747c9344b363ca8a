"""Search for the most expensive mask of a grammar, over outputs that a model could write.

The masks of one grammar delay every other running request. Expensive ones are rare: after a quote,
before a limit, in one of many alternatives. A random walk hardly ever reaches them.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import numpy as np

from nanovllm.grammars.runtime.matching import Matcher, TokenTexts, tokens_of

MOST_MASKS = 200
MOST_TOKENS = 48  # most different tokens of an output
MOST_REPEATED = 300  # most repetitions of one token
BEFORE_END = (1, 2, 4, 8)  # tokens before the end of a repetition
SURE = 3  # measurements of a mask; the least is its cost
LETTERS = b"aZ0 \"\\@.-/:,;_+=~%#'()<>{}[]\n\xc3\xe4\xb8"


class Dearest(NamedTuple):
    cost_s: float
    output: list[int]


class Search:
    """Best-first and breadth-first search in turns.

    One turn extends the output with the most expensive mask, the other the output found first.
    Equal masks lead to equal continuations, so each mask is extended only once.
    """

    def __init__(self, matcher: Matcher, texts: TokenTexts, vocab_size: int) -> None:
        self._matcher = matcher
        self._mask = np.zeros(-(-vocab_size // 32), np.int32)
        singles = {texts.spelled[token]: token for token in tokens_of(texts.singles).tolist()}
        self._letters = [singles[bytes([b])] for b in LETTERS if bytes([b]) in singles]
        self._output: list[int] = []  # tokens that the matcher has read since the search began
        self._seen: set[bytes] = set()
        self._waiting: list[tuple[float, int, list[int], list[int]]] = []
        self._numbers = count()
        self.costs_s: list[float] = []
        self.dearest = Dearest(0.0, [])

    def run(self, cpu_s: float, most_masks: int = MOST_MASKS) -> Dearest:
        """Search until `cpu_s` seconds of CPU time are spent or `most_masks` masks are made.

        The matcher is returned to its initial position.
        """
        until = time.thread_time() + cpu_s
        self._visit([])
        while self._waiting and len(self.costs_s) < most_masks and time.thread_time() < until:
            *_, output, following = heapq.heappop(self._waiting)
            for token in following:
                for longer in self._longer(output, token):
                    self._visit(longer)
                if len(self.costs_s) >= most_masks or time.thread_time() >= until:
                    break
        self._go_to([])
        return self.dearest

    def _longer(self, output: list[int], token: int) -> Iterator[list[int]]:
        """Yield the output with the token once, and repeated up to or almost up to a limit."""
        yield [*output, token]
        if not self._go_to([*output, token]):
            return
        num = 1
        while num < MOST_REPEATED and not self._matcher.is_terminated() and self._read(token):
            num += 1
        if 2 < num < MOST_REPEATED:
            for fewer in (0, *BEFORE_END):
                if num - fewer > 1:
                    yield [*output, *([token] * (num - fewer))]

    def _visit(self, output: list[int]) -> None:
        if not self._go_to(output) or self._matcher.is_terminated():
            return
        cost_s = self._cost_s()
        self.costs_s.append(cost_s)
        if cost_s > self.dearest.cost_s:
            self.dearest = Dearest(cost_s, output)
        if (key := self._mask.tobytes()) in self._seen or len(set(output)) > MOST_TOKENS:
            return
        self._seen.add(key)
        following = self._following()
        number = next(self._numbers)
        heapq.heappush(
            self._waiting, (number if number % 2 else -cost_s, number, output, following)
        )

    def _cost_s(self) -> float:
        """Make the mask and return its CPU time in seconds."""
        costs = []
        for _ in range(SURE):
            begun = time.thread_time()
            self._matcher.fill(self._mask)
            costs.append(time.thread_time() - begun)
            if costs[-1] < 1e-3:
                break
        return min(costs)

    def _following(self) -> list[int]:
        """Return the allowed tokens by which the search extends an output.

        They are the single-byte tokens of LETTERS that the mask allows, and the first and
        the middle one (by id) of all allowed tokens.
        """
        words = self._mask.view(np.uint32)
        allowed = [t for t in self._letters if words[t // 32] >> np.uint32(t % 32) & 1]
        others = tokens_of(self._mask).tolist()
        return list(dict.fromkeys([*allowed, *others[len(others) // 2 :][:1], *others[:1]]))

    def _go_to(self, output: list[int]) -> bool:
        """Move the matcher to the end of an output. Return False if it cannot accept it."""
        same = 0
        while same < min(len(output), len(self._output)) and output[same] == self._output[same]:
            same += 1
        if len(self._output) > same:
            self._matcher.rollback(len(self._output) - same)
            del self._output[same:]
        return all(self._read(token) for token in output[same:])

    def _read(self, token: int) -> bool:
        if self._matcher.is_terminated() or not self._matcher.accept_token(token):
            return False
        self._output.append(token)
        return True
