"""Comparison with another engine: results/peers.py and results/vllm_offline.py with a fake vLLM."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import httpx
import pytest
from tokenizers import Tokenizer

from nanovllm.bench import store
from nanovllm.bench.measure import Outcome
from nanovllm.bench.record import Record
from nanovllm.bench.started import started
from nanovllm.bench.workload import WORDS, Workload
from nanovllm.config import DEMO, load_config
from nanovllm.server.detokenize import Vocabulary
from tests.bench.test_online import free_port, measure
from tests.bench.test_sweep import texts
from tests.forked_commands import forked_commands

ROOT = Path(__file__).parents[2]
FAKE = Path(__file__).with_name("fake_vllm.py")


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("peers", ROOT / "results" / "peers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put model folders into `tmp_path` and set the fake's environment."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("VLLM_FAKE", "yes")
    return tmp_path


def vllm_python(place: Path, lines: str = f'exec python {FAKE} "$@"') -> str:
    script = place / "vllm_python"
    script.write_text(f"#!/bin/sh\n{lines}\n")
    script.chmod(0o755)
    return str(script)


def measured(place: Path, part: str, flags: str, python: str) -> subprocess.CompletedProcess[str]:
    """Run `results/measure.sh PART` with the demo model on this machine."""
    given = {"RECIPES": "recipes/demo.yaml", "FLAGS": flags, "VLLM_PYTHON": python}
    return run_script(place, part, given)


def run_script(
    place: Path, part: str, variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run `results/measure.sh PART`. Its commands of Python are forks."""
    with forked_commands(place) as programs:
        path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        given = {"PATH": path, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", **variables}
        return subprocess.run(
            ["bash", "results/measure.sh", part], cwd=ROOT, env=os.environ | given,
            capture_output=True, text=True, timeout=500, check=False,
        )  # fmt: skip


def tables(stdout: str) -> list[str]:
    """Return the tables of ratios that peers.py printed, without those of `bench`."""
    return re.findall(r"^(.+\n +load +tok/s (?:.+\n)+)this table again: ", stdout, re.MULTILINE)


# -- the shared folder -------------------------------------------------------------------------


def test_every_id_of_the_vocabulary_has_a_text_and_words_cost_what_they_did(
    peers: ModuleType, place: Path
) -> None:
    config = load_config(str(ROOT / "recipes" / "qwen3-0.6b.yaml"), ["load.format=dummy"])
    folder = peers.folder_for_both(config)
    assert folder == place / "nanovllm-peers" / "Qwen3-0.6B"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    demo = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 151_936
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.size == 151_936
    assert all(text is None or len(text) >= 1 for text in vocabulary.texts)
    assert vocabulary.texts[0x24ABC] == " 24abc" == tokenizer.decode([0x24ABC])
    text = f"<|im_start|>user\nWords: {' '.join(WORDS)} 24abc<|im_end|>\n"
    assert tokenizer.encode(text).ids == demo.encode(text).ids
    # nanovllm serves it under the recipe's name, with its own tokenizer.
    served = load_config(config.source, ["load.format=dummy", f"model={folder}"])
    assert (served.served_name, served.tokenizer_dir) == ("Qwen3-0.6B", str(folder))


# -- the client with vLLM's streams ------------------------------------------------------------


@contextlib.contextmanager
def fake_vllm(folder: Path) -> Iterator[str]:
    port = free_port()
    command = ["-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--load-format", "dummy"]
    url = f"http://127.0.0.1:{port}"
    with started([sys.executable, str(FAKE), *command, "--port", str(port)], url):
        yield url


def demo_served_as(name: str, peers: ModuleType, load: Workload) -> Outcome:
    """Measure a fake vLLM that serves the demo model's folder under this name."""
    sets = ["load.format=dummy", f"server.served_name={name}"]
    with fake_vllm(peers.folder_for_both(load_config("demo", sets))) as url:
        return measure(url, load, warmup=0)


def test_what_vllm_streams_is_counted_as_it_counts(peers: ModuleType, place: Path) -> None:
    load = Workload(num_prompts=6, input_len=60, output_len=10, concurrency=2)
    written = demo_served_as("demo", peers, load).record
    metrics = written.metrics
    assert (metrics["completed"], metrics["failed"]) == (6, 0)
    assert (metrics["input_tokens"], metrics["output_tokens"]) == (6 * 60, 6 * 10)
    # The role, the empty piece and the usage are not text. The piece with the finish reason is.
    assert (metrics["output_chunks"], metrics["cached_tokens"]) == (6 * 9, 0)
    assert metrics["ttft_p50_ms"] >= 34.0 and 4.0 <= metrics["tpot_p50_ms"] < 40.0
    assert written.engine == "vllm 0.26.0" and written.model == "demo"


def test_an_error_amid_a_stream_of_vllm_is_told(peers: ModuleType, place: Path) -> None:
    load = Workload(num_prompts=4, input_len=60, output_len=10, concurrency=1)
    outcome = demo_served_as("ill", peers, load)
    ((error, count),) = outcome.errors.items()
    assert "EngineCore died" in error and count == 2
    assert outcome.record.notes == "invalid: 2 of 4 requests failed, more than 1%"


# -- both engines, run by results/measure.sh ---------------------------------------------------


def test_both_engines_get_the_same_prompts_on_one_machine(place: Path) -> None:
    results = place / "results"
    flags = (
        f"--results-dir {results} --servers 2 --streams 1,2,mixed --input-len 300 --output-len 6"
    )
    done = measured(
        place, "peers", f"{flags} --num-prompts 4 --warmup 1 --processes 1", vllm_python(place)
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, dict[str, Record]] = {"vllm 0.26.0": {}, "nanovllm": {}}
    for one in store.records(results):
        found[one.engine][one.workload["name"]] = one
    theirs, ours = found.values()
    assert [*sorted(theirs)] == [*sorted(ours)] == ["c1", "c2", "c64-mixed"]
    for name, one in theirs.items():
        other = ours[name]
        assert one.machine == other.machine and one.commit == other.commit
        assert one.workload == other.workload  # including the digest of the prompts
        assert len(one.workload["digest"]) == 12
        for key in ("input_tokens", "output_tokens", "completed"):
            assert one.metrics[key] == other.metrics[key] > 0
        assert one.metrics["failed"] == other.metrics["failed"] == 0
        assert one.altered == {"api-server-count": "2"}
        assert other.altered == {"server.workers": 2}
        assert re.fullmatch(
            r"VLLM_FAKE=yes vllm serve \S+/nanovllm-peers/demo --load-format dummy --port \d+ "
            "--api-server-count 2", one.recipe["command"],
        )  # fmt: skip
    assert len({one.workload["digest"] for one in theirs.values()}) == 3
    fixed, mixed = tables(done.stdout)
    rows = [row.split() for row in fixed.splitlines()[2:]]
    assert [row[0] for row in rows] == ["1", "1", "2", "2"]
    lengths = [len(row) for row in rows]  # a row of nanovllm has three ratios, or two: a busy
    assert lengths[::2] == [7, 7] and {*lengths[1::2]} in ({9}, {8, 9})  # client saw no gap
    assert rows[1][-2:] == ["nanovllm,", "server.workers=2"]
    assert float(rows[1][2]) == pytest.approx(
        ours["c1"].metrics["output_tokens_per_s"] / theirs["c1"].metrics["output_tokens_per_s"],
        abs=0.001,
    )
    assert "300 + 6 mixed tokens" in mixed
    (plot,) = results.rglob("*.svg")
    assert {"vllm 0.26.0, api-server-count=2", "nanovllm, server.workers=2"} <= {*texts(plot)}
    for url in re.findall(r"--port (\d+)", done.stdout):
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{url}/health")


@pytest.mark.parametrize(
    ("part", "more", "theirs_changed", "ours_changed"),
    [
        ("peers-offline", "", {}, {}),
        (
            "experts", " --layers 2", {"num_layers": 2},
            {"model.num_layers": 2, "experts.routing": "uniform"},
        ),
    ],
)  # fmt: skip
def test_both_engines_without_http(
    place: Path, part: str, more: str, theirs_changed: dict, ours_changed: dict
) -> None:
    results = place / "results"
    flags = f"--results-dir {results} --workloads bs1-256 --warmup 0{more}"
    done = measured(place, part, flags, vllm_python(place))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = {one.engine: one for one in store.records(results)}
    theirs, ours = found["vllm 0.26.0"], found["nanovllm"]
    assert theirs.machine == ours.machine and theirs.kind == ours.kind == "offline"
    assert theirs.metrics["output_tokens"] == ours.metrics["output_tokens"] == 256
    assert theirs.metrics["input_tokens"] == ours.metrics["input_tokens"] == 128
    assert 0.256 <= theirs.duration_s < 1.0  # the fake takes 1 ms per token
    assert theirs.metrics["output_tokens_per_s"] == pytest.approx(256 / theirs.duration_s)
    assert "LLM(model=" in theirs.recipe["command"] and theirs.recipe["model"] == "demo"
    random = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random " * (part == "experts")
    assert theirs.recipe["command"].startswith(f"VLLM_FAKE=yes {random}LLM(")
    assert theirs.changed == theirs_changed
    assert ours.changed == {"load.format": "dummy"} | ours_changed
    folder = place / "nanovllm-peers" / "demo"
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    assert layers == theirs_changed.get("num_layers", 8)
    (table,) = tables(done.stdout)
    rows = table.splitlines()[-2:]
    assert "vllm 0.26.0" in rows[0] and "nanovllm" in rows[1]
    assert not [*results.rglob("*.svg")]  # one load makes no curve


@pytest.mark.parametrize(
    ("recipe", "given", "gpus"),
    [
        ("qwen3-8b", [], 1),
        ("minimax-m2", [], 4),
        ("minimax-m2", ["--set", "parallel.tp=2"], 2),
        ("qwen3-8b", ["--tp", "2"], 2),
    ],
)
def test_vllm_gets_as_many_gpus_as_ours(
    peers: ModuleType, place: Path, monkeypatch: pytest.MonkeyPatch, recipe, given, gpus
) -> None:
    asked: list[dict] = []
    lines: list[list[str]] = []
    monkeypatch.setenv("VLLM_PYTHON", "python")
    monkeypatch.setattr(peers, "run_vllm", lambda job: asked.append(job["settings"]) or [])
    monkeypatch.setattr(peers, "bench", lambda line, results_dir: lines.append(line) or [])
    monkeypatch.setattr(peers, "conclude", lambda *_: None)
    path = str(ROOT / "recipes" / f"{recipe}.yaml")
    monkeypatch.setattr(sys, "argv", ["peers.py", "offline", path, *given, "--warmup", "0"])
    with pytest.raises(SystemExit, match="1"):  # vLLM wrote no record
        peers.main()
    assert [settings["tensor_parallel_size"] for settings in asked] == [gpus]
    (line,) = lines
    end = line.index("--load-format")
    assert line[end:] == ["--load-format", "dummy", *given, "--warmup", "0"]


def test_ours_is_measured_where_vllm_fails(place: Path) -> None:
    lines = (
        'seq 30 >&2; for i in $(seq 20); do echo "log $i"; echo "ERROR $i: no room" >&2; done;'
        ' echo "ValueError: too small" >&2; exit 3'
    )
    results = place / "results"
    flags = f"--results-dir {results} --workloads bs1-256 --warmup 0"
    done = measured(place, "peers-offline", flags, vllm_python(place, lines))
    assert done.returncode == 1
    check_last_lines(
        done.stderr,
        f"vLLM ended with exit code 3; of {place / 'nanovllm-peers' / 'offline.log'}:",
        [*(f"ERROR {i}: no room" for i in range(7, 21)), "ValueError: too small"],
    )
    (one,) = store.records(results)
    assert one.engine == "nanovllm" and one.metrics["output_tokens"] == 256
    (table,) = tables(done.stdout)
    assert table.splitlines()[-1].endswith(" demo")


def test_the_last_line_of_vllm_is_shown_where_it_has_no_result(place: Path) -> None:
    results = place / "results"
    flags = f"--results-dir {results} --workloads bs1-256 --only vllm"
    python = vllm_python(place, 'echo "no errors at all"; echo fine; echo "Killed"')
    done = measured(place, "peers-offline", flags, python)
    assert done.returncode == 1 and list(store.records(results)) == []
    check_last_lines(
        done.stderr,
        f"vLLM ended without a result; of {place / 'nanovllm-peers' / 'offline.log'}:",
        ["no errors at all", "Killed"],
    )


def check_last_lines(stderr: str, reason: str, last: list[str]) -> None:
    """Assert that a reason and these lines of vLLM's log are shown, without a traceback."""
    first, *shown = stderr[stderr.index("vLLM ended") :].splitlines()
    assert first == reason
    assert shown[: len(last)] == last and not [row for row in shown if "Traceback" in row]


def test_what_vllm_said_last_is_shown_when_it_does_not_start_and_ours_is_measured(
    place: Path,
) -> None:
    python = vllm_python(place, 'echo "no room on the GPU"; echo "see above"; exit 1')
    results = place / "results"
    flags = f"--results-dir {results} --servers 1 --streams 2 --input-len 50 --output-len 4"
    also = "--also schedule.slots=8,schedule.depth=0 --num-prompts 3 --processes 1"
    done = measured(place, "peers", f"{flags} {also}", python)
    assert done.returncode == 1
    assert "no room on the GPU\nsee above\n" in done.stderr
    assert "vLLM failed: the server did not come up" in done.stderr
    found = store.records(results)
    assert [one.engine for one in found] == ["nanovllm"] * 2
    slots = {"schedule.slots": 8, "schedule.depth": 0}
    assert sorted((one.altered for one in found), key=len) == [{}, slots]


def test_records_have_vllm_s_settings_but_no_key(
    peers: ModuleType, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_PYTHON", "python")
    monkeypatch.setenv("VLLM_USE_V2", "a b")
    assert peers.vllm_settings() == "VLLM_FAKE=yes VLLM_USE_V2='a b' "


def test_the_interpreter_must_be_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PYTHON", raising=False)
    line = [sys.executable, "results/peers.py", "online", "recipes/demo.yaml"]
    code = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run(
        line, cwd=ROOT, env=os.environ | code, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "VLLM_PYTHON must name an interpreter that has vLLM" in done.stderr
