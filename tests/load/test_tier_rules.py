"""The simulated device of the rules for stores: times by hand, and the order of the rules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nanovllm.bench import store
from nanovllm.plan import Copies, Moves, StepPlan
from tests.load import tier_rules
from tests.load.fleet.engine import decode_s
from tests.load.tier_rules import PAGE_BYTES, SLOWED_S_PER_BYTE, Device, case, load_of

PLAN = StepPlan(1, [], [], 2, np.array([0, 1], np.int32).tobytes(), [], 1, [])


def stores(count: int) -> Moves:
    return Moves([], [Copies(1, [(page, page) for page in range(count)])], [])


def test_a_step_waits_for_stores_of_evicted_pages() -> None:
    """Four pages take 0.4 s. The copy begins at once, while a step of 4 ms runs."""
    device = Device(10 * PAGE_BYTES, waits=True)
    first = device.launch(PLAN)
    device.move(stores(4))
    second = device.launch(PLAN)
    first.wait()
    assert device.now == pytest.approx(decode_s(2, 0), rel=1e-2) and device.moved() == []
    second.wait()
    assert device.now == pytest.approx(0.4 + decode_s(2, 2))
    assert device.waited_s == pytest.approx(0.4 - decode_s(2, 0), rel=1e-2)
    (moved,) = device.moved()
    assert (moved.ticket, moved.num_bytes) == (1, 4 * PAGE_BYTES)


def test_other_stores_begin_after_the_step_and_slow_the_next_one() -> None:
    rate = 50e9
    device = Device(rate, waits=False)
    device.launch(PLAN).wait()
    device.move(stores(100))
    device.launch(PLAN).wait()
    quiet_s = decode_s(2, 0) + decode_s(2, 2)
    slowed_s = decode_s(2, 2) * rate * SLOWED_S_PER_BYTE
    assert device.now == pytest.approx(quiet_s + slowed_s) and device.waited_s == 0.0
    assert device.next_end == pytest.approx(decode_s(2, 0) + 100 * PAGE_BYTES / rate)


def test_working_sets_are_sessions_at_their_mean_length() -> None:
    assert [load_of(size, 680).concurrency for size in (0.5, 1, 2, 4)] == [4, 9, 19, 38]


def test_pages_stored_ahead_make_an_equally_large_host_memory_useful(tmp_path: Path) -> None:
    """The rules differ where the sessions need more pages than the device has."""
    words = ["--sets", "1.4", "--hosts", "1", "--rates", "50", "--results-dir", str(tmp_path)]
    tier_rules.main(words, lambda *own: case(*own, gpu_pages=240))
    (record,) = store.records(tmp_path)
    found = {
        rule: {
            name.rpartition(": ")[2]: value
            for name, value in record.metrics.items()
            if name.startswith(f"set 1.4, host 1, 50 GB/s, {rule}: ")
        }
        for rule in ("filled", "evicted", "ahead")
    }
    hits = {rule: one["gpu_hits_percent"] + one["host_hits_percent"] for rule, one in found.items()}
    assert min(hits["evicted"], hits["ahead"]) > hits["filled"] + 5
    assert found["ahead"]["stored_gb"] < found["filled"]["stored_gb"]
    assert found["ahead"]["waited_percent"] == 0.0 < found["evicted"]["waited_percent"]
    assert found["filled"]["slowed_percent"] < 2.0
