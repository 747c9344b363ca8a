"""Cases and error scales of the products of routed experts, for every implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels.case import Args, Case, Kernel, Tensors, normal
from nanovllm_kernels.experts import reference
from nanovllm_kernels.experts.reference import dequantised, used
from nanovllm_kernels.experts.route_reference import ExpertRows, sort_rows
from nanovllm_kernels.fp8_reference import BLOCK
from nanovllm_kernels.products.linear_cases import gated_sizes, linear_reference, sizes

OF_SUMS = 1 / 16  # error of the float32 terms of a sum, in bfloat16 ulps of the sum's size
OF_QUANTISED = 24.0  # same with 8-bit activations, each off by up to an eighth of itself


@dataclass(frozen=True, slots=True)
class MoECase:
    """Sizes of a case: T tokens with K of E experts each. This rank has `num` experts from `first`.

    With `kind` "uniform" experts are random. With "first" all tokens choose the first K experts,
    with "last" the last K. With `block_fp8` weights have 8 bits and a scale for each block.
    """

    T: int
    K: int
    E: int
    F: int
    D: int
    first: int = 0
    num: int | None = None
    kind: str = "uniform"
    block_fp8: bool = False

    def __str__(self) -> str:
        share = "" if self.num is None else f" experts {self.first}-{self.first + self.num}"
        kind = f" all to the {self.kind}" if self.kind != "uniform" else ""
        fp8 = " fp8" if self.block_fp8 else ""
        return f"T={self.T} K={self.K} E={self.E} F={self.F} D={self.D}{fp8}{share}{kind}"

    @property
    def num_experts(self) -> int:
        return self.num or self.E

    def rows(self, tile: int, device: torch.device) -> ExpertRows:
        scores_TE = normal(device, self.T, self.E, dtype=torch.float32, seed=2)
        if self.kind != "uniform":
            order_E = torch.arange(self.E, device=device).float()
            scores_TE = (order_E if self.kind == "last" else -order_E).expand(self.T, self.E)
        experts_TK = scores_TE.topk(self.K, -1).indices.int()
        return sort_rows(experts_TK, self.first, self.num_experts, tile)

    def weight(self, parts: int, num_features: int, num_inputs: int, device: torch.device) -> Args:
        """Return the weight of all experts, `num_features` rows a part, and its scales or None."""
        shape = self.num_experts, parts * num_features, num_inputs
        weight_EXX = normal(device, *shape, dtype=torch.bfloat16, seed=1)
        if not self.block_fp8:
            return weight_EXX.mul_(num_inputs**-0.5), None
        blocks = self.num_experts, parts * -(-num_features // BLOCK), -(-num_inputs // BLOCK)
        scale_EXX = normal(device, *blocks, dtype=torch.float32, seed=3).exp() * num_inputs**-0.5
        return weight_EXX.to(torch.float8_e4m3fn), scale_EXX

    def gate_up(self, tile: int, device: torch.device) -> Args:
        x_TD = normal(device, self.T, self.D, dtype=torch.bfloat16)
        x_TD[self.T // 2, self.D // 3] = 1e3  # an outlier, so that a wrong sum fails the check
        weight = self.weight(2, self.F, self.D, device)
        return x_TD, *weight, self.rows(tile, device), self.K

    def down(self, tile: int, device: torch.device) -> Args:
        y_XF = normal(device, self.T * self.K, self.F, dtype=torch.bfloat16)
        return y_XF, *self.weight(1, self.D, self.F, device), self.rows(tile, device), self.K


def in_float(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a product of reference.py that computes in float32 for inputs of any dtype."""

    def reference(x: Tensor, weight_EXX: Tensor, scale: Tensor | None, *more: object) -> Tensor:
        return product(
            x.float(), weight_EXX if scale is not None else weight_EXX.float(), scale, *more
        )

    return reference


def rows_of_experts(result: Tensor, args: Args) -> Tensors:
    """Return the rows that must be written, and one row of zeros, since there may be none."""
    num_rows = int(args[3].starts_E1[-1])
    return (functional.pad(result[:num_rows], (0, 0, 0, 1)),)


def scale_of(share: float, expected: Tensors, args: Args) -> Tensors:
    """Return the error scale. Terms of a sum may err by `share` ulps of the sum's size in total."""
    x, weight_EXX, scale_EXX, rows, num_chosen = args
    error_scale = expected[0].abs()
    is_gated = error_scale.shape[1] < weight_EXX.shape[1]
    for expert, start, end in used(rows):
        x_rows = x[rows.pair_of_X[start:end].long() // num_chosen] if is_gated else x[start:end]
        both = x_rows.float(), dequantised(weight_EXX, scale_EXX, expert, 1 + is_gated).float()
        sizes_XN = share * sizes(*both)
        if is_gated:
            gate_XF, up_XF = sizes_XN.chunk(2, -1)
            sizes_XN = gated_sizes(linear_reference(*both), sizes_XN)
            sizes_XN += torch.finfo(torch.bfloat16).eps * gate_XF * up_XF  # both factors err
        error_scale[start:end] += sizes_XN
    return (error_scale,)


def kernels(
    name: str,
    gate_up: Callable[..., Tensor],
    down: Callable[..., Tensor],
    tile: int,
    checked: tuple[MoECase, ...],
    timed: tuple[MoECase, ...] = (),
    share: float = OF_SUMS,
    small: tuple[MoECase, ...] = (),
) -> tuple[Kernel, ...]:
    """Return two kernels, `<name>_gate_up` and `<name>_down`.

    Cases in `small` also run in Triton's interpreter. Cases in `timed` are rated by FLOP/s if an
    expert has many rows, else by bytes of the weights.
    """

    def cases(of: Callable[..., Args], num_matrices: int) -> Iterator[Case]:
        for routed in (*small, *checked, *timed):
            pairs, size = routed.T * routed.K, num_matrices * routed.F * routed.D
            num_used = routed.num_experts * (1 - (1 - routed.K / routed.E) ** routed.T)  # expected
            work = {"num_bytes": round(num_used * size * (2 - routed.block_fp8))}
            if pairs > 64 * routed.E:
                work = {"num_flops": 2 * pairs * size}
            case_inputs = partial(of, routed, tile)
            yield Case(str(routed), case_inputs, routed in small, **work if routed in timed else {})

    return tuple(
        Kernel(
            f"{name}_{product}",
            run,
            in_float(getattr(reference, f"expert_{product}")),
            tuple(cases(of, num_matrices)),
            ulps_16=1,
            scale=partial(scale_of, share),
            outputs=rows_of_experts,
        )
        for product, run, of, num_matrices in (
            ("gate_up", gate_up, MoECase.gate_up, 2),
            ("down", down, MoECase.down, 1),
        )
    )
