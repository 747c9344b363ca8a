"""Kernels that a first start compiles while weights load."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from nanovllm_kernels import compile_cache
from nanovllm_kernels.attention.flash_prefill import compile_causal
from nanovllm_kernels.attention.paged_decode_cute import compile_decode
from nanovllm_kernels.experts.grouped_linear import (
    DOWN_TILES,
    compile_down,
)
from nanovllm_kernels.products.gated_linear import compile_gated
from nanovllm_kernels.products.skinny_linear import compile_product

from nanovllm.config import load_config
from nanovllm.layers.fp8 import BlockFp8
from nanovllm.runner import precompile
from nanovllm.runner.precompile import compile_in_background, jobs_of
from nanovllm.runner.resolved import Resolved, resolve_config
from tests.spec.test_heads_planned import HEAD

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by flash-attn-4
RECIPES = Path(__file__).parents[2] / "recipes"
IN_CUTE = {"attention": "flash", "decode": "cute", "gated_linear": "cute", "skinny_linear": "cute"}


START = """
import sys
from nanovllm.config import load_config
from nanovllm.runner.build import build
from nanovllm.runner.precompile import products_of

products_of(build(load_config(None, flags={"device": "cpu"})).runner.model)
print({"torch._dynamo", "torch._inductor", "quack", "flash_attn"} & {*sys.modules})
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(compile_cache.CachedCompile, "folder", None)
    compile_cache.use_folder(tmp_path)
    return tmp_path


def on_a_gpu(name: str, *more: str, **kernels: str) -> Resolved:
    """Return the recipe as resolved on a Hopper GPU."""
    changes = ["cache.page_tokens=128", "load.format=dummy", *more]
    found = resolve_config(load_config(str(RECIPES / f"{name}.yaml"), changes))
    chosen = replace(found.recipe.kernels, **kernels)
    recipe = replace(found.recipe, dtype="bfloat16", kernels=chosen)
    return dataclasses.replace(found, recipe=recipe, dtype=torch.bfloat16)


def jobs_for(found: Resolved) -> list[compile_cache.Job]:
    return jobs_of(found, found.empty_model(torch.device("meta")))


