"""Body of a request to /v1/chat/completions: fields, types and ranges.

Also checks combinations of fields. Independent of the engine and the model, except for the limits
passed in.

Decision: unknown fields are ignored, since clients send many; defined ones are strict. A field that
is null counts as missing.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from functools import cached_property
from types import NoneType
from typing import Any

import msgspec
from msgspec import Struct, structs

from nanovllm.server.errors import (
    ApiError,
    bad_value,
    decoded,
    invalid_field,
    unknown_model,
)
from nanovllm.server.parsers.base import FUNCTION_NAME
from nanovllm.server.ranges import Range, check_biases, check_token_ids, ranges
from nanovllm.server.thinking import EFFORTS, ThinkingFields, check_word, read_thinking
from nanovllm.server.tool_choice import ToolChoice, tool_choice
from nanovllm.server.unsupported import check_structure, check_unsupported, unsupported
from nanovllm.transfer.params import PLAIN, TransferParams, parse_params

MAX_STOPS = 16
MAX_STOP_CHARS = 1024  # matching costs up to this per token
MAX_TOOLS = 512
WIDEST = ranges(1 << 24, raise_priority=False)  # no server has a longer context
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 128, 128
FORMATS = ("text", "json_object", "json_schema", "structural_tag")
STRUCTURES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# Content parts with a `text`. vLLM also accepts the last two, which are of OpenAI's responses.
TEXT_PARTS = ("text", "input_text", "output_text")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Echoed in a header. Routers put the addresses of two servers in it.
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,256}")


class Part(Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None  # replaces the text if the type is "refusal"


class CalledFunction(Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class PastCall(Struct, frozen=True):
    function: CalledFunction
    id: str | None = None


class ChatMessage(Struct, frozen=True):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[PastCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # alias of `reasoning` in other servers
    prefix: Any = None  # refused if true

    @property
    def text(self) -> str | None:
        """Text of the message.

        Parts are joined by newlines as in vLLM, so that prompts stay comparable. An earlier refusal
        by the model counts as its text.
        """
        if isinstance(self.content, list):
            return "\n".join(part.text or part.refusal or "" for part in self.content)
        return self.refusal if self.content is None else self.content


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ChatRequest(ThinkingFields, frozen=True, kw_only=True, dict=True):
    messages: list[ChatMessage]
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
    logit_bias: dict[str, Any] | None = None  # check_biases names the key at fault
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    # extensions
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: str | None = None
    user: str | None = None  # with several engines, a user's requests go to the same one
    priority: int | None = None
    request_id: str | None = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream_interval: int | None = None
    structured_outputs: dict[str, Any] | None = None
    kv_transfer_params: Any = None  # of routers between prefill and decode servers

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def schemas(self) -> dict[str, object] | None:
        """Parameter schemas by name of the functions that may be called; None if calls are
        forbidden.
        """
        functions = [tool["function"] for tool in self.tools or ()]
        schemas = {function["name"]: function.get("parameters") for function in functions}
        return None if self.choice_of_tools.mode == "none" else schemas

    @cached_property
    def choice_of_tools(self) -> ToolChoice:
        """The validated `tool_choice`. Raise ApiError."""
        names = [tool["function"]["name"] for tool in self.tools or ()]
        return tool_choice(self.tool_choice, names)

    @cached_property
    def transfer(self) -> TransferParams:
        """The validated `kv_transfer_params`. Raise ApiError."""
        if self.kv_transfer_params is None:
            return PLAIN
        try:
            return parse_params(self.kv_transfer_params)
        except ValueError as error:
            text = str(error)
            raise ApiError(400, text, param="kv_transfer_params", code="invalid_value") from None

    @property
    def for_prefill(self) -> ChatRequest:
        """The part of the request that a prefill server computes: one token after the prompt.

        Nothing is left that could be refused because of the missing rest of the text.
        """
        return structs.replace(
            self,
            n=1,
            max_tokens=1,
            max_completion_tokens=None,
            min_tokens=None,
            stop=None,
            logprobs=None,
            top_logprobs=None,
            response_format=None,
            structured_outputs=None,
            thinking_token_budget=None,
            tools=None,
            tool_choice=None,
            bad_words=None,
            allowed_token_ids=None,
        )

    @property
    def constrained_by(self) -> str | None:
        """The first field that requires a form of output which only a grammar can ensure."""
        if self.structured_outputs is not None:
            return "structured_outputs"
        if (self.response_format or {}).get("type", "text") != "text":
            return "response_format"
        if self.thinking_token_budget not in (None, -1):
            return "thinking_token_budget"
        choice = self.choice_of_tools
        if choice.mode == "required" or len(choice.names) < len(self.schemas or ()):
            return "tool_choice"
        if self.parallel_tool_calls is False and self.schemas:
            return "parallel_tool_calls"
        is_strict = any(tool["function"].get("strict") for tool in self.tools or ())
        return "tools" if is_strict and choice.mode != "none" else None

    @property
    def spells_markers(self) -> bool:
        """True if a structural tag of the client may make the model spell markers by letters."""
        kind = (self.response_format or {}).get("type")
        return kind == "structural_tag" or "structural_tag" in (self.structured_outputs or {})

    @property
    def token_limit(self) -> int | None:
        """The client's limit of tokens per choice, None if there is none."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


