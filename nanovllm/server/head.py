"""Checks of a request's head after RFC 9110 and RFC 9112 that the parser does not make.

httptools itself refuses malformed lines, contradictory lengths, and a body without an end.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from contextlib import suppress
from http import HTTPStatus

import httptools

from nanovllm.server.asgi import Header
from nanovllm.server.errors import ApiError

CODE = "invalid_http"
# `uri-host [ ":" port ]` of RFC 3986; an empty one is valid, too.
AUTHORITY = re.compile(
    rb"(?:\[[0-9A-Fa-f:.]+\]|(?:[\w.~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?"
)
CONTINUE = b"100-continue"
METHOD = rb"[\w!#$%&'*+.^`|~-]{1,32}"
REQUEST_LINE = re.compile(rb"(%b) \S{1,8000} HTTP/1\.[01]\r?\n" % METHOD)
PART_OF_LINE = re.compile(rb"%b(?: (?:\S{1,8000}(?: (\S*\r?))?)?)?" % METHOD)  # group 1: version


class RequestSize:
    """Bytes and headers of the request that is being received. Methods raise ApiError (431)."""

    def __init__(self, max_bytes: int, max_headers: int) -> None:
        self._max_bytes = max_bytes
        self._max_headers = max_headers
        self.part_ended = False  # a part of a request ended within the latest read
        self.begin()

    def begin(self) -> None:
        """Begin to count another request."""
        self._num_headers = 0
        self._head_bytes = 0  # bytes of the first line and of complete headers
        self._fed_bytes = 0  # bytes since the latest complete part of a request, in whole reads

    def add(self, num_bytes: int) -> None:
        """Count bytes of the first line or of a header."""
        self._head_bytes += num_bytes
        if self._num_headers > self._max_headers or self._head_bytes > self._max_bytes:
            raise self._too_large()

    def add_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self.add(len(name) + len(value) + 4)  # with ": " and the end of the line

    def end_read(self, num_bytes: int) -> None:
        """Count a read. The parser buffers the beginning of a header until it is complete."""
        self._fed_bytes = 0 if self.part_ended else self._fed_bytes + num_bytes
        if self._fed_bytes > self._max_bytes:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        text = (
            f"headers must have at most {self._max_bytes} bytes in total "
            f"(server.max_header_bytes), and there must be at most {self._max_headers} of them "
            "(server.max_headers)"
        )
        return ApiError(431, text, code="headers_too_large")


def unsupported_version(version: str) -> ApiError:
    status = 400 if version < "1" else HTTPStatus.HTTP_VERSION_NOT_SUPPORTED
    return ApiError(status, f"HTTP/{version} is not supported; use HTTP/1.1", code=CODE)


def invalid_http() -> ApiError:
    return ApiError(400, "the request is not valid HTTP", code=CODE)


def unknown_method(begin: bytes) -> ApiError | None:
    """Return the error for a request with a method that the parser does not have.

    A valid line with another method is refused as RFC 9110, 9.1, recommends. Anything else, such as
    TLS, is not HTTP. `begin` is the beginning of the request. Return None if it may become a valid
    line, so that the error does not depend on how the network cuts the request.
    """
    begin = begin.lstrip(b"\r\n")  # as the parser does
    if (line := REQUEST_LINE.match(begin)) is not None:
        text = f"the method {line[1].decode('latin-1')} is not supported; use GET or POST"
        return ApiError(HTTPStatus.NOT_IMPLEMENTED, text, code="method_not_allowed")
    if (part := PART_OF_LINE.fullmatch(begin)) is not None:
        version = part[1] or b""
        if any(whole.startswith(version) for whole in (b"HTTP/1.0\r", b"HTTP/1.1\r")):
            return None
    return invalid_http()


class _Completed:
    """Receiver of the parser's calls. Counts complete requests."""

    def __init__(self) -> None:
        self.number = 0

    def on_message_complete(self) -> None:
        self.number += 1


def _num_complete(data: bytes) -> int:
    completed = _Completed()
    parser = httptools.HttpRequestParser(completed)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as the connection's parser
    with suppress(httptools.HttpParserError):
        parser.feed_data(data)
    return completed.number


def after_complete_requests(data: bytes) -> bytes:
    """Return the rest of `data` after the last complete request. `data` begins with a request.

    The parser reports no positions. The end is found by parsing beginnings of `data`: 17 of them
    for 64 KiB.
    """
    number = _num_complete(data)
    lengths = range(len(data) + 1)
    return data[bisect_left(lengths, number, key=lambda length: _num_complete(data[:length])) :]


def check_head(version: str, headers: list[Header]) -> None:
    """Raise ApiError if the head must be refused. Names in `headers` are in lower case."""
    if version not in ("1.0", "1.1"):
        raise unsupported_version(version)
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (version == "1.1" and not hosts):
        raise ApiError(
            400, f"a request must have exactly one header Host, not {len(hosts)}", code=CODE
        )
    if hosts and not AUTHORITY.fullmatch(hosts[0]):
        raise ApiError(400, "the header Host must be a host, optionally with a port", code=CODE)
    if codings := _members(headers, b"transfer-encoding"):
        _check_codings(version, codings)
    if version == "1.1" and {*_members(headers, b"expect")} - {CONTINUE}:
        text = "the header Expect must be 100-continue or absent"
        raise ApiError(417, text, code="expectation_failed")


def expects_continue(version: str, headers: list[Header]) -> bool:
    """Return True if the client waits for "100 Continue" before it sends the body."""
    return version == "1.1" and CONTINUE in _members(headers, b"expect")


def host_of_target(target: bytes) -> bytes | None:
    """Return host and port of an absolute target, as in http://host:80/path; None for a path."""
    if target.startswith((b"/", b"*")):
        return None
    url = httptools.parse_url(target)
    if url.host is None:
        return None
    host = b"[%b]" % url.host if b":" in url.host else bytes(url.host)
    return host if url.port is None else b"%b:%d" % (host, url.port)


def _check_codings(version: str, codings: list[bytes]) -> None:
    if version == "1.0":
        raise ApiError(400, "HTTP/1.0 has no Transfer-Encoding; send Content-Length", code=CODE)
    if codings[-1] != b"chunked":
        raise ApiError(400, "the last Transfer-Encoding must be chunked", code=CODE)
    if len(codings) > 1:
        raise ApiError(501, "the only supported Transfer-Encoding is chunked", code=CODE)


def _members(headers: list[Header], name: bytes) -> list[bytes]:
    """Return the comma-separated members of all headers of that name, in lower case."""
    values = b",".join(value for key, value in headers if key == name)
    return [member for part in values.lower().split(b",") if (member := part.strip())]
