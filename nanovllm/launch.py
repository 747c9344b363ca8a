"""The process tree: spawn, readiness, death watch, signals. Not what the processes do.

    supervisor (this process, no torch)
      +- engine: device, scheduler
      +- API 0..n-1: HTTP, tokenizer

A child dies with its supervisor: each holds one end of a pipe and leaves when the other end closes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path

from nanovllm import log
from nanovllm.config import Config, ConfigError

EXIT_CONFIG = 2
EXIT_CRASH = 1


class EngineDied(RuntimeError):
    """A process ended before it was ready."""


class Stopped(RuntimeError):
    """A signal came while a process was starting."""


Child = tuple[BaseProcess, Pipe]


@contextlib.contextmanager
def engine_process(config: Config, num_workers: int = 1) -> Iterator[tuple[str, Child]]:
    """Run an engine for so many connections; where its socket will be, and for whom to wait."""
    folder = tempfile.mkdtemp(prefix="nanovllm-")
    path = os.path.join(folder, "engine.sock")
    engine = spawn("nanovllm-engine", run_engine, config, path, num_workers)
    try:
        yield path, engine
    finally:
        stop([engine[0]], grace_s=5.0)
        shutil.rmtree(folder, ignore_errors=True)


def serve(config: Config) -> int:
    """Run a server until a signal or a death; returns the exit code."""
    server = config.recipe.server
    sock, num = listen(server.host, server.port), server.workers
    with sock, interruptible() as stopped, engine_process(config, num) as (path, engine):
        workers = [spawn(f"nanovllm-api{i}", run_api, config, path, i, sock) for i in range(num)]
        try:
            for process, word in [engine, *workers]:
                wait_ready(process, word, stopped)
            announce(config, sock)
            return watch(stopped)
        except Stopped:
            return 0
        finally:
            stop([process for process, _ in workers], grace_s=server.shutdown_s + 5)


def announce(config: Config, sock: socket.socket) -> None:
    host, port = sock.getsockname()[:2]
    url = f"http://{host}:{port}"
    key = ' -H "Authorization: Bearer $KEY"' if config.recipe.server.api_key else ""
    body = '{"messages": [{"role": "user", "content": "What is nanovllm?"}]}'
    sys.stdout.write(
        f"\n{config.served_name} is served at {url}\n\n"
        f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'\n\n"
    )
    sys.stdout.flush()


def listen(host: str, port: int) -> socket.socket:
    """One listening socket, shared by all API processes."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    sock.listen(2048)
    return sock


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """SIGTERM and SIGINT set the event instead of raising; the old handlers come back."""
    event = threading.Event()
    old = {s: signal.signal(s, lambda *_: event.set()) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield event
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def watch(stopped: threading.Event) -> int:
    """Until a signal (0) or until any process ends (its own code, never 0)."""
    processes = multiprocessing.active_children()
    while not stopped.wait(0.2):
        for process in processes:
            if process.exitcode is not None:
                return process.exitcode if process.exitcode > 0 else EXIT_CRASH
    return 0


# -- children -------------------------------------------------------------------------------


def spawn(name: str, target: object, *args: object) -> Child:
    """Start a child; it says "ready" or an error on the returned pipe, and dies with us.

    The system's list of processes shows `name`, up to 15 characters of it.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(target, theirs, *args), name=name)
    process.start()
    theirs.close()
    return process, ours


def child(target: object, word: Pipe, *args: object) -> None:
    """Runs in the child. Interrupts are the supervisor's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # only Linux has it
        Path("/proc/self/comm").write_text(multiprocessing.current_process().name)
    log.setup()
    threading.Thread(target=leave_with_supervisor, args=(word,), daemon=True).start()
    try:
        assert callable(target)
        target(word, *args)
    except ConfigError as error:
        word.send(str(error))
        sys.exit(EXIT_CONFIG)


def leave_with_supervisor(word: Pipe) -> None:
    with contextlib.suppress(EOFError, OSError):
        word.recv()
    os._exit(EXIT_CRASH)


def run_engine(word: Pipe, config: Config, path: str, num_workers: int) -> None:
    from nanovllm.engine.process import main
    from nanovllm.ipc.channel import Listener

    main(config, Listener(path), num_workers, lambda: word.send("ready"))


def run_api(word: Pipe, config: Config, path: str, worker: int, sock: socket.socket) -> None:
    from nanovllm.ipc.client import EngineLostError
    from nanovllm.server.main import run

    try:
        run(config, path, worker, sock, lambda: word.send("ready"))
    except EngineLostError:
        sys.exit(EXIT_CRASH)  # what there is to say of it, the supervisor says


def wait_ready(process: BaseProcess, word: Pipe, stopped: threading.Event | None = None) -> None:
    """Raises ConfigError with the child's message, EngineDied if it crashed, or Stopped."""
    while not word.poll(0.1):
        if stopped is not None and stopped.is_set():
            raise Stopped
    try:
        said = word.recv()
    except EOFError:
        process.join()
        raise EngineDied(f"{process.name} ended with exit code {process.exitcode}") from None
    if said != "ready":
        process.join()
        raise ConfigError(said)


def stop(processes: list[BaseProcess], grace_s: float) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + grace_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            process.kill()
            process.join()
