"""The pages that profile-kv plans in host memory and on disk are those that an engine has."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from nanovllm.bench.gpus import CPU, KNOWN
from nanovllm.bench.kv import numbers
from nanovllm.bench.plan import plan_of
from nanovllm.config import Cache, Disk, Schedule, Server, load_config
from nanovllm.kv.costs import DISK_RATE, HOST_RATE, START_S, TransferCosts, break_even
from nanovllm.kv.hybrid import HybridMemory, memory_of
from nanovllm.kv.tiered import TieredMemory
from nanovllm.runner.build import build
from tests.models.tiny import CASES, config_of, make_tiny

GIB = 1 << 30


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("qwen3 gqa 8", "auto"),
        ("qwen3 gqa 8", "fp8"),
        ("deepseek_v3 tied", "auto"),
        ("deepseek_v3 tied", "fp8"),
        ("qwen3_next that repeats itself", "auto"),
    ],
)
def test_the_engine_has_the_planned_pages(case: str, dtype: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    make_tiny(tmp_path, family, **overrides)
    config, disk = config_of(tmp_path), Disk(path=str(tmp_path / "kept"), gib=0.03)
    cache = Cache(dtype=dtype, page_tokens=16, pages=40, host_gib=0.01, disk=disk, checkpoints=7)
    recipe = replace(
        config.recipe,
        cache=cache,
        schedule=Schedule(slots=4, step_tokens=64),
        server=Server(max_model_tokens=90),
    )
    config = replace(config, recipe=recipe)
    found = numbers(plan_of(config, CPU, 1), [64])
    built = build(config)
    memory = memory_of(built.layout, built.recipe.cache, built.runner.disk)
    assert isinstance(memory, TieredMemory) and built.runner.disk is not None
    stats = memory.tier.stats()
    host = built.runner.mover.host
    num_rows = sum(len(piece) for piece in host._pieces)
    assert found["pages"] == memory.pool.num_pages == 40
    assert found["pages in host memory"] == stats["host.pages"] == num_rows > 100
    assert found["tokens in host memory"] == 16 * num_rows
    assert num_rows * host.page_bytes <= 0.01 * GIB < (num_rows + 1) * host.page_bytes
    assert found["pages on disk"] == stats["disk.pages"] > 100
    assert found["tokens on disk"] == 16 * stats["disk.pages"]
    if isinstance(memory, HybridMemory):
        assert found["checkpoints"] == memory.states.count == 7
    built.runner.disk.close()


def test_ranks_share_the_disk_and_have_host_memory_each() -> None:
    below = "cache.host_gib=64", "cache.disk={path: /kept, gib: 1000}"
    asked = load_config("qwen3-8b", ["load.format=dummy", *below])
    one, two = (numbers(plan_of(asked, KNOWN["h200"], tp), [8000]) for tp in (1, 2))
    assert one["pages on disk"] == 1000 * GIB // ((18 << 20) + 4096)
    assert two["pages on disk"] == 1000 * GIB // ((9 << 20) + 4096) // 2
    assert [each["pages in host memory"] for each in (one, two)] == [
        64 * 1024 // 18,
        64 * 1024 // 9,
    ]


def test_a_load_from_disk_brings_the_state_too() -> None:
    """The state of Qwen3-Next is as long as thousands of its tokens."""
    dense, hybrid = break_even(1e-4, 24e3), break_even(1e-4, 24e3, 77e6)
    assert hybrid["host memory"] == dense["host memory"]
    byte_s = 1 / HOST_RATE + 1 / DISK_RATE
    assert hybrid["disk"] == pytest.approx((START_S + 77e6 * byte_s) / (1e-4 - 24e3 * byte_s))
    assert hybrid["disk"] > 80 * dense["disk"]


@pytest.mark.parametrize("num_parts", [0, 26])
def test_break_even_is_the_length_from_which_an_engine_loads(num_parts: int) -> None:
    size, page_bytes, token_s = 128, 3 << 20, 1e-4
    costs = TransferCosts(page_bytes / HOST_RATE, token_s, disk_page_s=page_bytes / DISK_RATE)
    pays = break_even(token_s, page_bytes / size, num_parts * page_bytes)

    def is_worth(pages: int, source: str) -> bool:
        if source == "host memory":
            return costs.is_worth(pages * size, pages, 0)
        count = pages + num_parts
        return costs.is_worth(pages * size, count, count)

    for source, tokens in pays.items():
        most = int(tokens / size)  # pages that do not pay
        assert not is_worth(most, source) and is_worth(most + 1, source)
