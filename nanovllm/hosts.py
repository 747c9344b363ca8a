"""Parsing of host names and origins, and tests for loopback.

An origin is the scheme, host and port of a page (RFC 6454), or `null`. Only names of letters,
digits, `.`, `_` and `-` are accepted, so that each is safe in a command line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

from nanovllm.typed_yaml import ConfigError

ANY = "*"
OPAQUE = "null"  # the origin of files and of sandboxed frames
HOST = r"\[[0-9a-f:.]+\]|[a-z0-9._-]+"
AUTHORITY = re.compile(rf"({HOST})(?::([0-9]{{0,5}}))?", re.IGNORECASE)
ORIGIN = re.compile(rf"([a-z][a-z0-9+.-]*)://(?:({HOST})(?::([0-9]{{1,5}}))?)?", re.IGNORECASE)
OWN_PORTS = {"http": "80", "https": "443"}
PLAIN = re.compile(r"[A-Za-z0-9._:/-]+")  # strings that need no quotes in YAML's [a,b]


def host_of(authority: str) -> str | None:
    """Return the host of `localhost:8000` or `[::1]:8000` in lower case; None if it has none.

    The brackets of an IPv6 address and the trailing dot of a name are removed.
    """
    match = AUTHORITY.fullmatch(authority)
    return None if match is None else _bare(match[1])


def origin_of(text: str) -> str | None:
    """Return an origin as browsers write it, without a default port; None for other text."""
    if text == OPAQUE:
        return text
    match = ORIGIN.fullmatch(text)
    if match is None:
        return None
    scheme, host, port = match[1].lower(), (match[2] or "").lower(), match[3]
    has_port = port is not None and port != OWN_PORTS.get(scheme)
    return f"{scheme}://{host}:{port}" if has_port else f"{scheme}://{host}"


def address_of(host: str) -> IPv4Address | IPv6Address | None:
    """Return the address in `host`; None if it is a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Return True for `localhost` and for addresses that only this machine can reach."""
    address = address_of(host)
    if address is None:
        return host.lower() == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def is_loopback_origin(origin: str) -> bool:
    """Return True for an origin, as `origin_of` returns it, of a page served by this machine."""
    match = ORIGIN.fullmatch(origin)
    return (
        match is not None
        and match[1] in OWN_PORTS
        and match[2] is not None
        and is_loopback(_bare(match[2]))
    )


def check(host: str, allowed_origins: Iterable[str], allowed_hosts: Iterable[str]) -> None:
    """Raise ConfigError for a value of the recipe's server section that no request can match.

    An empty host comes from an unset variable, and would listen on all addresses of the machine.
    """
    if not host.strip():
        cure = "leave it out for 127.0.0.1, or write 0.0.0.0 for all addresses of this machine"
        raise ConfigError(f"server.host (--host) is empty; {cure}")
    for text in allowed_origins:
        if text != ANY and origin_of(without_slash(text)) is None:
            raise ConfigError(
                f"server.allowed_origins has {text!r}; an origin is a scheme, a host and maybe a "
                'port, as in https://chat.example or http://10.0.0.5:3000; all of them are ["*"]'
            )
    for text in allowed_hosts:
        if (bare := host_of(text)) is None or bare != text.lower().rstrip("."):
            raise ConfigError(
                f"server.allowed_hosts has {text!r}; write a name without scheme and port, as in "
                "gpu-box.example"
            )


def without_slash(origin: str) -> str:
    """Return an origin without the slash that a browser's address bar adds."""
    return origin[:-1] if origin.endswith("/") and not origin.endswith("//") else origin


def setting(key: str, values: Sequence[str]) -> str:
    """Return the flag that sets a list of strings, quoted for a shell."""
    if all(PLAIN.fullmatch(value) and value != OPAQUE for value in values):
        return f"--set '{key}=[{','.join(values)}]'"  # zsh expands brackets
    return f"--set {key}='{json.dumps(values)}'"


def _bare(host: str) -> str:
    return host.lower().removeprefix("[").removesuffix("]").removesuffix(".")
