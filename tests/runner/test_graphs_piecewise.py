"""Piecewise graphs on a CPU, with tapes in place of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from nanovllm.attention.base import ForwardContext
from nanovllm.bench.graphs import occupy
from nanovllm.layers.residual import Residual
from nanovllm.plan import Chunk, StepPlan
from nanovllm.runner.batch import StepRows
from nanovllm.runner.build import padding_rows
from nanovllm.runner.graphs import piecewise_sizes
from nanovllm.runner.runner import Runner
from tests.models.tiny import config_of, make_tiny
from tests.runner.tape import capture_on_tapes
from tests.whole_engine import WholeEngine, prompts_of, small_demo

SLOTS, SIZES = 12, [8, 16, 48]
# Decode rows and prompt chunks. Short steps follow long ones, whose tokens are still in the inputs.
MIXES = [
    (0, [8]),
    (11, [37]),
    (3, [1]),
    (7, [9]),
    (0, [5]),
    (4, [2, 3, 1, 17]),
    (5, [20]),
    (1, [2]),
]


@pytest.fixture(scope="module")
def runner() -> Runner:
    runner = small_demo(SLOTS).runner
    capture_on_tapes(runner, SIZES)
    return runner


def rows_of(runner: Runner, num_decodes: int, counts: list[int], max_length: int = 64) -> StepRows:
    """Return decode rows of the first slots and chunks of the last. Every other chunk samples."""
    slots = np.arange(num_decodes, dtype=np.int32)
    chunks = [Chunk(SLOTS - 1 - i, count, i % 2 == 0) for i, count in enumerate(counts)]
    return runner.builder.rows(
        StepPlan(0, [], [], num_decodes, slots.tobytes(), chunks, max_length, [])
    )


@torch.inference_mode()
def test_piecewise_graphs_around_attention_are_the_eager_step_whatever_the_mix(
    runner: Runner,
) -> None:
    for seed, (num_decodes, counts) in enumerate(MIXES):
        occupy(runner, seed)
        runner.slots.lengths_N[:SLOTS] //= 4  # make room for the chunks
        rows = rows_of(runner, num_decodes, counts)
        before = [pages_LPSGA.clone() for pages_LPSGA in runner.caches.tensors]
        forwarded = runner.forward(rows)
        batch, eager = forwarded.batch, forwarded.logits_SV
        assert torch.equal(batch.slots_R, rows.slots_R) and batch.decode_width == 1
        assert batch.num_decode_tokens == batch.num_decodes == num_decodes
        after = [pages_LPSGA.clone() for pages_LPSGA in runner.caches.tensors]
        for pages_LPSGA, old in zip(runner.caches.tensors, before, strict=True):
            pages_LPSGA.copy_(old)
        padded = runner.padded_tokens
        replayed, mode = runner._run(rows)
        assert mode == "PIECEWISE" and eager is not None and replayed.logits_SV is not None
        assert len(eager) == num_decodes + -(-len(counts) // 2)
        torch.testing.assert_close(replayed.logits_SV, eager, rtol=1e-4, atol=1e-4)
        hidden_SD = forwarded.hidden_SD
        torch.testing.assert_close(replayed.hidden_SD, hidden_SD, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(runner.model.logits(hidden_SD), eager)
        for found, pages, old in zip(runner.caches.tensors, after, before, strict=True):
            # Padding tokens are written to page 0.
            torch.testing.assert_close(found[:, 1:], pages[:, 1:], rtol=1e-4, atol=1e-4)
            changed = (pages[:, 1:] != old[:, 1:]).any(-1).any(-1).sum()
            assert changed == len(runner.model.layers) * rows.num_tokens
        size = min(size for size in SIZES if size >= rows.num_tokens)
        assert runner.padded_tokens - padded == size - rows.num_tokens


@torch.inference_mode()
def test_behind_the_last_attention_only_sampling_rows_go_on(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    for block in runner.model.layers:
        monkeypatch.setattr(block.mlp, "forward", watched(block.mlp.forward, seen))
    chunk = StepPlan(0, [], [], 0, b"", [Chunk(1, 50, False)], 64, [])
    for rows, num_sampling in (
        (rows_of(runner, 3, [9, 30, 1]), 5),  # three decode rows, the first and the last chunk
        (runner.builder.rows(chunk), 1),  # no row samples, but a step has at least one row
    ):
        seen.clear()
        runner.forward(rows)
        assert seen == [rows.num_tokens] * (len(runner.model.layers) - 1) + [num_sampling]
    last = runner.graphs.plain.mixed.captured[16].graphs[-1].operations
    lines = {len(args[0]) for name, args, _, _ in last if "linear" in str(name)}
    assert lines == {SLOTS}  # maximum number of sampling rows, out of 16 tokens


def watched(forward: Callable[..., object], seen: list[int]) -> Callable[..., object]:
    def watching(residual: Residual, ctx: ForwardContext) -> object:
        seen.append(len(residual.stream_TD))
        return forward(residual, ctx)

    return watching


def test_only_attention_is_left_out_of_the_graphs(runner: Runner) -> None:
    piecewise, layers = runner.graphs.plain.mixed.captured[16], runner.model.layers
    assert [cut.operation for cut in piecewise.cuts] == [block.attn.attend for block in layers]
    assert len(piecewise.graphs) == len(layers) + 1
    operations = [[str(call[0]) for call in tape.operations] for tape in piecewise.graphs]
    assert not any("attention" in name for names in operations for name in names)
    # Two products before the first attention's cut and the norm after the last; four in between.
    products = [sum("linear" in name or "mm" in name for name in names) for names in operations]
    assert products == [1, *[4] * (len(layers) - 1), 3]


def test_results_of_attention_have_one_buffer_for_all_layers_and_sizes(runner: Runner) -> None:
    (buffer,) = runner.graphs.plain.mixed.results.items()
    shape, o_THA = buffer
    found = [
        cut for piecewise in runner.graphs.plain.mixed.captured.values() for cut in piecewise.cuts
    ]
    assert len(found) == len(SIZES) * len(runner.model.layers)
    assert {cut.result for cut in found} == {shape} and len(o_THA) == max(SIZES)
    assert {cut.tensors[0].shape[1:] for cut in found} == {shape[0]} == {o_THA.shape[1:]}


def test_the_runner_says_why_a_step_with_a_chunk_is_eager(runner: Runner) -> None:
    assert runner.graphs.plain.eager_reason(padding_rows(runner, 1, 48)) is None
    too_long = "49 tokens are more than the largest graph's 48"
    assert runner.graphs.plain.eager_reason(padding_rows(runner, 1, 49)) == too_long
    with torch.inference_mode():
        assert runner._run(padding_rows(runner, 1, 49))[1] == "NONE"


def test_the_text_is_the_same_through_piecewise_graphs(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3")
    prompts = prompts_of(10, seed=2)
    texts, modes = [], []
    for sizes in ([], [8, 24, 40]):
        engine = WholeEngine(config_of(tmp_path), pages=60, slots=6, step_tokens=48)
        if sizes:
            capture_on_tapes(engine.runner, sizes)
        for i, prompt in enumerate(prompts):
            engine.submit(i, prompt, 20)
            engine.loop.step()
        engine.run()
        texts.append(engine.text)
        modes.append(engine.runner.steps_by_mode)
    assert texts[0] == texts[1] and sum(map(len, texts[0].values())) == 200
    eager, piecewise = modes
    assert piecewise["PIECEWISE/mixed"] > 3 and piecewise["NONE/decode"] == eager["NONE/decode"]
    assert piecewise["PIECEWISE/mixed"] + piecewise["NONE/mixed"] == eager["NONE/mixed"]
    assert not any(mode.startswith("PIECEWISE") for mode in eager)


@pytest.mark.parametrize("most", [1, 32, 200, 2048, 8192])
def test_sizes_keep_padding_small(most: int) -> None:
    sizes = piecewise_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most and len(sizes) <= 7 + 8 * 5 + 1
    for tokens in range(1, most + 1):
        padding = min(size for size in sizes if size >= tokens) - tokens
        assert padding <= max(31, tokens * 0.125)


def test_no_sizes_at_all() -> None:
    assert piecewise_sizes(0) == []
