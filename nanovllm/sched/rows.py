"""Requests as rows of steps: the same as arrays, a plan being built, a step in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from nanovllm.plan import Admit, Chunk, Grant, Int32
from nanovllm.sched.request import Request


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some requests, and the same as arrays."""

    requests: list[Request]
    slots: npt.NDArray[np.int64]  # numpy finds elements by these four times as fast as by int32
    ids: npt.NDArray[np.int64]
    masked: list[int]  # indices of those that follow a grammar


def rows_of(requests: list[Request]) -> Rows:
    count = len(requests)
    slots = np.fromiter((r.slot for r in requests), np.int64, count)
    ids = np.fromiter((r.spec.request_id for r in requests), np.int64, count)
    masked = [i for i, r in enumerate(requests) if r.spec.grammar]
    return Rows(requests, slots, ids, masked)


@dataclass(slots=True)
class OpenPlan:
    """A StepPlan under construction."""

    budget: int  # prompt tokens it may still take
    admits: list[Admit] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    chunked: list[Request] = field(default_factory=list)  # the requests of `chunks`
    num_tokens: int = 0  # fed, drafts included
    max_length: int = 0  # no row's context is longer


@dataclass(frozen=True, slots=True)
class Flight:
    """What an issued step will sample, in the order of its result's lines."""

    rows: Rows  # the decode rows, then the requests whose prompt ends in this step
    drafts: Int32 | None  # that each of them feeds; None: no row any
