"""The place of one request in its grammar, with masks that stay cheap near the end of bounded text.

xgrammar 0.2.8 tries most of the vocabulary anew for each of the last masks of a rule with
`max_chars`: 25 to 60 ms with 152,000 tokens. A grammar with such rules is therefore compiled twice.
The exact grammar reads every token and knows how many characters are left; the free one, without
the limits, makes the mask, from which tokens of more characters are then removed.

Decision: the length of a token alone decides. A token that would leave the bounded text early
enough, but has more characters than are left, is removed as well: shorter ones spell the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nanovllm.plan import Masks

if TYPE_CHECKING:
    import xgrammar

LEAST_LIMIT = 20  # characters: limits below would keep usual tokens out of the whole grammar
MOST_TRIED = 2000  # tokens that are tried one by one, at 3 us each
CONTINUED = bytes(range(0x80, 0xC0))  # bytes that begin no character in UTF-8
LIMITED_RULE = re.compile(r"(?m)^([A-Za-z_][A-Za-z0-9_]*)\[max_chars=([0-9]{1,9})\] ::=")
# In what xgrammar prints of its state: the character of the text at which a limit is reached, and
# where a limit of tokens applies.
DEADLINE = re.compile(r"char_budget_deadline=(\d+)")
TOKEN_LIMIT = ", budget_deadline="


class FreeGrammar(NamedTuple):
    """A grammar without its limits of characters, of which `least` is the smallest."""

    compiled: xgrammar.CompiledGrammar
    least: int
    lengths: TokenLengths


class CompiledPair(NamedTuple):
    exact: xgrammar.CompiledGrammar
    free: FreeGrammar | None = None  # None: there are no limits to take out

    @property
    def memory_size_bytes(self) -> int:
        free = self.free.compiled.memory_size_bytes if self.free else 0
        return int(self.exact.memory_size_bytes) + int(free)


def without_limits(tag: str) -> tuple[str, int] | None:
    """Return a structural tag without limits of characters, and the smallest of them.

    Return None if there is no limit, or one that cannot be taken out.
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
    """All objects of a JSON value."""
    waiting = [whole]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


