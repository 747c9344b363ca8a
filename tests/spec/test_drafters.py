"""Drafters by method: construction, proposals and acceptance."""

from __future__ import annotations

import pytest
import torch
from nanovllm_kernels.sampling.batch_reference import write_back
from torch import Tensor

from nanovllm.registry import resolve
from nanovllm.runner.batch import rowless
from nanovllm.spec import DRAFTERS
from nanovllm.spec.base import Drafter, DraftStep
from nanovllm.spec.synthetic import PERIOD

CPU = torch.device("cpu")


def made(method: str, tokens: int, accept: list[float], vocab_size: int = 50) -> Drafter:
    return resolve(DRAFTERS, method)(
        tokens=tokens,
        min_match=2,
        max_match=8,
        accept=accept,
        kernel="torch",
        seeds_N=torch.arange(2001),
        vocab_size=vocab_size,
        device=CPU,
    )


def propose(drafter: Drafter, slots_R: Tensor, lengths_N: Tensor, tokens_NL: Tensor) -> Tensor:
    """Return the drafts of rows whose batch has no tokens, which these drafters do not read."""
    return drafter.propose(
        DraftStep(
            slots_R=slots_R,
            rows_R=slots_R,
            lengths_N=lengths_N,
            tokens_NL=tokens_NL,
            pages_NM=torch.zeros(len(lengths_N), 1, dtype=torch.int32),
            batch=rowless(torch.zeros(4, 0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)),
            num_tokens=0,
            proposes=True,
            lane_tokens=0,
            given_TX=None,
        )
    )


@pytest.mark.parametrize("method", DRAFTERS)
def test_drafts_are_written_behind_the_newest_token(method) -> None:
    drafter = made(method, 3, [0.8, 0.6, 0.4])
    assert drafter.num_drafts == 3
    text = torch.tensor([[4, 5, 6, 7, 5, 6, 0, 0, 0], [0] * 9, [0] * 9], dtype=torch.int32)
    lengths_N, tokens_NL = torch.tensor([5, 0, 0], dtype=torch.int32), text.clone()
    drafts_RX = propose(drafter, torch.tensor([0, 2]), lengths_N, tokens_NL)
    assert (drafts_RX.dtype, drafts_RX.shape) == (torch.int32, (2, 4))
    assert drafts_RX[0, 0] == 3
    assert tokens_NL[0].tolist() == [*text[0, :6].tolist(), *drafts_RX[0, 1:].tolist()]
    assert not tokens_NL[1:].any()
    assert lengths_N.tolist() == [5, 0, 0]


def test_ngram_looks_drafts_up() -> None:
    drafter = made("ngram", 3, [])
    tokens_NL = torch.tensor(
        [[4, 5, 6, 7, 5, 6, 0, 0, 0], [4, 5, 6, 7, 8, 6, 0, 0, 0], [0] * 9], dtype=torch.int32
    )
    lengths_N = torch.tensor([5, 5, 0], dtype=torch.int32)
    drafts_RX = propose(drafter, torch.tensor([0, 1]), lengths_N, tokens_NL)
    assert drafts_RX.tolist() == [[3, 7, 5, 6], [0, 6, 6, 6]]
    assert drafter.accept is None


@pytest.mark.parametrize("vocab_size", [2, 3, 50, 151_936])
def test_synthetic_drafts_depend_on_the_position_alone(vocab_size) -> None:
    drafter = made("synthetic", 4, [0.5] * 4, vocab_size)
    positions = torch.tensor([1, 2, PERIOD - 3, PERIOD - 2, PERIOD - 1, PERIOD, 3 * PERIOD])
    slots_R = torch.arange(len(positions))
    lengths_N = torch.cat((positions, torch.zeros(1))).to(torch.int32)
    tokens_NL = torch.zeros(len(positions) + 1, 3 * PERIOD + 9, dtype=torch.int32)
    drafts_RX = propose(drafter, slots_R, lengths_N, tokens_NL)
    assert (drafts_RX[:, 0] == 4).all()
    drafts_RD = drafts_RX[:, 1:]
    assert ((drafts_RD >= 1) & (drafts_RD < vocab_size)).all()
    for earlier, later in ((0, 1), (2, 3), (3, 4), (4, 5)):
        assert torch.equal(drafts_RD[earlier, 1:], drafts_RD[later, :-1])
    assert torch.equal(drafts_RD[5], drafts_RD[6])
    assert len(drafts_RD.unique()) >= min(vocab_size - 1, 7)


@pytest.mark.parametrize(
    ("accept", "rates"),
    [
        ([0.8, 0.6, 0.3], [0.8, 0.75, 0.5]),
        ([1.0, 1.0], [1.0, 1.0]),
        ([0.5, 0.0, 0.0], [0.5, 0.0, 0.0]),
        ([0.0], [0.0]),
    ],
)
def test_each_coin_is_thrown_at_the_share_among_those_before_it(accept, rates) -> None:
    drafter = made("synthetic", len(accept), accept)
    assert drafter.accept is not None
    rates_D, seeds_N = drafter.accept
    assert rates_D.dtype == torch.float32
    assert rates_D.tolist() == pytest.approx(rates)
    assert torch.equal(seeds_N, torch.arange(2001))


def test_what_comes_out_has_the_given_shares() -> None:
    """The rates of 2,000 rows are within five standard errors."""
    accept = [0.8, 0.6, 0.4]
    drafter = made("synthetic", 3, accept)
    slots_R, num_rows = torch.arange(2000), 2000
    lengths_N = torch.full((num_rows + 1,), 7, dtype=torch.int32)
    tokens_NL = torch.zeros(num_rows + 1, 20, dtype=torch.int32)
    lengths_N[-1] = 0
    drafts_RX = propose(drafter, slots_R, lengths_N, tokens_NL)
    drawn_S = torch.full((4 * num_rows,), 49)
    samples_R1 = torch.arange(num_rows + 1) * 4
    lengths_R = lengths_N[:-1] + 4
    tokens_RW = write_back(
        slots_R, lengths_R, samples_R1, drawn_S, lengths_N, tokens_NL, 4, drafter.accept
    )
    counts_R = (tokens_RW >= 0).sum(1)
    assert torch.equal(lengths_N[:-1].long(), 7 + counts_R)
    for j, share in enumerate(accept):
        error = (share * (1 - share) / num_rows) ** 0.5
        is_out_R = counts_R > j + 1
        assert abs(is_out_R.float().mean().item() - share) < 5 * error
        assert torch.equal(tokens_RW[is_out_R, j], drafts_RX[is_out_R, 1 + j])


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="choose one of ngram, synthetic"):
        resolve(DRAFTERS, "medusa")
