"""Shapes, arguments and compilation of the gated product for many tokens, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from nanovllm_kernels.products import gated_linear

from tests.kernels.compiled import printed

SIGNATURE = """
import torch
from nanovllm_kernels.products.gated_linear import compile_gated
x, weight, y = (torch.zeros(2, 8, dtype=torch.bfloat16) for _ in range(3))
try:
    compile_gated("bfloat16", True)(x, weight, y, 66)
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(("num_rows", "is_tall"), [(128, False), (129, True), (300, True)])
def test_every_argument_is_in_its_place(
    num_rows: int, is_tall: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference, in place of the compiled kernel, gets its arguments in the right order."""
    asked = []

    def compile_gated(*kind: object):
        asked.append(kind)

        def run(x, weight, y, num_clusters) -> None:
            assert num_clusters == 66
            y.copy_(gated_linear.reference(x, weight))

        return run

    monkeypatch.setattr(gated_linear, "compile_gated", compile_gated)
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    generator = torch.Generator().manual_seed(num_rows)
    x_TD = torch.randn(num_rows, 16, generator=generator).bfloat16()
    weight_ND = torch.randn(64, 16, generator=generator).bfloat16()
    y_TF = gated_linear.GATED_LINEAR(x_TD, weight_ND)
    gate_TF, up_TF = (x_TD.float() @ weight_ND.float().T).chunk(2, -1)
    expected_TF = torch.nn.functional.silu(gate_TF) * up_TF
    assert y_TF.dtype == torch.bfloat16
    assert torch.allclose(y_TF.float(), expected_TF, atol=1e-3, rtol=1e-2)
    assert asked == [("bfloat16", is_tall)]


def test_the_compiled_kernel_asks_for_these_arguments() -> None:
    said = "\n".join(printed(SIGNATURE))
    matrices = (
        "x_TD: Tensor([n0, n1], bfloat16), weight_ND: Tensor([n2, n1], bfloat16), "
        "y_TF: Tensor([n3, n4], bfloat16)"
    )
    assert f"({matrices}, num_clusters: int32)" in said
    assert "expected device_type=cuda" in said
