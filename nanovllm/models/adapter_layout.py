"""Products that adapters may change, and the place of their matrices in a row of ranks.

A rank has one row of A for each part of each product, and one column of B for each product. Both
are adjacent in the rank's row, product after product. So an adapter is loaded by copying its rows.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from nanovllm.layers.embedding import VocabEmbedding
from nanovllm.layers.linear import Linear
from nanovllm.layers.lora import AdaptedPart, Delta
from nanovllm.models.adapter_experts import PlacedExperts, experts_of, module_of
from nanovllm.models.decoder import Decoder
from nanovllm.models.weights import numbered
from nanovllm.parallel.mesh import Span

ALIGNED = 16  # elements


class AdapterLayout:
    """Places of all products that the given modules of the checkpoint are parts of."""

    def __init__(self, model: Decoder, modules: Iterable[str] | None = None) -> None:
        """`modules` are names in the checkpoint; None: all that may be changed."""
        self.parts: dict[str, AdaptedPart] = {}  # by module
        self.fused: dict[str, PlacedExperts] = {}  # by the name of all experts of a layer
        self._products: list[tuple[Linear, list[AdaptedPart]]] = []
        chosen, at = None if modules is None else set(modules), 0
        for linear, sources in products_of(model):
            if chosen is not None and chosen.isdisjoint(sources.values()):
                continue
            parts, at = parts_of(linear, sources, at)
            self.parts |= {sources[name]: part for name, part in parts.items()}
            self._products.append((linear, list(parts.values())))
            at = aligned(at)
        for experts, names in experts_of(model):
            placed = PlacedExperts(experts, names, at)
            own = {*placed.parts, names.folder, f"{names.folder}.base_layer"}
            if chosen is not None and chosen.isdisjoint(own):
                continue
            self.parts |= placed.parts
            self.fused[names.folder] = placed
            at = aligned(placed.end)
        self.width = at  # elements of a rank's row

    @property
    def dense(self) -> set[str]:
        """The modules that are not experts."""
        experts = (name for placed in self.fused.values() for name in placed.parts)
        return self.parts.keys() - {*experts}

    @property
    def routed(self) -> set[str]:
        """The modules of single routed experts, without a shared one that runs as one of them."""
        return {name for placed in self.fused.values() for name in placed.routed}

    def bind(self, ranks_RX: Tensor) -> None:
        """Make all products add the deltas of these ranks, of `width` elements each."""
        for linear, parts in self._products:
            first, size = parts[0], parts[0].inputs.count
            a_RX = ranks_RX[:, first.a_at : first.a_at + len(parts) * size]
            widths = tuple(part.width for part in parts)
            linear.delta = Delta(
                a_RID=a_RX.unflatten(1, (len(parts), size)),
                b_RN=ranks_RX[:, first.b_at : first.b_at + sum(widths)],
                widths=widths,
                add_deltas=linear.ops.add_deltas,
            )
        for placed in self.fused.values():
            placed.bind(ranks_RX)


def aligned(at: int) -> int:
    return -(-at // ALIGNED) * ALIGNED


def products_of(model: Decoder) -> Iterable[tuple[Linear, dict[str, str]]]:
    """Yield the model's products, and the modules of the checkpoint by the names of their parts."""
    rules = [
        (numbered(target), module_of(source), "".join(part))
        for source, target, *part in model.WEIGHTS
    ]
    for path, module in model.named_modules():
        if not isinstance(module, Linear) or isinstance(module, VocabEmbedding):
            continue
        products: dict[str, str] = {}
        for pattern, source, part in rules:
            if match := pattern.fullmatch(f"{path}.weight"):
                products[part] = source.format(*match.groups())
        if products:
            yield module, products


def parts_of(
    linear: Linear, sources: dict[str, str], at: int
) -> tuple[dict[str, AdaptedPart], int]:
    """Return the parts of a product, in the order of its columns, and the place after them."""
    placement = linear.placements["weight"]
    num_outputs, num_inputs = linear.weight.shape
    names = list(dict.fromkeys(name for name, _ in placement.parts))
    b_at = at + len(names) * num_inputs
    parts: dict[str, AdaptedPart] = {}
    for name in names:
        spans = tuple(span for part, span in placement.parts if part == name)
        inputs = Span(num_inputs, 0, num_inputs)
        if placement.dim == 1:
            (inputs,), spans = spans, (Span(num_outputs, 0, num_outputs),)
        parts[name] = AdaptedPart(inputs, spans, a_at=at, b_at=b_at)
        at, b_at = at + num_inputs, b_at + parts[name].width
    return {name: part for name, part in parts.items() if name in sources}, b_at
