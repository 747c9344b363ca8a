"""Multiprocessors that products leave to a kernel of another stream."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
from nanovllm_kernels.device import processors, reserving

GPU = torch.device("cuda", 0)


def test_products_leave_multiprocessors_until_the_block_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuBLAS gets a number for its handle, and 0 afterwards. Persistent kernels read theirs."""
    noted: list[tuple[object, ...]] = []
    library = SimpleNamespace(
        cublasSetSmCountTarget=lambda handle, count: noted.append((handle.value, count))
    )
    names: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: names.append(name) or library)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 77)
    whole = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: whole)
    assert processors(GPU) == 132
    with pytest.raises(KeyError), reserving(8):
        assert processors(GPU) == 124
        raise KeyError
    assert processors(GPU) == 132
    assert (names, noted) == (["libcublas.so.13"], [(77, 124), (77, 0)])
