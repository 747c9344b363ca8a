"""Plain torch reference of sampling. Also runs on CPUs.

Shapes: S sampling rows, V vocabulary, N slots (per-request numbers are read by slot), B blocks of
the vocabulary, W tokens of one block.

Decision: a random number is a function of (seed, position, vocabulary index) only. It is element
`index` of a SplitMix64 stream (Steele, Lea, Flood 2014) that starts at a mix of seed and position.
A request therefore draws the same text in any batch, and again after a preemption.

Decision: a token is drawn by the Gumbel-max method in two levels. First a block of the vocabulary
is drawn by its total weight, then a token within that block. The distribution is that of a single
maximum over the vocabulary. Only B + W Gumbel numbers are needed instead of V, so the kernel has
little to do except one read of the logits.

Decision: a block's key, top / temperature + log(sum) + noise, is absolute. It depends on nothing
outside the block. So the winners of slices of whole blocks can be compared, and the draw is the
same for any division into such slices. The price is that float32 rounds a key by 2**-24 of itself.
The probability of a block may be off by a factor of 1 +- |top / temperature| * 2**-23. At a logit
of 50 and a temperature of 0.5 the error is 1e-5. Within a block the draw is relative to its largest
logit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 2048  # part of the definition: another width draws other tokens from the same seed
BLOCK_INDEX = 1 << 32  # first stream element for blocks; tokens use the elements before it
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as int64, whose products wrap like unsigned ones
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)
LOWEST = -3.4028234663852886e38  # the lowest finite float32
CORRUPTED = -2  # replaces a token: the row has a NaN or +inf, or no token is possible


def draw(
    logits_SV: Tensor,
    slots_S: Tensor,
    positions_S: Tensor,
    inverse_temperatures_N: Tensor,
    seeds_N: Tensor,
    thresholds_S: Tensor | None = None,
) -> Tensor:
    """Draw one token per row, int64, from softmax(logits / temperature) over logits >= threshold.

    An inverse temperature of 0 selects the largest logit, the first of equal ones. A logit of -inf
    means an impossible token. The result is CORRUPTED for a row with a NaN or +inf anywhere, or
    with -inf only.
    """
    numbers = inverse_temperatures_N, seeds_N, thresholds_S
    return best(winners(logits_SV, slots_S, positions_S, *numbers)[None])


def winners(
    logits_SV: Tensor,
    slots_S: Tensor,
    positions_S: Tensor,
    inverse_temperatures_N: Tensor,
    seeds_N: Tensor,
    thresholds_S: Tensor | None = None,
    first_token: int = 0,
) -> Tensor:
    """Return each row's winner among some columns of the vocabulary, int32 [S, 2]: key and token.

    The columns belong to the tokens from `first_token` on, a multiple of BLOCK. The key is that of
    the winner's block, as the bits of a float32. It is NaN if the row's columns have a NaN or +inf,
    and -inf if none of their tokens is possible.
    """
    inverse_S1 = inverse_temperatures_N[slots_S, None]
    is_greedy_S1 = inverse_S1 == 0
    inverse_S1 = inverse_S1.masked_fill(is_greedy_S1, 1)  # -inf * 0 would be NaN
    x_SV = logits_SV.float()
    if thresholds_S is not None:
        x_SV = x_SV.masked_fill(x_SV < thresholds_S[:, None], -torch.inf)
    padding = -x_SV.shape[1] % BLOCK
    x_SBX = functional.pad(x_SV, (0, padding), value=-torch.inf).unflatten(1, (-1, BLOCK))
    tops_SB = x_SBX.amax(-1)  # NaN if the block has one, since thresholds keep NaN
    scaled_SBX = (x_SBX - tops_SB.clamp(min=LOWEST)[:, :, None]) * inverse_S1[:, :, None]
    streams_S1 = stream_keys(seeds_N[slots_S], positions_S)[:, None]
    starts_B = first_token + torch.arange(x_SBX.shape[1], device=x_SV.device) * BLOCK
    noise_SB = gumbel(streams_S1, BLOCK_INDEX + starts_B)
    heat_SB = (tops_SB * inverse_S1).clamp(LOWEST, -LOWEST)
    keys_SB = heat_SB + scaled_SBX.logsumexp(-1) + noise_SB
    keys_SB = torch.where(is_greedy_S1 & ~keys_SB.isnan(), tops_SB, keys_SB)
    block_S1 = keys_SB.argmax(-1, keepdim=True)  # a NaN counts as the largest
    tokens_SX = starts_B[block_S1] + torch.arange(BLOCK, device=x_SV.device)
    x_SX, scaled_SX = (y.take_along_dim(block_S1[:, :, None], 1)[:, 0] for y in (x_SBX, scaled_SBX))
    within_SX = torch.where(is_greedy_S1, x_SX, scaled_SX + gumbel(streams_S1, tokens_SX))
    tokens_S1 = tokens_SX.take_along_dim(within_SX.argmax(-1, keepdim=True), 1)
    keys_S1 = keys_SB.take_along_dim(block_S1, 1)
    return torch.cat((keys_S1.view(torch.int32), tokens_S1.int()), 1)


def best(winners_IS2: Tensor) -> Tensor:
    """Return the token of the largest key, int64, and of equal keys the first.

    `winners_IS2` has the winners of all slices of columns, in order. A row is CORRUPTED if all its
    keys are -inf or one is NaN.
    """
    keys_IS = winners_IS2[:, :, 0].view(torch.float32)
    which_1S = keys_IS.argmax(0, keepdim=True)  # a NaN counts as the largest
    tokens_S = winners_IS2[:, :, 1].take_along_dim(which_1S, 0)[0].long()
    return tokens_S.where(keys_IS.take_along_dim(which_1S, 0)[0].isfinite(), CORRUPTED)


def thresholds(
    logits_SV: Tensor,
    slots_S: Tensor,
    inverse_temperatures_N: Tensor,
    top_ks_N: Tensor,
    top_ps_N: Tensor,
    min_p_gaps_N: Tensor,
) -> Tensor:
    """Return the smallest logit of each row that min-p, top-k and top-p, in this order, keep.

    - min-p keeps the logits >= largest + gap, where gap = temperature * ln(min_p), -inf for off.
    - top-k (0 = off) keeps the logits >= the k-th largest.
    - top-p (1 = off) keeps the logits >= v. Here v is the largest value for which these weigh at
      least top_p of all logits kept so far.

    Equal logits are kept or removed together, so a tie at the boundary is kept. The largest logit
    always stays. Weights are float32 sums. If a boundary lies within rounding of top_p,
    implementations may differ by one value.
    """
    sorted_SV = logits_SV.float().sort(-1, descending=True).values
    top_S1 = sorted_SV[:, :1]
    inverse_S1, top_p_S1 = inverse_temperatures_N[slots_S, None], top_ps_N[slots_S, None]
    k_S1 = top_ks_N[slots_S, None].long()
    last = logits_SV.shape[1] - 1
    kth_S1 = sorted_SV.take_along_dim((k_S1 - 1).clamp(0, last), 1)
    low_S1 = torch.maximum(top_S1 + min_p_gaps_N[slots_S, None], kth_S1.where(k_S1 > 0, LOWEST))
    low_S1 = low_S1.clamp(min=LOWEST)
    weights_SV = torch.exp((sorted_SV - top_S1) * inverse_S1).where(sorted_SV >= low_S1, 0.0)
    mass_SV = weights_SV.cumsum(-1)
    num_kept_S1 = (mass_SV - weights_SV < top_p_S1 * mass_SV[:, -1:]).sum(-1, keepdim=True)
    nucleus_S1 = sorted_SV.take_along_dim((num_kept_S1 - 1).clamp(min=0), 1)
    return torch.maximum(low_S1, nucleus_S1.where(top_p_S1 < 1, LOWEST))[:, 0]


def stream_keys(seeds_S: Tensor, positions_S: Tensor) -> Tensor:
    """Return the start of each row's stream, int64."""
    return mix(mix(seeds_S) + positions_S)


