"""The Triton kernels of sampling equal the reference.

They run in Triton's interpreter, in a process of its own. TRITON_INTERPRET must be set before
triton is imported, and other tests may have imported it already.
"""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings, strategies as st
from nanovllm_kernels.sampling import draw as sampling, reference, thresholds as kernels

from nanovllm.parallel.cut import span_of_vocabulary
from nanovllm.parallel.mesh import Mesh
from tests.interpreted import in_interpreter, in_parent, passes


@in_parent
def test_in_the_interpreter() -> None:
    passes(__file__, 17)


@triton.jit
def uniforms_kernel(keys, indices, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    key, index = tl.load(keys + at).to(tl.uint64), tl.load(indices + at).to(tl.uint64)
    tl.store(out + at, sampling.uniforms(key, index))


@in_interpreter
def test_uniforms_are_equal_to_the_last_bit() -> None:
    torch.manual_seed(1)
    size = 4096
    keys = torch.randint(-(2**63), 2**63 - 1, (size,))
    indices = torch.randint(0, 2**33, (size,))
    keys[0] = 0 - 4 * torch.tensor(reference.GOLDEN)  # all bits zero: the smallest number
    indices[0] = 3
    out = torch.empty(size)
    uniforms_kernel[(1,)](keys, indices, out, SIZE=size)
    assert torch.equal(out, reference.uniforms(keys, indices))
    assert out[0].item() == 2**-33


WRONG = (None, math.nan, math.inf, -math.inf)  # faults of a row: none, one logit, all logits


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Draw logits of some rows in either dtype, some with many ties, and settings per slot."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    rows, vocab = draw(st.integers(1, 4)), draw(st.sampled_from([5, 2048, 2049, 6007]))
    spread = draw(st.sampled_from([0.0, 0.5, 4.0, 30.0]))
    logits_SV = torch.randn(rows, vocab + 3, generator=generator)[:, :vocab] * spread
    if draw(st.booleans()):
        logits_SV = logits_SV.round()  # ties, and zeros of both signs
    if draw(st.booleans()):
        logits_SV[torch.rand(rows, vocab, generator=generator) < 0.3] = -math.inf
        logits_SV[:, vocab // 2] = 1.0
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))

    def column(values: st.SearchStrategy, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(draw(st.lists(values, min_size=7, max_size=7)), dtype=dtype)

    gaps = st.just(-math.inf) | st.floats(-20, 0)
    return logits_SV.to(dtype), {
        "slots": torch.randint(0, 7, (rows,), generator=generator),
        "positions": torch.randint(0, 10**5, (rows,), generator=generator),
        "inverse": column(st.sampled_from([0.0, 0.5, 1.0, 1 / 0.6, 50.0]), torch.float32),
        "seed": column(st.integers(-(2**63), 2**63 - 1), torch.int64),
        "top_k": column(st.sampled_from([0, 1, 2, 3, 40, 1000, 2048, 6006, 6007]), torch.int32),
        "top_p": column(
            st.sampled_from([1.0, 1e-6, 0.999999]) | st.floats(0.01, 0.99), torch.float32
        ),
        "gap": column(gaps, torch.float32),
    }


def allowed(module, logits_SV, case, top_p) -> torch.Tensor:
    numbers = case["inverse"], case["top_k"], top_p, case["gap"]
    return logits_SV.float() >= module.thresholds(logits_SV, case["slots"], *numbers)[:, None]


@in_interpreter
@settings(deadline=None, max_examples=20)
@given(case=cases())
def test_floors_keep_what_the_sorting_reference_keeps(case) -> None:
    logits_SV, numbers = case
    possible = logits_SV > -math.inf
    found = allowed(kernels, logits_SV, numbers, numbers["top_p"]) & possible
    # Sums have another order, so the kernel may use the boundary of a slightly different top_p.
    shifted = [(numbers["top_p"] + e).where(numbers["top_p"] < 1, 1.0) for e in (-1e-5, 1e-5)]
    fewest, most = (allowed(reference, logits_SV, numbers, p) & possible for p in shifted)
    assert (fewest <= found).all()
    assert (found <= most).all()


@in_interpreter
@settings(deadline=None, max_examples=15)
@given(case=cases())
def test_top_k_and_min_p_are_exact(case) -> None:
    logits_SV, numbers = case
    numbers["top_p"] = torch.ones(7)
    found, expected = (
        allowed(m, logits_SV, numbers, numbers["top_p"]) for m in (kernels, reference)
    )
    assert torch.equal(found & (logits_SV > -math.inf), expected & (logits_SV > -math.inf))


@in_interpreter
@settings(deadline=None, max_examples=30)
@given(case=cases(), truncated=st.booleans())
def test_draws_are_equal(case, truncated) -> None:
    logits_SV, numbers = case
    slots, inverse = numbers["slots"], numbers["inverse"]
    thresholds_S = None
    if truncated:
        top_k, top_p, gap = numbers["top_k"], numbers["top_p"], numbers["gap"]
        thresholds_S = reference.thresholds(logits_SV, slots, inverse, top_k, top_p, gap)
    args = logits_SV, slots, numbers["positions"], inverse, numbers["seed"], thresholds_S
    assert sampling.draw(*args).tolist() == reference.draw(*args).tolist()


@in_interpreter
@settings(deadline=None, max_examples=15)
@given(case=cases(), truncated=st.booleans(), data=st.data())
def test_a_corrupted_row_is_told_and_its_neighbours_stay(case, truncated, data) -> None:
    logits_SV, numbers = case
    rows, vocab = logits_SV.shape
    kinds = data.draw(st.lists(st.sampled_from(WRONG), min_size=rows, max_size=rows))
    args = numbers["slots"], numbers["positions"], numbers["inverse"], numbers["seed"]
    wishes = numbers["slots"], numbers["inverse"], *(numbers[k] for k in ("top_k", "top_p", "gap"))
    before = logits_SV.clone()
    for row, kind in enumerate(kinds):
        if kind is None:
            continue
        if kind == -math.inf:
            logits_SV[row] = kind
        else:
            logits_SV[row, data.draw(st.integers(0, vocab - 1))] = kind
    found, expected = (
        sampling.draw(x, *args, kernels.thresholds(x, *wishes) if truncated else None).tolist()
        for x in (logits_SV, before)
    )
    is_wrong = [kind is not None for kind in kinds]
    assert [token == reference.CORRUPTED for token in found] == is_wrong
    assert all(a == b or wrong for a, b, wrong in zip(found, expected, is_wrong, strict=True))


@in_interpreter
@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float32, math.inf), (torch.bfloat16, math.nan)]
)
def test_one_bad_number_among_151936_is_found(dtype, value) -> None:
    vocab = 151_936
    places = [0, 2047, 2048, 77_777, vocab - 2049, vocab - 1]
    logits_SV = torch.randn(len(places), vocab, generator=torch.Generator().manual_seed(5))
    rows = torch.arange(len(places))
    args = rows, rows, torch.tensor([0.0, 1.0]).repeat(len(places)), rows
    logits_SV = logits_SV.to(dtype)
    assert (sampling.draw(logits_SV, *args) >= 0).all()
    logits_SV[rows, torch.tensor(places)] = value
    assert sampling.draw(logits_SV, *args).tolist() == [reference.CORRUPTED] * len(places)


