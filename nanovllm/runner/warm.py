"""Steps of padding rows only, to measure memory, compile kernels and capture graphs."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import torch
from nanovllm_kernels.device import FOLLOWING

from nanovllm.attention.paged import CUTE_ROWS
from nanovllm.config import Recipe
from nanovllm.log import Progress
from nanovllm.runner.batch import StepRows, decode_rows
from nanovllm.runner.graphs import graph_sizes, largest_graph
from nanovllm.runner.piecewise import piecewise_sizes
from nanovllm.runner.runner import Runner

log = logging.getLogger("engine")


def padding_rows(
    runner: Runner, num_rows: int, tokens_each: int, *, drafted: bool = False
) -> StepRows:
    """Return rows of the padding slot, for a step of any shape without requests."""
    device, num_tokens = runner.device, num_rows * tokens_each
    slots_R = torch.full((num_rows,), runner.slots.padding, device=device)
    ones, host = np.ones(num_rows, np.int32), np.full(num_rows, runner.slots.padding, np.int32)
    rows = decode_rows(
        slots_R,
        counts_R=None,
        host_slots=host,
        num_sampled=ones,
        num_tokens=num_rows,
        width=1,
        max_length=tokens_each,
    )
    if tokens_each == 1:
        return rows
    counts_R = torch.full((num_rows,), tokens_each, dtype=torch.int32, device=device)
    if drafted:
        return decode_rows(
            slots_R,
            counts_R=counts_R,
            host_slots=host.repeat(tokens_each),
            num_sampled=tokens_each * ones,
            num_tokens=num_tokens,
            width=tokens_each,
            max_length=tokens_each,
        )
    samples_R1 = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    ends = torch.arange(tokens_each - 1, num_tokens, tokens_each, device=device)
    rows = replace(rows, num_decodes=0, num_decode_tokens=0, num_tokens=num_tokens, sampled_at=ends)
    return replace(rows, samples_R1=samples_R1, counts_R=counts_R, max_new=tokens_each)


@torch.inference_mode()
def run_padding(runner: Runner, num_rows: int, tokens_each: int, *, drafted: bool = False) -> None:
    rows = padding_rows(runner, num_rows, tokens_each, drafted=drafted)
    runner.finish(rows, runner.forward(rows), [], None)


def largest_steps(runner: Runner, recipe: Recipe) -> None:
    """Run the steps that take most memory: a full prefill, and all slots' rows with drafts."""
    step_tokens, longest = int(recipe.schedule.step_tokens), int(recipe.server.max_model_tokens)
    num_rows = -(-step_tokens // longest)
    run_padding(runner, num_rows, step_tokens // num_rows)
    each = 1 + runner.num_drafts
    run_padding(runner, min(int(recipe.schedule.slots), step_tokens // each), each, drafted=True)


def warm_up(runner: Runner, recipe: Recipe) -> None:
    """Compile all kernels that the first requests would otherwise wait for."""
    if runner.device.type == "cpu":
        run_padding(runner, 1, 2)
        return
    longest = min(int(recipe.schedule.step_tokens), int(recipe.server.max_model_tokens))
    for num_rows, tokens_each in [(1, 1), (1, 2), (1, 17), (2, longest // 2), (1, longest)]:
        run_padding(runner, num_rows, max(1, min(tokens_each, longest)))
    if drafts := runner.num_drafts:  # more rows than any graph has
        most = max(FOLLOWING // (1 + drafts) + 1, CUTE_ROWS.stop)
        run_padding(runner, min(most, int(recipe.schedule.slots)), 1 + drafts, drafted=True)
    with torch.inference_mode():
        logits_SV = runner.forward(padding_rows(runner, 1, 1)).logits_SV
        assert logits_SV is not None
        runner.sampler.warm_up(logits_SV)
    torch.cuda.synchronize(runner.device)


@torch.inference_mode()
def capture(runner: Runner, recipe: Recipe) -> None:
    widths = {1, 1 + runner.num_drafts}
    slots = int(recipe.schedule.slots)
    sizes = [(size, w) for w in widths for size in graph_sizes(largest_graph(slots, w))]
    most = min(recipe.kernels.mixed_graph_tokens, int(recipe.schedule.step_tokens))
    piecewise = piecewise_sizes(most)
    progress = Progress(log, "capturing", 2 * len(sizes) + len(piecewise), "CUDA graphs")
    for graphs in (runner.graphs, runner.draws):
        graphs.capture(sizes, int(recipe.server.max_model_tokens), progress.advance)
    runner.piecewise.capture(piecewise, progress.advance)
    progress.finish()
