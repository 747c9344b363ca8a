"""`nanovllm serve --tp 2` on a CPU: the text of one process, and shutdown."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from nanovllm.config import DEMO, ConfigError
from nanovllm.launch import EngineDied, wait_ready
from nanovllm.watch import LOST_S, cpu_ticks
from tests.end_to_end.demo_server import Server, asked, command_of, has_left, start
from tests.forks import with_server_packages
from tests.server.serving import eventually

ASKED = asked("What is nanovllm?", temperature=0, max_tokens=40)
SEEDED = asked("Tell me about pages.", temperature=0.8, seed=5, max_tokens=40)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
FORMED = asked("Name a city.", temperature=0, max_tokens=30, response_format=SCHEMA)
CPU = ("--device", "cpu", "--set", "cache.cpu_gib=0.2")


def text_of(server: Server) -> list[str | None]:
    client = server.client()
    answers = [client.chat.completions.create(**one) for one in (ASKED, SEEDED, FORMED)]
    return [answer.choices[0].message.content for answer in answers]


def pid_of(server: Server, name: str) -> int:
    names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in server.children()}
    return next(pid for pid, each in names.items() if each == name)


def all_leave(children: dict[int, str]) -> None:
    eventually(lambda: all(map(has_left, children)), 20)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Server]:
    server = start(*CPU, "--tp", "2")
    children = server.children()
    yield server
    assert server.stop() == 0
    all_leave(children)


def test_two_ranks_serve_what_one_does(two_ranks: Server, server: Server) -> None:
    expected = text_of(server)
    assert text_of(two_ranks) == expected and all(expected)
    rank = pid_of(two_ranks, "nanovllm-rank1")
    used = cpu_ticks(rank)
    time.sleep(1)
    assert cpu_ticks(rank) - used <= 2  # an idle engine does not spin


def test_a_machine_that_slept_has_lost_no_rank(two_ranks: Server) -> None:
    """Pausing all processes, or only the supervisor, beyond the rank timeout loses no rank."""
    supervisor = two_ranks.process.pid
    for pids in ([*two_ranks.children(), supervisor], [supervisor]):
        for number, pause_s in ((signal.SIGSTOP, LOST_S + 0.6), (signal.SIGCONT, 0.6)):
            for pid in pids:
                os.kill(pid, number)
            time.sleep(pause_s)
    with two_ranks.client() as client:
        assert client.chat.completions.create(**ASKED).choices[0].message.content


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which a server creates its own, for its socket."""
    path = tmp_path_factory.mktemp("tmp")
    monkeypatch.setenv("TMPDIR", str(path))
    return path


class Lossy:
    """A server that loses a rank, and must then exit soon without leaving anything."""

    def __init__(self, tp: int, folder: Path) -> None:
        self.folder = folder
        arguments = *CPU, "--tp", str(tp), "--set", "server.shutdown_s=60"
        self.server = start(*arguments, constants={"nanovllm.launch.LAST_WORDS_S": 1.0})
        self.children = self.server.children()
        assert len(os.listdir(folder)) == 1
        assert str(folder) in Path("/proc/net/unix").read_text()
        for pid in self.children:  # other programs' memory may come and go there
            assert "/dev/shm/" not in Path(f"/proc/{pid}/maps").read_text()

    def stream(self) -> openai.Stream[ChatCompletionChunk]:
        return self.server.client().chat.completions.create(
            **asked("Count.", temperature=0, max_tokens=2000, stream=True),
            extra_body={"ignore_eos": True},
        )

    def lose(self, name: str, number: int) -> None:
        os.kill(pid_of(self.server, name), number)
        self.lost = time.monotonic()

    def assert_gone(self) -> None:
        assert self.server.process.wait(25 - (time.monotonic() - self.lost)) == 1
        all_leave(self.children)
        assert os.listdir(self.folder) == []
        assert str(self.folder) not in Path("/proc/net/unix").read_text()


@pytest.mark.parametrize(
    ("tp", "name", "number"),
    [
        (2, "nanovllm-engine", signal.SIGSTOP),
        (2, "nanovllm-rank1", signal.SIGKILL),
        (4, "nanovllm-rank3", signal.SIGSTOP),
    ],
)
def test_a_lost_rank_ends_streams_and_server(tp: int, name: str, number: int, folder: Path) -> None:
    lossy = Lossy(tp, folder)
    with lossy.stream(), lossy.stream() as stream:  # the first one is not read
        with pytest.raises(openai.APIError):
            for at, _ in enumerate(stream):
                if at == 3:
                    lossy.lose(name, number)
        assert time.monotonic() - lossy.lost < 20
        lossy.assert_gone()


@pytest.mark.parametrize(
    ("name", "number"), [("nanovllm-engine", signal.SIGKILL), ("nanovllm-rank1", signal.SIGSTOP)]
)
def test_a_lost_rank_of_an_idle_server_ends_it(name: str, number: int, folder: Path) -> None:
    lossy = Lossy(2, folder)
    lossy.lose(name, number)
    lossy.assert_gone()


def test_a_rank_that_is_lost_while_requests_finish_ends_them(folder: Path) -> None:
    lossy = Lossy(2, folder)
    with lossy.stream() as stream, pytest.raises(openai.APIError):
        for at, _ in enumerate(stream):
            if at == 3:
                lossy.server.process.terminate()
            if at == 6:
                lossy.lose("nanovllm-rank1", signal.SIGSTOP)
    assert time.monotonic() - lossy.lost < 20
    lossy.assert_gone()


