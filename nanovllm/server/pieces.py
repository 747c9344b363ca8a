"""Token ids of prompts, with those of long pieces kept for later prompts.

A conversation comes back with all of its earlier messages. A prompt of 30,000 tokens takes 30 ms to
tokenise, more than its first step if its pages are cached.

Decision: a prompt is cut at special tokens. The tokenizer cuts there first and treats each piece
alone, so the ids are exact. A tokenizer with any step that looks across pieces gets whole prompts.
Ids are kept by salt and content: requests with other salts cannot learn by time what a prompt had.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from hashlib import sha256
from threading import Lock
from typing import Any

from tokenizers import Tokenizer

LEAST_CHARS = 1024  # of a piece whose ids are kept
MOST_TOKENS = 1 << 22  # kept, of 4 bytes each
APART = {"NFC", "NFD", "NFKC", "NFKD", "ByteLevel", "Digits", "Punctuation", "Sequence", "Split"}


class Pieces:
    """Tokenizer front end that keeps the ids of long pieces. Threads may share it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        encode: Callable[[str], list[int]],
        *,
        most_tokens: int = MOST_TOKENS,
    ) -> None:
        """`encode` tokenises a text. It is called for parts of prompts that are not kept."""
        self._encode = encode
        self._most_tokens = most_tokens
        self._cut = pattern_of(tokenizer)
        self._lock = Lock()
        self._kept: OrderedDict[bytes, array[int]] = OrderedDict()  # the latest used last
        self._num_kept = 0  # tokens

    def encode(self, text: str, salt: str = "") -> list[int]:
        """Return the ids of the whole text."""
        if self._cut is None or len(text) < LEAST_CHARS:
            return self._encode(text)
        ids: list[int] = []
        for part, is_long in self._parts(self._cut, text):
            ids += self._long(part, salt) if is_long else self._encode(part)
        return ids

    @staticmethod
    def _parts(cut: re.Pattern[str], text: str) -> Iterator[tuple[str, bool]]:
        """Yield the text in parts, each with whether it is one long piece."""
        begin, start = 0, 0  # of what has not been yielded, and of the piece
        ends = [(match.start(), match.end()) for match in cut.finditer(text)]
        for end, after in [*ends, (len(text), len(text))]:
            if end - start >= LEAST_CHARS:
                if begin < start:
                    yield text[begin:start], False
                yield text[start:end], True
                begin = end
            start = after
        if begin < len(text):
            yield text[begin:], False

    def _long(self, piece: str, salt: str) -> array[int]:
        owner, content = salt.encode(), piece.encode(errors="surrogatepass")
        key = sha256(len(owner).to_bytes(8, "little") + owner + content).digest()
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return kept
        ids = array("i", self._encode(piece))
        with self._lock:
            if key not in self._kept and len(ids) <= self._most_tokens:
                self._kept[key] = ids
                self._num_kept += len(ids)
                while self._num_kept > self._most_tokens:
                    self._num_kept -= len(self._kept.popitem(last=False)[1])
        return ids


def pattern_of(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return the pattern of the tokens at which the tokenizer cuts a text before anything else.

    Return None if a piece between them may get other ids alone.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    first = [token for token in added if not token.normalized]
    steps = [*steps_of(tokenizer.normalizer), *steps_of(tokenizer.pre_tokenizer)]
    if (
        not first
        or any(token.lstrip or token.rstrip or token.single_word for token in added)
        or any(step["type"] not in APART or step.get("add_prefix_space") for step in steps)
        or tokenizer.truncation is not None
        or tokenizer.padding is not None
    ):
        return None
    contents = sorted((token.content for token in first), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, contents)))


def steps_of(part: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401
    """Yield the steps of a normalizer or a pre-tokenizer (or None) as in tokenizer.json."""
    waiting = [] if part is None else [json.loads(part.__getstate__())]
    while waiting:
        step = waiting.pop()
        waiting += step.get("pretokenizers", step.get("normalizers", []))
        yield step
