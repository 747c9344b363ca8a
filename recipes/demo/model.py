"""Qwen3 in plain torch, reduced to the needs of training, and its files in Hugging Face layout.

Parameters carry the official names, so transformers and nanovllm load the files that `save` writes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

END_OF_TEXT, END_OF_TURN = 2039, 2041  # ids of <|endoftext|> and <|im_end|>
CONTEXT = 4096


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    head_dim: int = 64
    vocab: int = 2048
    eps: float = 1e-6
    rope_theta: float = 10000.0


# Decision: more heads than hidden / head_dim and a narrow MLP. The demo's work is finding and
# copying (which tool, which value); little of it is knowledge.
BIG = Shape(hidden=256, layers=8, heads=8, kv_heads=2, inner=256)
DRAFT = Shape(hidden=128, layers=4, heads=4, kv_heads=2, inner=256)


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def rotary(positions_T: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    half = torch.arange(0, shape.head_dim, 2, device=positions_T.device) / shape.head_dim
    angles = positions_T.float()[:, None] / shape.rope_theta ** half[None]
    return torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    left, right = x.float().chunk(2, -1)
    cos, sin = rope
    return (x.float() * cos + torch.cat([-right, left], -1) * sin).to(x.dtype)


class Cache:
    """Keys and values of all tokens so far, for rows of equal length."""

    def __init__(self, shape: Shape, rows: int, length: int, device: str) -> None:
        size = (shape.layers, 2, rows, shape.kv_heads, length, shape.head_dim)
        self.memory = torch.zeros(size, device=device)
        self.layer = self.used = 0

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append one layer's keys and values, and return all of that layer so far.

        Each forward pass must call this once per layer, in layer order.
        """
        end = self.used + k.shape[2]
        memory = self.memory[self.layer]
        memory[0, :, :, self.used : end] = k
        memory[1, :, :, self.used : end] = v
        self.layer += 1
        if self.layer == len(self.memory):
            self.layer, self.used = 0, end
        return memory[0, :, :, :end], memory[1, :, :, :end]


# Keys that a query attends to: a mask over packed rows (sparse on a GPU, dense elsewhere), or all
# keys of a cache, for one new token.
Where = BlockMask | Tensor | Cache


def attend(q: Tensor, k: Tensor, v: Tensor, where: Where) -> Tensor:
    if isinstance(where, Cache):
        k, v = where.extend(k, v)
        together = q.view(q.shape[0], k.shape[1], -1, q.shape[3])  # heads that share keys
        return F.scaled_dot_product_attention(together, k, v).reshape(q.shape)
    if isinstance(where, Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=where, enable_gqa=True)
    return flex_attention(q, k, v, block_mask=where, enable_gqa=True)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = linear(shape.hidden, shape.heads * shape.head_dim)
        self.k_proj = linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.v_proj = linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.o_proj = linear(shape.heads * shape.head_dim, shape.hidden)
        self.q_norm = Norm(shape.head_dim, shape.eps)
        self.k_norm = Norm(shape.head_dim, shape.eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], where: Where) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            project(x).view(rows, length, -1, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        out = attend(q, k, v, where)
        joined: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))
        return joined


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = linear(shape.hidden, shape.inner)
        self.up_proj = linear(shape.hidden, shape.inner)
        self.down_proj = linear(shape.inner, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], where: Where) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, where)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x  # noqa: RET504


class Trunk(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.eps)


class Qwen3(nn.Module):
    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = (2 * shape.layers) ** -0.5 if last else 1.0
                nn.init.normal_(parameter, std=0.03 * scale, generator=generator)

    def forward(
        self, tokens_BT: Tensor, positions_T: Tensor, where: Where, chosen_N: Tensor | None = None
    ) -> Tensor:
        """Return logits [B, T, vocab], or [N, vocab] at the chosen places of the flattened rows."""
        x = self.model.embed_tokens(tokens_BT)
        rope = rotary(positions_T, self.shape)
        for block in self.model.layers:
            x = block(x, rope, where)
        if chosen_N is not None:
            x = x.flatten(0, 1).index_select(0, chosen_N)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


def config_json(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": END_OF_TURN,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.inner,
        "max_position_embeddings": CONTEXT,
        "max_window_layers": shape.layers,
        "model_type": "qwen3",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "pad_token_id": END_OF_TEXT,
        "rms_norm_eps": shape.eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab,
    }


def save(model: Qwen3, folder: Path) -> None:
    """Write config.json, generation_config.json and bfloat16 weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    generation = {
        "do_sample": False,
        "eos_token_id": [END_OF_TURN, END_OF_TEXT],
        "pad_token_id": END_OF_TEXT,
        "temperature": 0.0,
    }
    for name, content in (
        ("config.json", config_json(model.shape)),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def load(folder: Path, shape: Shape, device: str) -> Qwen3:
    model = Qwen3(shape).to(device)
    model.load_state_dict(
        {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    )
    return model
