"""The recipe's section of routed experts."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from nanovllm.typed_yaml import ConfigError


class Experts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    routing: Literal["auto", "uniform"] = "auto"  # uniform: at random, to measure dummy weights


def check(experts: Experts, load_format: str, tp: int, ep: int) -> None:
    """Raises ConfigError: the section, or `parallel.ep`, does not go with other keys."""
    if ep not in (1, tp):
        raise ConfigError(f"parallel.ep is {ep}; it must be 1 or parallel.tp, which is {tp}")
    if experts.routing == "uniform" and load_format != "dummy":
        raise ConfigError("experts.routing is uniform; it must be auto unless load.format is dummy")
