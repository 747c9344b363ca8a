"""Processes of Python that start with third-party packages imported, since imports take long.

    process of the tests
      +- helper: has imported the packages, and no module of this project
      +- nanovllm serve: a fork of the helper, as are its own children
           +- helper: its copy, for engines and API processes
           +- engine, API process, ...: each with a helper of its own

A helper forks twice for each command of Python, and the process between ends at once. The process
that asked for it adopts the orphan. So waiting, signals, `ps` and the ends of pipes are those of a
process that was started as usual. A fork has the descriptors, environment, working folder, signal
mask and session that the command would have. A helper ends when its parent does.

Commands with options of the interpreter or a `preexec_fn`, or with other values of variables that
are read by imports, start as usual.
"""

from __future__ import annotations

import _posixsubprocess
import atexit
import ctypes
import faulthandler
import fcntl
import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

ROOT = Path(__file__).parents[1]
MOST_S = 1800
HELPER = "helper"  # name of a helper that `ps` shows
MOST_BYTES, MOST_DESCRIPTORS = 1 << 17, 200
SET_CHILD_SUBREAPER = 36  # prctl(2)
SPAWNED = "from multiprocessing.spawn import spawn_main"
CALL = "import tests.forks; tests.forks.call()"
TORCH = (  # imported in 7 s
    "httptools", "httpx", "huggingface_hub", "hypothesis.strategies", "jinja2", "msgspec", "numpy",
    "pandas", "pytest", "tokenizers", "torch._dynamo", "transformers",
    "transformers.modeling_utils", "transformers.models.auto.modeling_auto", "triton.language",
    "uvicorn", "uvloop",
)  # fmt: skip
SERVER = (  # imported in 4 s; forks of it are faster, since they have less memory
    "httptools", "httpx", "jinja2", "msgspec", "numpy", "tokenizers", "torch",
    "transformers.models.auto.tokenization_auto", "triton.language", "uvicorn", "uvloop",
    "xgrammar",
)  # fmt: skip
READ_BY_IMPORTS = ("CUDA_", "HF_", "OMP_", "TORCH", "TRITON_INTERPRET")
ForkExec = Callable[..., int]


