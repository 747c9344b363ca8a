"""Rows of recurrent states: restoring, saving, clearing, and isolation from padding and NaN."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm.config import ConfigError, Recipe, Schedule, Speculate
from nanovllm.kv.layout import CacheLayout, StateGroup
from nanovllm.kv.split import running_bytes
from nanovllm.plan import Admit, Chunk, StepPlan
from nanovllm.runner.build import run_padding
from nanovllm.runner.caches import States, pin
from nanovllm.wire import Sampling
from tests.models.steps import CPU
from tests.models.tiny import CASES, config_of, make_tiny
from tests.whole_engine import WholeEngine, prompts_of, reference

GROUP = StateGroup((1, 4), 18, 3, 2, 4, 5, bytes_per_element=2)
SLOTS, CHECKPOINTS = 3, 2


def empty_plan(**fields: object) -> StepPlan:
    return StepPlan(**{**dict(step=1, admits=[], grants=[], num_decodes=0, decodes=b"", chunks=[],
                              max_length=0, masked=[]), **fields})  # fmt: skip


def admit(slot: int, num_cached: int = 0, restore_from: int = -1) -> Admit:
    return Admit(slot, b"", 9, num_cached, [], Sampling(), [], restore_from)


@pytest.fixture(params=[False, True], ids=["on the device", "in the host's memory"])
def states(request: pytest.FixtureRequest) -> States:
    made = States(GROUP, SLOTS, CHECKPOINTS, 0, torch.bfloat16, CPU, request.param)
    for row, values in enumerate((*made.rows_NX, *made.saved_NX)):
        values.fill_(row + 1)
    return made


def values(states: States) -> list[float]:
    """Return the maximum of each slot, the padding slot and each checkpoint."""
    return [*states.rows_NX.amax(1).tolist(), *states.saved_NX.amax(1).tolist()]


def test_a_row_holds_all_layers_of_a_request(states: States) -> None:
    used, whole = 2 * (40 + 27), 160  # words; the second is rounded up to a multiple of 128 bytes
    rows, saved = states.rows_NX, states.saved_NX
    assert (rows.shape, saved.shape) == ((SLOTS + 1, whole), (CHECKPOINTS, whole))
    for layer in GROUP.layers:
        own = states.by_layer[layer]
        for (conv_NCW, recurrent_NHKV), row in ((own[:2], 2), (own.saved, 1)):
            assert conv_NCW.shape[1:] == (18, 3) and recurrent_NHKV.shape[1:] == (2, 4, 5)
            assert (conv_NCW.stride(0), recurrent_NHKV.stride(0)) == (2 * whole, whole)
            assert conv_NCW.dtype == torch.bfloat16 and own.inputs_NWX is None
            conv_NCW[row], recurrent_NHKV[row] = 0, 0
    assert values(states) == [1, 2, 3, 4, 5, 6]  # of the padding at the end of rows
    assert rows[2, :used].abs().max() == saved[1, :used].abs().max() == 0


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_slots_take_what_is_planned_for_them(num_drafts: int) -> None:
    """The plan does not count the padding at the end of rows."""
    states = States(GROUP, SLOTS, 0, num_drafts, torch.bfloat16, CPU)
    kept = [layer.inputs_NWX.nbytes for layer in states.by_layer.values() if num_drafts]
    drafts = Speculate(method="ngram", tokens=num_drafts) if num_drafts else None
    recipe = Recipe(model="x", schedule=Schedule(slots=SLOTS), speculate=drafts)
    padding = (SLOTS + 1) * 4 * (160 - 2 * (40 + 27))
    planned = running_bytes(CacheLayout((), GROUP), recipe)
    assert states.rows_NX.nbytes + sum(kept) - padding == planned


def test_new_requests_have_what_was_saved_or_nothing(states: States) -> None:
    states.apply(empty_plan(admits=[admit(2, 5, 1), admit(0)]))
    assert values(states) == [0, 2, 6, 4, 5, 6]
    with pytest.raises(ValueError, match="plan 1 has a prefix without its recurrent state"):
        states.apply(empty_plan(admits=[admit(1, 5)]))


def test_states_are_saved_before_a_plan_and_inside_of_its_chunks(states: States) -> None:
    """A plan that saves the state of a slot may also admit the slot's next request."""
    plan = empty_plan(saves=[(1, 0)], admits=[admit(1), admit(2, 4, 0)])
    states.apply(plan)
    assert values(states) == [1, 0, 2, 4, 2, 6]
    padding: Any = SimpleNamespace(planned=(), num_decode_tokens=5)
    assert states.parts_of(padding) is None
    chunks = [Chunk(0, 3, False), Chunk(2, 7, True, save_to=1, save_at=4)]
    batch: Any = SimpleNamespace(planned=chunks, num_decode_tokens=5)
    parts = states.parts_of(batch)
    assert parts is not None
    parts_X, targets_X = parts
    assert parts_X.tolist() == [5, 5, 8, 12, 15] and targets_X.tolist() == [-1, 0, 1, 2]


