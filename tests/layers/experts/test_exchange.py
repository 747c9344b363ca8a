"""Lanes that exchange their tokens get the results of all experts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from nanovllm_kernels.experts.route_reference import Routing
from torch import Tensor

from nanovllm.layers.expert_products import TORCH
from nanovllm.layers.experts import exchange
from nanovllm.layers.experts.exchange import LaneExchange
from nanovllm.layers.experts.products import ExpertMLPs
from nanovllm.parallel.mesh import Mesh, Span
from tests.parallel.test_mesh import Meeting

D, E, F, K = 24, 6, 12, 2
LANES = 2


@dataclass(frozen=True, slots=True)
class LaneMesh(Mesh):
    meeting: Meeting = field(default_factory=lambda: Meeting(LANES))

    def gather(self, x: Tensor) -> Tensor:
        self.meeting.brought[self.lane] = x.clone()
        self.meeting.barrier.wait()
        shares = torch.stack([each for each in self.meeting.brought if each is not None])
        self.meeting.barrier.wait()
        return shares

    def own_sum(self, parts_ITD: Tensor) -> Tensor:
        return self.gather(parts_ITD)[:, self.lane].sum(0)


def experts_from(first: int, count: int) -> ExpertMLPs:
    places = tuple(e - first if first <= e < first + count else -1 for e in range(E))
    rule = Routing("softmax", renormalise=True)
    made = ExpertMLPs(D, Span(E, first, count), Span(F, 0, F), K, rule, TORCH, places)
    generator = torch.Generator().manual_seed(0)
    gate_up, down = (
        torch.randn(shape, generator=generator) for shape in ((E, 2 * F, D), (E, D, F))
    )
    made.gate_up.data.copy_(gate_up[first : first + count])
    made.down.data.copy_(down[first : first + count])
    return made


@pytest.mark.parametrize("most_exchanged", [16384, 6, 1])
def test_lanes_of_unequal_length_add_the_results_of_all_experts(
    most_exchanged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shorter lane takes part in exchanges after its last token."""
    monkeypatch.setattr(exchange, "MOST_EXCHANGED", most_exchanged)
    whole, meeting, lengths = experts_from(0, E), Meeting(LANES), (9, 4)
    inputs = [torch.randn(length, D) for length in lengths]
    streams = [torch.randn(length, D) for length in lengths]
    routed = [whole.route(torch.randn(length, E), None) for length in lengths]
    each = E // LANES

    def run(lane: int) -> Tensor:
        mesh = LaneMesh(ep_size=LANES, lane=lane, meeting=meeting)
        own, stream_TD = experts_from(lane * each, each), streams[lane].clone()
        LaneExchange(own, mesh).add_results(inputs[lane], routed[lane], stream_TD, max(lengths))
        return stream_TD

    with ThreadPoolExecutor(LANES) as threads:
        found = [*threads.map(run, range(LANES))]
    for lane, stream_TD in enumerate(found):
        expected = streams[lane] + whole(inputs[lane], *routed[lane])
        torch.testing.assert_close(stream_TD, expected, rtol=1e-4, atol=1e-4)


def test_an_exchange_has_the_tokens_of_all_lanes_and_their_sums() -> None:
    assert LaneExchange(experts_from(0, E), Mesh()).elements() == 2 * D
