"""Compilation of missing CuTe DSL kernels at a first start, during the loading of weights.

Decision: each kernel is compiled in its own process. A compilation takes seconds of Python under
the interpreter's lock and the import of a compiler, which the engine thus avoids. A kernel that is
not listed here, or fails here, is compiled at its first use.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch
from nanovllm_kernels.compile_cache import Job
from nanovllm_kernels.fp8_reference import Scaled
from nanovllm_kernels.products.gated_linear import compile_gated
from torch import nn

from nanovllm.kv.layout import PagedGroup
from nanovllm.layers.embedding import VocabEmbedding
from nanovllm.layers.experts.products import ExpertMLPs
from nanovllm.layers.fp8 import Fp8Copy
from nanovllm.layers.linear import AddLinear, Linear, NormLinear
from nanovllm.log import Progress
from nanovllm.models.decoder import Decoder
from nanovllm.runner.resolved import Resolved
from nanovllm.spec.model_base import DraftModel

log = logging.getLogger("engine")
MANY_PAIRS = 1 << 16  # large enough that every expert gets the kernel for many rows
LEAST_CORES = 8  # with fewer cores, the processes would slow each other down
HOPPER = ("env", "CUTE_DSL_ARCH=sm_90a", "QUACK_ARCH=90", "CUDA_VISIBLE_DEVICES=")


def jobs_of(resolved: Resolved, model: Decoder, draft_model: DraftModel | None = None) -> list[Job]:
    """Return the CuTe DSL kernels that an engine needs before it is ready."""
    kernels, speculate = resolved.recipe.kernels, resolved.recipe.speculate
    paged, tokens = resolved.own_layout.paged[0], speculate.tokens if speculate is not None else 0
    jobs = attention_of(resolved, paged, model.layers[paged.layers[0]], {1 + tokens})
    models: list[Any] = [model]
    if draft_model is not None and resolved.drafts is not None:
        drafts: Any = draft_model
        models.append(drafts)
        own, extra_rows = resolved.drafts.loader.layout.paged[0], 1 - draft_model.lag
        first_passes = {1 + tokens + extra_rows, 1 + extra_rows}
        jobs += attention_of(resolved, own, drafts.layers[own.layers[0]], first_passes)
    is_16_bit = getattr(torch, resolved.recipe.dtype).itemsize == 2
    if kernels.gated_linear == "cute" and is_16_bit:  # it has no float32
        jobs.append(compile_gated.job(resolved.recipe.dtype, True))
    for each in models:
        if "cute" in (kernels.skinny_linear, kernels.fp8_linear) or kernels.invariant:
            few_fp8 = kernels.fp8_linear == "cute"
            jobs += products_of(each, ordered=kernels.invariant, few_fp8=few_fp8)
        jobs += experts_of(each)
    return [*dict.fromkeys(jobs)]


def attention_of(resolved: Resolved, paged: PagedGroup, block: Any, widths: set[int]) -> list[Job]:  # noqa: ANN401
    """Return the kernels of a block's attention. `widths`: maximum tokens of decode rows."""
    kernels, page_tokens, attn = resolved.recipe.kernels, resolved.page_tokens, block.attn
    if paged.kind == "latent":
        latent: list[Job] = attn.jobs(resolved.recipe)
        return latent
    group, jobs = attn.out.weight.shape[1] // paged.k_size // paged.num_heads, list[Job]()
    if kernels.attention == "flash":
        from nanovllm_kernels.attention.flash_prefill import compile_causal

        jobs.append(compile_causal.job(group, page_tokens, paged.k_size, resolved.recipe.dtype))
    if kernels.decode == "cute":
        from nanovllm_kernels.attention.paged_decode_cute import MAX_PAIRS, compile_decode

        is_fp8 = paged.bytes_per_element == 1
        jobs += [
            compile_decode.job(group, paged.k_size, page_tokens, most, is_fp8)
            for most in sorted({0, *(width for width in widths if 1 < width <= MAX_PAIRS // group)})
        ]
    return jobs


def experts_of(model: nn.Module) -> list[Job]:
    """Return the kernels of routed experts for many rows."""
    jobs: set[Job] = set()
    for module in model.modules():
        if isinstance(module, ExpertMLPs):
            for products in module.kernels.many:
                if products.fits(MANY_PAIRS, module.gate_up):
                    jobs |= {*products.jobs(module.gate_up, module.num_chosen)}
    return sorted(jobs)


def products_of(model: nn.Module, *, ordered: bool = False, few_fp8: bool = True) -> list[Job]:
    """Return the kernels of the model's products for few rows, and fp8 ones for many.

    `ordered`: 16-bit products without fused operations, as for kernels.invariant. `few_fp8`: fp8
    products of few rows have kernels of their own.
    """
    from nanovllm_kernels.products import dense_fp8, skinny_linear
    from nanovllm_kernels.products.skinny_linear import Kind

    jobs = set()
    for module in model.modules():
        match module:
            case NormLinear():
                kind = Kind(normed=True, gated=module.gated)
            case AddLinear():
                kind = Kind(added=module.mesh.tp_size == 1)
            case Fp8Copy():
                kind = Kind()
            case Linear() if type(module) in (Linear, VocabEmbedding) and len(module.weight):
                kind = Kind()
            case _:
                continue
        if isinstance(module.operand, Scaled):
            jobs |= dense_fp8.compiled_for(module.operand, kind, few=few_fp8)
        elif module.operand.dtype == torch.bfloat16:  # the only type that it computes
            jobs |= skinny_linear.compiled_for(module.operand, kind, ordered=ordered)
    return [compiles.job(*of) for of, compiles in sorted(jobs, key=itemgetter(0))]


@contextmanager
def compile_in_background(jobs: list[Job]) -> Iterator[None]:
    """Compile the kernels that are not on disk while the body of the `with` statement runs."""
    lacking = [job for job in jobs if job.path and not job.path.exists()]
    if len(lacking) < 2 or len(os.sched_getaffinity(0)) < LEAST_CORES:
        yield
        return
    progress = Progress(log, "compiling in the background", len(lacking), "kernels")
    processes = [start(job) for job in lacking]
    try:
        yield
        for process in processes:
            process.wait()
            progress.advance()
    finally:
        for process in processes:
            process.kill()
    if failed := sum(process.returncode != 0 for process in processes):
        text = "%d of %d kernels did not compile; each is tried again at its first use"
        log.warning(text, failed, len(lacking))
    progress.finish()


def start(job: Job) -> subprocess.Popen[bytes]:
    assert job.path is not None
    command = [*HOPPER, sys.executable, "-m", "nanovllm_kernels.compile_one"]
    command += [str(job.path.parent.parent), job.function, job.arguments]
    quiet = subprocess.DEVNULL  # an error occurs again, and is reported, at the first use
    return subprocess.Popen(command, stdout=quiet, stderr=quiet)
