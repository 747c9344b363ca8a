"""A router's float32 weight as a sum of bfloat16 parts, exact in its value and its products."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nanovllm.config import Kernels
from nanovllm.layers.describe import by_rows
from nanovllm.layers.experts.router import LEAST_ROWS, MOST_PARTS, Router, bfloat16_parts, by_parts
from nanovllm.layers.kernels import select_ops
from nanovllm.parallel.mesh import Span
from tests.models.steps import CPU

E, D, T = 64, 384, 300
OPS = select_ops(Kernels(), CPU)
ULP = 2.0**-24  # half of the distance between float32 numbers above 1


def drawn(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return x_TD in bfloat16 and a weight_ED that gives results of the same size."""
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(T, D, generator=generator).bfloat16()
    return x_TD, torch.randn(E, D, generator=generator) * D**-0.5


def float_sums(a: Tensor, b: Tensor) -> Tensor:
    return a.float() @ b.float()


def router(dtype: torch.dtype | None, model: torch.dtype = torch.bfloat16) -> Router:
    """Return a router; `dtype` is float32 for an exact one, or None."""
    torch.set_default_dtype(model)
    try:
        return Router([("", Span(E, 0, E))], D, OPS, exact=dtype is not None)
    finally:
        torch.set_default_dtype(torch.float32)


# -- the parts ---------------------------------------------------------------------------------


def of_all_sizes() -> Tensor:
    """Return random numbers of any bit pattern, from 2^-110 up to bfloat16's maximum."""
    bits = torch.randint(-(2**31), 2**31, (1000, 1000), generator=torch.Generator().manual_seed(3))
    numbers = bits.int().view(torch.float32)
    is_meant = (numbers.abs() >= 2.0**-110) & (numbers.abs() < torch.finfo(torch.bfloat16).max)
    assert is_meant.float().mean() > 0.9 and (numbers < 0).float().mean() > 0.4
    return numbers.where(is_meant, 0)


EXTREMES = (0.0, -0.0, 1.0, -1 / 3, 1 + 2.0**-23, -(2 - 2.0**-23), 1 + 2.0**-8 - 2.0**-23,
            1 + 2.0**-8 + 2.0**-16 + 2.0**-23, 2.0**-110, 2.0**-133 - 2.0**-109, 3e38)  # fmt: skip


@pytest.mark.parametrize("weight_ED", [of_all_sizes(), torch.tensor([EXTREMES]), drawn()[1]])
def test_three_parts_are_the_weight_bit_by_bit(weight_ED: Tensor) -> None:
    """The order of addition does not matter."""
    parts_IED = bfloat16_parts(weight_ED)
    assert parts_IED.dtype == torch.bfloat16 and parts_IED.shape == (MOST_PARTS, *weight_ED.shape)
    first, second, third = parts_IED.float()
    assert torch.equal(first + second + third, weight_ED)
    assert torch.equal(first + (second + third), weight_ED)
    assert torch.equal(parts_IED.double().sum(0).float(), weight_ED)
    assert not torch.equal(first + second, weight_ED)


def test_as_few_parts_as_suffice() -> None:
    weight_ED = drawn()[1]
    rounded = weight_ED.bfloat16()
    assert torch.equal(bfloat16_parts(rounded.float()), rounded[None])
    two = rounded.float() * (1 + 2.0**-8)  # of 16 significant bits
    parts_IED = bfloat16_parts(two)
    assert len(parts_IED) == 2 and torch.equal(parts_IED.float().sum(0), two)
    assert torch.equal(bfloat16_parts(torch.zeros(2, 3)), torch.zeros(1, 2, 3).bfloat16())


def test_below_normal_numbers_a_little_is_lost() -> None:
    """The error is at most 2^-134, half of the least bfloat16. Larger numbers have none."""
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(0, 17 << 23, (500, 500), generator=generator)  # below 2^-110
    weight_ED = bits.int().view(torch.float32)
    assert float(weight_ED.max()) < 2.0**-110 and float(weight_ED.min()) < 2.0**-126
    lost = (bfloat16_parts(weight_ED).double().sum(0) - weight_ED.double()).abs()
    assert 2.0**-135 < float(lost.max()) <= 2.0**-134


# -- the product -------------------------------------------------------------------------------


def exact(x_TD: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor]:
    """Return the product in float64, and the sum of |x w|."""
    x, weight = x_TD.double(), weight_ED.double()
    return x @ weight.t(), x.abs() @ weight.abs().t()


def tensor_cores(a_TD: Tensor, b_DN: Tensor) -> Tensor:
    """Return float32 sums with the largest possible error of tensor cores.

    Each instruction adds 16 products to the accumulator. All 17 terms are truncated to the 24 bits
    of the largest, and so is their sum.
    """
    sums = torch.zeros(len(a_TD), b_DN.shape[1], dtype=torch.float64)
    for a, b in zip(a_TD.double().split(16, 1), b_DN.double().split(16), strict=True):
        terms = torch.cat((a[:, :, None] * b, sums[:, None]), 1)
        bit = torch.frexp(terms.abs().amax(1))[1] - 24
        kept = torch.ldexp(torch.ldexp(terms, -bit[:, None]).trunc().sum(1), bit)
        last = torch.frexp(kept)[1] - 24
        sums = torch.ldexp(torch.ldexp(kept, -last).trunc(), last)
    assert torch.equal(sums.float().double(), sums)
    return sums.float()


