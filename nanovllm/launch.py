"""The process tree of a server: spawning, readiness, supervision, signals.

    supervisor (this process, no torch)
      +- engine: device, scheduler; parallel.dp of them
      +- rank 1..: device; only with parallel.tp, of each engine
      +- API 0..n-1: HTTP, tokenizer

A child dies with its supervisor: each holds one end of a pipe and exits when the other end closes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from msgspec.structs import replace

from nanovllm.children import (
    EXIT_CRASH as EXIT_CRASH,
    LEAVE,
    run_api,
    run_engine,
    spawn,
)
from nanovllm.config import Config, ConfigError, Server, without_api_key
from nanovllm.disk_cache import Disk
from nanovllm.fleet import Fleet
from nanovllm.ipc.channel import make_private
from nanovllm.kv.disk.folder import PageFolder
from nanovllm.parallel.places import places_of
from nanovllm.rank_check import check_ranks
from nanovllm.roles import TransferRole, for_engine
from nanovllm.server.probe import parser_of
from nanovllm.transfer.tickets import TicketKey, secret_for
from nanovllm.watch import TICK_S, Child, StartingChildren, ending, endings

log = logging.getLogger("serve")
LAST_WORDS_S = 5.0  # time for API processes without an engine to answer their clients and exit
EXIT_S = 0.01  # between a process closing its files and having its exit status
MOST_SOCKET_PATH = 107  # maximum bytes of a Unix socket's path


class EngineDied(RuntimeError):
    """A process ended before it was ready. The message has its name and exit status."""


class Stopped(RuntimeError):
    """A signal arrived while a process was starting."""


@contextlib.contextmanager
def engine_processes(config: Config) -> Iterator[tuple[list[str], Fleet]]:
    """Run all engines. Yield the paths of their sockets, and the fleet.

    The caller waits for the fleet's readiness and watches it. Raise ConfigError before any process
    is started if the model cannot be cut over the ranks.
    """
    check_ranks(config)
    try:
        folder = tempfile.mkdtemp(prefix="nanovllm-")
    except OSError as error:  # its message lists the folders that were tried
        raise ConfigError(
            f"cannot create a folder for the engine's socket (TMPDIR): {error}"
        ) from None
    parallel = config.recipe.parallel
    paths = [os.path.join(folder, f"{at}.sock") for at in range(parallel.dp)]
    try:
        if len(os.fsencode(last := paths[-1])) > MOST_SOCKET_PATH:
            raise ConfigError(f"{last} is too long for the engine's socket; set another TMPDIR")
        public = without_api_key(config)
        starts = [
            partial(start_engine, with_role(public, at), at, path) for at, path in enumerate(paths)
        ]
        fleet = Fleet(starts, parallel.restarts, alone_s=config.recipe.server.stall_s)
        try:
            start(fleet)
            yield paths, fleet
        finally:
            stop(fleet.processes, grace_s=0.0)  # the API processes have ended
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def with_role(config: Config, at: int) -> Config:
    """Return the configuration of engine number `at`, whose role names its own port."""
    role = for_engine(config.recipe.transfer, at)
    return replace(config, recipe=replace(config.recipe, transfer=role))


def start_engine(config: Config, at: int, path: str) -> list[Child]:
    """Start the ranks of engine number `at`, all or none, and return them.

    On a restart the old socket may still exist, or a cleaner may have removed its folder.
    """
    make_private(folder := os.path.dirname(path))
    Path(path).unlink(missing_ok=True)
    ranks: list[Child] = []
    places = places_of(config, tempfile.mkdtemp(dir=folder), at)
    try:
        for place in places:
            ranks.append(spawn(place.name, config, run_engine, (place, path), folder=folder))
    except BaseException:
        for process, _ in ranks:
            process.kill()
        raise
    finally:
        for place in places:
            place.close()  # the child has its own copy of the ring's end
    return ranks


def api_processes(config: Config, paths: Sequence[str], socks: Sequence[socket.socket]) -> Fleet:
    """Return the API processes, not started yet.

    A lost one is restarted, and has nothing to load. New connections meanwhile wait in the queue of
    the listening sockets, or are accepted by the others.
    """
    server = config.recipe.server
    starts = [
        partial(start_api, config, paths, socks, lives=itertools.count(), at=at)
        for at in range(server.workers)
    ]
    restarts = config.recipe.parallel.restarts
    return Fleet(starts, restarts, alone_s=server.stall_s, even_one=True)


def start_api(
    config: Config,
    paths: Sequence[str],
    socks: Sequence[socket.socket],
    lives: Iterator[int],
    at: int,
) -> list[Child]:
    make_private(folder := os.path.dirname(paths[0]))
    arguments = paths, at, socks, next(lives) == 0
    return [spawn(f"nanovllm-api{at}", config, run_api, arguments, folder=folder)]


def start(fleet: Fleet) -> None:
    """Start the members of a fleet. Raise EngineDied if the system cannot start a process."""
    try:
        fleet.start()
    except OSError as error:
        raise EngineDied(f"no process can be started: {error.strerror or error}") from None


def serve(config: Config) -> int:
    """Run a server until a signal, or until it fails. Return the exit code.

    The first SIGTERM, SIGINT or SIGHUP stops accepting requests and lets running ones finish. The
    exit code is then 0, or 1 if a process hangs or dies meanwhile. A second SIGTERM or SIGINT, at
    any time, kills all processes and exits with 128 + its number. A lost API process is restarted,
    and so is a lost engine if there are several. If none is left, the exit statuses are logged. The
    exit code is then that of one process, or 1 if it would be 0 or a signal.
    """
    check_secret(config.recipe.transfer)
    check_folder(config.recipe.cache.disk)
    # Other commands need not import these.
    from nanovllm.server.detokenize import check_decoder
    from nanovllm.server.ends import eos_ids_of
    from nanovllm.server.generation import sampling_defaults
    from nanovllm.server.renderer import Renderer
    from nanovllm.server.template import Template

    # Errors of the template are reported before any process starts.
    with contextlib.closing(Renderer()) as renderer:
        template = Template(Path(config.tokenizer_dir), renderer=renderer)
        check_decoder(template.tokenizer)
        eos_ids = eos_ids_of(config, template)
        sampling_defaults(config)
    server = replace(config.recipe.server, parser=parser_of(config, template.facts))
    config = replace(config, recipe=replace(config.recipe, server=server), eos_ids=eos_ids)
    limit_s = server.shutdown_s + LAST_WORDS_S
    with (
        listening(server) as socks,
        interruptible() as signalled,
        engine_processes(config) as (paths, fleet),
    ):
        apis, grace_s = api_processes(config, paths, socks), LAST_WORDS_S
        fleet.on_lost = lambda at: report_lost_engine(apis.children, at)
        try:
            start(apis)
            wait_ready([*fleet.children, *apis.children], signalled)
            announce(config, socks)
            grace_s = limit_s
            return watch(fleet, apis, signalled) or drained(fleet, apis.processes, limit_s)
        except EngineDied as error:  # if another process died before, it is listed first
            ended = endings([*fleet.processes, *apis.processes])
            raise EngineDied(ended or str(error)) from None
        except Stopped:
            return 0
        finally:
            stop(apis.processes, grace_s, fleet)


def check_secret(role: TransferRole | None) -> None:
    """Raise ConfigError if a server with a role has no secret, or one that is too short."""
    if role is not None:
        TicketKey(secret_for(role))


def check_folder(disk: Disk | None) -> None:
    """Raise ConfigError if the folder of `cache.disk` cannot be used. Create it if it is missing.

    Faults that may pass, such as a full disk, are left to the tier.
    """
    if disk is not None:
        folder = PageFolder(disk.folder)
        with contextlib.suppress(OSError), contextlib.closing(folder):
            folder.open()


def announce(config: Config, socks: Sequence[socket.socket]) -> None:
    url, *others = [url_of(*sock.getsockname()[:2]) for sock in socks]
    for other in others:
        log.info("metrics need no key at %s/metrics", other)
    key = ' -H "Authorization: Bearer $KEY"' if config.recipe.server.api_key else ""
    body = '{"messages": [{"role": "user", "content": "What is nanovllm?"}]}'
    curl = f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    log.info("%s is served at %s\n\n  %s\n", config.served_name, url, curl)


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def listening(server: Server) -> Iterator[list[socket.socket]]:
    """Yield the listening sockets: that of the API, and that of metrics if it has its own port.

    Raise ConfigError if a port cannot be used.
    """
    if server.metrics_port == server.port != 0:
        raise ConfigError(
            f"server.metrics_port is {server.port}, which is server.port; choose another, or 0 for "
            "any free port"
        )
    ports = [server.port, *([] if server.metrics_port is None else [server.metrics_port])]
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(listen(server.host, port)) for port in ports]


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, which all API processes share."""
    try:
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except (OSError, ValueError, TypeError) as error:  # the latter two: not a valid name
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {url_of(host, port)[7:]}: {why}") from None
    sock.listen(2048)
    return sock


