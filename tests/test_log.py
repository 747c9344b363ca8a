"""Log lines never block: they are queued up to a limit, and lost lines are counted."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanovllm.log import JsonLine, Progress, QueuedLines, TextLine, fields

ROOT = Path(__file__).parents[1]


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    logger = logging.getLogger("of-this-test")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    yield logger
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


def written_to(log: logging.Logger, fd: int, form: logging.Formatter, **how: int) -> QueuedLines:
    handler = QueuedLines(fd, **how)
    handler.setFormatter(form)
    log.addHandler(handler)
    return handler


def test_nobody_waits_for_a_reader_and_what_was_lost_is_counted(log: logging.Logger) -> None:
    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)
    handler = written_to(log, writes, logging.Formatter("%(message)s"), most_lines=50)
    begin = time.monotonic()
    for number in range(1000):
        log.info("line %04d %s", number, "x" * 89)  # 100 bytes; 40 lines fill the pipe
    assert time.monotonic() - begin < 20
    lines: list[str] = []
    with os.fdopen(reads) as file:
        reader = threading.Thread(target=lambda: lines.extend(iter(file.readline, "end\n")))
        reader.start()
        handler.flush()
        log.info("after the flood")
        log.info("end")
        reader.join(10)
        handler.flush()
        os.close(writes)
    numbers = [int(line[5:9]) for line in lines if line.startswith("line")]
    assert 50 <= len(numbers) < 1000 and numbers == sorted(numbers) and numbers[0] == 0
    missing = re.findall(r"^(\d+) lines of this log are missing here", "".join(lines), re.MULTILINE)
    assert sum(map(int, missing)) == 1000 - len(numbers)
    assert lines[-1] == "after the flood\n" and "missing" in lines[-2]


def test_a_reader_that_has_gone_is_no_error(log: logging.Logger) -> None:
    reads, writes = os.pipe()
    handler = written_to(log, writes, logging.Formatter("%(message)s"))
    os.close(reads)
    for _ in range(3):
        log.info("into the void")
        handler.flush()
    os.close(writes)
    log.info("the descriptor may be another's by now")
    handler.flush()


def test_lines_that_a_full_disk_refused_are_counted(log: logging.Logger, tmp_path: Path) -> None:
    place = os.open("/dev/full", os.O_WRONLY)
    handler = written_to(log, place, logging.Formatter("%(message)s"))
    for _ in range(3):
        log.info("no room")
    handler.flush()
    path = tmp_path / "log"
    with path.open("w") as file:
        os.dup2(file.fileno(), place)  # there is room again
        log.info("room")
        handler.flush()
    os.close(place)
    assert (
        path.read_text()
        == "3 lines of this log are missing here: stdout did not accept them\nroom\n"
    )


def test_a_line_whose_arguments_do_not_fit_is_the_only_one_lost(log, capsys) -> None:
    reads, writes = os.pipe()
    handler = written_to(log, writes, logging.Formatter("%(message)s"))
    for message, arguments in (("%d", ("no number",)), ("\udcff fine", ())):
        record = logging.LogRecord("x", logging.INFO, "", 0, message, arguments, None)
        handler.handle(record)  # not through the logger, which pytest captures
    handler.flush()
    assert os.read(reads, 100) == b"\\udcff fine\n"
    os.close(reads)
    os.close(writes)
    capsys.readouterr()


def test_text_and_json_of_one_event() -> None:
    record = logging.LogRecord(
        "server", logging.INFO, "", 0, "request %s", (fields(id="a-1", ttft=0.25, gone=None),), None
    )
    record.created, record.msecs = 1_700_000_000.125, 125.0
    text = TextLine().format(record)
    assert re.fullmatch(
        r"2023-11-1\dT\d\d:\d\d:20\.125 info server request id=a-1 ttft=0\.250", text
    )
    assert json.loads(JsonLine().format(record)) == {
        "time": "2023-11-14T22:13:20.125+00:00",
        "level": "info",
        "logger": "server",
        "message": "request id=a-1 ttft=0.250",
        "id": "a-1",
        "ttft": 0.25,
    }
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record.exc_info = sys.exc_info()
    line = JsonLine().format(record)
    assert "\n" not in line
    assert json.loads(line)["exception"].endswith("ValueError: two\nlines")


def test_progress_says_gigabytes_and_percent(log: logging.Logger, monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    progress = Progress(log, "loading x", 16e9, "GB")
    for _ in range(16):
        now[0] += 0.5
        progress.advance(1e9)
    progress.finish()
    assert said == [
        "loading x: 16.00 GB",
        "loading x: 4.00 of 16.00 GB, 25 %",
        "loading x: 8.00 of 16.00 GB, 50 %",
        "loading x: 12.00 of 16.00 GB, 75 %",
        "loading x: done in 8.0 s",
    ]


def test_a_level_that_there_is_not_is_one_line() -> None:
    command = [sys.executable, "-m", "nanovllm", "serve", "--port", "0"]
    run = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "NANOVLLM_LOG": "foo"}, cwd=ROOT
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        "error: NANOVLLM_LOG is 'foo'; it must be one of debug, info, warning, error, critical\n"
    )
