"""Exchange of tokens over lanes, each of which has some of the experts."""

from __future__ import annotations

from torch import Tensor

from nanovllm.layers.experts.products import ExpertMLPs
from nanovllm.parallel.mesh import Mesh

MOST_EXCHANGED = 16384  # tokens of one exchange over lanes


class LaneExchange:
    """Experts of all ranks for the tokens of all lanes. Each rank computes the tokens of all."""

    def __init__(self, experts: ExpertMLPs, mesh: Mesh) -> None:
        self.experts, self.mesh = experts, mesh

    def add_results(
        self, x_TD: Tensor, routed: tuple[Tensor, Tensor], stream_TD: Tensor, lane_tokens: int
    ) -> None:
        """Add to this lane's stream the results of the experts of all ranks.

        `routed` is weights_TK and experts_TK. An exchange has MOST_EXCHANGED tokens at most, and
        each lane takes part with the same number, up to `lane_tokens` in sum.
        """
        most = max(1, MOST_EXCHANGED // self.mesh.lanes)
        for start in range(0, lane_tokens, most):
            size = min(most, lane_tokens - start)
            x, weights, experts, own = (
                part[start : start + size] for part in (x_TD, *routed, stream_TD)
            )
            gathered = self.mesh.gather_tokens(x, weights, experts, size)
            parts_TD = self.experts(*gathered)
            self.mesh.add_own_sums(parts_TD.unflatten(0, (self.mesh.lanes, size)), own)

    def elements(self) -> int:
        """Return the elements per token that are allocated in addition to those of the experts."""
        return 2 * self.experts.down.shape[1]  # tokens of all lanes, and their sums
