"""Incremental detokenisation and stop strings, sans-I/O.

The output never has part of a character, and its sum does not depend on how ids and text are split.
Independent of requests and the OpenAI API.

Decision: a marker that is one token becomes one character that text cannot contain. For the parser
it thus differs from the same letters in ordinary text, and no cut can divide it.

Decision: only byte-level vocabularies, which all our families have. The bytes of each token are
tabulated at start (0.4 s for 150,000 tokens), so that most tokens cost a list lookup.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders

from nanovllm.config import ConfigError
from nanovllm.tokenizer import special_ids

FIRST_MARK = 0xD800  # the first of the surrogates, which decoded text never contains


class Vocabulary:
    """Text and bytes of each token id. Ids outside the tokenizer's own are shown as `<12345>`."""

    def __init__(self, tokenizer: Tokenizer, markers: Sequence[str] = ()) -> None:
        """`marks` maps each marker to its form in detokenised text: itself unless it is a token.

        Raise ConfigError if the vocabulary is not byte-level.
        """
        check_decoder(tokenizer)
        self.marks = {marker: marker for marker in markers}
        self.mark_of: dict[int, str] = {}  # token id -> mark
        pieces = tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(pieces.values(), default=-1) + 1
        byte_of = _byte_of_character()
        table = [b"<%d>" % token_id for token_id in range(self.size)]
        for piece, token_id in pieces.items():
            try:
                table[token_id] = bytes(byte_of[character] for character in piece)
            except KeyError:  # added tokens with other characters are plain text
                table[token_id] = piece.encode()
        self._bytes = table
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(special_ids(tokenizer).values())
        ids = {token.content: token_id for token_id, token in added.items()}
        for count, marker in enumerate(marker for marker in markers if marker in ids):
            self.marks[marker] = self.mark_of[ids[marker]] = chr(FIRST_MARK + count)
        # The text of each id, None if its bytes are not whole characters.
        texts = (piece.decode(errors="replace") for piece in table)
        self.texts = [None if "\ufffd" in text else text for text in texts]
        self.texts_without_special = self.texts.copy()
        for token_id in self.special:
            self.texts_without_special[token_id] = ""
        for token_id, mark in self.mark_of.items():
            self.texts[token_id] = self.texts_without_special[token_id] = mark

    def bytes_of(self, token_id: int) -> bytes:
        return self._bytes[token_id] if token_id < self.size else b"<%d>" % token_id

    def marked(self, text: str) -> str:
        """Return the text with every marker in its detokenised form."""
        for marker, mark in self.marks.items():
            text = text.replace(marker, mark)
        return text


def check_decoder(tokenizer: Tokenizer) -> None:
    """Raise ConfigError if the vocabulary is not byte-level."""
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        raise ConfigError(
            "tokenizer.json: the decoder must be ByteLevel; others, as in Llama 2 and Mistral, are "
            "not supported: use models such as Llama 3.1 and Qwen3"
        )


class Detokenizer:
    """Decoder of one output. Call `feed` for each id, then `finish` for an incomplete character."""

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool) -> None:
        self._bytes_of = vocabulary.bytes_of
        self._mark_of = vocabulary.mark_of
        self._skipped = vocabulary.special if skip_special else frozenset()
        self._texts = vocabulary.texts_without_special if skip_special else vocabulary.texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_amid = False  # the decoder holds part of a character

    def feed(self, token_id: int) -> str:
        if not self._is_amid and token_id < len(self._texts):
            whole = self._texts[token_id]
            if whole is not None:
                return whole
        if (mark := self._mark_of.get(token_id)) is not None:
            return self.finish() + mark
        if token_id in self._skipped:
            return ""
        text = self._decoder.decode(self._bytes_of(token_id))
        self._is_amid = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        self._is_amid = False
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Cutter at the first complete stop string. Holds back text that may become one.

    `matched` is the stop string that ended the text, None before.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self.matched: str | None = None
        self._stops = stops
        self._include = include
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Return the text that is certain, and True if a stop string ended it."""
        text = self._held + text
        # Earliest end, then earliest start, as if characters were fed one by one.
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            end, at = min(matches)
            self.matched = text[at:end]
            self._held = ""
            return text[: end if self._include else at], True
        held = max(held_back(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def held_back(text: str, mark: str) -> int:
    """Return the number of final characters of `text` that may begin `mark`."""
    if mark[0] not in text:
        return 0
    for count in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-count:]):
            return count
    return 0


def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's byte alphabet: printable bytes as they are, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + at): byte for at, byte in enumerate(others)
    }