class Forks:
    """A helper of this process, with its environment and `environment`. Both end together."""

    def __init__(self, *packages: str, **environment: str) -> None:
        self.environment = environment
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), *packages]
        with theirs:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **environment},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._helper = Helper(ours, {**os.environ, **environment})
        self._lock = threading.Lock()

    def popen(self, command: Sequence[str], **how: Any) -> subprocess.Popen[Any]:
        """Do what subprocess.Popen does. The command is one of Python."""
        with self.starts():
            return subprocess.Popen(command, **how)

    @contextmanager
    def starts(self) -> Iterator[None]:
        """Make forks of all processes that this thread starts, also by multiprocessing."""
        thread = threading.get_ident()

        def fork_exec(*asked: Any) -> int:
            mine = threading.get_ident() == thread
            return self._helper.fork_exec(*asked) if mine else self._helper.start(*asked)

        with (
            self._lock,
            mock.patch.object(subprocess, "_fork_exec", fork_exec),
            mock.patch.object(_posixsubprocess, "fork_exec", fork_exec),
        ):
            yield

    def start(
        self, command: Sequence[str], timeout: float = MOST_S, **how: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of Python to its end. Return its output and exit code."""
        pipe = subprocess.PIPE
        how = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe, "text": True, **how}
        with self.popen(command, **how) as process:
            try:
                output, errors = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess([*command], process.returncode, output, errors)

    def run(
        self, function: str, *arguments: str, folder: Path = ROOT, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run "module:function" with the arguments in a fork. Return its output and exit code.

        `folder` is the working folder and the first one on the module path.
        """
        variables = {**os.environ, **self.environment, **environment}
        command = [sys.executable, "-c", CALL, function, *arguments]
        return self.start(command, cwd=folder, env=variables)


@functools.cache
def with_torch() -> Forks:
    """Return one helper for all tests whose forks import torch with no environment of their own.

    It ends with the process of the tests.
    """
    return Forks(*TORCH)


@functools.cache
def with_server_packages() -> Forks:
    """Return one helper for all tests whose forks are servers or commands of nanovllm."""
    return Forks(*SERVER)


def call() -> None:
    """Call the function that the first argument names, with the other arguments."""
    signal.alarm(MOST_S)
    function, *arguments = sys.argv[1:]
    sys.path[0] = os.getcwd()
    sys.argv[1:] = arguments
    module, name = function.split(":")
    code = getattr(import_module(module), name)(*arguments)
    sys.exit(code)


class Helper:
    """A connection to a helper, and the function that starts processes as usual."""

    def __init__(self, connection: socket.socket, environment: Mapping[str, str]) -> None:
        """`environment`: that of the helper when it imported the packages."""
        self._connection = connection
        self._imported_with = read_by_imports(environment)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self.start: ForkExec = _posixsubprocess.fork_exec

    def fork_exec(self, *asked: Any) -> int:
        """Start a process with the arguments of `_posixsubprocess.fork_exec`. Return its id."""
        arguments, _, _, passed, folder, variables, *pipes = asked[:12]
        _, _, _, is_leader, group, *_ = asked[12:20]
        environment = dict(os.environ) if variables is None else dict(map(as_pair, variables))
        words = [os.fsdecode(word) for word in arguments]
        changes = [one for one in asked[17:22] if one not in (None, -1)]
        if read_by_imports(environment) != self._imported_with or os.getpid() != self._owner:
            return self.start(*asked)
        if words[1:2] == ["-B"]:  # multiprocessing's flag for PYTHONDONTWRITEBYTECODE
            del words[1]
        if changes or not is_python(words):
            return self.start(*asked)
        targets = {0: pipes[0], 1: pipes[3], 2: pipes[5]}
        targets = {number: number if ours < 0 else ours for number, ours in targets.items()}
        targets |= {number: number for number in passed if not is_end_of_errors(number, asked)}
        targets = {number: ours for number, ours in targets.items() if is_open(ours)}
        task = {
            "words": words,
            "environment": environment,
            "folder": os.fsdecode(os.getcwd() if folder is None else folder),
            "targets": [*targets],
            "is_leader": bool(is_leader),
            "group": group,
            "ignored": [one for one in settable() if signal.getsignal(one) == signal.SIG_IGN],
            "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        }
        with self._lock, adopting_orphans():
            message = json.dumps(task).encode()
            socket.send_fds(self._connection, [message], [*targets.values()])
            pid = int(self._connection.recv(99))
            assert self._connection.recv(99) == b"adopted"
        return pid


def as_pair(variable: bytes) -> tuple[str, str]:
    name, _, value = os.fsdecode(variable).partition("=")
    return name, value


def read_by_imports(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_BY_IMPORTS)}


def is_python(words: list[str]) -> bool:
    """Return True for a module, a file or a line of Python, and a process of multiprocessing.

    Its resource tracker is left out: it imports little.
    """
    if words[0] != sys.executable or len(words) < 2:
        return False
    if words[1] == "-c":
        return words[2].startswith(SPAWNED) or "multiprocessing" not in words[2]
    return words[1] == "-m" or words[1].endswith(".py")


def is_end_of_errors(number: int, asked: Sequence[Any]) -> bool:
    """Return True for the pipe of an error of exec, which a fork does not have."""
    return number in asked[12:14]


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def settable() -> set[int]:
    """Return the signals of which a process may choose what they do, without real-time ones."""
    return {one for one in signal.valid_signals() if one < 32} - {signal.SIGKILL, signal.SIGSTOP}


def set_name(name: str) -> None:
    """Set the name of this process that `ps` shows."""
    Path("/proc/self/comm").write_text(name)


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Become the parent of descendants whose own parent ends in this block."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        prctl(SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# -- the helper and its forks ------------------------------------------------------------------


def main() -> None:
    set_name(HELPER)
    signal.pthread_sigmask(signal.SIG_SETMASK, settable())
    for package in sys.argv[2:]:
        import_module(package)
    assert not [name for name in sys.modules if name.startswith("nanovllm")]
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))