SUMMED = [pytest.param(float_sums, 1.0, id="float32"), pytest.param(tensor_cores, 2.5, id="cut")]


@pytest.mark.parametrize("outlier", [1, 300])
@pytest.mark.parametrize(("multiply", "factor"), SUMMED)
def test_a_product_by_parts_errs_as_sums_do(
    multiply: Callable[..., Tensor], factor: float, outlier: int
) -> None:
    """Three parts are within the error bound of float32 sums; one part exceeds it.

    Without outliers, three parts are within a hundredth of the bound, which two parts exceed.
    """
    x_TD, weight_ED = drawn()
    x_TD[:, 7] *= outlier
    expected, size = exact(x_TD, weight_ED)
    parts_IED = bfloat16_parts(weight_ED)
    shares = []
    for count in (3, 2, 1):
        found = by_parts(x_TD, parts_IED[:count], multiply)
        assert found.dtype == torch.float32 and found.shape == (T, E)
        shares.append(float(((found - expected).abs() / (factor * D * ULP * size)).max()))
    assert shares[0] <= 1 < shares[2]
    assert outlier > 1 or shares[0] <= 0.01 < shares[1]


def test_experts_are_the_same_where_scores_are_further_apart_than_the_error() -> None:
    """Nearly all rows have such scores. With one part alone, many choose other experts."""
    x_TD, weight_ED = drawn()
    size = exact(x_TD, weight_ED)[1]
    plain = float_sums(x_TD, weight_ED.t())
    parts_IED = bfloat16_parts(weight_ED)
    best = plain.topk(9)
    margins = best.values[:, 7] - best.values[:, 8]
    is_clear = margins > 2 * (1 + 2.5) * D * ULP * size.amax(1)
    assert float(is_clear.float().mean()) > 0.9
    expected, found, rounded = (
        y_TE.topk(8).indices.sort().values
        for y_TE in (plain, by_parts(x_TD, parts_IED, tensor_cores),
                     by_parts(x_TD, parts_IED[:1], float_sums))
    )  # fmt: skip
    same, same_rounded = ((one == expected).all(1) for one in (found, rounded))
    assert bool(same[is_clear].all())
    assert not bool(same_rounded[is_clear].all())


# -- selection of a product ----------------------------------------------------------------------


def test_a_cpu_multiplies_in_float32() -> None:
    made = router(torch.float32)
    x_TD, weight_ED = drawn()
    made.weight.data.copy_(weight_ED)
    assert by_rows(made.by_rows, (1, 8192)) == "library 1-8192"
    assert torch.equal(made.product(x_TD), torch.nn.functional.linear(x_TD.float(), weight_ED))


@pytest.mark.parametrize(
    ("dtype", "model", "of_many"),
    [
        (torch.float32, torch.bfloat16, "parts"),
        (torch.float32, torch.float32, "library"),
        (None, torch.bfloat16, "library"),
    ],
)
def test_elsewhere_many_rows_of_bfloat16_are_multiplied_by_parts(
    dtype: torch.dtype | None, model: torch.dtype, of_many: str
) -> None:
    """The meta device checks shapes and dtypes by torch's own rules for float32 results."""
    made = router(dtype, model).to("meta")
    for rows, name in ((LEAST_ROWS - 1, "library"), (LEAST_ROWS, of_many)):
        assert made.by_rows[rows].name == name
        y_TE = made.product(torch.empty(rows, D, dtype=model, device="meta"))
        assert (y_TE.shape, y_TE.dtype) == ((rows, E), dtype or model)


def test_parts_are_made_once_weights_are_loaded() -> None:
    """Before loading, memory for the maximum number of parts is allocated."""
    made = router(torch.float32)
    x_TD, weight_ED = drawn()
    for weight, count in ((weight_ED, MOST_PARTS), (weight_ED.bfloat16(), 1)):
        made.weight.data.copy_(weight)
        made.parts_IED = torch.full((MOST_PARTS, E, D), torch.nan, dtype=torch.bfloat16)
        made.after_load()
        assert len(made.parts_IED) == count and {*made.state_dict()} == {"weight"}
        found = by_parts(x_TD, made.parts_IED, float_sums)
        torch.testing.assert_close(found, made.product(x_TD), rtol=0, atol=1e-5)
    kept = made.parts_IED
    made.product(x_TD)
    assert made.parts_IED is kept
    for others in (router(None), router(torch.float32, torch.float32)):
        others.after_load()
        assert not dict(others.named_buffers())
