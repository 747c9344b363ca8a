"""Checks that a row's result has the same bits with any other rows, or in any chunk of a sequence.

These are the kernels of the recipe key kernels.invariant. A check computes all rows at once, then
some of them alone, and compares bit by bit. Without a GPU it runs small sizes in Triton's
interpreter. That shows errors of indices and of the order of blocks, but not of a GPU's
instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm_kernels.case import normal

ByRows: TypeAlias = Callable[[slice], Tensor]  # the result of some of all rows
SIZES = (1, 2, 3, 8, 17, 33, 64, 65, 100, 128, 129, 200, 256, 300, 512, 700)  # of parts
WEIGHTS = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (1024, 2048), (128, 2048))


@dataclass(frozen=True, slots=True)
class Check:
    kernel: str
    case: str
    num_rows: int
    run: ByRows

    def differing(self) -> list[slice]:
        """Return the parts of the rows whose bits differ from those of all rows at once."""
        whole = self.run(slice(0, self.num_rows))
        return [part for part in parts_of(self.num_rows) if not self.run(part).equal(whole[part])]


def parts_of(num_rows: int) -> list[slice]:
    """Return parts of many sizes, from the start, the second row, and after the middle."""
    starts = 0, 1, num_rows // 2 + 3
    sizes = *SIZES, num_rows - 1
    return [slice(at, at + n) for n in sizes for at in starts if at + n <= num_rows]


def checks(device: torch.device) -> Iterator[Check]:
    """Yield the checks of all kernels that run on this device."""
    is_gpu = device.type == "cuda"
    yield from row_kernels(*(1024, 4096) if is_gpu else (70, 96), device=device)
    heads = [(32, 8, 128), (16, 2, 256)] if is_gpu else [(4, 2, 32)]
    for each in heads:
        yield from attention(each, 1500 if is_gpu else 70, device)
    yield latent(*(16, 576, 700) if is_gpu else (4, 72, 70), device=device)
    yield latents_of(2000 if is_gpu else 70, device)
    yield per_head(*(16, 128, 512, 700) if is_gpu else (3, 24, 40, 70), device=device)
    yield delta((4, 8, 128, 128) if is_gpu else (1, 2, 16, 16), 150 if is_gpu else 40, device)
    yield deltas(*(700, 4096, (4096, 1024)) if is_gpu else (140, 600, (40, 24)), device=device)
    yield from experts(*(1024, 64, 768, 2048) if is_gpu else (70, 8, 40, 72), device=device)
    if is_gpu:
        yield from (check for shape in WEIGHTS for check in linear(*shape, device))
        yield draws(512, 151936, device)


def row_kernels(num_rows: int, width: int, device: torch.device) -> Iterator[Check]:
    """Yield the checks of norms and gated activations, whose rows are independent."""
    from nanovllm_kernels.norms.activation import sigmoid_mul, silu_mul
    from nanovllm_kernels.norms.norm import add_rms_norm, rms_norm

    x, more = (normal(device, num_rows, width, dtype=torch.bfloat16, seed=n) for n in range(2))
    weight = normal(device, width, dtype=torch.bfloat16, seed=2)

    def added(part: slice) -> Tensor:
        return torch.cat(add_rms_norm(x[part].clone(), more[part].clone(), weight, 1e-6), 1)

    runs: dict[str, ByRows] = {
        "rms_norm": lambda part: rms_norm(x[part], weight, 1e-6),
        "add_rms_norm": added,
        "silu_mul": lambda part: silu_mul(x[part]),
        "sigmoid_mul": lambda part: sigmoid_mul(x[part], more[part]),
    }
    for name, run in runs.items():
        yield Check(name, f"{num_rows} rows of {width}", num_rows, run)


def attention(
    sizes: tuple[int, int, int], num_tokens: int, device: torch.device, page_tokens: int = 16
) -> Iterator[Check]:
    """Yield the check of attention over one sequence, as chunks and as decode rows.

    Keys and values of all tokens are in the cache. `sizes`: H query heads, G key/value heads, and
    their width A.
    """
    from nanovllm_kernels.attention.paged_decode import MAX_WIDTH, WHOLE_ROWS
    from nanovllm_kernels.attention.paged_prefill import paged_prefill

    heads, kv_heads, width = sizes
    q = normal(device, num_tokens, heads, width, dtype=torch.bfloat16)
    pages = -(-num_tokens // page_tokens), page_tokens, kv_heads, width
    k, v = (normal(device, *pages, dtype=torch.bfloat16, seed=n) for n in (1, 2))
    table = torch.arange(pages[0], dtype=torch.int32, device=device)[None]

    def run(part: slice) -> Tensor:
        """Compute few tokens as a decode row, next to another row, and more as a chunk."""
        starts, lengths = chunk(part, device)
        count = len(q[part])
        if count > MAX_WIDTH:
            return paged_prefill(q[part], k, v, table, starts, lengths, count, ordered=True)
        rows = torch.cat([q[part], q[:1]])
        starts, lengths = (
            F.pad(each, (0, 1), value=n) for each, n in ((starts, count + 1), (lengths, 1))
        )
        ragged = dict(starts_R1=starts, width=count) if count > 1 else {}
        plan = WHOLE_ROWS.plan(lengths, k)
        tables = table.expand(2, -1).contiguous()
        return WHOLE_ROWS.attend(rows, k, v, tables, lengths, plan, **ragged)[:count]

    yield Check("attention", f"{num_tokens} tokens HGA={sizes} page={page_tokens}", num_tokens, run)


def chunk(part: slice, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return starts_R1 and lengths_R of one row, whose new tokens are `part` of its sequence."""
    starts = torch.tensor([0, part.stop - part.start], dtype=torch.int32, device=device)
    return starts, torch.tensor([part.stop], dtype=torch.int32, device=device)


