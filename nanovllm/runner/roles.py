"""Transfers between engines, by a rank's recipe: the lender of P, or the remote pages of D."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from threading import Event
from typing import TypeAlias

import torch

from nanovllm.config import Config, ConfigError, given_transfer_secret
from nanovllm.model_identity import digest_of
from nanovllm.roles import TransferRole, address_of
from nanovllm.runner.cuda_ipc import CudaReader, shared_memory
from nanovllm.runner.disk import owner_of
from nanovllm.runner.resolved import Resolved
from nanovllm.runner.transfer import HostPages
from nanovllm.transfer.device_pages import DeviceMemory, MemoryReader
from nanovllm.transfer.lender import Lender
from nanovllm.transfer.page_client import ReaderLimits
from nanovllm.transfer.remote_pages import RemotePages
from nanovllm.transfer.tickets import ENVIRONMENT, secret_of

log = logging.getLogger("transfer")
OpenRemote: TypeAlias = "Callable[[Callable[[], None]], RemotePages]"
MOST_LENT = 0.5  # of the pages of P's cache; the others stay free for prompts


def check_role(found: Resolved) -> TransferRole | None:
    """Return the recipe's transfer section. Raise ConfigError if it cannot be served yet."""
    if (asked := found.recipe.transfer) is None:
        return None
    if found.mesh.size > 1:
        raise ConfigError("transfer needs parallel.tp and ep of 1; drop one of them")
    if not found.recipe.cache.prefix:
        raise ConfigError("transfer needs cache.prefix, which is false; drop one of them")
    return asked


def remote_of(
    config: Config, found: Resolved, pages: HostPages, captured: Event
) -> OpenRemote | None:
    """Return a function that connects a decode server to its peers; None for other servers.

    Threads use the device only after `captured` has been set.
    """
    asked = check_role(found)
    if asked is None or asked.role != "decode":
        return None
    layout, identity = digests(config, found)
    limits = ReaderLimits(
        layout=layout,
        identity=identity,
        page_bytes=pages.page_bytes,
        state_parts=pages.state_parts,
        memory=reader_of(asked, pages, captured),
    )
    peers = [address_of(peer, "transfer.peers") for peer in asked.peers]
    return partial(RemotePages, peers, secret_for(asked), limits)


def lender_of(config: Config, found: Resolved, pages: HostPages, num_pages: int) -> Lender | None:
    """Return the lender of a prefill server; None for other servers.

    Raise ConfigError if its address cannot be used.
    """
    asked = check_role(found)
    if asked is None or asked.role != "prefill" or asked.listen is None:
        return None
    layout, identity = digests(config, found)
    reader = PageReader(pages)
    try:
        return Lender(
            address_of(asked.listen, "transfer.listen"),
            secret_for(asked),
            layout=layout,
            identity=identity,
            page_bytes=pages.page_bytes,
            most_pages=int(num_pages * MOST_LENT),
            page=reader.page,
            state=reader.state,
            state_parts=pages.state_parts,
            memory=offered_memory(asked, pages),
        )
    except OSError as error:
        raise ConfigError(f"transfer.listen {asked.listen} cannot be used: {error}") from None


def offered_memory(asked: TransferRole, pages: HostPages) -> DeviceMemory | None:
    """Return the cache's memory for decode servers of this host; None to send pages by socket.

    Raise ConfigError if the recipe requires the memory and it cannot be shared.
    """
    if not uses_device(asked, pages):
        return None
    try:
        return shared_memory(pages.tensors)
    except ConfigError as error:
        if asked.backend == "cuda_ipc":
            raise
        log.info("pages are sent by socket: %s", error)
        return None


def reader_of(asked: TransferRole, pages: HostPages, captured: Event) -> MemoryReader | None:
    """Return access to the memory of prefill servers of this host; None to read by socket only."""
    if not uses_device(asked, pages):
        return None
    return CudaReader(pages.tensors, captured, is_required=asked.backend == "cuda_ipc")


def uses_device(asked: TransferRole, pages: HostPages) -> bool:
    """Return True if pages may pass between devices. Raise ConfigError if they must but cannot."""
    if asked.backend == "cuda_ipc" and pages.device.type != "cuda":
        raise ConfigError("transfer.backend cuda_ipc needs a GPU; use auto or socket")
    return asked.backend != "socket" and pages.device.type == "cuda"


def secret_for(asked: TransferRole) -> str:
    """Return the secret of the recipe or the environment. Raise ConfigError without one."""
    return secret_of(asked.secret, {ENVIRONMENT: given_transfer_secret() or ""})


def digests(config: Config, found: Resolved) -> tuple[bytes, bytes]:
    """Return the digests of the cache's layout and of the model, which both engines must share."""
    owner = owner_of(config, found)
    return digest_of(owner.layout, found.page_tokens), digest_of(owner.identity, owner.dtype)


class PageReader:
    """Reader of pages and states from the device, for threads of the page server."""

    def __init__(self, pages: HostPages) -> None:
        self._pages = pages

    @torch.inference_mode()
    def page(self, page: int) -> memoryview:
        """Return the bytes of a page whose content does not change any more."""
        pages = self._pages
        row = torch.zeros(pages.page_bytes, dtype=torch.uint8, device=pages.device)
        for own, part in pages.parts(row, page):
            own.copy_(part)
        return memoryview(row.cpu().numpy().data)

    @torch.inference_mode()
    def state(self, checkpoint: int, part: int) -> memoryview:
        """Return one part of a state that does not change any more, as long as a page."""
        row = torch.zeros(self._pages.page_bytes, dtype=torch.uint8)
        own = self._pages.state_part(checkpoint, part)
        row[: len(own)].copy_(own)
        return memoryview(row.numpy().data)
