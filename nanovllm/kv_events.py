"""Recipe section `kv_events`: changes of the prefix cache, published for routers over ZMQ."""

from __future__ import annotations

import re

from msgspec import Struct

from nanovllm.typed_yaml import ConfigError

TCP = re.compile(r"(tcp://.+):(\d{1,5})")
MOST_STEPS = 1_000_000


class KvEvents(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Events in vLLM's format. They contain token ids of prompts: keep the network private."""

    # Address of the PUB socket, as in tcp://*:5557 (all interfaces). Engine k adds k to the port.
    endpoint: str | None = None
    replay: str | None = None  # likewise of the ROUTER socket that repeats batches; None: none
    # kv@POD@MODEL, which llm-d expects, or an empty text, which vllm-router 0.1.17 expects.
    # auto: kv@HOSTNAME@SERVED_NAME.
    topic: str = "auto"
    # Number of batches, of at most one per step: those kept for `replay`, those that may wait for
    # the publishing thread, and those that may wait for one slow subscriber. More are dropped.
    buffer_steps: int = 10_000


def check_events(events: KvEvents | None, *, prefix: bool, num_engines: int) -> None:
    """Raise ConfigError for a section that cannot be served.

    `prefix` is cache.prefix, `num_engines` is parallel.dp.
    """
    if events is None:
        return
    if events.endpoint is None:
        raise ConfigError("kv_events.endpoint is missing; write tcp://HOST:PORT, or tcp://*:PORT")
    if not prefix:
        raise ConfigError("kv_events needs cache.prefix; without it no page is kept for reuse")
    if not 1 <= events.buffer_steps <= MOST_STEPS:
        raise ConfigError(
            f"kv_events.buffer_steps is {events.buffer_steps}; "
            f"it must be between 1 and {MOST_STEPS}"
        )
    parts = events.topic.split("@")
    is_named = len(parts) == 3 and parts[0] == "kv" and all(parts)
    if events.topic not in ("auto", "") and not is_named:
        raise ConfigError(
            f"kv_events.topic is {events.topic!r}; write kv@POD@MODEL, auto, or an empty text"
        )
    ports = [_port(events.endpoint, "endpoint", num_engines)]
    if events.replay is not None:
        ports.append(_port(events.replay, "replay", num_engines))
        if abs(ports[0] - ports[1]) < num_engines:
            raise ConfigError(
                f"kv_events.replay needs a port at least {num_engines} from that of "
                "kv_events.endpoint, since each engine has its own"
            )


def _port(address: str, key: str, num_engines: int) -> int:
    """Return the port of an address for the first engine. Raise ConfigError if it is invalid."""
    match = TCP.fullmatch(address)
    if match is None or not 0 < int(match[2]) <= 65536 - num_engines:
        raise ConfigError(f"kv_events.{key} is {address!r}; write tcp://HOST:PORT, or tcp://*:PORT")
    return int(match[2])


def address_of(address: str, engine: int) -> str:
    """Return the address of one engine's socket, which adds its number to the port."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + engine}"
