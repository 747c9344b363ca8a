"""The time of the gated delta rule at the sizes of Qwen3-Next, by constants of its kernels.

    python results/delta.py [--quick]

A GPU is needed. Each line of the output is one choice of constants. For decode rows and rows with
drafts it is the columns of a band. For prompts it is the tokens that a program convolves, and the
parts, stages and warps of the scan. The last lines have the time of each kernel of a prompt.
`nanovllm check-kernels --kernel delta_decode --kernel delta_drafted --kernel delta_prefill` checks
the results. The fastest choice goes into the constants at the top of
kernels/nanovllm_kernels/delta/decode.py and delta/prefill.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from unittest.mock import patch

import click
import torch
from nanovllm_kernels.case import Args
from nanovllm_kernels.delta import decode as delta_decode, prefill as delta_prefill
from nanovllm_kernels.delta.cases import NEXT, inputs
from nanovllm_kernels.timing import graph_us
from torch.profiler import ProfilerActivity, profile

CUDA = torch.device("cuda")
QUICK = "--quick" in sys.argv
ROWS = (1, 256) if QUICK else (1, 8, 64, 256)
PROMPTS = ((4000,) * 2, (4000,) * 16) if QUICK else ((128,), (8192,), (4000,) * 2, (4000,) * 16)
ALL_SCANS = tuple(product((32, 64, 128), (1, 2, 3), (4, 8)))  # parts, stages, warps
SCANS = ((64, 3, 4), (64, 2, 4), (32, 3, 4)) if QUICK else ALL_SCANS


def us(function: Callable[..., object], args: Args) -> str:
    try:
        return f"{graph_us([lambda: function(*args)] * 4):9.1f} us"
    except Exception as error:
        return repr(error)[:60]  # such as too much shared memory


def decodes(num_rows: int) -> None:
    *args, _, tickets_RG = inputs(NEXT, (1,) * num_rows, (), CUDA)
    drafted = inputs(NEXT, (4,) * num_rows, (2,) * num_rows, CUDA)
    for columns in (32, 64, 128):
        with patch.object(delta_decode, "COLUMNS", columns):
            plain = us(delta_decode.mix_decodes, (*args, tickets_RG))
            replayed = us(delta_decode.mix_drafted, drafted)
            label = f"{num_rows:4} rows, bands of {columns} columns"
            click.echo(f"{label}: {plain}, 2 kept + 4 new: {replayed}")


def prompts(lengths: tuple[int, ...]) -> None:
    args, label = inputs(NEXT, lengths, None, CUDA), f"{len(lengths)} x {lengths[0]}"
    for tokens in (16, 32, 64):
        with patch.object(delta_prefill, "CONVOLVED", tokens):
            click.echo(f"{label}, convolved {tokens}: {us(delta_prefill.mix_rows, args)}")
    for part, stages, warps in SCANS:
        with patch.multiple(delta_prefill, PARTS=part, STAGES=stages, WARPS=warps):
            chosen = f"parts {part}, stages {stages}, warps {warps}"
            click.echo(f"{label}, {chosen}: {us(delta_prefill.mix_rows, args)}")
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        delta_prefill.mix_rows(*args)
        torch.cuda.synchronize()
    for event in profiler.key_averages():
        if event.device_time_total:
            click.echo(f"{label}, {event.key}: {event.device_time_total:.1f} us")


for num_rows in ROWS:
    decodes(num_rows)
for lengths in PROMPTS:
    prompts(lengths)
