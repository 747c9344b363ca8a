"""Checks of the headers Host and Origin, which decide the web pages that may use the server.

A browser sends requests to this machine on behalf of any page. On a loopback address without an API
key nothing else protects the server, so two headers that a page cannot forge decide:

- Host must be an address, `localhost` or a name that the recipe allows. A page whose own name was
  made to resolve to this machine (DNS rebinding) sends that name.
- Origin, if present, must be the server's own, a loopback origin or one that the recipe allows.
  Clients other than browsers send none.

Decision: Sec-Fetch-Site is ignored. Browsers that send it also send Origin, except with a plain GET
or HEAD. A page of another origin cannot read the answers to those.

Decision: with an API key, or on an address that other machines can reach, any Host is accepted. A
key is protection enough, and the names of such a server cannot be listed. Origin is always checked.
"""

from __future__ import annotations

from nanovllm.config import Server
from nanovllm.hosts import (
    ANY,
    ORIGIN,
    address_of,
    host_of,
    is_loopback,
    is_loopback_origin,
    origin_of,
    setting,
    without_slash,
)
from nanovllm.server.asgi import Scope, header, local_port
from nanovllm.server.errors import MAX_VALUE_CHARS, ApiError, shortened

METRICS = "/metrics"
API = ("/v1/", "/health", "/ready", "/version")  # paths that an allowed origin of `*` opens
HOSTS, ORIGINS = "server.allowed_hosts", "server.allowed_origins"


class Access:
    def __init__(self, server: Server, bound: str, metrics_port: int | None = None) -> None:
        """`bound` is the address of the listening socket; `server.host` may be a name for it.

        `metrics_port` is the port that never needs a key, if there is one.
        """
        by_name = address_of(server.host) is None
        is_local = is_loopback(server.host) or (by_name and is_loopback(bound))
        self._checks_host = is_local and server.api_key is None
        self._is_local = is_local
        self._metrics_port = metrics_port
        self._metrics_key = server.metrics_key
        self._hosts = {host_of(name) for name in ("localhost", server.host, *server.allowed_hosts)}
        self._given_hosts, self._given_origins = server.allowed_hosts, server.allowed_origins
        self._opens_api = ANY in server.allowed_origins
        self._origins = {origin_of(without_slash(text)) for text in server.allowed_origins}

    def check(self, scope: Scope) -> None:
        """Raise ApiError (403) if the request comes from a page that may not use the server."""
        host = header(scope, b"host")
        is_open = self.opens_metrics(scope) and scope["path"] == METRICS
        if host is not None and (self._checks_host or (self._is_local and is_open)):
            self._check_host(host.decode("latin-1"))
        origin = header(scope, b"origin")
        if origin is not None and not self._opens_api and not self._is_known(scope, origin):
            raise self._foreign(origin.decode("latin-1"))

    def is_for_metrics(self, scope: Scope) -> bool:
        """Return True for a request at the port of metrics."""
        return self._metrics_port is not None and local_port(scope) == self._metrics_port

    def opens_metrics(self, scope: Scope) -> bool:
        """Return True if /metrics needs no key at the request's port, where others may need one."""
        return not self._metrics_key or self.is_for_metrics(scope)

    def readable_by(self, scope: Scope) -> bytes | None:
        """Return the value of Access-Control-Allow-Origin for a request that passes `check`.

        Return None if only pages of the server's own origin may read the answer.
        """
        origin = header(scope, b"origin")
        if origin is None:
            return None
        if self._opens_api and scope["path"].startswith(API):
            return ANY.encode()
        return origin if self._is_known(scope, origin) else None

    def _check_host(self, text: str) -> None:
        host = host_of(text)
        if host is not None and (host in self._hosts or address_of(host) is not None):
            return
        cure = "use an address or localhost instead"
        if host is not None:
            cure = f"start the server with {setting(HOSTS, [*self._given_hosts, host])}"
        message = f"the header Host is {_shown(text)}, a name that is not allowed here; {cure}"
        raise ApiError(403, message, code="host_not_allowed")

    def _is_known(self, scope: Scope, raw: bytes) -> bool:
        origin = origin_of(raw.decode("latin-1"))
        if origin is None:
            return False
        return (
            origin in self._origins
            or is_loopback_origin(origin)
            or origin == _own_origin(scope, origin)
        )

    def _foreign(self, text: str) -> ApiError:
        origin = origin_of(text)
        cure = "serve the page from localhost"
        if origin is not None:
            cure = f"start the server with {setting(ORIGINS, [*self._given_origins, origin])}"
        message = f"pages of the origin {_shown(text)} may not use this server; {cure}"
        return ApiError(403, message, code="origin_not_allowed")


def _own_origin(scope: Scope, origin: str) -> str | None:
    """Return the server's own origin as this request names it.

    The scheme is taken from `origin`, since a proxy may have removed the encryption.
    """
    match = ORIGIN.fullmatch(origin)
    host = (header(scope, b"host") or b"").decode("latin-1")
    return origin_of(f"{match[1]}://{host}") if match is not None and host else None


def _shown(text: str) -> str:
    """Return a client's text in quotes, shortened and without control characters."""
    return shortened(ascii(text), MAX_VALUE_CHARS)
