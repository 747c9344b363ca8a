"""The check at start that products do not depend on the number of rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from nanovllm_kernels.experts.reference import EXPERTS, expert_down
from nanovllm_kernels.fp8_reference import Weight
from torch import Tensor
from torch.nn import functional as F

from nanovllm.attention.delta_kernels import TORCH
from nanovllm.config import ConfigError, Kernels
from nanovllm.layers.kernels import select_ops
from nanovllm.layers.ops import Ops
from nanovllm.layers.products import Fusion, Library, preference
from nanovllm.runner.invariance import check_products, check_states
from tests.models.steps import CPU, load
from tests.models.tiny import CASES, make_tiny

COUNTS = 1, 3, 17, 40
INVARIANT = select_ops(Kernels(invariant=True), CPU)


def split(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """Multiply as a library does that splits the inputs of products of few rows."""
    if len(x_TD) > 16:
        return F.linear(x_TD, weight_ND)
    half = x_TD.shape[1] // 2
    return F.linear(x_TD[:, :half], weight_ND[:, :half]) + F.linear(
        x_TD[:, half:], weight_ND[:, half:]
    )


def check(folder: Path, case: str, ops: Ops) -> None:
    family, overrides = CASES[case]
    make_tiny(folder, family, **overrides)
    check_products(load(folder, ops=ops), torch.float32, COUNTS)


@pytest.mark.parametrize("case", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_invariant_products_pass(case: str, tmp_path: Path) -> None:
    check(tmp_path, case, INVARIANT)


def test_a_product_that_splits_its_inputs_is_named(tmp_path: Path) -> None:
    ops = replace(INVARIANT, products=preference({}, split), multiply=split)
    text = (
        r"^kernels\.invariant is true, but the product with \S+ \[\d+, \d+\] has other bits for 1 "
    )
    with pytest.raises(ConfigError, match=text + "rows than for 40; leave "):
        check(tmp_path, "qwen3", ops)


def test_a_product_that_gates_many_rows_only_is_named(tmp_path: Path) -> None:
    """A gate within the product rounds otherwise than one after it."""

    class Gated(Library):
        def fits(self, num_rows: int, weight: Weight, fusion: Fusion) -> bool:
            return fusion.is_none or (fusion.gate and not fusion.norm and num_rows > 16)

    ops = replace(INVARIANT, products=(Gated(INVARIANT.multiply),))
    text = (
        r"^kernels\.invariant is true, but the product with layers\.0\.mlp\.gate_up \[\d+, \d+\] "
    )
    with pytest.raises(ConfigError, match=text + "has other bits for 1 rows than for 40; leave "):
        check(tmp_path, "qwen3", ops)


def test_experts_that_split_their_inputs_are_named(tmp_path: Path) -> None:
    few = replace(EXPERTS, gate_up=INVARIANT.experts.few.gate_up)
    few = replace(few, down=partial(expert_down, multiply=split))
    ops = replace(INVARIANT, experts=INVARIANT.experts._replace(few=few))
    with pytest.raises(ConfigError, match=r"the product with layers\.\d+\.\S+ \[\d+, \d+, \d+\] "):
        check(tmp_path, "qwen3_moe", ops)


def test_recurrent_layers_that_depend_on_chunks_are_named(tmp_path: Path) -> None:
    def summed_in_pieces(*tensors: Tensor) -> Tensor:
        x_THV = TORCH.rows(*tensors)
        return x_THV * (1 + 2**-20) if len(x_THV) > 64 else x_THV

    make_tiny(tmp_path, "qwen3_next", **CASES["qwen3_next"][1])
    check_states(load(tmp_path, ops=INVARIANT), torch.float32)
    ops = replace(INVARIANT, delta=TORCH._replace(rows=summed_in_pieces))
    text = r"^kernels\.invariant is true, but layers\.0\.\S+ has other bits in one chunk than in "
    with pytest.raises(ConfigError, match=text):
        check_states(load(tmp_path, ops=ops), torch.float32)
