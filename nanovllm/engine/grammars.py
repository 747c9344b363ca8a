"""Grammars of running requests: compilation, matching and masks.

Implements engine.loop.Masker with xgrammar. Importing xgrammar takes seconds and imports torch, so
it happens with the first grammar or when the queue is prepared. A grammar is a structural tag that
the API process has checked. HTTP and schemas are not handled here.

Decision: the cache is our own. The cache of xgrammar 0.2.8 treats rules as equal if they differ
only in token ids. It then returns the masks of one for the other.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from nanovllm.engine.dearest import Search
from nanovllm.engine.grammar_queue import GrammarQueue
from nanovllm.engine.matching import (
    CompiledPair,
    FreeGrammar,
    Matcher,
    TokenTexts,
    reads_bytes,
    tokens_of,
    without_limits,
)
from nanovllm.engine.trials import MEMORY_BYTES, Attempt, Trials
from nanovllm.plan import Masks
from nanovllm.tokenizer import read_tokenizer
from nanovllm.wire import Generate, StepOutput

if TYPE_CHECKING:
    import xgrammar

log = logging.getLogger("engine")

# Compiler threads run without the interpreter's lock.
COMPILER_THREADS = max(1, min(8, (os.cpu_count() or 1) // 4))
MASK_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
# Spelling of tokens that raw text may not contain. The byte 0xff occurs in no text, and xgrammar
# excludes the enclosed tag from text in which it otherwise allows any byte.
UNWRITTEN = b"\xff</parameter>\xff"
MASK_S = 0.02  # of CPU time; usual masks take 0.05 ms
SEARCH_S = 0.15  # of CPU time, to find the most expensive mask of a grammar
REMEDY = "repeat classes of characters alone, as in [a-z]*, not among alternatives"
MOST_NAMED = 4  # most tokens before the answer that a grammar names by id
TRIED_TOKENS = 20  # written by a trial; up to four for thinking and the text after it
# Row of the next mask, matcher, and drafts after that mask.
Walk: TypeAlias = tuple[int, Matcher, list[int]]
NOISE = re.compile(r"^\[.*?\] \S+: (Check failed: .* is false: )?")  # xgrammar's source location


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
        import torch
        import xgrammar

        walking: list[Walk] = []
        num_masks = 0
        for request_id, drafts in rows:
            matcher = self._matchers.get(request_id)
            if matcher is not None and not matcher.is_terminated():
                walking.append((num_masks, matcher, drafts))
            num_masks += 1 + len(drafts)
        masks = np.full((num_masks, self._num_words), -1, np.int32)
        into = torch.from_numpy(masks)
        self._filler = self._filler or xgrammar.BatchGrammarMatcher(max_threads=MASK_THREADS)
        filled: dict[int, Matcher] = {}
        onward: list[Walk] = []
        while walking:
            at, matchers, _ = zip(*walking, strict=True)
            try:
                fillers = [matcher.filler for matcher in matchers]
                self._filler.batch_fill_next_token_bitmask(fillers, into, list(at))
                for row, matcher in zip(at, matchers, strict=True):
                    matcher.narrow(masks[row])
            except Exception:
                walking = self._fill_each(walking, masks)
            filled.update((i, matcher) for i, matcher, _ in walking)
            taken = [walk for walk in walking if walk[2] and walk[1].accept_token(walk[2][0])]
            onward += taken
            walking = [(i + 1, m, drafts[1:]) for i, m, drafts in taken if not m.is_terminated()]
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
                is_over = not all(self._accepts(matcher, token) for token in tokens[begin:end])
            except Exception:
                log.exception("the grammar of request %d does not allow its token", request_id)
                failed.add(request_id)
            else:
                if is_over:
                    del self._matchers[request_id]
        return failed

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


# -- compilation --------------------------------------------------------------------------------


class Compiler:
    """Compiler of grammars. Implements grammar_queue.Builder."""

    def __init__(self, folder: Path, vocab_size: int, stop_ids: list[int]) -> None:
        self._tokens = folder, vocab_size, stop_ids
        self._preparing = threading.Lock()
        self._compilers: tuple[xgrammar.GrammarCompiler, xgrammar.GrammarCompiler] | None = None

    def prepare(self) -> None:
        with self._preparing:
            if self._compilers is None:
                table = token_table(*self._tokens)
                self.texts = TokenTexts(table, UNWRITTEN)
                self._compilers = compiler_over(table), compiler_over(bytes_of(table))

    def build(self, tag: str) -> CompiledPair:
        assert self._compilers is not None, "not prepared"
        over_tokens, over_bytes = self._compilers
        if (found := without_limits(tag)) is None:
            return CompiledPair(over_tokens.compile_structural_tag(tag))
        free_tag, least = found
        free = over_tokens.compile_structural_tag(free_tag)
        by_bytes = reads_bytes(tag, self.texts)
        exact = (over_bytes if by_bytes else over_tokens).compile_structural_tag(tag)
        return CompiledPair(exact, FreeGrammar(free, least, self.texts), by_bytes)


def compiler_over(table: xgrammar.TokenizerInfo) -> xgrammar.GrammarCompiler:
    import xgrammar

    return xgrammar.GrammarCompiler(table, max_threads=COMPILER_THREADS, cache_enabled=False)


def bytes_of(table: xgrammar.TokenizerInfo) -> xgrammar.TokenizerInfo:
    """Return a token table with the same ids in which only single-byte tokens spell text."""
    import xgrammar

    spelled = [token if len(token) == 1 else UNWRITTEN for token in table.decoded_vocab]
    return xgrammar.TokenizerInfo(
        spelled,
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=table.vocab_size,
        stop_token_ids=table.stop_token_ids,
    )


def attempt_of(folder: Path, vocab_size: int, stop_ids: list[int]) -> Attempt:
    """Return the attempt: compile a grammar, write a few tokens, and check the cost of masks."""
    compiler = Compiler(folder, vocab_size, stop_ids)
    compiler.prepare()

    def attempt(tag: str) -> str:
        try:
            grammar = compiler.build(tag)
            named = [int(token) for token in re.findall(r'"token": ?(\d+)', tag)]
            write_some(Matcher(grammar), vocab_size, named)
            check_cost(Matcher(grammar), compiler.texts, vocab_size, named)
        except Exception as problem:  # xgrammar's errors share no class below RuntimeError
            reason = NOISE.sub("", str(problem)).strip()
            if "bad_alloc" in reason or isinstance(problem, MemoryError):
                return f"the grammar takes more than {MEMORY_BYTES >> 20} MiB to compile"
            return f"the grammar does not compile: {reason[:300]}"
        return ""

    return attempt


def write_some(matcher: Matcher, vocab_size: int, named: Sequence[int]) -> None:
    """Write a few tokens. Raise ValueError if nothing matches the grammar.

    Ids in `named`, which the grammar mentions, are preferred. They end thinking, which may be any
    text, and so lead to the answer.
    """
    mask = np.zeros(-(-vocab_size // 32), np.int32)
    for _ in range(TRIED_TOKENS):
        matcher.fill(mask)
        allowed = tokens_of(mask)
        if not allowed.size:
            if matcher.is_completed():  # the table has no end token; requests bring their own
                return
            raise ValueError("nothing matches it")
        # The middle one, because the first ones are rare characters and the last ones long words.
        leading = np.intersect1d(allowed, named)
        chosen = leading if leading.size else allowed
        matcher.accept_token(int(chosen[chosen.size // 2]))
        if matcher.is_terminated():
            return


def check_cost(matcher: Matcher, texts: TokenTexts, vocab_size: int, named: Sequence[int]) -> None:
    """Raise ValueError if a mask takes too long, since it would delay every other request."""
    for _ in range(MOST_NAMED):  # the text before the answer is unconstrained
        if not any(matcher.accept_token(token) for token in named):
            break
    if matcher.is_terminated():
        return
    dearest = Search(matcher, texts, vocab_size).run(SEARCH_S)
    if dearest.cost_s > MASK_S:
        raise ValueError(f"its masks take up to {1000 * dearest.cost_s:.0f} ms a token; {REMEDY}")


def token_table(folder: Path, vocab_size: int, stop_ids: list[int]) -> xgrammar.TokenizerInfo:
    """Return the spelling of each token id.

    Added tokens and ids beyond the vocabulary get a spelling that no text has, so only a grammar
    that names their ids can match them. An empty spelling would make them special tokens, and
    xgrammar checks all special tokens at every token.
    """
    import xgrammar

    tokenizer = read_tokenizer(folder)
    added = tokenizer.get_added_tokens_decoder()
    spelled: list[Any] = [UNWRITTEN] * vocab_size
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size and token_id not in added:
            spelled[token_id] = token
    kind = xgrammar.VocabType.BYTE_LEVEL
    return xgrammar.TokenizerInfo(
        spelled, vocab_type=kind, vocab_size=vocab_size, stop_token_ids=stop_ids
    )
