"""`nanovllm serve` in operation: signals, crashes, readers of its log, full disks."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from nanovllm import children, launch
from nanovllm.bench import online
from nanovllm.bench.workload import Workload
from nanovllm.config import ConfigError, load_config
from nanovllm.server.main import MOST_FILES
from tests.bench.test_online import free_port, no_bar
from tests.end_to_end.demo_server import Server, has_left, start
from tests.forks import with_server_packages
from tests.server.serving import eventually

ROOT = Path(__file__).parents[2]
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
FAST = ("paper", "--set", "paper.tokens_per_s=1000", "--set", "schedule.slots=8")
SLOW = ("paper", "--set", "paper.tokens_per_s=2", "--set", "server.shutdown_s=60")
SERVE = [sys.executable, "-m", "nanovllm", "serve"]


def take_hangups() -> None:
    """Do not ignore SIGHUP in a new process, even if the tests run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextmanager
def served(port: int, *arguments: str, **how: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a server whose output is not read. It ends with the block."""
    command = [*SERVE, "--port", str(port), *FAST, *arguments]
    process = with_server_packages().popen(command, cwd=ROOT, **how)
    try:
        eventually(lambda: answers(port), 60)
        yield process
    finally:
        process.kill()
        process.wait()


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.HTTPError:
        return False


def ask(url: str, **more: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json=BODY | more, timeout=30)


def all_leave(server: Server, before: dict[int, str]) -> None:
    eventually(lambda: all(map(has_left, before)), 15)


# -- readers of the log ------------------------------------------------------------------------


@contextmanager
def unread() -> Iterator[dict[str, Any]]:
    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)  # filled by the first requests
    yield {"stdout": writes, "stderr": writes}
    os.close(reads)
    os.close(writes)


@contextmanager
def left_after_a_line() -> Iterator[dict[str, Any]]:
    with subprocess.Popen(["head", "-1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as head:
        yield {"stdout": head.stdin, "stderr": head.stdin}
        assert head.stdout is not None and b"starting demo" in head.stdout.read()


@contextmanager
def closed() -> Iterator[dict[str, Any]]:
    yield {"preexec_fn": lambda: os.close(1)}


@contextmanager
def full() -> Iterator[dict[str, Any]]:
    with open("/dev/full", "w") as file:
        yield {"stdout": file}


@pytest.mark.parametrize("stdout", [unread, left_after_a_line, closed, full])
def test_requests_are_served_whatever_becomes_of_stdout(
    stdout: Callable[[], AbstractContextManager[dict[str, Any]]],
) -> None:
    port = free_port()
    with stdout() as how, served(port, **how) as process:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            for _ in range(80):  # of some 130 bytes each in the log
                assert client.post("/v1/chat/completions", json=BODY).status_code == 200
        process.terminate()
        assert process.wait(20) == 0


# -- signals and deaths ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [(signal.SIGTERM, signal.SIGTERM, 143), (signal.SIGTERM, signal.SIGINT, 130)],
)
def test_a_second_signal_ends_at_once(first: int, second: int, code: int) -> None:
    server = start(*SLOW)
    before = server.children()
    with httpx.Client(timeout=60) as client:
        body = BODY | {"stream": True, "max_tokens": 500}
        with client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            server.process.send_signal(first)
            with pytest.raises(subprocess.TimeoutExpired):
                server.process.wait(1.5)  # the request may finish
            server.process.send_signal(second)
            assert server.process.wait(20) == code
    all_leave(server, before)


def test_a_signal_while_starting_ends_the_start() -> None:
    process = subprocess.Popen([*SERVE, "--port", "0"], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None and b"starting demo" in process.stdout.readline()
    assert b"importing torch" in process.stdout.readline()
    process.terminate()
    assert process.wait(30) == 0
    assert b"is served at" not in process.stdout.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("num_born", [2, 3])  # the first is multiprocessing's own
def test_a_signal_to_all_processes_ends_the_start_without_a_word(
    number: int, num_born: int
) -> None:
    """A terminal with Ctrl-C or when it closes, or a service manager, signals all processes.

    At that time the youngest child has not run any of our code.
    """
    process = subprocess.Popen(
        [*SERVE, *FAST, "--port", "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=take_hangups,
    )
    born = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    eventually(lambda: len(born.read_text().split()) >= num_born, 30)
    time.sleep(0.02)  # it runs Python by now
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 0, output
    assert [line for line in output.splitlines() if " info serve starting " not in line] == []


def test_the_log_says_who_ended_and_how() -> None:
    server = start(*FAST)
    children = names_of(server)
    engine = next(pid for pid, name in children.items() if name == "nanovllm-engine")
    os.kill(engine, signal.SIGKILL)
    assert server.process.wait(20) == 1
    eventually(lambda: all(map(has_left, children)), 15)
    said = "error serve nanovllm-engine ended by SIGKILL (9); out of memory?; stopping"
    eventually(lambda: any(said in line for line in server.lines), 10)


def names_of(server: Server) -> dict[int, str]:
    return {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in server.children()}


def test_an_api_process_that_crashes_is_logged_and_replaced() -> None:
    server = start(*FAST, "--log-format", "text", is_fork=False)
    before = names_of(server)
    (lost,) = (pid for pid, name in before.items() if name == "nanovllm-api0")
    resource.prlimit(lost, resource.RLIMIT_CORE, (0, 0))
    os.kill(lost, signal.SIGSEGV)
    assert ask(server.url).status_code == 200  # it waits in the queue of the listening socket
    said = "error serve nanovllm-api0 ended by SIGSEGV (11); starting it again in 1 s, 99 more left"
    assert any(said in line for line in server.lines)
    after = names_of(server)
    assert sorted(after.values()) == sorted(before.values())
    assert {pid for pid in before if before[pid] == "nanovllm-engine"} <= {*after}
    assert server.stop() == 0


def test_who_ended_while_starting_is_named_too() -> None:
    def leave() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    process = launch.multiprocessing.get_context("fork").Process(target=leave, name="an-engine")
    ours, theirs = launch.multiprocessing.Pipe()
    process.start()
    theirs.close()
    with pytest.raises(launch.EngineDied) as caught:
        launch.wait_ready([(process, ours)])
    assert str(caught.value) == "an-engine ended by SIGKILL (9); out of memory?"


class Deaf:
    """A process that ignores SIGTERM and ends when it is killed."""

    exitcode: int | None = None

    def __init__(self) -> None:
        self.sentinel, self._end = socket.socketpair()  # readable after its end

    def terminate(self) -> None: ...

    def kill(self) -> None:
        self.exitcode = -9

    def join(self) -> None: ...


def test_nobody_waits_for_requests_that_no_engine_is_left_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "LAST_WORDS_S", 0.5)
    asked: list[float] = []

    class Lost:
        def lost(self, restarts: bool) -> str:
            asked.append(time.monotonic())
            return "rank1 ended by SIGKILL (9)" if len(asked) > 2 else ""

    deaf = Deaf()
    launch.stop([deaf], 60, Lost())  # type: ignore[list-item, arg-type]
    assert deaf.exitcode == -9
    assert 0.4 < time.monotonic() - asked[2] < 20


# -- many clients ------------------------------------------------------------------------------


def test_connections_beyond_a_shells_usual_limit_of_descriptors() -> None:
    """Connections beyond the shell's soft limit of descriptors are answered."""
    limit, (_, most) = 64, resource.getrlimit(resource.RLIMIT_NOFILE)

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))

    port = free_port()
    with served(port, "--set", "server.header_timeout_s=600", preexec_fn=few), ExitStack() as idle:
        for _ in range(limit):
            idle.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert ask(f"http://127.0.0.1:{port}").status_code == 200
        told = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        assert f"\nprocess_max_fds {min(most, MOST_FILES)}\n" in told