def shares(size: int, vocab: int) -> list[slice]:
    """Return each rank's columns of the vocabulary."""
    spans = [span_of_vocabulary(Mesh(rank, size), vocab) for rank in range(size)]
    return [slice(span.start, span.start + span.count) for span in spans]


@in_interpreter
@pytest.mark.parametrize("module", [sampling, reference], ids=["triton", "torch"])
@settings(deadline=None, max_examples=12)
@given(case=cases(), truncated=st.booleans(), data=st.data())
def test_winners_of_all_shards_are_the_whole_draw(module, case, truncated, data) -> None:
    logits_SV, numbers = case
    vocab = logits_SV.shape[1]
    for row, kind in enumerate(data.draw(st.sampled_from(WRONG)) for _ in logits_SV):
        if kind is not None and row % 2:
            logits_SV[row, data.draw(st.integers(0, vocab - 1))] = kind
    slots = numbers["slots"]
    args = slots, numbers["positions"], numbers["inverse"], numbers["seed"]
    wishes = slots, *(numbers[k] for k in ("inverse", "top_k", "top_p", "gap"))
    thresholds_S = reference.thresholds(logits_SV, *wishes) if truncated else None
    expected = module.draw(logits_SV, *args, thresholds_S).tolist()
    for size in range(1, 1 + -(-vocab // reference.BLOCK)):
        won = [
            module.winners(logits_SV[:, share], *args, thresholds_S, share.start)
            for share in shares(size, vocab)
        ]
        assert module.best(torch.stack(won)).tolist() == expected


def by_hand(x: list[float], top_k: int, top_p: float) -> float:
    one = torch.tensor([0])
    numbers = (torch.tensor([v]) for v in (1.0, top_k, top_p, -math.inf))
    return kernels.thresholds(torch.tensor([x]), one, *numbers).item()


@in_interpreter
def test_top_k_finds_neighbouring_floats_in_any_block() -> None:
    vocab = 3 * reference.BLOCK - 7
    generator = torch.Generator().manual_seed(2)
    ladder = torch.randperm(vocab, generator=generator, dtype=torch.int32)
    x = (ladder + 0x3F800000).view(torch.float32).tolist()
    ranked = sorted(x, reverse=True)
    for k in (*range(1, 20), 2048, vocab - 1):
        assert by_hand(x, k, 1.0) == ranked[k - 1]


@in_interpreter
def test_the_mass_includes_a_block_whose_largest_logit_is_the_floor() -> None:
    x = [-20.0] * (2 * reference.BLOCK)
    x[5], x[reference.BLOCK + 9] = math.log(0.55), math.log(0.45)
    assert by_hand(x, 2, 0.56) == pytest.approx(math.log(0.45))
    assert by_hand(x, 2, 0.54) == pytest.approx(math.log(0.55))


@in_interpreter
def test_a_block_below_the_floor_weighs_nothing() -> None:
    logits_SV = torch.zeros(1, 2 * reference.BLOCK)
    logits_SV[0, : reference.BLOCK] = -5.0
    zero, one = torch.tensor([0]), torch.tensor([1.0])
    tops_SB, sums_SB = sampling._sum_blocks(logits_SV, zero, one, torch.tensor([-1.0]))
    assert tops_SB.tolist() == [[-math.inf, 0.0]]
    assert sums_SB.tolist() == [[0.0, reference.BLOCK]]


@in_interpreter
def test_a_floor_may_be_off_only_where_top_p_is_a_mass() -> None:
    """A threshold has tolerance only if top_p is the mass of a value, within rounding.

    All four logits weigh 1, so two of them are half of the mass, and never 0.6 of it.
    """
    logits_SV, flat = torch.tensor([[4.0, 2.5, 2.0, 1.0]]), torch.zeros(1)
    for top_p, top_k, threshold, room in (
        (0.5, 0, 2.5, 0.5),  # the neighbour below is right, too
        (0.500005, 0, 2.0, 0.5),  # or the one above
        (0.6, 0, 2.0, 0.0),
        (0.999999, 0, 1.0, 0.0),  # there is no logit below
        (0.5, 2, 4.0, 1.5),  # half of the two that top-k keeps
        (1.0, 3, 2.0, 0.0),
    ):
        numbers = torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([kernels.OFF])
        args = (logits_SV, torch.tensor([0]), flat, *numbers)
        assert kernels.thresholds(*args).tolist() == [threshold]
        assert kernels.thresholds_room((torch.tensor([threshold]),), args)[0].tolist() == [room]


def many_wishes(device: str = "cpu") -> tuple:
    return kernels.thresholds_mixed_inputs(6007, torch.bfloat16, torch.device(device))


@in_interpreter
def test_a_floor_depends_neither_on_other_rows_nor_on_how_programs_share_blocks(
    monkeypatch,
) -> None:
    logits_SV, slots_S, *numbers = many_wishes()
    together = kernels.thresholds(logits_SV, slots_S, *numbers)
    alone = [
        kernels.thresholds(logits_SV[[i]], slots_S[[i]], *numbers) for i in range(len(slots_S))
    ]
    assert torch.equal(torch.cat(alone), together)
    monkeypatch.setattr(kernels, "PROGRAMS", 9)  # one per row, for three blocks
    assert torch.equal(kernels.thresholds(logits_SV, slots_S, *numbers), together)


@in_interpreter
def test_a_row_of_nan_ends_and_leaves_the_others_alone() -> None:
    logits_SV, slots_S, *numbers = many_wishes()
    expected = kernels.thresholds(logits_SV, slots_S, *numbers)
    for broken, values in ((2, (math.nan, math.inf)), (3, (-math.inf,))):
        logits = logits_SV.clone()
        logits[broken, ::2] = math.nan
        found = kernels.thresholds(logits, slots_S, *numbers)
        others = torch.arange(len(slots_S)) != broken
        assert torch.equal(found[others], expected[others])
        for value in values:
            logits[broken] = value
            found = kernels.thresholds(logits, slots_S, *numbers)
            assert torch.equal(found[others], expected[others])


@in_interpreter
def test_a_bracket_with_more_logits_than_are_copied() -> None:
    """Brackets with more than CANDIDATES logits give the right threshold.

    One logit is far below all others, so the passes cannot separate the others.
    """
    vocab, room = 10 * reference.BLOCK, kernels.CANDIDATES.value
    assert vocab > room
    x = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 4
    x[77] = -1e30
    ranked = x.sort(descending=True).values
    assert by_hand(x.tolist(), 15000, 1.0) == ranked[14999]
    weights = (ranked.double() - ranked[0]).exp().cumsum(0)
    for top_k, top_p in ((0, 0.5), (17000, 0.9)):
        kept = weights[: top_k or vocab]
        boundary = (kept < top_p * kept[-1]).sum()
        assert by_hand(x.tolist(), top_k, top_p) == ranked[boundary]


@in_interpreter
def test_equal_logits_in_every_block() -> None:
    vocab = 10 * reference.BLOCK
    at = torch.arange(vocab)
    x = (at % 3 + at % 2).float().tolist()  # a sixth of the values are 3.0
    for top_k, threshold in ((20, 3), (3413, 3), (3414, 2), (10240, 2), (10241, 1), (vocab - 1, 0)):
        assert by_hand(x, top_k, 1.0) == threshold
    assert by_hand([5.0] * vocab, 0, 0.3) == by_hand([5.0] * vocab, 20000, 0.3) == 5.0
    for zeros in ([0.0] * 4 + [-0.0], [-0.0] + [0.0] * 4):  # equal, with different bits
        assert by_hand(zeros, 0, 0.5) == by_hand(zeros, 3, 1.0) == 0.0
