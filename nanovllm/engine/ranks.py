"""Executor over several ranks: rank 0 plans and sends the plan, the others follow.

All ranks run the same Runner, each on its share of the model. Per step, rank 0 sends the plan in
msgpack, and for a masked step the masks: never a tensor, never a pickle. Every rank selects the
same tokens, from the best candidates of all ranks, and writes them to its own slots. Lanes
(sched/lanes.py) share experts only. Each lane gets its own plan, and returns its result through its
own ring.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue

import msgspec
import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import astuple

from nanovllm.config import Config, ConfigError, Kernels, Recipe
from nanovllm.engine.executor import Executor, StepHandle
from nanovllm.engine.transfer_ends import EndReporter, TransferEnds
from nanovllm.experts import ExpertLoad
from nanovllm.kv.layout import CacheLayout
from nanovllm.parallel.gloo import GlooMesh
from nanovllm.parallel.mesh import Mesh
from nanovllm.parallel.nccl import NcclMesh, OrderedMesh
from nanovllm.parallel.places import Place, check_gpus
from nanovllm.plan import (
    AdapterContent,
    AdapterDone,
    Int32,
    LanesPlan,
    LanesResult,
    Masks,
    Moved,
    Moves,
    StepPlan,
    StepResult,
    mode_key,
)
from nanovllm.runner.build import build as build_runner
from nanovllm.transfer.remote_pages import Announcement
from nanovllm.wire import Generate

log = logging.getLogger("engine")
LOAD_EVERY_S = 0.2  # interval at which a busy lane reports the load of experts


class AdapterMessage(Struct, frozen=True, array_like=True):
    """A call of a method of engine.executor.AdapterStore."""

    method: str
    numbers: list[int]
    folder: str = ""


class PlanMessage(Struct, frozen=True, array_like=True):
    """Message to the other ranks: the plan of the next step, masks of the last one, transfers, a
    change of adapters, or a ticket of another server's pages.

    There is one entry per lane, or a single one for all ranks. Masks are int32; those of a lane
    without masked rows are empty.
    """

    plans: Sequence[StepPlan]
    masks: Sequence[Masks] = ()
    moves: Moves | None = None
    adapters: AdapterMessage | None = None
    ticket: Announcement | None = None


class ResultMessage(Struct, frozen=True, array_like=True):
    """Message of a lane: the result of a step, its counters, and at times the load of experts."""

    result: StepResult
    padded_tokens: int
    experts: ExpertLoad | None


def packed(array: Int32) -> tuple[tuple[int, ...], bytes]:
    return array.shape, array.tobytes()


def unpacked(_: object, shape_and_bytes: tuple[tuple[int, ...], bytes]) -> Int32:
    """Return a read-only array."""
    return np.frombuffer(shape_and_bytes[1], np.int32).reshape(shape_and_bytes[0])


encode = msgspec.msgpack.Encoder(enc_hook=packed).encode
decode_plan = msgspec.msgpack.Decoder(PlanMessage, dec_hook=unpacked).decode
decode_result = msgspec.msgpack.Decoder(ResultMessage, dec_hook=unpacked).decode


class RankedExecutor:
    """Rank 0's executor. Implements engine.executor.Executor and forwards plans to other ranks.

    A plan is sent before rank 0 launches it, because the layers of all ranks wait for each other.
    Methods that send raise RankLostError if a rank has ended.
    """

    def __init__(self, own: Executor, place: Place) -> None:
        self.own = own
        self.place = place
        self.vet: Callable[[Generate], None] = own.vet
        self.steps_by_mode: Counter[str] = own.steps_by_mode if place.lanes == 1 else Counter()
        self.padded_tokens = 0
        self.disk = own.disk
        self.lender, self.remote = own.lender, own.remote
        if own.remote is not None:
            own.remote.announce_by(self._send_ticket)
        self._ends = TransferEnds(place, own.disk) if place.lanes == 1 and place.back else None
        self._loads: list[ExpertLoad | None] = [None] * (place.lanes - 1)

    def expert_load(self, *, wait: bool) -> ExpertLoad | None:
        """Return the sum over lanes. Other lanes report with some results, every 0.2 s."""
        loads = [load for load in (self.own.expert_load(wait=wait), *self._loads) if load]
        return sum_of(loads) if loads else None

    def other_results(self) -> list[StepResult]:
        """Block until the other lanes' results of the next step, and return them."""
        results = [decode_result(message) for message in self.place.recv_all()]
        self.padded_tokens = self.own.padded_tokens + sum(one.padded_tokens for one in results)
        self._loads = [one.experts or old for one, old in zip(results, self._loads, strict=True)]
        return [one.result for one in results]

    def moved(self) -> list[Moved]:
        """Return the transfers that have ended. Those with the disk have ended on all ranks.

        Others have ended on rank 0. Moves.ended orders those of other ranks.
        """
        moved = self.own.moved()
        return moved if self._ends is None else self._ends.taken(moved)

    def call_when_moved(self, wake: Callable[[], object]) -> None:
        self.own.call_when_moved(wake)
        if self._ends is not None:
            self._ends.wake = wake

    def move(self, moves: Moves) -> None:
        if self._ends is not None:
            self._ends.start(moves)
        self.place.send(encode(PlanMessage([], moves=moves)))
        self.own.move(moves)

    @property
    def first_adapters(self) -> Mapping[str, AdapterContent]:
        return self.own.first_adapters

    def read_adapter(self, number: int, folder: str, done: AdapterDone) -> None:
        self._send(AdapterMessage("read", [number], folder))
        self.own.read_adapter(number, folder, done)

    def commit_adapter(self, number: int) -> bool:
        self._send(AdapterMessage("commit", [number]))
        return self.own.commit_adapter(number)

    def drop_adapters(self, numbers: Sequence[int]) -> None:
        self._send(AdapterMessage("drop", list(numbers)))
        self.own.drop_adapters(numbers)

    def _send_ticket(self, ticket: Announcement) -> None:
        self.place.send(encode(PlanMessage([], ticket=ticket)))

    def _send(self, message: AdapterMessage) -> None:
        self.place.send(encode(PlanMessage([], adapters=message)))

    def launch(self, plan: StepPlan | LanesPlan) -> StepHandle:
        lanes = plan.lanes if isinstance(plan, LanesPlan) else (plan, plan)
        self.place.send(encode(PlanMessage(lanes[1:])))
        handle = self.own.launch(lanes[0])
        if self.place.lanes == 1:
            self.padded_tokens = self.own.padded_tokens
            return RankedHandle(handle, self.place) if plan.masked else handle
        graph = handle.mode.partition("/")[0]  # the same in all lanes
        mode = mode_key(graph, plan)
        self.steps_by_mode[mode] += 1
        return LanesHandle(handle, self, lanes, mode)


