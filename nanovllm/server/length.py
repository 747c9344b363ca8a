"""Tokenizer front end whose cost is bounded by the context length, not by the text.

Decision: prompts are encoded as a batch of one. `encode` holds the interpreter's lock (1.8 s for
445,000 tokens on a thread, with all streams stalled), and `encode_batch_fast` does not.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from tokenizers import Tokenizer, decoders

from nanovllm.server.errors import too_long
from nanovllm.server.pieces import Pieces, steps_of

EXACT_CHARS = 32 * 1024  # a refusal of a longer text states a lower bound instead of its length
CHARS_PER_TOKEN = 8  # a text with more than this per token of context is measured first
# Words at the end of a cut text that are not counted, in addition to its last word. The rest of the
# text may change their split.
LAST_WORDS = 16
KEEP_ALL = {"ByteLevel", "Digits", "Punctuation", "Sequence", "Split"}  # drop no text


class Lengths:
    """Token counts and ids of texts. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._normalizer: Any = tokenizer.normalizer
        self._longest = longest_token(tokenizer)
        self._pieces = Pieces(tokenizer, self._encoded)

    def encode(self, text: str, context: int | None, salt: str = "") -> list[int]:
        """Return the ids of the whole text. Those of long pieces are kept for the same salt.

        Raise ApiError if the text is certain to have `context` tokens or more. A text that passes
        may still be too long. A `context` of None is no limit.
        """
        if context is not None and len(text) > EXACT_CHARS:
            num_least = self.at_least(text, context)
            if num_least >= context:
                raise too_long(num_least, context, is_least=True)
        return self._pieces.encode(text, salt)

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def at_least(self, text: str, context: int) -> int:
        """Return a lower bound of the number of tokens. Stop counting once it reaches `context`."""
        if (by_size := self._by_size(text, context)) >= context:
            return by_size
        size = CHARS_PER_TOKEN * context
        while size < len(text):
            if (by_words := self._by_words(text[:size])) >= context:
                return by_words
            size *= 4
        return 0

    def _by_size(self, text: str, context: int) -> int:
        """Return the bound given by the longest token: no token stands for more bytes."""
        if self._longest is None or 4 * len(text) < self._longest * context:
            return 0
        if self._normalizer is not None:
            text = self._normalizer.normalize_str(text)
        return -(-len(text.encode()) // self._longest)

    def _by_words(self, beginning: str) -> int:
        """Return the number of tokens before the last words of the beginning.

        The tokenizer splits words from left to right, and no token spans two words. The tokens
        counted here are therefore also tokens of the whole text.
        """
        encoding = self._tokenizer.encode_batch([beginning], add_special_tokens=False)[0]
        words = [word for word in encoding.word_ids if word is not None]
        return bisect_left(words, words[-1] - LAST_WORDS) if words else 0


def longest_token(tokenizer: Tokenizer) -> int | None:
    """Return the most bytes of normalised text per token, None if there is no certain bound.

    There is none if a pre-tokenizer drops text, if an unknown word is one token, or if an added
    token includes the spaces around it.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    is_certain = (
        isinstance(tokenizer.decoder, decoders.ByteLevel)
        and getattr(tokenizer.model, "unk_token", None) is None
        and not any(token.lstrip or token.rstrip for token in added)
        and all(_keeps_all(step) for step in steps_of(tokenizer.pre_tokenizer))
    )
    # Pieces of a byte-level vocabulary have one character for each byte.
    sizes = [len(piece) for piece in tokenizer.get_vocab(with_added_tokens=True)]
    sizes += [len(token.content.encode()) for token in added]
    return max(sizes) if is_certain and sizes else None


def _keeps_all(step: dict[str, Any]) -> bool:
    return step.get("type") in KEEP_ALL and step.get("behavior") != "Removed"
