"""Loading of PEFT adapters into rows of ranks on the host. All faults are found from the header.

Tensors are named base_model.model.<module>.lora_A.weight [r, in] and .lora_B.weight [out, r].
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from nanovllm.adapters.folder import WEIGHTS, file_of
from nanovllm.adapters.peft import Modules, is_listed
from nanovllm.config import ConfigError
from nanovllm.layers.lora import AdaptedPart
from nanovllm.model_identity import digest_of
from nanovllm.models.adapter_experts import PlacedExperts, module_of, of_expert, spellings
from nanovllm.models.adapter_layout import AdapterLayout
from nanovllm.models.destination import FLOATS
from nanovllm.models.faults import described
from nanovllm.models.shards import Stored, contents, tensors_in
from nanovllm.plan import AdapterContent

TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
UNSUPPORTED = {  # parts of names that are refused with a reason
    "lora_magnitude_vector": "DoRA is not supported",
    "lora_embedding_": "adapters of the embedding are not supported",
    "lora_B.bias": "biases are not supported",
    "trainable_tokens_delta": "embeddings of tokens are not supported",
}
BASE_LAYER = ".base_layer"
# Parameters of all experts, and the modules of one expert that they consist of.
SINGLE = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
Pairs = dict[str, tuple[Stored, Stored]]  # A and B by module


class AdapterFiles(NamedTuple):
    """An adapter's name, its modules by its config, and the header of its tensors.

    The config applies to the names that its modules have in the files. `pairs` has those of
    transformers' text model, and `spelled` the ones in the files by the former.
    """

    name: str
    peft: Modules
    pairs: Pairs
    spelled: Mapping[str, str] = MappingProxyType({})

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's pair of matrices."""
        return self.peft.rank_of(self.spelled.get(module, module))

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's delta."""
        return self.peft.scale_of(self.spelled.get(module, module))

    def of_parameter(self, folder: str, parameter: str) -> str:
        """Return the name in the files of a parameter of all experts.

        `folder` is the module of the experts.
        """
        names = (folder, f"{folder}{BASE_LAYER}")
        spelled = next((self.spelled[one] for one in names if one in self.spelled), folder)
        return f"{spelled.removesuffix(BASE_LAYER)}.{parameter}"


def files_of(folder: Path, name: str, peft: Modules) -> AdapterFiles:
    """Return an adapter with its tensors' header. Raise ConfigError if they are not pairs."""
    spelled: dict[str, str] = {}
    halves: dict[str, dict[str, Stored]] = {}
    for tensor_name, tensor in tensors_in(file_of(folder, name, WEIGHTS)):
        for text, reason in UNSUPPORTED.items():
            if text in tensor_name:
                raise ConfigError(f"adapter {name}: {tensor_name}: {reason}")
        if (match := TENSOR.fullmatch(tensor_name)) is None:
            raise ConfigError(f"adapter {name}: the tensor {tensor_name} is unexpected")
        module = module_of(match[1])
        if spelled.setdefault(module, match[1]) != match[1]:
            both = f"{spelled[module]} and {match[1]}"
            raise ConfigError(f"adapter {name}: {both} are names of the same module")
        halves.setdefault(module, {})[match[2]] = tensor
    for module, pair in halves.items():
        if len(pair) < 2:
            half = "B" if "A" in pair else "A"
            raise ConfigError(f"adapter {name}: {module} has no lora_{half}.weight")
    if not halves:
        raise ConfigError(f"adapter {name}: {WEIGHTS} has no tensors")
    pairs = {module: (pair["A"], pair["B"]) for module, pair in halves.items()}
    return AdapterFiles(name, peft, pairs, spelled)


