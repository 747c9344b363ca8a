"""The recipe's section `speculate`: its keys, and what they may be.

Knows neither drafters nor schedulers.
"""

from __future__ import annotations

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
    tokens, accept = speculate.tokens, speculate.accept
    is_synthetic = speculate.method == "synthetic"
    is_falling = all(0 <= rate <= 1 for rate in accept) and accept == sorted(accept, reverse=True)
    for is_wrong, message in (
        (engine == "paper", "speculate: the paper engine has no text to guess; leave it out"),
        (
            not 1 <= tokens <= MOST_DRAFTS,
            f".tokens is {tokens}; it must be between 1 and {MOST_DRAFTS}",
        ),
        (
            not 1 <= speculate.min_match <= MOST_MATCH,
            f".min_match is {speculate.min_match}; it must be between 1 and {MOST_MATCH}",
        ),
        (
            not speculate.min_match <= speculate.max_match <= MOST_MATCH,
            f".max_match is {speculate.max_match}; it must be between {speculate.min_match} "
            f"(speculate.min_match) and {MOST_MATCH}",
        ),
        (
            accept and not is_synthetic,
            ".accept is for synthetic drafts; drop it, or write speculate.method: synthetic",
        ),
        (
            is_synthetic and (len(accept) != tokens or not is_falling),
            f".accept is {accept}; it must be {tokens} numbers (speculate.tokens) between 0 and 1, "
            "none above the one before it",
        ),
    ):
        if is_wrong:
            raise ConfigError(message if message[0] != "." else f"speculate{message}")
