"""The recipe's section `experts`, and the file that places routed experts on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from operator import add
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from nanovllm.typed_yaml import NOT_JSON, ConfigError

ExpertsByRank = list[list[int]]  # indices of each rank's experts, in order
encode_lines = msgspec.json.Encoder().encode_lines


class Experts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    routing: Literal["auto", "uniform"] = "auto"  # uniform: random, to measure dummy weights
    placement: str | None = None  # a file of bench --expert-load; None: equal spans in order


class PlacedLayer(Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a file of `bench --expert-load`."""

    layer: int
    tokens: list[int]  # tokens routed to each expert
    ranks: ExpertsByRank = []


class ExpertLoad(Struct, frozen=True):
    """Tokens routed to experts since the engine's start, as sent by an engine."""

    layers: list[int]  # indices of layers with experts
    tokens: bytes  # int64 [layer, expert]
    at_ranks: bytes  # int64 [layer, rank]: tokens of the rank's experts

    @property
    def by_rank(self) -> dict[str, int]:
        sums = map(sum, zip(*self._by_layer(self.at_ranks), strict=True))
        return {str(rank): count for rank, count in enumerate(sums)}

    @property
    def imbalance(self) -> dict[str, float]:
        """Return maximum over mean of the tokens, by "layer/experts" and "layer/ranks"."""
        return {
            f"{layer}/{name}": max(row) * len(row) / max(sum(row), 1)
            for name, counts in (("experts", self.tokens), ("ranks", self.at_ranks))
            for layer, row in zip(self.layers, self._by_layer(counts), strict=True)
        }

    def lines(self) -> bytes:
        """Return the lines of a placement file without ranks."""
        return encode_lines(map(PlacedLayer, self.layers, self._by_layer(self.tokens)))

    def _by_layer(self, counts: bytes) -> list[list[int]]:
        flat = memoryview(counts).cast("q").tolist()
        each = len(flat) // len(self.layers)
        return [flat[at : at + each] for at in range(0, len(flat), each)]


class Spread:
    """A placement file: the experts of each rank, by layer."""

    def __init__(self, path: str) -> None:
        """Read the file. Raise ConfigError if it is not a placement file."""
        self.path = path
        try:
            lines = decode_lines(Path(path).read_bytes())
        except (*NOT_JSON, OSError) as error:
            reason = getattr(error, "strerror", error)
            raise ConfigError(f"experts.placement: {path}: {reason}") from None
        self.by_layer = {line.layer: line.ranks for line in lines}

    def ranks(self, layer: int, num_experts: int, num_ranks: int) -> ExpertsByRank:
        """Return a layer's placement. Raise ConfigError if it does not fit the model or ranks."""
        ranks, problem = self.by_layer.get(layer, []), ""
        sizes = {size for held in ranks for size in (len(held), len({*held}))}
        if len(ranks) != num_ranks:
            problem = f"is placed over {len(ranks)} ranks; parallel.ep is {num_ranks}"
        elif {*chain(*ranks)} != {*range(num_experts)}:
            problem = f"must have all experts of the model, 0 to {num_experts - 1}"
        elif len(sizes) > 1:
            problem = "must have the same number of experts on each rank, none of them twice"
        if problem:
            raise ConfigError(f"experts.placement: {self.path}: layer {layer} {problem}")
        return ranks


decode_lines = msgspec.json.Decoder(PlacedLayer).decode_lines


def write_placement(lines: bytes, path: Path, num_ranks: int, more: int) -> None:
    """Place experts by the engines' loads, and write the placement file.

    Raise ConfigError if there are no experts, if they cannot be shared equally, or if the file
    cannot be written.
    """
    counts: dict[int, list[int]] = {}
    for one in decode_lines(lines):  # lines of all engines
        counts[one.layer] = [*map(add, counts.get(one.layer, repeat(0)), one.tokens)]
    layers = [*map(PlacedLayer, counts, counts.values())]
    if not layers or len(layers[0].tokens) % num_ranks:
        unseen = "no experts, or does not report them because server.page is off"
        summary = f"{len(layers[0].tokens)} experts over {num_ranks} ranks" if layers else unseen
        raise ConfigError(f"--expert-load {path}: the engine has {summary}")
    done = (replace(one, ranks=placed(one.tokens, num_ranks, more)) for one in layers)
    try:
        path.write_bytes(encode_lines(done))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def evenly(num_experts: int, num_ranks: int) -> ExpertsByRank:
    each = num_experts // num_ranks
    return [list(range(rank * each, (rank + 1) * each)) for rank in range(num_ranks)]


def placed(tokens: Sequence[int], num_ranks: int, more: int) -> ExpertsByRank:
    """Return the experts of each rank, so that ranks have about the same number of tokens.

    Each rank has `more` experts than its equal share. They are replicas of the experts with most
    tokens per replica, at most one per rank. Replicas share the tokens of an expert. Replicated
    experts are placed first, on the ranks with most room; the others on ranks with fewest tokens.
    """
    counts = [1] * len(tokens)
    experts = range(len(tokens))
    for _ in range(num_ranks * min(more, len(tokens) - len(tokens) // num_ranks)):
        can_grow = (expert for expert in experts if counts[expert] < num_ranks)
        counts[max(can_grow, key=lambda expert: tokens[expert] / counts[expert])] += 1
    room = sum(counts) // num_ranks
    held: ExpertsByRank = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for expert in sorted(experts, key=lambda one: (-counts[one], -tokens[one] / counts[one])):
        several = counts[expert] > 1
        ranks = [rank for rank in range(num_ranks) if len(held[rank]) < room]
        ranks.sort(key=lambda rank: (len(held[rank]) * several, loads[rank]))
        for rank in ranks[: counts[expert]]:
            held[rank].append(expert)
            loads[rank] += tokens[expert] / counts[expert]
    return [sorted(one) for one in held]


def check(experts: Experts, load_format: str, tp: int, ep: int) -> None:
    """Raise ConfigError if the section or `parallel.ep` contradicts other keys."""
    if ep not in (1, tp) and tp > 1:
        raise ConfigError(
            f"parallel.ep is {ep}; it must be 1 or parallel.tp, which is {tp}; with a parallel.tp "
            "of 1 it can be any number of devices"
        )
    if experts.routing == "uniform" and load_format != "dummy":
        raise ConfigError("experts.routing is uniform; it must be auto unless load.format is dummy")
    if experts.placement is not None and ep == 1:
        raise ConfigError("experts.placement needs a parallel.ep above 1; it is 1")