@pytest.mark.parametrize(
    ("tp", "name"), [(2, "nanovllm-rank1"), (2, "nanovllm-engine"), (1, "nanovllm-engine")]
)
def test_a_hung_process_beside_a_sigterm_is_no_clean_end(tp: int, name: str, folder: Path) -> None:
    """A rank that hangs at SIGTERM, with no request open and before the timeout, is an error."""
    lossy = Lossy(tp, folder)
    lossy.lose(name, signal.SIGSTOP)
    lossy.server.process.terminate()
    lossy.assert_gone()
    said = re.compile(rf"error serve .*{name}.* failed to shut down cleanly\n")
    eventually(lambda: bool(said.search(lossy.server.lines[-1])), 5)


def refused(*arguments: str) -> tuple[str, str]:
    """Return the one line of a failed start, and the log before it."""
    run = with_server_packages().start(command_of(*arguments), timeout=60)
    assert run.returncode == 2, run.stdout + run.stderr
    (line,) = run.stderr.splitlines()
    return line, run.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--tp", "3", "--device", "cpu"),
            "parallel.tp is 3; the model's num_attention_heads 8 is not a multiple of it; "
            "it can be 1, 2, 4, 8",
        ),
        (
            ("--tp", "16", "--dp", "2", "--device", "cpu"),
            "parallel.tp is 16; the model's num_attention_heads 8 is not a multiple of it; "
            "it can be 1, 2, 4, 8",
        ),
        (("--tp", "2", "--device", "cpu", "--set", "kernels.sample=triton"), "kernels.sample is"),
    ],
)
def test_what_cannot_be_served_is_one_line(arguments: tuple[str, ...], said: str) -> None:
    """Settings fail before loading; errors in config.json fail before any process starts."""
    line, logged = refused(*arguments)
    assert line.startswith(f"error: {said}"), line
    assert "loading" not in logged
    assert ("importing torch" in logged) == ("kernels.sample" in said)


def test_a_checkpoint_that_ends_early_is_one_line(tmp_path: Path) -> None:
    """The rank that finds it first reports the file."""
    for file in DEMO.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4096])
    line, logged = refused(str(tmp_path), "--tp", "2", "--device", "cpu")
    expected = (
        rf"error: (rank 1: )?{re.escape(str(weights))} is not a complete safetensors file: .*"
    )
    assert re.fullmatch(expected, line), line
    assert "Traceback" not in logged


def popen(command: list[str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return with_server_packages().popen(command, stdout=pipe, stderr=pipe, text=True)


def test_a_rank_that_ends_while_loading_is_one_line_though_another_hangs(folder: Path) -> None:
    """Rank 0 is stopped, as if it hung in a collective."""
    command = command_of(*CPU, "--tp", "2")
    process = popen(command)
    server = Server(process, "")
    names = ("nanovllm-engine", "nanovllm-rank1")

    def have_names() -> bool:
        """Return True if the processes have names. From then on they exit with their supervisor."""
        pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return {*names} <= {Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids}

    eventually(have_names, 20)
    children = server.children()
    for name, number in zip(names, (signal.SIGSTOP, signal.SIGKILL), strict=True):
        os.kill(pid_of(server, name), number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors == "error: nanovllm-rank1 ended by SIGKILL (9); out of memory?\n"
    assert "is served at" not in output
    all_leave(children)
    assert os.listdir(folder) == []


def test_a_rank_that_stops_while_loading_ends_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes STOPPED_S for turns, and some seconds to end the other processes."""
    command = command_of(*CPU, "--tp", "2", constants={"nanovllm.watch.STOPPED_S": 8.0})
    process = popen(command)
    server = Server(process, "")

    def has_name() -> bool:
        pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return "nanovllm-rank1" in {Path(f"/proc/{p}/comm").read_text().strip() for p in pids}

    eventually(has_name, 30)
    children = server.children()
    os.kill(pid_of(server, "nanovllm-rank1"), signal.SIGSTOP)
    output, errors = process.communicate(timeout=90)
    assert process.returncode == 1
    assert errors == "error: nanovllm-rank1 stopped while loading: silent for 8 s\n"
    assert "is served at" not in output and "failed to shut down cleanly" not in output
    all_leave(children)
    assert os.listdir(folder) == []


def test_a_rank_that_was_ready_and_died_is_not_waited_for() -> None:
    """Rank 0 is still loading, and would wait for the other forever."""
    (loading, theirs), (was_ready, own) = Pipe(), Pipe()
    rank0: Any = SimpleNamespace(name="nanovllm-engine", exitcode=None)
    rank1: Any = SimpleNamespace(name="nanovllm-rank1", exitcode=-9)
    own.send("ready")
    with pytest.raises(EngineDied, match=r"^nanovllm-rank1 ended by SIGKILL"):
        wait_ready([(rank0, loading), (rank1, was_ready)])
    theirs.close()


def test_the_reason_comes_before_who_missed_its_rank() -> None:
    children, ends = [], []
    for name in ("nanovllm-engine", "nanovllm-rank1"):
        ours, theirs = Pipe()
        process: Any = SimpleNamespace(name=name, exitcode=1, join=lambda: None)
        children.append((process, ours))
        ends.append(theirs)
    ends[1].send("rank 1: its disk is full")
    for end in ends:
        end.close()
    with pytest.raises(ConfigError) as caught:
        wait_ready(children)
    assert str(caught.value) == "rank 1: its disk is full"
    with pytest.raises(EngineDied, match="nanovllm-engine ended with exit code 1"):
        wait_ready(children[:1])
