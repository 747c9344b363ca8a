"""A killed supervisor: its processes end too, and leave nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.demo_server import has_left, start
from tests.end_to_end.test_operation import FAST, ROOT, SERVE, ask
from tests.server.serving import eventually

# The first grammar may take long on a busy machine.
DEMO = ("--set", "cache.cpu_gib=0.1", "--set", "structured_outputs.compile_s=100")


def descendants(pid: int) -> list[int]:
    found = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [below for one in found for below in descendants(one)]


@pytest.mark.parametrize(
    "arguments",
    [
        DEMO,
        (*FAST, "--set", "server.workers=3"),
        (*DEMO, "--device", "cpu", "--tp", "2"),
        (*FAST, "--dp", "2"),
    ],
)
def test_a_killed_supervisor_leaves_nothing(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process, no folder and no named memory remains."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server = start(*arguments)
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}
    if "paper" not in arguments:
        reply = ask(server.url, response_format=schema)  # started the subprocess for trials
        assert reply.status_code == 200, reply.text
    large = [{"role": "user", "content": "hello"}] * 300  # and the one for large bodies
    assert ask(server.url, messages=large).status_code in (200, 400)
    before = descendants(server.process.pid)
    assert len(before) >= 3 and len(os.listdir(tmp_path)) == 1
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in before]
    assert all("/lib" in one and "/dev/shm/" not in one for one in maps)  # so none can remain
    server.process.kill()
    server.process.wait()
    eventually(lambda: all(map(has_left, before)), 15)
    assert os.listdir(tmp_path) == []
    assert str(tmp_path) not in Path("/proc/net/unix").read_text()


def test_a_supervisor_that_is_killed_while_starting_leaves_nothing(tmp_path: Path) -> None:
    """The supervisor is killed before the engine has run our code, while the API process starts."""
    process = subprocess.Popen(
        [*SERVE, *FAST, "--port", "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    eventually(lambda: len(descendants(process.pid)) == 3, 30)  # one is multiprocessing's own
    before = descendants(process.pid)
    process.kill()
    process.communicate()
    eventually(lambda: all(map(has_left, before)), 15)
    assert os.listdir(tmp_path) == []
