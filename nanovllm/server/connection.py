"""HTTP connection with limits on bytes, headers and time.

The limits apply before any other check of a request, including that of its API key. Routes and the
content of bodies are handled elsewhere.

Decision: `enforce_limits` runs ten times a second for every connection. Timers for each connection
would have to be cancelled, and one left over would keep a closed connection alive.

Decision: a response that is complete before its request has been read does not close the
connection. Unread bytes would reset it, and most clients then lose the response. Further bytes are
read and dropped until the request ends. This stops after LINGER_S without a byte, MOST_LINGER_S in
all or MOST_LINGER_BYTES. If no further request may follow, the writing side closes at once (RFC
9112, 9.6).

Decision: a client that closes only its writing side, as `nc -N` does after a request, counts as
disconnected. It looks like a disconnected one until bytes are sent to it. An answer that is not
streamed sends none before its end, so abandoned requests would keep their slots until then.

Decision: the error of a malformed request waits for the answers of all requests before it, and the
connection ends after it. A client could not match an error that comes earlier, or none at all, with
its requests. An answer with `Connection: close` is the last one in any case.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import struct
import time
from collections import deque
from contextlib import suppress
from enum import Enum
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from nanovllm.config import Server as ServerConfig
from nanovllm.log import fields
from nanovllm.server.asgi import EXTENSION, JSON
from nanovllm.server.errors import ApiError, shutting_down
from nanovllm.server.head import (
    CODE,
    RequestSize,
    after_complete_requests,
    check_head,
    expects_continue,
    host_of_target,
    invalid_http,
    unknown_method,
    unsupported_version,
)
from nanovllm.server.metrics import OTHER_PATH, HttpCounts
from nanovllm.server.refusals import RefusalLog

log = logging.getLogger("server")
LINGER_S = 2.0  # longest pause of a client that goes on sending an already answered request
MOST_LINGER_S = 10.0  # longest time in all for the rest of such a request
MOST_LINGER_BYTES = 256 * 1024 * 1024
# Unsent bytes that the kernel may buffer. They are not counted; the rest stays in our buffer.
KERNEL_UNSENT_BYTES = 64 * 1024
RESET = struct.pack("ii", 1, 0)  # value for SO_LINGER: the kernel discards unsent bytes too
NO_LIMIT = 2**31 - 1
MOST_BEGIN_BYTES = 64 * 1024  # if more come before an unknown method, its request gets a 400


class ConnectionState(Enum):
    """What a connection does with received bytes. `NEXT` has the legal transitions."""

    IDLE = "no request has begun since the latest one was read; empty lines do not count"
    HEAD = "a request has begun, and its headers are not complete"
    METHOD = "the parser does not have the request's method, and its first line is not complete"
    BODY = "the headers of `cycle` are complete, and its body is not"
    REST = "`cycle` is answered, and the rest of its body is dropped"
    LAST = "bytes are ignored; open answers are completed, and then the connection ends"
    LINGER = "all is sent, and the writing side is closed; bytes are dropped"

    __hash__ = object.__hash__  # that of Enum takes longer, and each request enters three states


IDLE, HEAD, METHOD, BODY, REST, LAST, LINGER = ConnectionState
IGNORING = (LAST, LINGER)  # the parser gets no further bytes
DROPPING = (REST, LINGER)  # bytes are counted, and more are awaited for a short time only
# The transport may be closed in every state. Then no transition follows.
NEXT: dict[ConnectionState, tuple[ConnectionState, ...]] = {
    IDLE: (
        HEAD,  # a request begins
        LAST,  # the latest request offers an upgrade, or nothing follows an empty line in time
        LINGER,  # no request has come in time: an error is sent, though nothing was requested
    ),
    HEAD: (
        BODY,  # the headers are complete
        METHOD,  # the parser refuses the method, and the error depends on the rest of the line
        LAST,  # the request is refused, and its error waits for earlier answers
        LINGER,  # the request is refused, and its error is sent
    ),
    METHOD: (
        LAST,  # as for HEAD
        LINGER,
    ),
    BODY: (
        IDLE,  # the body is complete
        REST,  # the answer is complete, and another request may follow
        LAST,  # as for HEAD
        LINGER,  # also: an answer is complete, and no other request may follow
    ),
    REST: (
        IDLE,  # the body is complete
        LINGER,  # the application has failed after its answer
    ),
    LAST: (
        LINGER,  # the last answer is complete, or the error that waited for it is sent
    ),
    LINGER: (),  # until the client closes, or until a limit is reached
}


class Flow(FlowControl):
    """Flow control that keeps reading paused while pipelined requests wait."""

    def __init__(self, transport: asyncio.Transport, pipeline: deque[Any]) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        if not self._pipeline:
            super().resume_reading()


class Outlet:
    """Transport for responses. `close` waits until the request has been read."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def write(self, data: bytes) -> None:
        self._connection.transport.write(data)

    def is_closing(self) -> bool:
        return self._connection.transport.is_closing()

    def close(self) -> None:
        self._connection.close_when_read()


