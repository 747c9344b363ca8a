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

from nanovllm_kernels.compile_cache import Job
from nanovllm_kernels.fp8_reference import Scaled
from nanovllm_kernels.products.gated_linear import compile_gated

from nanovllm.layers.embedding import VocabEmbedding
from nanovllm.layers.experts.products import ExpertMLPs
from nanovllm.layers.linear import AddLinear, NormLinear
from nanovllm.log import Progress
from nanovllm.models.decoder import Decoder
from nanovllm.runner.resolved import Resolved

log = logging.getLogger("engine")
MANY_PAIRS = 1 << 16  # large enough that every expert gets the kernel for many rows
LEAST_CORES = 8  # with fewer cores, the processes would slow each other down
HOPPER = ("env", "CUTE_DSL_ARCH=sm_90a", "QUACK_ARCH=90", "CUDA_VISIBLE_DEVICES=")


def jobs_of(found: Resolved, model: Decoder) -> list[Job]:
    """Return the CuTe DSL kernels that an engine needs before it is ready."""
    kernels, dtype, page_tokens = found.recipe.kernels, found.recipe.dtype, found.page_tokens
    paged, num_ranks = found.layout.paged[0], found.mesh.tp_size
    group = found.model_config.num_attention_heads // num_ranks // paged.num_heads
    jobs: list[Job] = []
    if paged.kind == "latent":
        attn: Any = model.layers[0].attn
        jobs += attn.jobs(found.recipe)
    elif kernels.attention == "flash":
        from nanovllm_kernels.attention.flash_prefill import compile_causal

        jobs.append(compile_causal.job(group, page_tokens, paged.k_size, dtype))
    if kernels.decode == "cute" and paged.kind == "grouped":
        from nanovllm_kernels.attention.paged_decode_cute import MAX_PAIRS, compile_decode

        asked = found.recipe.speculate
        drafted = 0 if asked is None else 1 + asked.tokens
        drafted = drafted if group * drafted <= MAX_PAIRS else 0
        jobs += [
            compile_decode.job(group, paged.k_size, page_tokens, most, paged.bytes_per_element == 1)
            for most in {0, drafted}
        ]
    if kernels.gated_linear == "cute":
        jobs.append(compile_gated.job(dtype, True))
    if "cute" in (kernels.skinny_linear, kernels.fp8_linear) or kernels.invariant:
        jobs += products_of(model, ordered=kernels.invariant)
    return jobs + experts_of(model)


def experts_of(model: Decoder) -> list[Job]:
    """Return the kernels of routed experts for many rows."""
    found: set[Job] = set()
    for module in model.modules():
        if isinstance(module, ExpertMLPs):
            for products in module.kernels.many:
                if products.fits(MANY_PAIRS, module.gate_up):
                    found |= {*products.jobs(module.gate_up, module.num_chosen)}
    return sorted(found)


def products_of(model: Decoder, *, ordered: bool = False) -> list[Job]:
    """Return the kernels of the model's products for few rows, and fp8 ones for many.

    `ordered`: without fused operations, as for kernels.invariant.
    """
    from nanovllm_kernels.products import dense_fp8, skinny_linear
    from nanovllm_kernels.products.skinny_linear import Kind

    found = set()
    for module in model.modules():
        match module:
            case NormLinear():
                kind = Kind(normed=True, gated=module.gated)
            case AddLinear():
                kind = Kind(added=module.mesh.tp_size == 1)
            case VocabEmbedding():
                kind = Kind()
            case _:
                continue
        kernels = dense_fp8 if isinstance(module.operand, Scaled) else skinny_linear
        found |= kernels.compiled_for(module.operand, kind, ordered=ordered)
    return [compiles.job(*of) for of, compiles in sorted(found, key=itemgetter(0))]


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
