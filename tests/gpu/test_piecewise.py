"""Piecewise graphs on a GPU against the eager step, and memory shared by graphs."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from nanovllm.bench.graphs import occupy
from nanovllm.config import Cache, Kernels, Schedule, Server
from nanovllm.plan import Chunk, StepPlan
from nanovllm.runner.batch import StepRows
from nanovllm.runner.build import build
from nanovllm.runner.graphs import borrowed, graph_sizes, piecewise_sizes
from nanovllm.runner.runner import Runner
from tests.gpu.test_engine import SHAPE
from tests.models.tiny import config_of, make_tiny

SLOTS, VOCABULARY = 80, SHAPE["vocab_size"]
# Decode rows and prompt chunks. Short steps follow long ones, and sizes repeat.
MIXES = [
    (64, [448]), (0, [512]), (63, [1]), (1, [300]), (79, [17]), (8, [9, 31, 1, 100]), (0, [5]),
    (40, [129, 2]), (3, [1]), (64, [400]), (0, [1]), (16, [200] * 2),
]  # fmt: skip
NOISE = 0.03  # relative to the largest logit; with padding, other GEMM kernels may be chosen


@pytest.fixture(scope="module", params=["flash", "triton"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder: Path = tmp_path_factory.mktemp("tiny")
    model = make_tiny(folder, "qwen3", **SHAPE, max_position_embeddings=2048).bfloat16()
    model.save_pretrained(folder)
    config = config_of(folder)
    recipe = replace(
        config.recipe,
        device="cuda",
        kernels=Kernels(attention=request.param, mixed_graph_tokens=512),
        cache=Cache(pages=SLOTS * 16, page_tokens=64),
        schedule=Schedule(slots=SLOTS, step_tokens=1024),
        server=Server(max_model_tokens=1024),
    )
    return build(replace(config, recipe=recipe)).runner


def rows_of(runner: Runner, num_decodes: int, counts: list[int]) -> StepRows:
    """Return decode rows of the first slots and chunks of the last. Every other chunk samples."""
    slots = torch.arange(num_decodes, dtype=torch.int32).numpy()
    chunks = [Chunk(SLOTS - 1 - i, count, i % 2 == 0) for i, count in enumerate(counts)]
    plan = StepPlan(0, [], [], num_decodes, slots.tobytes(), chunks, runner.slots.max_tokens, [])
    return runner.builder.rows(plan)


@pytest.mark.gpu
@torch.inference_mode()
def test_piecewise_graphs_give_the_eager_logits_whatever_the_mix(runner: Runner) -> None:
    assert list(runner.graphs.plain.mixed.captured) == piecewise_sizes(512)
    for seed, (num_decodes, counts) in enumerate(MIXES):
        occupy(runner, seed)
        runner.slots.lengths_N[:SLOTS] //= 4  # make room for the chunks
        rows = rows_of(runner, num_decodes, counts)
        before = contents(runner)
        eager = runner.forward(rows).logits_SV
        after = contents(runner)
        for pages_LPSGA, old in zip(runner.caches.tensors, before, strict=True):
            pages_LPSGA.copy_(old)
        replayed, mode = runner._run(rows)
        assert mode == "PIECEWISE" and eager is not None and replayed.logits_SV is not None
        assert len(eager) == num_decodes + -(-len(counts) // 2)
        assert eager.abs().max() > 1
        assert off(replayed.logits_SV, eager) < NOISE, (num_decodes, counts)
        for found, expected in zip(contents(runner), after, strict=True):
            assert off(found[:, 1:], expected[:, 1:]) < NOISE  # page 0 is for padding


def contents(runner: Runner) -> list[torch.Tensor]:
    return [pages_LPSGA.clone() for pages_LPSGA in runner.caches.tensors]


def off(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference relative to the largest value."""
    return float((actual.float() - expected.float()).abs().max() / expected.abs().max())


@pytest.mark.gpu
@torch.inference_mode()
def test_steps_of_all_kinds_can_follow_each_other(runner: Runner) -> None:
    """Graphs share memory, and none may overwrite results that are still needed."""
    steps = [rows_of(runner, 24, [40]), rows_of(runner, 0, [300])]
    occupy(runner)
    runner.slots.lengths_N[:SLOTS] //= 4
    decode = runner.builder.padded(24, 1, runner.slots.max_tokens)
    steps = [steps[0], decode, steps[1], decode]
    alone = []
    for rows in steps:
        logits = runner._run(rows)[0].logits_SV
        assert logits is not None
        alone.append(logits.clone())
        torch.cuda.synchronize()
    assert off(alone[0][:24], alone[1][:24]) < NOISE  # the same rows with and without a chunk
    for _ in range(3):
        for rows, expected in zip(steps, alone, strict=True):
            logits = runner._run(rows)[0].logits_SV
            assert logits is not None
            torch.testing.assert_close(logits, expected, rtol=0, atol=0)


@pytest.mark.gpu
def test_logits_of_different_graphs_take_the_same_memory(runner: Runner) -> None:
    spans = []
    for (size, _), captured in runner.graphs.plain.decode.captured.items():
        assert captured.output.logits_SV.shape == (size, VOCABULARY)
        start = captured.output.logits_SV.data_ptr()
        spans.append((start, start + captured.output.logits_SV.nbytes))
    overlaps = sum(a[0] < b[1] and b[0] < a[1] for a, b in combinations(spans, 2))
    assert len(spans) == len(graph_sizes(SLOTS)) and overlaps >= len(spans)


@pytest.mark.gpu
def test_borrowed_memory_is_the_tensors_and_not_kept() -> None:
    x = torch.arange(24, device="cuda", dtype=torch.bfloat16).view(2, 3, 4)
    seen = borrowed(x)
    assert seen.data_ptr() == x.data_ptr() and seen.dtype == x.dtype and seen.shape == x.shape
    x.mul_(2)
    assert torch.equal(seen, x)
    held = torch.cuda.memory_allocated()
    del x
    assert torch.cuda.memory_allocated() < held
