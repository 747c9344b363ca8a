"""KVMemory: the only face of the cache the scheduler sees.

It answers four questions: what is already known of this prompt (admit), may it grow (extend), what
may others reuse (commit), and who is done (release). It deals in page ids and checkpoint ids; the
bytes live on the device.

Decision: a request is admitted with pages for all of its prompt at once. Chunks then never compete
for pages, so only a decode row that outgrows its last page can cause a preemption.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeAlias

from nanovllm.kv.pages import PagePool

Key = bytes
Tokens: TypeAlias = "array[int]"  # typecode "i"


def root_key(salt: str) -> Key:
    """The parent of first pages: tenants with different salts never share a page."""
    raw = salt.encode()
    return sha256(len(raw).to_bytes(8, "little") + raw).digest()


def chain(parent: Key, tokens: Tokens) -> Key:
    """Name a page by everything before it: equal keys mean equal salts and token prefixes."""
    return sha256(parent + tokens.tobytes()).digest()


@dataclass(slots=True)
class Holding:
    """What one request holds. keys[i] names pages[i]; the pages past len(keys) are private."""

    root: Key
    pages: list[int]
    keys: list[Key]


@dataclass(frozen=True, slots=True)
class Admission:
    num_cached: int  # tokens
    pages: list[int]
    checkpoint: int  # -1 = start from the zero state


class KVMemory:
    """`num_checkpoints` > 0 means a hybrid model: a prefix is reusable where a state was saved.

    `prefix` False turns all reuse off.
    """

    def __init__(
        self, num_pages: int, page_tokens: int, num_checkpoints: int = 0, *, prefix: bool = True
    ) -> None:
        self.page_tokens = page_tokens
        self.hybrid = num_checkpoints > 0
        self.prefix = prefix
        self.pool = PagePool(num_pages, self._forget)
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._checkpoint_of: OrderedDict[Key, int] = OrderedDict()  # oldest first
        self._blank_checkpoints = list(range(num_checkpoints))
        self._unpublished: dict[Key, int] = {}  # checkpoints the plan being built will write
        self._holdings: dict[int, Holding] = {}

    @property
    def usage(self) -> float:
        """Share of pages that running requests hold, 0..1."""
        return 1 - self.pool.num_free / self.pool.num_pages

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def fits(self, num_tokens: int) -> bool:
        return self.num_pages_for(num_tokens) <= self.pool.num_pages

    def admit(self, request_id: int, tokens: Tokens, salt: str, reserve: int) -> Admission | None:
        """Hold the longest known prefix and blank pages for the rest of `tokens`.

        One token is always left to compute. None, and nothing held, unless `reserve` pages would
        stay free for the requests already running.
        """
        holding, usable = self._known_prefix(tokens, root_key(salt))
        for page in holding.pages:
            self.pool.hold(page)
        missing = self.num_pages_for(len(tokens)) - len(holding.pages)
        blank = self.pool.take(missing) if missing + reserve <= self.pool.num_free else None
        if blank is None:
            self._drop(holding.pages)
            return None
        checkpoint = -1
        if self.hybrid and usable:
            checkpoint = self._checkpoint_of[holding.keys[-1]]
            self._checkpoint_of.move_to_end(holding.keys[-1])
        holding.pages += blank
        self._holdings[request_id] = holding
        return Admission(usable * self.page_tokens, holding.pages.copy(), checkpoint)

    def _known_prefix(self, tokens: Tokens, root: Key) -> tuple[Holding, int]:
        """The cached pages that may be used, and their number.

        With recurrent layers a boundary is usable only if the state there was saved too.
        """
        keys: list[Key] = []
        parent, usable, size = root, 0, self.page_tokens
        for i in range((len(tokens) - 1) // size):
            parent = chain(parent, tokens[i * size : (i + 1) * size])
            if parent not in self._page_of:
                break
            keys.append(parent)
            if not self.hybrid or parent in self._checkpoint_of:
                usable = len(keys)
        del keys[usable:]
        return Holding(root, [self._page_of[key] for key in keys], keys), usable

    def extend(self, request_id: int, num_tokens: int) -> list[int] | None:
        """Make room for `num_tokens` in all. Returns the new pages, or None if there is no room."""
        holding = self._holdings[request_id]
        pages = self.pool.take(max(self.num_pages_for(num_tokens) - len(holding.pages), 0))
        if pages is not None:
            holding.pages += pages
        return pages

    def commit(self, request_id: int, tokens: Tokens, num_computed: int) -> None:
        """Let others find the full pages among the first `num_computed` known tokens.

        Some issued plan computes all of them. Costs nothing unless a page has just filled up.
        """
        holding, size = self._holdings[request_id], self.page_tokens
        num_full = min(num_computed, len(tokens)) // size if self.prefix else 0
        for i in range(len(holding.keys), num_full):
            parent = holding.keys[-1] if holding.keys else holding.root
            key = chain(parent, tokens[i * size : (i + 1) * size])
            holding.keys.append(key)
            if key not in self._page_of:  # else: an equal page got there first, ours stays private
                self._page_of[key] = holding.pages[i]
                self._key_of[holding.pages[i]] = key

    def save_checkpoint(self, request_id: int, tokens: Tokens, end: int) -> int:
        """A checkpoint for the recurrent state after tokens[:end], a page boundary; -1 = none.

        It cannot be found before publish(): the plan that writes it must not also read it.
        """
        holding, size = self._holdings[request_id], self.page_tokens
        known = min(len(holding.keys), end // size)
        key = holding.keys[known - 1] if known else holding.root
        for i in range(known * size, end, size):
            key = chain(key, tokens[i : i + size])
        if not self.hybrid or key in self._checkpoint_of or key in self._unpublished:
            return -1
        if self._blank_checkpoints:
            checkpoint = self._blank_checkpoints.pop()
        elif self._checkpoint_of:
            _, checkpoint = self._checkpoint_of.popitem(last=False)
        else:
            return -1
        self._unpublished[key] = checkpoint
        return checkpoint

    def publish(self) -> None:
        """The plan is complete: later plans may restore what it saves."""
        self._checkpoint_of |= self._unpublished
        self._unpublished.clear()

    def release(self, request_id: int) -> None:
        self._drop(self._holdings.pop(request_id).pages)

    def _drop(self, pages: list[int]) -> None:
        for page in reversed(pages):  # tail first: a chain is evicted from its leaves
            self.pool.drop(page, keep=page in self._key_of)

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]

    def check(self) -> None:
        self.pool.check()
        assert {page: key for key, page in self._page_of.items()} == self._key_of
