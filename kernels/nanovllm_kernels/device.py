"""Capabilities of a GPU that kernels and recipes depend on. A query takes a few microseconds."""

from __future__ import annotations

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
    """Return the number of multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def launches_early(num_rows: int, device: torch.device) -> bool:
    """Return True if a kernel of `num_rows` rows is launched before the previous one ends.

    This is programmatic dependent launch: the kernel then waits for the previous one. Many kernels
    release the next one before they wait themselves, so that matrix products can prefetch their
    weights. So data read before the wait must be older than the model's first kernel. Otherwise a
    launch in between must release its successor only after its own wait.
    """
    return num_rows <= FOLLOWING and can_overlap(device)
