"""Routers with the sizes of M2 and R1 on a GPU: float32 products and those of bfloat16 parts.

Run as a program, it prints their errors and times:

    python -m tests.gpu.test_router
"""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from nanovllm_kernels.timing import graph_us
from torch import Tensor

from nanovllm.layers.experts.router import bfloat16_parts, by_parts
from tests.layers.experts.test_router import ULP, exact

E = 256
SIZES = {"minimax-m2": 3072, "deepseek-r1": 7168}
CUDA = torch.device("cuda")


def drawn(num_tokens: int, hidden_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    made = {"generator": generator, "device": device}
    x_TD = torch.randn(num_tokens, hidden_size, **made).bfloat16()
    return x_TD, torch.randn(E, hidden_size, **made) * hidden_size**-0.5


def in_float32(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    return torch.nn.functional.linear(x_TD.float(), weight_ED)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden_size", SIZES.values())
@pytest.mark.parametrize("num_tokens", [17, 256, 8192])
def test_a_product_by_parts_is_as_exact_as_tensor_cores_add(
    num_tokens: int, hidden_size: int
) -> None:
    """One part has 1,000 times the error. Experts only differ if scores are nearly equal."""
    x_TD, weight_ED = drawn(num_tokens, hidden_size, CUDA)
    expected, size = exact(x_TD, weight_ED)
    parts_IED = bfloat16_parts(weight_ED)
    assert len(parts_IED) == 3 and torch.equal(parts_IED.float().sum(0), weight_ED)
    found = by_parts(x_TD, parts_IED)
    assert found.dtype == torch.float32
    error = (found - expected).abs()
    assert bool((error <= 2.5 * hidden_size * ULP * size).all())
    rounded = (by_parts(x_TD, parts_IED[:1]) - expected).abs().max()
    assert 0 < float(error.max()) < 5e-5 < float(rounded) / 20
    best = expected.topk(9).values
    is_clear = best[:, 7] - best[:, 8] > 1e-4
    of_each = (y.topk(8).indices.sort().values for y in (found, expected))
    same = torch.eq(*of_each).all(1)
    assert bool(same[is_clear].all()) and float(is_clear.float().mean()) > 0.9


@pytest.mark.gpu
def test_a_graph_of_it_gives_the_same() -> None:
    x_TD, weight_ED = drawn(512, 3072, CUDA)
    parts_IED = bfloat16_parts(weight_ED)
    expected = by_parts(x_TD, parts_IED)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = by_parts(x_TD, parts_IED)
    found.fill_(torch.nan)
    graph.replay()
    assert torch.equal(found, expected)


def report(device: torch.device) -> None:
    """Print times in us: float32, then one, two and three parts.

    For each, print the largest difference from float64 and the number of rows with other experts.
    """
    for name, hidden_size in SIZES.items():
        for num_tokens in (32, 64, 128, 256, 512, 2048, 8192):
            x_TD, weight_ED = drawn(num_tokens, hidden_size, device)
            parts_IED = bfloat16_parts(weight_ED)
            ways = [partial(in_float32, x_TD, weight_ED)]
            ways += [partial(by_parts, x_TD, parts_IED[:count]) for count in (1, 2, 3)]
            expected = exact(x_TD, weight_ED)[0]
            best = expected.topk(8).indices.sort().values
            line = f"{name} {num_tokens:5}:"
            for way in ways:
                y_TE = way()
                other = int((y_TE.topk(8).indices.sort().values != best).any(1).sum())
                error = float((y_TE - expected).abs().max())
                line += f"  {graph_us([way] * 8):6.1f} us {error:.1e} {other:3}"
            sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    report(CUDA)
