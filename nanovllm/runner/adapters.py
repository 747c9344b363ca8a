"""Adapters on the device: their ranks, and the adapter of each slot of the batch.

Decision: the ranks of all adapters are rows of one tensor. A row has that rank of every product.
Memory follows the ranks of the loaded adapters, and a load is one copy for each page.

Decision: the host keeps all loaded adapters, in pinned memory on a GPU. Copies to the device run in
the order of the stream, before the first step that needs them. No step in flight is affected.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from nanovllm_kernels.adapters.reference import NO_ADAPTER, NO_OWNER, RANK_PAGE
from torch import Tensor

from nanovllm.adapters.section import Adapters, modules_of, num_pages_of, num_rank_pages
from nanovllm.attention.base import AdaptedRows, Batch
from nanovllm.config import ConfigError
from nanovllm.model_identity import digest_of
from nanovllm.models.adapter_files import AdapterFiles, check_files, files_of, rank_rows
from nanovllm.models.adapter_layout import AdapterLayout
from nanovllm.models.decoder import Decoder
from nanovllm.plan import AdapterContent, AdapterDone, Int32, StepPlan
from nanovllm.runner.batch import upload_together
from nanovllm.runner.host_memory import AdapterMemory, check_load

log = logging.getLogger("engine")
DUMMY_SCALE = 0.02  # standard deviation of the numbers of random adapters


def layout_of(options: Adapters, model: Decoder) -> tuple[AdapterLayout, list[AdapterFiles]]:
    """Return the layout of the ranks of a model's adapters, and the files of those of the start.

    Raise ConfigError if an adapter does not fit the model, which may have no data.
    """
    whole = AdapterLayout(model)
    if options.is_dummy:  # they change all products but experts
        adapters = [AdapterFiles(name, modules_of(options, name), {}) for name in options.names]
        return AdapterLayout(model, whole.dense), adapters
    adapters = [checked(options, name, whole) for name in options.names]
    modules = {module for files in adapters for module in files.pairs}
    # Adapters that come later may change all products but experts, which are large.
    later = whole.dense if options.runtime else set[str]()
    return AdapterLayout(model, modules | later), adapters


def checked(options: Adapters, name: str, layout: AdapterLayout) -> AdapterFiles:
    """Return an adapter's config and header. Raise ConfigError if they do not fit the layout."""
    files = files_of(Path(options.folder), name, modules_of(options, name))
    check_files(files, layout)
    return files


def adapter_memory(options: Adapters, model: Decoder, dtype: torch.dtype) -> AdapterMemory:
    """Return the memory of a rank's adapters. The model may have no data.

    All dummy adapters are one copy on the host.
    """
    layout, adapters = layout_of(options, model)
    ranks = [files.peft.config.most_rank for files in adapters]
    on_host = ranks[:1] if options.is_dummy else ranks
    return memory_of_ranks(layout, dtype, num_rank_pages(options, ranks), on_host)


def memory_of_ranks(
    layout: AdapterLayout, dtype: torch.dtype, device_pages: int, host_ranks: Sequence[int]
) -> AdapterMemory:
    """Return the memory of pages on the device, and of adapters of these ranks on the host."""
    rank_bytes = layout.width * dtype.itemsize
    return AdapterMemory(
        device_bytes=device_pages * RANK_PAGE * rank_bytes,
        host_ranks=RANK_PAGE * sum(map(num_pages_of, host_ranks)),
        rank_bytes=rank_bytes,
    )


