"""The recipe's choice of implementations of operations.

The plain-torch reference in nanovllm_kernels.norms.reference defines the meaning of each operation.
`kernels.<name>: torch` in a recipe selects the reference, for ablations and for bisecting faults;
`compile` leaves the fusion to torch.compile.

Decision: "auto" is a kernel of ours only on a GPU with the compute capability for which all kernels
were measured, that of Hopper. On other GPUs it is torch.compile for operations that it can fuse,
and the portable implementation for the others. A kernel that was tuned elsewhere may be slow, and
torch.compile tunes for the GPU that is here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from nanovllm_kernels.device import is_hopper
from nanovllm_kernels.experts.reference import EXPERTS, expert_down, expert_gate_up
from nanovllm_kernels.norms.reference import Ranks
from nanovllm_kernels.products.gated_linear import obstacle
from nanovllm_kernels.products.invariant import linear, without_workspace
from torch import Tensor

from nanovllm.config import ConfigError, Kernels
from nanovllm.layers.ops import Ops
from nanovllm.layers.products import (
    Dequantised,
    Fp8,
    Library,
    ProductKernel,
    Skinny,
    preference,
)
from nanovllm.registry import resolve

# Implementations of products with weights. torch: products.LIBRARY
PRODUCTS = ("gated_linear", "skinny_linear", "sliced_linear", "added_linear", "fp8_linear")

IMPLEMENTATIONS = {
    "torch": {
        "rms_norm": "nanovllm_kernels.norms.reference:rms_norm",
        "add_rms_norm": "nanovllm_kernels.norms.reference:add_rms_norm",
        "silu_mul": "nanovllm_kernels.norms.reference:silu_mul",
        "sigmoid_mul": "nanovllm_kernels.norms.reference:sigmoid_mul",
        "rope_store": "nanovllm_kernels.norms.reference:rope_store",
        "experts": "nanovllm.layers.expert_products:TORCH",
        "delta": "nanovllm.attention.delta_kernels:TORCH",
        "add_deltas": "nanovllm_kernels.adapters.reference:add_deltas",
    },
    "library": {
        "sliced_linear": "nanovllm_kernels.products.library_linear:SLICED_LINEAR",
        "added_linear": "nanovllm_kernels.products.library_linear:ADDED_LINEAR",
    },
    "triton": {
        "rms_norm": "nanovllm_kernels.norms.norm:rms_norm",
        "add_rms_norm": "nanovllm_kernels.norms.norm:add_rms_norm",
        "silu_mul": "nanovllm_kernels.norms.activation:silu_mul",
        "sigmoid_mul": "nanovllm_kernels.norms.activation:sigmoid_mul",
        "rope_store": "nanovllm_kernels.norms.rope_store:rope_store",
        "experts": "nanovllm.layers.expert_kernels:TRITON",
        "delta": "nanovllm.attention.delta_triton:TRITON",
        "add_deltas": "nanovllm_kernels.adapters.deltas:add_deltas",
    },
    "cute": {
        "gated_linear": "nanovllm_kernels.products.gated_linear:GATED_LINEAR",
        "skinny_linear": "nanovllm_kernels.products.skinny_linear:SKINNY_LINEAR",
        "experts": "nanovllm.layers.expert_kernels:CUTE",
        "fp8_linear": "nanovllm_kernels.products.dense_fp8:FP8_LINEAR",
    },
    "tiled": {"fp8_linear": "nanovllm_kernels.products.dense_fp8:TILED_FP8"},
}
# For kernels.invariant, next to those of Triton and the library. All but the last two are for
# Hopper GPUs.
ORDERED = {
    "skinny_linear": "nanovllm_kernels.products.skinny_linear:ORDERED_LINEAR",
    "fp8_linear": "nanovllm_kernels.products.dense_fp8:TILED_FP8",
    "experts": "nanovllm_kernels.experts.grouped_linear:GROUPED",
    "few_experts": "nanovllm_kernels.experts.products:ORDERED_EXPERTS",
    "delta": "nanovllm.attention.delta_triton:ORDERED",
    "latent_store": "nanovllm_kernels.attention.latent_store:ORDERED",
}
OPERATIONS = (*IMPLEMENTATIONS["torch"], *PRODUCTS)
GPU = torch.device("cuda")
# Operations that are chosen in other files. Their "auto" is torch or Triton.
CHOSEN_ELSEWHERE = ("sample", "batch_prep", "exchange")
FUSED = ("rms_norm", "add_rms_norm", "silu_mul", "sigmoid_mul", "rope_store")  # may be compiled
LATENT_STORE = {  # by the recipe's choice of rope_store; torch.compile cannot write fp8 latents
    "torch": "nanovllm_kernels.attention.latent_reference:latent_store",
    "triton": "nanovllm_kernels.attention.latent_store:latent_store",
}


def select_ops(kernels: Kernels, device: torch.device) -> Ops:
    """Return the recipe's operations. Raise ConfigError if one cannot run on this device."""
    if kernels.invariant:
        return invariant_ops(kernels, device)
    chosen: dict[str, Any] = {}
    products: dict[str, Any] = {}
    for name in OPERATIONS:
        choice = getattr(kernels, name)
        kind = fastest(name, device) if choice == "auto" else choice
        if kind == "triton" and device.type == "cpu":
            raise ConfigError(f"kernels.{name} is triton, which needs a GPU; use torch")
        if kind in ("cute", "tiled") and (reason := obstacle(device)) is not None:
            raise ConfigError(f"kernels.{name} is {kind}, but {reason}; use torch")
        if kind == "compile":
            chosen[name] = compiled(name, device)
        elif name not in PRODUCTS:
            chosen[name] = resolve(IMPLEMENTATIONS[kind], name)
        elif kind != "torch":
            products[name] = resolve(IMPLEMENTATIONS[kind], name)
        if name == "rope_store":
            stored = kind if kind in LATENT_STORE else portable(device)
            chosen["latent_store"] = resolve(LATENT_STORE, stored)
    return Ops(**chosen, products=preference(products))


