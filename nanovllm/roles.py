"""Recipe section `transfer`: prefill and decode on two servers."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field, structs

from nanovllm.typed_yaml import ConfigError

Role = Literal["prefill", "decode"]
Backend = Literal["auto", "cuda_ipc", "nixl", "socket"]
MOST_PORT = 65535
HIDDEN = "..."  # instead of the secret, where a recipe is shown


class TransferRole(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Role of this server. One recipe may serve for both, with the role as a flag."""

    role: Role | None = None  # --role
    # HOST:PORT where a prefill server offers its pages; engine N of parallel.dp uses PORT + N.
    listen: str | None = None
    peers: list[str] = field(default_factory=list)  # HOST:PORT of the prefill servers, for decode
    secret: str | None = None  # the same on all; None: the value of NANOVLLM_TRANSFER_SECRET
    # cuda_ipc: from GPU to GPU of one host. nixl: also between hosts, by the package nixl-cu12.
    # auto: cuda_ipc where it is possible, else socket
    backend: Backend = "auto"


def check(transfer: TransferRole | None, host_gib: float, num_engines: int) -> None:
    """Raise ConfigError if the role cannot be served.

    `host_gib` is that of `cache`, `num_engines` is parallel.dp.
    """
    if transfer is None:
        return
    for name, address in (("listen", transfer.listen), *(("peers", p) for p in transfer.peers)):
        if address is not None and not address_of(address, f"transfer.{name}")[1]:
            raise ConfigError(
                f"transfer.{name} is {address!r}; name a port from 1 to {MOST_PORT}, which "
                "decode servers connect to"
            )
    if transfer.role is None:
        raise ConfigError("transfer needs a role: add --role prefill or --role decode")
    if transfer.role == "prefill":
        if transfer.listen is None:
            raise ConfigError("transfer.listen is missing: --role prefill needs HOST:PORT")
        _, port = address_of(transfer.listen, "transfer.listen")
        if port + num_engines - 1 > MOST_PORT:
            raise ConfigError(
                f"transfer.listen is {transfer.listen}; dp {num_engines} needs as many ports"
            )
        return
    if not transfer.peers:
        raise ConfigError("transfer.peers is empty: list HOST:PORT of the prefill servers")
    if not host_gib:
        raise ConfigError("transfer.role decode needs cache.host_gib, where pages arrive; set both")


def for_engine(transfer: TransferRole | None, at: int) -> TransferRole | None:
    """Return the section for engine number `at` of a server, each of which listens on a port."""
    if transfer is None or transfer.role != "prefill" or transfer.listen is None or not at:
        return transfer
    head, _, port = transfer.listen.rpartition(":")
    return structs.replace(transfer, listen=f"{head}:{int(port) + at}")


def hidden(transfer: TransferRole | None) -> TransferRole | None:
    """Return the section without its secret, for records and logs."""
    if transfer is None or transfer.secret is None:
        return transfer
    return structs.replace(transfer, secret=HIDDEN)


def address_of(text: str, name: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT or [HOST]:PORT. Raise ConfigError that names the key."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > MOST_PORT:
        raise ConfigError(f"{name} is {text!r}; write HOST:PORT, as in 10.0.0.1:5600")
    return host, int(port)
