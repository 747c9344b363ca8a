"""Transfers between engines, by a rank's recipe: the lender of P, or the remote pages of D."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event
from typing import TypeAlias

import msgspec

from nanovllm.config import Config, ConfigError
from nanovllm.kv.layout import CacheLayout
from nanovllm.model_identity import digest_of
from nanovllm.parallel.gloo import GlooMesh
from nanovllm.parallel.mesh import Mesh
from nanovllm.parallel.nccl import NcclMesh
from nanovllm.roles import TransferRole, address_of
from nanovllm.runner.cuda_ipc import CudaReader, shared_memory
from nanovllm.runner.disk import owner_of
from nanovllm.runner.nixl import NixlReader, registered_memory
from nanovllm.runner.page_shares import PageReader, PageShares
from nanovllm.runner.resolved import Resolved, loader_of, with_short_states
from nanovllm.runner.state_rows import StateRow
from nanovllm.runner.transfer import HostPages
from nanovllm.transfer.device_pages import DeviceMemory, MemoryReader, OfferedMemory
from nanovllm.transfer.lender import Lender
from nanovllm.transfer.page_client import ReaderLimits
from nanovllm.transfer.remote_pages import RemotePages
from nanovllm.transfer.shares import OtherRank, ShareServer
from nanovllm.transfer.tickets import secret_for

log = logging.getLogger("transfer")
OpenRemote: TypeAlias = "Callable[[Callable[[], None]], RemotePages]"
MOST_LENT = 0.5  # of the pages of P's cache; the others stay free for prompts


def check_role(resolved: Resolved) -> TransferRole | None:
    """Return the recipe's transfer section. Raise ConfigError if it cannot be served yet."""
    if (role := resolved.recipe.transfer) is None:
        return None
    if resolved.mesh.size > resolved.mesh.tp_size:
        raise ConfigError("transfer needs a parallel.ep of at most tp; drop one of them")
    if not resolved.recipe.cache.prefix:
        raise ConfigError("transfer needs cache.prefix, which is false; drop one of them")
    return role


def remote_of(
    config: Config, resolved: Resolved, pages: HostPages, captured: Event
) -> OpenRemote | None:
    """Return a function that connects a decode server to its peers; None for other servers.

    Threads use the device only after `captured` has been set.
    """
    role = check_role(resolved)
    if role is None or role.role != "decode":
        return None
    layout, identity = digests(config, resolved)
    limits = ReaderLimits(
        layout=layout,
        identity=identity,
        page_bytes=pages.page_bytes,
        state_parts=pages.state_parts,
        share=resolved.mesh.tp_rank,
        shares=resolved.mesh.tp_size,
        memory=reader_of(role, pages, captured),
    )
    peers = [address_of(peer, "transfer.peers") for peer in role.peers]
    return partial(RemotePages, peers, secret_for(role), limits)


def lender_of(
    config: Config,
    resolved: Resolved,
    pages: HostPages,
    num_pages: int,
    *,
    offered: OfferedMemory | None = None,
) -> Lender | None:
    """Return the lender of a prefill server; None for other servers and for ranks other than 0.

    The latter serve their shares of pages to rank 0, and describe the memory that they offer. Raise
    ConfigError if the address cannot be used.
    """
    role = check_role(resolved)
    if role is None or role.role != "prefill" or role.listen is None:
        return None
    layout, identity = digests(config, resolved)
    mesh = resolved.mesh
    memories = memories_of_ranks(mesh, offered)
    if mesh.tp_rank:
        reader = PageReader(pages)
        ShareServer(share_path(mesh, mesh.tp_rank), secret_for(role), reader.page, reader.state)
        return None
    others = [
        OtherRank(share_path(mesh, rank), secret_for(role)) for rank in range(1, mesh.tp_size)
    ]
    group = whole_layout(config, resolved).state
    row = None if group is None else StateRow(group, resolved.dtype.itemsize)
    shares = PageShares(pages, heads_by_tensor(config, resolved), others, row)
    try:
        return Lender(
            address_of(role.listen, "transfer.listen"),
            secret_for(role),
            layout=layout,
            identity=identity,
            page_bytes=pages.page_bytes,
            most_pages=int(num_pages * MOST_LENT),
            page=shares.page,
            state=shares.state,
            state_parts=shares.state_parts,
            memories=memories,
            close_memory=offered.close if offered else lambda: None,
            num_ranks=mesh.tp_size,
        )
    except OSError as error:
        if offered is not None:
            offered.close()
        raise ConfigError(f"transfer.listen {role.listen} cannot be used: {error}") from None


