"""What a first start lacks of compiled CuTe DSL kernels: compiled beside the loading of weights.

Decision: each in a process of its own. To compile one takes seconds of Python, which hold the
interpreter's lock, and the imports of a compiler, which the engine is spared. Nothing depends on
it: a kernel that is not listed here, or fails here, is compiled where it is first used.
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
from nanovllm_kernels.gated_linear import compile_gated

from nanovllm.layers.embedding import VocabEmbedding
from nanovllm.layers.linear import AddLinear, NormLinear
from nanovllm.layers.moe import ExpertMLPs
from nanovllm.log import Progress
from nanovllm.models.decoder import Decoder
from nanovllm.runner.resolved import Resolved

log = logging.getLogger("engine")
MANY_PAIRS = 1 << 16  # so many are many rows for every expert, and no more than products can take
LEAST_CORES = 8  # with fewer, the processes wait for each other
HOPPER = ("env", "CUTE_DSL_ARCH=sm_90a", "QUACK_ARCH=90", "CUDA_VISIBLE_DEVICES=")


def jobs_of(found: Resolved, model: Decoder) -> list[Job]:
    """The kernels in CuTe DSL that an engine needs before it is ready."""
    kernels, dtype, page_tokens = found.recipe.kernels, found.recipe.dtype, found.page_tokens
    paged, num_ranks = found.layout.paged[0], found.mesh.tp_size
    group = found.model_config.num_attention_heads // num_ranks // paged.num_heads
    jobs: list[Job] = []
    if paged.v_size == 0:
        attn: Any = model.layers[0].attn
        jobs += attn.jobs(found.recipe)
    elif kernels.attention == "flash":
        from nanovllm_kernels.flash_prefill import compile_causal

        jobs.append(compile_causal.job(group, page_tokens, paged.k_size, dtype))
    if kernels.decode == "cute" and paged.v_size:
        from nanovllm_kernels.paged_decode_cute import MAX_PAIRS, compile_decode

        asked = found.recipe.speculate
        drafted = 0 if asked is None else 1 + asked.tokens
        drafted = drafted if group * drafted <= MAX_PAIRS else 0
        jobs += [
            compile_decode.job(group, paged.k_size, page_tokens, most, paged.bytes_per_element == 1)
            for most in {0, drafted}
        ]
    if kernels.gated_linear == "cute":
        jobs.append(compile_gated.job(dtype, True))
    if "cute" in (kernels.skinny_linear, kernels.fp8_linear):
        jobs += products_of(model)
    return jobs + experts_of(model)


def experts_of(model: Decoder) -> list[Job]:
    """The products of routed experts of many rows."""
    found: set[Job] = set()
    for module in model.modules():
        if isinstance(module, ExpertMLPs):
            for products in module.kernels.many:
                if products.fits(MANY_PAIRS, module.gate_up):
                    found |= {*products.jobs(module.gate_up, module.num_chosen)}
    return sorted(found)


def products_of(model: Decoder) -> list[Job]:
    """The model's products of few rows, with what is fused to them; those of fp8 of many rows."""
    from nanovllm_kernels import dense_fp8, skinny_linear
    from nanovllm_kernels.skinny_linear import Kind

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
        found |= kernels.compiled_for(module.operand, kind)
    return [compiles.job(*of) for of, compiles in sorted(found, key=itemgetter(0))]


@contextmanager
def compiled_beside(jobs: list[Job]) -> Iterator[None]:
    """Compiles those that are not on disk, beside what is done in the meantime."""
    lacking = [job for job in jobs if job.path and not job.path.exists()]
    if len(lacking) < 2 or len(os.sched_getaffinity(0)) < LEAST_CORES:
        yield
        return
    progress = Progress(log, "compiling meanwhile", len(lacking), "kernels")
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
        log.warning("%d of %d did not compile; again where they are used", failed, len(lacking))
    progress.finish()


def start(job: Job) -> subprocess.Popen[bytes]:
    assert job.path is not None
    command = [*HOPPER, sys.executable, "-m", "nanovllm_kernels.compile_one"]
    command += [str(job.path.parent.parent), job.function, job.arguments]
    quiet = subprocess.DEVNULL  # what goes wrong will again, where the kernel is used
    return subprocess.Popen(command, stdout=quiet, stderr=quiet)
