"""Fields of other servers that turn reasoning on and off, read as this server's own fields.

This server's own fields (reasoning_effort, thinking_token_budget, include_reasoning and
chat_template_kwargs) have precedence. Other keys of the objects are ignored.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from msgspec import Struct, structs

from nanovllm.server.errors import bad_value
from nanovllm.server.ranges import BUDGET
from nanovllm.server.unsupported import Unsupported

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")
SWITCHES = {"enabled": True, "disabled": False, "auto": None, "adaptive": None}

Request = TypeVar("Request", bound="ThinkingFields")


class ReasoningObject(Struct, frozen=True):
    """`reasoning` of OpenRouter and SGLang."""

    effort: str | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    max_tokens: int | None = None


class ThinkingObject(Struct, frozen=True):
    """`thinking` of the APIs of DeepSeek, GLM and Anthropic."""

    type: str | None = None
    budget_tokens: int | None = None
    clear_thinking: bool | None = None  # GLM's templates read it


class ThinkingFields(Unsupported, frozen=True, kw_only=True):
    """The fields of a request that concern reasoning. Base of protocol.ChatRequest."""

    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Fields of other servers. `read_thinking` replaces them by the ones above.
    reasoning: ReasoningObject | None = None
    thinking: ThinkingObject | bool | None = None
    enable_thinking: bool | None = None  # of Qwen's API, like thinking_budget
    thinking_budget: int | None = None


def read_thinking(request: Request) -> Request:
    """Return the request with its own fields in place of those of other servers. Raise ApiError."""
    others = request.reasoning, request.thinking, request.enable_thinking, request.thinking_budget
    if others == (None, None, None, None):
        return request
    reasoning, is_on = request.reasoning or ReasoningObject(), None
    thinking = (
        request.thinking if isinstance(request.thinking, ThinkingObject) else ThinkingObject()
    )
    if isinstance(request.thinking, bool):
        is_on = request.thinking
    elif thinking.type is not None:
        is_on = SWITCHES.get(thinking.type)
    check_word("thinking.type", thinking.type, SWITCHES)
    check_word("reasoning.effort", reasoning.effort, EFFORTS)
    for where, most in (
        ("reasoning.max_tokens", reasoning.max_tokens),
        ("thinking.budget_tokens", thinking.budget_tokens),
    ):
        if most is not None and not BUDGET.holds(most):
            raise bad_value(where, str(BUDGET), most)
    excluded = None if reasoning.exclude is None else not reasoning.exclude
    template = {
        "enable_thinking": first(request.enable_thinking, is_on, reasoning.enabled),
        "clear_thinking": thinking.clear_thinking,
    }
    if request.reasoning_effort is not None:
        del template["enable_thinking"]
    template = {key: value for key, value in template.items() if value is not None}
    budget = first(request.thinking_token_budget, request.thinking_budget, thinking.budget_tokens)
    return structs.replace(
        request,
        reasoning=None,
        thinking=None,
        enable_thinking=None,
        thinking_budget=None,
        reasoning_effort=first(request.reasoning_effort, reasoning.effort),
        thinking_token_budget=first(budget, reasoning.max_tokens),
        include_reasoning=first(request.include_reasoning, excluded),
        chat_template_kwargs=template | (request.chat_template_kwargs or {}) or None,
    )


def check_word(where: str, word: str | None, words: Collection[str]) -> None:
    """Raise ApiError unless the value of a field is missing or one of `words`."""
    if word is not None and word not in words:
        raise bad_value(where, f"one of {', '.join(words)}", word)


def first(*values: Any) -> Any:  # noqa: ANN401
    """Return the first value that is given."""
    return next((value for value in values if value is not None), None)
