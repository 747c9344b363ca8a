"""Several ranks as one executor: rank 0 plans and tells, the others follow.

All ranks run the same Runner, each on its share of the model. What crosses between them in a step
is the plan, encoded by msgspec, and for a masked step the masks: never a tensor, never a pickle.
Every rank chooses the same tokens, from the winners of all ranks, and writes them back itself.
Lanes (sched/lanes.py) share experts alone: each is told its own plan, and says what it sampled
through a ring of its own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import msgspec
import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import astuple

from nanovllm.config import Config, ConfigError, Recipe
from nanovllm.engine.executor import Executor, StepHandle
from nanovllm.experts import ExpertLoad
from nanovllm.kv.layout import CacheLayout
from nanovllm.parallel.gloo import GlooMesh
from nanovllm.parallel.mesh import Mesh
from nanovllm.parallel.nccl import NcclMesh
from nanovllm.parallel.places import Place, num_ranks
from nanovllm.plan import Int32, Masks, StepPlan, StepResult, mode_key
from nanovllm.runner.build import build as build_runner
from nanovllm.sched.lanes import LanesPlan, LanesResult
from nanovllm.wire import Generate

log = logging.getLogger("engine")
LOAD_EVERY_S = 0.2  # by a busy lane


class Told(Struct, frozen=True, array_like=True):
    """What each rank is to launch, or without any plan the masks of the last. One entry is for all.

    Masks are int32; a lane without masked rows gets none.
    """

    plans: Sequence[StepPlan]
    masks: Sequence[Masks] = ()


class Said(Struct, frozen=True, array_like=True):
    """What a lane says of a step, and has counted since its start; the load of experts now and
    then."""

    result: StepResult
    padded_tokens: int
    experts: ExpertLoad | None


def packed(array: Int32) -> tuple[tuple[int, ...], bytes]:
    return array.shape, array.tobytes()


def unpacked(_: object, found: tuple[tuple[int, ...], bytes]) -> Int32:
    """An array that cannot be written."""
    return np.frombuffer(found[1], np.int32).reshape(found[0])


encode = msgspec.msgpack.Encoder(enc_hook=packed).encode
told_of = msgspec.msgpack.Decoder(Told, dec_hook=unpacked).decode
said_of = msgspec.msgpack.Decoder(Said, dec_hook=unpacked).decode


class RankedExecutor:
    """Implements engine.executor.Executor: rank 0's own, which the other ranks hear of.

    They hear of a step before rank 0 launches it, because its layers wait for each other. Every
    method that tells them raises RankLostError if one of them has gone.
    """

    def __init__(self, own: Executor, place: Place) -> None:
        self.own = own
        self.place = place
        self.vet: Callable[[Generate], None] = own.vet
        self.steps_by_mode: Counter[str] = own.steps_by_mode if place.lanes == 1 else Counter()
        self.padded_tokens = 0
        self._loads: list[ExpertLoad | None] = [None] * (place.lanes - 1)

    def expert_load(self, *, wait: bool) -> ExpertLoad | None:
        """All lanes count; others say it behind the last of some steps, and now and then."""
        loads = [load for load in (self.own.expert_load(wait=wait), *self._loads) if load]
        return sum_of(loads) if loads else None

    def heard(self) -> list[StepResult]:
        """What other lanes sampled in the next step, once it has ended there."""
        said = [said_of(message) for message in self.place.recv_all()]
        self.padded_tokens = self.own.padded_tokens + sum(one.padded_tokens for one in said)
        self._loads = [one.experts or old for one, old in zip(said, self._loads, strict=True)]
        return [one.result for one in said]

    def launch(self, plan: StepPlan) -> StepHandle:
        lanes = plan.lanes if isinstance(plan, LanesPlan) else (plan, plan)
        self.place.send(encode(Told(lanes[1:])))
        known = self.own.steps_by_mode.copy()
        handle = self.own.launch(lanes[0])
        if self.place.lanes == 1:
            self.padded_tokens = self.own.padded_tokens
            return RankedHandle(handle, self.place) if plan.masked else handle
        (mode,) = self.own.steps_by_mode - known  # all lanes', but each for rows of its own
        self.steps_by_mode[mode_key(mode.partition("/")[0], plan)] += 1
        return LanesHandle(handle, self, lanes)


def sum_of(loads: Sequence[ExpertLoad]) -> ExpertLoad:
    parts = zip(*(astuple(load)[1:] for load in loads), strict=True)
    sums = (np.sum([np.frombuffer(one, np.int64) for one in each], 0).tobytes() for each in parts)
    return ExpertLoad(loads[0].layers, *sums)


class RankedHandle:
    """Implements engine.executor.StepHandle, of a masked step."""

    def __init__(self, own: StepHandle, place: Place) -> None:
        self.own, self.place = own, place
        self.gap_s = self.busy_s = 0.0

    def sample(self, masks: Masks) -> None:
        self.place.send(encode(Told([], [masks])))
        self.own.sample(masks)

    def wait(self) -> StepResult:
        result = self.own.wait()
        self.gap_s, self.busy_s = self.own.gap_s, self.own.busy_s
        return result


class LanesHandle(RankedHandle):
    """The step of all lanes, of which each rank says what it sampled."""

    def __init__(self, own: StepHandle, ranks: RankedExecutor, plans: Sequence[StepPlan]) -> None:
        super().__init__(own, ranks.place)
        self.ranks, self.plans = ranks, plans

    def sample(self, masks: Masks) -> None:
        ends = np.cumsum([num_masks(plan) for plan in self.plans])
        own, *others = np.split(masks, ends[:-1])
        self.place.send(encode(Told([], others)))
        if len(own):
            self.own.sample(own)

    def wait(self) -> StepResult:
        first = super().wait()
        return LanesResult(first.step, first.tokens, lanes=(first, *self.ranks.heard()))


def num_masks(plan: StepPlan) -> int:
    drafts = np.frombuffer(plan.drafts, np.int32)
    return sum(1 + int(drafts[row : row + 1].sum()) for row in plan.masked)


class Follower:
    """What a rank other than 0 does with what it is told. It never waits for a step's end, but if
    it is a lane a thread of it does, and replies.
    """

    def __init__(self, own: Executor, place: Place) -> None:
        self.own, self.place = own, place
        self._at = place.rank - 1 if place.lanes > 1 else 0
        self._masked: StepHandle
        self._sampled: SimpleQueue[StepHandle] = SimpleQueue()
        if place.lanes > 1:
            threading.Thread(target=self._reply, daemon=True).start()

    def take(self, message: bytes) -> None:
        told = told_of(message)
        if told.plans:
            plan = told.plans[self._at]
            handle = self.own.launch(plan)
            if plan.masked:
                self._masked = handle
                return
        elif len(masks := told.masks[self._at]):
            handle = self._masked
            handle.sample(masks.copy())  # torch takes no array that cannot be written
        else:
            return
        if self.place.lanes > 1:
            self._sampled.put(handle)

    def _reply(self) -> None:
        if torch.cuda.is_initialized():  # each thread begins with the first GPU
            torch.cuda.set_device(self.place.device)
        due = 0.0
        try:
            while True:
                result, load = self._sampled.get().wait(), None
                if self._sampled.empty() or time.monotonic() >= due:
                    load, due = self.own.expert_load(wait=True), time.monotonic() + LOAD_EVERY_S
                self.place.reply(encode(Said(result, self.own.padded_tokens, load)))
        except OSError:  # rank 0 has gone
            return
        except BaseException:
            log.exception("rank %d", self.place.rank)
            os._exit(1)


def mesh_of(config: Config, place: Place) -> Mesh:
    """Makes the place's GPU the current one. Raises ConfigError if there are not as many."""
    asked = config.recipe.parallel
    is_on_cpu = config.recipe.device == "cpu" or not torch.cuda.is_available()
    if not is_on_cpu:
        visible, size = torch.cuda.device_count(), num_ranks(asked)
        if (num := size * asked.dp) > visible:
            raise ConfigError(
                f"parallel asks for {size} ranks and {asked.dp} engines, {num} GPUs in all; of so "
                f"many {visible} are visible"
            )
        torch.cuda.set_device(place.device)
    if place.size == 1:
        return Mesh()
    kind, met = GlooMesh if is_on_cpu else NcclMesh, place.rendezvous
    if place.back is not None:
        return kind(0, 1, met, ep_size=place.size, lane=place.rank)
    return kind(place.rank, place.size, met, ep_size=asked.ep)


def build(config: Config, place: Place) -> tuple[Executor, Recipe, int, CacheLayout]:
    """Rank 0's part of a build, or all of one with a single rank, and what engine.process.build
    returns."""
    built = build_runner(config, mesh_of(config, place))
    executor = RankedExecutor(built.runner, place) if place.size > 1 else built.runner
    return executor, built.recipe, built.vocab_size, built.layout


def follow(config: Config, place: Place, ready: Callable[[], None]) -> None:
    """Another rank's main: builds, and does what rank 0 does until that has gone.

    Raises ConfigError that names the rank if it cannot be built, RankLostError if another has gone.
    It meets the others first: what is wrong with the recipe itself, rank 0 says before.
    """
    mesh = mesh_of(config, place)
    mesh.connect()
    try:
        follower = Follower(build_runner(config, mesh).runner, place)
    except ConfigError as error:
        raise ConfigError(f"rank {place.rank}: {error}") from None
    ready()
    while (message := place.recv()) is not None:
        follower.take(message)