class TokenLengths:
    """How many characters each token has, and the sets of tokens of at most so many."""

    def __init__(self, info: xgrammar.TokenizerInfo, unwritten: bytes) -> None:
        """`unwritten`: spelled by tokens that a grammar matches by their ids, at any length."""
        spelled = info.decoded_vocab
        self.chars = [len(token.translate(None, CONTINUED)) for token in spelled]
        counted = np.array(self.chars)
        counted[[token == unwritten for token in spelled]] = 0
        counted[info.special_token_ids] = 0
        self._counted = np.zeros(-(-info.vocab_size // 32) * 32, np.int32)
        self._counted[: len(counted)] = counted
        self.longest = int(counted.max())
        self._masks: dict[int, Masks] = {}

    def mask(self, most: int) -> Masks:
        if most not in self._masks:
            allowed = np.packbits(self._counted <= most, bitorder="little")
            self._masks[most] = allowed.view(np.int32)
        return self._masks[most]


class Place(NamedTuple):
    """Where both matchers are. `deadlines`: characters of the output at which a limit is reached.

    `is_apart`: the exact matcher has ended bounded text for its length, which the free one may
    still go on with. It stays so until both make the same mask.
    """

    num_chars: int = 0
    is_apart: bool = False
    deadlines: tuple[int, ...] | None = None  # None: not yet looked at
    has_token_limit: bool = False


class Matcher:
    """Follows one output. `filler` makes the next mask, and `narrow` must then be called on it."""

    def __init__(self, grammar: CompiledPair, stops: list[int] | None = None) -> None:
        import xgrammar

        self._exact = xgrammar.GrammarMatcher(grammar.exact, override_stop_tokens=stops)
        self._free: xgrammar.GrammarMatcher | None = None
        if grammar.free is not None:
            compiled, least, self._lengths = grammar.free
            self._least = min(least, self._lengths.longest)
            self._free = xgrammar.GrammarMatcher(compiled, override_stop_tokens=stops)
        self._places = [Place()]  # one after each token, so that tokens can be taken back

    @property
    def stop_token_ids(self) -> list[int]:
        return list(self._exact.stop_token_ids)

    def is_terminated(self) -> bool:
        return bool(self._exact.is_terminated())

    def is_completed(self) -> bool:
        """Return True if the text so far is a whole one."""
        return bool(self._exact.is_completed())

    def accept_token(self, token: int) -> bool:
        here = None if self._free is None else self._look()
        if not self._exact.accept_token(token):
            return False
        if self._free is None or here is None:
            return True
        if not self._free.accept_token(token):
            self._free = None  # from here on there is the exact matcher alone
            return True
        num_chars = here.num_chars + self._lengths.chars[token]
        is_over = any(deadline <= num_chars for deadline in here.deadlines or ())
        self._places.append(Place(num_chars, here.is_apart or is_over))
        return True

    def rollback(self, num_tokens: int) -> None:
        self._exact.rollback(num_tokens)
        if self._free is not None:
            self._free.rollback(num_tokens)
            del self._places[-num_tokens:]

    def fill(self, mask: Masks) -> None:
        """Make one mask, of all words of a row."""
        import torch

        self.filler().fill_next_token_bitmask(torch.from_numpy(mask[None]))
        self.narrow(mask)

    def filler(self) -> xgrammar.GrammarMatcher:
        """Return the matcher that makes the next mask."""
        if self._free is None:
            return self._exact
        here = self._look()
        if here.has_token_limit or (here.is_apart and self._limit(here) >= 1):
            return self._exact
        return self._free

    def narrow(self, mask: Masks) -> None:
        """Make the mask of `filler()` that of the exact grammar, apart from overlong tokens."""
        if self._free is None:
            return
        here, limit = self._look(), self._limit(self._look())
        if here.has_token_limit or (here.is_apart and limit >= 1):
            # A limit of tokens takes effect when a mask is made, so both make theirs.
            differs = (mask ^ self._made_by(self._free)) & self._lengths.mask(max(1, limit))
            is_apart = here.has_token_limit or bool(differs.any())
            self._places[-1] = here._replace(is_apart=is_apart)
        elif limit < 1:  # the text could not end there, and goes on until it can
            mask &= self._lengths.mask(1)
            self._try_each(mask)
        elif limit < self._lengths.longest:
            mask &= self._lengths.mask(limit)
            if not mask.any():
                mask[:] = self._made_by(self._exact)

    def _look(self) -> Place:
        here = self._places[-1]
        if here.deadlines is None:
            state = self._exact._debug_print_internal_state()  # 7 us; nothing else has deadlines
            here = here._replace(
                deadlines=tuple(map(int, DEADLINE.findall(state))),
                has_token_limit=TOKEN_LIMIT in state,
            )
            self._places[-1] = here
        return here

    def _limit(self, here: Place) -> int:
        """Return how many characters the next token may have."""
        left = [deadline - here.num_chars for deadline in here.deadlines or ()]
        return min([self._least, *left])

    def _try_each(self, mask: Masks) -> None:
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if allowed.size > MOST_TRIED:
            mask[:] = self._made_by(self._exact)
            return
        for token in allowed.tolist():
            if self._exact.accept_token(token):
                self._exact.rollback(1)
            else:
                mask.view(np.uint32)[token // 32] &= ~(np.uint32(1) << np.uint32(token % 32))

    def _made_by(self, matcher: xgrammar.GrammarMatcher) -> Masks:
        import torch

        mask = np.zeros(self._lengths.mask(1).shape, np.int32)
        matcher.fill_next_token_bitmask(torch.from_numpy(mask[None]))
        return mask
