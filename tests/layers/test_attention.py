"""A layer's attention with norms of whole rows and partial rotation, against MiniMaxM2Attention."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from transformers import MiniMaxM2Config
from transformers.models.minimax_m2.modeling_minimax_m2 import (
    MiniMaxM2Attention,
    MiniMaxM2RotaryEmbedding,
)

from nanovllm.attention.base import Batch, ForwardContext
from nanovllm.attention.grouped import PagedKV
from nanovllm.attention.torch_ref import TorchPaged
from nanovllm.config import Kernels
from nanovllm.layers.attention import Attention
from nanovllm.layers.kernels import select_ops
from nanovllm.layers.residual import Added, Pending
from nanovllm.layers.rope import PlainRope, cos_sin_table
from nanovllm.models.weights import destinations
from nanovllm.parallel.mesh import Mesh
from tests.models.tiny import make_loud
from tests.parallel.test_mesh import Meeting, ThreadMesh

HIDDEN, TOKENS, PAGE_TOKENS = 48, 19, 8
RULES = (
    ("norm", "qkv.norm_weight"),
    *((f"{part}_proj.weight", "qkv.weight", part) for part in "qkv"),
    ("q_norm.weight", "q_norm"),
    ("k_norm.weight", "k_norm"),
    ("o_proj.weight", "out.weight"),
)


def theirs(factor: float, num_kv_heads: int, head_dim: int) -> MiniMaxM2Attention:
    rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=factor)
    config = MiniMaxM2Config(
        hidden_size=HIDDEN,
        num_attention_heads=8,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        rope_parameters=rope,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    attention = MiniMaxM2Attention(config, 0).eval()
    make_loud(attention)
    return attention


def expected(attention: MiniMaxM2Attention, x_TD: Tensor) -> Tensor:
    """Return the residual stream after transformers' layer, with a norm of weight 1 before it."""
    normed = nn.functional.rms_norm(x_TD, (HIDDEN,), eps=1e-6)[None]
    angles = MiniMaxM2RotaryEmbedding(attention.config)(normed, torch.arange(TOKENS)[None])
    later = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None, None]
    with torch.inference_mode():
        return x_TD + attention(normed, angles, later)[0][0]


def ours(attention: MiniMaxM2Attention, x_TD: Tensor, mesh: Mesh) -> Tensor:
    config = attention.config
    layer = Attention(
        hidden_size=HIDDEN,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_size=config.head_dim,
        eps=config.rms_norm_eps,
        qk_norm="row",
        is_last=False,
        mesh=mesh,
        ops=select_ops(Kernels(), torch.device("cpu")),
    )
    tensors = {**attention.state_dict(), "norm": torch.ones(HIDDEN)}
    places = destinations(layer, RULES)
    assert places.keys() == tensors.keys()
    for name, place in places.items():
        place.take(tensors[name], 0)
    kv = mesh.span_or_copy("num_key_value_heads", config.num_key_value_heads).count
    cache = PagedKV(*torch.zeros(2, 5, PAGE_TOKENS, kv, config.head_dim).unbind())
    layer.attend.cache = cache
    positions = torch.arange(TOKENS)
    batch = Batch(
        token_ids_T=positions,
        positions_T=positions,
        slot_mapping_T=positions + PAGE_TOKENS,
        slots_T=positions,
        slots_R=torch.zeros(1, dtype=torch.int64),
        starts_R1=torch.tensor([0, TOKENS], dtype=torch.int32),
        lengths_R=torch.tensor([TOKENS], dtype=torch.int32),
        page_table_RM=torch.arange(1, 5, dtype=torch.int32)[None],
        sampled_at=None,
        num_decodes=0,
        num_decode_tokens=0,
        decode_width=1,
        max_new=TOKENS,
        max_length=TOKENS,
    )
    factor = config.rope_parameters["partial_rotary_factor"]
    table = cos_sin_table(PlainRope(rope_theta=1e4), int(config.head_dim * factor), TOKENS)
    context = ForwardContext(batch, TorchPaged(cache).bind(batch))
    with torch.inference_mode():
        after = layer(Added(x_TD.clone()), table, context)
    return after.stream_TD + (after.update if isinstance(after, Pending) else 0)


@pytest.mark.parametrize(
    ("tp", "num_kv_heads"), [(1, 2), (2, 2), (2, 4), (4, 2)], ids=lambda value: str(value)
)
@pytest.mark.parametrize(("factor", "head_dim"), [(0.5, 16), (0.25, 24), (1.0, 16)])
def test_minimax_m2(tp: int, num_kv_heads: int, factor: float, head_dim: int) -> None:
    """With tp 4, each of two key/value heads is on two ranks, and the mean counts it once."""
    attention = theirs(factor, num_kv_heads, head_dim)
    x_TD = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    meeting = Meeting(tp)
    meshes = [ThreadMesh(rank, tp, meeting) for rank in range(tp)]
    with ThreadPoolExecutor(tp) as pool:
        found = list(pool.map(lambda mesh: ours(attention, x_TD, mesh), meshes))
    for each in found:
        torch.testing.assert_close(each, expected(attention, x_TD), rtol=1e-4, atol=1e-4)


def test_rows_are_not_heads() -> None:
    """The range of the norm changes these results: heads would have different means."""
    attention = theirs(0.5, 2, 16)
    x_TD = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    whole = expected(attention, x_TD)
    attention.q_proj.weight.data[:16].mul_(10)  # one head, which changes the mean of all
    moved = (expected(attention, x_TD) - whole).abs().max()
    assert moved > 0.1
    torch.testing.assert_close(ours(attention, x_TD, Mesh()), expected(attention, x_TD))
