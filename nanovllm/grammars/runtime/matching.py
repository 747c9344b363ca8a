"""Position of a request in its grammar, with masks that stay cheap near the end of bounded text.

xgrammar 0.2.8 tries most of the vocabulary again for each of the last masks of a rule with
`max_chars`. This takes 25 to 60 ms with 152,000 tokens. A grammar with such rules is therefore
compiled twice. The exact grammar reads the text and counts the characters that are left. Its
vocabulary is single bytes, so it costs little. The free grammar, without the limits, makes the
masks, from which tokens with more characters are then removed.

Decision: only the length of a token counts. A token that would leave the bounded text early enough
but has more characters than are left is removed as well. Shorter tokens spell the same text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nanovllm.plan import Masks

if TYPE_CHECKING:
    import xgrammar

LEAST_LIMIT = 20  # characters; a lower limit would exclude usual tokens from all masks
CONTINUED = bytes(range(0x80, 0xC0))  # bytes that do not begin a character in UTF-8
LIMITED_RULE = re.compile(r"(?m)^([A-Za-z_][A-Za-z0-9_]*)\[max_chars=([0-9]{1,9})\] ::=")
# Parts of xgrammar's printed state: the character at which a limit is reached, and the mark of a
# limit of tokens.
DEADLINE = re.compile(r"char_budget_deadline=(\d+)")
TOKEN_LIMIT = ", budget_deadline="
UNKNOWN = -1  # limit that has not been looked up yet
# Formats of structural tags that match only spelled text.
SPELLED = ("const_string", "grammar", "any_text", "regex", "sequence", "or", "optional", "repeat",
           "star", "plus", "tag", "tags_with_separator", "triggered_tags")  # fmt: skip


class FreeGrammar(NamedTuple):
    """A grammar without its character limits. `least`: the smallest of them."""

    compiled: xgrammar.CompiledGrammar
    least: int
    texts: TokenTexts


class CompiledPair(NamedTuple):
    """A compiled grammar.

    `by_bytes`: the exact grammar's vocabulary is single bytes. `may_limit_tokens`: a part of it may
    have a limit of tokens.
    """

    exact: xgrammar.CompiledGrammar
    free: FreeGrammar | None = None  # None: no limits to remove
    by_bytes: bool = False
    may_limit_tokens: bool = False

    @property
    def memory_size_bytes(self) -> int:
        free = self.free.compiled.memory_size_bytes if self.free else 0
        return int(self.exact.memory_size_bytes) + int(free)


def without_limits(tag: str) -> tuple[str, int] | None:
    """Return a structural tag without character limits, and the smallest limit.

    Return None if there is no limit, or one that cannot be removed.
    """
    if "max_chars" not in tag:
        return None
    whole = json.loads(tag)
    limits: list[int] = []
    for node in _nodes(whole):
        text = node.get("grammar")
        if isinstance(text, str):
            limits += [int(limit) for _, limit in LIMITED_RULE.findall(text)]
            node["grammar"] = LIMITED_RULE.sub(r"\1 ::=", text)
        if node.get("type") == "any_text" and isinstance(node.get("max_chars"), int):
            limits.append(node.pop("max_chars"))
    free = json.dumps(whole, separators=(",", ":"))
    if "max_chars" in free or min(limits) < LEAST_LIMIT:
        return None
    return free, min(limits)


def _nodes(whole: object) -> Iterator[dict[str, Any]]:
    """Yield all objects of a JSON value."""
    waiting = [whole]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


class TokenTexts:
    """Spelling of each token: its bytes and number of characters, and masks by that number.

    `singles`: mask of the single-byte tokens and of those without a spelling, which are matched by
    id.
    """

    def __init__(self, info: xgrammar.TokenizerInfo, unwritten: bytes) -> None:
        """`unwritten`: the spelling given to tokens without one."""
        self.spelled: list[bytes] = info.decoded_vocab
        self.chars = [len(token.translate(None, CONTINUED)) for token in self.spelled]
        counted = np.array(self.chars)
        is_unwritten = np.array([token == unwritten for token in self.spelled])
        counted[is_unwritten] = 0
        counted[info.special_token_ids] = 0
        is_single = np.array([len(token) == 1 for token in self.spelled])
        self.unwritten = {*np.flatnonzero(is_unwritten).tolist(), *info.special_token_ids}
        self.has_all_bytes = len({self.spelled[i] for i in np.flatnonzero(is_single)}) == 256
        self.singles = _words(is_single | (counted == 0))
        self.longest = int(counted.max())
        self._counted = counted
        self._masks: dict[int, Masks] = {}

    def at_most(self, num_chars: int) -> Masks:
        if num_chars not in self._masks:
            self._masks[num_chars] = _words(self._counted <= num_chars)
        return self._masks[num_chars]


def _words(is_in: np.ndarray) -> Masks:
    bits = np.zeros(-(-len(is_in) // 32) * 32, bool)
    bits[: len(is_in)] = is_in
    return np.packbits(bits, bitorder="little").view(np.int32)


def tokens_of(mask: Masks) -> np.ndarray:
    """Return the ids of the tokens that a mask allows, in order."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def reads_bytes(tag: str, texts: TokenTexts) -> bool:
    """Return True if the grammar of a structural tag can be followed byte by byte.

    Tokens without a spelling are matched by id and do not matter.
    """
    for node in _nodes(json.loads(tag)["format"]):
        kind = node.get("type")
        is_token = kind == "token" and node.get("token") in texts.unwritten
        if (not is_token and kind not in SPELLED) or "Token(" in str(node.get("grammar")):
            return False
    return texts.has_all_bytes


