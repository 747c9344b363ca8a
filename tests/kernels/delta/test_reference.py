"""The gated delta rule over packed rows equals that of transformers, request by request."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from nanovllm_kernels.delta import reference as delta
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

LENGTHS = (1, 64, 0, 5, 130)
SLOTS_R = torch.tensor([3, 0, 6, 5, 1])
STARTS_R1 = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
T, N = sum(LENGTHS), 8


def rows() -> list[tuple[int, slice]]:
    return [
        (slot, slice(start, end))
        for slot, (start, end) in zip(SLOTS_R.tolist(), pairwise(STARTS_R1.tolist()), strict=True)
    ]


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize("heads", [(1, 1), (2, 4), (2, 6), (1, 4)])
@pytest.mark.parametrize(
    "function", [theirs.torch_chunk_gated_delta_rule, theirs.torch_recurrent_gated_delta_rule]
)
def test_rows_equal_transformers(heads, function) -> None:
    (G, H), K, V = heads, 16, 24
    q, k, v, a, b, a_log, dt_bias, states = tensors(
        (T, G, K), (T, G, K), (T, H, V), (T, H), (T, H), (H,), (H,), (N, H, K, V)
    )
    g, beta = delta.gates(a, b, a_log, dt_bias)
    assert (g < 0).all() and ((beta > 0) & (beta < 1)).all()
    expected_states, expected = states.clone(), torch.empty_like(v)
    for slot, of in rows():
        if of.start < of.stop:
            inputs = [x[of][None] for x in (q, k, v, g, beta)]
            known = {"initial_state": states[slot][None], "output_final_state": True}
            o, state = function(*inputs, **known, use_qk_l2norm_in_kernel=True)
            expected[of], expected_states[slot] = o[0], state[0]
    o = delta.delta_rows(q, k, v, g, beta, states, SLOTS_R, STARTS_R1)
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states, expected_states, rtol=1e-4, atol=1e-5)


def test_gates_equal_transformers() -> None:
    a, b, a_log, dt_bias = tensors((5, 3), (5, 3), (3,), (3,))
    g, beta = delta.gates(a.bfloat16(), b.bfloat16(), a_log, dt_bias)
    softplus = torch.nn.functional.softplus(a.bfloat16().float() + dt_bias)
    # Torch's own functions differ in the last bit, by the place of a number in its tensor.
    torch.testing.assert_close(g, -a_log.exp() * softplus, rtol=3e-7, atol=0)
    torch.testing.assert_close(beta, b.bfloat16().float().sigmoid(), rtol=3e-7, atol=0)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolutions_equal_transformers(width, dtype) -> None:
    x, weight, stored = (one.to(dtype) for one in tensors((T, 12), (12, width), (N, 12, width - 1)))
    expected_stored, expected = stored.clone(), torch.empty_like(x)
    for slot, of in rows():
        if of.start < of.stop:
            inputs = x[of].T[None], expected_stored[slot][None], weight, None, "silu"
            expected[of] = theirs.causal_conv1d_update(*inputs)[0].T
    y = delta.conv_rows(x, weight, stored, SLOTS_R, STARTS_R1)
    error = 1e-5 if dtype == torch.float32 else 2e-2  # transformers also rounds before SiLU
    torch.testing.assert_close(y, expected, rtol=error, atol=error)
    torch.testing.assert_close(stored, expected_stored, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_norm_equals_transformers(dtype) -> None:
    o, z, weight = (one.to(dtype) for one in tensors((7, 3, 16), (7, 3, 16), (16,)))
    norm = theirs.Qwen3NextRMSNormGated(16, eps=1e-5).to(dtype)
    norm.weight.data = weight
    torch.testing.assert_close(
        delta.gated_norm(o, z, weight, 1e-5), norm(o, z), rtol=1e-6, atol=1e-6
    )
