"""Capabilities of a GPU that kernels and recipes depend on. A query takes a few microseconds."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

HOPPER = 9
FOLLOWING = 512  # rows of a step; with more, a launch is short compared to the work


def generation(device: torch.device) -> int:
    """Return the major compute capability, or 0 if the device is not a GPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def is_hopper(device: torch.device) -> bool:
    """Return True if kernels compiled for Hopper alone run. False if CUDA is not available."""
    return torch.cuda.is_available() and generation(device) == HOPPER


def can_overlap(device: torch.device) -> bool:
    """Return True if a kernel may start before the previous one ends (since Hopper)."""
    return generation(device) >= HOPPER


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors that a persistent kernel may fill."""
    reserved = torch._C._get_sm_carveout_experimental() or 0
    return torch.cuda.get_device_properties(device).multi_processor_count - reserved


@contextmanager
def reserving(count: int) -> Iterator[None]:
    """Leave `count` multiprocessors to kernels of another stream in this block.

    A persistent kernel launches one block per multiprocessor, and each block has a fixed share of
    the work. If some multiprocessors are taken, their blocks start after the others have ended, and
    the kernel takes twice as long. torch passes the number to cublasLt only (2.11), so cuBLAS gets
    it here. It counts for kernels that are launched in the block by this thread.
    """
    whole = processors(torch.device("cuda", torch.cuda.current_device()))
    major = (torch.version.cuda or "").partition(".")[0]
    library = ctypes.CDLL(f"libcublas.so.{major}")  # loaded by torch
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that it is experimental
        torch._C._set_sm_carveout_experimental(count)
    library.cublasSetSmCountTarget(handle, whole - count)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(None)
        library.cublasSetSmCountTarget(handle, 0)


def launches_early(num_rows: int, device: torch.device) -> bool:
    """Return True if a kernel of `num_rows` rows is launched before the previous one ends.

    This is programmatic dependent launch: the kernel then waits for the previous one. Many kernels
    release the next one before they wait themselves, so that matrix products can prefetch their
    weights. So data read before the wait must be older than the model's first kernel. Otherwise a
    launch in between must release its successor only after its own wait.
    """
    return num_rows <= FOLLOWING and can_overlap(device)
