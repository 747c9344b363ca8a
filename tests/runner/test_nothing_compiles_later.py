"""All kernels that steps need are compiled before the first request.

The engines have one kind of model each, for a Hopper GPU. Their kernels are recorded instead of
launched. Data exchange of attention data parallelism is not covered.
"""

from __future__ import annotations

import pytest

from tests.kernels.compiled import forks

DRAFTS = "speculate.method=ngram speculate.tokens=3"
SMALL = (  # more slots than graphs with drafts
    "schedule.slots=136 schedule.step_tokens=6144 schedule.mixed_step_tokens=4096 "
    "server.max_model_tokens=8192 kernels.mixed_graph_tokens=2048"
)
MODES = "FULL/decode", "FULL/structured", "PIECEWISE/mixed", "NONE/prefill", "NONE/mixed"
KINDS = {
    "heads": (
        f"qwen3-0.6b model.num_layers=2 {SMALL}",
        f"qwen3-8b model.num_layers=1 {SMALL} {DRAFTS}",
        f"qwen3-30b-a3b model.num_layers=2 {SMALL}",
        f"minimax-m2 model.num_layers=1 {SMALL} {DRAFTS}",
    ),
    "latents and states": (
        f"deepseek-r1 model.num_layers=4 {SMALL}",
        f"qwen3-next-80b-a3b model.num_layers=4 {SMALL} {DRAFTS}",
    ),
    "other types, and the first of four ranks": (
        f"qwen3-8b model.num_layers=1 {SMALL} cache.dtype=fp8 quantize=fp8 {DRAFTS}",
        f"qwen3-30b-a3b model.num_layers=2 {SMALL} parallel.tp=4",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_is_compiled_before_the_first_request(kind: str) -> None:
    done = forks().run("tests.runner.specialised:main", *KINDS[kind])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == ""
    told = [line for line in done.stderr.splitlines() if ": steps {" in line]
    assert len(told) == len(KINDS[kind])
    for line in told:  # every kind of step has run
        assert not [mode for mode in MODES if mode not in line], line