# -- one line ----------------------------------------------------------------------------------


def refused(*arguments: str, **how: Any) -> str:
    run = with_server_packages().start([*SERVE, *arguments], timeout=60, cwd=ROOT, **how)
    assert run.returncode == 2, run.stdout + run.stderr
    (line,) = run.stderr.splitlines()
    return line


def test_a_full_disk_at_start_is_one_line() -> None:
    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no file may have a byte

    line = refused(*FAST, "--port", "0", preexec_fn=no_room)
    assert line.startswith("error: cannot create a folder for the engine's socket (TMPDIR): ")
    assert "/tmp" in line


def test_a_disk_that_fills_while_an_engine_starts_is_one_line() -> None:
    said = []

    class Pipe:
        send = said.append

    def target(link: children.SupervisorLink, config: object) -> None:
        with open("/dev/full", "w") as file:
            file.write("x" * 100_000)

    with pytest.raises(SystemExit) as caught:
        children.run_child(target, children.SupervisorLink(Pipe()), None)  # type: ignore[arg-type]
    assert caught.value.code == 2
    (line,) = said
    assert line.startswith("cannot write ") and line.endswith(": No space left on device")


def fails(link: children.SupervisorLink, config: object, is_ready: bool) -> None:
    if is_ready:
        link.ready()
    raise RuntimeError("can't allocate 7 GiB\nwhere it was tried")


