"""Grammars of running requests: compiled in threads, followed token by token, made into masks.

Implements engine.loop.Masker with xgrammar, which is imported with the first grammar: it takes
seconds, and imports torch. Knows no HTTP and no schemas: a grammar is a structural tag, vetted by
the API process.

Decision: the cache is ours. xgrammar 0.2.8's own takes rules for equal that differ in nothing but
the ids of their tokens, and gives the masks of one for the other.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from tokenizers import Tokenizer

from nanovllm.plan import Masks
from nanovllm.wire import Generate, StepOutput

if TYPE_CHECKING:
    import xgrammar

COMPILERS = 2  # at once, each of so many threads, which do not hold the interpreter's lock
COMPILER_THREADS = max(1, (os.cpu_count() or 1) // 4)
CACHE_BYTES = 256 << 20
COMPILE_S = 10.0  # one that takes longer is refused: its thread goes on, but not in the way
MASK_S = 0.1  # of CPU time; usual masks take 0.05 ms
TRIED_TOKENS = 16
NOISE = re.compile(r"^\[.*?\] \S+: (Check failed: .* is false: )?")  # where in xgrammar's source


Outcome: TypeAlias = "xgrammar.CompiledGrammar | str"  # or why there is none


@dataclass(frozen=True, slots=True)
class Compiled:
    """A request with its matcher, or with what went wrong."""

    request: Generate
    matcher: xgrammar.GrammarMatcher | None
    error: str | None


class Grammars:
    """One compiler, what it has compiled, and a matcher per running request."""

    def __init__(self, tokenizer_dir: Path, vocab_size: int, stop_ids: list[int]) -> None:
        self.vocab_size = vocab_size
        self._tokenizer_dir = tokenizer_dir
        self._stop_ids = stop_ids
        self._turns = threading.Semaphore(COMPILERS)
        self._making = threading.Lock()  # takes seconds
        self._lock = threading.Lock()
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._known: OrderedDict[str, Future[Outcome]] = OrderedDict()  # least used first
        self._matchers: dict[int, xgrammar.GrammarMatcher] = {}
        self._num_words = -(-vocab_size // 32)

    def compile(self, request: Generate, done: Callable[[Compiled], None]) -> None:
        """Returns at once; `done` is called once, from any thread."""
        with self._lock:
            known = self._known.get(request.grammar)
            future = self._known[request.grammar] = known or Future()
            self._known.move_to_end(request.grammar)
        if known is None:
            threading.Thread(target=self._work, args=(request.grammar, future), daemon=True).start()
        future.add_done_callback(lambda found: done(self._matched(request, found.result())))

    def _work(self, tag: str, future: Future[Outcome]) -> None:
        self._turns.acquire()
        ends = itertools.count()

        def end(outcome: Outcome) -> None:
            if next(ends) == 0:  # the clock and the compiler both come here
                self._turns.release()
                future.set_result(outcome)
            elif not isinstance(outcome, str):  # late: for the next who asks
                with self._lock:
                    self._known[tag] = Future()
                    self._known[tag].set_result(outcome)

        late = f"the grammar takes longer than {COMPILE_S:g} s to compile"
        clock = threading.Timer(COMPILE_S, end, (late,))
        clock.daemon = True
        clock.start()
        end(self._compile(tag))
        clock.cancel()
        with self._lock:
            while sum(map(_size, self._known.values())) > CACHE_BYTES:
                self._known.popitem(last=False)

    def _compile(self, tag: str) -> Outcome:
        try:
            grammar = self._ready_compiler().compile_structural_tag(tag)
            self._try(grammar)
        except Exception as problem:  # xgrammar's errors share no class below RuntimeError
            reason = NOISE.sub("", str(problem)).strip()
            return f"the grammar does not compile: {reason[:300]}"
        return grammar

    def _ready_compiler(self) -> xgrammar.GrammarCompiler:
        import xgrammar

        with self._making:
            if self._compiler is None:
                info = token_table(self._tokenizer_dir, self.vocab_size, self._stop_ids)
                self._compiler = xgrammar.GrammarCompiler(
                    info, max_threads=COMPILER_THREADS, cache_enabled=False
                )
            return self._compiler

    def _try(self, grammar: xgrammar.CompiledGrammar) -> None:
        """Write a few tokens: a grammar that matches nothing, or slowly, is refused now.

        Once it runs, every other request waits for its masks.
        """
        import torch
        import xgrammar

        matcher = xgrammar.GrammarMatcher(grammar)
        mask = np.zeros(self._num_words, np.int32)
        for _ in range(TRIED_TOKENS):
            begun = time.thread_time()
            matcher.fill_next_token_bitmask(torch.from_numpy(mask[None]))
            if (spent := time.thread_time() - begun) > MASK_S:
                raise ValueError(f"its masks take {1000 * spent:.0f} ms a token")
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if not allowed.size:
                raise ValueError("nothing matches it")
            # One in the middle: the first are rare characters, the last long words.
            matcher.accept_token(int(allowed[allowed.size // 2]))
            if matcher.is_terminated():
                return

    def _matched(self, request: Generate, outcome: Outcome) -> Compiled:
        import xgrammar

        if isinstance(outcome, str):
            return Compiled(request, None, outcome)
        stops = request.stop_ids or self._stop_ids
        return Compiled(request, xgrammar.GrammarMatcher(outcome, override_stop_tokens=stops), None)

    def follow(self, request_id: int, compiled: Compiled) -> None:
        """From now on the request's tokens come from `fill` and go to `advance`."""
        assert compiled.matcher is not None
        self._matchers[request_id] = compiled.matcher

    # -- Masker -----------------------------------------------------------------------------

    def fill(self, request_ids: list[int]) -> Masks:
        import torch
        import xgrammar

        masks = np.full((len(request_ids), self._num_words), -1, np.int32)
        there = [(i, self._matchers.get(r)) for i, r in enumerate(request_ids)]
        live = [(i, m) for i, m in there if m is not None and not m.is_terminated()]
        if live:
            at, matchers = zip(*live, strict=True)
            filler = xgrammar.BatchGrammarMatcher()
            filler.batch_fill_next_token_bitmask(list(matchers), torch.from_numpy(masks), list(at))
            for row in np.flatnonzero(~masks.any(axis=1)):  # no way on: the output ends here
                stops = np.array(self._matchers.pop(request_ids[row]).stop_token_ids)
                np.bitwise_or.at(
                    masks[row].view(np.uint32), stops // 32, np.uint32(1) << stops % 32
                )
        return masks

    def advance(self, output: StepOutput) -> None:
        if self._matchers and output.ids:
            self._follow(output)
        for finish in output.finished:
            self._matchers.pop(finish.request_id, None)

    def _follow(self, output: StepOutput) -> None:
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
            for token in tokens[begin:end]:
                assert matcher.is_terminated() or matcher.accept_token(token), (
                    "the mask was ignored"
                )


def _size(known: Future[Outcome]) -> int:
    outcome = known.result() if known.done() else ""
    return 1000 if isinstance(outcome, str) else int(outcome.memory_size_bytes)


def token_table(folder: Path, vocab_size: int, stop_ids: list[int]) -> xgrammar.TokenizerInfo:
    """What each token id spells. Ids beyond the tokenizer's vocabulary spell nothing.

    Added tokens spell a byte that no text has: only a grammar that names their ids can match them.
    """
    import xgrammar

    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    added = tokenizer.get_added_tokens_decoder()
    spelled: list[Any] = [""] * vocab_size
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size:
            spelled[token_id] = b"\xff" if token_id in added else token
    decoder = json.dumps(json.loads(path.read_text()).get("decoder"))
    kinds = xgrammar.VocabType
    kind = kinds.BYTE_LEVEL if "ByteLevel" in decoder else kinds.BYTE_FALLBACK
    return xgrammar.TokenizerInfo(
        spelled, vocab_type=kind, vocab_size=vocab_size, stop_token_ids=stop_ids
    )


def stop_ids_of(folder: Path) -> list[int]:
    """The ids that end a text, from generation_config.json or config.json."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return list(found) if isinstance(found, list) else [int(found)]
    return []
