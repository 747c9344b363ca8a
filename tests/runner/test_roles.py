"""Pages pass from one whole engine to another, for each kind of cache, and the text stays."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from nanovllm.config import Config, ConfigError, Disk, Speculate, TransferRole, load_config
from nanovllm.engine.tickets import Tickets
from nanovllm.kv.costs import TransferCosts
from nanovllm.parallel.mesh import first_rank
from nanovllm.roles import Backend, Role
from nanovllm.runner import roles
from nanovllm.runner.resolved import resolve_config
from nanovllm.runner.roles import check_role
from nanovllm.transfer.leases import Lease
from nanovllm.transfer.lender import Lender
from nanovllm.transfer.remote_pages import RemotePages
from nanovllm.wire import Generate
from tests.engine.test_ranks import ranked
from tests.kv.disk.stores import eventually
from tests.models.heads import eagle3_tensors, save_head
from tests.models.test_mtp import make_mtp
from tests.models.tiny import CASES, config_of, make_tiny
from tests.whole_engine import GREEDY, WholeEngine, prompts_of

SECRET = "the secret of these tests"
NGRAM = Speculate(method="ngram", tokens=3)


def with_role(config: Config, role: Role, *addresses: str, backend: Backend = "auto") -> Config:
    asked = TransferRole(
        role=role, listen=addresses[0], peers=list(addresses), secret=SECRET, backend=backend
    )
    return replace(config, recipe=replace(config.recipe, transfer=asked))


def spec_of(request_id: int, prompt: list[int], max_new: int, **more: Any) -> Generate:
    packed = array("i", prompt).tobytes()
    return Generate(request_id, packed, max_new, [], GREEDY, **more)


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("qwen3 gqa 3, tied", dict(cache_dtype="fp8", speculate=NGRAM)),
        ("qwen3 gqa 3, tied", dict()),
        ("deepseek_v3 tied", dict()),
        ("deepseek_v3 tied", dict(cache_dtype="fp8")),
        ("qwen3_next", dict(checkpoints=8)),
        (
            "qwen3_5_text",
            dict(host_gib=0.01, checkpoint_fraction=0.0, cache_dtype="fp8", speculate=NGRAM),
        ),
    ],
)
def test_the_text_is_that_of_one_engine(case: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    family, overrides = CASES[case]
    make_tiny(tmp_path, family, **overrides)
    check_texts(config_of(tmp_path), sizes)


def test_pages_of_a_draft_head_and_of_two_prefill_engines(tmp_path: Path) -> None:
    """The head's layers are further layers of the same pages. With --dp, D reads from each P."""
    make_mtp(tmp_path, "qwen3_next", **CASES["qwen3_next"][1])
    speculate = Speculate(method="mtp", tokens=2, adapt=False)
    check_texts(config_of(tmp_path), dict(checkpoints=8, speculate=speculate), num_prefill=2)


