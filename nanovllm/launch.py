"""The process tree: spawn, readiness, death watch, signals. Not what the processes do.

    supervisor (this process, no torch)
      +- engine: device, scheduler; parallel.dp of them
      +- rank 1..: device; only with parallel.tp, of each engine
      +- API 0..n-1: HTTP, tokenizer

A child dies with its supervisor: each holds one end of a pipe and leaves when the other end closes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection as Pipe, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from msgspec.structs import replace

from nanovllm.config import Config, ConfigError, cache_dir, without_api_key
from nanovllm.fleet import Fleet
from nanovllm.ipc.client import EngineLostError
from nanovllm.log import setup
from nanovllm.parallel.places import Place, RankLostError, places_of
from nanovllm.server.parsers import parser_of
from nanovllm.watch import BEAT_EVERY_S, TICK_S, Child, ending, endings, word_on

log = logging.getLogger("serve")
EXIT_CONFIG = 2
EXIT_CRASH = 1
REMOVALS = 100  # of the folder, each within some 20 us once it is gone
LAST_WORDS_S = 5.0  # for API processes without an engine to tell their clients, and to end alone
MOST_SOCKET_PATH = 107  # bytes, of a Unix socket's address
OF_A_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}


class EngineDied(RuntimeError):
    """A process ended before it was ready; the message says which, and how."""


class Stopped(RuntimeError):
    """A signal came while a process was starting."""


@contextlib.contextmanager
def engine_processes(config: Config, num_workers: int = 1) -> Iterator[tuple[list[str], Fleet]]:
    """Run all engines, each for `num_workers` connections.

    Yields the paths of their sockets, and the fleet, which is to be waited for and watched.
    """
    try:
        folder = tempfile.mkdtemp(prefix="nanovllm-")
    except OSError as error:  # says itself which folders were tried
        raise ConfigError(f"no folder for the engine's socket (TMPDIR): {error}") from None
    paths = [os.path.join(folder, f"{at}.sock") for at in range(config.recipe.parallel.dp)]
    try:
        if len(os.fsencode(last := paths[-1])) > MOST_SOCKET_PATH:
            raise ConfigError(f"{last} is too long for the engine's socket; set another TMPDIR")
        given = without_api_key(config), num_workers
        starts = [partial(start_engine, *given, at, path) for at, path in enumerate(paths)]
        fleet = Fleet(starts, config.recipe.parallel.restarts)
        try:
            fleet.start()
            yield paths, fleet
        finally:
            stop(fleet.processes, grace_s=0.0)  # whoever they worked for has gone
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start_engine(config: Config, num_workers: int, at: int, path: str) -> list[Child]:
    """Start the ranks of engine number `at`, which may have lived before, and return them."""
    Path(path).unlink(missing_ok=True)
    ranks, folder = [], os.path.dirname(path)
    for place in places_of(config, tempfile.mkdtemp(dir=folder), at):
        given = run_engine, place, path, num_workers
        ranks.append(spawn(place.name, config, *given, folder=folder))
        place.close()  # its end of a ring is the child's
    return ranks


def serve(config: Config) -> int:
    """Run a server until a signal or a death; returns the exit code.

    The first SIGTERM or SIGINT ends the intake and lets requests finish: 0, or 1 if one of the
    processes then hangs or dies. A second one, at any time, kills all processes and exits with
    128 + its number. When a process ends by itself, the log says how, and the code is its own, or
    1 where that would be 0 or a signal.
    """
    from nanovllm.server.ends import eos_ids_of  # which other commands need not import

    server = replace(config.recipe.server, parser=parser_of(config))
    recipe = replace(config.recipe, server=server)
    config = replace(config, recipe=recipe, eos_ids=eos_ids_of(config))
    sock, num, limit_s = listen(server.host, server.port), server.workers, server.shutdown_s + 5
    with sock, interruptible() as stopped, engine_processes(config, num) as (paths, fleet):
        given, at = (config, run_api, paths), os.path.dirname(paths[0])
        workers = [spawn(f"nanovllm-api{i}", *given, i, sock, folder=at) for i in range(num)]
        processes = [process for process, _ in workers]
        fleet.on_lost = partial(tell, workers)
        try:
            wait_ready([*fleet.children, *workers], stopped)
            announce(config, sock)
            return watch(fleet, processes, stopped) or drained(fleet, processes, limit_s)
        except EngineDied:  # maybe because another one did, which then stands first
            raise EngineDied(endings([*fleet.processes, *processes])) from None
        except Stopped:
            return 0
        finally:
            stop(processes, limit_s, fleet)


def announce(config: Config, sock: socket.socket) -> None:
    url = url_of(*sock.getsockname()[:2])
    key = ' -H "Authorization: Bearer $KEY"' if config.recipe.server.api_key else ""
    body = '{"messages": [{"role": "user", "content": "What is nanovllm?"}]}'
    curl = f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    log.info("%s is served at %s\n\n  %s\n", config.served_name, url, curl)


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """One listening socket, shared by all API processes."""
    try:
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except (OSError, ValueError, TypeError) as error:  # a name may be none at all
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {url_of(host, port)[7:]}: {why}") from None
    sock.listen(2048)
    return sock


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """SIGTERM and SIGINT set the event instead of raising; the old handlers come back.

    The second one kills all children and exits, whatever was going on.
    """
    event = threading.Event()

    def handle(number: int, _: object) -> None:
        if event.is_set():  # a second one
            for process in multiprocessing.active_children():
                process.kill()
            sys.exit(128 + number)
        event.set()

    old = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield event
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def watch(fleet: Fleet, workers: Sequence[BaseProcess], stopped: threading.Event) -> int:
    """Wait for a signal, and return 0; or until an API process ends or no engine is left, and
    return a code of theirs, never 0."""
    while not stopped.wait(TICK_S):
        has_ended = any(process.exitcode is not None for process in workers)
        lost = fleet.lost(restarts=not has_ended)
        if lost or has_ended:
            processes = [*fleet.processes, *workers]
            log.error("%s; stopping", endings(processes) or lost)
            return max(EXIT_CRASH, *(process.exitcode or 0 for process in processes))
    return 0


def drained(fleet: Fleet, workers: Sequence[BaseProcess], limit_s: float) -> int:
    """Let requests finish and all processes end: 0, or EXIT_CRASH if one hung or died instead.

    Engines end with their last API process. Those that were lost before count for nothing.
    """
    asked = [one for one in (*fleet.processes, *workers) if one.exitcode is None]
    stop(workers, limit_s, fleet)
    stop(fleet.processes, LAST_WORDS_S, fleet)
    if wrong := [one.name for one in asked if one.exitcode not in (0, -signal.SIGTERM)]:
        log.error("%s did not end well", ", ".join(wrong))
    return EXIT_CRASH if wrong else 0


def tell(workers: Sequence[Child], engine: int) -> None:
    """Say to all API processes that an engine was lost: its end of a socket may outlive it by the
    seconds that its device takes to let go of it."""
    for _, word in workers:
        with contextlib.suppress(OSError):
            word.send((engine, time.monotonic()))


# -- children -------------------------------------------------------------------------------


def spawn(name: str, config: Config, target: object, *args: object, folder: str = "") -> Child:
    """Start a child; it says "ready" or an error on the returned pipe, and dies with us.

    It is born with interrupts blocked: a Ctrl-C, which a terminal sends to all processes, does not
    end it before it ignores them. One that comes meanwhile reaches us right afterwards.
    The system's list of processes shows `name`, up to 15 characters of it.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(target, theirs, folder, config, *args), name=name)
    resource_tracker.ensure_running()  # the first start would do it, and unblock interrupts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return process, ours


