"""Ranks as threads, each with its own Runner: the text is that of one rank."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from nanovllm.config import Config, ConfigError, Parallel, Speculate, load_config
from nanovllm.engine import ranks
from nanovllm.engine.ranks import Follower, RankedExecutor
from nanovllm.experts import Experts, write_placement
from nanovllm.parallel import gloo
from nanovllm.parallel.gloo import GlooMesh
from nanovllm.parallel.nccl import NcclMesh
from nanovllm.parallel.places import Place, RankLostError, places_of
from nanovllm.parallel.ring import RING_BYTES, RingWriter, ring
from nanovllm.plan import Masks, StepPlan
from nanovllm.runner.build import cpu_threads
from nanovllm.runner.caches import NoStates
from nanovllm.wire import FinishReason, Sampling
from tests.models.corrupted import POISON, VALUES, poisoned
from tests.models.tiny import CASES, config_of, make_tiny
from tests.parallel.test_mesh import COUNTS
from tests.whole_engine import GREEDY, WholeEngine, prompts_of

SMALL = dict(pages=24, slots=4, step_tokens=24, max_tokens=90)  # chunked prompts and preemptions
NUM_REQUESTS = 10
EVERYTHING = Sampling(
    temperature=0.9,
    seed=9,
    top_p=0.95,
    top_k=50,
    min_p=0.001,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias={3: 4.0, 150: -2.0, 4500: 3.0},
    bad_words=[[3, 3], [77]],
    min_tokens=5,
    logprobs=2,
)
NGRAM = Speculate(method="ngram", tokens=3)
CONFIG = load_config(None, ["device=cpu"])


def cut(config: Config, tp: int, ep: int = 1) -> Config:
    return replace(config, recipe=replace(config.recipe, parallel=Parallel(tp=tp, ep=ep)))


@contextmanager
def ranked(config: Config, tp: int, folder: Path, **sizes: Any) -> Iterator[WholeEngine]:
    """Yield rank 0's engine. The other ranks follow it until the block ends."""
    divided = cut(config, tp, config.recipe.parallel.ep)
    cache = replace(divided.recipe.cache, disk=sizes.get("disk"))
    divided = replace(divided, recipe=replace(divided.recipe, cache=cache))
    first, *others = places_of(divided, str(folder))
    left: list[int] = []

    def follow(place: Place) -> None:
        engine = WholeEngine(config, place=place, **sizes)
        follower = Follower(engine.runner, place)
        try:
            while (message := place.recv()) is not None:
                follower.take(message)
            left.append(place.rank)
        finally:
            engine.mesh.backend.clear()  # otherwise rank 0 would wait for this rank
            for other in (engine.runner.disk, engine.runner.offered):
                if other is not None:
                    other.close()

    threads = [threading.Thread(target=follow, args=(place,)) for place in others]
    for thread in threads:
        thread.start()
    try:
        yield WholeEngine(config, place=first, **sizes)
    finally:
        first.close()
        for thread in threads:
            thread.join(20)
    assert sorted(left) == list(range(1, 1 + len(others)))


def text_of(engine: WholeEngine) -> dict[int, list[int]]:
    """Return the texts of requests of all kinds. The last finds a cached prefix."""
    prompts = prompts_of(NUM_REQUESTS)
    kinds = [
        GREEDY,
        Sampling(temperature=0.8, seed=7),
        Sampling(temperature=1.0, seed=8, top_p=0.9, top_k=20, presence_penalty=0.5),
        Sampling(temperature=0.0, logprobs=3),
        EVERYTHING,
    ]
    for at, prompt in enumerate(prompts):
        engine.submit(at, prompt, 14, kinds[at % 5], grammar="even" if at % 3 == 0 else "")
    engine.run()
    engine.submit(NUM_REQUESTS, prompts[0], 4)
    engine.run()
    engine.submit(NUM_REQUESTS + 1, [*prompts[0], 5, 6, 7], 4)
    engine.run()
    assert engine.num_masked > 24 and max(engine.cached.values()) > 0
    assert engine.scheduler.stats().num_preemptions > 0
    return engine.text