def latent(heads: int, size: int, num_tokens: int, device: torch.device) -> Check:
    """Return the check of latent attention over one sequence.

    As in a layer, a chunk is cut into rows of 16 tokens. Up to four tokens are a decode row. A
    query has `heads` heads of `size` elements, of which the last ninth is rotated.
    """
    from nanovllm_kernels.attention.latent_decode import WHOLE_ROWS

    rotated, page_tokens = size // 9, 16
    q = normal(device, num_tokens, heads, size, dtype=torch.bfloat16)
    q_THX, rotated_THA = q.split((size - rotated, rotated), 2)
    pages = -(-num_tokens // page_tokens), page_tokens, size
    pages_PSX = normal(device, *pages, dtype=torch.bfloat16, seed=1)
    table = torch.arange(pages[0], dtype=torch.int32, device=device)

    def run(part: slice) -> Tensor:
        width = 16 if part.stop - part.start > 4 else part.stop - part.start
        ends = [*range(part.start + width, part.stop, width), part.stop]
        starts = [0, *(end - part.start for end in ends)]
        lengths_R = torch.tensor(ends, dtype=torch.int32, device=device)
        starts_R1 = torch.tensor(starts, dtype=torch.int32, device=device)
        o_THX: Tensor = WHOLE_ROWS.attend(
            q_THX[part],
            rotated_THA[part],
            pages_PSX=pages_PSX,
            page_table_RM=table.expand(len(ends), -1).contiguous(),
            lengths_R=lengths_R,
            plan_N5=WHOLE_ROWS.plan(lengths_R, pages_PSX, heads, width),
            scale=192**-0.5,
            starts_R1=starts_R1 if width > 1 else None,
            width=width,
        )
        return o_THX

    return Check("latent_decode", f"{num_tokens} tokens of {heads} x {size}", num_tokens, run)


def latents_of(num_tokens: int, device: torch.device) -> Check:
    """Return the check of latent_store: the stored latents of tokens and their rotated queries."""
    from nanovllm_kernels.attention.latent_store import ORDERED, inputs

    sizes = num_tokens, 2, 192, 512, 64
    kv, weight, eps, q, table, positions, _, _ = inputs(sizes, torch.bfloat16, False, device)

    def run(part: slice) -> Tensor:
        count = part.stop - part.start
        pages = torch.zeros(-(-count // 16), 16, 512 + 64, dtype=torch.bfloat16, device=device)
        slots = torch.arange(count, device=device)
        rotated = ORDERED(
            kv[part], weight, eps, q[part].clone(), table, positions[part], slots, pages
        )
        return torch.cat([pages.flatten(0, 1)[:count], rotated.flatten(1)], 1)

    return Check("latent_store", f"{num_tokens} tokens of 512+64", num_tokens, run)


def per_head(heads: int, width: int, size: int, num_tokens: int, device: torch.device) -> Check:
    """Return the check of products of heads with one matrix each, as in latent attention."""
    from nanovllm_kernels.products.per_head import per_head

    x_THD = normal(device, num_tokens, heads, width, dtype=torch.bfloat16)
    weight_HDN = normal(device, heads, width, size, dtype=torch.bfloat16, seed=1)
    case = f"{num_tokens} tokens of {heads} x {width} to {size}"
    return Check("per_head", case, num_tokens, lambda part: per_head(x_THD[part], weight_HDN))


def delta(sizes: tuple[int, int, int, int], num_tokens: int, device: torch.device) -> Check:
    """Return the check of the gated delta rule over one sequence. `sizes`: G, H, K, V.

    The tokens before a part are one chunk. A part of one token is a decode row. A part of up to
    eight is a row with drafts, in steps that accept all tokens but the last two.
    """
    from nanovllm_kernels.delta import ordered
    from nanovllm_kernels.delta.cases import DeltaLayer, inputs

    layer = DeltaLayer(*sizes)
    args = inputs(layer, (num_tokens,), (0,), device)
    tokens, (weights, conv_NCW, recurrent_NHKV, slots_R) = args[:4], args[4:8]
    inputs_NWX, replays_R, tickets_RG = args[9:]

    def run(part: slice) -> Tensor:
        states = weights, conv_NCW.clone(), recurrent_NHKV.clone(), slots_R
        for chunk in (slice(0, part.start), part):
            own, count = [each[chunk] for each in tokens], chunk.stop - chunk.start
            starts_R1 = torch.tensor([0, count], dtype=torch.int32, device=device)
            if count == 1:
                x_THV = ordered.mix_decodes(*own, *states, tickets_RG)
            elif 2 < count <= inputs_NWX.shape[1]:
                rest = inputs_NWX.clone(), torch.zeros_like(replays_R), tickets_RG
                x_THV = ordered.mix_drafted(*own, *states, starts_R1, *rest)
                last = [each[-2:] for each in own]  # as rejected drafts and their corrections
                rest = rest[0], torch.full_like(replays_R, count - 2), tickets_RG
                starts_R1 = torch.full_like(starts_R1, 2) * torch.arange(2, device=device)
                again = ordered.mix_drafted(*last, *states, starts_R1.int(), *rest)
                x_THV = torch.cat([x_THV[:-2], again])
            else:
                x_THV = ordered.mix_rows(*own, *states, starts_R1)
        return x_THV

    return Check("delta", f"{num_tokens} tokens GHKV={sizes}", num_tokens, run)


def deltas(
    num_tokens: int, num_inputs: int, widths: tuple[int, ...], device: torch.device
) -> Check:
    """Return the check of add_deltas with adapters of ranks 16, 33 and 8."""
    from nanovllm_kernels.adapters.deltas import DeltaShape, add_deltas, inputs

    shape = DeltaShape(num_tokens, num_inputs, widths, (16, 33, 8))
    x_TD, y_TN, *matrices, adapter_T, owner_P = inputs(shape, device)

    def run(part: slice) -> Tensor:
        y = y_TN[part].clone()
        add_deltas(x_TD[part], lambda: y, *matrices, adapter_T[part].contiguous(), owner_P)
        return y

    return Check("add_deltas", shape.name, num_tokens, run)


def experts(
    num_tokens: int, num_experts: int, inner: int, width: int, device: torch.device
) -> Iterator[Check]:
    """Yield the checks of routed experts, by the kernels for few and for many pairs per expert."""
    from nanovllm_kernels.experts.combine import combine
    from nanovllm_kernels.experts.products import ORDERED_EXPERTS, is_unsorted
    from nanovllm_kernels.experts.reference import ExpertProducts
    from nanovllm_kernels.experts.route_reference import Chosen
    from nanovllm_kernels.experts.rows import sort_rows
    from nanovllm_kernels.fp8_reference import BLOCK, FP8

    num_chosen = 4
    x_TD = normal(device, num_tokens, width, dtype=torch.bfloat16)
    shapes = (num_experts, 2 * inner, width), (num_experts, width, inner)
    weights = [
        normal(device, *shape, dtype=torch.bfloat16, seed=n).mul_(shape[2] ** -0.5)
        for n, shape in enumerate(shapes, 1)
    ]
    blocks = [-(-size // BLOCK) for size in (inner, width)]
    scales = [
        normal(device, num_experts, *shape, dtype=torch.float32, seed=n).exp()
        for n, shape in enumerate(((2 * blocks[0], blocks[1]), blocks[::-1]), 4)
    ]
    scores_TE = normal(device, num_tokens, num_experts, dtype=torch.float32, seed=3).softmax(1)
    weights_TK, experts_TK = (each[:, :num_chosen].contiguous() for each in scores_TE.sort(1, True))
    experts_TK = experts_TK.int()

    def by(many: tuple[ExpertProducts, ...], part: slice, is_fp8: bool = False) -> Tensor:
        gate_up, down = [weight.to(FP8) for weight in weights] if is_fp8 else weights
        of_gate_up, of_down = scales if is_fp8 else (None, None)
        num_pairs = num_chosen * len(x_TD[part])
        fitting = (products for products in many if products.fits(num_pairs, gate_up))
        products = next(fitting, ORDERED_EXPERTS)
        tile = products.tile(num_pairs, num_experts)
        rows: Any = Chosen(experts_TK[part])
        if not is_unsorted(num_pairs, gate_up):
            rows = sort_rows(experts_TK[part], 0, num_experts, tile)
        y_XF = products.gate_up(x_TD[part], gate_up, of_gate_up, rows, num_chosen)
        y_XD = products.down(y_XF, down, of_down, rows, num_chosen)
        return combine(y_XD, weights_TK[part], rows.row_of_TK)

    case = f"T={num_tokens} K={num_chosen} E={num_experts} F={inner} D={width}"
    yield Check("experts", f"{case} triton", num_tokens, lambda part: by((), part))
    yield Check("experts", f"{case} fp8", num_tokens, lambda part: by((), part, is_fp8=True))
    if device.type == "cuda":
        from nanovllm_kernels.experts.grouped_linear import GROUPED

        yield Check("experts", case, num_tokens, lambda part: by((GROUPED,), part))


def linear(num_features: int, width: int, device: torch.device) -> Iterator[Check]:
    """Yield the checks of products with a bfloat16 weight and with a block-fp8 weight.

    Few bfloat16 rows take the kernel of skinny_linear, others the library.
    """
    from nanovllm_kernels.fp8_reference import BLOCK, FP8
    from nanovllm_kernels.products.dense_fp8 import TILED_FP8
    from nanovllm_kernels.products.skinny_linear import ORDERED_LINEAR

    most = 2048
    x_TD = normal(device, most, width, dtype=torch.bfloat16)
    weight_ND = normal(device, num_features, width, dtype=torch.bfloat16, seed=1) * width**-0.5
    blocks = num_features // BLOCK, width // BLOCK
    scale = normal(device, *blocks, dtype=torch.float32, seed=2).exp()

    def dense(part: slice) -> Tensor:
        is_supported = ORDERED_LINEAR.fits(len(x_TD[part]), weight_ND)
        return (ORDERED_LINEAR.linear if is_supported else F.linear)(x_TD[part], weight_ND)

    def fp8(part: slice) -> Tensor:
        values, scales = TILED_FP8.quantise(x_TD[part])
        return TILED_FP8.product(values, scales, weight_ND.to(FP8), scale, None, BLOCK)

    case = f"N={num_features} D={width}"
    yield Check("linear", case, most, dense)
    yield Check("fp8_linear", case, most, fp8)


def draws(num_rows: int, vocab: int, device: torch.device) -> Check:
    """Return the check of tokens drawn at temperature 1 with top_p 0.9, and of the thresholds."""
    from nanovllm_kernels.sampling.draw import draw
    from nanovllm_kernels.sampling.thresholds import thresholds

    logits_SV = normal(device, num_rows, vocab, dtype=torch.bfloat16)
    slots_S = torch.arange(num_rows, device=device)
    ones_N = torch.ones(num_rows, device=device)
    top_ks_N = torch.zeros(num_rows, dtype=torch.int32, device=device)
    off_N = torch.full((num_rows,), -torch.inf, device=device)

    def run(part: slice) -> Tensor:
        rows = logits_SV[part], slots_S[part]
        least_S = thresholds(*rows, ones_N, top_ks_N, 0.9 * ones_N, off_N)
        tokens_S = draw(*rows, slots_S[part] + 100, ones_N, slots_S, least_S)
        return torch.stack([tokens_S.double(), least_S.double()], 1)

    return Check("draw", f"{num_rows} rows of {vocab}", num_rows, run)
