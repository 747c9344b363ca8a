"""profile-kv: table, record, plot, exit codes, and one error for each invalid flag."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from nanovllm.bench import kv, record
from nanovllm.bench.gpus import CPU, gpu_of
from nanovllm.bench.plan import STEP, MemoryPlan, plan_of
from nanovllm.cli.commands import config_of, numbers, profile_kv
from nanovllm.config import Config, ConfigError, load_config
from nanovllm.runner.build import build
from nanovllm.runner.resolved import resolve_config
from nanovllm.runner.room import check_room
from nanovllm.sampling.logprobs import Logprobs

GIB = 1 << 30
SVG = "{http://www.w3.org/2000/svg}"


def run(*arguments: str) -> Result:
    done = CliRunner().invoke(profile_kv, arguments)
    assert done.exit_code in (0, 1) and not isinstance(done.exception, ConfigError), done.exception
    return done


def lines(done: Result) -> list[str]:
    """Return the lines of the output with single spaces."""
    return [" ".join(line.split()) for line in done.output.splitlines() if line]


def test_a_plan_for_several_numbers_of_gpus(tmp_path: Path) -> None:
    path = tmp_path / "kv.json"
    done = run("qwen3-8b", "--gpu", "h200", "--tp", "1,2,3", "--lengths", "500,2000,32000",
               "--json", str(path))  # fmt: skip
    assert done.exit_code == 0
    found = lines(done)
    assert found[:3] == [
        "Qwen/Qwen3-8B fits on one H200, and its cache of 788,352 tokens has room for 1,539 "
        "requests of 500 tokens or 384 requests of 2,000 tokens or 24 requests of 32,000 tokens.",
        "Qwen/Qwen3-8B on H200, 139.8 GiB, 4,280 GB/s, 790 TFLOP/s", "tp 1 tp 2",
    ]  # fmt: skip
    for line in (
        "key/value heads, 36 layers 8 4", "a token, 36 layers, KiB 144 72",
        "a page, 36 layers, MiB 18 9", "context 32,768 32,768", "graphs, GiB 1 1",
        "decode 1 x 500, ms 3.55 1.78", "tp 1: fits", "tp 2: fits",
        "To pin this plan, add to the recipe:", "parallel: {tp: 1}",
        "cache: {page_tokens: 128, pages: 6159, memory_fraction: 0.9}",
    ):  # fmt: skip
        assert line in found
    (uncut,) = [line for line in found if line.startswith("tp 3")]
    assert (
        "num_attention_heads 32 is not a multiple of it" in uncut
        and "it can be 1, 2, 4, 8" in uncut
    )
    names = [f"{kind} {rows} x {n}, ms" for n in ("500", "2,000", "32,000")
             for kind in ("decode", "prefill") for rows in (1, 64, 256)]  # fmt: skip
    assert sum(line.startswith(tuple(names)) for line in found) == len(names) == 18
    written = record.read(path)
    assert (written.kind, written.workload["name"]) == ("kv", "profile-kv")
    assert written.recipe["model"] == "Qwen/Qwen3-8B"
    assert written.metrics["tp 1: pages"] == 6159
    assert written.metrics["tp 1: requests of 32,000"] == 6159 // 250
    assert written.metrics["tp 2: a token, 36 layers, KiB"] == 72
    assert "tp 1: decode 256 x 32,000, ms" not in written.metrics  # they do not fit


def test_the_nearest_on_a_cpu_has_the_slots_that_a_cpu_gets() -> None:
    done = run("--device", "cpu", "--tp", "3")
    assert done.exit_code == 1
    assert lines(done)[-5:] == [
        "For the nearest plan that fits, add to the recipe:",
        "parallel: {tp: 1}",
        "cache: {page_tokens: 16, pages: 511, memory_fraction: 0.9}",
        "schedule: {slots: 16, step_tokens: 512}",
        "server: {max_model_tokens: 4096}",
    ]


def test_what_does_not_fit_ends_with_1_and_the_nearest(tmp_path: Path) -> None:
    done = run("r1-distill-llama-70b", "--gpu", "h200", "--lengths", "32000")
    assert done.exit_code == 1
    found = lines(done)
    at = found.index("For the nearest plan that fits, add to the recipe:")
    assert found[at - 1] == "tp 1: does not fit: 6,656 tokens of cache are fewer than 32,000"
    assert found[0] == (
        "deepseek-ai/DeepSeek-R1-Distill-Llama-70B does not fit on one H200: 6,656 tokens of cache "
        "are fewer than 32,000; the nearest plan that fits is for 2 H200s, below."
    )
    assert found[at + 1 :][0] == "parallel: {tp: 2}" and len(found) == at + 5
    assert run("r1-distill-llama-70b", "--gpu", "h200", "--lengths", "6656").exit_code == 0
    assert (
        run("r1-distill-llama-70b", "--gpu", "h200", "--tp", "1,2", "--lengths", "32000").exit_code
        == 0
    )
    nothing = run("r1-distill-llama-70b", "--gpu", "mine:8", "--plot", str(tmp_path / "x.svg"))
    assert nothing.exit_code == 1
    assert lines(nothing)[0].endswith("; no number of these GPUs is enough.")
    assert "GiB short of the smallest cache (2 pages)" in lines(nothing)[-1]
    # There are no times, since no speeds of this GPU are available.
    assert not [line for line in lines(nothing) if line.startswith("decode")]
    uncut = run("qwen3-8b", "--gpu", "h200", "--tp", "3", "--json", str(tmp_path / "x.json"),
                "--plot", str(tmp_path / "y.svg"))  # fmt: skip
    assert uncut.exit_code == 1 and "no plan" in lines(uncut)
    assert lines(uncut)[0].startswith("Qwen/Qwen3-8B cannot be split like this: tp 3: ")
    assert lines(uncut)[-1] == "no plot: there is no plan to draw"
    assert not (tmp_path / "y.svg").exists()
    assert record.read(tmp_path / "x.json").metrics == {}


def test_ranks_that_are_asked_for_stand_for_those_of_the_recipe() -> None:
    """`serve --tp 8` does the same. The recipe's own parallel.tp is 4, which ep 8 does not fit."""
    found = lines(run("minimax-m2", "--gpu", "h200", "--tp", "8", "--set", "parallel.ep=8"))
    assert "tp 8: fits" in found and "parallel: {tp: 8, ep: 8}" in found