def check_files(files: AdapterFiles, layout: AdapterLayout) -> None:
    """Raise ConfigError, with all faults, if the tensors do not fit the config and the model."""
    name, peft, pairs = files[:3]
    faults: dict[str, list[str]] = {}
    for module, (a, b) in pairs.items():
        if (expected := shapes_of(module, files, layout)) is None:
            faults.setdefault("of no product of the model", []).append(module)
            continue
        if not is_allowed(module, files, layout):
            faults.setdefault("of modules that the config does not target", []).append(module)
        for half, tensor, shape in zip("AB", (a, b), expected, strict=True):
            if tensor.shape != shape:
                text = f"{module}.lora_{half} is {list(tensor.shape)}, expected {list(shape)}"
                faults.setdefault("with a wrong shape", []).append(text)
            if tensor.dtype not in FLOATS:
                text = f"{module}.lora_{half} is {tensor.dtype}, expected {' or '.join(FLOATS)}"
                faults.setdefault("with a wrong type", []).append(text)
    # Transformers 5 has no modules of single experts. So names of modules that match them, as
    # `down_proj` does, may mean only the shared expert.
    routed = layout.routed
    absent = routed if routed.isdisjoint(pairs) else set[str]()
    missing = sorted(
        module
        for module in layout.parts.keys() - absent
        if module not in pairs and any(map(peft.targets, spellings(module)))
    )
    missing += parameters_missing(pairs, peft, layout)
    if missing:
        faults["missing"] = missing
    if faults:
        kinds = "; ".join(described(kind, modules) for kind, modules in faults.items())
        raise ConfigError(f"adapter {name} does not fit the model: {kinds}")


def parameters_missing(pairs: Pairs, peft: Modules, layout: AdapterLayout) -> list[str]:
    """Return the parameters of experts and routers that the config names and that have no pair."""
    if peft.config.layers_to_transform is not None:
        return []  # it is unknown whether it applies to parameters
    present = {f"{module}.weight" for module in pairs}
    for module in pairs:
        folder = module.removesuffix(BASE_LAYER)
        if (placed := layout.fused.get(folder)) is not None:
            present.add(f"{folder}.{fused_name(module, pairs, placed)}")
    for folder, placed in layout.fused.items():  # or one pair for each expert
        for name, singles in SINGLE.items():
            each = product(range(len(placed.by_expert)), singles)
            if all(f"{folder}.{expert}.{single}" in pairs for expert, single in each):
                present.add(f"{folder}.{name}")
    every = [f"{module}.weight" for module in layout.dense]
    every += [f"{folder}.{name}" for folder in layout.fused for name in SINGLE]
    listed = peft.config.target_parameters or ()
    named = (name for name in every if any(is_listed(listed, one) for one in spellings(name)))
    return sorted(name for name in named if name not in present)


def is_allowed(module: str, files: AdapterFiles, layout: AdapterLayout) -> bool:
    """Return True if the config targets a module, or the parameter that a pair belongs to."""
    peft, spelled = files.peft, files.spelled.get(module, module)
    if peft.allows(spelled.removesuffix(BASE_LAYER)):
        return True
    parameters = [f"{spelled}.weight"]
    if (placed := layout.fused.get(module.removesuffix(BASE_LAYER))) is not None:
        parameter = fused_name(module, files.pairs, placed)
        parameters = [files.of_parameter(module.removesuffix(BASE_LAYER), parameter)]
        # Transformers 5 converts the names of single experts.
        single = f"{module.removesuffix(BASE_LAYER)}.0.{SINGLE[parameter][0]}"
        if any(map(peft.allows, spellings(single))):
            return True
    experts, _, single = module.rpartition(".")
    for name, singles in SINGLE.items():
        if single in singles and (folder := experts.rpartition(".")[0]) in layout.fused:
            parameters += spellings(f"{folder}.{name}")
    listed = peft.config.target_parameters or ()
    return any(is_listed(listed, parameter) for parameter in parameters)


Shapes = tuple[tuple[int, int], tuple[int, int]]  # of A and B


def shapes_of(module: str, files: AdapterFiles, layout: AdapterLayout) -> Shapes | None:
    """Return the shapes that a module's pair must have; None if there is no such module."""
    if (part := layout.parts.get(module)) is not None:
        rank = files.rank_of(module)
        return (rank, part.inputs.full), (part.outputs[0].full, rank)
    if (placed := layout.fused.get(folder := module.removesuffix(BASE_LAYER))) is None:
        return None
    name = fused_name(module, files.pairs, placed)
    rank = files.peft.rank_of(files.of_parameter(folder, name)) * len(placed.by_expert)
    gate, _, down = placed.by_expert[0]
    part = down if name == "down_proj" else gate
    num_outputs = part.outputs[0].full * (1 if name == "down_proj" else 2)
    return (rank, part.inputs.full), (num_outputs, rank)