def invariant_ops(kernels: Kernels, device: torch.device) -> Ops:
    """Return operations whose result for a row does not depend on the other rows.

    All other operations treat rows apart, in fixed orders. Raise ConfigError if the recipe names an
    implementation that does not.
    """
    if device.type == "cuda":
        return invariant_gpu_ops(kernels)
    for name in ("attention", "decode", *OPERATIONS):
        if (choice := getattr(kernels, name)) not in ("auto", "torch"):
            raise ConfigError(f"kernels.{name} is {choice}, but kernels.invariant needs torch")
    chosen = {name: resolve(IMPLEMENTATIONS["torch"], name) for name in IMPLEMENTATIONS["torch"]}
    few = replace(
        EXPERTS,
        gate_up=partial(expert_gate_up, multiply=linear),
        down=partial(expert_down, multiply=linear),
    )
    chosen["experts"] = chosen["experts"]._replace(few=few)
    chosen["add_deltas"] = partial(chosen["add_deltas"], multiply=linear)
    return Ops(**chosen, products=preference({}, linear), multiply=linear, invariant=True)


def invariant_gpu_ops(kernels: Kernels) -> Ops:
    """Return the invariant operations of a GPU. Raise ConfigError if the recipe names others.

    A sum over the inputs of a weight has one order for any number of rows. So no product splits its
    inputs. A product of 16 bits includes no norm, gate or addition, which would round otherwise
    than apart. One of 8 bits has one kernel, so it gates and adds for any number of rows.
    """
    for name in OPERATIONS:
        needed, choice = fastest(name, GPU, invariant=True), getattr(kernels, name)
        if choice not in ("auto", needed):
            raise ConfigError(f"kernels.{name} is {choice}, but kernels.invariant needs {needed}")
    without_workspace()
    names = [name for name in IMPLEMENTATIONS["triton"] if name != "experts"]
    chosen = {name: resolve(IMPLEMENTATIONS["triton"], name) for name in names}
    chosen |= {name: resolve(ORDERED, name) for name in ("latent_store", "delta")}
    products: list[ProductKernel] = [Library(), Dequantised()]
    experts = resolve(IMPLEMENTATIONS["triton"], "experts")
    if obstacle(GPU) is None:
        fp8, few = (resolve(ORDERED, name) for name in ("fp8_linear", "skinny_linear"))
        products = [Fp8(fp8), Skinny(few), *products]
        experts = experts._replace(many=(resolve(ORDERED, "experts"),))
    few_experts = resolve(ORDERED, "few_experts")
    experts = experts._replace(few=few_experts, norm_router=None, down_combine=None)
    return Ops(**chosen, experts=experts, products=tuple(products), invariant=True)