def num_weights(engine: WholeEngine) -> int:
    """Return the number of weights in the layers."""
    return sum(parameter.numel() for parameter in engine.runner.model.layers.parameters())


@pytest.mark.parametrize(
    ("family", "drafts", "tp", "vocab_size"),
    [
        ("qwen3", NGRAM, 2, 5003),  # 3 vocabulary blocks on 2 ranks
        ("llama", None, 2, 4096),
        ("qwen3", None, 4, 8200),  # 5 blocks, the last of which has 8 tokens
        ("llama", NGRAM, 4, 5003),  # each rank has all blocks
    ],
)
def test_text_is_that_of_one_rank(
    family: str, drafts: Speculate | None, tp: int, vocab_size: int, tmp_path: Path
) -> None:
    """The model has 2 key/value heads. With tp 4, two ranks have a copy of each."""
    make_tiny(tmp_path, family, tie_word_embeddings=tp == 4, vocab_size=vocab_size)
    same_text(config_of(tmp_path), drafts, tp, 1, tmp_path)


@pytest.mark.parametrize(
    ("family", "drafts", "tp", "ep"),
    [
        ("qwen3_moe", NGRAM, 2, 1),
        ("minimax_m2", NGRAM, 2, 2),
        ("minimax_m2", None, 4, 1),
        ("deepseek_v3", NGRAM, 2, 1),
        ("deepseek_v3", None, 4, 1),
        ("qwen3_next", NGRAM, 2, 1),
        ("qwen3_next", None, 2, 2),
        ("qwen3_next", NGRAM, 4, 1),
    ],
)
def test_experts_over_ranks_write_the_text_of_one(
    family: str, drafts: Speculate | None, tp: int, ep: int, tmp_path: Path
) -> None:
    overrides = {**CASES[family][1], COUNTS[family]: 10, "vocab_size": 5003}
    if family == "deepseek_v3":
        overrides["n_group"] = 5
    if family == "qwen3_next":  # a layer of each kind
        overrides |= {"num_hidden_layers": 2, "full_attention_interval": 2}
    if (family, tp) == ("qwen3_next", 4):  # each rank has one key head; attention has 2
        overrides |= {"linear_num_key_heads": 4, "linear_key_head_dim": 4}
    make_tiny(tmp_path, family, **overrides)
    same_text(config_of(tmp_path), drafts, tp, ep, tmp_path)


@pytest.mark.parametrize(
    ("family", "drafts", "tp"),
    [("qwen3_moe", NGRAM, 2), ("deepseek_v3", None, 2), ("qwen3_moe", None, 1)],
)
def test_copies_of_experts_write_the_text_of_one_rank(
    family: str, drafts: Speculate | None, tp: int, tmp_path: Path
) -> None:
    """Each of two ranks has 7 of 10 experts, and counts of tokens equal those of one rank.

    If each rank is a lane, its count is about half, and both together are about the whole.
    """
    overrides = {**CASES[family][1], COUNTS[family]: 10, "vocab_size": 5003}
    if family == "deepseek_v3":
        overrides["n_group"] = 5
    make_tiny(tmp_path, family, **overrides)
    config, file = config_of(tmp_path), tmp_path / "placement"
    alone = WholeEngine(config, speculate=drafts, **SMALL)
    expected = text_of(alone)
    load = alone.runner.expert_load(wait=True)
    assert load is not None and load.by_rank == {"0": sum(memoryview(load.tokens).cast("q"))}
    write_placement(load.lines(), file, 2, 2)
    recipe = replace(config.recipe, experts=Experts(placement=str(file)))
    there = cut(replace(config, recipe=recipe), 1, 2)
    with ranked(there, tp, tmp_path, speculate=drafts, **SMALL) as engine:
        assert text_of(engine) == expected
        found = engine.loop.executor.expert_load(wait=True)
        own = engine.runner.expert_load(wait=True)
        modes = engine.loop.executor.steps_by_mode
        assert sum(modes.values()) == engine.scheduler.stats().num_steps
        assert {mode.partition("/")[2] for mode in modes} >= {"mixed", "structured"}
        block: Any = engine.runner.model.layers[-1]
        assert len(block.mlp.places.ranks) == 2 and len(block.mlp.experts.gate_up) == 7
    assert found is not None and own is not None and len(found.by_rank) == 2
    assert (own.lines() == load.lines()) == (found.lines() == own.lines()) == (tp == 2)
    ours, all_ours, alones = (sum(one.by_rank.values()) for one in (own, found, load))
    assert 0.8 * alones < all_ours <= alones
    assert (ours < 0.75 * all_ours) == (tp == 1)
    assert all(value < 1.2 for key, value in found.imbalance.items() if key.endswith("/ranks"))


