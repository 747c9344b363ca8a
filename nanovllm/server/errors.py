"""Errors of refused requests: an HTTP status and the OpenAI error body."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from nanovllm.transfer.params import TransferParams

T = TypeVar("T")

MAX_MESSAGE_CHARS = 1000  # a request cannot inflate its own refusal
MAX_VALUE_CHARS = 100  # of a value that a message quotes
MAX_SEARCHED = 16 << 10  # bytes of a body in which a wrong text is searched for
HALF_ESCAPED = re.compile(rb"\\u[dD][89a-fA-F]")
HALF = re.compile("[\ud800-\udfff]")  # in a decoded text, where whole pairs are characters
HEADERS = {
    401: [(b"www-authenticate", b"Bearer")],
    413: [(b"connection", b"close")],  # keeps the client from sending the rest of the body
    503: [(b"retry-after", b"1")],
}

CHAT = "this server generates text at POST /v1/chat/completions only"
LORA = "adapters can be changed if adapters.runtime is true"
INSTEAD = {
    **dict.fromkeys(("/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"), CHAT),
    "/tokenize": "POST /v1/chat/completions/render returns the token ids of a prompt",
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), LORA),
}
# Ends of paths that clients request if their base URL has no /v1, or has it twice.
ROUTES = ("/chat/completions", "/chat/completions/render", "/models")


class ApiError(Exception):
    """Error that ends a request. `param` is the path of the field at fault: `messages[0].role`.

    `transfer` is the request's part in a transfer, or None if it is not known yet.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        message = shortened(message, MAX_MESSAGE_CHARS)
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = [*headers, *HEADERS.get(status, ())]
        self.transfer: TransferParams | None = None

    def body(self) -> bytes:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def bad_value(param: str, requirement: str, value: object) -> ApiError:
    """Return an error like "temperature must be between 0 and 2, not 3.0".

    A null counts as missing.
    """
    if value is None:
        return invalid_field(param, f"is missing or null; it must be {requirement}")
    shown = shortened(repr(value), MAX_VALUE_CHARS)
    return invalid_field(param, f"must be {requirement}, not {shown}")


def shortened(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


def invalid_field(param: str, complaint: str) -> ApiError:
    """Return an error like "stream_options must be left out unless stream is true"."""
    return ApiError(400, f"{param} {complaint}", param=param, code="invalid_value")


def too_long(num_tokens: int, context: int, *, is_least: bool = False) -> ApiError:
    """Return the error for a prompt that leaves no room for an answer.

    `is_least` means that `num_tokens` is a lower bound.
    """
    counted = f"at least {num_tokens}" if is_least else str(num_tokens)
    text = (
        f"messages: the prompt has {counted} tokens; with at least one token to generate "
        f"it must have at most {context - 1} (the context is {context})"
    )
    return ApiError(400, text, param="messages", code="context_length_exceeded")


def unknown_model(model: str, names: Iterable[str]) -> ApiError:
    listed = " or ".join(map(repr, names))
    text = f"the model {model[:200]!r} does not exist; this server has {listed}"
    return ApiError(404, text, param="model", code="model_not_found")


def unknown_path(path: str) -> ApiError:
    cure = INSTEAD.get(path, "")
    for route in ROUTES:
        if path.rstrip("/").endswith(route):
            cure = f"use /v1{route} (a client's base URL ends with /v1, as in http://HOST:PORT/v1)"
    text = f"{path[:200]} does not exist" + (f"; {cure}" if cure else "")
    return ApiError(404, text, code="not_found")


def shutting_down(transfer: TransferParams | None = None) -> ApiError:
    close = [(b"connection", b"close")]
    error = ApiError(503, "the server is shutting down", code="shutting_down", headers=close)
    error.transfer = transfer
    return error


def bad_text(body: bytes) -> ApiError | None:
    """Return the error for a body that is not UTF-8, with the place of the first wrong byte."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        text = f"the body is not valid UTF-8: {error.reason} (byte {error.start})"
        return ApiError(400, text, code="invalid_json")
    return None


def bad_body(body: bytes, error: msgspec.DecodeError | UnicodeDecodeError) -> ApiError:
    """Return the error for a body that msgspec refuses: not JSON, or a field of the wrong type.

    msgspec raises DecodeError for text that is not UTF-8 since 0.23, UnicodeDecodeError before.
    """
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        if (refusal := bad_text(body)) is not None:
            return refusal
        if (refusal := half_pair(body)) is not None:
            return refusal
        return ApiError(400, f"the body is not valid JSON: {text}", code="invalid_json")
    complaint, _, place = text.partition(" - at ")
    path = re.search(r"\$\.([\w.\[\]]*\w\]?)", place)  # without the [...] of a mapping's value
    missing = re.search(r"required field `(\w+)`", complaint)
    param = ".".join(found[1] for found in (path, missing) if found) or None
    text = f"{param} is missing" if missing else f"{param or 'the body'}: {complaint}"
    return ApiError(400, text, param=param, code="invalid_type")


def decoded(body: bytes, decode: Callable[[bytes], T]) -> T:
    """Return what `decode`, of msgspec, makes of a body. Raise ApiError if it can't."""
    try:
        return decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_body(body, error) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None


def half_pair(body: bytes) -> ApiError | None:
    """Return the error for a body that has half of a surrogate pair, such as "\\ud800", in a text.

    Return None if there is none, or if the body is not JSON for another reason. In a large body it
    is not searched for, since that takes much longer than to decode the body.
    """
    if len(body) > MAX_SEARCHED or HALF_ESCAPED.search(body) is None:
        return None
    try:
        place = first_half(json.loads(body.decode()))
    except (ValueError, RecursionError):
        return None
    if place is None:
        return None
    path, half = place
    path, escaped = shortened(path, MAX_VALUE_CHARS), ascii(half)[1:-1]
    text = f"{path or 'the body'}: {escaped} is half of a surrogate pair; send both halves"
    return ApiError(400, text, param=path or None, code="invalid_value")


def first_half(body: object) -> tuple[str, str] | None:
    """Return the path of the first text with half of a surrogate pair, and the half.

    For a key, it is the path of its mapping.
    """
    rest: list[tuple[Any, Any, str]] = [(body, None, "")]  # value, parent's entry, step from it
    while rest:
        entry = value, _, _ = rest.pop()
        texts, inner = [value] if isinstance(value, str) else [], list[tuple[Any, Any, str]]()
        if isinstance(value, list):
            inner = [(one, entry, f"[{at}]") for at, one in enumerate(value)]
        elif isinstance(value, dict):
            texts = list(value)
            inner = [(one, entry, f".{shortened(key, 50)}") for key, one in value.items()]
        if half := next(filter(None, map(HALF.search, texts)), None):
            return path_of(entry), half[0]
        rest += reversed(inner)
    return None


def path_of(entry: tuple[Any, Any, str]) -> str:
    """Return the path of an entry of `first_half`."""
    steps: list[str] = []
    while entry is not None:
        _, entry, step = entry
        steps.append(step)
    return "".join(reversed(steps)).removeprefix(".")
