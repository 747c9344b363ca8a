"""Rows of a step: requests and their slots as arrays, the open plan, the step in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from nanovllm.plan import Admit, Chunk, Grant, Int32
from nanovllm.sched.request import Request


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Requests, with their slots and ids as arrays."""

    requests: list[Request]
    slots: npt.NDArray[np.int64]  # indexing by int64 is four times as fast as by int32
    ids: npt.NDArray[np.int64]
    masked: list[int]  # indices of the requests with a grammar


def rows_of(requests: list[Request]) -> Rows:
    count = len(requests)
    slots = np.fromiter((r.slot for r in requests), np.int64, count)
    ids = np.fromiter((r.spec.request_id for r in requests), np.int64, count)
    masked = [i for i, r in enumerate(requests) if r.spec.grammar]
    return Rows(requests, slots, ids, masked)


@dataclass(slots=True)
class OpenPlan:
    """A StepPlan under construction."""

    budget: int  # prompt tokens that still fit
    admits: list[Admit] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    chunked: list[Request] = field(default_factory=list)  # the requests of `chunks`
    num_tokens: int = 0  # all tokens of the step, with drafts
    max_length: int = 0  # longest context of any row


@dataclass(frozen=True, slots=True)
class Flight:
    """Sampling rows of an issued step, in the order of its result."""

    rows: Rows  # the decode rows, then the requests whose prompt ends in this step
    drafts: Int32 | None  # number of drafts of each row; None if no row has drafts