def serve(connection: socket.socket) -> NoReturn:
    """Fork for each task until the process at the other end has ended."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, MOST_DESCRIPTORS)
        if not message:
            os._exit(0)
        if not (between := os.fork()):
            if pid := os.fork():
                connection.send(str(pid).encode())
                os._exit(0)
            run(json.loads(message), descriptors, connection)
        os.waitpid(between, 0)
        for number in descriptors:
            os.close(number)
        connection.send(b"adopted")


def run(task: dict[str, Any], descriptors: list[int], connection: socket.socket) -> NoReturn:
    """Become the process of a task."""
    connection.close()
    if task["is_leader"]:
        os.setsid()
    elif task["group"] >= 0:
        os.setpgid(0, task["group"])
    helper = start_helper(descriptors)
    set_name("python")
    os.chdir(task["folder"])
    follow_path(os.environ.get("PYTHONPATH"), task["environment"].get("PYTHONPATH"))
    os.environ.clear()
    os.environ.update(task["environment"])
    tempfile.tempdir = None  # the folder may have been read from the environment
    take(descriptors, task["targets"], helper)
    open_streams()
    if "PYTHONFAULTHANDLER" in os.environ:
        faulthandler.enable()
    ignored = {*task["ignored"], signal.SIGPIPE, signal.SIGXFSZ}  # the latter by Python itself
    for number in settable():
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, task["blocked"])
    execute(task["words"][1:])


def follow_path(old: str | None, new: str | None) -> None:
    """Replace the entries of one PYTHONPATH by those of another."""
    before, after = (
        [os.path.abspath(one) for one in (each or "").split(os.pathsep) if one]
        for each in (old, new)
    )
    others = [one for one in sys.path[1:] if one not in {*before, *after}]
    at = min((sys.path.index(one) for one in before if one in sys.path), default=1)
    sys.path[1:] = [*others[: at - 1], *after, *others[at - 1 :]]


def start_helper(descriptors: list[int]) -> int:
    """Start the helper of this process. Return the descriptor of its connection."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        for number in descriptors:
            os.close(number)
        serve(theirs)
    theirs.close()
    return ours.detach()


def take(descriptors: list[int], targets: list[int], helper: int) -> None:
    """Give descriptors their numbers, and make Python's starts of processes forks of the helper."""
    beyond = max([*targets, *descriptors, helper]) + 1
    high = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, beyond) for one in (*descriptors, helper)]
    for number in {0, 1, 2, helper, *descriptors}:
        os.close(number)
    for number, target in zip(high, targets, strict=False):
        os.dup2(number, target)
        os.close(number)
    fork_exec = Helper(socket.socket(fileno=high[-1]), os.environ).fork_exec
    for module, name in ((subprocess, "_fork_exec"), (_posixsubprocess, "fork_exec")):
        setattr(module, name, fork_exec)


def open_streams() -> None:
    """Open Python's standard streams, or None for each descriptor that is closed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = None
        if is_open(number):
            errors = "backslashreplace" if number == 2 else "strict"
            stream = open(number, "w" if number else "r", errors=errors, closefd=False)  # noqa: SIM115
            if number == 2 or stream.isatty() or os.environ.get("PYTHONUNBUFFERED"):
                stream.reconfigure(line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def execute(words: list[str]) -> NoReturn:
    """Run a command as Python does. End the process without cleaning up imported modules."""
    code: object = None
    try:
        interpret(words)
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:
        code = -signal.SIGINT
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        if code is not None and not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except BaseException:
        traceback.print_exc()
        os._exit(120)
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)  # type: ignore[operator]


def interpret(words: list[str]) -> None:
    kind, *rest = words
    if kind == "-m":
        sys.argv = [kind, *rest[1:]]
        sys.path[0] = os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = [kind, *rest[1:]]
        sys.path[0] = ""
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.argv = [kind, *rest]
        sys.path[0] = os.path.dirname(os.path.abspath(kind))
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    main()
