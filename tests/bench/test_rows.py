"""Rows for both engines: results/rows.py with a fake vLLM and the demo on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanovllm.adapters.peft import read_peft
from nanovllm.bench import store
from nanovllm.bench.record import Record
from nanovllm.config import load_config
from results import rows
from tests.bench.test_peers import ROOT, place, run_script, vllm_python
from tests.forks import with_server_packages
from tests.server.serving import eventually

__all__ = ["place"]
DEMO = "recipes/demo.yaml"


def two_layers(place: Path) -> str:
    """Return a recipe of the demo with two of its eight layers."""
    path = place / "demo.yaml"
    path.write_text("model: {name: demo, num_layers: 2}\ncache: {cpu_gib: 0.0625}\n")
    return str(path)


def measured(
    place: Path, part: str, names: str, flags: str, python: str = "", recipe: str = ""
) -> tuple[subprocess.CompletedProcess[str], list[Record]]:
    """Run `results/measure.sh PART` with two layers of the demo, or with another recipe.

    Return its output and its records.
    """
    results = place / "results"
    given = {
        "RECIPES": recipe or two_layers(place),
        "ROWS": names,
        "FLAGS": f"{flags} --results-dir {results}",
    }
    given |= {"VLLM_PYTHON": python} if python else {}
    done = run_script(place, part, given)
    return done, list(store.records(results))


def test_a_head_is_measured_at_the_same_rates_in_both_engines(place: Path) -> None:
    flags = "--loads bs1-256 --warmup 0"
    done, found = measured(place, "drafts", "eagle3-base,eagle3", flags, vllm_python(place), DEMO)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    base, ours, theirs = found
    assert [one.engine for one in found] == ["nanovllm", "nanovllm", "vllm 0.26.0"]
    head = str(place / "nanovllm-peers" / "eagle3" / "demo")
    rates = [0.65, 0.4, 0.2]
    assert base.changed == {"load.format": "dummy"}
    assert ours.changed["speculate.accept"] == rates and ours.changed["speculate.model"] == head
    assert 1.5 < ours.metrics["acceptance_length"] < 3.0  # 2.25 on average
    assert theirs.changed == {"speculate": "eagle3 0.65,0.4,0.2"}
    assert f"'model': '{head}'" in theirs.recipe["command"]
    assert f"'synthetic_acceptance_rates': {rates}" in theirs.recipe["command"]
    assert {one.metrics["output_tokens"] for one in found} == {256}
    expected = 55 + 55 + 140
    assert done.stdout.startswith(f"drafts: 3 rows, {expected} s expected\n")
    assert "vllm eagle3: measured after " in done.stdout


def test_adapters_of_both_engines(place: Path) -> None:
    flags = "--loads bs1-256 --warmup 0"
    done, found = measured(place, "adapters", "base,eight", flags, vllm_python(place))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    names = [(one.engine.split()[0], one.workload["name"]) for one in found]
    loads = ["bs1-256", "bs1-256-lora8"]
    many = ["bs1-256", "bs1-256", "bs1-256-lora1", "bs1-256-lora8"]
    assert names == [*(("nanovllm", n) for n in loads), *(("vllm", n) for n in many)]
    assert [one.changed for one in found[2:]] == [{}] + [{"slots": "8"}] * 3
    assert "max_loras=8, max_lora_rank=16" in found[-1].recipe["command"]
    folder = place / "nanovllm-peers" / "adapters" / "demo"
    assert read_peft(folder, "a1").most_rank == 16


def test_a_written_adapter_is_served_and_copies_are_equal(place: Path) -> None:
    every = rows.random_adapter(DEMO, rows.ALL_LINEARS[:4], copies=3)
    sizes = {(f.stat().st_ino, f.stat().st_size) for f in every.rglob("*.safetensors")}
    assert len(sizes) == 1 and [*sorted(f.name for f in every.iterdir())] == ["a1", "a2", "a3"]
    line = [sys.executable, "-m", "nanovllm", "bench", "--offline", DEMO, "--workload", "bs1-256"]
    flags = [*rows.setting(adapters__folder=str(every), adapters__max_rank=16), "--adapters", "3"]
    code = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = with_server_packages().start(
        [*line, "--warmup", "0", *flags, "--load-format", "dummy", "--results-dir", str(place)],
        cwd=ROOT,
        env=os.environ | code,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (one,) = store.records(place)
    assert one.workload["name"] == "bs1-256-lora3" and one.metrics["output_tokens"] == 256


def test_agents_of_both_engines(place: Path) -> None:
    sizes = "--concurrency 2 --sessions 2 --turns 3 --shared-len 300 --growth 60-200 --answers 4-12"
    sizes += " --longest 1200 --pauses 0.01-0.1 --set cache.pages=200 --set cache.host_gib=0.1"
    done, found = measured(place, "agents", "on", f"{sizes} --processes 1", vllm_python(place))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    ours, theirs = found
    assert [one.engine for one in found] == ["nanovllm", "vllm 0.26.0"]
    assert ours.changed["cache.host_gib"] == 0.1
    assert theirs.workload == ours.workload and ours.metrics["completed"] == 6
    assert theirs.recipe["command"].endswith(
        "--num-gpu-blocks-override 5440 --enable-prompt-tokens-details --kv-offloading-size 40 "
        "--api-server-count 4"
    )


def test_a_first_token_from_disk_comes_with_the_rate_of_the_disk(place: Path) -> None:
    sizes = "--tokens 500 --disk-gib 0.1 --set cache.page_tokens=16 --set cache.pages=40"
    flags = f"{sizes} --set cache.host_gib={115 * 16 * 8192 / 4 / 2**30} --disk-folder {place}"
    done, found = measured(place, "agents", "disk", flags)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (one,) = found
    assert (one.workload["name"], one.workload["tokens"], one.workload["rounds"]) == (
        "returning", 497, 1
    )  # fmt: skip
    cached = [one.metrics[f"{tier}_cached_tokens"] for tier in ("computed", "gpu", "host", "disk")]
    assert cached == [0, 496, 496, 496] and one.metrics["tokens_from_disk"] == 2 * 496
    times = {name for name, value in one.metrics.items() if name.endswith("_ms") and value > 0}
    assert times == {f"{tier}_ttft_ms" for tier in ("computed", "gpu", "host", "disk")}
    assert one.metrics["disk_read_gb_per_s"] > 0 and one.metrics["disk_is_direct"] in (0.0, 1.0)
    assert {path.name for path in place.iterdir()} >= {"results"}
    assert not list(place.glob("*/pages")), "the disk's folder is removed"


def test_rows_go_on_after_a_failure(place: Path) -> None:
    python = vllm_python(place, 'echo "no room on the GPU"; exit 3')
    flags = "--loads bs1-256 --warmup 0"
    done, found = measured(place, "thin", "8b,30b", flags, python)
    assert done.returncode == 1
    assert [one.engine for one in found] == ["nanovllm"] * 2
    assert done.stderr.count("vLLM ended with exit code 3") == 2
    assert "vllm 8b: failed with exit code 1 after " in done.stdout
    assert done.stderr.endswith("failed: vllm 8b, vllm 30b\n")


def test_without_vllm_ours_is_measured(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PYTHON", raising=False)
    done, found = measured(place, "thin", "8b", "--loads bs1-256 --warmup 0")
    assert done.returncode == 0, done.stderr[-2000:]
    assert [one.engine for one in found] == ["nanovllm"]
    assert "VLLM_PYTHON is not set: rows of vLLM are skipped\n" in done.stdout
    done, _ = measured(place, "thin", "9b", "")
    assert done.returncode == 2 and "no row 9b in thin" in done.stderr


def test_a_row_ends_at_its_limit_with_its_children(tmp_path: Path) -> None:
    line = f"sleep 40 & echo $! > {tmp_path}/child; sleep 30"
    begin = time.perf_counter()
    assert rows.run(["bash", "-c", line], 0.3) == "stopped at its limit of 0 s"
    assert time.perf_counter() - begin < 30.0
    child = Path("/proc", (tmp_path / "child").read_text().strip(), "stat")
    eventually(lambda: not child.exists() or ") Z " in child.read_text())
    assert rows.run(["bash", "-c", "exit 4"], 5.0) == "failed with exit code 4"
    assert rows.run(["true"], 5.0) == ""


@pytest.mark.parametrize("part", [name for name in rows.PARTS if name != "adapters"])
def test_settings_of_all_rows_are_valid(
    part: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters of 8B take 87 MB; those of the demo are measured above."""
    monkeypatch.chdir(ROOT)
    every = [*rows.PARTS[part]("")]
    named = [(row.engine, row.name) for row in every]
    assert len(named) == len({*named}) >= 4
    checked = 0
    for row in every:
        words = row.command
        if "--theirs" in words:
            assert isinstance(json.loads(words[words.index("--theirs") + 1]), dict)
        if row.engine == "vllm" or "bench" not in words:
            continue
        sets = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
        recipe = next(word for word in words if word.endswith(".yaml"))
        load_config(recipe, ["load.format=dummy", *sets])
        checked += 1
    assert checked or part == "agents"


def test_mtp_has_the_same_rates_and_fp8_the_same_weights(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (one,) = (row for row in rows.new("") if (row.engine, row.name) == ("vllm", "35b-mtp"))
    assert {"VLLM_USE_DEEP_GEMM=0", "--fp8"} <= {*one.command}
    given = json.loads(one.command[one.command.index("--theirs") + 1])["speculative_config"]
    assert given["method"] == "mtp" and given["synthetic_acceptance_rates"] == [0.85, 0.6]
    config = load_config(rows.MOE, ["load.format=dummy"])
    folder = rows.folder_for_both(config, is_fp8=True)
    model = json.loads((folder / "config.json").read_text())
    assert model["architectures"] == ["Qwen3_5MoeForCausalLM"]
    assert model["model_type"] == "qwen3_5_moe_text" and model["tie_word_embeddings"] is False
    left_out = model["quantization_config"]["modules_to_not_convert"]
    assert model["quantization_config"]["weight_block_size"] == [128, 128]
    assert "model.layers.39.linear_attn.in_proj_a" in left_out and "lm_head" in left_out
