"""Ways of the latent decode kernel that have only been compiled, each in a process of its own: one
may hang. Checked with all of the kernel's cases, and timed:

    python -m tests.gpu.test_latent_ways 3 1 1   # a Way's numbers; 1 0 0 is the proved one
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

WAYS = {"parts": (3, 0, 0), "shares": (1, 1, 0), "rests": (1, 0, 1), "ahead": (3, 1, 1)}


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_way_gives_what_the_proved_one_does(way: tuple[int, int, int]) -> None:
    command = [sys.executable, "-m", "tests.gpu.test_latent_ways", *map(str, way)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def main(*numbers: str) -> int:
    """How many cases are off."""
    from nanovllm_kernels.case import check
    from nanovllm_kernels.latent_cases import by_position
    from nanovllm_kernels.latent_decode_cute import Way, latent_decode
    from nanovllm_kernels.latent_decode_cute_cases import LATENT_DECODE_CUTE
    from nanovllm_kernels.timing import ceilings, time_case

    device, way = torch.device("cuda"), Way(*map(int, numbers))
    run = by_position(partial(latent_decode, way=way))
    kernel = replace(LATENT_DECODE_CUTE, run=run)
    limits, off = ceilings(device), 0
    for case in sorted(kernel.cases, key=lambda case: case.is_timed):
        share = check(kernel, case, device)
        off += not share <= 1
        timing = time_case(kernel, case, device, limits) if case.is_timed else ""
        sys.stdout.write(f"{share:.3f} {case.name} {timing}\n")
        sys.stdout.flush()
    return off


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