class Position(NamedTuple):
    """Position of both matchers after a token.

    `first_limit`: the character of the output at which the first limit is reached. `is_apart`: the
    exact matcher has ended bounded text because of its length, while the free one may continue it.
    The flag remains set until both make the same mask.
    """

    num_chars: int = 0
    is_apart: bool = False
    first_limit: float = UNKNOWN
    has_token_limit: bool = False


class Matcher:
    """Matcher of one output. `filler` makes the next mask, then `narrow` must be called on it."""

    def __init__(self, grammar: CompiledPair, stops: list[int] | None = None) -> None:
        import xgrammar

        self._exact = xgrammar.GrammarMatcher(grammar.exact, override_stop_tokens=stops)
        self._free: xgrammar.GrammarMatcher | None = None
        self._by_bytes = grammar.by_bytes
        self._may_limit_tokens = grammar.may_limit_tokens
        if grammar.free is not None:
            compiled, least, self._texts = grammar.free
            self._least = min(least, self._texts.longest)
            self._free = xgrammar.GrammarMatcher(compiled, override_stop_tokens=stops)
        self._positions = [Position()]  # one per token, so that tokens can be rolled back

    @property
    def stop_token_ids(self) -> list[int]:
        return list(self._exact.stop_token_ids)

    @property
    def filler(self) -> xgrammar.GrammarMatcher:
        return self._exact if self._free is None else self._free

    def has_token_limit(self) -> bool:
        """Return True if a limit of tokens applies here. It is in effect only after a mask."""
        if not self._may_limit_tokens:
            return False
        if self._free is not None:
            return self._look().has_token_limit
        return TOKEN_LIMIT in self._exact._debug_print_internal_state()

    def is_terminated(self) -> bool:
        return bool(self._exact.is_terminated())

    def is_completed(self) -> bool:
        """Return True if the text so far is complete."""
        return bool(self._exact.is_completed())

    def accept_token(self, token: int) -> bool:
        """Accept a token. Return False if the grammar does not allow it, also after its end."""
        if self.is_terminated():  # xgrammar would write a warning to stderr
            return False
        if self._free is None:
            return bool(self._exact.accept_token(token))
        here = self._look()
        if not self._read(token):
            return False
        if not self._free.accept_token(token):
            self._exact.rollback(1)
            return False
        num_chars = here.num_chars + self._texts.chars[token]
        self._positions.append(Position(num_chars, here.is_apart or here.first_limit <= num_chars))
        return True

    def _read(self, token: int) -> bool:
        """Accept a token with the exact matcher."""
        is_by_id = token in self._texts.unwritten or token in self._exact.stop_token_ids
        if is_by_id or not self._by_bytes:
            return bool(self._exact.accept_token(token))
        return bool(self._exact.accept_string(self._texts.spelled[token]))

    def rollback(self, num_tokens: int) -> None:
        self._exact.rollback(num_tokens)
        if self._free is not None:
            self._free.rollback(num_tokens)
            del self._positions[-num_tokens:]

    def fill(self, mask: Masks) -> None:
        """Make one mask, all words of one row."""
        self.filler.fill_next_token_bitmask(mask[None])
        self.narrow(mask)

    def narrow(self, mask: Masks) -> None:
        """Change a mask of `filler` into the exact grammar's, without tokens that are too long."""
        if self._free is None:
            return
        here = self._look()
        limit = int(min(self._least, here.first_limit - here.num_chars))
        if here.is_apart or here.has_token_limit or limit < 1:
            # The exact mask must be made, because this puts a limit of tokens into effect.
            exact = self._exact_mask()
            is_apart = limit < 1 or bool(((mask ^ exact) & self._texts.singles).any())
            self._positions[-1] = here._replace(is_apart=is_apart)
            if is_apart:
                mask[:] = exact
                return
        if limit < self._texts.longest:
            mask &= self._texts.at_most(limit)
        if not mask.any():
            mask[:] = self._exact_mask()

    def _look(self) -> Position:
        here = self._positions[-1]
        if here.first_limit == UNKNOWN:
            # Takes 7 us. In xgrammar 0.2.8 this is the only source of deadlines.
            state = self._exact._debug_print_internal_state()
            deadlines = map(int, DEADLINE.findall(state))
            here = here._replace(
                first_limit=min(deadlines, default=inf), has_token_limit=TOKEN_LIMIT in state
            )
            self._positions[-1] = here
        return here

    def _exact_mask(self) -> Masks:
        mask = np.zeros(self._texts.singles.shape, np.int32)
        self._exact.fill_next_token_bitmask(mask[None])
        return mask
