"""Pages in host memory: a whole engine on a CPU that stores, evicts and loads them.

The text is that of an engine whose cache holds everything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.config import Config, ConfigError, Speculate, load_config
from nanovllm.engine import paper
from nanovllm.kv.hybrid import HybridMemory
from nanovllm.kv.layout import CacheLayout, PagedGroup
from nanovllm.kv.split import host_page_bytes
from nanovllm.kv.tiers import TransferCosts
from nanovllm.parallel.mesh import first_rank
from nanovllm.plan import Copies, Moves
from nanovllm.runner.caches import make_caches
from nanovllm.runner.resolved import resolved
from nanovllm.runner.transfer import HostPages, Mover
from tests.engine.test_ranks import ranked
from tests.models.tiny import CASES, config_of, make_tiny
from tests.whole_engine import WholeEngine, prompts_of

NGRAM = Speculate(method="ngram", tokens=3)
SMALL: dict[str, Any] = dict(pages=24, slots=4, step_tokens=24, max_tokens=90)


def two_turns(engine: WholeEngine) -> WholeEngine:
    """Submit prompts, then each again with its answer and more."""
    if engine.memory.tier_stats():
        engine.memory.tier.costs = TransferCosts(page_s=0, token_s=1, start_s=-1e9)  # always load
    prompts = [prompt for prompt in prompts_of(9) if len(prompt) > 20]
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, 10)
        engine.loop.step()
    engine.run()
    for i, prompt in enumerate(prompts):
        engine.submit(10 + i, prompt + engine.text[i] + [3, 4, 5], 8)
        engine.loop.step()
        engine.scheduler.check()
    engine.run()
    return engine


def check_loads(engine: WholeEngine) -> None:
    engine.loop.step()  # ends the last store
    tiers, pool = engine.scheduler.stats().tiers, engine.memory.pool
    assert tiers["host.hit_tokens"] == 4 * tiers["host.loaded"] >= 100
    assert tiers["host.load_bytes"] == tiers["host.loaded"] * tiers["host.page_bytes"]
    assert pool.num_free == pool.num_pages and not engine.loop.executor.moved()


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("qwen3 gqa 3, tied", dict(depth=0)),
        ("qwen3 gqa 3, tied", dict(cache_dtype="fp8", speculate=NGRAM)),
        ("deepseek_v3 tied", dict()),
        ("deepseek_v3 tied", dict(cache_dtype="fp8")),
        ("qwen3_next that repeats itself", dict(checkpoints=30, checkpoint_host_gib=0.01)),
        ("qwen3_next that repeats itself", dict(checkpoints=6, speculate=NGRAM)),
    ],
)
def test_the_text_is_the_same(case: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    family, overrides = CASES[case]
    make_tiny(tmp_path, family, **overrides)
    config = config_of(tmp_path)
    dtype = sizes.get("cache_dtype", "auto")
    alone = two_turns(WholeEngine(config, pages=400, slots=8, max_tokens=90, cache_dtype=dtype))
    engine = two_turns(WholeEngine(config, host_gib=0.01, **SMALL, **sizes))
    assert engine.text == alone.text
    if isinstance(engine.memory, HybridMemory):
        assert engine.scheduler.stats().tiers["host.loaded"] > 0
    else:
        check_loads(engine)


def test_two_ranks_move_their_own_shares(tmp_path: Path) -> None:
    family, overrides = CASES["qwen3 gqa 8"]
    make_tiny(tmp_path, family, **{**overrides, "num_key_value_heads": 2})
    config = config_of(tmp_path)
    alone = two_turns(WholeEngine(config, pages=400, slots=8, max_tokens=90))
    with ranked(config, 2, tmp_path, host_gib=0.01, **SMALL) as engine:
        assert two_turns(engine).text == alone.text
        check_loads(engine)


def test_without_the_key_there_are_no_transfers_and_no_copies() -> None:
    engine = WholeEngine(demo(), **SMALL)
    engine.submit(0, [5] * 40, 10)
    engine.run()
    assert engine.scheduler.stats().tiers == {} and not engine.scheduler.num_moving
    with pytest.raises(ValueError, match=r"has transfers, but cache\.host_gib is 0"):
        engine.runner.move(Moves([], [], []))


def demo(*changes: str) -> Config:
    return load_config(None, ["device=cpu", *changes])


def test_lanes_and_paper_refuse_the_key() -> None:
    asked = ["device=cpu", "cache.host_gib=1", "parallel.ep=2", "load.format=dummy"]
    moe = load_config("qwen3-30b-a3b", asked)
    with pytest.raises(ConfigError, match=r"^cache.host_gib needs parallel.ep of at most tp; drop"):
        resolved(moe, first_rank(moe.recipe.parallel))
    with pytest.raises(ConfigError, match=r"^cache.host_gib is for engine: model; engine: paper"):
        paper.build(demo("cache.host_gib=0.1", "engine=paper"))


def test_a_slot_has_all_layers_of_its_page_and_nothing_else() -> None:
    groups = PagedGroup((0, 2), 2, 8, 4, 4), PagedGroup((1,), 1, 12, 0, 4, "latent")
    layout, cpu = CacheLayout(groups), torch.device("cpu")
    caches = make_caches(layout, 5, 3, torch.float32, device=cpu)
    for nth, tensor in enumerate(caches.tensors):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 1000 * nth)
    before = [tensor.clone() for tensor in caches.tensors]
    host = HostPages(caches, 4)
    assert host.page_bytes == host_page_bytes(layout, 3) == 4096
    mover = Mover(host)
    mover.move(Moves([], [Copies(1, [(2, 3), (5, 0)])], []))
    mover.move(Moves([1], [], [Copies(2, [(3, 1), (0, 4)])]))
    for tensor, old in zip(caches.tensors, before, strict=True):
        assert tensor[:, [1, 4]].equal(old[:, [2, 5]])
        assert tensor[:, [0, 2, 3, 5]].equal(old[:, [0, 2, 3, 5]])
    assert [(one.ticket, one.ok, one.num_bytes) for one in mover.moved()] == [
        (1, True, 8192),
        (2, True, 8192),
    ]
    assert (
        host.row(3)[: 4 * 144]
        .view(torch.float32)
        .equal(torch.cat([old[:, 2].flatten() for old in before])[:144])
    )
    woken: list[int] = []
    mover.call_when_moved(lambda: woken.append(1))
    mover.move(Moves([2], [Copies(3, [(1, 1)])], []))
    while not woken:
        pass
    assert [one.ticket for one in mover.moved()] == [3]
