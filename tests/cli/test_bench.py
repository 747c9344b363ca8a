"""`nanovllm bench` with a server of predefined behaviour: sweeps and refusals."""

from __future__ import annotations

import contextlib
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from nanovllm import launch
from nanovllm.bench import offline, online, store
from nanovllm.cli import bench as command
from nanovllm.config import ConfigError
from nanovllm.ipc.client import EngineClient, EngineLostError
from nanovllm.wire import Generate
from tests.bench.test_online import FAKE, RECIPE, PaperEngine, fake_chat, free_port

SHORT = ["--num-prompts", "4", "--warmup", "0", "--input-len", "31", "--output-len", "4"]


def test_a_sweep_writes_a_record_per_concurrency_and_one_plot(tmp_path: Path) -> None:
    with fake_chat() as url:
        arguments = ["--url", url, "--sweep", "1,4", *SHORT, "--results-dir", str(tmp_path)]
        done = CliRunner().invoke(command.bench, arguments)
    assert done.exit_code == 0, done.output
    found = store.records(tmp_path)
    assert [one.workload["name"] for one in found] == ["c1", "c4"]
    assert [one.metrics["output_tokens"] for one in found] == [16.0, 16.0]
    # Four streams are about four times as fast as one. The bound allows for a busy host.
    rates = [one.metrics["output_tokens_per_s"] for one in found]
    assert rates[1] > 1.8 * rates[0]
    (plot,) = tmp_path.rglob("*.svg")
    assert plot.name.endswith("_fake_sweep_unknown.svg") and f"plot: {plot}" in done.output
    assert plot.parent == store.files(tmp_path)[0].parent
    labels = [node.text for node in ET.parse(plot).iter("{http://www.w3.org/2000/svg}text")]
    assert labels.count("1") >= 2 and labels.count("4") >= 2  # a point in each panel
    assert "\n     1  " in done.output and "\n     4  " in done.output
    (again,) = re.findall(r"^this table again: nanovllm bench (.+)$", done.output, re.MULTILINE)
    assert again.endswith(f" --results-dir {tmp_path}")
    two = CliRunner().invoke(command.bench, again.split())
    assert two.exit_code == 0 and "workload.concurrency: 1 -> 4" in two.output


