"""ASGI application: routes, authorisation and error responses.

Decision: raw ASGI. A framework would route a few paths and repeat msgspec's validation, at 2 to 4
us per token on the streaming path.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec

from nanovllm import __version__
from nanovllm.config import Server as ServerConfig
from nanovllm.log import fields
from nanovllm.server.access import METRICS as METRICS, Access
from nanovllm.server.adapters import LOAD, MAX_BYTES, UNLOAD, RuntimeAdapters
from nanovllm.server.asgi import (
    JSON,
    ClientLeftError,
    Receive,
    Scope,
    Send,
    Writer,
    header,
    read_body,
    unless_left,
)
from nanovllm.server.debug_steps import DEBUG, page_handlers
from nanovllm.server.engines import Engines
from nanovllm.server.errors import ApiError, shutting_down, unknown_model, unknown_path
from nanovllm.server.handover import (
    NoHandoverError,
    answer_without_pages,
    is_left_to_decode,
    kept_headers,
)
from nanovllm.server.large import LARGE_BYTES, MANY_MESSAGES, LargeBodies, Room, transfer_of
from nanovllm.server.metrics import OTHER_PATH, HttpCounts
from nanovllm.server.orders import with_grammar
from nanovllm.server.page_files import Handler
from nanovllm.server.protocol import REQUEST_ID, ChatRequest
from nanovllm.server.refusals import RefusalLog
from nanovllm.server.served import Served
from nanovllm.server.stream import CLIENT_LEFT, Stream
from nanovllm.server.template import Prompt
from nanovllm.transfer.params import TransferParams, used_ticket

log = logging.getLogger("server")
CHAT = "/v1/chat/completions"
RENDER = f"{CHAT}/render"  # the token ids of a prompt, for routers that read cache events
MODELS = "/v1/models"
TEXT = b"text/plain; charset=utf-8"
PROBES = ("/health", "/ready")  # monitoring systems have no key
READING = ("GET", "HEAD")
QUIET_S = 10.0  # seconds without events after which a stream gets a comment
MAX_LARGE_BODIES = 4  # number of bodies of the maximum size that fit at once
Prepare = Callable[[Scope, Receive], Awaitable[tuple[ChatRequest, Prompt]]]
OUTSIDE = (401, 403, 404, 405, 415)  # statuses whose log lines are limited in rate


class App:
    def __init__(
        self,
        engines: Engines,
        served: Served,
        config: ServerConfig,
        counts: HttpCounts,
        metrics: Handler,
        threads: Executor,
        large: LargeBodies,
        access: Access,
        adapters: RuntimeAdapters | None = None,
    ) -> None:
        """`threads` renders and tokenises prompts of small bodies; `large` handles large bodies.

        Without `adapters`, they cannot be changed.
        """
        self._adapters = adapters
        self._posts = (CHAT, RENDER) if adapters is None else (CHAT, RENDER, LOAD, UNLOAD)
        self.access = access
        self.refusals = RefusalLog()
        self.is_draining = False  # new requests are refused, and /health answers 503
        self._streams: set[Stream] = set()
        self._preparing: set[asyncio.Task[Any]] = set()  # requests without a `Stream` yet
        self._engines = engines
        self._served = served
        self._max_body_bytes = config.max_body_bytes
        self._key = None if config.api_key is None else config.api_key.encode()
        self._threads = threads
        self._large = large
        large.decline = self._decline
        self._room = Room(MAX_LARGE_BODIES * config.max_body_bytes)
        self._counts = counts
        self._answers: dict[str, Callable[[], tuple[bytes, bytes]]] = {
            MODELS: self._models,
            "/health": self._health,
            "/ready": partial(self._health, b"ready"),
            "/version": self._version,
        }
        self._handlers = {**page_handlers(engines, config), METRICS: metrics}

    @property
    def is_idle(self) -> bool:
        """True if no request is open, including those whose body is still being read."""
        return not (self._streams or self._preparing)

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
        except NoHandoverError as error:
            self._leave_to_decode(scope, writer, error.failure, request_id)
        except asyncio.CancelledError:  # by `end_all`
            if not writer.status:
                self._refuse(scope, writer, shutting_down(), request_id)
        except Exception:
            log.exception("request %s", fields(id=request_id, status=500))
            self._refuse(scope, writer, ApiError(500, "internal error"), request_id)
        finally:
            self._counts.responses[self._route(scope), writer.status or CLIENT_LEFT] += 1

    @property
    def num_open(self) -> int:
        """Number of requests whose answer is not complete."""
        return sum(not stream.is_over for stream in self._streams) + len(self._preparing)

    def end_all(self) -> int:
        """Answer all open requests with 503 and return their number."""
        num_cut = self.num_open
        for stream in list(self._streams):
            stream.fail(shutting_down())
        for task in self._preparing:
            task.cancel()
        return num_cut

    def _route(self, scope: Scope) -> str:
        """Return the path as a metric label. The set of labels is bounded."""
        path: str = scope["path"]
        if path.startswith(f"{MODELS}/"):
            return MODELS
        return (
            path
            if path in self._posts or path in self._answers or path in self._handlers
            else OTHER_PATH
        )

    async def _answer(
        self, scope: Scope, receive: Receive, writer: Writer, request_id: str
    ) -> None:
        self.access.check(scope)
        path: str = scope["path"]
        handler, answer = self._handlers.get(path), self._answers.get(path)
        if self.access.is_for_metrics(scope):
            if path not in (METRICS, *PROBES):
                text = f"this port has {METRICS}, /health and /ready only; use server.port"
                raise ApiError(404, text, code="not_found")
        elif path == METRICS and self.access.opens_metrics(scope):
            pass
        elif path not in PROBES and (handler is None or path.startswith((DEBUG, METRICS))):
            self._authorise(scope)
        if path.startswith(f"{MODELS}/"):
            answer = partial(self._model, path.removeprefix(f"{MODELS}/"))
        if path not in self._posts and answer is None and handler is None:
            raise unknown_path(path)
        methods = ("POST",) if path in self._posts else READING
        if scope["method"] not in methods:
            text = f"{path[:200]} accepts {methods[0]}, not {scope['method'][:20]}"
            allow = [(b"allow", ", ".join(methods).encode())]
            raise ApiError(405, text, code="method_not_allowed", headers=allow)
        if handler is not None:
            await handler(scope, writer)
        elif answer is not None:
            writer.respond(200, *answer(), [(b"x-request-id", request_id.encode())])
        elif path == CHAT:
            await self._chat(scope, receive, writer, request_id)
        elif path == RENDER:
            await self._render(scope, receive, writer, request_id)
        else:
            await self._change(scope, receive, writer)

    async def _change(self, scope: Scope, receive: Receive, writer: Writer) -> None:
        """Load or unload an adapter."""
        assert self._adapters is not None
        body = await read_body(scope, receive, MAX_BYTES, lambda _: None)
        writer.respond(200, TEXT, await self._adapters.answer(scope["path"], body), [])

    def _authorise(self, scope: Scope) -> None:
        if self._key is None:
            return
        scheme, _, key = (header(scope, b"authorization") or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
            text = "this server needs the header 'Authorization: Bearer <api key>'"
            raise ApiError(401, text, code="invalid_api_key")

    def _refuse(self, scope: Scope, writer: Writer, error: ApiError, request_id: str) -> None:
        """Respond with an error. Call only before a response has begun."""
        if scope["path"] == CHAT:
            self._counts.rejected[error.code or "error"] += 1
        if error.status in OUTSIDE:
            self.refusals.request(scope, error, request_id)
        elif scope["path"] == CHAT:
            log.info("request %s", fields(id=request_id, status=error.status, error=error.code))
        headers = [(b"x-request-id", request_id.encode()), *error.headers]
        writer.respond(error.status, JSON, error.body(), headers)

    def _leave_to_decode(
        self, scope: Scope, writer: Writer, failure: ApiError, request_id: str
    ) -> None:
        """Answer a prefill request that failed, so that the router goes on to a decode server."""
        if scope["path"] != CHAT:
            self._refuse(scope, writer, failure, request_id)
            return
        self._counts.rejected[failure.code or "error"] += 1
        log.info("request %s", fields(id=request_id, status=200, error=failure.code))
        headers = [(b"x-request-id", request_id.encode()), *kept_headers(failure)]
        writer.respond(200, JSON, answer_without_pages(request_id, self._served.name), headers)

    async def _chat(self, scope: Scope, receive: Receive, writer: Writer, request_id: str) -> None:
        begun = time.monotonic()
        request, prompt = await self._counted(scope, receive, self._prepared)
        request_id = request.request_id or request_id
        route = self._engines.route(request, prompt, self._served.adapter_of(request))
        with self._handing_over(lambda _: request.transfer):
            stream = Stream(
                request,
                prompt,
                self._served,
                route.client,
                writer=writer,
                metrics=route.metrics,
                request_id=request_id,
                seed=secrets.randbits(63),
                quiet_s=QUIET_S,
                begun=begun,
            )
            stream.open()
        self._streams.add(stream)
        route.sent()
        try:
            await stream.run(receive)
        finally:
            self._streams.discard(stream)
            route.done(stream.tally.num_cached)
            log.info("request %s", stream.summary)

    async def _render(
        self, scope: Scope, receive: Receive, writer: Writer, request_id: str
    ) -> None:
        """Respond with the prompt's token ids, under vLLM's name."""
        request, prompt = await self._counted(scope, receive, self._prompted)
        body = {"model": request.model or self._served.name, "token_ids": prompt.ids}
        headers = [(b"x-request-id", request_id.encode())]
        writer.respond(200, JSON, msgspec.json.encode(body), headers)

    async def _counted(
        self, scope: Scope, receive: Receive, prepare: Prepare
    ) -> tuple[ChatRequest, Prompt]:
        """Return what `prepare` makes of the body. Meanwhile, the request counts as open.

        Raise ApiError if its body is not plain JSON, or if the server shuts down.
        """
        task = asyncio.current_task()
        assert task is not None
        self._preparing.add(task)
        try:
            if self.is_draining and not self._served.is_prefill:
                raise shutting_down()
            check_headers(scope)
            return await prepare(scope, receive)
        finally:
            self._preparing.discard(task)

    async def _prepared(self, scope: Scope, receive: Receive) -> tuple[ChatRequest, Prompt]:
        """Read and check the body. Return the request and its prompt, with the grammar if there is
        one.
        """
        request, prompt = await self._prompted(scope, receive)
        if request.transfer.role == "prefill":
            return request.for_prefill, prompt
        if request.constrained_by is not None or request.tools:
            with self._handing_over(lambda _: request.transfer):
                prompt = await asyncio.get_running_loop().run_in_executor(
                    self._threads, partial(with_grammar, request, prompt, self._served)
                )
        return request, prompt

    async def _prompted(self, scope: Scope, receive: Receive) -> tuple[ChatRequest, Prompt]:
        served, is_late = self._served, self.is_draining
        with self._room.taken() as grown:
            body = await read_body(scope, receive, self._max_body_bytes, grown)
            with self._handing_over(partial(transfer_of, body)):
                request: ChatRequest | None = None
                if len(body) <= LARGE_BYTES:
                    if is_late:
                        raise shutting_down()
                    request = served.request(body)
                if request is None or len(request.messages) > MANY_MESSAGES:
                    prepared = await unless_left(receive, self._large.prepare(body))
                    if is_late:  # refused only now, since the subprocess has read the role
                        raise shutting_down(prepared[0].transfer)
                    return prepared
        with self._handing_over(lambda _: request.transfer):
            prompt = await asyncio.get_running_loop().run_in_executor(
                self._threads, served.template.prompt, request, served.max_model_tokens
            )
        return request, prompt

    @contextmanager
    def _handing_over(
        self, transfer: Callable[[ApiError | ClientLeftError], TransferParams]
    ) -> Iterator[None]:
        """Decline the ticket of a request that ends in this block.

        Raise NoHandoverError if it is a prefill request that a decode server may serve.

        Decision: after a status of 5xx a router may try another decode server, which needs the
        ticket. Then the lease ends by itself.
        """
        try:
            yield
        except (ApiError, ClientLeftError) as error:
            is_final = not isinstance(error, ApiError) or error.status < 500
            found = transfer(error)
            if is_final and (text := used_ticket(found)):
                self._engines.decline(text)
            is_prefill = found.role == "prefill"
            if is_prefill and isinstance(error, ApiError) and is_left_to_decode(error):
                raise NoHandoverError(error) from None
            raise

    def _decline(self, ticket: str) -> None:
        """Decline the ticket of a cancelled request, whose client has left.

        Decision: `end_all` cancels requests, too. They may be tried elsewhere.
        """
        if not self.is_draining:
            self._engines.decline(ticket)

    def _models(self) -> tuple[bytes, bytes]:
        cards = [self._card(name) for name in (*self._served.names, *self._served.adapters)]
        return JSON, msgspec.json.encode({"data": cards, "object": "list"})

    def _model(self, name: str) -> tuple[bytes, bytes]:
        names = [*self._served.names, *self._served.adapters]
        if name not in names and name not in self._served.paths:
            raise unknown_model(name, names)
        return JSON, msgspec.json.encode(self._card(name))

    def _card(self, name: str) -> dict[str, object]:
        """Return the entry of a model or an adapter, whose root is the name of its folder."""
        if name in self._served.adapters:
            folder = self._served.adapters[name]
            parent: dict[str, object] = {"root": folder, "parent": self._served.names[0]}
            return {**self._card(self._served.names[0]), "id": name, "max_model_len": None} | parent
        return {
            "id": name,
            "root": self._served.names[0],
            "created": self._served.created,
            "max_model_len": self._served.max_model_tokens,
            "object": "model",
            "owned_by": "nanovllm",
        }

    def _health(self, word: bytes = b"ok") -> tuple[bytes, bytes]:
        """Return `word` as the status; raise ApiError (503) if the server drains or an engine has
        failed.
        """
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="unhealthy")
        if (problem := self._engines.problem()) is not None:
            raise problem
        return JSON, b'{"status":"%b"}' % word

    def _version(self) -> tuple[bytes, bytes]:
        return JSON, msgspec.json.encode({"version": __version__})


def check_headers(scope: Scope) -> None:
    """Raise ApiError if the headers describe a body that is not plain JSON."""
    kind = (header(scope, b"content-type") or b"missing").partition(b";")[0].strip()
    if kind.lower() != JSON:
        text = f"the content-type must be application/json, not {kind[:100].decode('latin-1')}"
        raise ApiError(415, text, code="invalid_content_type")
    if (coding := header(scope, b"content-encoding") or b"identity").lower() != b"identity":
        shown = coding[:100].decode("latin-1")
        text = f"the body must not be compressed (content-encoding: {shown}); send plain JSON"
        raise ApiError(400, text, code="invalid_content_encoding")
