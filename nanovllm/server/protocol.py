"""The bodies of /v1/chat/completions: what a request may say, and the shapes of answers.

Owns field types and ranges. Knows neither the engine nor the model, except for the counts it is
given to check against.

Decision: unknown fields are ignored, as clients send many; known ones are strict. A field that
is null means the same as one that is missing.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from nanovllm.server.errors import ApiError, bad_body, bad_value

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_CHARS = 1024  # matching costs each token up to this much
MAX_TOP_LOGPROBS = 20
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")  # it is echoed in a header


class Part(Struct, frozen=True):
    type: str
    text: str | None = None


class CalledFunction(Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class PastCall(Struct, frozen=True):
    function: CalledFunction
    id: str | None = None


class Message(Struct, frozen=True):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[PastCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # the same, as other servers call it

    @property
    def text(self) -> str | None:
        """Parts are joined by newlines, as vLLM does, so that prompts stay comparable."""
        if isinstance(self.content, list):
            return "\n".join(part.text or "" for part in self.content)
        return self.content


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(Struct, frozen=True):
    type: str


class ChatRequest(Struct, frozen=True, kw_only=True):
    messages: list[Message]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    # extensions
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def schemas(self) -> dict[str, object] | None:
        """Of the arguments of each function the model may call; None if it may call none."""
        if not self.tools or self.tool_choice == "none":
            return None
        functions = [tool["function"] for tool in self.tools]
        return {function["name"]: function.get("parameters") for function in functions}

    @property
    def token_limit(self) -> int | None:
        """What the client set as most tokens per choice."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class Range(Struct, frozen=True):
    low: float
    high: float | None = None
    open: bool = False  # `low` itself is outside

    def holds(self, value: float) -> bool:
        above = value > self.low if self.open else value >= self.low
        return above and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.high is None:
            return f"at least {self.low:g}"
        low = f"above {self.low:g} and at most" if self.open else f"between {self.low:g} and"
        return f"{low} {self.high:g}"


RANGES = {
    "max_tokens": Range(1),
    "max_completion_tokens": Range(1),
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, open=True),
    "n": Range(1, MAX_CHOICES),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "top_logprobs": Range(0, MAX_TOP_LOGPROBS),
    "top_k": Range(-1),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 2, open=True),
    "min_tokens": Range(0),
    "priority": Range(-(2**31), 2**31 - 1),
}
_decoder = msgspec.json.Decoder(ChatRequest)


def parse_request(body: bytes, *, model: str, vocab_size: int) -> ChatRequest:
    """A request whose every field is in range. Raises ApiError."""
    try:
        request = _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise bad_body(error) from None
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid UTF-8: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    if request.model not in (None, model):
        text = f"the model {request.model!r} does not exist; this server has {model!r}"
        raise ApiError(404, text, param="model", code="model_not_found")
    for field, allowed in RANGES.items():
        value = getattr(request, field)
        if value is not None and not allowed.holds(value):
            raise bad_value(field, str(allowed), value)
    _check_messages(request.messages)
    _check_sampling(request, vocab_size)
    _check_output(request)
    return request


def _check_messages(messages: list[Message]) -> None:
    if not messages:
        raise bad_value("messages", "a list of at least one message", messages)
    for at, message in enumerate(messages):
        if message.role not in ROLES:
            raise bad_value(f"messages[{at}].role", f"one of {', '.join(ROLES)}", message.role)
        for part_at, part in enumerate(message.content if type(message.content) is list else ()):
            where = f"messages[{at}].content[{part_at}]"
            if part.type != "text":
                raise bad_value(f"{where}.type", "'text': this model reads text only", part.type)
            if part.text is None:
                raise bad_value(f"{where}.text", "a string", None)


def _check_sampling(request: ChatRequest, vocab_size: int) -> None:
    if request.seed is not None and not -(2**63) <= request.seed < 2**63:
        raise bad_value("seed", "a 64-bit integer", request.seed)
    for token_id, bias in (request.logit_bias or {}).items():
        if not 0 <= token_id < vocab_size:
            raise bad_value("logit_bias", f"keyed by ids from 0 to {vocab_size - 1}", token_id)
        if not -100 <= bias <= 100:
            raise bad_value("logit_bias", "between -100 and 100 for each token", bias)
    for token_id in request.stop_token_ids or ():
        if not 0 <= token_id < vocab_size:
            raise bad_value("stop_token_ids", f"ids from 0 to {vocab_size - 1}", token_id)
    limit = request.token_limit
    if request.min_tokens is not None and limit is not None and request.min_tokens > limit:
        raise bad_value("min_tokens", f"at most max_tokens, here {limit}", request.min_tokens)
    if request.top_logprobs and not request.logprobs:
        raise bad_value("top_logprobs", "0 unless logprobs is true", request.top_logprobs)


def _check_output(request: ChatRequest) -> None:
    if len(request.stops) > MAX_STOPS:
        raise bad_value("stop", f"at most {MAX_STOPS} strings", len(request.stops))
    for stop in request.stops:
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise bad_value("stop", f"strings of 1 to {MAX_STOP_CHARS} characters", stop)
    if request.stream_options is not None and not request.stream:
        raise ApiError(
            400,
            "stream_options must be left out unless stream is true",
            param="stream_options",
            code="invalid_value",
        )
    if request.response_format is not None and request.response_format.type != "text":
        raise bad_value("response_format", "of type 'text'", request.response_format.type)
    salt = request.cache_salt
    if salt is not None and not 0 < len(salt) <= 128:
        raise bad_value("cache_salt", "a string of 1 to 128 characters", salt)
    if request.request_id is not None and not REQUEST_ID.fullmatch(request.request_id):
        raise bad_value("request_id", "1 to 128 of A-Z a-z 0-9 . _ -", request.request_id)
    _check_tools(request)


def _check_tools(request: ChatRequest) -> None:
    for at, tool in enumerate(request.tools or ()):
        if tool.get("type", "function") != "function":
            raise bad_value(f"tools[{at}].type", "'function'", tool["type"])
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise bad_value(f"tools[{at}].function.name", "a string that is not empty", name)
    if request.tool_choice not in (None, "none", "auto"):
        raise bad_value("tool_choice", "'none' or 'auto'", request.tool_choice)


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
    bytes: list[int]  # true UTF-8, also of a part of a character


class TokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class Logprobs(Struct, frozen=True):
    content: list[TokenLogprob]


class Answer(Struct, frozen=True):
    role: str
    content: str | None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # the same
    tool_calls: list[Call] | UnsetType = UNSET


class AnswerChoice(Struct, frozen=True):
    index: int
    message: Answer
    logprobs: Logprobs | None
    finish_reason: str


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
    object: str = "chat.completion"


class ModelCard(Struct, frozen=True):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "nanovllm"


class ModelList(Struct, frozen=True):
    data: list[ModelCard]
    object: str = "list"
