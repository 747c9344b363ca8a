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
)


def named(values: Mapping[str, float], below: Below | None) -> dict[str, float]:
    """Return the counts with those that are still 0, under the name of the tier below."""
    names = [name for name in COUNTERS if below or not name.startswith("disk.")]
    all_counts = {**dict.fromkeys(names, 0.0), **values}
    if below is None:
        return all_counts
    all_counts |= below.page_counts()
    if not below.is_remote:
        return all_counts
    return {name.replace("disk.", "peer."): value for name, value in all_counts.items()}
