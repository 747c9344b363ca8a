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
    """HTTP protocol without back-pressure on writes. Passes its transport to `asgi.Writer`."""

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
        self._in_head = False  # between the start of a request and the end of its headers
        self._in_body = False  # between the end of the headers and the end of `self.cycle`'s body
        self._answered: RequestResponseCycle | None = None  # the cycle being answered
        self._begin = b""  # beginning of a request, until the parser knows its method
        self._body_left = 0  # bytes of a body of known length that were not received yet
        self._is_unknown = False  # the parser does not have the method of `_begin`
        self._num_headers = 0
        self._head_bytes = 0  # bytes of the first line and of complete headers
        self._fed_bytes = 0  # bytes since the latest complete part of a request, in whole reads
        self._part_ended = False  # a part of a request ended within the latest read
        self._ignores_input = False  # input is ignored from now on
        self._deadline: float | None = None  # monotonic time when the current part must be complete
        self._linger_until: float | None = None  # input is dropped until then
        self._num_dropped = 0  # bytes dropped while lingering
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

    # -- reading ----------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._linger_until is not None and not self._may_linger(len(data)):
            return
        if self._ignores_input:
            return
        if 0 < (left := self._body_left) < len(data):  # another request begins in this read
            self.data_received(data[:left])
            self.data_received(data[left:])
            return
        self._unset_keepalive_if_required()
        was_idle = not (self._in_head or self._in_body)
        if was_idle and self._deadline is None:
            self._allow(self._settings.header_timeout_s)
        if was_idle or self._begin:
            self._begin = data if was_idle else self._begin + data
        if self._is_unknown:
            self._refuse_method()
            return
        self._part_ended = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # No other protocol is supported. The request itself is answered.
            self._ignores_input = True
            self._deadline = None
            self.cycle.keep_alive = False
            return
        except httptools.HttpParserError as error:
            cause = error.__context__  # raised in one of our callbacks
            if isinstance(error, httptools.HttpParserInvalidMethodError):
                self._refuse_method()
            else:
                self._refuse(cause if isinstance(cause, ApiError) else invalid_http())
            return
        if self._in_head and self.url and data.endswith(b"\n") and self._has_no_version():
            self._refuse(unsupported_version("0.9"))
            return
        # httptools buffers the beginning of a header until the header is complete.
        self._fed_bytes = 0 if self._part_ended else self._fed_bytes + len(data)
        if self._fed_bytes > self._settings.max_header_bytes:
            self._refuse(self._too_large())

    def _has_no_version(self) -> bool:
        """Return True after an HTTP/0.9 request line. No headers follow, so the parser finds no
        end.
        """
        return self.parser.get_http_version() in ("0.0", "0.9")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: {"transport": self.transport}}
        self._in_head = True
        if self._part_ended:  # it begins somewhere within the latest read
            self._begin = b""
        self._num_headers = self._head_bytes = self._fed_bytes = 0
        self._linger_until = None
        self._allow(self._settings.header_timeout_s)

    def on_url(self, url: bytes) -> None:
        self._begin = b""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header. A trailer of a chunked body counts towards the limits and is dropped."""
        self._num_headers += 1
        self._count(len(name) + len(value) + len(b": \r\n"))
        if self._in_head:
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
        self._in_head = False
        self._in_body = True
        self._part_ended = True
        self._allow(self._settings.body_timeout_s)

    def on_body(self, body: bytes) -> None:
        self._part_ended = True
        self._body_left = max(self._body_left - len(body), 0)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_body = False
        self._part_ended = True
        self._deadline = self._linger_until = None
        self.flow.resume_reading()  # otherwise a disconnect would go unnoticed

    def on_response_complete(self) -> None:
        if has_waited := bool(self.pipeline):
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()
        if self._ignores_input:  # no other request follows
            self._unset_keepalive_if_required()
            return
        if self._deadline is None:
            return
        if has_waited:  # reading resumes only now
            self._allow(self._settings.body_timeout_s)
        elif self._in_body:  # answered before the body was complete
            self._linger(most_s=self._deadline - time.monotonic())

    # -- limits -----------------------------------------------------------------------------

    def enforce_limits(self, now: float) -> None:
        """Enforce the time limits. Call often, with the monotonic time."""
        unread = self.transport.get_write_buffer_size()
        if unread:
            self._check_reader(unread, now)
        else:
            self._unread_before = 0
        if self._deadline is None or now < self._deadline:
            return
        if self._ignores_input or self.transport.is_closing():
            self.transport.abort()
        elif self.pipeline:  # reading is paused by the server, not by the client
            self._allow(self._settings.body_timeout_s)
        elif self._in_body:
            limit = self._settings.body_timeout_s
            self._refuse(_too_slow(f"the body must be complete within {limit:g} s", "body"))
        else:
            limit = self._settings.header_timeout_s
            self._refuse(_too_slow(f"the headers must be complete within {limit:g} s", "header"))

    def shutdown(self) -> None:
        """Close for server shutdown. A request with an incomplete head gets an error response."""
        if self._ignores_input and self._linger_until is not None:
            return  # closes soon in any case
        if self._in_head and not self._ignores_input:
            self._refuse(shutting_down())
        else:
            super().shutdown()

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

    def _allow(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        settings = self._settings
        if self._num_headers > settings.max_headers or self._head_bytes > settings.max_header_bytes:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        settings = self._settings
        text = (
            f"headers must have at most {settings.max_header_bytes} bytes in total "
            f"(server.max_header_bytes), and there must be at most {settings.max_headers} of them "
            "(server.max_headers)"
        )
        return ApiError(431, text, code="headers_too_large")

    def _refuse_method(self) -> None:
        """Refuse a method that the parser does not have, once the request line is complete."""
        error, cycle = unknown_method(self._begin), self.cycle
        self._is_unknown = error is None
        if error is not None or (cycle is not None and not cycle.response_complete):
            self._refuse(error or invalid_http())

    def _refuse(self, error: ApiError) -> None:
        """Stop reading, and answer open requests in order."""
        self._ignores_input = True
        self._deadline = None
        cycle = self.cycle
        is_own = self._in_body
        is_open = cycle is not None and not cycle.response_complete
        if self.pipeline or (is_own and (not is_open or cycle.response_started)):
            self.transport.abort()  # requests wait for the broken one, or its answer has begun
        elif is_open and not is_own:
            cycle.keep_alive = False  # the earlier request is still answered
        elif not self.transport.is_closing():
            if is_own:
                cycle.disconnected = True
                cycle.message_event.set()
            self._counts.responses[OTHER_PATH, error.status] += 1
            self._refusals.connection(self.client, error)
            self.transport.write(_whole_response(error))
            self.transport.write_eof()
            self._linger()

    def close_when_read(self) -> None:
        """Close after the final response, or half-close if the client may still be sending."""
        if self.transport.is_closing():
            return
        if self._in_body or self._ignores_input:
            self._ignores_input = True
            self.pipeline.clear()
            self.transport.write_eof()
            self._linger()
        else:
            self.transport.close()

    def _linger(self, most_s: float = MOST_LINGER_S) -> None:
        """Drop further bytes of a request that is already answered."""
        now = time.monotonic()
        self._num_dropped = 0
        self._linger_until = now + min(MOST_LINGER_S, most_s)
        self._deadline = min(now + LINGER_S, self._linger_until)

    def _may_linger(self, num_bytes: int) -> bool:
        """Count dropped bytes. If there are too many, abort the connection and return False."""
        assert self._linger_until is not None
        self._num_dropped += num_bytes
        if self._num_dropped > MOST_LINGER_BYTES:
            self.transport.abort()
            return False
        self._deadline = min(time.monotonic() + LINGER_S, self._linger_until)
        return True


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
