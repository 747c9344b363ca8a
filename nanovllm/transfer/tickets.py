"""Signed tickets: the statement of P that D may read certain pages, relayed by a router.

A ticket is an opaque text: base64url of a MAC and a msgpack body. D trusts a ticket only if the MAC
is right, so neither clients nor routers can name pages, engines or models of their own.

Decision: the MAC is HMAC-SHA-256 with a key that both engines derive from one secret. A public key
would need a certificate per engine. An engine with the secret may read all peers' pages anyway.

Replays are not refused here. A router may send the same object to another D after a failure.
`leases.Leases` decides at P if the pages are still held.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Mapping
from hashlib import sha256
from typing import Literal

import msgspec
from msgspec import Struct

from nanovllm.config import given_transfer_secret
from nanovllm.roles import TransferRole
from nanovllm.typed_yaml import ConfigError

VERSION = 1
MAC_BYTES = 32
MIN_SECRET = 16  # characters
MAX_TEXT = 1 << 20  # characters; a ticket of a million tokens in pages of 16 has 420,000
MAX_SKEW_S = 300.0  # clocks of two hosts may differ; the lease at P ends in time in any case
ENVIRONMENT = "NANOVLLM_TRANSFER_SECRET"
SCOPE = b"nanovllm transfer ticket 1\0"  # keeps other uses of the secret apart

Reason = Literal["malformed", "forged", "version", "expired", "model", "layout"]


class TicketError(ValueError):
    """A ticket that D must not use. `reason` is for counters, the message for the log."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


class Ticket(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Pages that P holds for one request.

    `engine` is new at each start of P, and `generation` is never used twice by one engine. Thus a
    ticket from before a restart names no later lease.
    """

    version: int
    engine: str
    generation: int
    request: str  # request id of P, for logs
    pages: tuple[int, ...]
    text: bytes  # key of the last page: a digest of all tokens up to its end, of salt and adapter
    num_tokens: int  # whose keys and values the pages contain
    expires_at: float  # seconds since 1970, by P's clock
    layout: bytes  # digest of the cache's layout, dtype and tokens per page
    identity: bytes  # of the model: `model_identity()`


class TicketKey:
    """The key that signs and checks tickets."""

    def __init__(self, secret: str) -> None:
        """Derive the key. Raise ConfigError if the secret is too short."""
        self._key = derived_key(secret, SCOPE)

    def sign(self, ticket: Ticket) -> str:
        """Return the text of a ticket."""
        body = msgspec.msgpack.encode(ticket)
        return base64.urlsafe_b64encode(self._mac(body) + body).decode()

    def check(self, text: str, layout: bytes, identity: bytes, now: float) -> Ticket:
        """Return the ticket. Raise TicketError if D must not use it.

        `layout` and `identity` are D's own. `now` is D's time in seconds since 1970.
        """
        ticket = self._opened(text)
        if ticket.version != VERSION:
            reason = (
                f"the ticket has version {ticket.version} instead of {VERSION}: use one release"
            )
            raise TicketError("version", reason)
        if now > ticket.expires_at + MAX_SKEW_S:
            late = now - ticket.expires_at
            raise TicketError(
                "expired", f"the ticket expired {late:.0f} s ago by this host's clock"
            )
        if ticket.identity != identity:
            reason = "the prefill engine has another model, other weights or other settings"
            raise TicketError("model", reason)
        if ticket.layout != layout:
            reason = (
                "the prefill engine has another cache layout, dtype or number of tokens per page"
            )
            raise TicketError("layout", reason)
        return ticket

    def _opened(self, text: str) -> Ticket:
        if len(text) > MAX_TEXT:
            raise TicketError("malformed", f"the ticket has {len(text)} characters")
        try:
            raw = base64.b64decode(text.encode(), altchars=b"-_", validate=True)
        except (binascii.Error, UnicodeEncodeError):
            raise TicketError("malformed", "the ticket is not base64url") from None
        mac, body = raw[:MAC_BYTES], raw[MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(body)):
            reason = "the ticket's signature is wrong: it was altered, or the peers' secrets differ"
            raise TicketError("forged", reason)
        return _decoded(body)

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._key, SCOPE + body, "sha256")


def _decoded(body: bytes) -> Ticket:
    """Return a ticket whose MAC was right. Another release of P may have written it."""
    try:
        return msgspec.msgpack.decode(body, type=Ticket)
    except (msgspec.DecodeError, UnicodeDecodeError):
        reason = "the ticket has other fields than this release uses: use one release"
        raise TicketError("version", reason) from None


def derived_key(secret: str, scope: bytes) -> bytes:
    """Return a key for one use of the secret. Raise ConfigError if the secret is too short."""
    if len(secret) < MIN_SECRET:
        raise ConfigError(
            f"transfer.secret (or {ENVIRONMENT}) has {len(secret)} characters; use at least "
            f"{MIN_SECRET} random ones, the same on all peers: `openssl rand -hex 32`"
        )
    raw = secret.encode(errors="surrogatepass")  # an environment may have any bytes
    return sha256(scope + raw).digest()


def secret_of(recipe: str | None, environment: Mapping[str, str]) -> str:
    """Return the secret of the recipe, or that of the environment. Raise ConfigError without."""
    secret = recipe or environment.get(ENVIRONMENT)
    if not secret:
        raise ConfigError(
            f"transfer.secret is missing: set it, or {ENVIRONMENT}, to the same text on all peers"
        )
    return secret


def secret_for(role: TransferRole) -> str:
    """Return the secret of the recipe or the environment. Raise ConfigError without one."""
    return secret_of(role.secret, {ENVIRONMENT: given_transfer_secret() or ""})