def test_states_that_lag_behind_are_not_saved_as_if_they_did_not() -> None:
    drafted = States(GROUP, SLOTS, CHECKPOINTS, 2, torch.bfloat16, CPU)
    with pytest.raises(ValueError, match="plan 1 saves states of rows that may have drafts"):
        drafted.apply(empty_plan(saves=[(1, 0)]))


class Owner:
    """An object that is deleted."""


def test_memory_is_pinned_as_long_as_its_owner_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    cuda = SimpleNamespace(
        cudaHostRegister=lambda *args: asked.append(args) or 0,
        cudaHostUnregister=lambda *args: asked.append(args),
        cudaError=SimpleNamespace(success=0),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "CudaError", lambda code: f"out of memory({code})")
    rows_NX, owner, key = torch.zeros(3, 32), Owner(), "cache.host_gib"
    pin(rows_NX, owner, key)
    assert asked == [(rows_NX.data_ptr(), 3 * 32 * 4, 0)]
    del owner
    assert asked[1:] == [(rows_NX.data_ptr(),)]
    cuda.cudaHostRegister = lambda *args: 2
    with pytest.raises(
        ConfigError, match=r"^cache.host_gib: 0.0 GiB of pinned memory: out of memory\(2\)$"
    ):
        pin(rows_NX, Owner(), key)
    with pytest.raises(ConfigError, match=r"0.0 GiB of pinned memory \(of 2 x 9\): out of memory"):
        pin(rows_NX, Owner(), key, " (of 2 x 9)")
    assert len(asked) == 2


def test_nan_does_not_outlive_a_request(states: States) -> None:
    states.rows_NX[1].fill_(torch.nan)
    states.apply(empty_plan(admits=[admit(1)]))
    assert values(states) == [1, 0, 3, 4, 5, 6]


def test_a_model_without_states_refuses_them(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3")
    runner = WholeEngine(config_of(tmp_path)).runner
    with pytest.raises(ValueError, match="plan 1 has recurrent states, which the model has not"):
        runner.launch(empty_plan(saves=[(0, 0)]))


@pytest.mark.parametrize("speculate", [None, Speculate(method="ngram", tokens=2)])
def test_padding_and_other_slots_leave_a_request_alone(
    speculate: Speculate | None, tmp_path: Path
) -> None:
    """Between steps, all other rows are NaN and padding runs."""
    family, overrides = CASES["qwen3_next that repeats itself"]
    model, prompt = make_tiny(tmp_path, family, **overrides), prompts_of(1)[0]
    engine = WholeEngine(config_of(tmp_path), slots=4, speculate=speculate)
    rows_NX = engine.runner.states.rows_NX
    engine.submit(0, prompt, 20)
    engine.loop.step()
    engine.loop.step()
    (mine,) = rows_NX[:4].abs().amax(1).nonzero()[:, 0].tolist()
    while not engine.loop.idle:
        rows_NX[[row for row in range(5) if row != mine]] = torch.nan
        run_padding(engine.runner, 3, 1)
        run_padding(engine.runner, 2, 5)
        engine.loop.step()
    engine.submit(1, prompt, 20)  # in a slot that had NaN, or in the same slot
    engine.submit(2, prompt, 20)
    engine.run()
    assert list(engine.text.values()) == [reference(model, prompt, 20)] * 3
