"""Trains the demo model and its draft together on one GPU, from nothing or from given weights.

    python -m recipes.demo.train --out nanovllm/demo
    python -m recipes.demo.train --init nanovllm/demo --peak 0.5 --out nanovllm/demo

Worker processes write the corpus while the GPU learns, so no text is seen twice. The draft model
learns in the same loop from the big one's probabilities, because its job is to agree with it. The
learning rate falls with the remaining time. A slower machine takes fewer steps and still ends with
the smallest ones.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable, Generator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from recipes.demo.corpus import render
from recipes.demo.model import BIG, DRAFT, END_OF_TEXT, Qwen3, Where, load, save
from recipes.demo.muon import Optimizer

log = logging.getLogger("train")
SHARD_ROWS = 64
WARM_UP = 100  # steps until the full learning rate
LEARNED = 4  # one token in LEARNED is in the loss: the answers, and some of the prompts
ASKED_WEIGHT = 0.5  # of a prompt's token in the loss at the start; 0 after half of the training
DRAFT_EVERY = 2  # steps; following the big model is easier than finding the answers
BLOCK = 128  # positions that flex_attention computes or skips together


def shard(job: tuple[int, int]) -> render.Rows:
    seed, length = job
    return render.packed(seed, SHARD_ROWS, length)


def quiet_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def batches(args: argparse.Namespace) -> Generator[render.Rows, None, None]:
    """Yield new rows for every step, in an order that depends only on the seed."""
    shards = args.steps * args.rows // SHARD_ROWS + 2
    jobs = ((args.seed * 1_000_000 + i, args.length) for i in range(shards))
    with get_context("spawn").Pool(args.workers, quiet_worker) as pool:  # a fork may hold locks
        backlog: list[render.Rows] = []
        for rows in pool.imap(shard, jobs):
            backlog.append(rows)
            while sum(map(len, backlog)) >= args.rows:
                ready = np.concatenate(backlog)
                backlog = [ready[args.rows :]]
                yield ready[: args.rows]


def same_document(rows_BT: Tensor) -> Where:
    """Return the attention mask: each token sees earlier ones of the same document."""
    ends_BT = (rows_BT == END_OF_TEXT).int()
    document_BT = ends_BT.cumsum(1) - ends_BT  # the end token belongs to its own document
    if rows_BT.is_cuda:
        return sparse(document_BT)
    length = rows_BT.shape[1]
    same = document_BT[:, None, :, None] == document_BT[:, None, None, :]
    return same & torch.ones(length, length, dtype=torch.bool).tril()


def sparse(document_BT: Tensor) -> BlockMask:
    """Return the same mask for flex_attention.

    Documents lie in order, so comparing the ends of two blocks shows whether they share a document.
    That is much cheaper than create_block_mask, which evaluates every pair of positions.
    """

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (document_BT[b, q] == document_BT[b, k])

    first, last = document_BT[:, ::BLOCK], document_BT[:, BLOCK - 1 :: BLOCK]
    near = (last[:, None] >= first[..., None]).int().tril()  # [B, block of q, block of k]
    order = near.argsort(dim=-1, descending=True, stable=True).int()
    return BlockMask.from_kv_blocks(
        near.sum(-1, dtype=torch.int32)[:, None], order[:, None], BLOCK_SIZE=BLOCK, mask_mod=sees
    )


def places(rows: render.Rows) -> npt.NDArray[np.int64]:
    """Return the positions whose next token is in the loss: the answers first, then some prompt."""
    room = rows.size // LEARNED
    answers = np.zeros(rows.shape, bool)
    answers[:, :-1] = rows[:, 1:] >= render.ANSWER
    inside = np.flatnonzero(answers)[:room]
    answers[:, -1] = True  # the last position has no next token
    outside = np.flatnonzero(~answers)
    spread = np.linspace(0, len(outside) - 1, room - len(inside)).astype(np.int64)
    return np.concatenate([inside, outside[spread]])


def answer_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    return (losses * weights).sum() / weights.sum()


def imitation_loss(logits: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
    """Return the cross entropy with the big model's probabilities."""
    losses = -(teacher.float().softmax(-1) * logits.float().log_softmax(-1)).sum(-1)
    return (losses * weights).sum() / weights.sum()


