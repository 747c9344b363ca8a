"""Adapters of several engines: one that returns, and one that is down."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from nanovllm.adapters.folder import DEMO
from nanovllm.adapters.section import Adapters
from nanovllm.config import load_config
from nanovllm.ipc.client import EngineClient, EngineLostError
from nanovllm.server.adapters import LOAD, UNLOAD, RuntimeAdapters
from nanovllm.server.engines import Replicas
from nanovllm.server.errors import ApiError
from tests.server.fake_engine import READY

RECIPE = load_config(None, ["parallel.dp=2", "parallel.load_weight=20"]).recipe


def test_an_engine_that_returns_gets_the_adapters_of_now() -> None:
    changes: list[tuple[str, str]] = []

    async def main() -> None:
        engines = Replicas([EngineClient.absent(READY) for _ in range(2)], ["0", "1"], RECIPE)
        engines.adapters = {"same": "same", "moved": "new", "late": "x"}

        async def change(message: Any) -> str:
            changes.append((message.name, message.folder))
            engines.adapters["later"] = "y"  # the operator goes on meanwhile
            return ""

        client: Any = SimpleNamespace(
            ready=replace(READY, adapters={"same": "same", "moved": "moved"}),
            change=change,
            new_id=lambda: 1,
        )
        connecting: Any = asyncio.get_running_loop().create_future()
        connecting.set_result(client)
        await engines._connect_later(1, connecting)
        assert engines.clients[1] is client

    asyncio.run(main())
    assert changes == [("moved", "new"), ("late", "x"), ("later", "y")]


@pytest.mark.parametrize("is_known", [True, False])
def test_no_engine_changes_if_another_one_is_lost(is_known: bool) -> None:
    loaded: list[Any] = []

    async def main() -> None:
        async def change(message: Any) -> str:
            loaded.append(type(message).__name__)
            return ""

        async def fail(message: Any) -> str:
            raise EngineLostError

        first = SimpleNamespace(is_lost=False, new_id=lambda: 1, change=change)
        second = SimpleNamespace(is_lost=is_known, new_id=lambda: 1, change=fail)
        served: Any = SimpleNamespace(names=["m"], paths=[], adapters={"pirate": "old"})
        engines: Any = SimpleNamespace(clients=[first, second])
        changes = RuntimeAdapters(Adapters(folder=str(DEMO)), engines, served)
        body = dict(lora_name="pirate", lora_path="pirate", load_inplace=True)
        with pytest.raises(ApiError) as refused:
            await changes.answer(LOAD, msgspec.json.encode(body))
        assert refused.value.status == 503
        assert refused.value.message.endswith("load the adapter once all of them are back")
        assert served.adapters == ({"pirate": "old"} if is_known else {})

    asyncio.run(main())
    assert loaded == ([] if is_known else ["LoadAdapter", "UnloadAdapter"])


def test_unload_goes_on_past_a_lost_engine() -> None:
    """The first engine is lost before, the second one during the change; the third one changes."""
    unloaded: list[str] = []

    async def main() -> None:
        async def change(message: Any) -> str:
            unloaded.append(message.name)
            return ""

        second = EngineClient.absent(READY)
        second.is_lost = False
        second._is_ready.cancel()  # it was ready before
        second._connection = SimpleNamespace(send=lambda _: second._lost())  # type: ignore[assignment]
        third = SimpleNamespace(new_id=lambda: 1, change=change)
        served: Any = SimpleNamespace(names=["m"], paths=[], adapters={"pirate": "p", "b": "b"})
        engines: Any = SimpleNamespace(clients=[EngineClient.absent(READY), second, third])
        changes = RuntimeAdapters(Adapters(folder=str(DEMO)), engines, served)
        body = msgspec.json.encode(dict(lora_name="pirate"))
        answer = await asyncio.wait_for(changes.answer(UNLOAD, body), 5)
        assert answer == b"Success: LoRA adapter 'pirate' removed successfully."
        assert served.adapters == {"b": "b"}
        with pytest.raises(ApiError) as refused:  # the second time
            await changes.answer(UNLOAD, body)
        assert (refused.value.status, refused.value.code) == (404, "not_found")

    asyncio.run(main())
    assert unloaded == ["pirate"]


@pytest.mark.parametrize(
    ("name", "folder", "field", "words"),
    [
        ("a/b", "pirate", "lora_name", "lora_name: the adapter name 'a/b' must be"),
        ("x", "../pirate", "lora_path", "lora_path: the adapter name '../pirate' must be"),
        (
            "m",
            "pirate",
            "lora_name",
            "lora_name: the adapter 'm' has the model's name; use another one",
        ),
        ("old", "pirate", "lora_name", "the adapter 'old' is already loaded; set load_inplace"),
        ("x", "nothing", "lora_path", "adapter nothing: "),
        ("x", "pirate", "lora_path", "the engine refuses it"),
    ],
)
def test_a_refused_load_names_its_field(name: str, folder: str, field: str, words: str) -> None:
    async def main() -> None:
        async def change(message: Any) -> str:
            return "the engine refuses it"

        client = SimpleNamespace(is_lost=False, new_id=lambda: 1, change=change)
        served: Any = SimpleNamespace(names=["m"], paths=[], adapters={"old": "pirate"})
        engines: Any = SimpleNamespace(clients=[client])
        changes = RuntimeAdapters(Adapters(folder=str(DEMO)), engines, served)
        body = msgspec.json.encode(dict(lora_name=name, lora_path=folder))
        with pytest.raises(ApiError) as refused:
            await changes.answer(LOAD, body)
        error = msgspec.json.decode(refused.value.body())["error"]
        assert error["param"] == field and error["message"].startswith(words), error
        assert served.adapters == {"old": "pirate"}

    asyncio.run(main())