def gumbel(keys: Tensor, indices: Tensor) -> Tensor:
    """Return standard Gumbel numbers, float32: -log(e), where e = -log(1 - u) is exponential.

    Large Gumbel numbers come from u near 0. There a series replaces the inner logarithm and is
    exact to float32, independent of the accuracy of the device's logarithm.
    """
    u = uniforms(keys, indices)
    series = u * (1 + u * (0.5 + u * (1 / 3)))
    return -torch.log(torch.where(u < 2**-8, series, -torch.log(1 - u)))


def uniforms(keys: Tensor, indices: Tensor) -> Tensor:
    """Return float32 numbers in [2**-33, 1 - 2**-24], never 0 or 1, and finely spaced near 0."""
    bits = (mix(keys + (indices + 1) * GOLDEN) >> 32) & 0xFFFFFFFF
    return (bits.float() * 2**-32 + 2**-33).clamp(max=1 - 2**-24)


def mix(x: Tensor) -> Tensor:
    """Apply the finaliser of SplitMix64 to int64 bit patterns."""
    x = (x ^ shift_right(x, 30)) * MIX_1
    x = (x ^ shift_right(x, 27)) * MIX_2
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, count: int) -> Tensor:
    """Return the logical right shift of int64, of which torch has only the arithmetic one."""
    return (x >> count) & ((1 << 64 - count) - 1)
