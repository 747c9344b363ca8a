"""Grammars of running requests, and the masks of their next tokens.

Implements engine.loop.Masker with xgrammar. Importing xgrammar takes up to two seconds, so it
happens with the first grammar or when the queue is prepared. A grammar is a structural tag that the
API process has checked. HTTP and schemas are not handled here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from nanovllm.grammars.runtime.compiler import Compiler, attempt_of
from nanovllm.grammars.runtime.matching import CompiledPair, Matcher
from nanovllm.grammars.runtime.queue import GrammarQueue
from nanovllm.grammars.runtime.trials import Trials
from nanovllm.plan import Masks
from nanovllm.wire import Generate, StepOutput

if TYPE_CHECKING:
    import xgrammar

log = logging.getLogger("engine")

MASK_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
# Row of the next mask, matcher, and drafts after that mask.
Walk: TypeAlias = tuple[int, Matcher, list[int]]


class Grammars:
    """Matchers of running requests, and `queue`, in which requests wait for their grammars."""

    _failed: frozenset[int] = frozenset()  # requests whose mask failed since the last `advance`

    def __init__(
        self, tokenizer_dir: Path, vocab_size: int, stop_ids: list[int], compile_s: float
    ) -> None:
        """`compile_s`: limit of CPU time for one compilation."""
        self.vocab_size = vocab_size
        self._stop_ids = stop_ids
        self._trials = Trials(partial(attempt_of, tokenizer_dir, vocab_size, stop_ids))
        compiler = Compiler(tokenizer_dir, vocab_size, stop_ids)
        self.queue = GrammarQueue(self._trials, compiler, compile_s)
        self._matchers: dict[int, Matcher] = {}
        self._filler: xgrammar.BatchGrammarMatcher | None = None
        self._num_words = -(-vocab_size // 32)

    def close(self) -> None:
        self.queue.close()
        self._trials.close()

    @property
    def num_followed(self) -> int:
        return len(self._matchers)

    def follow(self, request: Generate, grammar: CompiledPair) -> None:
        """Constrain the request by a grammar from its next token on."""
        # Each end token of the token table must also end the matcher.
        stops = sorted({*request.stop_ids, *self._stop_ids})
        if not stops:
            raise ValueError("a grammar needs a token that ends the text")
        self._matchers[request.request_id] = Matcher(grammar, stops)

    # -- Masker -----------------------------------------------------------------------------

    def fill(self, rows: list[tuple[int, list[int]]]) -> Masks:
        """Return the masks of all rows: all first masks in one batch, then all second ones, etc."""
        import xgrammar

        walking: list[Walk] = []
        num_masks = 0
        for request_id, drafts in rows:
            matcher = self._matchers.get(request_id)
            if matcher is not None and not matcher.is_terminated():
                walking.append((num_masks, matcher, drafts))
            num_masks += 1 + len(drafts)
        masks = np.full((num_masks, self._num_words), -1, np.int32)
        self._filler = self._filler or xgrammar.BatchGrammarMatcher(max_threads=MASK_THREADS)
        filled: dict[int, Matcher] = {}
        onward: list[Walk] = []
        while walking:
            at, matchers, _ = zip(*walking, strict=True)
            try:
                fillers = [matcher.filler for matcher in matchers]
                self._filler.batch_fill_next_token_bitmask(fillers, masks, list(at))
                for row, matcher in zip(at, matchers, strict=True):
                    matcher.narrow(masks[row])
            except Exception:
                walking = self._fill_each(walking, masks)
            filled.update((i, matcher) for i, matcher, _ in walking)
            advanced = [walk for walk in walking if walk[2] and walk[1].accept_token(walk[2][0])]
            onward += advanced
            walking = [(i + 1, m, drafts[1:]) for i, m, drafts in advanced if not m.is_terminated()]
        for _, matcher, _ in onward:
            matcher.rollback(1)  # one draft each
        for row in np.flatnonzero(~masks.any(axis=1)):  # no token is allowed: end the output here
            stops = np.array(filled[int(row)].stop_token_ids)
            np.bitwise_or.at(masks[row].view(np.uint32), stops // 32, np.uint32(1) << stops % 32)
        return masks

    def _fill_each(self, walking: list[Walk], masks: Masks) -> list[Walk]:
        """Fill masks one by one. Return the walks without those of requests whose masks fail."""
        good: list[Walk] = []
        for walk in walking:
            at, matcher, _ = walk
            try:
                matcher.fill(masks[at])
            except Exception:
                request_id = next(i for i, one in self._matchers.items() if one is matcher)
                log.exception("no mask for request %d", request_id)
                self._failed |= {request_id}
                masks[at] = -1
            else:
                good.append(walk)
        return good

    def advance(self, output: StepOutput) -> Collection[int]:
        failed, self._failed = self._failed, frozenset()
        if self._matchers and output.ids:
            failed |= self._follow(output)
        ended = [one.request_id for one in output.finished]
        ended += [one.request_id for one in output.refused]
        for request_id in {*ended, *failed}:
            self._matchers.pop(request_id, None)
        return failed

    def _follow(self, output: StepOutput) -> set[int]:
        """Return the requests with a token that their grammar does not allow."""
        failed = set[int]()
        tokens = np.frombuffer(output.tokens, np.int32).tolist()
        ids = np.frombuffer(output.ids, np.int64).tolist()
        counts = (
            np.frombuffer(output.counts, np.int32).tolist() if output.counts else [1] * len(ids)
        )
        end = 0
        for request_id, count in zip(ids, counts, strict=True):
            begin, end = end, end + count
            if (matcher := self._matchers.get(request_id)) is None:
                continue
            try:
                is_over = not self._accepts_all(matcher, tokens[begin:end])
            except Exception:
                log.exception("the grammar of request %d does not allow its token", request_id)
                failed.add(request_id)
            else:
                if is_over:
                    del self._matchers[request_id]
        return failed

    def _accepts_all(self, matcher: Matcher, tokens: list[int]) -> bool:
        """Accept the tokens of a step. Return False at an end token without a continuation.

        A limit of tokens is in effect only after a mask was made where it is reached. Without that,
        xgrammar writes a warning to stderr with the next token. `fill` has made the first mask.
        The check for a limit takes 7 us, far less than most masks of a large vocabulary.
        """
        for at, token in enumerate(tokens):
            if at and not matcher.is_terminated() and matcher.has_token_limit():
                matcher.fill(np.zeros(self._num_words, np.int32))
            if not self._accepts(matcher, token):
                return False
        return True

    def _accepts(self, matcher: Matcher, token: int) -> bool:
        """Accept a token. Return False for an end token where the grammar has no continuation."""
        if matcher.is_terminated() or matcher.accept_token(token):
            return True
        assert token in matcher.stop_token_ids, "the mask was ignored"
        assert not self._has_way_on(matcher), "the mask was ignored"
        return False

    def _has_way_on(self, matcher: Matcher) -> bool:
        mask = np.zeros(self._num_words, np.int32)
        matcher.fill(mask)
        return bool(mask.any())
