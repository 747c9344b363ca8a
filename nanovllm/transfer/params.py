"""The field `kv_transfer_params` of requests and answers, as in vLLM's NixlConnector.

Routers add the field to requests, relay the object of P to D, and do not look inside it:

1. To P: `do_remote_decode` is true, the `remote_*` fields are null.
2. From P: `do_remote_prefill` is true, with the ticket in the field `TICKET`.
3. To D: the object of P, unchanged.

Only the two flags and the ticket are read. All other fields are ignored, since clients and routers
may set them. In particular, D never connects to an address of the object.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from nanovllm.transfer.tickets import MAX_TEXT

FIELD = "kv_transfer_params"
TICKET = "nanovllm_ticket"
Role = Literal["plain", "prefill", "decode"]


class TransferParams(Struct, frozen=True):
    """The part of a request in a transfer.

    `prefill`: compute the prompt and answer with a ticket. `decode`: use the ticket if possible;
    `ticket` is None if another server computed the prompt, and then this one computes it again.
    """

    role: Role = "plain"
    ticket: str | None = None


PLAIN = TransferParams()


def parse_params(value: object) -> TransferParams:
    """Return the role of a request. Raise ValueError that names the field if its type is wrong.

    An object with both flags is a `decode`: the client then receives a complete answer.
    """
    if value is None:
        return PLAIN
    if not isinstance(value, dict):
        raise ValueError(f"{FIELD} must be an object or null")
    decodes_here = _flag(value, "do_remote_prefill")
    decodes_there = _flag(value, "do_remote_decode")
    ticket = value.get(TICKET)
    if ticket is not None and (not isinstance(ticket, str) or len(ticket) > MAX_TEXT):
        raise ValueError(f"{FIELD}.{TICKET} must be a text of at most {MAX_TEXT} characters")
    if decodes_here:
        return TransferParams("decode", ticket)
    return TransferParams("prefill") if decodes_there else PLAIN


def _flag(value: dict[Any, Any], name: str) -> bool:
    flag = value.get(name)
    if flag is not None and not isinstance(flag, bool):
        raise ValueError(f"{FIELD}.{name} must be true, false or null")
    return flag is True


def params_in(body: bytes) -> TransferParams:
    """Return the role and ticket of a request whose other fields may be wrong.

    This decodes the whole body: large ones must not be passed on the event loop.
    """
    try:
        return parse_params(msgspec.json.decode(body, type=_Handed).kv_transfer_params)
    except (ValueError, RecursionError):  # the former also of msgspec
        return PLAIN


def used_ticket(params: TransferParams) -> str:
    """Return the ticket of a `decode`, "" without one."""
    return (params.ticket or "") if params.role == "decode" else ""


class _Handed(Struct):
    kv_transfer_params: Any = None


def answer_params(ticket: str, engine: str, request: str, num_tokens: int) -> dict[str, object]:
    """Return the object of P's answer.

    The address is null, so that a vLLM engine as D computes the prompt itself instead of failing at
    a handshake that it cannot make.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine,
        "remote_request_id": request,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        "remote_num_tokens": num_tokens,
        "transfer_mode": "pull",
        TICKET: ticket,
    }