def sum_of(loads: Sequence[ExpertLoad]) -> ExpertLoad:
    parts = zip(*(astuple(load)[1:] for load in loads), strict=True)
    sums = (np.sum([np.frombuffer(one, np.int64) for one in each], 0).tobytes() for each in parts)
    return ExpertLoad(loads[0].layers, *sums)


class RankedHandle:
    """A masked step of several ranks. Implements engine.executor.StepHandle."""

    def __init__(self, own: StepHandle, place: Place) -> None:
        self.own, self.place = own, place
        self.mode = own.mode
        self.gap_s = self.busy_s = 0.0

    def sample(self, masks: Masks) -> None:
        self.place.send(encode(PlanMessage([], [masks])))
        self.own.sample(masks)

    def wait(self) -> StepResult:
        result = self.own.wait()
        self.gap_s, self.busy_s = self.own.gap_s, self.own.busy_s
        return result


class LanesHandle(RankedHandle):
    """A step of all lanes, whose results come from each rank."""

    def __init__(
        self, own: StepHandle, ranks: RankedExecutor, plans: Sequence[StepPlan], mode: str
    ) -> None:
        super().__init__(own, ranks.place)
        self.ranks, self.plans, self.mode = ranks, plans, mode

    def sample(self, masks: Masks) -> None:
        ends = np.cumsum([num_masks(plan) for plan in self.plans])
        own, *others = np.split(masks, ends[:-1])
        self.place.send(encode(PlanMessage([], others)))
        if len(own) or self.plans[0].draws_late:
            self.own.sample(own)

    def wait(self) -> StepResult:
        first = super().wait()
        return LanesResult(first.step, first.tokens, lanes=(first, *self.ranks.other_results()))


def num_masks(plan: StepPlan) -> int:
    drafts = np.frombuffer(plan.drafts, np.int32)
    return sum(1 + int(drafts[row : row + 1].sum()) for row in plan.masked)


