"""Answers of a prefill server without pages, so that a decode server computes the prompt.

Decision: a router relays an error of a prefill server to the client, and does not try the decode
server. So an error that the decode server need not share is an answer of status 200 without
`kv_transfer_params`. Such are faults and limits of this server: its queue is full, its engine was
lost, it shuts down, its context is shorter, or it does not have the adapter.
"""

from __future__ import annotations

import time

import msgspec

from nanovllm.server.answers import Tally
from nanovllm.server.asgi import Header
from nanovllm.server.errors import ApiError
from nanovllm.server.shapes import Answer, AnswerChoice, ChatCompletion

OWN_LIMITS = {"context_length_exceeded", "model_not_found"}


class NoHandoverError(Exception):
    """Failure of a prefill request that is left to the decode server."""

    def __init__(self, failure: ApiError) -> None:
        super().__init__(failure.message)
        self.failure = failure


def is_left_to_decode(failure: ApiError) -> bool:
    """Return True if a decode server may serve a request that failed like this."""
    return failure.status >= 500 or failure.code in OWN_LIMITS


def kept_headers(failure: ApiError) -> list[Header]:
    """Return the headers that such an answer has, too: that the connection will be closed."""
    return [header for header in failure.headers if header[0] == b"connection"]


def answer_without_pages(request_id: str, model: str) -> bytes:
    """Return the body of an answer without text, usage or an object for the decode server."""
    completion = ChatCompletion(
        id=f"chatcmpl-{request_id}",
        created=int(time.time()),
        model=model,
        choices=[AnswerChoice(0, Answer("assistant", ""), None, "length")],
        usage=Tally(0, []).usage(),
    )
    return msgspec.json.encode(completion)