@dataclass
class Signalled:
    """Whether a signal has come.

    A handler runs in the main thread, between any two of its instructions. So this is not a
    threading.Event: the handler could wait for the lock that the main thread holds in wait().
    """

    yes: bool = False


@contextlib.contextmanager
def interruptible() -> Iterator[Signalled]:
    """Yield a flag that SIGTERM, SIGINT and SIGHUP set. Restore the old handlers afterwards.

    A second SIGTERM or SIGINT kills all children and exits immediately. A further SIGHUP changes
    nothing, since a terminal that closes may send two. It stays ignored under nohup.
    """
    signalled = Signalled()

    def handle(number: int, _: object) -> None:
        if signalled.yes and number != signal.SIGHUP:
            for process in multiprocessing.active_children():
                process.kill()
            sys.exit(128 + number)
        signalled.yes = True

    handled = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handled.append(signal.SIGHUP)
    old = {number: signal.signal(number, handle) for number in handled}
    try:
        yield signalled
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def watch(fleet: Fleet, apis: Fleet, signalled: Signalled) -> int:
    """Wait for a signal, and return 0.

    If no engine or no API process is left before, return an exit code other than 0.
    """
    while not signalled.yes:
        if lost := fleet.lost() or apis.lost():
            processes = [*fleet.processes, *apis.processes]
            log.error("%s; stopping", endings(processes) or lost)
            return max(EXIT_CRASH, *(process.exitcode or 0 for process in processes))
        time.sleep(TICK_S)
    return 0


