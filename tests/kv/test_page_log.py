"""Events follow the pages that can be reused, step by step, through evictions and tiers."""

from __future__ import annotations

from array import array
from random import Random
from typing import Any

import msgspec
import pytest

from nanovllm.kv.events import EventBatch, EventWriter, encode, hash_of
from nanovllm.kv.keys import PageKeys
from nanovllm.kv.page_log import Change, PageLog
from tests.kv.router_index import Index
from tests.paper.engine import PAGE, PaperEngine, generate


def plain(writer: EventWriter, changes: list[Change]) -> list[dict[str, Any]]:
    """Return the events of a batch as a consumer decodes them."""
    batch = msgspec.msgpack.decode(encode(EventBatch(1.5, writer.events(changes), 3)))
    assert batch[0] == 1.5 and batch[2] == 3 and len(batch) == 3
    events: list[dict[str, Any]] = batch[1]
    return events


def keys_of(tokens: range, salt: str = "", **adapter: Any) -> PageKeys:
    return PageKeys(array("i", tokens), salt, PAGE, **adapter)


def test_the_fields_of_events() -> None:
    """One event per text, with vLLM's names; the salt only with the first page."""
    found: list[Change] = []
    log, writer = PageLog(found.extend), EventWriter(PAGE, "full_attention")
    keys = keys_of(range(12), "tenant", adapter=b"7" * 8, adapter_name="legal", adapter_number=2)
    log.filled(keys, range(3))
    for i in range(3):
        log.registered(keys.full(i))
    log.registered(keys.last(11))  # a partly filled page is never announced
    log.flush()
    hashes = [int.from_bytes(keys.full(i)[-8:], "big") for i in range(3)]
    stored = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": list(range(12)),
        "block_size": PAGE,
        "lora_id": 2,
        "medium": "GPU",
        "lora_name": "legal",
        "extra_keys": [["legal", "tenant"], ["legal"], ["legal"]],
        "kv_cache_spec_kind": "full_attention",
    }
    assert plain(writer, found) == [stored]
    found.clear()
    log.forgotten((keys.full(2), keys.last(11)))
    log.forgotten((keys.full(1),))
    log.filled(keys, [1])
    log.registered(keys.full(1))
    log.flush()
    removed, again = plain(writer, found)
    assert removed == {"type": "BlockRemoved", "block_hashes": hashes[:0:-1], "medium": "GPU"}
    assert (again["parent_block_hash"], again["token_ids"]) == (hashes[0], [4, 5, 6, 7])


def test_copies_of_lanes_are_one_page() -> None:
    found: list[Change] = []
    log, writer = PageLog(found.extend), EventWriter(PAGE, "full_attention")
    keys = keys_of(range(4))
    for _ in range(2):
        log.filled(keys, [0])
        log.registered(keys.full(0))
    log.forgotten((keys.full(0),))
    log.flush()
    assert [event["type"] for event in plain(writer, found)] == ["BlockStored"]
    assert [event["type"] for event in plain(writer, [(keys.full(0),)])] == ["BlockRemoved"]
    assert plain(writer, [(keys.full(0),)]) == []


@pytest.mark.parametrize("tiers", [{}, {"host": 30, "fail_every": 3, "most_polls": 3}])
def test_an_index_of_events_is_that_of_the_engine(tiers: dict[str, Any]) -> None:
    """After each step, the router knows the full pages that can be found, and no other."""
    rng, index = Random(1), Index()
    writer = EventWriter(PAGE, "full_attention")
    engine = PaperEngine(num_pages=16, num_slots=3, budget=24, **tiers)
    log = PageLog(lambda changes: index.apply(plain(writer, changes), PAGE, "full_attention"))
    engine.memory.log = log
    prompts: dict[int, tuple[list[int], str]] = {}
    most, extras = 0, list[object]()
    for name in range(60):
        prompt = [rng.choice([1, 2])] * rng.randint(1, 20) + [rng.randint(3, 5)] * 9
        prompts[name] = prompt, rng.choice(["", "", "salt"])
        engine.say(generate(name, prompt, rng.randint(1, 9), salt=prompts[name][1]))
        for _ in range(rng.randint(1, 5)):
            engine.step()
            log.flush()
            assert index.texts == known(engine, prompts)
            most = max(most, len(index.texts))
            extras += index.extra_keys.values()
    assert most > 8 and ["salt"] in extras
    assert not tiers or engine.scheduler.stats().tiers["host.loaded"] > 9


def known(
    engine: PaperEngine, prompts: dict[int, tuple[list[int], str]]
) -> dict[int, tuple[int, ...]]:
    """Return the texts of all full pages that the engine would find, by hash."""
    found = {}
    for name, (prompt, salt) in prompts.items():
        text = array("i", prompt + engine.text.get(name, []))
        keys = PageKeys(text, salt, PAGE)
        for i in range(len(text) // PAGE):
            if keys.full(i) in engine.memory._page_of:
                found[hash_of(keys.full(i))] = tuple(text[: (i + 1) * PAGE])
    return found
