"""What the pages of a text are called. Knows nothing of who holds them."""

from __future__ import annotations

from array import array
from hashlib import sha256
from typing import TypeAlias

Key = bytes
Tokens: TypeAlias = "array[int]"  # typecode "i"


def root_key(salt: str) -> Key:
    """The parent of first pages: tenants with different salts never share a page."""
    raw = salt.encode()
    return sha256(len(raw).to_bytes(8, "little") + raw).digest()


def chain(parent: Key, tokens: Tokens) -> Key:
    """Name a page by everything before it: equal keys mean equal salts and token prefixes."""
    return sha256(parent + tokens.tobytes()).digest()


class PageKeys:
    """The keys of one request's pages, each computed once and kept as long as the request.

    `tokens` is the request's own list and only ever grows, so a key never becomes wrong.
    """

    __slots__ = ("_full", "_root", "num_known", "page_tokens", "refused_at", "tokens")

    def __init__(self, tokens: Tokens, salt: str, page_tokens: int) -> None:
        self.tokens = tokens
        self.page_tokens = page_tokens
        self._root = root_key(salt)
        self._full: list[Key] = []
        self.num_known = 0  # KVMemory's note: no more leading pages could be found
        self.refused_at = -1  # KVMemory's note: when it last refused this request

    @property
    def computed(self) -> list[Key]:
        """The keys of full pages that somebody has asked for so far, from the first page on."""
        return self._full

    def full(self, index: int) -> Key:
        """The key of a page whose tokens are all known."""
        full, size = self._full, self.page_tokens
        for i in range(len(full), index + 1):
            parent = full[-1] if i else self._root
            full.append(chain(parent, self.tokens[i * size : (i + 1) * size]))
        return full[index]

    def before(self, index: int) -> Key:
        """What names all that comes before a page."""
        return self.full(index - 1) if index else self._root

    def last(self, num_tokens: int) -> Key:
        """The key of the page with token `num_tokens` - 1, seen as if none came after that."""
        index, size = (num_tokens - 1) // self.page_tokens, self.page_tokens
        if num_tokens == (index + 1) * size:
            return self.full(index)
        return chain(self.before(index), self.tokens[index * size : num_tokens])
