"""capture-graphs and profile-kv on a GPU."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from nanovllm_kernels import compile_cache
from nanovllm_kernels.attention import flash_prefill, paged_decode_cute
from nanovllm_kernels.products import gated_linear, skinny_linear

from nanovllm.bench import kv, record
from nanovllm.cli.commands import capture_graphs
from nanovllm.config import load_config
from nanovllm.runner.build import build
from nanovllm.runner.graphs import graph_sizes, piecewise_sizes
from nanovllm.runner.resolved import GIB


@pytest.mark.gpu
def test_every_graph_gives_the_eager_results_and_is_faster_where_launches_count(
    tmp_path: Path,
) -> None:
    path = tmp_path / "graphs.json"
    arguments = ["--device", "cuda", "--set", "schedule.slots=64", "--json", str(path)]
    done = CliRunner().invoke(capture_graphs, [*arguments, "--load", "1-64"])
    assert done.exit_code == 0, done.output
    found = record.read(path)
    modes = [(mode, size) for mode in ("FULL/decode", "FULL/draw") for size in graph_sizes(64)]
    modes += [("PIECEWISE/mixed", size) for size in piecewise_sizes(2048)]
    assert [(graph["mode"], graph["rows"]) for graph in found.workload["graphs"]] == modes
    assert found.metrics["graphs"] == len(modes)
    for mode, size in modes:
        replay_ms, eager_ms = (
            found.metrics[f"{mode} {size}: {name}_ms"] for name in ("replay", "eager")
        )
        assert 0 < replay_ms < eager_ms
    for graph in found.workload["graphs"]:
        is_draw = graph["mode"] == "FULL/draw"
        assert graph["differences"] == 0 if is_draw else graph["largest_logit"] > 0.1
    assert found.metrics["padding_percent"] == pytest.approx(8.61, abs=0.01)
    assert "decode, 1 to 64 rows: replayed" in done.output
    assert "prefill and mixed, 1 to 2048 tokens: replayed" in done.output
    assert re.search(r"mixed, 2049 to 8192 tokens: not captured: 8192 .* 2048", done.output)


@pytest.mark.gpu
def test_the_profile_finds_the_engines_number_of_pages() -> None:
    gc.collect()  # graphs of earlier engines would count as memory of the step
    config = load_config("qwen3-0.6b", ["load.format=dummy"], {"device": "cuda"})
    found = kv.profile(config, None, (1, 2), ())
    assert [*found.columns] == ["tp 1", "tp 1 measured", "tp 2", "tp 2 measured"]
    for tp in (1, 2):
        plan, measured = found.plans[f"tp {tp}"], found.plans[f"tp {tp} measured"]
        assert measured.used["weights"] == pytest.approx(plan.used["weights"], rel=0.01)
        assert measured.used["full step"] == pytest.approx(plan.used["full step"], rel=0.1)
        assert sum(measured.used.values()) == pytest.approx(sum(plan.used.values()), rel=0.25)
        assert measured.tokens == pytest.approx(plan.tokens, rel=0.03)
    measured = found.plans["tp 1 measured"]
    page_bytes = measured.resolved.layout.bytes_per_token * measured.resolved.page_tokens
    assert abs(int(build(config).recipe.cache.pages) - measured.pages) * page_bytes < GIB


@pytest.mark.gpu
def test_a_first_start_compiles_beside_the_loading_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = [
        flash_prefill.compile_causal,
        gated_linear.compile_gated,
        paged_decode_cute.compile_decode,
        skinny_linear.compile_product,
    ]
    for kernel in kernels:
        monkeypatch.setattr(kernel, "known", {})
    monkeypatch.setattr(compile_cache.CachedCompile, "folder", None)
    monkeypatch.setattr(compile_cache, "save", lambda kernel, path: pytest.fail(f"compiled {path}"))
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path))
    recipe = Path(__file__).parents[2] / "recipes" / "qwen3-0.6b.yaml"
    with caplog.at_level("INFO"):
        build(load_config(str(recipe), ["load.format=dummy", "cache.memory_fraction=0.2"]))
    num_kernels = sum(len(kernel.known) for kernel in kernels)
    assert num_kernels >= 7
    assert f"compiling in the background: {num_kernels} kernels" in caplog.text
    assert (
        "compiling in the background: done" in caplog.text and "did not compile" not in caplog.text
    )
