"""Several ranks as one executor: rank 0 plans and tells, the others follow.

All ranks run the same Runner, each on its share of the model. What crosses between them in a step
is the plan, encoded by msgspec, and for a masked step the masks: never a tensor, never a pickle.
Every rank chooses the same tokens, from the winners of all ranks, and writes them back itself.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from typing import NoReturn

import msgspec
import numpy as np
import torch
from msgspec import Struct

from nanovllm.config import Config, ConfigError, Recipe
from nanovllm.engine.executor import Executor, StepHandle
from nanovllm.kv.layout import CacheLayout
from nanovllm.parallel.gloo import GlooMesh
from nanovllm.parallel.mesh import Mesh
from nanovllm.parallel.nccl import NcclMesh
from nanovllm.parallel.places import Place
from nanovllm.plan import Masks, StepPlan, StepResult
from nanovllm.runner.build import build as build_runner
from nanovllm.wire import Generate


class Told(Struct, frozen=True, array_like=True):
    """A plan to launch, or without one the masks of the last."""

    plan: StepPlan | None
    masks: bytes = b""  # int32
    words: int = 0  # in a line of the masks


class RankedExecutor:
    """Implements engine.executor.Executor: rank 0's own, which the other ranks hear of.

    They hear of a step before rank 0 launches it, because its layers wait for each other. Every
    method that tells them raises RankLostError if one of them has gone.
    """

    def __init__(self, own: Executor, place: Place) -> None:
        self.own = own
        self.place = place
        self.expert_load = own.expert_load
        self.vet: Callable[[Generate], None] = own.vet
        self.steps_by_mode: Counter[str] = own.steps_by_mode
        self.padded_tokens = own.padded_tokens
        self._encode = msgspec.msgpack.Encoder().encode

    def launch(self, plan: StepPlan) -> StepHandle:
        self.place.send(self._encode(Told(plan)))
        handle = self.own.launch(plan)
        self.padded_tokens = self.own.padded_tokens
        return MaskedHandle(handle, self._tell_masks) if plan.masked else handle

    def _tell_masks(self, masks: Masks) -> None:
        self.place.send(self._encode(Told(None, masks.tobytes(), masks.shape[1])))


class MaskedHandle:
    """Implements engine.executor.StepHandle of a masked step."""

    def __init__(self, own: StepHandle, tell: Callable[[Masks], None]) -> None:
        self.own, self.tell = own, tell
        self.gap_s = self.busy_s = 0.0

    def sample(self, masks: Masks) -> None:
        self.tell(masks)
        self.own.sample(masks)

    def wait(self) -> StepResult:
        result = self.own.wait()
        self.gap_s, self.busy_s = self.own.gap_s, self.own.busy_s
        return result


class Follower:
    """What a rank other than 0 does with what it is told. It never waits for a step's end."""

    def __init__(self, own: Executor) -> None:
        self.own = own
        self._decode = msgspec.msgpack.Decoder(Told).decode
        self._masked: StepHandle

    def take(self, message: bytes) -> None:
        told = self._decode(message)
        if told.plan is not None:
            self._masked = self.own.launch(told.plan)
        else:
            masks = np.frombuffer(told.masks, np.int32).reshape(-1, told.words)
            self._masked.sample(masks.copy())  # torch takes no array that cannot be written


def mesh_of(config: Config, place: Place) -> Mesh:
    """Makes the place's GPU the current one. Raises ConfigError if there are not as many."""
    is_on_cpu = config.recipe.device == "cpu" or not torch.cuda.is_available()
    if not is_on_cpu:
        asked, visible = config.recipe.parallel, torch.cuda.device_count()
        if asked.tp * asked.dp > visible:
            raise ConfigError(
                f"parallel.tp is {asked.tp} and parallel.dp {asked.dp}, {asked.tp * asked.dp} GPUs "
                f"in all; of so many {visible} are visible"
            )
        torch.cuda.set_device(place.device)
    if place.size == 1:
        return Mesh()
    kind = GlooMesh if is_on_cpu else NcclMesh
    ep = config.recipe.parallel.ep
    return kind(place.rank, place.size, place.rendezvous, ep_size=ep)


def build(config: Config, place: Place) -> tuple[Executor, Recipe, int, CacheLayout]:
    """Rank 0's part of a build, or all of one with a single rank, and what engine.process.build
    returns."""
    built = build_runner(config, mesh_of(config, place))
    executor = RankedExecutor(built.runner, place) if place.size > 1 else built.runner
    return executor, built.recipe, built.vocab_size, built.layout


def follow(config: Config, place: Place, ready: Callable[[], None]) -> NoReturn:
    """Another rank's main: builds, does what rank 0 does until that has gone, and ends the process.

    Raises ConfigError that names the rank if it cannot be built, RankLostError if another has gone.
    It meets the others first: what is wrong with the recipe itself, rank 0 says before.
    """
    mesh = mesh_of(config, place)
    mesh.connect()
    try:
        follower = Follower(build_runner(config, mesh).runner)
    except (ConfigError, MemoryError) as error:
        raise ConfigError(f"rank {place.rank}: {error or 'out of memory'}") from None
    ready()
    while (message := place.recv()) is not None:
        follower.take(message)
    logging.shutdown()
    os._exit(0)  # what holds connections to the others would wait for them when it is destroyed
