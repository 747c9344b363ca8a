"""Trials whose texts are commands, and fake grammars, without torch and xgrammar."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from nanovllm.grammars.runtime.masks import Grammars
from nanovllm.grammars.runtime.queue import GrammarQueue
from nanovllm.grammars.runtime.trials import Attempt, Trials
from nanovllm.plan import Masks
from nanovllm.wire import Generate


def prepare() -> Attempt:
    return attempt


def attempt(text: str) -> str:
    """Run the command in a text.

    Commands are `fine`, `bad REASON`, `sleep SECONDS`, `spin SECONDS`, `log FILE`, `hang FILE`,
    `crash`, `crash once FILE` and `memory MIB`. A suffix after `#` only makes texts different.
    `spin` computes. `log` appends the process id to a file; `hang` does the same and then sleeps.
    `crash once` does not crash if the file exists.
    """
    command, _, argument = text.partition("#")[0].strip().partition(" ")
    match command:
        case "bad":
            return argument
        case "sleep":
            time.sleep(float(argument))
        case "log" | "hang":
            with Path(argument).open("a") as file:
                file.write(f"{os.getpid()} {text}\n")
            time.sleep(60 if command == "hang" else 0)
        case "spin":
            while time.process_time() < float(argument):
                pass
        case "crash":
            flag = Path(argument.removeprefix("once "))
            if not argument or not flag.exists():
                flag.touch() if argument else None
                os.kill(os.getpid(), signal.SIGSEGV)
        case "memory":
            try:
                bytearray(int(argument) << 20)
            except MemoryError:
                return "too much"
        case "length":
            return str(len(text))
    return ""


def fake_trials() -> Trials:
    return Trials(prepare)


class FakeBuilder:
    """Implementation of queue.Builder. `built` lists the requested grammars in order."""

    def __init__(self, num_bytes: int = 100) -> None:
        self.built: list[str] = []
        self._num_bytes = num_bytes
        self._lock = threading.Lock()

    def prepare(self) -> None: ...

    def build(self, tag: str) -> SimpleNamespace:
        with self._lock:
            self.built.append(tag)
        if "unbuildable" in tag:
            raise ValueError("it passed its trial, but")
        return SimpleNamespace(tag=tag, memory_size_bytes=self._num_bytes)


def logged(path: Path, count: int) -> list[tuple[int, str]]:
    """Wait for `count` lines and return their process ids and texts in order."""
    deadline = time.monotonic() + 30
    while True:
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) >= count:
            return [(int(line.split()[0]), line.partition(" ")[2]) for line in lines]
        assert time.monotonic() < deadline, f"{len(lines)} of {count}"
        time.sleep(0.01)


def wait_gone(pids: list[int], limit_s: float = 10.0) -> None:
    """Wait until no process is left, not even as a zombie."""
    deadline = time.monotonic() + limit_s
    while there := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"still there: {there}"
        time.sleep(0.01)


class FakeMatcher:
    def is_terminated(self) -> bool:
        return True  # accepts any end


class FakeGrammars(Grammars):
    """Grammars that compile commands, allow all tokens, and drop matchers like the real class."""

    def __init__(self) -> None:
        self.builder = FakeBuilder()
        self._trials = fake_trials()
        self.queue = GrammarQueue(self._trials, self.builder, compile_s=30.0)
        self._matchers = {}

    def follow(self, request: Generate, grammar: SimpleNamespace) -> None:
        if "unfollowable" in grammar.tag:
            raise ValueError("of this request")
        self._matchers[request.request_id] = FakeMatcher()

    def fill(self, rows: list[tuple[int, list[int]]]) -> Masks:
        return np.full((sum(1 + len(drafts) for _, drafts in rows), 1), -1, np.int32)
