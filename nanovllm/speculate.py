"""The recipe's section `speculate`: its keys, and what they may be.

Knows neither drafters nor schedulers.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from msgspec import Struct

from nanovllm.typed_yaml import ConfigError

MOST_DRAFTS = 7
MOST_MATCH = 1024


class Speculate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens are guessed ahead (drafts), and all drafts of a request are verified in one step."""

    # ngram: what followed the request's newest tokens where it had them before; texts are the same
    # as without. synthetic: any, accepted as often as `accept` says; what comes out is no text, and
    # tells what such rates are worth.
    method: Literal["ngram", "synthetic"]
    tokens: int = 3  # drafts of a request in a step, at most
    min_match: int = 2  # ngram: at least so many tokens must be found again
    max_match: int = 8  # ngram: so many are looked for first
    accept: list[float] = []  # synthetic: in which share of steps each place's draft is accepted


def check(speculate: Speculate, engine: str) -> None:
    """Raises ConfigError if a value is out of its range, or the engine cannot guess."""
    if engine == "paper":
        raise ConfigError("speculate: the paper engine has no text to guess; leave it out")
    tokens, accept = speculate.tokens, speculate.accept
    is_synthetic, least = speculate.method == "synthetic", speculate.min_match
    for name, low, why, high in (
        ("tokens", 1, "", MOST_DRAFTS),
        ("min_match", 1, "", MOST_MATCH),
        ("max_match", least, " (speculate.min_match)", MOST_MATCH),
    ):
        if not low <= (value := getattr(speculate, name)) <= high:
            text = f"it must be between {low}{why} and {high}"
            raise ConfigError(f"speculate.{name} is {value}; {text}")
    is_falling = all(a >= b for a, b in pairwise([1, *accept, 0]))
    if accept and not is_synthetic:
        text = "is for synthetic drafts; drop it, or write speculate.method: synthetic"
        raise ConfigError(f"speculate.accept {text}")
    if is_synthetic and (len(accept) != tokens or not is_falling):
        text = f"{tokens} numbers (speculate.tokens) between 0 and 1, none above the one before it"
        raise ConfigError(f"speculate.accept is {accept}; it must be {text}")