def test_without_a_gpu_it_is_the_cpu_s_cache() -> None:
    large = "--device", "cpu", "--set", "cache.cpu_gib=2"
    done = run(*large, "--set", "schedule.slots=4", "--lengths", "100")
    found = lines(done)
    assert done.exit_code == 0 and found[1] == "demo on CPU"
    assert {"pages 1,024", "tokens 16,384", "requests of 100 146", "tp 1: fits"} <= {*found}
    assert "room for the cache, GiB 2" in found and "graphs, GiB 1" not in found
    assert "requests of 2,000 8" in lines(run(*large, "--set", "schedule.slots=4"))
    short = lines(run(*large, "--set", "server.max_model_tokens=300"))
    assert [line for line in short if line.startswith("requests")] == ["requests of 300 16"]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("cache.cpu_gib=0.02",),
        ("cache.cpu_gib=0.02", "dtype=bfloat16"),
        ("cache.pages=77",),
        ("cache.page_tokens=32", "schedule.slots=3", "server.max_model_tokens=1000"),
        ("speculate.method=ngram", "schedule.step_tokens=64"),
    ],
)
def test_on_a_cpu_it_plans_what_serve_starts_with(overrides: tuple[str, ...]) -> None:
    """The plan has the pages, tokens and context that `serve` logs for the same options."""
    options = [word for one in overrides for word in ("--set", one)]
    found = lines(run("--device", "cpu", *options, "--lengths", "100"))
    served = build(config_of(None, overrides, device="cpu")).recipe
    pages, size = int(served.cache.pages), int(served.cache.page_tokens)
    assert f"pages {pages:,}" in found
    assert f"tokens {pages * size:,}" in found
    assert f"context {served.server.max_model_tokens:,}" in found


