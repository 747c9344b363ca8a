"""Token ids to text, incrementally, and stop strings. Sans-I/O.

Never emits half a character. However ids and text are cut into pieces, the pieces add up to the
same. Knows nothing about requests or the OpenAI API.

Decision: a marker that is one token becomes one character that text cannot have, so that the
parser knows it from the same letters typed as ordinary text, and every cut falls beside it.
Decision: for byte-level vocabularies (all of ours) every token's bytes are tabulated at start
(0.4 s for 150,000 tokens), so that most tokens cost a list lookup; others are decoded again with
their neighbours each time, because their pieces depend on each other.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"  # stands for bytes that are not UTF-8
FIRST_MARK = 0xD800  # of the surrogates, which no decoded text has


class Vocabulary:
    """What each token id stands for. Ids beyond the tokenizer's own show as `<12345>`."""

    def __init__(self, tokenizer: Tokenizer, markers: Sequence[str] = ()) -> None:
        """`marks`: each marker as detokenised text has it, which is itself if it is no token."""
        self.tokenizer = tokenizer
        self.marks = {marker: marker for marker in markers}
        self.mark_of: dict[int, str] = {}  # token id -> mark
        is_byte_level = _is_byte_level(tokenizer)
        pieces = tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(pieces.values(), default=-1) + 1
        byte_of = _byte_of_character()
        table: list[bytes] = [_filler(token_id).encode() for token_id in range(self.size)]
        for piece, token_id in pieces.items():
            table[token_id] = (
                _mapped(piece, byte_of)
                if is_byte_level
                else _unmarked(piece, tokenizer.decode([token_id], skip_special_tokens=False))
            )
        self._bytes = table
        self.is_byte_level = is_byte_level
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(token_id for token_id, token in added.items() if token.special)
        ids = {token.content: token_id for token_id, token in added.items()}
        for count, marker in enumerate(marker for marker in markers if marker in ids):
            self.marks[marker] = self.mark_of[ids[marker]] = chr(FIRST_MARK + count)
        # Per id its text, or None where its bytes are no whole characters.
        self.texts = [_text(piece) for piece in table]
        self.texts_without_special = self.texts.copy()
        for token_id in self.special:
            self.texts_without_special[token_id] = ""
        for token_id, mark in self.mark_of.items():
            self.texts[token_id] = self.texts_without_special[token_id] = mark

    def bytes_of(self, token_id: int) -> bytes:
        if token_id < self.size:
            return self._bytes[token_id]
        return _filler(token_id).encode()

    def marked(self, text: str) -> str:
        """With every marker as the token it may be."""
        for marker, mark in self.marks.items():
            text = text.replace(marker, mark)
        return text

    def detokenizer(self, *, skip_special: bool) -> Detokenizer:
        """For one output: `feed` ids, then `finish` for the rest of an unfinished character."""
        kind = ByteLevelDetokenizer if self.is_byte_level else WindowDetokenizer
        return kind(self, skip_special=skip_special)


class ByteLevelDetokenizer:
    """Every token is some bytes; a UTF-8 decoder holds those of an unfinished character."""

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool) -> None:
        self._bytes_of = vocabulary.bytes_of
        self._mark_of = vocabulary.mark_of
        self._skipped = vocabulary.special if skip_special else frozenset()
        self._texts = vocabulary.texts_without_special if skip_special else vocabulary.texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_amid = False  # a character: the decoder holds bytes

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


class WindowDetokenizer:
    """For vocabularies whose tokens read differently beside others (leading spaces, byte runs).

    New text is the difference between decoding the ids since the last sure place with and
    without the newest ones.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool) -> None:
        self._size = vocabulary.size
        self._decode = vocabulary.tokenizer.decode
        self._skip_special = skip_special
        self._mark_of = vocabulary.mark_of
        self._ids: list[int] = []
        self._num_shown = 0  # of the ids: their text was emitted

    def feed(self, token_id: int) -> str:
        if token_id >= self._size or token_id in self._mark_of:
            return self.finish() + (self._mark_of.get(token_id) or _filler(token_id))
        self._ids.append(token_id)
        return self._new_text()

    def finish(self) -> str:
        """Also starts a new window."""
        text = self._text(len(self._ids))[len(self._text(self._num_shown)) :]
        self._ids, self._num_shown = [], 0
        return text

    def _new_text(self) -> str:
        before = self._text(self._num_shown)
        text = self._text(len(self._ids))
        if len(text) <= len(before) or text.endswith(REPLACEMENT):
            return ""
        # The window keeps the ids shown last, whose text decides how the next ones begin.
        self._ids = self._ids[self._num_shown :]
        self._num_shown = len(self._ids)
        return text[len(before) :]

    def _text(self, count: int) -> str:
        return self._decode(self._ids[:count], skip_special_tokens=self._skip_special)


Detokenizer = ByteLevelDetokenizer | WindowDetokenizer


class StopStrings:
    """Cuts text at the stop string that is complete first; holds back what may become one."""

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that is sure, and whether a stop string ended it."""
        text = self._held + text
        # The first to end, of those the one that began first: what feeding single characters finds.
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            end, at = min(matches)
            self._held = ""
            return text[: end if self._include else at], True
        held = max(held_back(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def held_back(text: str, mark: str) -> int:
    """How many characters at the end of `text` may turn out to be the start of `mark`."""
    if mark[0] not in text:
        return 0
    for count in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-count:]):
            return count
    return 0


def _filler(token_id: int) -> str:
    return f"<{token_id}>"


def _text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _mapped(piece: str, byte_of: dict[str, int]) -> bytes:
    """A token in the byte-level alphabet; added tokens outside of it are their own text."""
    try:
        return bytes(byte_of[character] for character in piece)
    except KeyError:
        return piece.encode()


def _unmarked(piece: str, decoded: str) -> bytes:
    """A token of another vocabulary, as far as it has bytes by itself: for logprobs."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    return (" " + decoded if piece.startswith("\u2581") else decoded).encode()


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the rest for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + at): byte for at, byte in enumerate(others)
    }


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    if tokenizer.decoder is None:
        return False
    decoder = json.loads(tokenizer.decoder.__getstate__())
    if decoder["type"] == "Sequence" and len(decoder["decoders"]) == 1:
        decoder = decoder["decoders"][0]
    return bool(decoder["type"] == "ByteLevel")