_decoder = msgspec.json.Decoder(ChatRequest)


def parse_request(
    body: bytes,
    *,
    model: str,
    vocab_size: int,
    allowed: dict[str, Range] = WIDEST,
    other_names: Sequence[str] = (),
    paths: Container[str] = (),
    adapters: Sequence[str] = (),
) -> ChatRequest:
    """Return a request with every field in range. Raise ApiError.

    `allowed` has the ranges of this server. `other_names` and `paths` are aliases of `model`, as is
    an empty string. `adapters` are further names. A refusal lists all but the paths.
    """
    try:
        request = decoded(body, _decoder.decode)
    except ApiError as refusal:
        if refusal.param in allowed and "out of range" in refusal.message:
            text = f"must be {allowed[refusal.param]}; the value is far outside"
            raise invalid_field(refusal.param, text) from None
        raise
    names = [model, *other_names, *adapters]
    if request.model and request.model not in names and request.model not in paths:
        raise unknown_model(request.model, names)
    check_unsupported(request)
    for field, limits in allowed.items():
        if (value := getattr(request, field)) is not None and not limits.holds(value):
            raise bad_value(field, str(limits), value)
    request = read_thinking(request)
    _check_messages(request.messages)
    _check_continuation(request)
    _check_sampling(request)
    _check_token_ids(request, vocab_size)
    _check_output(request)
    return request


def _check_messages(messages: list[ChatMessage]) -> None:
    if not messages:
        raise bad_value("messages", "a list of at least one message", messages)
    for at, message in enumerate(messages):
        if message.role not in ROLES:
            raise bad_value(f"messages[{at}].role", f"one of {', '.join(ROLES)}", message.role)
        if message.prefix:
            raise unsupported(f"messages[{at}].prefix", "use continue_final_message")
        for part_at, part in enumerate(message.content if type(message.content) is list else ()):
            where = f"messages[{at}].content[{part_at}]"
            is_refusal = part.type == "refusal" and message.role == "assistant"
            if part.type not in TEXT_PARTS and not is_refusal:
                raise bad_value(f"{where}.type", "'text': this model accepts only text", part.type)
            field = "refusal" if is_refusal else "text"
            if getattr(part, field) is None:
                raise bad_value(f"{where}.{field}", "a string", None)


def _check_continuation(request: ChatRequest) -> None:
    if not request.continue_final_message:
        return
    if request.add_generation_prompt:
        text = "must be left out if add_generation_prompt is true"
        raise invalid_field("continue_final_message", text)
    last = request.messages[-1]
    if last.role != "assistant" or not last.text or last.tool_calls:
        where = f"messages[{len(request.messages) - 1}]"
        raise bad_value(where, "an assistant's message with text, to be continued", last.role)