def same_text(config: Config, drafts: Speculate | None, tp: int, ep: int, folder: Path) -> None:
    alone = WholeEngine(config, speculate=drafts, **SMALL)
    expected = text_of(alone)
    with ranked(cut(config, 1, ep), tp, folder, speculate=drafts, **SMALL) as engine:
        assert text_of(engine) == expected
    assert num_weights(engine) < 0.7 * num_weights(alone)
    steps = engine.loop.executor.steps_by_mode, alone.runner.steps_by_mode
    # With more than 2 ranks heads are replicated, but states are not. Other numbers of both fit.
    fits_else = tp > 2 and not isinstance(alone.runner.states, NoStates)
    assert fits_else or dict(steps[0]) == dict(steps[1])
    for request_id, entries in alone.logprobs.items():
        found = [entry.logprob for entry in engine.logprobs[request_id]]
        assert np.allclose(found, [entry.logprob for entry in entries], atol=1e-5)


@pytest.mark.parametrize("value", VALUES)
def test_a_corrupted_request_ends_alone_on_two_ranks(value: str, tmp_path: Path) -> None:
    config = poisoned(tmp_path, VALUES[value], vocab_size=5003)

    def outcome(engine: WholeEngine) -> tuple[dict[int, list[int]], dict[int, FinishReason]]:
        wishes = (GREEDY, Sampling(seed=1), Sampling(seed=2, top_p=0.9, logprobs=1))
        for at, wish in enumerate(wishes):
            engine.submit(2 * at, [11, 3, 150, 42], 8, wish)
            engine.submit(2 * at + 1, [5, 20, POISON, 31], 8, wish)
        engine.run()
        return engine.text, engine.finish

    text, finish = outcome(WholeEngine(config))
    assert [finish[at] for at in range(6)] == [FinishReason.LENGTH, FinishReason.ERROR] * 3
    with ranked(config, 2, tmp_path) as engine:
        assert outcome(engine) == (text, finish)


