"""Which products of experts serve how many tokens, and that the log tells it."""

from __future__ import annotations

from dataclasses import replace

import torch
from nanovllm_kernels.experts_reference import EXPERTS

from nanovllm.config import Kernels
from nanovllm.layers.describe import products
from nanovllm.layers.expert_products import MANY, NONE, products_for
from nanovllm.layers.linear import AddLinear
from nanovllm.layers.moe import Experts
from nanovllm.layers.ops import Ops, select_ops
from nanovllm.parallel.mesh import Mesh, Span

CPU = torch.device("cpu")
FEW = replace(EXPERTS, tile=lambda num_pairs, num_experts: 16, name="few")
D, F, E, K = 64, 32, 16, 2


def ops_of(*many) -> Ops:
    return replace(select_ops(Kernels(), CPU), few_experts=FEW, many_experts=many)


def chosen(ops: Ops, num_pairs: int, *, share: int = 1, dtype=torch.bfloat16) -> tuple[str, int]:
    weight_E2FD = torch.empty(E // share, 2 * F, D, dtype=dtype, device="meta")
    found, tile = products_for(ops, num_pairs, Span(E, 0, E // share), weight_E2FD)
    return found.name, tile


def test_many_rows_of_an_expert_are_for_the_first_products_that_fit() -> None:
    ops = ops_of(*MANY)
    assert chosen(ops, 64) == ("few", 16)
    assert chosen(ops, 65) == ("quack", 64)
    assert chosen(ops, 1024) == ("quack", 128)
    assert chosen(ops, 1024, dtype=torch.float32) == ("few", 16)
    assert chosen(ops_of(*NONE), 1024) == ("few", 16)
    first = replace(FEW, name="first")
    assert chosen(ops_of(first, *MANY), 1024) == ("first", 16)


def test_a_rank_asks_by_the_pairs_that_it_expects() -> None:
    """A quarter of the experts get a quarter of the pairs: as many each as all would."""
    assert chosen(ops_of(*MANY), 64, share=4) == ("few", 16)
    assert chosen(ops_of(*MANY), 68, share=4) == ("quack", 64)
    assert chosen(ops_of(*MANY), 1024, share=4) == ("quack", 128)


def test_the_log_tells_it() -> None:
    with torch.device("meta"):
        experts = Experts(D, Span(E, 0, E), Span(F, 0, F), K, ops_of(*MANY)).bfloat16()
        head = AddLinear(Span(D, 0, D), D, Mesh(), ops_of())
    assert products(torch.nn.ModuleDict({"experts": experts}), head, (1, 32, 33, 512)) == (
        "experts few 1-32, quack 33-512; head library 1-512"
    )


def test_a_cpu_has_the_definition() -> None:
    ops = select_ops(Kernels(), CPU)
    assert ops.many_experts == () and ops.few_experts is EXPERTS
    assert ops.few_experts.name == "torch"