def test_what_does_not_fit_on_a_cpu_is_told_as_serve_tells_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nanovllm.runner.host_memory.host_memory", lambda **_: 30 * GIB)
    found = lines(run("qwen3-8b", "--device", "cpu"))
    cure = "--set dtype=bfloat16 takes 17.3 GiB in total"
    assert found[0].startswith("Qwen/Qwen3-8B does not fit on this CPU: ") and cure in found[0]
    config = config_of("qwen3-8b", (), device="cpu", load_format="dummy")
    with pytest.raises(ConfigError, match=cure):
        check_room(resolve_config(config))


def test_an_h100_is_not_faster_than_an_h200() -> None:
    def times(gpu: str) -> list[float]:
        plan = plan_of(load_config("qwen3-8b", ["load.format=dummy"]), gpu_of(gpu), 1)
        return [f(*of) for f in (plan.decode_s, plan.prefill_s) for of in ((1, 500), (64, 2000))]

    assert all(h100 >= h200 for h100, h200 in zip(times("h100"), times("h200"), strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "foo"], r"^--gpu foo: write h100, h200, .* or name:GiB with 1 to 9999"),
        (["--gpu", ""], r"^--gpu : write h100"),
        (["--tp", "0"], r"^--tp 0: write numbers from 1, none twice, as in 1,4,16,64$"),
        (["--tp", "1,1"], r"^--tp 1,1: write numbers from 1, none twice"),
        (["--tp", "-2"], r"^--tp -2: write numbers from 1"),
        (["--tp", "two"], r"^--tp two: write numbers from 1"),
        (["--lengths", "0"], r"^--lengths 0: write numbers from 1"),
        (["--lengths", ""], r"^--lengths : write numbers from 1"),
        (["--lengths", "1.5"], r"^--lengths 1.5: write numbers from 1"),
        (["--lengths", "500,32769"], r"^--lengths 32769: server.max_model_tokens is 32768$"),
        (["--json", "/nowhere/x"], r"^--json /nowhere/x: no file can be written there$"),
        (["--json", "9" * 300], r"^--json 9+: no file can be written there$"),
        (["--plot", "/"], r"^--plot /: no file can be written there$"),
        (["--set", "server.max_model_tokens=50000"], r"the model's context is 40960 tokens$"),
        (["--set", "model.num_layers=37"], r"^model.num_layers is 37; .* between 1 and 36, the"),
        (["--set", "cache.memory_fraction=2"], r"^cache.memory_fraction is 2.* between 0.05 and"),
    ],
)
def test_wrong_flags_are_one_clear_error(arguments: list[str], message: str) -> None:
    error = CliRunner().invoke(profile_kv, ["qwen3-8b", "--gpu", "h200", *arguments]).exception
    assert isinstance(error, ConfigError)
    assert re.search(message, str(error)), str(error)


def test_numbers() -> None:
    assert numbers("--tp", "1,2, 8") == (1, 2, 8)
    for text in ("01", "1,,2", "1,", "1234567890"):
        with pytest.raises(ConfigError, match=f"^--tp {text}: write numbers"):
            numbers("--tp", text)


def test_the_picture_shows_what_fills_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "out.svg"
    run("r1-distill-llama-70b", "--gpu", "l40s", "--tp", "2,4", "--plot", str(path))
    found = [node.text for node in ET.parse(path).iter(f"{SVG}text")]
    for words in (
        "deepseek-ai/DeepSeek-R1-Distill-Llama-70B on L40S, 44.5 GiB, 770 GB/s, 289 TFLOP/s",
        "weights", "full step", "CUDA and others", "graphs", "pages", "log-probabilities",
        "tp 2", "tp 4",
    ):  # fmt: skip
        assert found.count(words) == 1
    hybrid = tmp_path / "hybrid.svg"
    run("qwen3-next-80b-a3b", "--gpu", "h200", "--tp", "2", "--plot", str(hybrid))
    fills = [re.findall(r"fill: (#\w+)", node.get("style", "")) for node in ET.parse(hybrid).iter()]
    colours = {fill for found in fills for fill in found} - {"#ffffff"}
    assert len(colours) == 8  # one per part, including states and checkpoints
    assert "running states" not in {node.text for node in ET.parse(path).iter(f"{SVG}text")}
    error = CliRunner().invoke(profile_kv, ["--plot", str(tmp_path / "out.doc")]).exception
    assert isinstance(error, ConfigError) and "Format 'doc' is not supported" in str(error)


