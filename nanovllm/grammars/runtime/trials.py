"""Trials of work that may crash, never end or take all memory, in separate processes.

    engine: Trials ---- control socket ----> server process: imports and prepares once
            Trial  ---- one socket each ---> its forks: each tries one text, answers and ends

A fork ends as soon as the other end of its socket closes. This happens when the trial is cancelled,
and when the engine ends for any reason. The server process ends likewise. This module does not
depend on grammars.

Decision: an attempt is limited by the CPU time of its process. Wall-clock time also measures the
machine's load, and a limit on it would refuse good texts. The wall-clock limit here only frees the
caller.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import resource
import select
import signal
import socket
import struct
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn, TypeAlias

from nanovllm.own_process import num_pages, set_limit, set_name

Attempt: TypeAlias = Callable[[str], str]  # returns the fault of a text, or ""

HEADER = struct.Struct("<Qd")  # bytes of the text that follows, CPU seconds for it
TRIED, TOO_LONG = b"+", b"-"  # first byte of an answer
WALL_FACTOR = 6.0  # most wall-clock seconds per CPU second on a busy machine
CPU_CHECK_S = 0.02  # least time between two checks of the CPU time
MEMORY_BYTES = 512 << 20  # memory that one attempt may add to the server's
STACK_BYTES = 4 << 20  # half of a thread's stack, which a text that passes cannot overflow
START_S = 120.0  # for the server to start; imports take 0.5 s, more on a busy machine


class TrialDiedError(Exception):
    """A process that ended without an answer or could not be started."""


class CpuTimeError(Exception):
    """An attempt that exceeded its CPU time."""


class Trial:
    """One attempt. `cancel` ends its process, and may be called by any thread at any time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def result(self, text: str, cpu_s: float) -> str:
        """Return the fault of the text, or "". May be called once.

        Raise CpuTimeError after `cpu_s` seconds of CPU time. Raise TimeoutError after WALL_FACTOR *
        `cpu_s` seconds of wall-clock time, which only a busy machine takes. Raise TrialDiedError if
        the process dies.
        """
        data = text.encode()
        with self._sock as sock:  # closing it ends the process
            try:
                sock.settimeout(START_S)
                sock.sendall(HEADER.pack(len(data), cpu_s) + data)
                begun = sock.recv(1)
            except OSError as error:  # includes a timeout
                raise TrialDiedError(f"no process took it: {error}") from None
            sock.settimeout(WALL_FACTOR * cpu_s)
            try:
                answer = b"".join(iter(lambda: sock.recv(4096), b"")) if begun else b""
            except ConnectionError:
                answer = b""
        if not answer:
            raise TrialDiedError("the process ended without an answer")
        if answer.startswith(TOO_LONG):
            raise CpuTimeError
        return answer.removeprefix(TRIED).decode()

    def close(self) -> None:
        """Drop an attempt whose result is not needed."""
        self._sock.close()

    def cancel(self) -> None:
        with suppress(OSError):  # it has ended already
            self._sock.shutdown(socket.SHUT_RDWR)


class Trials:
    """Trials in forks of a server process, started for the first trial and after it died."""

    def __init__(self, prepare: Callable[[], Attempt]) -> None:
        """`prepare` is pickled, and called once in each server process."""
        self._prepare = prepare
        self._lock = threading.Lock()
        self._process: BaseProcess | None = None
        self._control: socket.socket | None = None

    def begin(self) -> Trial:
        """Return a trial, even before the server process is ready. Raise OSError if none starts."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                if not self._hand_over(theirs):
                    self._start()
                    self._hand_over(theirs)
        except BaseException:
            ours.close()
            raise
        return Trial(ours)

    def close(self) -> None:
        """End the server process. Forks of running trials still answer."""
        with self._lock:
            self._stop()

    def _hand_over(self, theirs: socket.socket) -> bool:
        if self._control is None:
            return False
        try:
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        except OSError:  # the server has died since the last trial
            return False
        return True

    def _start(self) -> None:
        self._stop()
        context = multiprocessing.get_context("spawn")
        self._control, theirs = socket.socketpair()
        self._process = context.Process(
            target=serve, args=(theirs, self._prepare), name="nanovllm-trials", daemon=True
        )
        with theirs:
            self._process.start()

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()  # it has no state worth saving
            self._process.join()
        self._process = self._control = None


# -- the server process and its forks --------------------------------------------------------


def serve(control: socket.socket, prepare: Callable[[], Attempt]) -> NoReturn:
    """Fork for each socket that arrives, until the engine's end of `control` closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    set_name(multiprocessing.current_process().name)
    with suppress(OSError):  # the file exists only on Linux
        Path("/proc/self/oom_score_adj").write_text("1000")  # preferred victim, before the engine
    warnings.simplefilter("ignore", DeprecationWarning)  # numpy's threads are idle at a fork
    attempt = prepare()
    gc.freeze()  # forks need not collect these objects
    with suppress(OSError):
        while descriptors := socket.recv_fds(control, 1, 1)[1]:
            with socket.socket(fileno=descriptors[0]) as connection, suppress(OSError):
                if os.fork() == 0:
                    control.close()
                    answer(connection, attempt)
    os._exit(0)


def answer(connection: socket.socket, attempt: Attempt) -> NoReturn:
    """Try one text and send the answer. Runs in a fork and ends it in every case."""
    try:
        connection.sendall(b"+")
        limit_resources()
        size, cpu_s = HEADER.unpack(connection.recv(HEADER.size, socket.MSG_WAITALL))
        text = connection.recv(size, socket.MSG_WAITALL).decode()
        set_limit(resource.RLIMIT_CPU, math.ceil(cpu_s) + 1)  # if the thread below does not run
        answering = threading.Lock()  # acquired by the answering thread and never released
        watch = threading.Thread(
            target=leave_early, args=(connection, cpu_s, answering), daemon=True
        )
        watch.start()
        result = TRIED + attempt(text).encode()
        if answering.acquire(blocking=False):
            connection.sendall(result)
    finally:
        os._exit(0)


def leave_early(connection: socket.socket, cpu_s: float, answering: threading.Lock) -> None:
    """End the process once the engine's end of the socket closes or the CPU time is used up."""
    closed = select.poll()
    closed.register(connection, select.POLLIN)
    num_cores = os.cpu_count() or 1
    while (left_s := cpu_s - time.process_time()) > 0:
        if closed.poll(1000 * max(CPU_CHECK_S, left_s / num_cores)):
            os._exit(0)
    if answering.acquire(blocking=False):
        with suppress(OSError):
            connection.sendall(TOO_LONG)
        os._exit(0)


def limit_resources() -> None:
    """Limit memory, stack and core files. Beyond a limit xgrammar raises, or the fork crashes."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # the engine's own compilation prints the same messages
    set_limit(resource.RLIMIT_CORE, 0)
    set_limit(resource.RLIMIT_STACK, STACK_BYTES)
    if held := num_pages(5):  # of data and stack
        set_limit(resource.RLIMIT_DATA, held * resource.getpagesize() + MEMORY_BYTES)