def share_path(mesh: Mesh, rank: int) -> str:
    """Return the path of the socket of a rank's share."""
    return path_of_rank(mesh, "pages", rank)


def path_of_rank(mesh: Mesh, kind: str, rank: int) -> str:
    """Return the path of a rank's file of a kind, next to the file where the ranks meet."""
    assert isinstance(mesh, (GlooMesh, NcclMesh))
    return f"{mesh.rendezvous}.{kind}{rank}"


def offered_memory(resolved: Resolved, pages: HostPages) -> OfferedMemory | None:
    """Return this rank's cache as P offers it; None for other servers, and to use sockets.

    Raise ConfigError if the recipe requires the memory and it cannot be shared.
    """
    role = check_role(resolved)
    if role is None or role.role != "prefill":
        return None
    if role.backend == "nixl":
        return registered_memory(pages.tensors)
    if not uses_device(role, pages):
        return None
    try:
        return OfferedMemory(shared_memory(pages.tensors))
    except ConfigError as error:
        if role.backend == "cuda_ipc":
            raise
        log.info("pages are sent by socket: %s", error)
        return None


def memories_of_ranks(mesh: Mesh, offered: OfferedMemory | None) -> list[DeviceMemory]:
    """Return the memory of each rank; empty on ranks other than 0, and if a rank offers none.

    All ranks call this. Those other than 0 describe their memory in a file, in the private folder
    where the ranks meet.
    """
    if mesh.tp_rank and offered is not None:
        Path(memory_path(mesh, mesh.tp_rank)).write_bytes(msgspec.msgpack.encode(offered.memory))
    is_offered = mesh.least(int(offered is not None))  # also a barrier: the files are complete
    if mesh.tp_rank or offered is None:
        return []
    if not is_offered:
        log.info("pages are sent by socket: another rank offers no memory")
        return []
    files = [Path(memory_path(mesh, rank)) for rank in range(1, mesh.tp_size)]
    others = [msgspec.msgpack.decode(file.read_bytes(), type=DeviceMemory) for file in files]
    return [offered.memory, *others]


def memory_path(mesh: Mesh, rank: int) -> str:
    """Return the path of the file that describes a rank's memory."""
    return path_of_rank(mesh, "memory", rank)


def reader_of(role: TransferRole, pages: HostPages, captured: Event) -> MemoryReader | None:
    """Return access to the memory of prefill servers; None to read by socket only."""
    if role.backend == "nixl":
        return NixlReader(pages.tensors, captured)
    if not uses_device(role, pages):
        return None
    return CudaReader(pages.tensors, captured, is_required=role.backend == "cuda_ipc")


def uses_device(role: TransferRole, pages: HostPages) -> bool:
    """Return True if pages may pass between devices. Raise ConfigError if they must but cannot."""
    if role.backend == "cuda_ipc" and pages.device.type != "cuda":
        raise ConfigError("transfer.backend cuda_ipc needs a GPU; use auto or socket")
    return role.backend != "socket" and pages.device.type == "cuda"


def digests(config: Config, resolved: Resolved) -> tuple[bytes, bytes]:
    """Return the digests of the cache's layout and of the model, which both engines must share.

    Engines with other numbers of ranks may pair if a rank's pages and states have nothing but some
    of the heads: no layers of a draft model that is whole on every rank.
    """
    owner = owner_of(config, resolved)
    layout = owner.layout
    speculate = resolved.recipe.speculate
    if speculate is None or speculate.method != "draft_model":
        layout = digest_of(whole_layout(config, resolved))
    return digest_of(layout, resolved.page_tokens), digest_of(owner.identity, owner.dtype)


def whole_layout(config: Config, resolved: Resolved) -> CacheLayout:
    """Return the layout with all heads, of the model's layers and of those of a draft head."""
    each = resolved.layout.paged[0].bytes_per_element
    own = resolved.family.cache_layout(resolved.model_config, Mesh(), each)
    if resolved.recipe.cache.state_dtype == "bfloat16":
        own = with_short_states(own)
    drafts = loader_of(config, resolved.model_config, Mesh(), each)
    return own if drafts is None else own.followed_by(drafts.layout)


def heads_by_tensor(config: Config, resolved: Resolved) -> list[int]:
    """Return the model's heads in each of the caches' tensors that have bytes."""
    groups = whole_layout(config, resolved).paged
    return [group.num_heads for group in groups for size in (group.k_size, group.v_size) if size]