def test_a_sweep_starts_its_server_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port, starts = free_port(), []

    def serve(recipe: str | None, changed: dict[str, object]) -> list[str]:
        starts.append(changed.get("schedule.depth"))
        return [sys.executable, str(FAKE), str(port)]

    monkeypatch.setattr(command, "serve_command", serve)
    plot = tmp_path / "out.svg"
    arguments = ["--start", "--set", f"server.port={port}", "--set", "server.served_name=fake"]
    arguments += ["--sweep", "1,2", "--ablate", "schedule.depth=0", "--plot", str(plot), *SHORT]
    done = CliRunner().invoke(command.bench, [*arguments, "--results-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert starts == [None, 0]
    found = store.records(tmp_path)
    assert len(found) == 4
    assert all(0 < one.metrics["start_to_ready_s"] < 30 for one in found)
    head, _, tail = done.output.partition("\nthis table again: ")
    assert len(tail.split()) == 3 + 4 + 2 + 2  # the command, four ids, the folder, the plot
    rows = [row.split() for row in head.splitlines()[-4:]]
    assert [(row[0], row[-1]) for row in rows] == [
        ("1", "unchanged"), ("1", "schedule.depth=0"), ("2", "unchanged"), ("2", "schedule.depth=0")
    ]  # fmt: skip
    words = [node.text for node in ET.parse(plot).iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("unchanged") == words.count("schedule.depth=0") == 1


@pytest.mark.parametrize("wrong", [["--goodput", "itl:3"], ["--sweep", "1,x"]])
def test_a_wrong_load_is_refused_before_a_server_starts(
    wrong: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def server_of(*_: object) -> None:
        raise AssertionError("starts a server")

    monkeypatch.setattr(command, "server_of", server_of)
    error = CliRunner().invoke(command.bench, ["--start", *wrong]).exception
    assert isinstance(error, ConfigError) and str(error).startswith(f"{wrong[0]} {wrong[1]}: write")


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("taken", "File exists"),
        ("taken/results", "Not a directory"),
        ("n" * 256, "File name too long"),
        ("/proc", "No such file or directory"),  # a folder in which even root writes no file
        ("/proc/results", "No such file or directory"),
    ],
    ids=["file", "below a file", "long", "unwritable", "below an unwritable one"],
)
def test_records_that_could_not_be_written_are_refused_at_once(
    folder: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object) -> None:
        raise AssertionError("a run starts")

    monkeypatch.setattr(command, "run", run)
    (tmp_path / "taken").write_text("")
    path = tmp_path / folder
    error = CliRunner().invoke(command.bench, ["--offline", "--results-dir", str(path)]).exception
    assert isinstance(error, ConfigError)
    assert str(error) == f"--results-dir {path}: no record can be written there ({reason})"


def test_records_are_compared_in_a_folder_that_is_not_writable() -> None:
    arguments = ["--compare", "3f2a9c1b", "77d0e4a2", "--results-dir", "/proc"]
    error = CliRunner().invoke(command.bench, arguments).exception
    assert isinstance(error, ConfigError) and str(error).startswith("no record 3f2a9c1b in /proc;")


def test_a_key_may_have_any_letters() -> None:
    api = online._Api("http://127.0.0.1:1", "cl\u00e9")
    assert api.http.build_request("GET", "/").headers.raw[-1] == (
        b"Authorization", b"Bearer cl\xc3\xa9"
    )  # fmt: skip


def test_the_experts_of_all_engines_are_placed(tmp_path: Path) -> None:
    path = tmp_path / "load"
    with fake_chat() as url:
        given = ["--url", url, "--num-prompts", "1", "--warmup", "0", "--input-len", "31"]
        given += ["--output-len", "4", "--results-dir", str(tmp_path), "--expert-load", str(path)]
        given += ["--expert-ranks", "2", "--expert-copies", "0"]
        done = CliRunner().invoke(command.bench, given)
    assert done.exit_code == 0, done.output
    assert path.read_text() == '{"layer":3,"tokens":[9,2,3,4],"ranks":[[0,1],[2,3]]}\n'


class Stuck(PaperEngine):
    """Engine that answers the first load and its warm-up only, or then raises EngineLostError."""

    def __init__(self, is_gone: bool) -> None:
        super().__init__()
        self.is_gone = is_gone

    def submit(self, request: Generate, sink: offline.Stopwatch, stream: offline.Stopwatch) -> None:
        if len(self.requests) < 2:
            super().submit(request, sink, stream)
        elif self.is_gone:
            raise EngineLostError


@pytest.mark.parametrize("is_gone", [False, True])
def test_nobody_waits_for_an_engine_that_lost_a_rank(
    is_gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may wait for the lost rank, or its connection may end before its process."""
    why = "nanovllm-rank1 has been silent for 3 s"
    ticks = iter(range(1000))

    def lost(restarts: bool) -> str:
        assert not restarts
        return why if next(ticks) >= 5 else ""

    @contextlib.contextmanager
    def engine_processes(config: object) -> Iterator[tuple[list[str], SimpleNamespace]]:
        yield ["engine.sock"], SimpleNamespace(children=[], lost=lost)

    async def connect(path: str) -> Stuck:
        return Stuck(is_gone)

    monkeypatch.setattr(launch, "engine_processes", engine_processes)
    monkeypatch.setattr(EngineClient, "connect", connect)
    monkeypatch.setattr(offline, "STATS_S", 0.0)
    arguments = ["--offline", RECIPE, "--workload", "bs1,bs1-256", "--load-format", "dummy"]
    done = CliRunner().invoke(command.bench, [*arguments, "--results-dir", str(tmp_path)])
    assert done.exit_code == 1
    assert done.output.splitlines()[-1] == f"error: {why}"
    (made,) = store.records(tmp_path)  # of the first load
    assert made.metrics["output_tokens"] == 512.0
