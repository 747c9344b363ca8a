"""Record of a measurement: origin, schema, and files with one record."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from nanovllm.bench import record
from nanovllm.bench.record import Commit, Machine, Record
from nanovllm.config import ConfigError

ROOT = Path(__file__).parents[2]
HASH = "4f2c9ab" + "0" * 33
RECORD = Record(
    kind="offline",
    machine=Machine(gpu="NVIDIA H200", gpu_count=1, cpu="Xeon", cpu_cores=16, memory_gib=128.0,
                    system="Linux"),
    commit=HASH,
    dirty=False,
    started_at="2026-11-21T10:00:00+00:00",
    duration_s=5.0,
    argv=["nanovllm", "bench", "--offline", "recipes/qwen3-0.6b.yaml"],
    recipe={"model": "Qwen/Qwen3-0.6B", "schedule": {"depth": 1}},
    changed={"load.format": "dummy"},
    workload={"name": "w1", "concurrency": 256, "seed": 0},
    metrics={"output_tokens_per_s": 100.0, "ttft_p50_ms": 20.0, "duration_s": 5.0},
    versions={"torch": "2.11.0"},
)  # fmt: skip


def changed(**fields: object) -> Record:
    return msgspec.structs.replace(RECORD, **fields)


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_file_of_one_record_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    record.write_to(path, RECORD)
    assert record.read(path) == RECORD and path.read_text().startswith('{\n  "schema_version": 1,')
    with pytest.raises(ConfigError, match=r"cannot write .*/missing/a\.json: No such file"):
        record.write_to(tmp_path / "missing" / "a.json", RECORD)


def test_a_broken_record_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"schema_version": 1, "kind": "serve", "speed": 3}')
    with pytest.raises(ConfigError, match=r"a\.json is not a record: .*speed"):
        record.read(path)
    path.write_bytes(b'{"kind": "\xe9"}')
    with pytest.raises(ConfigError, match=r"a\.json is not a record: .*(?i:utf-8)"):
        record.read(path)
    with pytest.raises(ConfigError, match=r"missing\.json is not a record"):
        record.read(tmp_path / "missing.json")


def test_secrets_stay_out() -> None:
    argv = ["bench", "--api-key", "s3cret", "--api-key=s3cret", "--set", "server.api_key=s3cret"]
    assert record.without_secrets(argv) == [
        "bench", "--api-key", "...", "--api-key=...", "--set", "server.api_key=...",
    ]  # fmt: skip
    forms = ["--set=server.api_key=a=b", "server={api_key: s3cret}", "server.port=9"]
    assert record.without_secrets(forms) == [
        "--set=server.api_key=...", "server=...", "server.port=9",
    ]  # fmt: skip
    assert record.without_secrets(["a\udcff é"]) == [r"a\udcff é"]  # bytes that are not UTF-8
    assert record.without_secrets(["vllm serve m --api-key s3cret --port 1"]) == [
        "vllm serve m --api-key ... --port 1"
    ]
    recipe = {"model": "m", "server": {"api_key": "s3cret", "port": 1}, "server.api_key": "s3cret"}
    assert record.hide_secrets(recipe) == {
        "model": "m",
        "server": {"api_key": "...", "port": 1},
        "server.api_key": "...",
    }
    assert record.hide_secrets({"api_key": None}) == {"api_key": None}
    assert record.hide_secrets({"transfer": {"secret": "s3cret"}}) == {
        "transfer": {"secret": "..."}
    }
    assert record.hide_secrets({"transfer.secret": "s3cret"}) == {"transfer.secret": "..."}
    forms = ["--set", "transfer.secret=s3cret", "--set=transfer.secret=s3cret"]
    assert "s3cret" not in str(record.without_secrets(forms))


def test_schema_file_is_current() -> None:
    written = (ROOT / "results" / "schema.json").read_bytes()
    assert written == record.schema(), "python -m nanovllm.bench.record > results/schema.json"


def test_git_tells_commit_and_dirt(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert record.commit(tmp_path) == Commit(head, is_dirty=False)
    (tmp_path / ".commit").write_text("a" * 40)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "r.json").write_text("{}")
    assert record.commit(tmp_path, stated="b" * 40) == Commit(head, is_dirty=False)
    (tmp_path / "new.py").write_text("2")
    assert record.commit(tmp_path) == Commit(head, is_dirty=True)


def test_without_git_a_file_or_an_option_tells(tmp_path: Path) -> None:
    assert record.commit(tmp_path) == Commit("", is_dirty=True)
    (tmp_path / ".commit").write_text("a" * 40 + "\n")
    assert record.commit(tmp_path) == Commit("a" * 40, is_dirty=False)
    assert record.commit(tmp_path, stated="b" * 40 + "-dirty") == Commit("b" * 40, is_dirty=True)
    assert record.commit(tmp_path, stated="b" * 7) == Commit("", is_dirty=True)


def test_gpus_are_read_from_nvidia_smi() -> None:
    csv = (
        "NVIDIA H200, 580.159.03, 700.00, 1980, 3201, 1755, 143771\n"
        "NVIDIA H200, 580.159.03, 700.00, 1980, 3201, [N/A], 143771\n"
    )
    header = "| NVIDIA-SMI 580.159.03   Driver Version: 580.159.03   CUDA Version: 13.0  |"
    gpus = record.parse_gpus(csv, header)
    assert gpus == {
        "gpu": "NVIDIA H200",
        "gpu_count": 2,
        "gpu_memory_mib": "143771",
        "driver": "580.159.03",
        "cuda": "13.0",
        "power_limit_w": "700.00",
        "max_sm_mhz": "1980",
        "max_memory_mhz": "3201",
        "sm_mhz": "1755",
    }
    rest = {"cpu": "x", "cpu_cores": 1, "memory_gib": 1.0, "system": "Linux"}
    found = msgspec.convert(gpus | rest, Machine, strict=False)
    assert found.slug == "h200-x2"
    h100 = msgspec.structs.replace(found, gpu="NVIDIA H100 80GB HBM3", gpu_count=4)
    assert h100.slug == "h100-x4"
    assert (found.gpu_memory_mib, found.power_limit_w, found.max_sm_mhz) == (143771, 700, 1980)
    assert (found.max_memory_mhz, found.sm_mhz, found.driver) == (3201, 1755, "580.159.03")
    odd = csv.replace("1755", "[N/A]").replace("700.00", "[Not Supported]")
    other = msgspec.convert(record.parse_gpus(odd, "") | rest, Machine, strict=False)
    assert (other.sm_mhz, other.power_limit_w, other.cuda) == (0.0, 0.0, "")
    assert record.parse_gpus("", "") == {}


def test_a_machine_without_gpu_has_a_name() -> None:
    found = msgspec.structs.replace(record.fingerprint(), gpu="", gpu_count=0, cpu_cores=2)
    assert found.slug == "cpu-x2"
    assert found.memory_gib > 0.1 and found.cpu


def test_versions_come_without_importing() -> None:
    code = """
import sys
from nanovllm.bench.record import versions
sys.stdout.write(f"{versions()['torch']} {'torch' in sys.modules}")
"""
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.split()[1] == "False" and shown[0].isdigit()
