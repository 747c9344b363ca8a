"""Prompt chunks on their way to flash-attn-4's kernel, and what importing the backend costs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from nanovllm_kernels.attention_reference import in_8_bits, paged_prefill
from nanovllm_kernels.widen_pages import widened

from nanovllm.attention import flash
from nanovllm.attention.flash import FlashPaged
from nanovllm.attention.grouped import PagedKV
from tests.attention.paged_batches import error_share, make_batch

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of flash-attn-4's imports
CPU = torch.device("cpu")
CHUNKS = ((130, 7, 64, 200, 33), (130, 2, 63, 5, 32))


def test_the_backend_does_not_import_the_language_of_its_kernel() -> None:
    code = "import sys, nanovllm.attention.flash; print({'cutlass', 'quack'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("given", [False, True], ids=["new", "given"])
def test_every_argument_is_in_its_place(given, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernel knows places only: here the definition stands in them."""
    from nanovllm_kernels import flash_prefill

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


@pytest.mark.parametrize(
    ("scratch_tokens", "calls"), [(5 * 208 + 16, 1), (2 * 208 + 16, 3), (208, 0)], ids=str
)
def test_pages_of_8_bits_are_widened_some_rows_at_a_time(
    scratch_tokens: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of up to 200 tokens are 13 pages each, and one page stays empty."""
    from nanovllm_kernels import flash_prefill

    tables = []

    def by_definition(q, k, v, table, starts, lengths, out) -> torch.Tensor:
        rows = slice(int(starts[0]), int(starts[-1]))
        tables.append((table, lengths))
        assert not k[0].any() and k.dtype == torch.bfloat16
        out[rows] = paged_prefill(q[rows], k, v, table, starts - starts[0], lengths, 0)
        return out

    def whole(q, k, v, table, starts, lengths, max_new, out, scales_2G) -> torch.Tensor:
        return paged_prefill(q, k, v, table, starts, lengths, max_new, scales_2G)

    monkeypatch.setattr(flash_prefill, "flash_prefill", by_definition)
    monkeypatch.setattr(flash, "widen_pages", widened)
    monkeypatch.setattr(flash, "paged_prefill", whole)
    monkeypatch.setattr(flash, "SCRATCH_BYTES", 4 * scratch_tokens * 2 * 64)
    q_THA, wide, batch = make_batch(*CHUNKS, (4, 2, 64), 16, torch.bfloat16, CPU)
    cache = PagedKV(*in_8_bits(*wide[:2]))
    rows = batch.page_table_RM, batch.starts_R1, batch.lengths_R, batch.max_new
    expected_THA = paged_prefill(q_THA, cache.k_PSGA, cache.v_PSGA, *rows, cache.scales_2G)
    backend = FlashPaged(cache)
    for _ in range(2):  # layers
        o_THA = backend.bind(batch)(cache, q_THA)
        torch.testing.assert_close(o_THA.float(), expected_THA, rtol=2e-2, atol=2e-2)
    assert len(tables) == 2 * calls
    for table_RM, lengths_R in tables:
        used_RM = torch.arange(13) * 16 < lengths_R[:, None]
        assert torch.equal(table_RM > 0, used_RM)