def random_rows(rank: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return ranks of an adapter without files, for measurements. All calls return the same."""
    rows_RX = torch.empty(rank, width, dtype=dtype)
    return rows_RX.normal_(0, DUMMY_SCALE, generator=torch.Generator().manual_seed(0))


class AdapterBank:
    """Adapters of a model, on the host by the number of their load and on the device by slot.

    Those of the start have the numbers 1, 2, ... in the order of their names, as in sched.adapters.
    """

    def __init__(self, options: Adapters, model: Decoder, num_slots: int) -> None:
        """Read all adapters. Raise ConfigError if one does not fit the model.

        `num_slots` are those of the batch; one more is for padding.
        """
        self.options = options
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, model.embed.dtype
        self.layout, files_at_start = layout_of(options, model)
        self.host: dict[int, Tensor] = {}  # by number: rows of whole pages
        self.first: dict[str, AdapterContent] = {}  # of the start, by name
        if options.is_dummy:  # one copy on the host, so that 64 of them are ready at once
            rows_RX = self._whole_pages(
                random_rows(options.max_rank, self.layout.width, self.dtype)
            )
            self.host = dict.fromkeys(range(1, len(files_at_start) + 1), rows_RX)
            digests = [digest_of("dummy adapter", files.name) for files in files_at_start]
            for files, digest in zip(files_at_start, digests, strict=True):
                self.first[files.name] = AdapterContent(options.max_rank, digest)
        else:
            for number, files in enumerate(files_at_start, 1):
                self.host[number], self.first[files.name] = self._rows(files)
        if self.layout.fused and model.embed.mesh.lanes > 1:
            raise ConfigError("adapters of experts need a parallel.ep that is 1 or parallel.tp")
        is_special = self.layout.fused or any(".kv_b_proj" in name for name in self.layout.parts)
        if is_special and model.embed.ops.invariant:
            raise ConfigError(
                "adapters of experts or of kv_b_proj: kernels.invariant must be false"
            )
        num_pages = num_rank_pages(options, [content.rank for content in self.first.values()])
        self.ranks_RX = torch.zeros(
            num_pages * RANK_PAGE, self.layout.width, dtype=self.dtype, device=self.device
        )
        self.owner_P = torch.full((num_pages,), NO_OWNER, dtype=torch.int32, device=self.device)
        self.adapter_N = torch.full((num_slots + 1,), NO_ADAPTER, dtype=torch.int32)
        self.adapter_N = self.adapter_N.to(self.device)
        self._host_N = np.full(num_slots + 1, NO_ADAPTER, np.int32)
        self.layout.bind(self.ranks_RX)
        self._mesh = model.embed.mesh
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._reading: dict[int, Future[tuple[Tensor, AdapterContent] | None]] = {}

    @property
    def has_experts(self) -> bool:
        """True if adapters change experts. Steps with adapters then cannot be captured."""
        return bool(self.layout.fused)

    def _rows(self, files: AdapterFiles) -> tuple[Tensor, AdapterContent]:
        rows_RX, content = rank_rows(files, self.layout, self.dtype)
        return self._whole_pages(rows_RX), content

    def _whole_pages(self, rows_RX: Tensor) -> Tensor:
        """Return the rows with zeros up to a whole number of pages, in pinned memory on a GPU."""
        num_missing = -len(rows_RX) % RANK_PAGE
        rows_RX = torch.nn.functional.pad(rows_RX, (0, 0, 0, num_missing))
        return rows_RX.pin_memory() if self.device.type == "cuda" else rows_RX

    def read(self, number: int, folder: str, done: AdapterDone) -> None:
        """Read an adapter in a thread. See engine.executor.AdapterStore."""

        def work() -> tuple[Tensor, AdapterContent] | None:
            try:
                files = checked(self.options, folder, self.layout)
                ranks = [files.peft.config.most_rank]
                memory = memory_of_ranks(self.layout, self.dtype, 0, ranks)
                check_load(memory, self._mesh.size)
                adapter = self._rows(files)
            except ConfigError as fault:
                done(str(fault))
            except Exception:
                log.exception("reading the adapter %s failed", folder)
                done("the adapter cannot be read; see the server's log")
            else:
                done(adapter[1])
                return adapter
            return None

        self._reading[number] = self._thread.submit(work)

    def commit(self, number: int) -> bool:
        """Return True if all ranks have read the same adapter. Block until then."""
        adapter = self._reading.pop(number).result()
        own = 0 if adapter is None else 1 + int.from_bytes(adapter[1].digest[:7], "little")
        least, most = self._mesh.least(own), -self._mesh.least(-own)
        if adapter is None or least != most:  # files may change while ranks read them
            return False
        self.host[number] = adapter[0]
        return True

    def drop(self, numbers: Sequence[int]) -> None:
        """Free the host memory of adapters that no later plan loads."""
        for number in numbers:
            self.host.pop(number, None)

    def apply(self, plan: StepPlan) -> None:
        """Copy the plan's adapters to the device, and note those of admitted requests."""
        for load in plan.adapters:
            # The slot's former adapter may have had other pages, which are free now.
            self.owner_P.masked_fill_(self.owner_P == load.slot, NO_OWNER)
            pages = self.host[load.number].split(RANK_PAGE)
            for page, rows_RX in zip(load.pages, pages, strict=True):
                start = page * RANK_PAGE
                self.ranks_RX[start : start + RANK_PAGE].copy_(rows_RX, non_blocking=True)
        loaded = [(page, load.slot) for load in plan.adapters for page in load.pages]
        admits = [(admit.slot, admit.adapter) for admit in plan.admits]
        changed = [(s, a) for s, a in admits if self._host_N[s] != a]
        if not loaded and not changed:
            return
        columns = [np.array(pairs, np.int32).reshape(-1, 2).T for pairs in (loaded, changed)]
        (pages, owners), (slots, adapters) = columns
        self._host_N[slots] = adapters
        uploaded = upload_together([pages, owners, slots, adapters], self.device)
        pages_X, owners_X, slots_X, adapters_X = uploaded
        self.owner_P.index_copy_(0, pages_X.long(), owners_X)
        self.adapter_N.index_copy_(0, slots_X.long(), adapters_X)

    def is_used(self, plan: StepPlan, decode_slots: Int32) -> bool:
        """Return True if a row of the plan has an adapter. `decode_slots` are its decode rows."""
        if plan.num_decodes and (self._host_N[decode_slots] != NO_ADAPTER).any():
            return True
        return any(self._host_N[chunk.slot] != NO_ADAPTER for chunk in plan.chunks)

    def rows(self, batch: Batch) -> AdaptedRows:
        """Return the adapters of a step's tokens. A CUDA graph can capture it."""
        return AdaptedRows(self.adapter_N[batch.slots_T], self.owner_P)