# -- compared with measurements ----------------------------------------------------------------


class Facts:
    total_memory = 140 * GIB


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[MemoryPlan]:
    """Pretend to have an H200, on which a step needs extra memory of 1 % of the weights."""
    asked: list[MemoryPlan] = []

    def measure(config: Config, plan: MemoryPlan) -> MemoryPlan:
        asked.append(plan)
        more = plan.used[kv.WEIGHTS] // 100
        return dataclasses.replace(plan, used=plan.used | {STEP: plan.used[STEP] + more})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: Facts)
    monkeypatch.setattr(kv, "measure", measure)
    return asked


def test_the_gpu_that_is_here_also_measures(here: list[MemoryPlan]) -> None:
    config = load_config("qwen3-8b", ["load.format=dummy"])
    found = kv.profile(config, None, (1, 2, 3), ())
    assert found.title.startswith("Qwen/Qwen3-8B on H200, 140 GiB")
    assert [*found.columns] == ["tp 1", "tp 1 measured", "tp 2", "tp 2 measured"]
    assert found.notes[0].startswith("tp 1: fits; computed / measured: taken 0.99")
    assert "tp 1 measured: full step, GiB" in found.metrics
    assert found.pinned is found.plans["tp 1"] and len(here) == 2
    ratio = found.metrics["tp 1: tokens"] / found.metrics["tp 1 measured: tokens"]
    assert 1 < ratio < 1.03 and f"tokens {ratio:.4f}" in found.notes[0]


def test_another_gpu_and_what_does_not_fit_are_not_measured(here: list[MemoryPlan]) -> None:
    config = load_config("r1-distill-llama-70b", ["load.format=dummy"])
    assert [*kv.profile(config, "b200", (1,), (500,)).columns] == ["tp 1"]
    assert not kv.profile(config, "h200", (1,), (32000,)).fits
    on_cpu = load_config(None, flags={"device": "cpu"})
    assert [*kv.profile(on_cpu, None, (1,), ()).columns] == ["tp 1"]
    assert here == []


@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_measured(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with simulated memory: 100 bytes in use, 7 of weights, peaks of 50 and 60.

    The bytes in use are no part of the step: they are what earlier measurements have left, without
    the workspaces, which are cleared before.
    """
    held, peaks, sampled, cleared = [100, 107, 110], [150, 170], [], []
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: cleared.append(len(held)), raising=False
    )
    cuda = {
        "memory_allocated": lambda device: held.pop(0), "reset_peak_memory_stats": lambda: None,
        "synchronize": lambda: None, "max_memory_allocated": lambda: peaks.pop(0),
        "mem_get_info": lambda device: (1000, 4000), "memory_reserved": lambda device: 2500,
        "empty_cache": lambda: None,
    }  # fmt: skip
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    of = Logprobs.of
    monkeypatch.setattr(
        Logprobs, "of", lambda self, *args: sampled.append(of(self, *args)) or sampled[-1]
    )
    flags = {"device": "cpu", "load.format": "dummy", "parallel.tp": tp}
    config = load_config(None, ["schedule.slots=3"], flags)
    plan = plan_of(config, CPU, tp)
    measured = kv.measure(config, plan)
    assert measured.used == {
        "weights": 7, "full step": 43, "CUDA and others": 500, "graphs": GIB,
        "log-probabilities": 60,
    }  # fmt: skip
    assert (measured.share, measured.spare, measured.resolved.mesh.tp_size) == (3600, 400, tp)
    (logprobs,) = [found for found in sampled if found is not None]
    assert logprobs.top_ids_WK.shape == (3, 20)  # maximum number for each slot
    assert not held and not peaks and cleared == [3]  # before the first bytes are counted
