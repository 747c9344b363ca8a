"""A ticket is accepted only as it was signed, by the same secret, in time, for the same model."""

from __future__ import annotations

import base64

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from nanovllm.transfer.tickets import (
    MAC_BYTES,
    MAX_SKEW_S,
    MAX_TEXT,
    VERSION,
    Ticket,
    TicketError,
    TicketKey,
    secret_of,
)
from nanovllm.typed_yaml import ConfigError

KEY = TicketKey("sixteen characters, or more")
LAYOUT, MODEL, NOW = b"l" * 32, b"m" * 32, 1.8e9
TICKET = Ticket(
    version=VERSION, engine="e-1", generation=7, request="___prefill_addr_a:1___x",
    pages=(3, 1, 2), text=b"k", num_tokens=300, expires_at=NOW + 30, layout=LAYOUT, identity=MODEL,
)  # fmt: skip
TEXT = KEY.sign(TICKET)
tickets = st.builds(
    Ticket, version=st.just(VERSION), engine=st.text(), generation=st.integers(0, 2**63),
    request=st.text(), text=st.binary(), pages=st.lists(st.integers(0, 2**40)).map(tuple),
    num_tokens=st.integers(0, 2**40), expires_at=st.just(NOW), layout=st.just(LAYOUT),
    identity=st.just(MODEL),
)  # fmt: skip


def reason_of(text: str, key: TicketKey = KEY, now: float = NOW) -> str:
    with pytest.raises(TicketError) as caught:
        key.check(text, LAYOUT, MODEL, now)
    return caught.value.reason


@given(tickets)
def test_a_signed_ticket_comes_back(ticket: Ticket) -> None:
    text = KEY.sign(ticket)
    assert KEY.check(text, LAYOUT, MODEL, NOW) == ticket
    assert text.isascii() and not set(text) & set("+/ \n")


@given(st.integers(0, len(base64.urlsafe_b64decode(TEXT)) - 1), st.integers(1, 255))
def test_any_changed_byte_is_forged(at: int, change: int) -> None:
    raw = bytearray(base64.urlsafe_b64decode(TEXT))
    raw[at] ^= change
    assert reason_of(base64.urlsafe_b64encode(raw).decode()) == "forged"


@given(st.text() | st.binary().map(lambda raw: base64.urlsafe_b64encode(raw).decode()))
def test_random_texts_are_refused(text: str) -> None:
    assert reason_of(text) in ("malformed", "forged")


@settings(max_examples=50)
@given(st.integers(0, len(TEXT) - 1))
def test_a_shortened_ticket_is_refused(length: int) -> None:
    assert reason_of(TEXT[:length]) in ("malformed", "forged")
    assert reason_of(TEXT[length + 1 :]) in ("malformed", "forged")


def test_a_body_without_its_mac_is_forged() -> None:
    body = msgspec.msgpack.encode(TICKET)
    for mac in (b"", bytes(MAC_BYTES)):
        assert reason_of(base64.urlsafe_b64encode(mac + body).decode()) == "forged"


def test_another_secret_is_refused() -> None:
    other = TicketKey("sixteen characters, or mora")
    assert reason_of(TEXT, key=other) == "forged"
    with pytest.raises(TicketError, match="it was altered, or the peers' secrets differ"):
        other.check(TEXT, LAYOUT, MODEL, NOW)


def test_an_old_ticket_is_refused_but_clocks_may_differ() -> None:
    late = TICKET.expires_at + MAX_SKEW_S
    assert KEY.check(TEXT, LAYOUT, MODEL, late) == KEY.check(TEXT, LAYOUT, MODEL, 0.0) == TICKET
    assert reason_of(TEXT, now=late + 1) == "expired"


@pytest.mark.parametrize(
    ("changed", "reason", "said"),
    [
        ({"identity": b"M" * 32}, "model", "another model, other weights"),
        ({"layout": b"L" * 32}, "layout", "another cache layout, dtype or number of tokens"),
        ({"version": 2}, "version", "version 2 instead of 1"),
        ({"expires_at": NOW - 1000}, "expired", "expired 1000 s ago"),
        ({"layout": b"", "identity": b""}, "model", "another model"),
    ],
)
def test_a_ticket_of_another_engine(changed: dict[str, object], reason: str, said: str) -> None:
    text = KEY.sign(msgspec.structs.replace(TICKET, **changed))
    assert reason_of(text) == reason
    with pytest.raises(TicketError, match=said):
        KEY.check(text, LAYOUT, MODEL, NOW)


def test_other_fields_need_one_release() -> None:
    class Later(Ticket, array_like=True, frozen=True):
        extra: int = 0

    fields = {name: getattr(TICKET, name) for name in Ticket.__struct_fields__}
    assert reason_of(KEY.sign(Later(**fields))) == "version"
    assert reason_of(KEY.sign("a text")) == "version"  # type: ignore[arg-type]


def test_a_huge_ticket_is_not_decoded() -> None:
    assert reason_of("A" * (MAX_TEXT + 1)) == "malformed"
    million = msgspec.structs.replace(TICKET, pages=tuple(range(10**6 // 16)))
    assert len(KEY.sign(million)) < MAX_TEXT // 2


def test_secrets() -> None:
    assert secret_of("a", {}) == secret_of(None, {"NANOVLLM_TRANSFER_SECRET": "a"}) == "a"
    with pytest.raises(ConfigError, match=r"transfer\.secret is missing: set it, or NANOVLLM_TR"):
        secret_of(None, {"NANOVLLM_TRANSFER_SECRET": ""})
    with pytest.raises(ConfigError, match=r"transfer\.secret .* has 5 characters; use at least 16"):
        TicketKey("short")


def test_a_secret_may_have_any_bytes() -> None:
    """Random bytes in the environment are not UTF-8, and have surrogates in Python."""
    key = TicketKey("\udcff" * 16)
    assert key.check(key.sign(TICKET), LAYOUT, MODEL, NOW) == TICKET