@pytest.mark.parametrize("is_ready", [False, True])
def test_what_nobody_foresaw_is_a_record_and_names_its_process(
    is_ready: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before a process is ready, the supervisor gets its error as one line with its name."""
    config = load_config(None, ["server.log_format=json"])
    rank = launch.spawn("nanovllm-rank1", config, fails, (is_ready,))
    if is_ready:
        launch.wait_ready([rank])
    else:
        with pytest.raises(ConfigError) as caught:
            launch.wait_ready([rank])
        assert str(caught.value) == "nanovllm-rank1: RuntimeError: can't allocate 7 GiB"
    process, _ = rank
    process.join(10)
    assert process.exitcode == 1
    output, errors = capfd.readouterr()
    (record,) = map(json.loads, output.splitlines())
    assert (record["level"], record["message"], errors) == ("error", "nanovllm-rank1", "")
    assert record["exception"].endswith("RuntimeError: can't allocate 7 GiB\nwhere it was tried")


def test_a_child_hears_of_lost_engines_and_leaves_with_its_supervisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Left(BaseException): ...

    def leave(code: int) -> None:
        raise Left

    monkeypatch.setattr(launch.os, "_exit", leave)
    ours, theirs = multiprocessing.Pipe()
    link, heard = children.SupervisorLink(theirs), list[tuple[int, float]]()
    link.on_engine_lost(lambda *lost: heard.append(lost))
    begun = time.monotonic()
    launch.report_lost_engine([(None, ours)], 1)  # type: ignore[list-item]
    launch.report_lost_engine([(None, ours)], 0)  # type: ignore[list-item]
    ours.close()
    with pytest.raises(Left):
        link.leave_with_supervisor()
    assert [at for at, _ in heard] == [1, 0]
    assert begun <= heard[0][1] <= heard[1][1] <= time.monotonic()
    launch.report_lost_engine([(None, ours)], 2)  # type: ignore[list-item]


def test_a_socket_s_path_has_a_limit(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    line = refused(*FAST, "--port", "0", env={**os.environ, "TMPDIR": str(folder)})
    assert line.endswith("is too long for the engine's socket; set another TMPDIR")


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        line = refused(*FAST, "--port", str(port))
    assert line == f"error: cannot listen on 127.0.0.1:{port}: Address already in use"


def test_one_port_cannot_be_both_that_of_the_api_and_that_of_metrics() -> None:
    line = refused(*FAST, "--port", "8123", "--set", "server.metrics_port=8123")
    assert line == (
        "error: server.metrics_port is 8123, which is server.port; choose another, or 0 for any "
        "free port"
    )


@pytest.mark.parametrize("host", ["a..b", "1:2:3", "256.1.1.1", "\u00e4" * 70])
def test_a_host_that_is_none_is_one_line(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^cannot listen on .+: .+$"):
        launch.listen(host, 0)


def test_ipv6_addresses_stand_in_brackets() -> None:
    with launch.listen("::", 0) as sock:
        port = sock.getsockname()[1]
        assert launch.url_of(*sock.getsockname()[:2]) == f"http://[::]:{port}"
        for host in ("::1", "127.0.0.1"):  # both versions arrive
            socket.create_connection((host, port), 5).close()
    assert launch.url_of("0.0.0.0", 80) == "http://0.0.0.0:80"


# -- start-up messages, and the running server -------------------------------------------------


def test_the_first_line_waits_for_no_heavy_import() -> None:
    code = "import nanovllm.cli.commands, sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    loaded = set(run.stdout.split())
    assert "nanovllm.launch" in loaded
    assert not loaded & {"torch", "numpy", "tokenizers", "uvicorn", "transformers", "jinja2"}


@pytest.fixture(scope="module")
def small() -> Iterator[tuple[str, list[dict[str, Any]], subprocess.Popen[str]]]:
    """Yield a demo with a cache below its context and a JSON log: URL, lines so far, process."""
    command = [*SERVE, "--port", "0", "--set", "cache.cpu_gib=0.01", "--log-format", "json"]
    environment = {**os.environ, "NANOVLLM_API_KEY": "of-the-night"}
    process = with_server_packages().popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    lines = [json.loads(process.stdout.readline())]
    while "is served at" not in lines[-1]["message"]:
        lines.append(json.loads(process.stdout.readline()))
    yield lines[-1]["message"].split()[4], lines, process
    process.terminate()
    assert process.wait(20) == 0


def test_a_start_says_what_it_does_in_json(small) -> None:
    _, lines, _ = small
    said = [line["message"] for line in lines]
    steps = ("starting demo", "importing torch", "loading ", "sizing", "cache of 80 pages of 16",
             "warming up", "built ", "demo is served at http://127.0.0.1:")  # fmt: skip
    at = [next(i for i, text in enumerate(said) if text.startswith(step)) for step in steps]
    assert at == sorted(at)
    assert "GB" in said[at[2]] and "up to 1280 tokens" in said[at[4]]
    (built,) = (line for line in lines if line["message"].startswith("built"))
    assert (built["pages"], built["device"], built["level"]) == (80, "cpu", "info")
    assert "of-the-night" not in json.dumps(lines)
    assert 'Bearer $KEY"' in said[-1]


def test_a_request_without_max_tokens_fits_the_cache(small) -> None:
    url, _, process = small
    assert httpx.get(f"{url}/v1/models").status_code == 401
    headers = {"Authorization": "Bearer of-the-night"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 1280
        body = {"messages": [{"role": "user", "content": "What is nanovllm?"}]}
        reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200
    line = json.loads(process.stdout.readline())
    while line.get("status") in (None, 401):
        line = json.loads(process.stdout.readline())
    usage = reply.json()["usage"]
    assert (line["status"], line["completion"]) == (200, usage["completion_tokens"])


@pytest.mark.parametrize(("length", "ratio", "structured"), [(100, 0.0, False), (61, 0.3, True)])
def test_bench_prompts_have_exactly_the_tokens(small, length, ratio, structured) -> None:
    url, _, _ = small
    load = Workload(num_prompts=6, input_len=length, output_len=3, range_ratio=ratio, concurrency=3,
                structured=structured)  # fmt: skip
    outcome = online.measure_server(
        load, None, url=url, api_key="of-the-night", goals_ms={}, warmup=0, processes=1, bar=no_bar
    )
    metrics = outcome.record.metrics
    assert metrics["completed"] == 6
    if not ratio:
        assert metrics["input_tokens"] == 6 * length
    assert 6 * length * (1 - ratio) <= metrics["input_tokens"] <= 6 * length * (1 + ratio)


def test_bench_says_when_the_template_takes_more(small) -> None:
    url, _, _ = small
    load = Workload(num_prompts=1, input_len=5, output_len=3, concurrency=1)
    with pytest.raises(
        ConfigError, match=r"is 5 tokens; no prompt has this length .* chat template alone has \d+$"
    ):
        online.measure_server(
            load, None, url=url, api_key="of-the-night", goals_ms={}, warmup=0, processes=1,
            bar=no_bar,
        )  # fmt: skip


def test_what_is_served_by_a_folder_s_name(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.symlink_to(ROOT / "nanovllm" / "demo")
    began = time.monotonic()
    server = start(str(folder), "--set", "cache.cpu_gib=0.1")
    assert time.monotonic() - began < 60
    try:
        models = httpx.get(f"{server.url}/v1/models").json()
        assert models["data"][0]["id"] == "my-model"
        assert ask(server.url, model="my-model").status_code == 200
    finally:
        assert server.stop() == 0
