"""Compiler of structural tags, the attempt that a trial makes, and the table of tokens.

Decision: the cache is our own. The cache of xgrammar 0.2.8 treats rules as equal if they differ
only in token ids. It then returns the masks of one for the other.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.grammars.runtime.dearest import Search
from nanovllm.grammars.runtime.imports import import_xgrammar
from nanovllm.grammars.runtime.matching import (
    CompiledPair,
    FreeGrammar,
    Matcher,
    TokenTexts,
    reads_bytes,
    tokens_of,
    without_limits,
)
from nanovllm.grammars.runtime.trials import MEMORY_BYTES, Attempt
from nanovllm.tokenizer import read_tokenizer

if TYPE_CHECKING:
    import xgrammar

# Compiler threads run without the interpreter's lock.
COMPILER_THREADS = max(1, min(8, (os.cpu_count() or 1) // 4))
# Spelling of tokens that raw text may not contain. The byte 0xff occurs in no text, and xgrammar
# excludes the enclosed tags, one a family, from text in which it otherwise allows any byte.
UNWRITTEN = b"\xff</parameter></arg_value>\xff"
MASK_S = 0.02  # of CPU time; usual masks take 0.05 ms
SEARCH_S = 0.15  # of CPU time, to find the most expensive mask of a grammar
REMEDY = "repeat classes of characters alone, as in [a-z]*, not among alternatives"
MOST_NAMED = 4  # most tokens before the answer that a grammar names by id
TRIED_TOKENS = 20  # written by a trial; up to four for thinking and the text after it
NOISE = re.compile(r"^\[.*?\] \S+: (Check failed: .* is false: )?")  # xgrammar's source location


class Compiler:
    """Compiler of grammars. Implements queue.Builder."""

    def __init__(self, folder: Path, vocab_size: int, stop_ids: list[int]) -> None:
        self._tokens = folder, vocab_size, stop_ids
        self._preparing = threading.Lock()
        self._compilers: tuple[xgrammar.GrammarCompiler, xgrammar.GrammarCompiler] | None = None

    def prepare(self) -> None:
        with self._preparing:
            if self._compilers is None:
                import_xgrammar("transformers")
                table = token_table(*self._tokens)
                self.texts = TokenTexts(table, UNWRITTEN)
                self._compilers = compiler_over(table), compiler_over(bytes_of(table))

    def build(self, tag: str) -> CompiledPair:
        assert self._compilers is not None, "not prepared"
        over_tokens, over_bytes = self._compilers
        limits = "max_tokens" in tag
        if (tag_without_limits := without_limits(tag)) is None:
            return CompiledPair(over_tokens.compile_structural_tag(tag), may_limit_tokens=limits)
        free_tag, least = tag_without_limits
        free = over_tokens.compile_structural_tag(free_tag)
        by_bytes = reads_bytes(tag, self.texts)
        exact = (over_bytes if by_bytes else over_tokens).compile_structural_tag(tag)
        return CompiledPair(exact, FreeGrammar(free, least, self.texts), by_bytes, limits)


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
    import_xgrammar("torch", "transformers")
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
    xgrammar 0.2.8 checks all special tokens at every token.
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
