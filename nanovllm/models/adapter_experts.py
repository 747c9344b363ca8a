"""Places of the matrices of routed experts in a row of ranks, and PEFT's fused layout of them.

A rank's row has, for all experts of this process, the rows of A of gate and up, the columns of B of
both, then those of down. Two layouts of files are known:

- One pair of matrices for each expert and product (transformers 4).
- One pair for all experts (transformers 5): `experts.base_layer` is gate and up together, and
  `experts` is down. A (E*r, in) is expert-major: rows e*r to e*r + r belong to expert e. B
  (out, E*r) is rank-major: columns e, E + e, 2*E + e, ... belong to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from nanovllm_kernels.adapters.experts import ExpertDeltas
from torch import Tensor

from nanovllm.layers.experts.products import ExpertMLPs
from nanovllm.layers.lora import AdaptedPart
from nanovllm.models.decoder import Decoder
from nanovllm.models.names import text_name
from nanovllm.models.weights import SHARED, numbered
from nanovllm.parallel.mesh import Span

# Names of checkpoints, and of the modules that transformers makes of them (MiniMax-M2).
RENAMED = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
IN_CHECKPOINT = {name: own for own, name in RENAMED.items()}
TEXT_MODEL = "model.language_model."  # in models with an image encoder (Qwen3.5)


def module_of(name: str) -> str:
    """Return a module's name in transformers' text model.

    `name` is the one in the checkpoint, or that of a module in transformers.
    """
    parts = text_name(name).removesuffix(".weight").split(".")
    return ".".join(RENAMED.get(part, part) for part in parts)


def spellings(module: str) -> list[str]:
    """Return all names that files may have for a module of transformers' text model.

    Only modules of a mixture of experts have other names in a checkpoint.
    """
    names, parts = [module], module.split(".")
    if "experts" in parts or parts[-2:] == ["mlp", "gate"]:
        names.append(".".join(IN_CHECKPOINT.get(part, part) for part in parts))
        names.append(".".join("mlp" if p == "block_sparse_moe" else p for p in names[1].split(".")))
    inner = [name.removeprefix("model.") for name in names if name.startswith("model.")]
    return list(dict.fromkeys(names + [TEXT_MODEL + name for name in inner]))


class ExpertParts(NamedTuple):
    """One expert's places: of the gate, of up and of down."""

    gate: AdaptedPart
    up: AdaptedPart
    down: AdaptedPart


class ExpertNames(NamedTuple):
    """Modules of one layer in the checkpoint. {} stands for an expert's index."""

    folder: str  # of all routed experts
    gate: str
    up: str
    down: str
    shared: tuple[str, str, str] | None  # of a shared expert that runs as a routed one


class PlacedExperts:
    """Places of one layer's experts in a rank's row, from `at` to `end`."""

    def __init__(self, experts: ExpertMLPs, names: ExpertNames, at: int) -> None:
        self.experts = experts
        self.count, hidden, inner = experts.down.shape
        self.sizes = hidden, inner
        self._gate_up_b = at + 2 * self.count * hidden
        self._down_a = self._gate_up_b + 2 * self.count * inner
        self._down_b = self._down_a + self.count * inner
        self.at, self.end = at, self._down_b + self.count * hidden
        places = experts.placements["gate_up"].experts or ()
        self.by_expert = [self._parts(place) for place in places]
        self.parts: dict[str, AdaptedPart] = {}
        for expert, parts in enumerate(self.by_expert):
            named = (name.format(expert) for name in names[1:4])
            self.parts |= dict(zip(named, parts, strict=True))
        self.routed = frozenset(self.parts)  # modules of single routed experts
        if names.shared is not None and experts.placements["gate_up"].has_shared:
            shared = self._parts(self.count - 1)
            self.parts |= dict(zip(names.shared, shared, strict=True))

    def _parts(self, place: int) -> ExpertParts:
        """Return the parts of the expert with this local index; -1 for one of another rank."""
        hidden, inner = self.sizes
        (_, cut), _ = self.experts.placements["gate_up"].parts
        if place < 0:
            cut = Span(cut.full, 0, 0)
        inputs = Span(hidden, 0, hidden if place >= 0 else 0)
        a_at, b_at = self.at + 2 * place * hidden, self._gate_up_b + 2 * place * inner
        return ExpertParts(
            AdaptedPart(inputs, (cut,), a_at=a_at, b_at=b_at),
            AdaptedPart(inputs, (cut,), a_at=a_at + hidden, b_at=b_at + inner),
            AdaptedPart(
                cut,
                (inputs,),
                a_at=self._down_a + place * inner,
                b_at=self._down_b + place * hidden,
            ),
        )

    def bind(self, ranks_RX: Tensor) -> None:
        """Make the experts add the deltas of these ranks."""
        hidden, inner = self.sizes
        gate_up_a, gate_up_b, down_a, down_b = ranks_RX[:, self.at : self.end].split(
            [size * self.count for size in (2 * hidden, 2 * inner, inner, hidden)], 1
        )
        self.experts.deltas = ExpertDeltas(
            gate_up_a_REID=gate_up_a.unflatten(1, (self.count, 2, hidden)),
            gate_up_b_RE2F=gate_up_b.unflatten(1, (self.count, 2 * inner)),
            down_a_REF=down_a.unflatten(1, (self.count, inner)),
            down_b_RED=down_b.unflatten(1, (self.count, hidden)),
        )


def experts_of(model: Decoder) -> Iterator[tuple[ExpertMLPs, ExpertNames]]:
    """Yield the model's routed experts, with the names of their modules in the checkpoint."""
    for path, module in model.named_modules():
        if not isinstance(module, ExpertMLPs):
            continue
        experts: dict[str, str] = {}
        for source, target, *part in model.WEIGHTS:
            for name in ("gate_up", "down"):
                if match := numbered(target).fullmatch(f"{path}.{name}"):
                    key = "".join(part) or name
                    experts[key] = module_of(source).format(*match.groups(), "{}")
        shared = [experts.get(f"{SHARED} {name}") for name in ("gate", "up")] + [
            experts.get(SHARED)
        ]
        gate, up, down = experts["gate"], experts["up"], experts["down"]
        folder = gate.partition(".{}.")[0]
        has_shared = None not in shared
        named = (str(shared[0]), str(shared[1]), str(shared[2])) if has_shared else None
        yield module, ExpertNames(folder=folder, gate=gate, up=up, down=down, shared=named)


def of_expert(a_XD: Tensor, b_NX: Tensor, expert: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return one expert's A (r, in) and B (out, r) of PEFT's fused layout."""
    a_ERD = a_XD.unflatten(0, (num_experts, -1))
    b_NRE = b_NX.unflatten(1, (-1, num_experts))
    return a_ERD[expert], b_NRE[:, :, expert]
