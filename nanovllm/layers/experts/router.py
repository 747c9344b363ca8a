"""Router of experts: logits of all experts on every rank, from a weight that may be float32.

Decision: for many bfloat16 rows, a float32 weight is split into bfloat16 parts whose sum it is. One
product with float32 sums multiplies all parts. On an H200, 8,192 rows of MiniMax-M2 and of
DeepSeek-R1 take 65 and 128 us instead of 332 and 751. A part has the leading 8 bits of 24, so three
parts equal the weight exactly. Only numbers below 2^-110 differ, by at most 2^-134. A weight that
was stored as bfloat16 is one part.

A product of two bfloat16 numbers is exact in float32, so all error comes from sums. A tensor core
adds 17 numbers at a time, each with no more than the 24 bits of the largest. The error is then at
most 2.5 * D * 2^-24 of the sum of |x w|. That of a float32 product is at most D * 2^-24. If the
scores of two experts are closer than that, either method may choose either.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from nanovllm_kernels.norms.reference import summed
from torch import Tensor

from nanovllm.attention.base import AdaptedRows
from nanovllm.layers.linear import Linear, Placement, parameter
from nanovllm.layers.ops import Ops
from nanovllm.layers.products import Implementation, RowTable
from nanovllm.parallel.mesh import Span

LEAST_ROWS = 32  # rows from which parts are faster: 9 us, where float32 takes 15 to 20
MOST_PARTS = 3
SUMS = partial(torch.mm, out_dtype=torch.float32)  # on a GPU


class Router(Linear):
    """Logits of all experts, then the gate of the shared expert, if there is one.

    With a gate, unused columns pad the number of columns to a multiple of 8, for the library's
    sake. `exact`: the weight and the logits are float32, for any dtype of the model.
    """

    def __init__(
        self, parts: list[tuple[str, Span]], hidden_size: int, ops: Ops, *, exact: bool
    ) -> None:
        num_logits = sum(span.count for _, span in parts)
        num_rows = -(-num_logits // 8) * 8 if len(parts) > 1 else num_logits
        super().__init__(num_rows, hidden_size, Placement(0, tuple(parts)), ops)
        if exact and self.weight.dtype != torch.float32:
            self.weight = parameter(num_rows, hidden_size, dtype=torch.float32)
            self.by_rows = RowTable(self._choose)
            parts_IED = torch.empty(MOST_PARTS, num_rows, hidden_size)  # maximum size
            self.register_buffer("parts_IED", parts_IED, persistent=False)

    def _choose(self, num_rows: int) -> Implementation:
        has_parts = num_rows >= LEAST_ROWS or self.ops.invariant
        if has_parts and self.weight.device.type != "cpu":
            return Implementation("parts", lambda x_TD, _: by_parts(x_TD, self.parts_IED))
        multiply = self.ops.multiply
        return Implementation("library", lambda x, weight: multiply(x.to(weight.dtype), weight))

    def adapted_product(self, x_TD: Tensor, rows: AdaptedRows) -> Tensor:
        """Return the logits with the deltas of adapters."""
        if self.delta is None:
            return self.product(x_TD)
        return self.delta.add(x_TD, lambda: self.product(x_TD), rows)

    def after_load(self) -> None:
        """Compute the parts. There may be fewer than MOST_PARTS."""
        if "parts_IED" in self._buffers:  # a float32 weight in a model of 16 bits
            self.parts_IED = bfloat16_parts(self.weight)


def bfloat16_parts(weight_ED: Tensor) -> Tensor:
    """Return the fewest bfloat16 tensors parts_IED whose sum over I is the weight."""
    parts_IED = weight_ED[None].bfloat16()
    while len(parts_IED) < MOST_PARTS and (rest_ED := weight_ED - summed(parts_IED)).any():
        parts_IED = torch.cat((parts_IED, rest_ED[None].bfloat16()))
    return parts_IED


def by_parts(x_TD: Tensor, parts_IED: Tensor, multiply: Callable[..., Tensor] = SUMS) -> Tensor:
    """Return logits_TE, float32, for a weight in parts. `multiply` must have float32 sums."""
    logits_TX = multiply(x_TD, parts_IED.flatten(0, 1).t())
    return logits_TX.unflatten(1, parts_IED.shape[:2]).sum(1) if len(parts_IED) > 1 else logits_TX