def compiled(name: str, device: torch.device) -> Callable[..., Any]:
    """Return the reference of an operation through torch.compile.

    It compiles for one token, for the next number of tokens, and then for any number: only sizes
    that have changed become dynamic. With `dynamic=True`, widths would be dynamic, too.
    """
    if device.type == "cpu" and shutil.which("g++") is None:
        raise ConfigError(f"kernels.{name} is compile, which needs g++ on a CPU; use torch")
    fused = torch.compile(resolve(IMPLEMENTATIONS["torch"], name))
    if name != "rope_store":
        return fused
    untraced = resolve(IMPLEMENTATIONS[portable(device)], name)

    @wraps(fused)
    def rope_store(*args: Any, ranks: Ranks | None = None, **options: Any) -> Tensor:  # noqa: ANN401
        """Run the compiled operation, unless it has a sum over ranks, which cannot be traced."""
        is_summed = ranks is not None and ranks.tp_size > 1
        result: Tensor = (untraced if is_summed else fused)(*args, ranks=ranks, **options)
        return result

    return rope_store


def portable(device: torch.device) -> str:
    """Return the implementation of an operation that runs on every device of this type."""
    return "torch" if device.type == "cpu" else "triton"


def fastest(operation: str, device: torch.device, *, invariant: bool = False) -> str:
    """Return the implementation that "auto" means on this device.

    `invariant`: with kernels.invariant, for which products include no other operation.
    """
    if invariant and operation in PRODUCTS:
        has_kernel = operation in ORDERED and device.type == "cuda" and obstacle(device) is None
        return ("tiled" if operation == "fp8_linear" else "cute") if has_kernel else "torch"
    if operation in IMPLEMENTATIONS["cute"] and obstacle(device) is None:
        return "cute"
    if device.type == "cpu":
        return "torch"
    if operation in FUSED and not is_hopper(device) and not invariant:
        return "compile"
    if operation in CHOSEN_ELSEWHERE:
        return portable(device)
    return next((k for k in ("triton", "library") if operation in IMPLEMENTATIONS[k]), "torch")


def reason(kernels: Kernels, device: torch.device) -> str:
    """Return one line: the implementations that "auto" means on this device, and why."""
    if kernels.invariant:
        return "kernels.invariant is true, so every sum of a row has one order"
    if kernels.eager:
        return "kernels.eager is true, so auto is plain torch, without CUDA graphs"
    if device.type == "cpu":
        return "the device is a CPU, so auto is plain torch"
    if is_hopper(device):
        return "auto is the fastest kernel measured on GPUs of compute capability 9.0"
    major, minor = torch.cuda.get_device_capability(device)
    return (
        f"the GPU has compute capability {major}.{minor}, and kernels were measured on 9.0 only, "
        f"so auto is torch.compile for {', '.join(FUSED)}, and portable Triton or torch for the "
        "rest"
    )