def together(meshes: list[GlooMesh], do: Callable[[GlooMesh], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(meshes)) as pool:
        return list(pool.map(do, meshes))


def test_pages_are_the_least_of_any_rank(tmp_path: Path) -> None:
    meshes = [ranks.mesh_of(CONFIG, place) for place in places_of(cut(CONFIG, 2), str(tmp_path))]
    together(meshes, lambda mesh: mesh.connect())
    assert together(meshes, lambda mesh: mesh.least(10 - mesh.tp_rank)) == [9, 9]


# -- messages ------------------------------------------------------------------------------------


class Own:
    """Executor that records its calls. It is also its steps' handle."""

    def __init__(self) -> None:
        self.padded_tokens = self.gap_s = self.busy_s = 0
        self.mode = "NONE/decode"
        self.steps_by_mode: Counter[str] = Counter()
        self.vet = self.expert_load = None
        self.disk = self.lender = self.remote = None
        self.noted: list[Any] = []

    def launch(self, plan: StepPlan) -> Own:
        self.noted.append(plan)
        return self

    def sample(self, masks: Masks) -> None:
        self.noted.append(masks.tolist())


def test_followers_hear_of_plans_and_masks_in_order(tmp_path: Path) -> None:
    config = cut(CONFIG, 3)
    first, *others = places_of(config, str(tmp_path))
    plain = StepPlan(1, [], [], 1, np.int32([3]).tobytes(), [], 9, [])
    masked = StepPlan(2, [], [], 1, None, [], 9, [0])
    masks = np.array([[-1, 5], [7, 0]], np.int32)
    own, executor = Own(), None
    executor = RankedExecutor(own, first)  # type: ignore[arg-type]
    executor.launch(plain)
    executor.launch(masked).sample(masks)
    first.close()
    assert own.noted == [plain, masked, [[-1, 5], [7, 0]]]
    for place in others:
        heard = Own()
        follower = Follower(heard, place)  # type: ignore[arg-type]
        while (message := place.recv()) is not None:
            follower.take(message)
        assert heard.noted == own.noted


def test_masks_of_many_rows_pass_a_small_ring() -> None:
    """256 rows with a vocabulary of 151,936: 4.9 MB per step through 64 KiB."""
    plan = StepPlan(1, [], [], 256, None, [], 9, [*range(256)])
    masks = [
        np.random.default_rng(step).integers(-(2**31), 2**31, (256, 4_748), np.int32)
        for step in range(3)
    ]
    owns: list[Any] = [Own(), Own(), Own()]
    writer, readers = ring(2, 1 << 16)
    places = [Place(rank, 3, rank, "", end) for rank, end in enumerate([writer, *readers])]

    def follow(place: Place) -> None:
        follower = Follower(owns[place.rank], place)
        while (message := place.recv()) is not None:
            follower.take(message)

    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(follow, place) for place in places[1:]]
        executor = RankedExecutor(owns[0], places[0])
        for one in masks:
            executor.launch(plan).sample(one)
        places[0].close()
        assert [each.result(20) for each in done] == [None, None]
    expected = [noted for one in masks for noted in (plan, one.tolist())]
    assert [own.noted == expected for own in owns] == [True, True, True]


def test_a_follower_that_hangs_is_an_error(tmp_path: Path) -> None:
    first, *others = places_of(cut(CONFIG, 3), str(tmp_path))
    assert [place.device for place in (first, *others)] == [0, 1, 2]
    assert isinstance(first.ring, RingWriter)
    first.ring.patience_s = 0.1
    said = r"a rank no longer receives messages: reader 1 has not read for 0\.1 s"
    with pytest.raises(RankLostError, match=said):
        first.send(bytes(2 * RING_BYTES))


def test_a_follower_that_has_gone_is_an_error(tmp_path: Path) -> None:
    first, other = places_of(cut(CONFIG, 2), str(tmp_path))
    other.close()
    with pytest.raises(RankLostError, match="a rank no longer receives messages"):
        RankedExecutor(Own(), first).launch(  # type: ignore[arg-type]
            StepPlan(1, [], [], 1, None, [], 9, [])
        )


def test_paper_has_one_rank(tmp_path: Path) -> None:
    (place,) = places_of(load_config("paper", ["parallel.tp=4"]), str(tmp_path))
    assert (place.rank, place.size, place.ring) == (0, 1, None)


