"""Idle time of the device between steps, measured with events."""

from __future__ import annotations

import time

import torch

from nanovllm.runner.results import DeviceClock

CYCLES = 40_000_000  # clock cycles of the device, about 20 ms


def test_a_gap_is_the_device_s_own_idle_time() -> None:
    clock = DeviceClock(torch.device("cuda"))
    gaps = []
    for host_s in (0.0, 0.0, 0.1):
        time.sleep(host_s)  # the third time, the device becomes idle
        gaps.append(clock.begin())
        torch.cuda._sleep(CYCLES)
        done = clock.end()
    done.synchronize()
    first, overlapped, waited = map(clock.seconds, gaps)
    assert overlapped < 1e-4
    assert 0.02 < waited < 0.1 and first < 0.1
