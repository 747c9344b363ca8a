"""profile-kv: bytes by hand, what limits the cache, and the engine's own number of pages."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner
from msgspec.structs import replace

from nanovllm.bench import kv, record
from nanovllm.bench.kv import Budget, Fit, budget_lines, fit, size
from nanovllm.cli.commands import profile_kv
from nanovllm.config import ConfigError, load_config
from nanovllm.runner.build import build, load
from nanovllm.runner.resolved import resolved

GIB = 1 << 30
RECIPES = Path(__file__).parents[2] / "recipes"


def run(*arguments: str) -> list[str]:
    """The lines of the output, spaces folded."""
    done = CliRunner().invoke(profile_kv, ["--device", "cpu", *arguments])
    assert done.exit_code == 0, done.exception
    return [" ".join(line.split()) for line in done.output.splitlines() if line]


def test_qwen3_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "kv.json"
    arguments = [str(RECIPES / "qwen3-0.6b.yaml"), "--load-format", "dummy", "--json", str(path)]
    arguments += ["--set", "dtype=bfloat16", "--set", "cache.page_tokens=128"]
    token = 28 * 8 * (128 + 128) * 2
    pages = 2 * GIB // (128 * token) - 1  # less the padding page
    assert (token, pages) == (114688, 145)
    # Embedding (it is the head too), 28 blocks, final norm; the rotary table is float32.
    block = 1024 * (2048 + 2 * 1024) + 2048 * 1024 + 2 * 128 + 3 * 1024 * 3072 + 2 * 1024
    weights = 2 * (151936 * 1024 + 28 * block + 1024) + 18560 * 128 * 4
    assert run(*arguments, "--tokens-per-request", "1256") == [
        "Qwen/Qwen3-0.6B on CPU, bfloat16",
        "a token 112.0 KiB 28 layers x 8 heads x (128 + 128) x 2 bytes",
        "a page 14.0 MiB 128 tokens",
        f"weights {weights / GIB:.2f} GiB beside the cache",
        "room for pages 2.00 GiB cache.cpu_gib",
        "pages 145 limited by cache.cpu_gib",
        "tokens 18,560",
        "context 18,560 of one request; the model's own is 40,960",
        "requests of 1,256 14 10 pages each",
        "of them at once 14 as many as have room",
    ]
    written = record.read(path)
    assert (written.kind, written.workload["tokens_per_request"]) == ("kv", 1256)
    assert written.metrics == {
        "token_bytes": 114688.0, "page_bytes": 114688.0 * 128, "weight_bytes": float(weights),
        "room_bytes": 2.0 * GIB, "pages": 145.0, "pages_that_fit": 145.0, "tokens": 18560.0,
        "context": 18560.0,
        "requests": 14.0, "requests_at_once": 14.0,
    }  # fmt: skip


def test_slots_limit_what_is_useful() -> None:
    lines = run("--tokens-per-request", "100", "--set", "schedule.slots=4")
    assert "pages 1,024 limited by schedule.slots x server.max_model_tokens" in lines
    assert "requests of 100 146 7 pages each" in lines
    assert "of them at once 4 but schedule.slots is 4" in lines


def test_a_recipe_may_say_the_pages() -> None:
    lines = run("--set", "cache.pages=300")
    assert "pages 300 limited by cache.pages" in lines
    assert "pages that would fit 4,096" in lines
    assert "requests of 4,096 1 256 pages each" in lines


def test_impossible_wishes_are_refused_in_one_line() -> None:
    for arguments, message in (
        (["--tokens-per-request", "5000"], "is 5000; the context is 4096"),
        (["--set", "cache.cpu_gib=0.001", "--set", "cache.page_tokens=512"], "no room for a cache"),
    ):
        error = CliRunner().invoke(profile_kv, ["--device", "cpu", *arguments]).exception
        assert isinstance(error, ConfigError) and message in str(error)


def test_the_engine_takes_as_many_pages() -> None:
    config = load_config(None, ["cache.cpu_gib=0.01"], {"device": "cpu"})
    fitted = fit(config, resolved(config))
    assert fitted.pages == build(config).recipe.cache.pages == int(0.01 * GIB) // (16 * 8192) - 1


def test_weights_counted_from_shapes_are_those_loaded() -> None:
    config = load_config(None, flags={"device": "cpu"})
    found = resolved(config)
    model = load(config, found)
    held = {t.data_ptr(): t.untyped_storage().nbytes() for t in model.state_dict().values()}
    held[model.cos_sin_LA.data_ptr()] = model.cos_sin_LA.nbytes
    assert kv.weight_bytes(found) == sum(held.values())


def test_a_gpus_memory_is_shared_out_to_the_byte() -> None:
    budget = Budget(
        total=140 * GIB, share=0.9, weights=16 * GIB, step=3 * GIB, others=GIB // 2, graphs=GIB
    )
    assert budget.room == int(0.9 * 140 * GIB) - 20 * GIB - GIB // 2
    config = load_config(None, flags={"device": "cpu"})
    shown = [" ".join(line.split()) for line in budget_lines(budget, resolved(config))]
    assert shown == [
        "device memory 140.00 GiB",
        "of it ours 126.00 GiB 0.9 of it",
        "- weights 16.00 GiB",
        "- a full step 3.00 GiB measured: 512 prompt tokens, or 16 decode rows",
        "- others 512.0 MiB CUDA itself, and other processes",
        "- graphs 1.00 GiB kept free for them",
        "room for pages 105.50 GiB",
    ]
    fitted = Fit(
        token_bytes=1024, page_tokens=128, weight_bytes=16 * GIB, room_bytes=budget.room,
        budget=budget, fitting_pages=1000, useful_pages=2000, asked_pages=None, slots=64,
        context=4096,
    )  # fmt: skip
    assert (fitted.limit, fitted.page_bytes) == ("cache.memory_fraction", 131072)
    assert (fitted.pages_of(129), fitted.requests_of(129)) == (2, 500)
    assert replace(fitted, budget=None).limit == "cache.cpu_gib"


def test_sizes_read_well() -> None:
    assert [size(n) for n in (512, 114688, 3 << 20, 5 << 30)] == [
        "0.5 KiB", "112.0 KiB", "3.0 MiB", "5.00 GiB",
    ]  # fmt: skip
