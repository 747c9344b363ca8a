"""Response bodies as they are encoded."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType


class Function(Struct, frozen=True):
    name: str
    arguments: str  # JSON


class Call(Struct, frozen=True, omit_defaults=True):
    id: str
    function: Function
    index: int | UnsetType = UNSET  # in streams only
    type: str = msgspec.field(default_factory=lambda: "function")  # a factory's is never omitted


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]  # UTF-8, even of part of a character


class TokenLogprob(TopLogprob, frozen=True):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(Struct, frozen=True):
    content: list[TokenLogprob]


class Answer(Struct, frozen=True):
    role: str
    content: str | None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # alias of `reasoning`
    tool_calls: list[Call] | UnsetType = UNSET


class AnswerChoice(Struct, frozen=True):
    index: int
    message: Answer
    logprobs: ChoiceLogprobs | None
    finish_reason: str
    stop_reason: str | int | None = None  # the stop string or the client's stop token that matched
    token_ids: list[int] | UnsetType = UNSET


class PromptDetails(Struct, frozen=True):
    cached_tokens: int


class CompletionDetails(Struct, frozen=True):
    reasoning_tokens: int


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class ChatCompletion(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[AnswerChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: Raw | UnsetType = UNSET
    object: str = "chat.completion"