class Word:
    """What a child says to its supervisor: that it is ready, or once why it never will be.

    A rank says again and again that it is alive, from when it is ready.
    """

    def __init__(self, pipe: Pipe, folder: str = "") -> None:
        """`folder`: where the server's sockets are; "" of a process that knows of none."""
        self._pipe = pipe
        self._folder = folder
        self._on_lost: Callable[[int, float], object] = lambda *_: None
        self.is_ready = self.beats = False

    def ready(self) -> None:
        self.is_ready = True
        self._pipe.send("ready")

    def ready_for_good(self) -> None:
        """From now on it ends with its last connection, also where all processes get a SIGTERM."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.ready()
        self.beats = True

    def sorry(self, why: object) -> NoReturn:
        self._pipe.send(str(why))
        sys.exit(EXIT_CONFIG)

    def hear(self, on_lost: Callable[[int, float], object]) -> None:
        """From now on `on_lost` is called, in a thread, with the number of each engine lost, and
        when that was (monotonic)."""
        self._on_lost = on_lost

    def leave_with_supervisor(self) -> None:
        """Run in a thread: hear of lost engines, say "alive", and end when the supervisor ends,
        whose folder goes with it. All children remove it, and what others may still put there."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                if self._pipe.poll(BEAT_EVERY_S):
                    self._on_lost(*self._pipe.recv())
                elif self.beats:
                    self._pipe.send("alive")
        for _ in range(REMOVALS):
            shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(EXIT_CRASH)


