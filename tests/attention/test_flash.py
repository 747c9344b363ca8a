"""Arguments of flash-attn-4's kernel for prompt chunks, and the cost of importing the backend."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from nanovllm_kernels.attention.reference import paged_prefill

from nanovllm.attention.flash import FlashPaged
from tests.attention.paged_batches import error_share, make_batch

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by flash-attn-4
CPU = torch.device("cpu")
CHUNKS = ((130, 7, 64, 200, 33), (130, 2, 63, 5, 32))


def test_the_backend_does_not_import_the_language_of_its_kernel() -> None:
    code = "import sys, nanovllm.attention.flash; print({'cutlass', 'quack'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("given", [False, True], ids=["new", "given"])
def test_every_argument_is_in_its_place(given, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernel has positional arguments only; the reference replaces it."""
    from nanovllm_kernels.attention import flash_prefill

    asked = []

    def compile_causal(*shape: object):
        asked.append(shape)

        def run(q, k, v, o, lse, scale, starts, a, b, lengths, table, *unused) -> None:
            assert lse is a is b is None and unused == flash_prefill.UNUSED
            assert scale == pytest.approx(64**-0.5)
            o.copy_(paged_prefill(q, k, v, table, starts, lengths, 0))

        return run

    monkeypatch.setattr(flash_prefill, "compile_causal", compile_causal)
    q_THA, cache, batch = make_batch(*CHUNKS, (4, 2, 64), 16, torch.bfloat16, CPU)
    _, other, _ = make_batch(*CHUNKS, (4, 2, 64), 16, torch.bfloat16, CPU)
    other.v_PSGA.zero_()
    out_THA = torch.empty_like(q_THA) if given else None
    attend = FlashPaged(cache).bind(batch)
    attend(other, q_THA)
    o_THA = attend(cache, q_THA, out_THA)
    assert out_THA is None or o_THA is out_THA
    assert error_share(o_THA, q_THA, cache, batch) <= 1
    assert asked == [(2, 16, 64, "bfloat16")] * 2
