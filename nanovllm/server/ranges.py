"""Ranges of numeric fields, and the refusal of values outside them.

The type does not bound whole numbers in a body. A value that passes here fits every column, message
and tensor that it reaches later.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from msgspec import Struct

from nanovllm.server.errors import bad_value

MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
MAX_TOKEN_IDS = 1024  # in one list; a list of this length needs room in every slot
MAX_BIAS = 100
MOST_URGENT = -100  # the lowest priority if clients may raise theirs
INT32, INT64 = 2**31 - 1, 2**63 - 1
WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,18})")


class Range(Struct, frozen=True):
    low: float
    high: float
    open: bool = False  # excludes `low`
    note: str = ""  # follows both ends in a message

    def holds(self, value: float) -> bool:
        above = value > self.low if self.open else value >= self.low
        return above and value <= self.high

    def __str__(self) -> str:
        begin = f"above {self.low} and at most" if self.open else f"between {self.low} and"
        return f"{begin} {self.high}{self.note}"


BUDGET = Range(-1, INT32)  # of tokens of reasoning; -1: no limit
SAMPLING = {  # fields for which generation_config.json may have defaults
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, open=True),
    "top_k": Range(-1, INT32),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 2, open=True),
}


def ranges(context: int, *, raise_priority: bool, max_queue: int = MAX_CHOICES) -> dict[str, Range]:
    """Return the range of every numeric field.

    `context` limits the tokens of prompt and answer. `max_queue` limits waiting engine requests;
    all choices of a request wait for a moment.
    """
    tokens = Range(1, context, note=", the model's context")
    priorities = Range(0, INT32, note=" (below 0: a server with server.raise_priority)")
    return {
        "max_tokens": tokens,
        "max_completion_tokens": tokens,
        "min_tokens": Range(0, context, note=", the model's context"),
        **SAMPLING,
        "presence_penalty": Range(-2, 2),
        "frequency_penalty": Range(-2, 2),
        "n": Range(1, min(MAX_CHOICES, max_queue)),
        "top_logprobs": Range(0, MAX_TOP_LOGPROBS),
        "seed": Range(-INT64 - 1, INT64, note=" (64 bits)"),
        "priority": Range(MOST_URGENT, INT32) if raise_priority else priorities,
        "stream_interval": Range(1, INT32),
        "thinking_token_budget": BUDGET,
        "thinking_budget": BUDGET,
    }


def check_token_ids(field: str, ids: Collection[int], vocab_size: int) -> None:
    """Raise ApiError if there are too many ids or one is outside the vocabulary."""
    if len(ids) > MAX_TOKEN_IDS:
        raise bad_value(field, f"at most {MAX_TOKEN_IDS} ids", len(ids))
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise bad_value(field, f"ids from 0 to {vocab_size - 1}", token_id)


def check_biases(biases: Mapping[str, object], vocab_size: int) -> None:
    """Check logit_bias. Raise ApiError that names the key at fault."""
    if len(biases) > MAX_TOKEN_IDS:
        raise bad_value("logit_bias", f"at most {MAX_TOKEN_IDS} ids", len(biases))
    for key, bias in biases.items():
        where = f"logit_bias.{key[:40]}"
        if not WHOLE.fullmatch(key) or not 0 <= int(key) < vocab_size:
            raise bad_value(where, f"keyed by a token id from 0 to {vocab_size - 1}", key)
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:  # type: ignore[operator]
            raise bad_value(where, f"a number between {-MAX_BIAS} and {MAX_BIAS}", bias)