def child(target: object, pipe: Pipe, folder: str, config: Config, *args: object) -> None:
    """Runs in the child. Interrupts are the supervisor's business.

    The process ends without taking apart what it has: connections to other ranks would wait.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # only Linux has it
        Path("/proc/self/comm").write_text(multiprocessing.current_process().name)
    setup(config.recipe.server.log_format)
    word = Word(pipe, folder)
    threading.Thread(target=word.leave_with_supervisor, daemon=True).start()
    code = EXIT_CRASH
    with contextlib.suppress(SystemExit):
        run_child(target, word, config, *args)
        code = 0
    logging.shutdown()
    os._exit(code)


def run_child(target: object, word: Word, config: Config, *args: object) -> None:
    """Run the target. What keeps it from being ready is one line for the supervisor; what nobody
    foresaw is a record of the log, too, then and later."""
    try:
        assert callable(target)
        target(word, config, *args)
    except ConfigError as error:
        word.sorry(error)
    except (RankLostError, EngineLostError):
        sys.exit(EXIT_CRASH)  # what became of that one, the supervisor says
    except Exception as error:
        if isinstance(error, OSError) and error.errno in OF_A_DISK and not word.is_ready:
            some = f"one of {tempfile.gettempdir()}, {cache_dir()}, Triton's cache"
            word.sorry(f"cannot write {error.filename or some}: {error.strerror}")
        log.exception(name := multiprocessing.current_process().name)
        word.sorry(f"{name}: {type(error).__name__}: {error}".splitlines()[0])


def run_engine(word: Word, config: Config, place: Place, path: str, num_workers: int) -> None:
    """Rank 0 plans and serves, others follow it."""
    if place.rank == 0:
        from nanovllm.engine.process import main
        from nanovllm.ipc.channel import Listener

        main(config, place, Listener(path), num_workers, word.ready_for_good)
    else:
        from nanovllm.engine.ranks import follow

        logging.getLogger("engine").setLevel(logging.WARNING)  # rank 0 says the same
        follow(config, place, word.ready_for_good)


def run_api(
    word: Word, config: Config, paths: Sequence[str], worker: int, sock: socket.socket
) -> None:
    from nanovllm.server.main import run

    run(config, paths, worker, sock, word.ready, word.hear)


def wait_ready(children: Sequence[Child], stopped: threading.Event | None = None) -> None:
    """Wait until all are ready. Raises ConfigError with a child's message, EngineDied if one
    crashed, maybe after it was ready, or Stopped. Who says why it leaves comes before who crashed,
    maybe missing that one; a signal comes before both, as it may have ended them all.
    """
    waiting = {word: process for process, word in children}
    while waiting:
        wait(waiting, 0.1)
        if stopped is not None and stopped.is_set():
            raise Stopped
        speaking = [pipe for pipe in waiting if pipe.poll()]
        heard = [(word_on(pipe), waiting.pop(pipe)) for pipe in speaking]
        for said, process in sorted(heard, key=lambda one: one[0] is None):
            if said is None:
                process.join()
                raise EngineDied(ending(process))
            if said != "ready":
                raise ConfigError(said)  # whatever keeps it from ending
        was_ready = (process for process, word in children if word not in waiting)
        if waiting and (lost := endings(was_ready)):  # which others may wait for
            raise EngineDied(lost)


def stop(processes: Sequence[BaseProcess], grace_s: float, fleet: Fleet | None = None) -> None:
    """Ends them, in `grace_s` seconds at most, and soon once no engine of the `fleet` is left."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(process.exitcode is None for process in processes):
        if fleet is not None and fleet.lost(restarts=False):
            deadline = min(deadline, time.monotonic() + LAST_WORDS_S)
        time.sleep(TICK_S)
    for process in processes:
        process.kill()
        process.join()
