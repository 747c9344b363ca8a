"""The recipe's section `speculate`: its keys and their ranges."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from msgspec import Struct

from nanovllm.typed_yaml import ConfigError

MOST_DRAFTS = 7
MOST_MATCH = 1024


class Speculate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding: draft tokens are proposed, and verified together in one step."""

    # ngram: propose the tokens after the previous occurrence of the request's latest tokens. The
    # text does not change. synthetic: arbitrary drafts, accepted at the rates in `accept`, to
    # measure speed. The output is not meaningful text.
    method: Literal["ngram", "synthetic"]
    tokens: int = 3  # maximum drafts of a request in a step
    min_match: int = 2  # ngram: least number of tokens that must match
    max_match: int = 8  # ngram: number of tokens to match that is tried first
    accept: list[float] = []  # synthetic: acceptance rate of each position, over all steps


def check(speculate: Speculate, engine: str) -> None:
    """Raise ConfigError if a value is out of range, or the engine does not support drafts."""
    if engine == "paper":
        raise ConfigError("speculate: the paper engine does not support drafts; leave it out")
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
        text = f"{tokens} numbers (speculate.tokens) between 0 and 1, each at most the previous one"
        raise ConfigError(f"speculate.accept is {accept}; it must be {text}")
