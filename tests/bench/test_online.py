"""The benchmark against a server and an engine with predefined behaviour."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from nanovllm import launch, wire
from nanovllm.bench import offline, online, store
from nanovllm.bench.measure import Advance, Outcome, Sample, summarise, verdict
from nanovllm.bench.started import started, stop
from nanovllm.bench.workload import Workload, token_load
from nanovllm.cli import bench as command
from nanovllm.config import Config, ConfigError, load_config
from nanovllm.experts import ExpertLoad
from nanovllm.fleet import Fleet
from nanovllm.wire import Finish, FinishReason, Generate, Ready, Refusal, RefusalKind, Stats
from tests.forks import with_server_packages

ROOT = Path(__file__).parents[2]
FAKE = Path(__file__).with_name("fake_chat.py")
RECIPE = str(ROOT / "recipes" / "qwen3-0.6b.yaml")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def fake_chat(*arguments: str) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with started([sys.executable, str(FAKE), str(port), *arguments], url):
        yield url


@pytest.fixture(scope="module")
def healthy() -> Iterator[str]:
    with fake_chat() as url:
        yield url


@contextlib.contextmanager
def no_bar(total: int, label: str) -> Iterator[Advance]:
    counts = [0, 0]

    def advance(requests: int, tokens: int) -> None:
        counts[0] += requests
        counts[1] += tokens

    yield advance
    assert counts[0] == total  # the progress bar ends at 100 %
    assert counts[1] > 0


def measure(url: str, load: Workload, api_key: str | None = None, warmup: int = 2) -> Outcome:
    return online.measure_server(
        load, None, url=url, api_key=api_key, goals_ms={}, warmup=warmup, processes=2, bar=no_bar
    )


def test_a_closed_loop_measures_what_the_server_does(healthy: str) -> None:
    load = Workload(num_prompts=24, input_len=101, output_len=10, concurrency=6)
    outcome = measure(healthy, load)
    metrics = outcome.record.metrics
    assert (metrics["completed"], metrics["failed"]) == (24, 0)
    assert metrics["input_tokens"] == 24 * 101  # the token count of a word was measured by requests
    assert (metrics["output_tokens"], metrics["cached_tokens"]) == (240, 0)
    assert metrics["peak_concurrent"] == 6
    # The empty chunk, the comment and the usage are not tokens.
    assert metrics["output_chunks"] == 240
    # Lower bounds are the server's sleeps. Upper bounds allow for a busy machine.
    assert 30.0 <= metrics["ttft_p50_ms"] < 130.0
    assert 4.0 <= metrics["tpot_p50_ms"] < 40.0
    assert metrics["e2e_p50_ms"] >= 30.0 + 9 * 4.0
    assert metrics["duration_s"] >= 4 * (0.03 + 9 * 0.004)  # four rounds of six
    assert outcome.engine["Steps FULL/decode"] == 24.0
    found = outcome.record.metrics
    assert (found["num_drafts"], found["acceptance_length"]) == (48.0, 2.5)
    assert found["acceptance_percent_position_0"] == 100.0
    assert outcome.engine["Peak KV cache usage (%)"] == 50.0
    written = outcome.record
    assert (written.recipe["model"], written.workload["name"]) == ("fake", "c6")
    assert 0.0 < written.metrics["client_busy"] < 1.0


def test_an_open_loop_sends_when_requests_are_due(healthy: str) -> None:
    load = Workload(num_prompts=40, input_len=21, output_len=4, request_rate=50.0, seed=1)
    metrics = measure(healthy, load).record.metrics
    assert (metrics["completed"], metrics["output_tokens"]) == (40, 160)
    assert -1.0 < metrics["client_late_p50_ms"] < 50.0
    assert 0.4 < metrics["duration_s"] < 3.0  # 40 arrivals at 50 per second
    assert 1 <= metrics["peak_concurrent"] < 40


def test_failures_are_counted_named_and_make_a_run_invalid() -> None:
    with fake_chat("ill") as url:
        load = Workload(num_prompts=35, input_len=21, output_len=4, concurrency=1)
        outcome = measure(url, load, warmup=0)
    errors, metrics = outcome.errors, outcome.record.metrics
    refused = [error for error in errors if error.startswith("HTTP 503")]
    assert refused and "the queue is full" in refused[0]
    assert errors[refused[0]] == 7
    # Every seventh of 35 is dropped, but the 35th was refused before.
    assert errors["the server closed the connection"] == 4
    assert (metrics["completed"], metrics["failed"]) == (24, 11)
    assert outcome.record.notes == "invalid: 11 of 35 requests failed, more than 1%"


def test_an_api_key_is_sent_everywhere() -> None:
    load = Workload(num_prompts=2, input_len=21, output_len=2, concurrency=1)
    with fake_chat("secret") as url:
        assert measure(url, load, api_key="secret").record.metrics["completed"] == 2
        with pytest.raises(ConfigError, match=r"HTTP 401: .*wrong key"):
            measure(url, load)


def test_unusable_servers_are_refused_in_one_line(healthy: str) -> None:
    load = Workload(num_prompts=1, input_len=4000, output_len=200, concurrency=1)
    with pytest.raises(ConfigError, match=r"is up to 4200 tokens; fake at .* takes at most 4096"):
        measure(healthy, load)
    with pytest.raises(ConfigError, match=r"no server answers at http://127\.0\.0\.1:9"):
        measure("http://127.0.0.1:9", load)
    with pytest.raises(ConfigError, match="--url localhost:8000: write it as http://host:port"):
        measure("localhost:8000", load)


def test_the_command_prints_a_table_and_writes_both_files(healthy: str, tmp_path: Path) -> None:
    results, shown = tmp_path / "results", tmp_path / "out.json"
    arguments = ["--url", healthy, "--concurrency", "4", "--num-prompts", "8", "--input-len", "51"]
    arguments += ["--output-len", "6", "--goodput", "ttft:5000", "--json-out", str(shown)]
    arguments += ["--api-key", "s3cret", "--results-dir", str(results)]
    arguments += ["--expert-load", str(tmp_path / "x"), "--expert-ranks", "2"]
    line = [sys.executable, "-m", "nanovllm", "bench", *arguments]
    done = with_server_packages().start(line, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "============ Serving Benchmark Result ============" in done.stdout
    assert "Successful requests:                     8" in done.stdout
    assert "fake: 100%" in done.stderr and "8/8" in done.stderr
    (path,), (written,) = store.files(results), store.records(results)
    assert f"record: {path}#" in done.stdout
    assert "s3cret" not in path.read_text()
    assert written.kind == "serve" and written.engine == "unknown"  # the server does not report it
    assert written.recipe == {"model": "fake", "served_by": "unknown", "command": ""}
    assert (written.workload["concurrency"], written.workload["input_len"]) == (4, 51)
    assert written.metrics["output_tokens"] == 48.0 and written.metrics["steps_full_decode"] == 8.0
    needed = {"output_tokens_per_s", "duration_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms"}
    assert needed | {"itl_p99_ms", "e2e_p50_ms"} <= written.metrics.keys()
    assert written.metrics["good_requests_per_s"] == written.metrics["requests_per_s"]
    assert written.metrics["requests_per_s"] == pytest.approx(8 / written.duration_s)
    found = json.loads(shown.read_text())
    assert (found["completed"], found["max_concurrency"]) == (8, 4)
    assert found["output_throughput"] == pytest.approx(written.metrics["output_tokens_per_s"])
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    placed = '{"layer":3,"tokens":[9,2,3,4],"ranks":[[0,2,3],[0,1,3]]}\n'
    assert (tmp_path / "x").read_text() == placed


@pytest.mark.parametrize("is_deaf", [False, True])
def test_a_server_that_does_not_end_is_killed(
    is_deaf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.bench.started.STOP_S", 0.2 if is_deaf else 30.0)
    deafen = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " if is_deaf else ""
    command = [sys.executable, "-c", f"{deafen}print(flush=True); input()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as server:
        assert server.stdout is not None and server.stdout.readline()
        stop(server)
        assert server.returncode == -(signal.SIGKILL if is_deaf else signal.SIGTERM)


def test_the_command_starts_and_stops_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    fake = [sys.executable, str(FAKE), str(port)]
    monkeypatch.setattr(command, "serve_command", lambda recipe, changed: fake)
    arguments = ["--start", "--set", f"server.port={port}", "--num-prompts", "2", "--warmup", "0"]
    arguments += ["--set", "server.served_name=fake", "--input-len", "31", "--output-len", "2"]
    done = CliRunner().invoke(command.bench, [*arguments, "--results-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    (written,) = store.records(tmp_path)
    assert 0.0 < written.metrics["start_to_ready_s"] < 30.0
    assert written.changed == {"server.port": port, "server.served_name": "fake"}
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health")


def test_the_demo_model_is_served_and_measured_as_users_do_it(tmp_path: Path) -> None:
    arguments = ["--start", "--device", "cpu", "--set", f"server.port={free_port()}"]
    arguments += ["--api-key", "s3cret", "--concurrency", "2", "--num-prompts", "4"]
    arguments += ["--input-len", "60", "--output-len", "8", "--results-dir", str(tmp_path)]
    line = [sys.executable, "-m", "nanovllm", "bench", *arguments]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (path,), (written,) = store.files(tmp_path), store.records(tmp_path)
    assert written.metrics["completed"] == 4.0 and written.metrics["output_tokens"] == 32.0
    assert 180.0 <= written.metrics["input_tokens"] <= 300.0  # four prompts of about 60 tokens
    assert written.metrics["start_to_ready_s"] > 0.1
    assert written.changed["device"] == "cpu" and "s3cret" not in path.read_text()


def test_serve_is_started_with_what_the_bench_changes() -> None:
    changed = {"load.format": "dummy", "server.api_key": "a: b", "cache.prefix": False}
    shown = command.serve_command(RECIPE, changed)
    assert shown[1:5] == ["-m", "nanovllm", "serve", RECIPE]
    assert shown[5::2] == ["--set"] * 3
    assert load_config(RECIPE, shown[6::2]).changed == changed
    assert command.serve_command(None, {})[1:] == ["-m", "nanovllm", "serve"]


def test_a_server_that_does_not_start_shows_its_last_words(healthy: str) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    dying = [sys.executable, "-c", "import sys; sys.exit('no such checkpoint')"]
    with (
        pytest.raises(ConfigError, match="did not come up: no such checkpoint"),
        started(dying, url),
    ):
        pass
    with pytest.raises(ConfigError, match="already listens at"), started(dying, healthy):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "2", "--request-rate", "3"], "give one"),
        (["--offline", "--start"], "exclude each other"),
        (["--offline", "--concurrency", "2"], "--concurrency has no effect"),
        (["--workload", "w1"], "--workload names a load of --offline; over HTTP, only agents"),
        (["--offline", "--workload", "bs1,bs2"], "--workload bs2: w1, w1-top, bs1, bs64,"),
        (["--offline", "--workload", "bs1,bs64", "--json-out", "x"], "--json-out takes one run"),
        (["--ablate", "schedule.depth=0"], "--ablate needs an engine"),
        (["--offline", "--ablate", "a.b=1", "--json-out", "x"], "--json-out takes one run"),
        (["--set", "schedule.depth=0"], "--set describes the server"),
        (["--start", "--url", "http://x:1"], "--start serves at the recipe's"),
        (["--offline", "--served-by", "x"], "--served-by has no effect"),
        (["--served-by", "x", "--start"], "--served-by describes another engine"),
        (["--served-by", "x", RECIPE], "--served-by describes another engine"),
        (["--goodput", "itl:3"], "--goodput itl:3: write ttft, tpot or e2el"),
        (["--start", "--ablate", "schedule.depth=0", "--expert-load", "x"], "--expert-load takes"),
        (["--expert-copies", "2"], "--expert-ranks and --expert-copies need --expert-load"),
        (["--expert-ranks", "2"], "--expert-ranks and --expert-copies need --expert-load"),
        (["--json-out", "/nowhere/x"], "--json-out /nowhere/x: no file can be written there"),
        (["--expert-load", "/"], "--expert-load /: no file can be written there"),
        (["--start", "--sweep", "1", "--plot", "/nowhere/x.svg"], "--plot /nowhere/x.svg: no file"),
        (["--offline", "--set", "schedule.dept=0"], "did you mean schedule.depth"),
    ],
)
def test_senseless_combinations_are_refused(arguments: list[str], message: str) -> None:
    error = CliRunner().invoke(command.bench, arguments).exception
    assert isinstance(error, ConfigError) and message in str(error)


# -- offline ---------------------------------------------------------------------------------


class PaperEngine:
    """Stand-in for EngineClient that sends two tokens per message."""

    def __init__(self, refuses: int = -1, loses: int = -1, dies: bool = False) -> None:
        recipe = json.dumps({"model": "paper", "schedule": {"depth": 1}})
        self.ready = Ready(0, "paper", 4096, 512, 100, 64, 256, recipe)
        self.stats = Stats()
        self.requests: list[Generate] = []
        self.faults = (refuses, loses, dies)

    def new_id(self) -> int:
        return len(self.requests)

    def submit(self, request: Generate, sink: offline.Stopwatch, stream: offline.Stopwatch) -> None:
        self.requests.append(request)
        asyncio.get_running_loop().call_later(0.002, self.answer, request, sink)

    def answer(self, request: Generate, sink: offline.Stopwatch) -> object:
        refuses, loses, dies = self.faults
        if dies:
            return sink.lost()
        if request.request_id == refuses:
            return sink.refused(Refusal(refuses, RefusalKind.TOO_LONG, "too long"))
        sink.started(wire.Started(0, 3))
        rest = request.max_new - (request.request_id == loses)
        while rest:
            num, rest = min(2, rest), max(0, rest - 2)
            sink.tokens([1] * num)
            sink.flush()
        count = len(self.requests)
        told = Stats(
            steps_by_mode={"FULL/decode": 5 * count},
            num_drafts=2 * count,
            draft_tokens=4 * count,
            accepted_tokens=count,
            accepted_by_position=[count, 0],
            experts=ExpertLoad(
                [7],
                b"".join(n.to_bytes(8, "little") for n in (4, 1, 3, 2)),
                (10).to_bytes(8, "little"),
            ),
        )
        sink.finish(Finish(request.request_id, FinishReason.LENGTH))
        # Counters of an engine arrive after the finish message.
        return asyncio.get_running_loop().call_soon(setattr, self, "stats", told)

    def close(self) -> None: ...


def run_paper(engine: PaperEngine, name: str = "bs64") -> list[Sample]:
    load = token_load(name, seed=0, vocab_size=512)
    with no_bar(len(load.prompts), name) as advance:
        return asyncio.run(offline.run(engine, load, advance))


def test_the_engine_gets_the_workload_and_every_token_counts() -> None:
    engine = PaperEngine()
    metrics = summarise(run_paper(engine))
    assert (metrics["completed"], metrics["failed"]) == (64, 0)
    assert metrics["output_tokens"] == 64 * 256
    assert metrics["input_tokens"] == 64 * 1024 and metrics["cached_tokens"] == 64 * 3
    assert metrics["output_chunks"] == 64 * 128
    assert metrics["ttft_p50_ms"] >= 2.0
    assert metrics["duration_s"] >= 0.002
    sent = engine.requests[5]
    assert list(array("i", sent.prompt)) == token_load("bs64", seed=0, vocab_size=512).prompts[5]
    assert (sent.max_new, sent.stop_ids, sent.sampling.temperature) == (256, [], 0.0)


def test_an_engine_that_does_less_than_asked_is_not_fast() -> None:
    samples = run_paper(PaperEngine(refuses=3, loses=9))
    errors = sorted(sample.error for sample in samples if sample.error)
    assert errors == ["255 tokens received instead of 256", "too long"]
    metrics = summarise(samples)
    assert metrics["completed"] == 62 and verdict(metrics).startswith("invalid: 2 of 64")


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> list[PaperEngine]:
    """Replace engines of the command by PaperEngines. Return the list of these."""
    engines: list[PaperEngine] = []

    async def connect(path: str) -> PaperEngine:
        assert path == "engine.sock"
        engines.append(PaperEngine())
        return engines[-1]

    @contextlib.contextmanager
    def engine_processes(config: object) -> Iterator[tuple[list[str], Fleet]]:
        time.sleep(0.01)
        yield ["engine.sock"], Fleet([], 0)

    monkeypatch.setattr(offline.EngineClient, "connect", connect)
    monkeypatch.setattr(launch, "engine_processes", engine_processes)
    monkeypatch.setattr(launch, "wait_ready", lambda ranks: None)
    monkeypatch.setattr(offline, "STATS_S", 0.0)
    return engines


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--json-out", "error: [Errno 28] No space left on device"),
        ("--expert-load", "cannot write /dev/full: No space left on device"),
    ],
)
def test_a_file_that_cannot_be_written_costs_no_record(
    option: str, said: str, tmp_path: Path, paper: list[PaperEngine]
) -> None:
    arguments = ["--offline", RECIPE, "--workload", "bs1", "--load-format", "dummy", option]
    arguments += ["/dev/full", "--results-dir", str(tmp_path)]
    done = CliRunner().invoke(command.bench, arguments)
    (written,) = store.records(tmp_path)
    assert written.metrics["output_tokens"] == 512.0
    shown = done.output.splitlines()[-1] if option == "--json-out" else str(done.exception)
    assert shown == said and "Traceback" not in done.output


def test_offline_writes_a_record_that_says_so(tmp_path: Path, paper: list[PaperEngine]) -> None:
    arguments = ["--offline", RECIPE, "--workload", "bs1", "--load-format", "dummy"]
    arguments += ["--expert-load", str(tmp_path / "x"), "--expert-copies", "0"]
    done = CliRunner().invoke(command.bench, [*arguments, "--results-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "============ Offline Benchmark Result ============" in done.output
    assert "Steps FULL/decode:                       5 " in done.output
    assert "Acceptance length:                       1.50 " in done.output
    (written,) = store.records(tmp_path)
    assert (written.kind, written.workload["name"]) == ("offline", "bs1")
    assert (written.workload["concurrency"], written.recipe["model"]) == (1, "paper")
    assert written.changed == {"load.format": "dummy"}
    assert written.metrics["output_tokens"] == 512.0
    assert written.metrics["start_to_ready_s"] >= 0.01
    assert written.metrics["output_tokens_per_s"] == pytest.approx(512 / written.duration_s)
    held = '{"layer":7,"tokens":[4,1,3,2],"ranks":[[0,1,2,3]]}\n'  # a single rank has all experts
    assert (tmp_path / "x").read_text() == held
    (engine,) = paper
    assert [request.max_new for request in engine.requests] == [17, 512]  # the warm-up first
    assert engine.requests[0].prompt != engine.requests[1].prompt


def test_several_loads_run_on_one_engine_and_share_no_prompts(
    tmp_path: Path, paper: list[PaperEngine]
) -> None:
    arguments = ["--offline", RECIPE, "--workload", "bs1,bs1-256", "--load-format", "dummy"]
    done = CliRunner().invoke(command.bench, [*arguments, "--results-dir", str(tmp_path)])
    assert done.exit_code == 0 and "table" not in done.output, done.output
    found = store.records(tmp_path)
    assert {one.workload["name"]: (one.workload["seed"], one.metrics["output_tokens"])
            for one in found} == {"bs1": (0, 512.0), "bs1-256": (2, 256.0)}  # fmt: skip
    (engine,) = paper
    assert [request.max_new for request in engine.requests] == [17, 512, 9, 256]
    assert len({request.prompt[:40] for request in engine.requests}) == 4


def test_ablations_write_records_that_differ_in_one_key(
    tmp_path: Path, paper: list[PaperEngine]
) -> None:
    arguments = ["--offline", RECIPE, "--workload", "bs1", "--load-format", "dummy", "--warmup=0"]
    arguments += ["--ablate", "schedule.depth=0", "--ablate", "cache.prefix=false"]
    done = CliRunner().invoke(command.bench, [*arguments, "--results-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    found = store.records(tmp_path)
    plain = {"load.format": "dummy"}
    assert sorted((one.changed for one in found), key=str) == sorted(
        (plain, plain | {"schedule.depth": 0}, plain | {"cache.prefix": False}), key=str
    )
    table, _, again = done.output.partition("\nthis table again: nanovllm bench --compare ")
    rows = [row.split() for row in table.splitlines()[-3:]]
    assert [row[-1] for row in rows] == ["unchanged", "schedule.depth=0", "cache.prefix=False"]
    assert [len(row) for row in rows] == [5, 8, 8]  # two rows have three ratios in addition
    *ids, flag, folder = again.split()
    assert (
        len(paper) == 3 and len({*ids}) == 3 and [flag, folder] == ["--results-dir", str(tmp_path)]
    )

    compared = CliRunner().invoke(command.bench, ["--compare", *ids[:2], flag, folder])
    assert compared.exit_code == 0
    assert "output_tokens_per_s" in compared.output and "B/A" in compared.output


def test_an_ablation_that_does_not_start_costs_its_own_row_only(
    tmp_path: Path, paper: list[PaperEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def engine_processes(config: Config) -> Iterator[tuple[list[str], Fleet]]:
        if config.recipe.schedule.depth == 0:
            raise launch.EngineDied("nanovllm-engine ended with exit code 1")
        yield ["engine.sock"], Fleet([], 0)

    monkeypatch.setattr(launch, "engine_processes", engine_processes)
    arguments = ["--offline", RECIPE, "--workload", "bs1", "--load-format", "dummy", "--warmup=0"]
    arguments += ["--ablate", "schedule.depth=0", "--results-dir", str(tmp_path)]
    together = "cache.prefix=false,kernels.silu_mul=torch"
    done = CliRunner().invoke(command.bench, [*arguments, "--ablate", together])
    assert done.exit_code == launch.EXIT_CRASH
    assert "error: nanovllm-engine ended with exit code 1" in done.output
    table, _, _ = done.output.partition("\nthis table again: ")
    rows = table.splitlines()[-2:]
    assert rows[0].endswith("  unchanged")
    assert rows[1].endswith("  cache.prefix=False kernels.silu_mul=torch")
    wrong = CliRunner().invoke(command.bench, [*arguments, "--ablate", "cache.prefx=false"])
    assert isinstance(wrong.exception, ConfigError) and len(paper) == 2  # refused before any run


def test_offline_drives_one_engine() -> None:
    done = CliRunner().invoke(command.bench, ["--offline", "--dp", "2"])
    assert str(done.exception) == "--offline drives one engine; parallel.dp is 2"


def test_a_dead_engine_makes_the_command_fail(tmp_path: Path, paper: list[PaperEngine],
                                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    async def connect(path: str) -> PaperEngine:
        return PaperEngine(dies=True)

    monkeypatch.setattr(offline.EngineClient, "connect", connect)
    arguments = ["--offline", RECIPE, "--workload", "bs1", "--load-format", "dummy"]
    done = CliRunner().invoke(command.bench, [*arguments, "--results-dir", str(tmp_path)])
    assert done.exit_code == 1
    assert "1 x the engine died" in done.output and "invalid: 1 of 1" in done.output
    (path,) = store.files(tmp_path)
    assert path.relative_to(tmp_path).parts[0] == "scratch"
