"""Which web pages may use the server, by the headers Host and Origin of their requests.

A browser sends requests to this machine for any page that it shows. On a loopback address without
an API key nothing else protects the server, so two headers that a page cannot forge decide:

- Host must be an address, `localhost` or a name that the recipe allows. A page whose own name was
  made to resolve to this machine (DNS rebinding) sends that name.
- Origin, if there is one, must be the server's own, a loopback origin or one that the recipe
  allows. Clients outside browsers send none.

Decision: Sec-Fetch-Site is not looked at. Browsers that send it also send Origin with every
request that is no plain GET or HEAD, and no page of another origin can read the answer to those.

Decision: with an API key, or on an address that other machines reach, any Host is served. A key
protects by itself, and the names of such a server are not known here. Origin counts everywhere.
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
from nanovllm.server.asgi import Scope, header
from nanovllm.server.errors import ApiError

API = ("/v1/", "/health", "/ready", "/version")  # all that `*` opens
HOSTS, ORIGINS = "server.allowed_hosts", "server.allowed_origins"
SHOWN_CHARS = 100


class Access:
    def __init__(self, server: Server, bound: str) -> None:
        """`bound` is the address of the listening socket; `server.host` may be a name for it."""
        by_name = address_of(server.host) is None
        is_local = is_loopback(server.host) or (by_name and is_loopback(bound))
        self._checks_host = is_local and server.api_key is None
        self._hosts = {host_of(name) for name in ("localhost", server.host, *server.allowed_hosts)}
        self._given_hosts, self._given_origins = server.allowed_hosts, server.allowed_origins
        self._opens_api = ANY in server.allowed_origins
        self._origins = {origin_of(without_slash(text)) for text in server.allowed_origins}

    def check(self, scope: Scope) -> None:
        """Raise ApiError (403) for a request of a page that may not use the server."""
        host = header(scope, b"host")
        if self._checks_host and host is not None:
            self._check_host(host.decode("latin-1"))
        origin = header(scope, b"origin")
        if origin is not None and not self._opens_api and not self._is_known(scope, origin):
            raise self._foreign(origin.decode("latin-1"))

    def readable_by(self, scope: Scope) -> bytes | None:
        """Return the value of Access-Control-Allow-Origin for the answer to a request that `check`
        passes; None if only pages of the server's own origin may read the answer."""
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
    """Return the origin of a page that came from where this request goes to.

    The scheme is that of `origin`: a proxy may have taken the encryption off.
    """
    found = ORIGIN.fullmatch(origin)
    host = (header(scope, b"host") or b"").decode("latin-1")
    return origin_of(f"{found[1]}://{host}") if found is not None and host else None


def _shown(text: str) -> str:
    """Return a client's text in quotes, short and without control characters."""
    shown = ascii(text)
    return shown if len(shown) <= SHOWN_CHARS else f"{shown[: SHOWN_CHARS - 3]}..."
