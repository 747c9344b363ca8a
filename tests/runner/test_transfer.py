"""Pages in host memory: the bytes of copies, and a whole engine on a CPU that uses them."""

from __future__ import annotations

import pytest

from nanovllm.config import load_config
from nanovllm.kv.tiers import TransferCosts
from tests.whole_engine import WholeEngine, prompts_of


def conversation(**sizes) -> WholeEngine:
    """Run prompts twice on the demo model, in a cache that holds few of them at once."""
    config = load_config(None, ["device=cpu"])
    engine = WholeEngine(config, page_tokens=8, slots=4, max_tokens=256, **sizes)
    if "host_gib" in sizes:
        engine.memory.tier.costs = TransferCosts(page_s=0, token_s=1, start_s=-1e9)  # always load
    for turn in range(2):
        for i, prompt in enumerate(prompts_of(8)):
            engine.submit(100 * turn + i, (prompt * 4)[:150], 20)
            engine.loop.step()
            engine.scheduler.check()
        engine.run()
    return engine


@pytest.mark.parametrize("depth", [0, 1])
def test_text_is_the_same_and_computed_once(depth: int) -> None:
    alone = conversation(pages=400, prefix=False)
    engine = conversation(pages=40, host_gib=0.05, depth=depth)
    assert engine.text == alone.text
    tiers = engine.scheduler.stats().tiers
    assert min(engine.cached[100 + i] for i in range(8)) >= 64
    assert tiers["host.hit_tokens"] >= 800 and tiers["host.loaded"] == tiers["host.hit_tokens"] / 8
    assert tiers["host.load_bytes"] == tiers["host.loaded"] * tiers["host.page_bytes"]
    assert tiers["host.stored"] == tiers["host.pages_used"] > 40
    pool = engine.memory.pool
    assert pool.num_free == pool.num_pages and not engine.loop.executor.moved()