@pytest.mark.parametrize(
    ("name", "group", "products"),
    [
        (
            "qwen3-0.6b",
            2,
            [
                (32, 4, 2, 1, False, False, True),
                (64, 2, 2, 1, True, False, False),
                (96, 2, 2, 1, True, True, False),
                (128, 1, 2, 1, False, False, False),
            ],
        ),
        (
            "qwen3-8b",
            4,
            [
                (64, 2, 1, 1, False, False, True),
                (64, 2, 1, 2, False, False, True),
                (96, 1, 2, 1, True, True, False),
                (96, 2, 1, 2, True, False, False),
                (96, 2, 2, 1, True, False, False),
                (128, 1, 2, 1, False, False, False),
                (192, 1, 1, 2, True, True, False),
            ],
        ),
    ],
)
def test_the_kernels_of_a_recipe(
    name, group, products, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.layers.kernels.obstacle", lambda device: None)
    expected = [
        compile_causal.job(group, 128, 128, "bfloat16"),
        compile_decode.job(group, 128, 128, 0, False),
        compile_gated.job("bfloat16", True),
        *[compile_product.job(*kind) for kind in products],
    ]
    assert jobs_for(on_a_gpu(name, **IN_CUTE)) == expected
    assert len({job.path for job in expected}) == len(expected)


def test_products_of_float32_weights_have_no_kernel(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of 16 bits would not compile, or would never be used."""
    monkeypatch.setattr("nanovllm.layers.kernels.obstacle", lambda device: None)
    found = on_a_gpu("qwen3-8b", gated_linear="cute", skinny_linear="cute")
    recipe = replace(found.recipe, dtype="float32")
    assert jobs_for(dataclasses.replace(found, recipe=recipe, dtype=torch.float32)) == []


def test_kernels_of_a_draft_head(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its attention has 2 query heads a key head, and its products have their own shapes."""
    monkeypatch.setattr("nanovllm.layers.kernels.obstacle", lambda device: None)
    path = folder / "head.json"
    path.write_text(json.dumps({**HEAD, "num_key_value_heads": 16}))
    speculate = ["speculate.method=eagle3", f"speculate.model={path}"]
    found = on_a_gpu("qwen3-8b", *speculate, **IN_CUTE)
    model = found.empty_model(torch.device("meta"))
    head = found.empty_draft_model(model, torch.device("meta"))
    assert head is not None
    own, both = jobs_of(found, model), jobs_of(found, model, head)
    attention = [compile_causal.job(2, 128, 128, "bfloat16")]
    attention += [compile_decode.job(2, 128, 128, width, False) for width in (0, 4)]
    assert compile_decode.job(4, 128, 128, 4, False) in own
    assert {*attention} <= {*both} and not {*attention} & {*own}
    assert {*both} == {*own, *attention, *precompile.products_of(head)}
    assert len(both) == len({*both}) > len(own) + len(attention)


@pytest.mark.parametrize("drafts", [0, 2])
def test_attention_of_latents(drafts: int, folder: Path) -> None:
    """DeepSeek-R1's first layers on one GPU: attention over expanded keys and over latents."""
    changes = ["parallel.tp=1", "model.num_layers=4", "cache.page_tokens=128", "load.format=dummy"]
    changes += ["speculate.method=ngram", f"speculate.tokens={drafts}"] if drafts else []
    found = resolve_config(load_config(str(RECIPES / "deepseek-r1.yaml"), changes))
    chosen = replace(found.recipe.kernels, attention="flash", decode="cute")
    recipe = replace(found.recipe, dtype="bfloat16", kernels=chosen)
    in_float32 = replace(recipe, dtype="float32")
    asked, wide = (
        jobs_for(dataclasses.replace(found, recipe=of))[:count]
        for of, count in ((recipe, 3 + bool(drafts)), (in_float32, None))
    )
    assert not [job for job in wide if "compile_expanded" in job.function]
    assert {(job.function.rpartition(".")[2], job.arguments) for job in asked} == {
        ("flash_prefill:compile_expanded", "(192, 128, 'bfloat16', 0)"),
        ("flash_prefill:compile_expanded", "(192, 128, 'bfloat16', 1)"),
        *(("latent_decode_cute:compile_decode", f"(128, 128, {w})") for w in {0, 1 + drafts} - {1}),
    }


def test_products_of_fp8_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An fp8 weight has kernels for many rows, and others for few."""
    monkeypatch.setattr("nanovllm.layers.kernels.obstacle", lambda device: None)
    found = on_a_gpu("qwen3-8b", skinny_linear="cute", fp8_linear="cute")
    quantised = replace(
        found.model_config, quantization_config=BlockFp8("fp8", (128, 128)), num_hidden_layers=1
    )
    found = dataclasses.replace(found, model_config=quantised)
    jobs = [(job.function.rpartition(".")[2], job.arguments) for job in jobs_for(found)]
    of_bf16 = [arguments for name, arguments in jobs if name == "skinny_linear:compile_product"]
    assert of_bf16 == ["(128, 1, 2, 1, False, False, False)"]  # the output projection
    many = [arguments for name, arguments in jobs if name == "block_fp8_cute:compile_tile"]
    kinds = "False, False, False", "True, False, False"
    assert {f"(256, 128, 2, 128, {kind})" for kind in kinds} < {*many}
    assert "(128, 256, 2, 128, False, False, True)" in many
    few = [arguments for name, arguments in jobs if name == "few_fp8_cute:compile_product"]
    assert len(few) == 12  # for each of four products: up to 2 rows, 8 and 16
    assert "(8, 1, 74, 32, True, True, True, False)" in few
    kernels = replace(found.recipe.kernels, fp8_linear="tiled")
    tiled = dataclasses.replace(found, recipe=replace(found.recipe, kernels=kernels))
    assert not [job for job in jobs_for(tiled) if "few_fp8" in job.function]


def test_the_products_of_experts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of experts are compiled once for all layers, for the dtype of the weights."""
    monkeypatch.setattr("nanovllm.layers.kernels.obstacle", lambda device: None)
    given = on_a_gpu("qwen3-30b-a3b", experts="cute")
    every = jobs_for(dataclasses.replace(given, dtype=torch.bfloat16))
    found = [job for job in every if "grouped_linear" in job.function]
    expected = {compile_down.job("bfloat16", sizes) for sizes in DOWN_TILES.values()}
    assert found == sorted(expected) and len(found) == 3


def test_what_is_not_written_in_cute_is_not_compiled(folder: Path) -> None:
    assert jobs_for(on_a_gpu("qwen3-0.6b")) == []
    assert [job.function for job in jobs_for(on_a_gpu("qwen3-0.6b", decode="cute"))] == [
        "nanovllm_kernels.attention.paged_decode_cute:compile_decode"
    ]


def test_a_start_imports_no_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_they_are_on_disk_when_the_weights_are_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(precompile, "LEAST_CORES", 1)
    jobs = [compile_decode.job(2, 64, 16, 0), compile_gated.job("float16", True)]
    wrong = compile_decode.job(2, 64, 17, 0)  # pages have at least 16 tokens, and a power of two
    with caplog.at_level("INFO"), compile_in_background([*jobs, wrong]):
        assert not any(job.path.exists() for job in jobs)
    assert [job.path.exists() for job in (*jobs, wrong)] == [True, True, False]
    assert "compiling in the background: 3 kernels" in caplog.text
    assert "1 of 3 kernels did not compile" in caplog.text
    assert [*folder.rglob("*.o")] and {path.suffix for path in folder.rglob("*.*")} == {".o"}

    def started(job: compile_cache.Job) -> None:
        raise AssertionError(f"{job} is on disk")

    monkeypatch.setattr(precompile, "start", started)
    with compile_in_background(jobs):
        pass


def test_few_cores_compile_where_a_kernel_is_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precompile, "LEAST_CORES", 1 << 20)
    monkeypatch.setattr(precompile, "start", lambda job: pytest.fail(f"started {job}"))
    with compile_in_background(
        [compile_decode.job(2, 64, 16, 0), compile_decode.job(4, 64, 16, 0)]
    ):
        pass


def test_an_error_meanwhile_stops_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "LEAST_CORES", 1)
    started, start = [], precompile.start
    monkeypatch.setattr(precompile, "start", lambda job: started.append(start(job)) or started[-1])
    jobs = [compile_decode.job(n, 128, 64, 0) for n in (2, 4)]
    with pytest.raises(ValueError, match="no such weight"), compile_in_background(jobs):
        raise ValueError("no such weight")
    assert [process.wait(10) for process in started] == [-9, -9]
    assert not any(job.path.exists() for job in jobs)