class Connection(HttpToolsProtocol):
    """HTTP protocol without back-pressure on writes. Passes its transport to `asgi.Writer`.

    `_state` is about requests. Answers have no state here: uvicorn's `cycle` is the latest request
    with complete headers, `pipeline` holds requests that wait for an earlier answer (the latest on
    the left), and `_answered` is the request before them.
    """

    def __init__(
        self,
        settings: ServerConfig,
        counts: HttpCounts,
        refusals: RefusalLog,
        **options: Any,  # noqa: ANN401
    ) -> None:
        """`options` holds the arguments that uvicorn passes to its protocols."""
        super().__init__(**options)
        self._settings = settings
        self._counts = counts
        self._refusals = refusals
        self._state = IDLE
        self._deadline: float | None = None  # monotonic time when the state must have been left
        self._answered: RequestResponseCycle | None = None  # the cycle being answered
        self._last_error: ApiError | None = None  # of LAST: sent after the open answers
        # The bytes since the latest read that began with a request; none if they are too many, or
        # after a read that ends with a complete request or within a body of known length.
        self._begin = b""
        self._size = RequestSize(settings.max_header_bytes, settings.max_headers)
        self._body_left = 0  # of BODY and REST: bytes to come if the length is known, else 0
        self._linger_until = 0.0  # of REST and LINGER: latest deadline
        self._num_dropped = 0  # of REST and LINGER: bytes
        self._unread_before = 0  # bytes of a finished response, at the latest progress
        self._read_by = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.set_write_buffer_limits(high=NO_LIMIT)
        with suppress(OSError, AttributeError):  # not available on every system
            raw = transport.get_extra_info("socket")
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, KERNEL_UNSENT_BYTES)
        super().connection_made(transport)
        self.flow = Flow(transport, self.pipeline)
        self._outlet = Outlet(self)
        self._allow(self._settings.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        if (cycle := self._answered) is not None and not cycle.response_complete:
            cycle.disconnected = True  # uvicorn notifies the latest request only
            cycle.message_event.set()

    def _enter(self, state: ConnectionState, deadline: float | None = None) -> None:
        assert state in NEXT[self._state], (self._state, state)
        self._state = state
        self._deadline = deadline

    def _allow(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    # -- reading ----------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._state in DROPPING and not self._may_drop(len(data)):
            return
        if self._state in IGNORING:
            return
        if 0 < (left := self._body_left) < len(data):  # another request begins in this read
            self.data_received(data[:left])
            self.data_received(data[left:])
            return
        self._unset_keepalive_if_required()
        if self._state is IDLE:
            self._begin = data
            if self._deadline is None:
                self._allow(self._settings.header_timeout_s)
        elif self._begin:
            self._begin = self._begin + data if len(self._begin) <= MOST_BEGIN_BYTES else b""
        if self._state is METHOD:
            self._refuse_method()
        else:
            self._parse(data)
            if self._body_left or self._state is IDLE:
                self._begin = b""

    def _parse(self, data: bytes) -> None:
        self._size.part_ended = False
        try:
            self.parser.feed_data(data)
            if self._state is HEAD and data.endswith(b"\n"):
                self._check_version()
            self._size.end_read(len(data))
        except httptools.HttpParserUpgrade:
            # No other protocol is supported. The request itself is answered.
            self.cycle.keep_alive = False
            self._enter(LAST)
        except httptools.HttpParserInvalidMethodError:
            self._begin = after_complete_requests(self._begin)
            self._refuse_method()
        except httptools.HttpParserError as error:
            cause = error.__context__  # raised in one of our callbacks
            self._refuse(cause if isinstance(cause, ApiError) else invalid_http())
        except ApiError as error:
            self._refuse(error)

    def _check_version(self) -> None:
        """Raise ApiError after a request line of HTTP/0.9. The parser finds no end of its head."""
        if self.url and self.parser.get_http_version() in ("0.0", "0.9"):
            raise unsupported_version("0.9")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: {"transport": self.transport}}
        self._size.begin()
        self._enter(HEAD, time.monotonic() + self._settings.header_timeout_s)

    def on_url(self, url: bytes) -> None:
        self._size.add(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header. A trailer of a chunked body counts towards the limits and is dropped."""
        self._size.add_header(name, value)
        if self._state is HEAD:
            super().on_header(name, value.strip(b" \t"))  # the parser keeps a trailing tab

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self.parser.get_method() == b"POST":
            text = "this server supports only HTTP/1.1: leave out the header Upgrade"
            raise ApiError(400, text, code=CODE)  # the parser would skip the body
        version = self.parser.get_http_version()
        check_head(version, self.headers)
        self._body_left = int(dict(self.headers).get(b"content-length", b"0"))
        if (host := host_of_target(self.url)) is not None:  # overrides the header (RFC 9112, 3.2)
            others = [header for header in self.headers if header[0] != b"host"]
            self.headers[:] = [*others, (b"host", host)]
        self.expect_100_continue = expects_continue(version, self.headers)
        super().on_headers_complete()
        self.cycle.transport = cast(asyncio.Transport, self._outlet)
        if self.expect_100_continue:  # the next bytes may be the body or another request
            self.cycle.keep_alive = False
        # Neither mode: `asgi.Writer` writes such bodies itself.
        self.cycle.chunked_encoding = False if self.scope["http_version"] == "1.0" else None
        if not self.pipeline:
            self._answered = self.cycle
        self._size.part_ended = True
        self._enter(BODY, time.monotonic() + self._settings.body_timeout_s)

    def on_body(self, body: bytes) -> None:
        self._size.part_ended = True
        self._body_left = max(self._body_left - len(body), 0)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._size.part_ended = True
        self._enter(IDLE)
        self.flow.resume_reading()  # otherwise a disconnect would go unnoticed

    # -- answers and errors -------------------------------------------------------------------

    def on_response_complete(self) -> None:
        if has_waited := bool(self.pipeline):
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()
        if self._state in IGNORING:  # no other request follows
            self._unset_keepalive_if_required()
            if self._last_error is not None and self._state is LAST and not has_waited:
                self._end_with(self._last_error)
        elif self._deadline is None:
            return
        elif has_waited:  # reading resumes only now
            self._allow(self._settings.body_timeout_s)
        elif self._state is BODY:  # answered before the body was complete
            self._drop_input(REST, self._deadline - time.monotonic())

    def close_when_read(self) -> None:
        """Close after the final response, or half-close if the client may still be sending."""
        if self.transport.is_closing() or self._state is LINGER:
            return
        if self._state in (BODY, REST, LAST):
            self.pipeline.clear()
            self.transport.write_eof()
            self._drop_input(LINGER)
        else:
            self.transport.close()

    def _refuse_method(self) -> None:
        """Refuse a method that the parser does not have, once the request line is complete."""
        error = unknown_method(self._begin)
        if error is not None:
            self._refuse(error)
        elif self._state is HEAD:
            self._enter(METHOD, self._deadline)

    def _refuse(self, error: ApiError) -> None:
        """Read no further, and send the error in its order: after all earlier answers."""
        cycle, state = self.cycle, self._state
        if self.transport.is_closing():
            return
        if state is REST or (state is BODY and cycle.response_started):
            self.transport.abort()  # its answer has begun
        elif state is BODY and not self.pipeline:
            cycle.disconnected = True
            cycle.message_event.set()
            self._end_with(error)
        elif cycle is None or cycle.response_complete:
            self._end_with(error)
        elif state is IDLE:  # no request has begun, so nothing needs an answer
            cycle.keep_alive = False
            self._enter(LAST)
        else:
            if state is BODY:
                self.pipeline.popleft()  # the request itself, which waits for earlier answers
            self._last_error = error
            self._enter(LAST)
            self.flow.resume_reading()  # as in `on_message_complete`

    def _end_with(self, error: ApiError) -> None:
        """Send an error as the last response of the connection."""
        if self.transport.is_closing():
            return
        self._counts.responses[OTHER_PATH, error.status] += 1
        self._refusals.connection(self.client, error)
        self.transport.write(_whole_response(error))
        self.transport.write_eof()
        self._drop_input(LINGER)

    def _drop_input(self, state: ConnectionState, most_s: float = MOST_LINGER_S) -> None:
        """Drop further bytes of a request that is already answered."""
        now = time.monotonic()
        self._num_dropped = 0
        self._linger_until = now + min(MOST_LINGER_S, most_s)
        self._enter(state, min(now + LINGER_S, self._linger_until))

    def _may_drop(self, num_bytes: int) -> bool:
        """Count dropped bytes. If there are too many, abort the connection and return False."""
        self._num_dropped += num_bytes
        if self._num_dropped > MOST_LINGER_BYTES:
            self.transport.abort()
            return False
        self._deadline = min(time.monotonic() + LINGER_S, self._linger_until)
        return True

    # -- limits of time and shutdown ------------------------------------------------------------

    def enforce_limits(self, now: float) -> None:
        """Enforce the time limits. Call often, with the monotonic time."""
        unread = self.transport.get_write_buffer_size()
        if unread:
            self._check_reader(unread, now)
        else:
            self._unread_before = 0
        if self._deadline is None or now < self._deadline:
            return
        if self._state in DROPPING or self.transport.is_closing():
            self.transport.abort()
        elif self.pipeline:  # reading is paused by the server, not by the client
            self._allow(self._settings.body_timeout_s)
        elif self._state is BODY:
            limit = self._settings.body_timeout_s
            self._refuse(_too_slow(f"the body must be complete within {limit:g} s", "body"))
        else:
            limit = self._settings.header_timeout_s
            self._refuse(_too_slow(f"the headers must be complete within {limit:g} s", "header"))

    def shutdown(self) -> None:
        """Close for server shutdown. A request with an incomplete head gets an error response."""
        if self._state in (HEAD, METHOD):
            self._refuse(shutting_down())
        elif self._state is not LINGER and self._last_error is None:
            super().shutdown()  # else the connection ends soon in any case

    def _check_reader(self, unread: int, now: float) -> None:
        """Reset a client that reads too slowly.

        A stream may have `max_unread_bytes` unread. A finished response must make progress within
        `body_timeout_s`.
        """
        most = self._settings.max_unread_bytes
        cycle = self._answered
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            is_slow = unread > most
        elif not self._unread_before or unread <= self._unread_before - most:
            self._unread_before = unread
            self._read_by = now + self._settings.body_timeout_s
            is_slow = False
        else:
            is_slow = now > self._read_by
        if is_slow:
            self._counts.num_slow_readers += 1
            log.info("dropped a slow reader %s", fields(unread=unread))
            raw = self.transport.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.transport.abort()


def _too_slow(text: str, part: str) -> ApiError:
    return ApiError(408, f"{text} (server.{part}_timeout_s)", code="request_timeout")


def _whole_response(error: ApiError) -> bytes:
    """Return a complete response, for a connection that closes after it."""
    body = error.body()
    headers = {
        b"content-type": JSON,
        b"content-length": b"%d" % len(body),
        b"x-request-id": secrets.token_hex(16).encode(),
        **dict(error.headers),
        b"connection": b"close",
    }
    head = [b"HTTP/1.1 %d %b" % (error.status, HTTPStatus(error.status).phrase.encode())]
    head += [b"%b: %b" % header for header in headers.items()]
    return b"\r\n".join([*head, b"", body])
