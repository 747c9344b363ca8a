"""Names of the counts of tiers, as in wire.Stats.tiers."""

from __future__ import annotations

from collections.abc import Mapping

from nanovllm.kv.below import Below

COUNTERS = (
    "asked_tokens",
    "gpu.hit_tokens",
    "host.hit_tokens",
    "host.stored",
    "host.loaded",
    "host.dropped",
    "host.evicted",
    "host.failed",
    "host.declined",
    "host.store_bytes",
    "host.load_bytes",
    "disk.hit_tokens",
    "disk.stored",
    "disk.loaded",
    "disk.dropped",
    "disk.failed",
    "peer.hit_tokens",
    "peer.loaded",
    "peer.failed",
)


def with_zeros(values: Mapping[str, float], below: Below | None) -> dict[str, float]:
    """Return the counts, with those that are still 0 of the tiers that there are."""
    tiers = {"disk": below is not None and below.writable is not None}
    tiers["peer"] = below is not None and below.has_peers
    names = [name for name in COUNTERS if tiers.get(name.partition(".")[0], True)]
    pages = {} if below is None else below.page_counts()
    return {**dict.fromkeys(names, 0.0), **values, **pages}