def test_engines_follow_each_other_on_the_devices(tmp_path: Path) -> None:
    config = load_config(None, ["parallel.tp=2", "parallel.dp=3"])
    places = [places_of(config, str(tmp_path), engine) for engine in range(3)]
    assert [[place.device for place in each] for each in places] == [[0, 1], [2, 3], [4, 5]]
    names = [place.name for each in places[1:] for place in each]
    assert names == [
        "nanovllm-engine.1", "nanovllm-rank1.1", "nanovllm-engine.2", "nanovllm-rank1.2",
    ]  # fmt: skip
    for each in places:
        for place in each:
            place.close()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [([], 14), (["parallel.tp=2"], 8), (["parallel.tp=2", "parallel.dp=4"], 2),
     (["parallel.tp=32"], 1), (["parallel.tp=2", "cpu_threads=5"], 5)],
)  # fmt: skip
def test_ranks_on_a_cpu_share_its_cores(
    changes: list[str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more threads than cores, a token takes ten times as long."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    model: Any = SimpleNamespace(parameters=lambda: [torch.empty(700, 1 << 20, device="meta")])
    assert cpu_threads(load_config(None, changes).recipe, model) == expected


def test_gpus_that_are_not_there_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    config = load_config(None, ["device=cuda", "parallel.dp=4"])
    (place,) = places_of(config, str(tmp_path), 3)
    mesh = ranks.mesh_of(config, place)
    assert (mesh.tp_size, taken) == (1, [3])
    for key, has_peers in {
        "exchange=torch": False,
        "eager=true": False,
        "eager=false": True,
    }.items():
        config = load_config(None, ["device=cuda", "parallel.tp=2", f"kernels.{key}"])
        mesh = ranks.mesh_of(config, Place(0, 2, 0, "", None, 0))
        assert isinstance(mesh, NcclMesh) and mesh.has_peers is has_peers
    changes = ["device=cuda", "parallel.tp=2", "kernels.invariant=true", "kernels.exchange=torch"]
    with pytest.raises(ConfigError) as caught:
        ranks.mesh_of(load_config(None, changes), Place(0, 2, 0, "", None, 0))
    assert str(caught.value) == "kernels.exchange is torch, but kernels.invariant needs triton"
    config = load_config(None, ["device=cuda", "parallel.tp=2", "parallel.dp=3"])
    with pytest.raises(ConfigError) as caught:
        ranks.mesh_of(config, Place(0, 2, 0, "", None, 0))
    assert str(caught.value) == (
        "parallel needs 6 GPUs, 2 for each of 3 engines; 4 are visible. "
        "Lower parallel.tp, ep or dp, or use --device cpu"
    )


# -- errors while loading -------------------------------------------------------------------------


def test_a_rank_that_cannot_be_built_says_which_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(config: object, mesh: object) -> None:
        raise ConfigError("model.safetensors: missing tensor x")

    monkeypatch.setattr(ranks, "build_runner", build)
    monkeypatch.setattr(ranks, "mesh_of", lambda _, place: SimpleNamespace(connect=lambda: None))
    with pytest.raises(ConfigError) as caught:
        ranks.follow(load_config(None), Place(3, 4, 3, "", None), lambda: None)
    assert str(caught.value) == "rank 3: model.safetensors: missing tensor x"


def test_a_lost_rank_is_an_error_at_once(tmp_path: Path) -> None:
    meshes = [ranks.mesh_of(CONFIG, place) for place in places_of(cut(CONFIG, 2), str(tmp_path))]
    together(meshes, lambda mesh: mesh.connect())
    meshes[1].backend.clear()
    with pytest.raises(RankLostError):
        meshes[0].all_reduce(torch.ones(2))


@pytest.mark.parametrize("kind", ["gather", "own_sum"])
def test_a_rank_that_waits_for_another_in_vain_ends_with_a_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It does so even if the other rank lives and takes part in a later exchange."""
    monkeypatch.setattr(gloo, "EXCHANGE_S", 0.3)
    meshes = [ranks.mesh_of(CONFIG, place) for place in places_of(cut(CONFIG, 2), str(tmp_path))]
    together(meshes, lambda mesh: mesh.connect())
    together(meshes, lambda mesh: getattr(mesh, kind)(torch.ones(2, 2)))
    begun = time.monotonic()
    with pytest.raises(RankLostError):
        getattr(meshes[1], kind)(torch.ones(2, 2))
    assert 0.3 <= time.monotonic() - begun < 10
    line = "rank 1 has waited 0.3 s for another rank, which hangs or computes less"
    assert caplog.messages == [line]
    with pytest.raises(RankLostError):  # at once, and without a line of its own
        getattr(meshes[0], kind)(torch.ones(2, 2))
    assert caplog.messages == [line]
