"""Child processes of a server: spawning, entry points, and the pipe to the supervisor.

Messages from a child: "ready" once, or the reason why it cannot become ready; heartbeats from its
start on. Messages to a child: a lost engine, or LEAVE. A child dies with its supervisor, because
each holds one end of a pipe and ends when the other end closes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection as Pipe
from typing import NoReturn

from nanovllm.config import Config, ConfigError, cache_dir
from nanovllm.ipc.client import EngineLostError
from nanovllm.log import setup
from nanovllm.own_process import set_name
from nanovllm.parallel.places import Place, RankLostError
from nanovllm.watch import BEAT, BEAT_EVERY_S, STUCK, Child

log = logging.getLogger("serve")
EXIT_CONFIG = 2
EXIT_CRASH = 1
REMOVALS = 100  # attempts to remove the folder, about 20 us each when it no longer exists
LEAVE = "leave"  # message to an engine: no further API process will connect
STALLS = 6  # a step late by more than this multiple of server.stall_s is stuck
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}


def spawn(
    name: str, config: Config, target: object, args: tuple[object, ...] = (), *, folder: str = ""
) -> Child:
    """Start a child that runs `target(link, config, *args)`. Return it with its pipe.

    `link` is its SupervisorLink. The child dies with this process. It starts with SIGINT and SIGHUP
    blocked. Thus a terminal, which sends them to all processes, does not end it before it ignores
    them. This process gets one that arrives meanwhile right after the start. `ps` shows the first
    15 characters of `name`.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(target, theirs, folder, config, *args), name=name)
    try:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            # The first start would do it, and unblock SIGINT. Its process keeps SIGHUP blocked.
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


class SupervisorLink:
    """A child's end of the pipe to its supervisor."""

    def __init__(self, pipe: Pipe, folder: str = "") -> None:
        """`folder` has the server's sockets; "" if there is none."""
        self._pipe = pipe
        self._folder = folder
        self._lock = threading.Lock()  # the heartbeat thread sends, too
        self._on_lost: Callable[[int, float], object] = lambda *_: None
        self._on_leave: Callable[[], object] = lambda: None
        self._late_s: Callable[[], float] = lambda: 0.0
        self.most_late_s = math.inf  # a step later than this is stuck
        self._must_leave = False
        self.is_ready = False

    def ready(self) -> None:
        self.is_ready = True
        self._send("ready")

    def ready_without_sigterm(self) -> None:
        """Report ready, and ignore SIGTERM from now on.

        The process then ends after its last connection, even if a SIGTERM reaches all processes.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.ready()

    def fail_start(self, why: object) -> NoReturn:
        self._send(str(why))
        sys.exit(EXIT_CONFIG)

    def on_engine_lost(self, on_lost: Callable[[int, float], object]) -> None:
        """Call `on_lost`, in a thread, for each engine lost from now on.

        Its arguments are the engine's number and the monotonic time of the loss.
        """
        self._on_lost = on_lost

    def on_leave(self, leave: Callable[[], object]) -> None:
        """Call `leave`, possibly in a thread, when no further API process will connect."""
        self._on_leave = leave
        if self._must_leave:
            leave()

    def watch_steps(self, late_s: Callable[[], float]) -> None:
        """Report the process as stuck while `late_s` exceeds `most_late_s`."""
        self._late_s = late_s

    def leave_with_supervisor(self) -> None:
        """Receive messages and send heartbeats, in a thread, until the supervisor ends.

        Then remove its folder and end the process. All children remove it repeatedly, because
        others may still create files in it.
        """
        with contextlib.suppress(EOFError, OSError):
            while True:
                if self._pipe.poll(BEAT_EVERY_S):
                    self._handle(self._pipe.recv())
                else:
                    self._send(self._beat())
        for _ in range(REMOVALS):
            shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(EXIT_CRASH)

    def _handle(self, message: object) -> None:
        if message == LEAVE:
            self._must_leave = True
            self._on_leave()
        elif isinstance(message, tuple):
            self._on_lost(*message)

    def _beat(self) -> str:
        late_s = self._late_s()
        if late_s <= self.most_late_s:
            return BEAT
        return f"{STUCK}its step takes {late_s:.0f} s longer than any before"

    def _send(self, message: str) -> None:
        with self._lock:
            self._pipe.send(message)


def child(target: object, pipe: Pipe, folder: str, config: Config, *args: object) -> None:
    """Run in the child. SIGINT and SIGHUP are ignored, since the supervisor handles them.

    The process ends by os._exit without cleaning up. Closing connections to other ranks would
    block.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    set_name(multiprocessing.current_process().name)
    setup(config.recipe.server.log_format)
    link = SupervisorLink(pipe, folder)
    threading.Thread(target=link.leave_with_supervisor, daemon=True).start()
    code = EXIT_CRASH
    with contextlib.suppress(SystemExit):
        run_child(target, link, config, *args)
        code = 0
    logging.shutdown()
    os._exit(code)


def run_child(target: object, link: SupervisorLink, config: Config, *args: object) -> None:
    """Run the target, and report an exception.

    Before the process is ready, the reason goes to the supervisor as one line. An unexpected
    exception is always logged, too.
    """
    try:
        assert callable(target)
        target(link, config, *args)
    except ConfigError as error:
        link.fail_start(error)
    except (RankLostError, EngineLostError):
        sys.exit(EXIT_CRASH)  # the supervisor logs the exit of the lost process
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS and not link.is_ready:
            some = f"one of {tempfile.gettempdir()}, {cache_dir()}, Triton's cache"
            link.fail_start(f"cannot write {error.filename or some}: {error.strerror}")
        log.exception(name := multiprocessing.current_process().name)
        link.fail_start(f"{name}: {type(error).__name__}: {error}".splitlines()[0])


def run_engine(link: SupervisorLink, config: Config, place: Place, path: str) -> None:
    """Run rank 0, which plans and serves, or another rank, which follows rank 0."""
    if place.rank == 0:
        from nanovllm.engine.process import main
        from nanovllm.ipc.channel import Listener

        # Other engines serve while this one is replaced, or a rank waits for another in vain.
        if config.recipe.parallel.dp > 1 or place.size > 1:
            link.most_late_s = STALLS * config.recipe.server.stall_s
        main(
            config,
            place,
            listener=Listener(path),
            ready=link.ready_without_sigterm,
            supervisor=link,
        )
    else:
        from nanovllm.engine.ranks import follow

        logging.getLogger("engine").setLevel(logging.WARNING)  # rank 0 logs the same lines
        follow(config, place, link.ready_without_sigterm)


def run_api(
    link: SupervisorLink,
    config: Config,
    paths: Sequence[str],
    worker: int,
    socks: Sequence[socket.socket],
    first_life: bool,
) -> None:
    from nanovllm.server.main import run

    run(
        config,
        paths,
        worker,
        socks,
        ready=link.ready,
        on_engine_lost=link.on_engine_lost,
        first_life=first_life,
    )
