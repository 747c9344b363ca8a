"""Grammars of running requests: compiled in threads, followed token by token, made into masks.

Implements engine.loop.Masker with xgrammar, which is imported with the first grammar: it takes
seconds, and imports torch. Knows no HTTP and no schemas: a grammar is a structural tag, vetted by
the API process.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from nanovllm.plan import Masks
from nanovllm.wire import Generate, StepOutput

if TYPE_CHECKING:
    import xgrammar

COMPILE_THREADS = 2
CACHE_BYTES = 256 << 20
COMPILE_S = 10.0  # a grammar that takes longer is refused; its thread is left to finish


@dataclass(frozen=True, slots=True)
class Compiled:
    """A request with its matcher, or with what went wrong."""

    request: Generate
    matcher: xgrammar.GrammarMatcher | None
    error: str | None


class Grammars:
    """One compiler with its cache, and a matcher per running request."""

    def __init__(self, tokenizer_dir: Path, vocab_size: int, stop_ids: list[int]) -> None:
        self.vocab_size = vocab_size
        self._tokenizer_dir = tokenizer_dir
        self._stop_ids = stop_ids
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, "grammar")
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._making = threading.Lock()
        self._matchers: dict[int, xgrammar.GrammarMatcher] = {}
        self._num_words = -(-vocab_size // 32)

    def compile(self, request: Generate, done: Callable[[Compiled], None]) -> None:
        """Returns at once; `done` is called from another thread, at least once."""
        late = f"the grammar takes longer than {COMPILE_S:.0f} s to compile"
        clock = threading.Timer(COMPILE_S, done, (Compiled(request, None, late),))
        clock.daemon = True
        clock.start()

        def work() -> None:
            compiled = self._compile(request)
            clock.cancel()
            done(compiled)  # after the time is up: nobody waits for it any more

        self._threads.submit(work)

    def _compile(self, request: Generate) -> Compiled:
        import xgrammar

        try:
            grammar = self._ready_compiler().compile_structural_tag(request.grammar)
            stops = request.stop_ids or self._stop_ids
            matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=stops)
        except Exception as problem:  # xgrammar's errors share no class below RuntimeError
            return Compiled(request, None, f"the grammar does not compile: {str(problem)[:300]}")
        return Compiled(request, matcher, None)

    def follow(self, request_id: int, compiled: Compiled) -> None:
        """From now on the request's tokens come from `fill` and go to `advance`."""
        assert compiled.matcher is not None
        self._matchers[request_id] = compiled.matcher

    def _ready_compiler(self) -> xgrammar.GrammarCompiler:
        import xgrammar

        with self._making:
            if self._compiler is None:
                info = token_table(self._tokenizer_dir, self.vocab_size, self._stop_ids)
                self._compiler = xgrammar.GrammarCompiler(info, cache_limit_bytes=CACHE_BYTES)
            return self._compiler

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


def token_table(folder: Path, vocab_size: int, stop_ids: list[int]) -> xgrammar.TokenizerInfo:
    """What each token id spells. Ids beyond the tokenizer's vocabulary spell nothing."""
    import xgrammar

    path = folder / "tokenizer.json"
    vocabulary = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    spelled = [""] * vocab_size
    for token, token_id in vocabulary.items():
        if token_id < vocab_size:
            spelled[token_id] = token
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
