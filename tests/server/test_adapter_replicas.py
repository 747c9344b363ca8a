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
from nanovllm.server.engines import CHANGED, Replicas
from nanovllm.server.errors import ApiError
from nanovllm.server.protocol import ChatRequest
from nanovllm.server.template import Prompt
from nanovllm.wire import AdapterAnswer, LoadAdapter
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
            digests={},
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

        digests = {"pirate": b"1"}
        first = SimpleNamespace(is_lost=False, new_id=lambda: 1, change=change, digests=digests)
        second = SimpleNamespace(is_lost=is_known, new_id=lambda: 1, change=fail, digests={})
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


# -- files that are replaced ----------------------------------------------------------------------


class Connection:
    """Connection to an engine that reads an adapter with the next of `digests`."""

    def __init__(self, *digests: bytes) -> None:
        self.digests, self.sent = list(digests), list[tuple[str, str]]()
        self.client: EngineClient

    def send(self, message: Any) -> None:
        self.sent.append((type(message).__name__, message.name))
        is_load = isinstance(message, LoadAdapter)
        digest = self.digests.pop(0) if is_load else b""
        self.client._received([AdapterAnswer(message.number, digest=digest)])


def engine(connection: Connection, **digests: bytes) -> EngineClient:
    """Return the client of an engine that has started with adapters of these digests."""
    client = connection.client = EngineClient()
    client._connection = connection  # type: ignore[assignment]
    client._received([replace(READY, adapters={name: name for name in digests}, digests=digests)])
    return client


def connected(*clients: EngineClient) -> Replicas:
    return Replicas(clients, [str(at) for at in range(len(clients))], RECIPE)


def chosen(engines: Replicas, adapter: str) -> set[int]:
    """Return the engines that get requests for an adapter."""
    request = ChatRequest(messages=[])
    routes = [engines.route(request, Prompt([at] * 50), adapter) for at in range(8)]
    return {engines.clients.index(route.client) for route in routes}


def test_an_engine_that_returns_refuses_files_that_were_replaced(caplog) -> None:
    """It has read other files than the engine that stayed, at its start or for a later load."""

    async def main() -> None:
        back, stayed = Connection(b"new"), Connection()
        engines = connected(EngineClient.absent(READY), engine(stayed, a=b"old", b=b"b", late=b"l"))
        engines.adapters = {"a": "a", "b": "b", "late": "late"}
        connecting: Any = asyncio.get_running_loop().create_future()
        connecting.set_result(engine(back, a=b"new", b=b"b"))
        await engines._connect_later(0, connecting)
        loads = [("LoadAdapter", "late"), ("UnloadAdapter", "a"), ("UnloadAdapter", "late")]
        assert (back.sent, stayed.sent) == (loads, [])
        assert engines.clients[0].digests == {"b": b"b"}
        assert [chosen(engines, name) for name in ("a", "late", "none")] == [{1}, {1}, {0}]
        assert chosen(engines, "b") == chosen(engines, "") == {0, 1}

    asyncio.run(main())
    why = (
        "its files are not those that another engine has read; load it again, or restart the server"
    )
    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert errors == [f"engine 0 has no adapter {name}: {why}" for name in ("a", "late")]


def test_files_that_are_replaced_while_engines_start_are_on_some_of_them() -> None:
    async def main() -> None:
        connections = [Connection() for _ in range(3)]
        digests = (b"old", b"new", b"new")
        engines = connected(*[engine(c, a=d) for c, d in zip(connections, digests, strict=True)])
        await engines._compare_adapters()
        assert [one.sent for one in connections] == [[("UnloadAdapter", "a")], [], []]
        assert chosen(engines, "a") == {1, 2}

    asyncio.run(main())


def test_a_load_fails_on_all_engines_if_they_read_other_files() -> None:
    """The second load finds equal files."""

    async def main() -> None:
        first, second = Connection(b"1", b"2"), Connection(b"2", b"2")
        engines = connected(engine(first), engine(second))
        served: Any = SimpleNamespace(names=["m"], paths=[], adapters={})
        changes = RuntimeAdapters(Adapters(folder=str(DEMO)), engines, served)
        body = msgspec.json.encode(dict(lora_name="x", lora_path="pirate"))
        with pytest.raises(ApiError) as refused:
            await changes.answer(LOAD, body)
        assert refused.value.status == 400 and refused.value.message == CHANGED
        assert first.sent == second.sent == [("LoadAdapter", "x"), ("UnloadAdapter", "x")]
        assert served.adapters == {} and chosen(engines, "x") == {0}
        await changes.answer(LOAD, body)
        assert served.adapters == {"x": "pirate"} and chosen(engines, "x") == {0, 1}

    asyncio.run(main())
