"""What a GPU can do, as kernels and recipes ask. Costs a few microseconds."""

from __future__ import annotations

import torch

HOPPER = 9
FOLLOWING = 512  # rows of a step: above, launches are short beside the work


def generation(device: torch.device) -> int:
    """The major compute capability, or 0 of what is no GPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def is_hopper(device: torch.device) -> bool:
    """Whether kernels of just this generation run. False where there is no GPU after all."""
    return torch.cuda.is_available() and generation(device) == HOPPER


def can_overlap(device: torch.device) -> bool:
    """Whether a kernel may be launched while the one before runs, since Hopper."""
    return generation(device) >= HOPPER


def processors(device: torch.device) -> int:
    """How many multiprocessors a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def follows(num_rows: int, device: torch.device) -> bool:
    """Whether a kernel of so many rows is launched early, and then waits for the one before.

    Many let the next one come before they wait themselves, so that products have their weights
    under way. So what a kernel reads before it waits must be older than the model's first kernel,
    or a launch between them must let others come after its wait alone.
    """
    return num_rows <= FOLLOWING and can_overlap(device)
