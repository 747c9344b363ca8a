"""A router's logits: on every rank of all experts, from a small weight that may be float32.

Decision: of many rows in bfloat16 a float32 weight is multiplied as the bfloat16 numbers that it is
the sum of, in one product with float32 sums: on an H200, for 8,192 rows of MiniMax-M2 and of
DeepSeek-R1, in 65 and 128 us instead of 332 and 751. One part is the 8 leading bits of the 24, and
what it leaves has 16, so three parts are the weight bit by bit; only numbers below 2^-110 are up to
2^-134 off, half of bfloat16's least. A weight that was stored as bfloat16 is one part.

A product of two bfloat16 numbers is exact in float32, so all error is that of sums. If none of the
17 numbers that a tensor core adds up at a time keeps more than the 24 bits of the largest, then it
is at most 2.5 * D * 2^-24 of the sum of |x w|. Float32's own is at most D * 2^-24 of that; where
experts' scores are closer than both, either way may choose either.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from nanovllm_kernels.reference import summed
from torch import Tensor

from nanovllm.layers.linear import Linear, Placement, parameter
from nanovllm.layers.ops import Implementation, Ops, RowTable
from nanovllm.parallel.mesh import Span

LEAST_ROWS = 32  # of which parts take 9 us, float32 numbers 15 to 20
MOST_PARTS = 3
SUMS = partial(torch.mm, out_dtype=torch.float32)  # on a GPU


class Router(Linear):
    """Logits of all experts, on every rank, and the gate of a shared one behind them. Then come
    some that nobody reads, if that makes their number a multiple of 8, as the library likes.

    `exact`: the weight and the logits are float32, whatever the model's dtype.
    """

    def __init__(
        self, parts: list[tuple[str, Span]], hidden_size: int, ops: Ops, *, exact: bool
    ) -> None:
        num_logits = sum(span.count for _, span in parts)
        num_rows = -(-num_logits // 8) * 8 if len(parts) > 1 else num_logits
        super().__init__(num_rows, hidden_size, Placement(0, tuple(parts)), ops)
        if exact and self.weight.dtype != torch.float32:
            self.weight = parameter(num_rows, hidden_size, dtype=torch.float32)
            vars(self)["operand"], self.by_rows = self.weight, RowTable(self._choose)
            parts_IED = torch.empty(MOST_PARTS, num_rows, hidden_size)  # as many at most
            self.register_buffer("parts_IED", parts_IED, persistent=False)

    def _choose(self, num_rows: int) -> Implementation:
        if num_rows >= LEAST_ROWS and self.weight.device.type != "cpu":
            return Implementation("parts", lambda x_TD, _: by_parts(x_TD, self.parts_IED))
        return Implementation("library", lambda x, weight: F.linear(x.to(weight.dtype), weight))

    def finish(self) -> None:
        """Makes the parts, of which there may be fewer than room was kept for."""
        if "parts_IED" in self._buffers:
            self.parts_IED = bfloat16_parts(self.weight)


def bfloat16_parts(weight_ED: Tensor) -> Tensor:
    """The bfloat16 numbers parts_IED whose sum over I the weight is, as few as suffice."""
    parts_IED = weight_ED[None].bfloat16()
    while len(parts_IED) < MOST_PARTS and (rest_ED := weight_ED - summed(parts_IED)).any():
        parts_IED = torch.cat((parts_IED, rest_ED[None].bfloat16()))
    return parts_IED


def by_parts(x_TD: Tensor, parts_IED: Tensor, multiply: Callable[..., Tensor] = SUMS) -> Tensor:
    """The float32 product logits_TE with a weight in parts. `multiply`: with float32 sums."""
    logits_TX = multiply(x_TD, parts_IED.flatten(0, 1).t())
    return logits_TX.unflatten(1, parts_IED.shape[:2]).sum(1) if len(parts_IED) > 1 else logits_TX