def _check_sampling(request: ChatRequest) -> None:
    sizes = [len(word) for word in request.bad_words or ()]
    if len(sizes) > MAX_BAD_WORDS or not all(0 < size <= MAX_BAD_WORD_CHARS for size in sizes):
        text = f"at most {MAX_BAD_WORDS} words of 1 to {MAX_BAD_WORD_CHARS} characters"
        raise bad_value("bad_words", text, request.bad_words)
    if request.top_logprobs and not request.logprobs:
        raise bad_value("top_logprobs", "0 unless logprobs is true", request.top_logprobs)
    limit = None if request.transfer.role == "prefill" else request.token_limit
    if request.min_tokens is not None and limit is not None and request.min_tokens > limit:
        raise bad_value("min_tokens", f"at most max_tokens, here {limit}", request.min_tokens)


def _check_token_ids(request: ChatRequest, vocab_size: int) -> None:
    check_biases(request.logit_bias or {}, vocab_size)
    check_token_ids("stop_token_ids", request.stop_token_ids or (), vocab_size)
    check_token_ids("allowed_token_ids", request.allowed_token_ids or (), vocab_size)
    if request.allowed_token_ids == []:
        raise bad_value("allowed_token_ids", "at least one id", [])


def _check_output(request: ChatRequest) -> None:
    if len(request.stops) > MAX_STOPS:
        raise bad_value("stop", f"at most {MAX_STOPS} strings", len(request.stops))
    for stop in request.stops:
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise bad_value("stop", f"strings of 1 to {MAX_STOP_CHARS} characters", stop)
    if request.stream_options is not None and not request.stream:
        raise invalid_field("stream_options", "must be left out unless stream is true")
    check_word("reasoning_effort", request.reasoning_effort, EFFORTS)
    salt = request.cache_salt
    if salt is not None and not 0 < len(salt) <= 128:
        raise bad_value("cache_salt", "a string of 1 to 128 characters", salt)
    if request.request_id is not None and not REQUEST_ID.fullmatch(request.request_id):
        raise bad_value(
            "request_id", "1 to 256 characters of A-Z a-z 0-9 . _ : -", request.request_id
        )
    _check_format(request)
    _check_tools(request)


def _check_format(request: ChatRequest) -> None:
    response_format, other = request.response_format, request.structured_outputs
    if response_format is not None:
        kind = response_format.get("type")
        if kind not in FORMATS:
            raise bad_value("response_format.type", f"one of {', '.join(FORMATS)}", kind)
        if kind == "json_object" and response_format.get("schema"):
            raise unsupported("response_format.schema", "use the type json_schema")
        if kind == "json_schema":
            body = response_format.get("json_schema")
            if not isinstance(body, dict):
                raise bad_value("response_format.json_schema", "an object with the schema", body)
            if body.get("schema") is None:
                raise bad_value("response_format.json_schema.schema", "a JSON Schema", None)
            _check_flag("response_format.json_schema.strict", body.get("strict"))
    if other is None:
        return
    if response_format is not None and response_format["type"] != "text":
        raise invalid_field("structured_outputs", "cannot be given together with response_format")
    check_structure(other)
    for flag in ("json_object", "strict", "disable_any_whitespace"):
        _check_flag(f"structured_outputs.{flag}", other.get(flag))
    named = [field for field in STRUCTURES if other.get(field) not in (None, False)]
    if len(named) != 1:
        given = named or [key for key, value in other.items() if value not in (None, False)]
        raise bad_value("structured_outputs", f"exactly one of {', '.join(STRUCTURES)}", given)


def _check_tools(request: ChatRequest) -> None:
    if len(request.tools or ()) > MAX_TOOLS:
        raise bad_value("tools", f"at most {MAX_TOOLS} tools", len(request.tools or ()))
    for at, tool in enumerate(request.tools or ()):
        if tool.get("type") not in (None, "function"):
            raise bad_value(f"tools[{at}].type", "'function'", tool["type"])
        function = tool.get("function")
        if not isinstance(function, dict):
            raise bad_value(f"tools[{at}].function", "an object with the function's name", function)
        name = function.get("name")
        if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
            requirement = "1 to 256 characters without white space, quotes and <>"
            raise bad_value(f"tools[{at}].function.name", requirement, name)
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise bad_value(f"tools[{at}].function.parameters", "a JSON Schema", parameters)
        _check_flag(f"tools[{at}].function.strict", function.get("strict"))
    _ = request.choice_of_tools


def _check_flag(where: str, value: object) -> None:
    if type(value) not in (bool, NoneType):
        raise bad_value(where, "true or false", value)
