"""Commands of Python in a script of a shell that are forks (`tests.forks`).

The shell finds small programs with the names of the commands. Each sends its arguments, environment
and standard streams to the process of the tests, which starts the command as a fork of its helper.
It passes signals on, and it ends with the exit code of the fork. Commands that name the path of
Python start as usual, unless a fork starts them.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.forks import MOST_BYTES, with_server_packages

POLL_S = 0.02
BEGINS = {"python": [], "python3": [], "nanovllm": ["-m", "nanovllm"]}
PROGRAM = """#!{python} -IS
import os, signal, socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect({address!r})
environment = [f"{{name}}={{value}}" for name, value in os.environ.items()]
words = [os.getcwd(), *environment, "", *{begin!r}, *sys.argv[1:]]
socket.send_fds(connection, ["\\0".join(words).encode()], [0, 1, 2])
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: connection.send(str(int(number)).encode()))
sys.exit(int(connection.recv(99) or b"1"))
"""


@contextmanager
def forked_commands(folder: Path) -> Iterator[str]:
    """Yield a folder for PATH in which `python`, `python3` and `nanovllm` start forks."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    address = str(folder / "commands.sock")
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as listener:
        listener.bind(address)
        listener.listen()
        for name, begin in BEGINS.items():
            code = PROGRAM.format(python=sys.executable, address=address, begin=begin)
            (programs / name).write_text(code)
            (programs / name).chmod(0o755)
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        try:
            yield str(programs)
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # ends the thread
            os.unlink(address)


def accept(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=run, args=(connection,), daemon=True).start()


def run(connection: socket.socket) -> None:
    """Run a command and send its exit code. Terminate it if the program has been killed."""
    with connection:
        message, streams, _, _ = socket.recv_fds(connection, MOST_BYTES, 3)
        folder, *words = message.decode().split("\0")
        end = words.index("")
        environment = dict(word.split("=", 1) for word in words[:end])
        names = ("stdin", "stdout", "stderr")
        process = with_server_packages().popen(
            [sys.executable, *words[end + 1 :]],
            cwd=folder,
            env=environment,
            **dict(zip(names, streams, strict=True)),
        )
        for stream in streams:
            os.close(stream)
        while process.poll() is None:
            if select.select([connection], [], [], POLL_S)[0]:
                if not (number := connection.recv(99)):
                    process.terminate()
                    process.wait()
                    return
                process.send_signal(int(number))
        connection.send(str(process.returncode & 0xFF).encode())