def fused_name(module: str, pairs: Pairs, placed: PlacedExperts) -> str:
    """Return the parameter of all experts that a pair changes.

    PEFT wraps gate_up_proj first. So it is the base layer, or the only pair of its width.
    """
    is_base, hidden = module.endswith(BASE_LAYER), placed.sizes[0]
    is_alone = f"{module}{BASE_LAYER}" not in pairs
    return (
        "gate_up_proj"
        if is_base or (is_alone and pairs[module][0].shape[1:] == (hidden,))
        else ("down_proj")
    )


def rank_rows(
    files: AdapterFiles, layout: AdapterLayout, dtype: torch.dtype
) -> tuple[Tensor, AdapterContent]:
    """Return this process's rows of an adapter's ranks, with the scale in B, and their digest.

    Modules that the adapter does not change, and ranks that a module does not have, are zeros. The
    digest is of the keys of the config that have an effect, and of the names, types, shapes and
    bytes of all tensors as in the files. The adapter's own name is not in it. Raise ConfigError if
    a number is NaN or infinite.
    """
    name, peft, pairs = files[:3]
    digests: list[tuple[object, ...]] = []
    rows_RX = torch.zeros(peft.config.most_rank, layout.width, dtype=dtype)
    for module, (a, b) in sorted(pairs.items()):
        raw_a, raw_b = contents(a), contents(b)
        spelled = files.spelled.get(module, module)
        digests.append((spelled, described_bytes(a, raw_a), described_bytes(b, raw_b)))
        a_RD, b_NR = raw_a.view(a.shape).float(), raw_b.view(b.shape).float()
        if not (a_RD.isfinite().all() and b_NR.isfinite().all()):
            raise ConfigError(f"adapter {name}: {module} has NaN or infinite numbers")
        if (part := layout.parts.get(module)) is not None:
            put(rows_RX, part, a_RD, b_NR * files.scale_of(module))
            continue
        placed = layout.fused[folder := module.removesuffix(BASE_LAYER)]
        parameter = fused_name(module, pairs, placed)
        b_NR = b_NR * peft.scale_of(files.of_parameter(folder, parameter))
        put_fused(rows_RX, placed, a_XD=a_RD, b_NX=b_NR, parameter=parameter)
    if not rows_RX.isfinite().all():
        raise ConfigError(f"adapter {name}: its numbers are too large for {dtype}")
    config = msgspec.msgpack.encode(
        peft.config
    )  # in the order of the file: of patterns, the first counts
    return rows_RX, AdapterContent(peft.config.most_rank, digest_of("adapter", config, digests))


def described_bytes(tensor: Stored, data: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """Return all that identifies a tensor: its type, its shape and a digest of its bytes."""
    digest = sha256(data.view(torch.uint8).numpy().data).digest()
    return tensor.dtype, tensor.shape, digest


def put(rows_RX: Tensor, part: AdaptedPart, a_RD: Tensor, b_NR: Tensor) -> None:
    """Write this process's columns of A and rows of B of one module."""
    size, at, rows_RX = part.inputs.count, part.b_at, rows_RX[: len(a_RD)]
    rows_RX[:, part.a_at : part.a_at + size] = a_RD.narrow(1, part.inputs.start, size)
    for span in part.outputs:
        rows_RX[:, at : at + span.count] = b_NR.narrow(0, span.start, span.count).t()
        at += span.count


def put_fused(
    rows_RX: Tensor, placed: PlacedExperts, *, a_XD: Tensor, b_NX: Tensor, parameter: str
) -> None:
    """Write the pair of all experts' gate and up, or of their down."""
    count = len(placed.by_expert)
    for expert, (gate, up, down) in enumerate(placed.by_expert):
        if not gate.width:
            continue  # on another rank
        a_RD, b_NR = of_expert(a_XD, b_NX, expert, count)
        if parameter == "down_proj":
            put(rows_RX, down, a_RD, b_NR)
        else:
            for part, half_NR in zip((gate, up), b_NR.chunk(2), strict=True):
                put(rows_RX, part, a_RD, half_NR)