def drained(fleet: Fleet, workers: Sequence[BaseProcess], limit_s: float) -> int:
    """Let requests finish and processes end. Return 0, or EXIT_CRASH if one hung or died.

    Engines end after their last API process. Processes lost before the call are ignored.
    """
    running = [one for one in (*fleet.processes, *workers) if one.exitcode is None]
    stop(workers, limit_s, fleet)
    for _, pipe in fleet.children:
        with contextlib.suppress(OSError):
            pipe.send(LEAVE)
    stop(fleet.processes, LAST_WORDS_S, fleet)
    if wrong := [one.name for one in running if one.exitcode not in (0, -signal.SIGTERM)]:
        log.error("%s failed to shut down cleanly", ", ".join(wrong))
    return EXIT_CRASH if wrong else 0


def report_lost_engine(workers: Sequence[Child], engine: int) -> None:
    """Report a lost engine to all API processes.

    Its sockets may stay open for seconds after its end, until the device releases the process.
    """
    for _, pipe in workers:
        with contextlib.suppress(OSError):
            pipe.send((engine, time.monotonic()))


def wait_ready(children: Sequence[Child], signalled: Signalled | None = None) -> None:
    """Wait until all are ready.

    Raise ConfigError with a child's message, or Stopped after a signal. Raise EngineDied if one
    crashed, even after it was ready, if one stopped while loading (watch.STOPPED_S), or if all hang
    (watch.IDLE_S). A child's message takes precedence over the end of another, which it may have
    caused. A signal takes precedence over both, for the same reason.
    """
    starting = StartingChildren(children)
    while starting.waiting:
        wait([pipe for _, pipe in starting.waiting], 0.1)
        if signalled is not None and signalled.yes:
            raise Stopped
        for process, message in sorted(starting.outcomes(), key=lambda one: one[1] is None):
            if message is None:
                process.join()
                raise EngineDied(ending(process))
            if message != "ready":
                raise ConfigError(message)  # even if the child cannot end
        if starting.waiting and (trouble := starting.trouble()):
            raise EngineDied(trouble)


def stop(processes: Sequence[BaseProcess], grace_s: float, fleet: Fleet | None = None) -> None:
    """End processes within `grace_s` seconds, or LAST_WORDS_S after the fleet's last engine."""
    for process in processes:
        process.terminate()
    turn_at = time.monotonic()
    deadline = turn_at + grace_s
    while (now := time.monotonic()) < deadline:
        if not (sentinels := [one.sentinel for one in processes if one.exitcode is None]):
            break
        if fleet is not None and now >= turn_at:
            turn_at = now + TICK_S
            if fleet.lost(restarts=False):
                deadline = min(deadline, now + LAST_WORDS_S)
        wait(sentinels, TICK_S)
        time.sleep(EXIT_S)
    for process in processes:
        process.kill()
        process.join()
