"""The MoE block gives the same results with Triton kernels as with plain torch.

It runs in Triton's interpreter in a separate process. The interpreter must be on before triton is
imported.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from nanovllm_kernels.experts.route_reference import Routing
from torch import Tensor

from nanovllm.attention.base import ForwardContext
from nanovllm.config import Kernels
from nanovllm.layers.expert_kernels import TRITON
from nanovllm.layers.expert_products import TORCH, ExpertKernels
from nanovllm.layers.experts.moe import Mixture, MoE
from nanovllm.layers.kernels import select_ops
from nanovllm.layers.residual import Added
from nanovllm.parallel.mesh import Mesh
from tests.interpreted import in_interpreter, in_parent, passes

D, E, F, K = 256, 8, 128, 3
NO_ROWS = ForwardContext(None, None)  # type: ignore[arg-type]


@in_parent
def test_in_the_interpreter() -> None:
    passes(__file__, 12)


def block(kernels: ExpertKernels, mesh: Mesh, *, exact: bool) -> MoE:
    """Return a block like DeepSeek-R1's with fp8 weights if `exact`, else like Qwen3-Next's.

    A shared expert is one of the experts if the rank has all of them.
    """
    torch.manual_seed(0)
    mixture = Mixture(
        hidden_size=D,
        experts=("num_experts", E),
        inner=("moe_intermediate_size", F),
        num_chosen=K,
        rule=Routing("sigmoid" if exact else "softmax", renormalise=True),
        exact=exact,
        shared=F,
        gates_shared=not exact,
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = MoE(
            mixture,
            eps=1e-6,
            layer=0,
            is_last=False,
            mesh=mesh,
            ops=replace(select_ops(Kernels(), torch.device("cpu")), experts=kernels),
        )
    finally:
        torch.set_default_dtype(torch.float32)
    if exact:
        made.experts.to_fp8()
        made.experts.to_empty(device="cpu")
    for name, parameter in made.named_parameters():
        drawn = torch.randn(parameter.shape) * parameter.shape[-1] ** -(parameter.ndim > 1) / 2
        parameter.data.copy_(drawn.abs() if name.endswith("scale") else drawn)
    return made


def check(num_tokens: int, ep: int, exact: bool) -> None:
    mesh = Mesh(1, 2, ep_size=2) if ep > 1 else Mesh()
    x_TD = torch.randn(num_tokens, D, generator=torch.Generator().manual_seed(1)).bfloat16()
    found: list[Tensor] = []
    for kernels in (TORCH, TRITON):
        after = block(kernels, mesh, exact=exact)(Added(x_TD.clone()), NO_ROWS)
        found.append(after.stream_TD if isinstance(after, Added) else after.update)
    expected, actual = (y_TD.float() for y_TD in found)
    scale = float(expected.abs().max())
    assert scale > 0
    # Everything is bfloat16, to which the interpreter truncates.
    assert float((expected - actual).abs().max()) < scale / 32


@in_interpreter
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_kernels(num_tokens: int, ep: int, exact: bool) -> None:
    check(num_tokens, ep, exact)
