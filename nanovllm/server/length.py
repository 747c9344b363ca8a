"""Text to token ids, at a cost that the model's context bounds and not the text's length.

Decision: prompts are encoded as a batch of one, because `encode` holds the interpreter's lock
(1.8 s for 445,000 tokens on a thread, every stream standing still) and `encode_batch_fast` does
not.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer, decoders

from nanovllm.server.errors import too_long

EXACT_CHARS = 32 * 1024  # up to here a prompt that is too long is told its exact length
CHARS_PER_TOKEN = 8  # a prompt with more than this is measured before it is encoded
LAST_WORDS = 16  # of a piece of text, which may be cut otherwise when the text goes on
KEEP_ALL = {"ByteLevel", "Digits", "Punctuation", "Sequence", "Split"}  # pre-tokenizers


class Lengths:
    """Immutable after construction: threads may encode at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._normalizer: Any = tokenizer.normalizer
        self._longest = longest_token(tokenizer)

    def encode(self, text: str, context: int | None) -> list[int]:
        """Raises ApiError if there are surely `context` tokens or more, of which None knows no end.

        Otherwise the ids of the whole text, which may be as many all the same.
        """
        if context is not None and len(text) > EXACT_CHARS:
            num_least = self.at_least(text, context)
            if num_least >= context:
                raise too_long(num_least, context, is_least=True)
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def at_least(self, text: str, context: int) -> int:
        """How many tokens it surely has; as soon as these are `context`, no more is looked at."""
        if (by_size := self._by_size(text, context)) >= context:
            return by_size
        size = CHARS_PER_TOKEN * context
        while size < len(text):
            if (by_words := self._by_words(text[:size])) >= context:
                return by_words
            size *= 4
        return 0

    def _by_size(self, text: str, context: int) -> int:
        """No token stands for more bytes than the longest one has."""
        if self._longest is None or 4 * len(text) < self._longest * context:
            return 0
        if self._normalizer is not None:
            text = self._normalizer.normalize_str(text)
        return -(-len(text.encode()) // self._longest)

    def _by_words(self, beginning: str) -> int:
        """Texts are cut into words from left to right, and tokens never span two words."""
        encoding = self._tokenizer.encode_batch([beginning], add_special_tokens=False)[0]
        words = [word for word in encoding.word_ids if word is not None]
        return bisect_left(words, words[-1] - LAST_WORDS) if words else 0


def longest_token(tokenizer: Tokenizer) -> int | None:
    """Bytes of normalised text that one token stands for at most; None where nothing is certain.

    Nothing is where a pre-tokenizer drops text, an unknown word of any length is one token, or an
    added token takes the spaces around it.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    is_certain = (
        isinstance(tokenizer.decoder, decoders.ByteLevel)
        and getattr(tokenizer.model, "unk_token", None) is None
        and not any(token.lstrip or token.rstrip for token in added)
        and all(_keeps_all(step) for step in _steps(tokenizer.pre_tokenizer))
    )
    # The pieces of a byte-level vocabulary have a character for each byte.
    sizes = [len(piece) for piece in tokenizer.get_vocab(with_added_tokens=True)]
    sizes += [len(token.content.encode()) for token in added]
    return max(sizes) if is_certain and sizes else None


def _steps(pre_tokenizer: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401
    """What it consists of, as tokenizer.json says it."""
    waiting = [] if pre_tokenizer is None else [json.loads(pre_tokenizer.__getstate__())]
    while waiting:
        step = waiting.pop()
        waiting += step.get("pretokenizers", [])
        yield step


def _keeps_all(step: dict[str, Any]) -> bool:
    return step.get("type") in KEEP_ALL and step.get("behavior") != "Removed"
