"""The search finds the most expensive mask of a matcher with artificial costs."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from nanovllm.grammars.runtime.dearest import Search
from nanovllm.grammars.runtime.matching import Matcher, TokenTexts
from tests.times import done_within

BYTES = 256


class FakeMatcher:
    """Matcher of texts that may still match `allowed`. Masks after `dear` take 5 ms."""

    def __init__(self, allowed: str, dear: str) -> None:
        self.text = ""
        self._allowed, self._dear = re.compile(allowed), re.compile(dear)

    def is_terminated(self) -> bool:
        return self.text.endswith("$")

    def accept_token(self, token: int) -> bool:
        if not self._allowed.fullmatch(self.text + chr(token)):
            return False
        self.text += chr(token)
        return True

    def rollback(self, num_tokens: int) -> None:
        assert 0 < num_tokens <= len(self.text)
        self.text = self.text[:-num_tokens]

    def fill(self, mask: np.ndarray) -> None:
        bits = [bool(self._allowed.fullmatch(self.text + chr(i))) for i in range(BYTES)]
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)
        until = time.thread_time() + (0.005 if self._dear.fullmatch(self.text) else 0.0)
        while time.thread_time() < until:
            pass


def search_of(matcher: FakeMatcher) -> Search:
    spelled = [bytes([i]) for i in range(BYTES)]
    texts = SimpleNamespace(spelled=spelled, singles=np.full(BYTES // 32, -1, np.int32))
    return Search(cast("Matcher", matcher), cast("TokenTexts", texts), BYTES)


@pytest.mark.parametrize(
    ("allowed", "dear", "found"),
    [
        ('[a-z]*("[a-z ]*)?', '[a-z]*"[a-z ]+', r'[a-z]*"[a-z ]+'),  # after one character
        ("[a-z]{0,90}", "[a-z]{86,90}", "[a-z]{86,90}"),  # the last of many repetitions
        ("[a-z]*([.][0-9]{0,70})?", "[a-z]*[.][0-9]{69}", "[a-z]*[.][0-9]{69}"),
        ("(ab?){0,9}(-|-[.]|-[.]x*)?", ".*-[.]x+", ".*-[.]x+"),
        ("[a-z@]*", "", ""),  # the first mask
    ],
)
def test_the_dearest_mask_is_found(allowed: str, dear: str, found: str) -> None:
    matcher = FakeMatcher(allowed, dear)
    search = search_of(matcher)
    dearest = search.run(cpu_s=10.0)
    assert re.fullmatch(found, "".join(map(chr, dearest.output)))
    assert 0.005 <= dearest.cost_s == max(search.costs_s)
    assert matcher.text == ""  # the matcher's position is restored


def test_a_search_ends_with_its_time_its_masks_or_the_outputs() -> None:
    endless = FakeMatcher("(.|\n)*", "(.|\n)*")
    done_within(1, lambda: search_of(endless).run(cpu_s=0.1))
    search = search_of(FakeMatcher("[ab]*", "c"))
    search.run(cpu_s=10.0, most_masks=3)
    assert len(search.costs_s) <= 8
    few = search_of(FakeMatcher("a|ab|ab[$]", "ab"))
    few.run(cpu_s=10.0)
    assert len(few.costs_s) == 3  # no mask is made after the end