def move(array: npt.NDArray[Any], device: str) -> Tensor:
    """Copy an array to the device without waiting for the work in progress."""
    tensor = torch.from_numpy(array)
    if device == "cuda":
        tensor = tensor.pin_memory().to(device, non_blocking=True)
    return tensor.long()


def as_is(function: Callable[..., Any], **_: object) -> Callable[..., Any]:
    return function


def starting(args: argparse.Namespace) -> list[Qwen3]:
    """Return the big model and its draft before the first step."""
    if args.init is None:
        return [Qwen3(shape, args.seed + i).to(args.device) for i, shape in enumerate((BIG, DRAFT))]
    return [load(args.init, BIG, args.device), load(args.init / "draft", DRAFT, args.device)]


def train(args: argparse.Namespace) -> None:
    began = time.monotonic()
    stream = batches(args)
    ready = next(stream)  # the workers start before CUDA does
    on_gpu = args.device == "cuda"
    compiled = torch.compile if on_gpu else as_is
    torch.set_float32_matmul_precision("high")
    models = starting(args)
    optimizers = [Optimizer(model) for model in models]
    losses = [compiled(loss, dynamic=False) for loss in (answer_loss, imitation_loss)]
    if on_gpu:
        for block in [*models[0].model.layers, *models[1].model.layers]:
            block.compile(dynamic=False)
    positions_T = torch.arange(args.length, device=args.device)
    started, wait_s, step, progress = time.monotonic(), 0.0, 0, 0.0
    seconds = 60 * args.minutes
    while progress < 1:
        rows_BT, chosen_N = (move(part, args.device) for part in (ready, places(ready)))
        tokens_BT = rows_BT % render.ANSWER
        mask = same_document(tokens_BT)
        next_N = rows_BT.flatten()[chosen_N + 1]
        prompt_weight = ASKED_WEIGHT * max(0.0, 1 - 2 * progress)
        weights_N = torch.where(next_N >= render.ANSWER, 1.0, prompt_weight)
        pace = args.peak * min(1.0, (step + 1) / WARM_UP) * (1 - progress)
        with torch.autocast(args.device, torch.bfloat16, enabled=on_gpu):
            big = models[0](tokens_BT, positions_T, mask, chosen_N)
            answer_error = losses[0](big, next_N % render.ANSWER, weights_N)
        answer_error.backward()
        optimizers[0].step(pace)
        if step % DRAFT_EVERY == 0:
            with torch.autocast(args.device, torch.bfloat16, enabled=on_gpu):
                draft = models[1](tokens_BT, positions_T, mask, chosen_N)
                imitation_error = losses[1](draft, big.detach(), weights_N)
            imitation_error.backward()
            optimizers[1].step(pace)
        step += 1
        before = time.monotonic()
        ready = next(stream)
        wait_s += time.monotonic() - before
        if step == 10:  # compiled by now
            started, wait_s = time.monotonic(), 0.0
            seconds = max(1.0, seconds - (started - began))
        elapsed = time.monotonic() - started
        progress = max(step / args.steps, elapsed / seconds if step >= 10 else 0.0)
        if step % args.log_every == 0:
            speed = (step - 10) * ready.size / elapsed / 1e6
            log.info(
                "step %5d  %5.0f s  loss %.4f  draft %.4f  %.2f M tokens/s  waited %.0f s",
                *(step, elapsed, answer_error.item(), imitation_error.item(), speed, wait_s),
            )
    stream.close()
    save(models[0], args.out)
    save(models[1], args.out / "draft")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the two models")
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="at most, start and compiling included"
    )
    parser.add_argument("--init", type=Path, help="folder of weights to go on from")
    parser.add_argument("--peak", type=float, default=1.0, help="share of the full learning rates")
    parser.add_argument("--rows", type=int, default=32, help="rows of a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
