"""Models with experts on a GPU in bf16 and block fp8 against the CPU in float32.

Rounding may change a choice between nearly equal scores, and then the token's logits. Therefore
choices must agree where the margin exceeds bf16's error of a score. Logits must agree where all
choices of a token agree.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace as changed
from torch import Tensor

from nanovllm.attention.base import Batch
from nanovllm.attention.grouped import PagedKV
from nanovllm.attention.torch_ref import TorchPaged
from nanovllm.config import Config, Kernels
from nanovllm.layers.kernels import select_ops
from nanovllm.layers.ops import Ops
from nanovllm.models.config import read_model_config
from nanovllm.models.decoder import Decoder
from nanovllm.models.weights import default_dtype
from nanovllm.parallel.mesh import Mesh
from tests.models.steps import CPU, MAX_TOKENS, PAGE_TOKENS, PAGES_EACH, Steps, fill
from tests.models.test_parity import LENGTHS, our_logits, prompts
from tests.models.tiny import config_of, make_tiny

SHAPE = dict(
    hidden_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=64, num_hidden_layers=3
)
FAMILIES: dict[str, dict[str, object]] = {
    "qwen3_moe": dict(
        SHAPE, num_experts=40, num_experts_per_tok=6, moe_intermediate_size=192, norm_topk_prob=True
    ),
    "minimax_m2": dict(
        SHAPE, num_local_experts=24, num_experts_per_tok=3, intermediate_size=192, rotary_dim=32
    ),
}
SCHEDULES = {
    "many tokens": [LENGTHS],
    "few tokens": [(28, 24), (1, 1), (2, 1), (2, 3)],
}
MARGIN = {"qwen3_moe": 0.25, "minimax_m2": 0.06}  # of logits; of sigmoid scores
TOLERANCE = 0.35  # of a log-probability, with 3 layers of large weights
IN_FP8 = 2.0  # factor of both if activations are fp8, too
# Share of tokens. Plain torch in bfloat16 agrees on 0.24 of tokens of qwen3_moe, and on 0.63 of
# M2's. This is with products of attention that quantise their rows, as block fp8 defines. A token
# of qwen3_moe chooses six of 40 experts three times.
MIN_AGREEING = {None: 0.5, "fp8": 0.15}


@dataclass
class Choice:
    """A router's scores and chosen experts, as float32 on the CPU."""

    scores_TE: Tensor
    experts_TK: Tensor

    def margins(self, num_chosen: int) -> Tensor:
        best = self.scores_TE.topk(num_chosen + 1).values
        return best[:, -2] - best[:, -1]


def recording(ops: Ops, to: list[Choice]) -> Ops:
    kernels = ops.experts

    def route(logits_TE: Tensor, bias_E: Tensor | None, **more: object) -> tuple[Tensor, Tensor]:
        weights_TK, experts_TK = kernels.route(logits_TE, bias_E, **more)
        scores_TE = logits_TE.float()
        if bias_E is not None:
            scores_TE = scores_TE.sigmoid() + bias_E
        to.append(Choice(scores_TE.cpu(), experts_TK.long().cpu()))
        return weights_TK, experts_TK

    return replace(ops, experts=kernels._replace(route=route))


def model_on(device: torch.device, dtype: torch.dtype, config: Config, to: list[Choice]) -> Decoder:
    family, model_config = read_model_config(config)
    ops = recording(select_ops(Kernels(), device), to)
    with device, default_dtype(dtype):
        model = family(model_config, Mesh(), ops, MAX_TOKENS)
    fill(model, config)
    return model


