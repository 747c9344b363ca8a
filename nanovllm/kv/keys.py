"""Content hashes that identify pages of the KV cache."""

from __future__ import annotations

from array import array
from hashlib import sha256
from typing import TypeAlias

Key = bytes
Tokens: TypeAlias = "array[int]"  # typecode "i"


def root_key(salt: str, adapter: bytes = b"") -> Key:
    """Return the parent key of first pages. Different salts or adapters never share a page.

    `adapter` is a digest of the adapter's files, of a fixed length; empty for the model alone. The
    length of the salt comes first, so that no salt can imitate an adapter.
    """
    raw = salt.encode()
    fixed = len(raw).to_bytes(8, "little") + (adapter or bytes(8))
    return sha256(fixed + raw).digest()


def chain(parent: Key, tokens: Tokens) -> Key:
    """Return the key of a page. Equal keys mean equal salts, adapters, prefixes and tokens."""
    return sha256(parent + tokens.tobytes()).digest()


class PageKeys:
    """Keys of one request's pages. Each is computed on first use and kept as long as the request.

    `tokens` is the request's own list. It only grows, so a key stays valid.
    """

    __slots__ = (
        "_full",
        "_root",
        "adapter_name",
        "adapter_number",
        "num_known",
        "page_tokens",
        "refused_at",
        "salt",
        "tokens",
    )

    def __init__(
        self,
        tokens: Tokens,
        salt: str,
        page_tokens: int,
        adapter: bytes = b"",
        *,
        adapter_name: str = "",
        adapter_number: int = 0,
    ) -> None:
        """`adapter` is in the keys. Its name and its number, from 1, are for events only."""
        self.tokens = tokens
        self.page_tokens = page_tokens
        self.salt = salt
        self.adapter_name = adapter_name
        self.adapter_number = adapter_number
        self._root = root_key(salt, adapter)
        self._full: list[Key] = []
        self.num_known = 0  # used by KVMemory: leading pages found in the last lookup
        self.refused_at = -1  # used by KVMemory: its release counter at the last refusal

    @property
    def computed(self) -> list[Key]:
        """The keys of full pages that have been computed, from the first page on."""
        return self._full

    def full(self, index: int) -> Key:
        """Return the key of a full page."""
        full, size = self._full, self.page_tokens
        for i in range(len(full), index + 1):
            parent = full[-1] if i else self._root
            full.append(chain(parent, self.tokens[i * size : (i + 1) * size]))
        return full[index]

    def before(self, index: int) -> Key:
        """Return the key of the prefix before a page."""
        return self.full(index - 1) if index else self._root

    def last(self, num_tokens: int) -> Key:
        """Return the key of the page that ends with token `num_tokens - 1`, full or not."""
        index, size = (num_tokens - 1) // self.page_tokens, self.page_tokens
        if num_tokens == (index + 1) * size:
            return self.full(index)
        return chain(self.before(index), self.tokens[index * size : num_tokens])