@pytest.mark.parametrize(
    ("case", "sizes"),
    [("qwen3 gqa 3, tied", dict()), ("qwen3_next that repeats itself", dict(checkpoints=12))],
)
def test_pages_from_the_tiers_of_a_prefill_server(
    case: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """P's device has 24 pages, its host memory 14, and its disk all. Each prompt comes twice."""
    family, overrides = CASES[case]
    make_tiny(tmp_path / "model", family, **overrides)
    config, disk = config_of(tmp_path / "model"), Disk(path=str(tmp_path / "pages"), gib=0.1)
    sizes = dict(slots=4, step_tokens=24, max_tokens=90) | sizes
    asked = with_role(config, "prefill", "127.0.0.1:0")
    p = WholeEngine(asked, pages=24, host_gib=14 * 4096 / 2**30, disk=disk, **sizes)
    assert p.runner.disk.scanned.wait(20)
    p.memory.tier.costs = TransferCosts(page_s=0, token_s=1, start_s=-1e9)
    lender, ended = p.runner.lender, list[Lease]()
    lender.call_when_ended(ended.append)
    asked = with_role(config, "decode", "{}:{}".format(*lender.server.address))
    d = WholeEngine(asked, pages=200, host_gib=0.01, **sizes)
    alone = WholeEngine(config, pages=200, **sizes)
    tickets = Tickets(d.runner.remote, 4)
    eventually(lambda: d.runner.remote._client.reads_from(lender.engine))
    prompts = [[one, *range(40, 80)] for one in range(5)]
    for i, prompt in enumerate(2 * prompts):
        is_second = i >= len(prompts)
        p.loop.handle(spec_of(i, prompt, 1, lends=is_second))
        p.run()
        eventually(lambda: p.loop.step() or not p.scheduler.num_moving)
        if not is_second:
            continue
        params = json.loads(p.handovers[i])
        spec = spec_of(i, prompt, 6, ticket=params["nanovllm_ticket"])
        alone.loop.handle(replace(spec, ticket=""))
        alone.run()
        tickets.offer(spec, b"")
        d.loop.handle(spec)
        d.run()
        assert d.cached[i] == params["remote_num_tokens"] == 40
        eventually(lambda count=i + 1 - len(prompts): len(ended) == count)
        p.scheduler.take_back(ended[-1].pages, ended[-1].state)
        p.scheduler.check()
    tiers = p.scheduler.stats().tiers
    assert tiers["disk.hit_tokens"] >= 100 and tiers["disk.failed"] == 0
    assert d.text == alone.text
    for end in (d.runner.remote, lender, p.runner.disk):
        end.close()


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("qwen3 gqa 3, tied", dict(cache_dtype="fp8")),
        ("deepseek_v3 tied", dict()),
        ("deepseek_v3 tied", dict(speculate=Speculate(method="mtp", tokens=2, adapt=False))),
    ],
)
def test_pages_are_read_while_the_prompt_is_computed(
    case: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """P is held after each step. D has read the pages of the first chunks by then, and no more."""
    family, overrides = CASES[case]
    (make_mtp if "speculate" in sizes else make_tiny)(tmp_path, family, **overrides)
    config = config_of(tmp_path)
    sizes = dict(pages=64, slots=4, max_tokens=90) | sizes
    p = WholeEngine(with_role(config, "prefill", "127.0.0.1:0"), step_tokens=8, **sizes)
    lender, ended = p.runner.lender, list[Lease]()
    assert lender is not None
    lender.call_when_ended(ended.append)
    asked = with_role(config, "decode", "{}:{}".format(*lender.server.address))
    d = WholeEngine(asked, host_gib=0.01, step_tokens=24, **sizes)
    alone = WholeEngine(config, step_tokens=24, **sizes)
    remote, sent = d.runner.remote, lender.server.counts
    assert remote is not None
    eventually(lambda: remote._client.reads_from(lender.engine))
    prompt = [*range(40, 40 + 61)]  # 15 pages and a token, in 8 chunks
    alone.submit(0, prompt, 10)
    alone.run()
    p.loop.handle(spec_of(0, prompt, 1, lends=True))
    while 0 not in p.handovers:
        p.loop.step()
    spec = spec_of(0, prompt, 10, ticket=json.loads(p.handovers[0])["nanovllm_ticket"])
    Tickets(remote, 4).offer(spec, b"")
    d.loop.handle(spec)
    d.loop.step()  # admits the request, which arrives
    seen = []
    while p.scheduler.request_ids():
        (lease,) = lender.leases._leases.values()
        ready = lease.num_ready
        eventually(lambda ready=ready: sent["pages"] == ready)
        seen.append(ready)
        assert d.scheduler.snapshot().arriving == [0] and not d.text
        p.loop.step()
    assert len(set(seen)) >= 4 and seen == sorted(seen) and 2 <= seen[0] < seen[-1] < 15
    d.run()
    assert d.text == alone.text and d.cached[0] == 60 and remote.counts == {"read": 1}
    assert sent["pages"] == 15 and not p.text
    eventually(lambda: ended)
    p.scheduler.take_back(ended[0].pages, ended[0].state, int(ended[0].request))
    p.scheduler.check()
    assert p.memory.pool.num_free == 64
    for end in (remote, lender):
        end.close()


def check_texts(config: Config, sizes: dict[str, Any], num_prefill: int = 1) -> None:
    """Compute prompts on prefill engines in turn, and check the texts of a decode engine."""
    sizes = dict(pages=64, slots=4, step_tokens=24, max_tokens=90) | sizes
    asked = with_role(config, "prefill", "127.0.0.1:0")
    prefills = [WholeEngine(asked, **sizes) for _ in range(num_prefill)]
    lenders = [p.runner.lender for p in prefills]
    peers = ["{}:{}".format(*lender.server.address) for lender in lenders]
    d = WholeEngine(with_role(config, "decode", *peers), **{"host_gib": 0.01, **sizes})
    alone = WholeEngine(config, **sizes)
    remote = d.runner.remote
    assert remote is not None and d.runner.lender is None
    tickets, ended = Tickets(remote, 4), list[Lease]()
    for p, lender in zip(prefills, lenders, strict=True):
        assert p.runner.remote is None
        lender.call_when_ended(ended.append)
        eventually(lambda engine=lender.engine: remote._client.reads_from(engine))
    prompts = [prompt for prompt in prompts_of(6) if len(prompt) > 12]
    for i, prompt in enumerate(prompts):
        p = prefills[i % num_prefill]
        alone.submit(i, prompt, 10)
        alone.run()
        p.loop.handle(spec_of(i, prompt, 1, lends=True))
        p.run()
        params = json.loads(p.handovers[i])
        spec = spec_of(i, prompt, 10, ticket=params["nanovllm_ticket"])
        tickets.offer(spec, b"")
        d.loop.handle(spec)
        d.run()
        assert d.cached[i] == params["remote_num_tokens"] == (len(prompt) - 1) // 4 * 4
        assert p.text.get(i, []) in ([], alone.text[i][:1])  # none if it was answered before
        eventually(lambda count=i + 1: len(ended) == count)
        p.scheduler.take_back(ended[i].pages, ended[i].state)
        p.scheduler.check()
    assert d.text == alone.text and len(prompts) >= 4
    assert remote.counts == {"read": len(prompts)}
    for engine in (*prefills, d):
        while engine.scheduler.has_work or engine.scheduler.num_moving:
            engine.loop.step()  # ends the last stores to host memory
        assert engine is d or engine.memory.pool.num_free == 64
        states = getattr(engine.memory, "states", None)
        assert states is None or (states.num_held == 0 and states.sizes["kept"] > 0)
    for end in (remote, *lenders):
        end.close()


def test_what_cannot_be_transferred_yet_is_one_line() -> None:
    asked = ["device=cpu", "load.format=dummy", "transfer.listen=127.0.0.1:1"]
    config = load_config(None, [*asked, "cache.prefix=false"], {"transfer.role": "prefill"})
    line = "transfer needs cache.prefix, which is false; drop one of them"
    with pytest.raises(ConfigError, match=f"^{line}"):
        check_role(resolve_config(config, first_rank(config.recipe.parallel)))


@pytest.mark.parametrize(
    ("case", "sizes", "ranks"),
    [
        ("qwen3 gqa 8", dict(), (2, 2)),
        ("qwen3 gqa 8", dict(cache_dtype="fp8"), (1, 2)),
        ("qwen3 gqa 8", dict(), (4, 1)),  # two ranks have a copy of each key/value head
        ("deepseek_v3 tied", dict(), (2, 1)),
        ("qwen3_next", dict(checkpoints=8), (2, 2)),
        ("qwen3_next", dict(checkpoints=8), (2, 1)),
        ("qwen3_5_text", dict(checkpoints=8, state_dtype="bfloat16"), (1, 2)),
        ("qwen3_next 1 value a key, dense between", dict(checkpoints=8), (4, 2)),
    ],
)
def test_ranks_read_their_shares_from_any_number_of_ranks(
    case: str, sizes: dict[str, Any], ranks: tuple[int, int], tmp_path: Path
) -> None:
    """The last prompt's pages of P's last rank cannot be read, so its whole prompt is computed."""
    family, overrides = CASES[case]
    model, *folders = [tmp_path / name for name in "mpd"]
    for folder in (model, *folders):
        folder.mkdir()
    if "gqa" in case:
        overrides = overrides | {"num_key_value_heads": 2}
    make_tiny(model, family, **overrides)
    check_shares(config_of(model), sizes, ranks, folders, is_latent=family == "deepseek_v3")


def test_pages_of_draft_heads_reach_another_number_of_ranks(tmp_path: Path) -> None:
    """The head of EAGLE has twice the key/value heads of its target."""
    folders = [tmp_path / name for name in "pd"]
    for folder in folders:
        folder.mkdir()
    make_tiny(tmp_path / "own", "qwen3", num_hidden_layers=5)
    fields = dict(num_key_value_heads=4)
    save_head(tmp_path / "head", eagle3_tensors(**fields), **fields)
    head = str(tmp_path / "head")
    speculate = Speculate(method="eagle3", model=head, tokens=2, adapt=False)
    check_shares(config_of(tmp_path / "own"), dict(speculate=speculate), (2, 1), folders)


def check_shares(
    config: Config,
    sizes: dict[str, Any],
    ranks: tuple[int, int],
    folders: list[Path],
    *,
    is_latent: bool = False,
) -> None:
    """Compute prompts on P, and check D's text and how much of each prompt was transferred."""
    sizes = dict(pages=64, slots=4, step_tokens=24, max_tokens=90) | sizes
    alone = WholeEngine(config, **sizes)
    asked = with_role(config, "prefill", "127.0.0.1:0")
    with engine_of(asked, ranks[0], folders[0], **sizes) as p:
        lender, ended = p.runner.lender, list[Lease]()
        assert lender is not None
        lender.call_when_ended(ended.append)
        asked = with_role(config, "decode", "{}:{}".format(*lender.server.address))
        with (
            noted_remotes() as remotes,
            engine_of(asked, ranks[1], folders[1], host_gib=0.01, **sizes) as d,
        ):
            remote = d.runner.remote
            assert remote is not None
            tickets = Tickets(remote, 4)
            eventually(lambda: are_connected(remotes, ranks[1], lender.engine))
            prompts = [prompt for prompt in prompts_of(6) if len(prompt) > 12]
            for i, prompt in enumerate(prompts):
                is_broken = i == len(prompts) - 1 and ranks[0] == 2
                alone.submit(i, prompt, 10)
                alone.run()
                p.loop.handle(spec_of(i, prompt, 1, lends=True))
                p.run()
                if is_broken:
                    break_share(lender)
                params = json.loads(p.handovers[i])
                spec = spec_of(i, prompt, 10, ticket=params["nanovllm_ticket"])
                tickets.offer(spec, b"")
                d.loop.handle(spec)
                d.run()
                remote.settle(i)
                if is_broken and not is_latent:
                    assert d.cached[i] == 0
                    continue
                assert d.cached[i] == params["remote_num_tokens"]
                eventually(lambda count=i + 1: len(ended) == count)
                p.scheduler.take_back(ended[i].pages, ended[i].state)
                own, num_pages = remote._limits, sum(d.cached.values()) // 4
                num_parts = num_pages + len(ended) * own.state_parts  # of each rank of D
                assert lender.sent_bytes == ranks[1] * num_parts * own.page_bytes > 0
            assert d.text == alone.text and len(prompts) >= 4
        lender.close()


@contextmanager
def noted_remotes() -> Iterator[list[RemotePages]]:
    """Yield the list of the remote pages of all ranks of D. Close them at the end."""
    remotes: list[RemotePages] = []

    def opened(*arguments: Any) -> RemotePages:
        remotes.append(RemotePages(*arguments))
        return remotes[-1]

    try:
        with patch.object(roles, "RemotePages", opened):
            yield remotes
    finally:
        for remote in remotes:
            remote.close()
    peers = [peer for remote in remotes for peer in remote._client._peers]
    eventually(lambda: all(peer._memory is None for peer in peers))


def are_connected(remotes: list[RemotePages], num_ranks: int, engine: str) -> bool:
    """Return True if all ranks of D have connected to the engine."""
    return [one._client.reads_from(engine) for one in remotes] == num_ranks * [True]


def engine_of(config: Config, ranks: int, folder: Path, **sizes: Any) -> Any:
    """Return a context with an engine of one rank or of several."""
    if ranks == 1:
        return nullcontext(WholeEngine(config, **sizes))
    return ranked(config, ranks, folder, **sizes)


def break_share(lender: Lender) -> None:
    """Let reads of rank 1's pages fail. Latents are the same on all ranks, and read from rank 0."""
    (share,) = lender.server._source.page.__self__.others
    share._path += ".gone"
    if share._connection is not None:
        share._connection.close()
