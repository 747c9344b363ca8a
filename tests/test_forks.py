"""Forks of a helper: what a command of Python sees and returns is that of a usual start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forks import HELPER, with_server_packages

LOOKS = """
import json, multiprocessing, os, signal, subprocess, sys, tempfile
numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD
link = {number: os.readlink(f"/proc/self/fd/{number}") for number in map(int, sys.argv[2:])}
print(json.dumps({
    "arguments": sys.argv, "main": __name__, "folder": os.getcwd(),
    "path": [sys.path[0], *sorted(sys.path[1:])],
    "environment": dict(os.environ), "temporary": tempfile.gettempdir(), "links": link,
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "handlers": [str(signal.getsignal(number)) for number in numbers],
    "streams": [sys.stdin.read(), sys.stdout.isatty(), sys.stderr.errors],
    "parent": os.getppid(), "leads": os.getsid(0) == os.getpid(),
}))
print("last words", file=sys.stderr)
"""


@pytest.mark.parametrize("is_leader", [False, True])
@pytest.mark.parametrize("kind", ["-c", "file", "-m"])
def test_a_fork_sees_what_a_started_process_sees(
    kind: str, is_leader: bool, tmp_path: Path
) -> None:
    """Descriptors, environment, folders, signals, streams, parent and session."""
    (tmp_path / "looks.py").write_text(LOOKS)
    begin = {"-c": ["-c", LOOKS], "file": ["looks.py"], "-m": ["-m", "looks"]}[kind]
    with open(tmp_path / "passed", "w") as passed:
        number = passed.fileno()
        command = [sys.executable, *begin, "a b", str(number)]
        how: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, "TMPDIR": str(tmp_path)}}
        how |= {"pass_fds": [number], "start_new_session": is_leader, "text": True}
        how |= dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        try:
            seen = [
                (*popen(command, **how).communicate("input"),)
                for popen in (subprocess.Popen, with_server_packages().popen)
            ]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)
    (usual, errors), (fork, fork_errors) = ((json.loads(out), said) for out, said in seen)
    usual["arguments"][0] = fork["arguments"][0] = ""
    assert fork == usual and fork["parent"] == os.getpid() and fork["leads"] == is_leader
    assert fork["links"] == {str(number): str(tmp_path / "passed")}
    assert fork_errors == errors == "last words\n"


@pytest.mark.parametrize(
    ("code", "status", "output", "errors"),
    [
        ("print(1)", 0, "1\n", ""),
        ("import sys; sys.exit(3)", 3, "", ""),
        ("import sys; sys.exit('why')", 1, "", "why\n"),
        ("import atexit; atexit.register(print, 'end')", 0, "end\n", ""),
        ("import threading; threading.Timer(0.1, print, '2').start()", 0, "2\n", ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, "", ""),
    ],
)
def test_the_end_of_a_fork(code: str, status: int, output: str, errors: str) -> None:
    done = with_server_packages().start([sys.executable, "-c", code])
    assert (done.returncode, done.stdout, done.stderr) == (status, output, errors)


def test_an_exception_is_printed() -> None:
    done = with_server_packages().start([sys.executable, "-c", "1 / 0"])
    assert done.returncode == 1 and done.stderr.endswith("\nZeroDivisionError: division by zero\n")


CHILDREN = """
import multiprocessing, os, subprocess, sys
from pathlib import Path

def child(pipe):
    pipe.send(["torch" in sys.modules, os.getppid() == int(sys.argv[-1])])

if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    sys.argv.append(str(os.getpid()))
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=child, args=(theirs,))
    process.start()
    print(*ours.recv())
    process.join()
    print(process.exitcode)
    again = [sys.executable, "-c", "import os, sys; sys.exit('torch' in sys.modules)"]
    print(subprocess.run(again, env={}).returncode, subprocess.run(again).returncode)
    names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in
             Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    print(*sorted(names))
"""


def test_processes_that_a_fork_starts_are_forks_and_its_children(tmp_path: Path) -> None:
    """With another environment of imports a process starts as usual, without torch."""
    (tmp_path / "children.py").write_text(CHILDREN)
    done = with_server_packages().start([sys.executable, str(tmp_path / "children.py")])
    assert done.stderr == "" and done.returncode == 0
    assert done.stdout.splitlines()[:3] == ["True True", "0", "0 1"]
    assert done.stdout.split()[5:].count(HELPER) == 1
