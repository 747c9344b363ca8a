"""Selection of the products of experts by the number of tokens, and its log line."""

from __future__ import annotations

from dataclasses import replace

import torch
from nanovllm_kernels.experts.reference import EXPERTS
from nanovllm_kernels.experts.route_reference import Routing
from nanovllm_kernels.products.few_fp8_cute import FEW_FP8

from nanovllm.config import Kernels, Recipe
from nanovllm.layers import kernels as recipe_kernels
from nanovllm.layers.describe import products
from nanovllm.layers.expert_kernels import CUTE, TRITON
from nanovllm.layers.expert_products import TORCH, ExpertKernels
from nanovllm.layers.experts.products import ExpertMLPs, products_for
from nanovllm.layers.kernels import select_ops
from nanovllm.layers.linear import AddLinear
from nanovllm.layers.products import Skinny
from nanovllm.parallel.mesh import Mesh, Span
from nanovllm.runner.graphs import obstacles

CPU = torch.device("cpu")
FEW = replace(EXPERTS, tile=lambda num_pairs, num_experts: 16, name="few")
D, F, E, K = 64, 32, 16, 2
RULE = Routing("softmax", renormalise=True)


def kernels_of(*many) -> ExpertKernels:
    return TORCH._replace(few=FEW, many=many)


def chosen(
    kernels: ExpertKernels, num_pairs: int, *, share: int = 1, dtype=torch.bfloat16
) -> tuple[str, int]:
    weight_E2FD = torch.empty(E // share, 2 * F, D, dtype=dtype, device="meta")
    found, tile = products_for(kernels, num_pairs, Span(E, 0, E // share), weight_E2FD)
    return found.name, tile


def test_many_rows_of_an_expert_are_for_the_first_products_that_fit() -> None:
    kernels = kernels_of(*CUTE.many)
    assert chosen(kernels, 192) == ("few", 16)
    assert chosen(kernels, 193) == ("quack", 64)
    assert chosen(kernels, 1024) == ("quack", 192)
    assert chosen(kernels, 1024, dtype=torch.float32) == ("few", 16)
    assert chosen(kernels_of(), 1024) == ("few", 16)
    first = replace(FEW, name="first")
    assert chosen(kernels_of(first, *CUTE.many), 1024) == ("first", 16)


def test_a_rank_asks_by_the_pairs_that_it_expects() -> None:
    """A quarter of the experts gets a quarter of the pairs, so the load per expert is the same."""
    assert chosen(kernels_of(*CUTE.many), 192, share=4) == ("few", 16)
    assert chosen(kernels_of(*CUTE.many), 196, share=4) == ("quack", 64)
    assert chosen(kernels_of(*CUTE.many), 1024, share=4) == ("quack", 192)


def test_few_pairs_are_not_sorted_where_all_experts_are() -> None:
    kernels = kernels_of(*CUTE.many)._replace(is_unsorted=CUTE.is_unsorted)
    assert chosen(kernels, 32) == chosen(kernels, 64) == ("few", 0)
    assert chosen(kernels, 65) == chosen(kernels, 32, share=4) == ("few", 16)
    assert chosen(kernels, 193) == ("quack", 64)


def test_the_log_tells_it() -> None:
    with torch.device("meta"):
        whole = Span(E, 0, E), Span(F, 0, F)
        experts = ExpertMLPs(D, *whole, K, RULE, kernels_of(*CUTE.many), (*range(E),)).bfloat16()
        head = AddLinear(Span(D, 0, D), D, Mesh(), select_ops(Kernels(), CPU))
    assert products(torch.nn.ModuleDict({"experts": experts}), head, (1, 96, 97, 512)) == (
        "experts few 1-96, quack 97-512; head library 1-512"
    )


def test_a_cpu_has_the_definition() -> None:
    kernels = select_ops(Kernels(), CPU).experts
    assert kernels is TORCH and kernels.many == () and kernels.few is EXPERTS
    assert kernels.few.name == "torch"


def test_a_gpu_has_kernels_of_its_own(monkeypatch) -> None:
    """On Hopper, these include kernels for many rows."""
    cuda = torch.device("cuda")
    monkeypatch.setattr(recipe_kernels, "obstacle", lambda _: "it is used on Hopper GPUs only")
    assert (
        recipe_kernels.fastest("experts", cuda),
        recipe_kernels.fastest("gated_linear", cuda),
    ) == ("triton", "torch")
    assert select_ops(Kernels(), cuda).experts is TRITON
    monkeypatch.setattr(recipe_kernels, "obstacle", lambda _: None)
    assert (
        recipe_kernels.fastest("experts", cuda),
        recipe_kernels.fastest("fp8_linear", cuda),
    ) == ("cute", "cute")
    assert select_ops(Kernels(), cuda).products[0] == Skinny(FEW_FP8, is_fp8=True)
    assert select_ops(Kernels(), cuda).experts is CUTE
    assert CUTE._replace(many=()) == TRITON and len(CUTE.many) == 2


def test_the_definition_is_not_captured() -> None:
    recipe = Recipe(device="cuda", kernels=Kernels(attention="flash", experts="torch"))
    said = "kernels.experts is torch, which reads tensors' values on the host"
    assert obstacles(recipe) == [said]
