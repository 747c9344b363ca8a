"""The recipe's section `speculate`: its keys and their ranges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from msgspec import Struct

from nanovllm.typed_yaml import ConfigError

MODELS = ("draft_model", "eagle3", "mtp")  # their drafts come from a model with its own layers
KEYS: dict[str, tuple[object, tuple[str, ...]]] = {  # key: default, methods that have it
    "min_match": (2, ("ngram",)),
    "max_match": (8, ("ngram",)),
    "model": (None, ("draft_model", "eagle3")),
    "taps": ([], ("eagle3",)),
    "rope_theta": (None, ("eagle3",)),
    "drafts_by": ("shared", MODELS),
    "dtype": ("auto", ("eagle3", "mtp")),
}
MOST_DRAFTS = 7
MOST_MATCH = 1024


class Drafts(Struct, frozen=True, kw_only=True):
    """Settings of drafts for the scheduler."""

    most: int = 0  # maximum drafts of a row; 0: no drafts
    has_model: bool = False  # whether a model drafts, with keys and values of its own
    adapt: bool = True

    @property
    def tokens_ahead(self) -> int:
        """Return how many tokens after a row's last one a draft model computes."""
        return self.most if self.has_model else 0


class Speculate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding: draft tokens are proposed, and verified together in one step."""

    # ngram: propose the tokens after the previous occurrence of the request's latest tokens. The
    # text does not change. synthetic: arbitrary drafts, accepted at the rates in `accept`, to
    # measure speed. The output is not meaningful text. draft_model: drafts of the small model in
    # the folder `model`, which has the same tokenizer. eagle3: drafts of the EAGLE-3 head in the
    # folder `model`. mtp: drafts of the checkpoint's own layer for multi-token prediction. The
    # text does not change.
    method: Literal["ngram", "synthetic", "draft_model", "eagle3", "mtp"]
    tokens: int = 3  # maximum drafts of a request in a step
    min_match: int = 2  # ngram: least number of tokens that must match
    max_match: int = 8  # ngram: number of tokens to match that is tried first
    # synthetic: acceptance rate of each position, over all steps. It can also be given for a draft
    # model or head, to measure its real cost at these rates. The output is then not meaningful
    # text.
    accept: list[float] = []
    # draft_model, eagle3: a folder, or a config.json with load.format dummy. The demo has its own
    # draft model.
    model: str | None = None
    # eagle3: the layers whose inputs the head takes, as numbers from 0; the number of layers means
    # the output of the last one. Empty: those of the head's config.json.
    taps: list[int] = []
    rope_theta: float | None = None  # eagle3: base of rotary positions; None: the head's own
    # shared: models draw drafts with the noise and temperature of the target's draws. argmax: they
    # take their most likely token.
    drafts_by: Literal["shared", "argmax"] = "shared"
    # eagle3, mtp: type of weights that drafts are computed from. own: that of the model. fp8: block
    # fp8, for all products of an EAGLE-3 head, or a copy of the model's output head. auto: fp8 if a
    # kernel of this GPU multiplies with it. The text does not change, but a few other drafts may be
    # accepted.
    dtype: Literal["auto", "fp8", "own"] = "auto"
    # Feed as many drafts as pay off, by their acceptance so far. false: feed all that have room.
    adapt: bool = True

    @property
    def writes_by_chance(self) -> bool:
        """Return True if drafts are accepted at given rates, so that the output is not text."""
        return bool(self.accept)

    @property
    def has_dtype(self) -> bool:
        """Return True if `dtype` applies to the method."""
        return self.method in KEYS["dtype"][1]

    @property
    def drafts(self) -> Drafts:
        has_model = self.method in MODELS
        return Drafts(most=self.tokens, has_model=has_model, adapt=self.adapt)


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
    check_model(speculate)
    is_model = speculate.method in MODELS
    if accept and not (is_synthetic or is_model):
        text = "is for synthetic drafts; drop it, or write speculate.method: synthetic"
        raise ConfigError(f"speculate.accept {text}")
    if (accept or is_synthetic) and (problem := rates_problem(accept, tokens)):
        raise ConfigError(f"speculate.accept is {accept}; {problem}")


def rates_problem(accept: Sequence[float], tokens: int) -> str:
    """Return the reason why these are not the rates of `tokens` drafts, or ""."""
    if len(accept) == tokens and all(a >= b for a, b in pairwise([1, *accept, 0])):
        return ""
    text = f"{tokens} numbers (speculate.tokens) between 0 and 1, each at most the previous one"
    return f"it must be {text}"


def check_model(speculate: Speculate) -> None:
    """Raise ConfigError if keys of models do not fit the method."""
    method, theta = speculate.method, speculate.rope_theta
    for name, (default, methods) in KEYS.items():
        if method not in methods and getattr(speculate, name) != default:
            remedy = "drop it"
            if method == "synthetic" and set(methods) <= set(MODELS):
                remedy = "write that method and keep speculate.accept, to measure its real cost"
            raise ConfigError(f"speculate.{name} is for method {' or '.join(methods)}; {remedy}")
    if method == "eagle3" and speculate.model is None:
        raise ConfigError("speculate.model is missing; give the folder of an EAGLE-3 head")
    if theta is not None and not 1 < theta < math.inf:
        raise ConfigError(f"speculate.rope_theta is {theta}; it must be above 1")
