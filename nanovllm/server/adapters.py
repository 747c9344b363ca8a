"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, on all engines or on none.

Their bodies and answers are those of vLLM, but `lora_path` is the name of a folder in
`adapters.folder`. A path is refused, so that no client can probe the file system.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from nanovllm.adapters.folder import CONFIG, check_name, file_of
from nanovllm.adapters.section import Adapters, check_free
from nanovllm.config import ConfigError
from nanovllm.ipc.client import EngineClient, EngineLostError
from nanovllm.log import fields
from nanovllm.server.engines import CHANGED, Engines
from nanovllm.server.errors import ApiError, decoded
from nanovllm.server.served import Served
from nanovllm.wire import LoadAdapter, UnloadAdapter

log = logging.getLogger("server")
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MAX_BYTES = 1 << 16  # of a body


class LoadRequest(Struct, frozen=True):
    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadRequest(Struct, frozen=True):
    lora_name: str


decode_load = msgspec.json.Decoder(LoadRequest).decode
decode_unload = msgspec.json.Decoder(UnloadRequest).decode


class RuntimeAdapters:
    """Changes of adapters by the operator, one after the other."""

    def __init__(self, options: Adapters, engines: Engines, served: Served) -> None:
        self._folder, self._engines, self._served = Path(options.folder), engines, served
        self._turn = asyncio.Lock()

    async def answer(self, path: str, body: bytes) -> bytes:
        """Return the text of the answer. Raise ApiError."""
        try:
            if path == LOAD:
                return await self._load(decoded(body, decode_load))
            return await self._unload(decoded(body, decode_unload))
        except EngineLostError:
            text = "an engine is lost or starting again; load the adapter once all of them are back"
            raise ApiError(503, text, code="unhealthy") from None

    async def _load(self, request: LoadRequest) -> bytes:
        name, folder, served = request.lora_name, request.lora_path, self._served
        taken = {*served.names, *served.paths}
        for field, check in (
            ("lora_name", partial(check_name, name)),
            ("lora_path", partial(check_name, folder)),
            ("lora_name", partial(check_free, name, taken, "use another one")),
        ):
            try:
                check()
            except ConfigError as error:
                raise invalid(f"{field}: {error}", field) from None
        try:
            await asyncio.to_thread(file_of, self._folder, folder, CONFIG)
        except ConfigError as error:
            raise ApiError(404, str(error), param="lora_path", code="not_found") from None
        async with self._turn:
            before = served.adapters.get(name)
            if before is not None and not request.load_inplace:
                text = f"the adapter {name!r} is already loaded; set load_inplace"
                raise invalid(text, "lora_name")
            if any(client.is_lost for client in self._engines.clients):
                raise EngineLostError  # before another engine has changed
            done: list[EngineClient] = []
            try:
                for client in self._engines.clients:
                    message = LoadAdapter(client.new_id(), name, folder, replaces=True)
                    if fault := await client.change(message):
                        raise invalid(fault, "lora_path")
                    done.append(client)
                    if client.digests[name] != done[0].digests[name]:
                        raise invalid(CHANGED, "lora_path")
            except (ApiError, EngineLostError):
                if done:  # no engine keeps the name, since the former adapter may be gone
                    served.adapters.pop(name, None)
                for other in done:
                    with suppress(EngineLostError):
                        await other.change(UnloadAdapter(other.new_id(), name))
                raise
            served.adapters[name] = folder
        log.info("loaded %s", fields(adapter=name, folder=folder))
        return f"Success: LoRA adapter '{name}' added successfully.".encode()

    async def _unload(self, request: UnloadRequest) -> bytes:
        name = request.lora_name
        async with self._turn:
            if self._served.adapters.pop(name, None) is None:
                text = f"the adapter {name[:100]!r} is not loaded"
                raise ApiError(404, text, param="lora_name", code="not_found")
            # A lost engine has no adapters. One that returns loads those that are served then.
            for client in self._engines.clients:
                with suppress(EngineLostError):
                    await client.change(UnloadAdapter(client.new_id(), name))
        log.info("unloaded %s", fields(adapter=name))
        return f"Success: LoRA adapter '{name}' removed successfully.".encode()


def invalid(text: str, field: str) -> ApiError:
    return ApiError(400, text, param=field, code="invalid_value")
