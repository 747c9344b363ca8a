"""A decode engine with a disk: pages of P are written there, and found again without a ticket."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanovllm.config import Disk
from nanovllm.engine.tickets import Tickets
from nanovllm.kv.costs import TransferCosts
from nanovllm.runner.peers_and_disk import PeersAndDisk
from nanovllm.transfer.leases import Lease
from nanovllm.transfer.lender import Lender
from tests.kv.disk.stores import eventually
from tests.models.tiny import CASES, config_of, make_tiny
from tests.runner.test_roles import engine_of, spec_of, with_role
from tests.whole_engine import WholeEngine, prompts_of

SIZES: dict[str, Any] = dict(pages=64, slots=4, step_tokens=24, max_tokens=90)
PROMPTS = [prompt for prompt in prompts_of(6) if len(prompt) > 12]


@pytest.mark.parametrize(
    ("case", "sizes", "ranks"),
    [
        ("qwen3 gqa 8", dict(), 1),
        ("qwen3 gqa 8", dict(), 2),
        ("qwen3_next", dict(checkpoints=8), 1),
    ],
)
def test_pages_of_a_prefill_server_come_back_from_disk(
    case: str, sizes: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    """The second engine starts with an empty GPU, and its requests have no tickets."""
    family, overrides = CASES[case]
    if "gqa" in case:
        overrides = overrides | {"num_key_value_heads": 2}
    folders = [tmp_path / name for name in ("model", "first", "second")]
    for folder in folders:
        folder.mkdir()
    make_tiny(folders[0], family, **overrides)
    config, sizes = config_of(folders[0]), SIZES | sizes
    alone = WholeEngine(config, **sizes)
    for i, prompt in enumerate(PROMPTS):
        alone.submit(i, prompt, 10)
        alone.run()
    p = WholeEngine(with_role(config, "prefill", "127.0.0.1:0"), **sizes)
    lender = p.runner.lender
    assert lender is not None
    decode = with_role(config, "decode", "{}:{}".format(*lender.server.address))
    sizes |= dict(host_gib=0.01, disk=Disk(path=str(tmp_path / "kept"), gib=0.1))
    for has_tickets, folder in ((True, folders[1]), (False, folders[2])):
        with engine_of(decode, ranks, folder, **sizes) as d:
            both = d.runner.disk
            assert isinstance(both, PeersAndDisk) and both.writable.scanned.wait(20)
            check_texts(p if has_tickets else None, lender, d, both, alone)
            both.close()
    lender.close()


def check_texts(
    p: WholeEngine | None, lender: Lender, d: WholeEngine, both: PeersAndDisk, alone: WholeEngine
) -> None:
    """Check D's texts, and that all full pages of prompts come from P, or without P from disk."""
    d.memory.tier.costs = TransferCosts(page_s=0, token_s=1, start_s=-1e9)
    ended: list[Lease] = []
    lender.call_when_ended(ended.append)
    eventually(lambda: both.remote._client.reads_from(lender.engine))
    most = {i: (len(prompt) - 1) // 4 * 4 for i, prompt in enumerate(PROMPTS)}
    for i, prompt in enumerate(PROMPTS):
        ticket = ""
        if p is not None:
            p.loop.handle(spec_of(i, prompt, 1, lends=True))
            p.run()
            ticket = json.loads(p.handovers[i])["nanovllm_ticket"]
        spec = spec_of(i, prompt, 10, ticket=ticket)
        if ticket:
            Tickets(both.remote, 4).offer(spec, b"")
        d.loop.handle(spec)
        d.run()
        both.remote.settle(i)
        if p is not None:
            eventually(lambda count=i + 1: len(ended) == count)
            p.scheduler.take_back(ended[i].pages, ended[i].state)
        eventually(lambda: d.loop.step() or not d.scheduler.num_moving)
    tiers = d.scheduler.stats().tiers
    assert d.text == alone.text and d.cached == most and len(PROMPTS) >= 4
    source, other = ("peer", "disk") if p is not None else ("disk", "peer")
    assert tiers[f"{source}.loaded"] > 20 and tiers[f"{other}.loaded"] == 0
    assert tiers["peer.failed"] == tiers["disk.failed"] == 0
    if p is not None:
        assert both.remote.counts == {"read": len(PROMPTS)}
        eventually(lambda: both.writable.counters().written == tiers["disk.stored"] > 20)


def test_pages_stay_on_the_disk_if_a_ticket_with_them_fails(tmp_path: Path) -> None:
    """A plain engine wrote them. They belong to the same model, whatever the role."""
    for name in ("model", "kept"):
        (tmp_path / name).mkdir()
    family, overrides = CASES["qwen3 gqa 8"]
    make_tiny(tmp_path / "model", family, **overrides)
    config, prompt = config_of(tmp_path / "model"), PROMPTS[0]
    below = dict(host_gib=0.01, disk=Disk(path=str(tmp_path / "kept"), gib=0.1))
    plain = WholeEngine(config, **SIZES, **below)
    plain.submit(0, prompt, 1)
    plain.run()
    most = len(prompt) // 4
    eventually(lambda: plain.loop.step() or plain.runner.disk.counters().written == most)
    p = WholeEngine(with_role(config, "prefill", "127.0.0.1:0"), **SIZES)
    lender = p.runner.lender
    assert lender is not None
    decode = with_role(config, "decode", "{}:{}".format(*lender.server.address))
    d = WholeEngine(decode, **SIZES, **below)
    both = d.runner.disk
    assert isinstance(both, PeersAndDisk) and both.writable.scanned.wait(20)
    eventually(lambda: both.remote._client.reads_from(lender.engine))
    p.loop.handle(spec_of(1, prompt, 1, lends=True))
    p.run()
    lender.server._source = lender.server._source._replace(page=unreadable)
    spec = spec_of(1, prompt, 1, ticket=json.loads(p.handovers[1])["nanovllm_ticket"])
    Tickets(both.remote, 4).offer(spec, b"")
    d.loop.handle(spec)
    d.run()
    eventually(lambda: d.loop.step() or not d.scheduler.num_moving)
    tiers = d.scheduler.stats().tiers
    assert d.text[1] == plain.text[0] and d.cached[1] == 0
    assert tiers["peer.failed"] == 1 and tiers["disk.failed"] == tiers["disk.loaded"] == 0
    assert both.writable.counters().written == 0 and tiers["disk.pages_used"] == most
    for end in (both, plain.runner.disk, lender):
        end.close()


def unreadable(page: int, share: int, shares: int) -> memoryview:
    raise OSError("the memory has been closed")