class Follower:
    """Executor of the messages on a rank other than 0. It does not wait for the end of a step.

    On a lane, a second thread waits for results and sends them to rank 0. With a disk or pages of
    other servers, a second thread sends the ends of transfers.
    """

    def __init__(self, own: Executor, place: Place) -> None:
        self.own, self.place = own, place
        self._at = place.rank - 1 if place.lanes > 1 else 0
        self._late: StepHandle | None = None  # of a step that has not drawn yet
        self._sampled: SimpleQueue[StepHandle] = SimpleQueue()
        if place.lanes > 1:
            threading.Thread(target=self._reply, daemon=True).start()
        has_disk = place.lanes == 1 and place.back is not None
        self._reporter = EndReporter(own, place) if has_disk else None

    def take(self, message: bytes) -> None:
        received = decode_plan(message)
        if received.adapters is not None:
            self._change(received.adapters)
            return
        if received.ticket is not None:
            assert self.own.remote is not None
            self.own.remote.follow(received.ticket)
            return
        if received.moves is not None:
            if self._reporter is not None:
                self._reporter.move(received.moves)
            else:
                self.own.move(received.moves)
                self.own.moved()
            return
        if received.plans:
            plan = received.plans[self._at]
            handle = self.own.launch(plan)
            if plan.masked or plan.draws_late:
                self._late = handle
                return
        elif self._late is not None:
            handle, self._late = self._late, None
            handle.sample(received.masks[self._at].copy())  # torch needs a writable array
        else:
            return
        if self.place.lanes > 1:
            self._sampled.put(handle)

    def _change(self, change: AdapterMessage) -> None:
        match change:
            case AdapterMessage("read", [number], folder):
                self.own.read_adapter(number, folder, lambda _: None)
            case AdapterMessage("commit", [number]):
                self.own.commit_adapter(number)
            case AdapterMessage("drop", numbers):
                self.own.drop_adapters(numbers)

    def _reply(self) -> None:
        if torch.cuda.is_initialized():  # the default of a new thread is the first GPU
            torch.cuda.set_device(self.place.device)
        due = 0.0
        try:
            while True:
                result, load = self._sampled.get().wait(), None
                if self._sampled.empty() or time.monotonic() >= due:
                    load, due = self.own.expert_load(wait=True), time.monotonic() + LOAD_EVERY_S
                self.place.reply(encode(ResultMessage(result, self.own.padded_tokens, load)))
        except OSError:  # rank 0 has ended
            return
        except BaseException:
            log.exception("rank %d", self.place.rank)
            os._exit(1)


def mesh_of(config: Config, place: Place) -> Mesh:
    """Return the mesh of a place, and make its GPU current. Raise ConfigError with too few GPUs."""
    parallel = config.recipe.parallel
    is_on_cpu = config.recipe.device == "cpu" or not torch.cuda.is_available()
    if not is_on_cpu:
        check_gpus(parallel, torch.cuda.device_count())
        torch.cuda.set_device(place.device)
    if place.size == 1:
        return Mesh()
    kind = GlooMesh if is_on_cpu else gpu_mesh(config.recipe.kernels, place)
    met = place.rendezvous
    if place.lanes > 1:
        return kind(0, 1, met, ep_size=place.size, lane=place.rank)
    return kind(place.rank, place.size, met, ep_size=parallel.ep)


def gpu_mesh(kernels: Kernels, place: Place) -> Callable[..., Mesh]:
    """Return the mesh of GPUs. Raise ConfigError if it cannot sum as kernels.invariant needs."""
    if not kernels.invariant:
        return partial(NcclMesh, has_peers=kernels.exchange != "torch")
    if place.lanes > 1:
        raise ConfigError("kernels.invariant is true; on GPUs it needs parallel.ep at most tp")
    if kernels.exchange == "torch":
        raise ConfigError("kernels.exchange is torch, but kernels.invariant needs triton")
    return OrderedMesh


def build(config: Config, place: Place) -> tuple[Executor, Recipe, int, CacheLayout]:
    """Build rank 0, and return the values that engine.process.build returns."""
    built = build_runner(config, mesh_of(config, place))
    executor = RankedExecutor(built.runner, place) if place.size > 1 else built.runner
    return executor, built.recipe, built.vocab_size, built.layout


def follow(config: Config, place: Place, ready: Callable[[], None]) -> None:
    """Main function of ranks other than 0: build, then follow rank 0 until it ends.

    Raise ConfigError, which names the rank, if the build fails, and RankLostError if another rank
    has ended. The ranks connect first, so that rank 0 alone reports errors of the recipe.
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