class StepsOn(Steps):
    """Steps with caches and batches on the model's device. Attention is in torch."""

    def __init__(self, folder: Path, model: Decoder, device: torch.device) -> None:
        super().__init__(folder, model, prompts(), Mesh())
        self.device = device
        dtype = model.norm.weight.dtype
        _, config = read_model_config(config_of(folder))
        (group,) = model.cache_layout(config, Mesh(), dtype.itemsize).paged
        shape = (len(LENGTHS) * PAGES_EACH + 1, PAGE_TOKENS, group.num_heads, group.k_size)
        made = {"dtype": dtype, "device": device}
        caches = {
            at: PagedKV(torch.zeros(shape, **made), torch.zeros(shape, **made))
            for at in group.layers
        }
        model.bind_caches(caches)
        self.backend = TorchPaged(caches[0])

    def batch(self, counts: tuple[int, ...]) -> Batch:
        found = super().batch(counts)
        tensors = {
            field.name: value.to(self.device)
            for field in fields(found)
            if isinstance(value := getattr(found, field.name), Tensor)
        }
        return replace(found, **tensors)

    def feed(self, counts: tuple[int, ...]) -> list[Tensor]:
        """Return the logits on the CPU."""
        logits_TV = self.model.logits(self.hidden(self.batch(counts))).float().cpu()
        return list(logits_TV.flip(0).split([count for count in counts if count]))


def told(config: Config, device: torch.device, dtype: torch.dtype, schedule: str) -> tuple:
    """Return log-probabilities_TV of all tokens and each layer's choices in the same order."""
    choices: list[Choice] = []
    model = model_on(device, dtype, config, choices)
    steps = StepsOn(Path(str(config.model_dir)), model, device)
    counts = SCHEDULES[schedule]
    logits = torch.cat(our_logits(steps, counts))
    layers = []
    num_layers = len(model.layers)
    for layer in range(num_layers):
        rows: list[list[Tensor]] = [[], []]
        for at, step in enumerate(counts):
            choice = choices[at * num_layers + layer]
            # After the last layer's attention, tokens have the order of sampled_at: reversed.
            flip = layer == num_layers - 1
            parts = [choice.scores_TE, choice.experts_TK]
            scores, experts = (part.flip(0) if flip else part for part in parts)
            for row, (one, other) in enumerate(
                zip(scores.split(step), experts.split(step), strict=True)
            ):
                rows[row].append(torch.cat([one, other.float()], 1))
        both = torch.cat([part for row in rows for part in row])
        num_experts = choices[0].scores_TE.shape[1]
        layers.append(Choice(both[:, :num_experts], both[:, num_experts:].long()))
    return logits.log_softmax(-1), layers


def compare(
    folder: Path, family: str, schedule: str, quantize: str | None, device: torch.device
) -> float:
    """Compare choices and logits. Return the share of tokens with equal choices in all layers."""
    make_tiny(folder, family, **FAMILIES[family]).bfloat16().save_pretrained(folder)
    config = config_of(folder)
    if quantize is not None:
        config = changed(config, recipe=changed(config.recipe, quantize=quantize))
    expected, reference = told(config, CPU, torch.float32, schedule)
    got, found = told(config, device, torch.bfloat16, schedule)
    slack = IN_FP8 if quantize else 1.0
    agree = torch.ones(len(expected), dtype=torch.bool)
    for theirs, ours in zip(reference, found, strict=True):
        num_chosen = theirs.experts_TK.shape[1]
        same = (theirs.experts_TK.sort().values == ours.experts_TK.sort().values).all(1)
        wide = theirs.margins(num_chosen) > slack * MARGIN[family]
        assert (same | ~wide | ~agree).all(), "a choice differs though its margin is wide"
        agree &= same
    best = expected.argmax(-1, keepdim=True)
    error = (got - expected).gather(1, best).abs()[agree].max().item()
    assert 0 < error < slack * TOLERANCE, error
    share = agree.float().mean().item()
    assert share > MIN_AGREEING[quantize]
    return share


@pytest.mark.gpu
@pytest.mark.parametrize("quantize", [None, "fp8"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_choices_and_logits_are_the_cpus(
    family: str, schedule: str, quantize: str | None, tmp_path: Path
) -> None:
    compare(tmp_path, family, schedule, quantize, torch.device("cuda"))
