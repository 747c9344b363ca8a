"""Changes of adapters while the engine runs.

Theory of operation:

    1. take      a message of an API process: number the load, let all ranks read it in threads
    2. finish    this rank has read it: wait for the others; it is loaded on all ranks or on none
    3. answer    new requests can name it; requests of a former adapter of the name go on
    4. forget    free adapters that have no name and no request, at each change

Loads and unloads of all API processes come through the inbox of the step loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from nanovllm.engine.executor import AdapterStore
from nanovllm.plan import AdapterContent
from nanovllm.sched.planner import Planner
from nanovllm.wire import AdapterAnswer, LoadAdapter, UnloadAdapter


class ReadAdapter(NamedTuple):
    """An adapter that this rank has read, or the reason why it cannot be served."""

    message: LoadAdapter
    number: int
    result: AdapterContent | str


class AdapterChanges:
    """Loads and unloads of all API processes. `deliver` passes a ReadAdapter to the step loop."""

    def __init__(
        self, planner: Planner, store: AdapterStore, deliver: Callable[[ReadAdapter], object]
    ) -> None:
        self.planner, self.store, self.deliver = planner, store, deliver
        self.folders: dict[str, str] = {}  # of the loaded adapters by name
        self._contents = dict(store.first_adapters)  # likewise

    @property
    def digests(self) -> dict[str, bytes]:
        """The digests of the files of the loaded adapters, by name. Any thread may read it."""
        return {name: content.digest for name, content in self._contents.copy().items()}

    def digest(self, name: str) -> bytes:
        """Return the digest of an adapter for keys of pages; empty if no such one is loaded."""
        content = self._contents.get(name)
        return b"" if content is None else content.digest

    def take(self, message: LoadAdapter | UnloadAdapter | ReadAdapter) -> AdapterAnswer | None:
        """Process a message. Return the answer, or None if it follows later."""
        match message:
            case LoadAdapter():
                return self._start(message)
            case UnloadAdapter(number, name):
                if name not in self.folders:
                    return AdapterAnswer(number, f"the adapter {name!r} is not loaded")
                del self.folders[name], self._contents[name]
                self.planner.unload_adapter(name)
                self.store.drop_adapters(self.planner.forget_adapters())
                return AdapterAnswer(number)
            case ReadAdapter():
                return self._finish(message)

    def _start(self, message: LoadAdapter) -> AdapterAnswer | None:
        if message.name in self.folders and not message.replaces:
            return AdapterAnswer(message.number, f"the adapter {message.name!r} is already loaded")
        number = self.planner.new_adapter()

        def done(result: AdapterContent | str) -> None:
            self.deliver(ReadAdapter(message, number, result))

        self.store.read_adapter(number, message.folder, done)
        return None

    def _finish(self, read: ReadAdapter) -> AdapterAnswer:
        message, number, result = read
        if not self.store.commit_adapter(number) or isinstance(result, str):
            self.store.drop_adapters([number])
            error = result if isinstance(result, str) else "another rank could not read the adapter"
            return AdapterAnswer(message.number, error)
        self.folders[message.name], self._contents[message.name] = message.folder, result
        self.planner.load_adapter(message.name, number, result)
        self.store.drop_adapters(self.planner.forget_adapters())
        return AdapterAnswer(message.number, digest=result.digest)
