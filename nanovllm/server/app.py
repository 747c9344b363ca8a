"""The HTTP surface: which routes exist, who may use them, what errors look like.

Decision: raw ASGI. A framework would route four paths and validate what msgspec has validated
already, at 2 to 4 us a token on the streaming path.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import Executor

import msgspec

from nanovllm.config import Server as ServerConfig
from nanovllm.ipc.client import EngineClient
from nanovllm.log import fields
from nanovllm.server.asgi import (
    JSON,
    ClientLeftError,
    Receive,
    Scope,
    Send,
    Writer,
    header,
    read_body,
)
from nanovllm.server.errors import ApiError
from nanovllm.server.metrics import Metrics, render
from nanovllm.server.protocol import REQUEST_ID, parse_request
from nanovllm.server.reply import CLIENT_LEFT, Reply
from nanovllm.server.served import Served

log = logging.getLogger("server")
CHAT = "/v1/chat/completions"
QUIET_S = 10.0  # a stream without events for so long gets a comment
METRICS_TEXT = b"text/plain; version=0.0.4; charset=utf-8"


class App:
    def __init__(
        self,
        client: EngineClient,
        served: Served,
        config: ServerConfig,
        threads: Executor,
    ) -> None:
        """`threads` render and tokenise prompts."""
        self.is_draining = False  # takes no new requests, and /health says so
        self.replies: set[Reply] = set()
        self._client = client
        self._served = served
        self._stall_s = config.stall_s
        self._max_body_bytes = config.max_body_bytes
        self._key = None if config.api_key is None else config.api_key.encode()
        self._threads = threads
        self._metrics = Metrics()
        self._pages: dict[str, Callable[[], tuple[bytes, bytes]]] = {
            "/v1/models": self._models,
            "/health": self._health,
            "/metrics": self._show_metrics,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        named = (header(scope, b"x-request-id") or b"").decode("latin-1")
        request_id = named if REQUEST_ID.fullmatch(named) else secrets.token_hex(16)
        writer = Writer(scope, send)
        try:
            await self._answer(scope, receive, writer, request_id)
        except ClientLeftError:
            log.info("request %s", fields(id=request_id, status=CLIENT_LEFT))
        except ApiError as error:
            self._refuse(scope, writer, error, request_id)
        except Exception:
            log.exception("request %s", fields(id=request_id, status=500))
            self._refuse(scope, writer, ApiError(500, "internal error"), request_id)

    def end_replies(self) -> None:
        """The time for open requests is over."""
        for reply in list(self.replies):
            reply.fail(ApiError(503, "the server is shutting down", code="shutting_down"))

    async def _answer(
        self, scope: Scope, receive: Receive, writer: Writer, request_id: str
    ) -> None:
        path = scope["path"]
        if path != "/health":
            self._authorise(scope)
        if path != CHAT and path not in self._pages:
            raise ApiError(404, f"{path[:200]} does not exist", code="not_found")
        method = "POST" if path == CHAT else "GET"
        if scope["method"] != method:
            text = f"{path} accepts {method}, not {scope['method'][:20]}"
            allow = [(b"allow", method.encode())]
            raise ApiError(405, text, code="method_not_allowed", headers=allow)
        if path == CHAT:
            await self._chat(scope, receive, writer, request_id)
        else:
            kind, body = self._pages[path]()
            writer.respond(200, kind, body, [(b"x-request-id", request_id.encode())])

    def _authorise(self, scope: Scope) -> None:
        if self._key is None:
            return
        scheme, _, key = (header(scope, b"authorization") or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
            text = "this server needs the header 'Authorization: Bearer <api key>'"
            raise ApiError(401, text, code="invalid_api_key")

    def _refuse(self, scope: Scope, writer: Writer, error: ApiError, request_id: str) -> None:
        """Only before a response has begun."""
        if scope["path"] == CHAT:
            self._metrics.rejected[error.code or "error"] += 1
            log.info("request %s", fields(id=request_id, status=error.status, error=error.code))
        more = [(b"x-request-id", request_id.encode()), *error.headers]
        writer.respond(error.status, JSON, error.body(), more)

    async def _chat(self, scope: Scope, receive: Receive, writer: Writer, request_id: str) -> None:
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        served = self._served
        kind = (header(scope, b"content-type") or JSON).partition(b";")[0].strip()
        if kind.lower() != JSON:
            text = f"the content-type must be application/json, not {kind[:100].decode('latin-1')}"
            raise ApiError(400, text, code="invalid_content_type")
        body = await read_body(scope, receive, self._max_body_bytes)
        request = parse_request(
            body,
            model=served.name,
            vocab_size=served.vocab_size,
            context=served.max_model_tokens,
            raise_priority=served.raise_priority,
        )
        request_id = request.request_id or request_id
        reply = Reply(self._client, self._metrics, request_id, writer, quiet_s=QUIET_S)
        loop = asyncio.get_running_loop()
        prompt = await loop.run_in_executor(self._threads, served.template.prompt, request)
        reply.open(request, prompt, served, seed=secrets.randbits(63))
        self.replies.add(reply)
        try:
            await reply.run(receive)
        finally:
            self.replies.discard(reply)
            log.info("request %s", reply.summary)

    def _models(self) -> tuple[bytes, bytes]:
        card = {
            "id": self._served.name,
            "created": self._served.created,
            "max_model_len": self._served.max_model_tokens,
            "object": "model",
            "owned_by": "nanovllm",
        }
        return JSON, msgspec.json.encode({"data": [card], "object": "list"})

    def _health(self) -> tuple[bytes, bytes]:
        client = self._client
        if client.is_lost or self.is_draining:
            text = "the engine is gone" if client.is_lost else "the server is shutting down"
            raise ApiError(503, text, code="unhealthy")
        if (silent_s := client.silent_s) > self._stall_s:
            text = f"the engine has given no sign of life for {silent_s:.0f} s"
            raise ApiError(503, text, code="stalled")
        if (late_s := client.late_s) > self._stall_s:
            text = f"the engine's step takes {late_s:.0f} s longer than any before"
            raise ApiError(503, text, code="stalled")
        return JSON, b'{"status":"ok"}'

    def _show_metrics(self) -> tuple[bytes, bytes]:
        ready = self._client.ready
        return METRICS_TEXT, render(
            self._metrics,
            self._client.stats,
            model=ready.model,
            page_tokens=ready.page_tokens,
            num_pages=ready.num_pages,
            step_age_s=self._client.step_age_s,
            num_open=self._client.num_open,
            num_tasks=len(asyncio.all_tasks()),
        )
