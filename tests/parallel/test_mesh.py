"""Several ranks, as threads of one process, compute the same as one rank."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from nanovllm.config import ConfigError
from nanovllm.models.config import read_model_config
from nanovllm.models.decoder import DecoderConfig
from nanovllm.parallel.cut import check_cut, span_of_vocabulary
from nanovllm.parallel.mesh import Mesh, Span
from nanovllm.sampling.shards import Shard
from tests.models.steps import Steps, load
from tests.models.test_parity import LENGTHS, SCHEDULES, our_logits, prompts
from tests.models.tiny import CASES, COMMON, config_of, make_tiny

COUNTS = {"qwen3_moe": "num_experts", "minimax_m2": "num_local_experts",
          "deepseek_v3": "n_routed_experts", "qwen3_next": "num_experts",
          "qwen3_5_moe_text": "num_experts", "glm4_moe_lite": "n_routed_experts"}  # fmt: skip


class Meeting:
    """Exchange of tensors between the threads of ranks."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.brought: list[Tensor | None] = [None] * size


@dataclass(frozen=True, slots=True)
class ThreadMesh(Mesh):
    meeting: Meeting = field(default_factory=lambda: Meeting(1))

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._shares(x).sum(0)

    def gather(self, x: Tensor) -> Tensor:
        return self._shares(x)

    def _shares(self, x: Tensor) -> Tensor:
        self.meeting.brought[self.tp_rank] = x.clone()
        self.meeting.barrier.wait()
        shares = torch.stack([each for each in self.meeting.brought if each is not None])
        self.meeting.barrier.wait()
        assert len(shares) == self.tp_size
        return shares


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_ranks_together_compute_the_same_logits(family: str, tp: int, tmp_path: Path) -> None:
    """There are 2 key/value heads. With tp 4 and 8, 2 and 4 ranks have a copy of each.

    Vocabularies have 3 blocks on 2 ranks, 5 blocks on 4 ranks with a partial last one, and one
    block on 8 ranks.
    """
    vocab_size = {2: 5003, 4: 8200, 8: 200}[tp]
    overrides = dict(num_attention_heads=8, tie_word_embeddings=tp == 4, vocab_size=vocab_size)
    make_tiny(tmp_path, family, **overrides)
    expected = our_logits(Steps(tmp_path, load(tmp_path), prompts(), Mesh()), [LENGTHS])
    meeting = Meeting(tp)

    def run(rank: int) -> list[Tensor]:
        mesh = ThreadMesh(rank, tp, meeting)
        steps = Steps(tmp_path, models[rank], prompts(), mesh)
        return our_logits(steps, SCHEDULES["one late"])

    models = [load(tmp_path, ThreadMesh(rank, tp, meeting)) for rank in range(tp)]
    with ThreadPoolExecutor(tp) as pool:
        found = list(pool.map(run, range(tp)))
    for rank in range(tp):
        for row, logits in enumerate(expected):
            assert torch.equal(found[rank][row], found[0][row])
            torch.testing.assert_close(found[rank][row], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize(
    "case",
    [
        *("qwen3_moe", "qwen3_moe 7, top 1, dense between", "minimax_m2 13, top 8, tied"),
        *("qwen3_next", "qwen3_next 4 values a key, tied", "qwen3_5_moe_text"),
        *("deepseek_v3", "deepseek_v3 q plain, dense 3, yarn 1", "glm4_moe_lite"),
    ],
)
def test_experts_over_two_ranks_compute_the_same_logits(case: str, ep: int, tmp_path: Path) -> None:
    """Each rank has half of the experts, or half of each expert."""
    family, overrides = CASES[case]
    count = COUNTS[family]
    overrides = {**overrides, count: 10}  # each rank can have 5 of them
    if family == "deepseek_v3":
        overrides["n_group"] = 5
    make_tiny(tmp_path, family, **overrides)
    expected = our_logits(Steps(tmp_path, load(tmp_path), prompts(), Mesh()), [LENGTHS])
    meeting = Meeting(2)
    meshes = [ThreadMesh(rank, 2, meeting, ep_size=ep) for rank in range(2)]
    models = [load(tmp_path, mesh) for mesh in meshes]
    moe = models[1].layers[-1 if "dense 3" in case else 1].mlp  # type: ignore[union-attr]
    inner = 20 if ep > 1 else 10
    has_shared = family in ("deepseek_v3", "glm4_moe_lite")
    count = 10 + has_shared if ep == 1 else 5  # the shared expert is one of them
    assert list(moe.experts.gate_up.shape) == [count, 2 * inner, 64]

    def run(rank: int) -> list[Tensor]:
        steps = Steps(tmp_path, models[rank], prompts(), meshes[rank])
        return our_logits(steps, SCHEDULES["one late"])

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(2)))
    for row, logits in enumerate(expected):
        assert torch.equal(found[0][row], found[1][row])
        torch.testing.assert_close(found[0][row], logits, rtol=1e-4, atol=1e-4)


def test_ranks_keep_neighbouring_shares() -> None:
    assert Mesh(2, 4).span("intermediate_size", 200) == Span(200, 100, 50)
    assert Mesh(2, 4).span("num_attention_heads", 8).of_width(16) == Span(128, 64, 32)
    copies = [Mesh(rank, 4).span_or_copy("num_key_value_heads", 2) for rank in range(4)]
    assert copies == [Span(2, 0, 1), Span(2, 0, 1), Span(2, 1, 1), Span(2, 1, 1)]


@pytest.mark.parametrize(
    ("vocab_size", "tp", "ends"),
    [
        (4096, 2, [2048, 4096]),
        (5003, 2, [4096, 5003]),
        (151936, 4, [38912, 77824, 116736, 151936]),
        (128256, 8, [16384, 32768, 49152, 65536, 81920, 98304, 114688, 128256]),
        (6145, 3, [4096, 6144, 6145]),
    ],
)
def test_a_vocabulary_is_cut_between_blocks(vocab_size: int, tp: int, ends: list[int]) -> None:
    spans = [span_of_vocabulary(Mesh(rank, tp), vocab_size) for rank in range(tp)]
    starts = [0, *ends[:-1]]
    assert [(span.start, span.start + span.count) for span in spans] == list(
        zip(starts, ends, strict=True)
    )
    assert not any(span.is_whole for span in spans)


def test_a_vocabulary_of_fewer_blocks_than_ranks_is_copied() -> None:
    spans = [span_of_vocabulary(Mesh(rank, 4), 5003) for rank in range(4)]
    assert spans == [Span(5003, 0, 5003)] * 4
    assert span_of_vocabulary(Mesh(), 5003).is_whole


def test_uneven_shares_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Mesh(0, 4).span("intermediate_size", 98)
    said = "parallel.tp is 4; the model's intermediate_size 98 is not a multiple of it"
    assert str(caught.value) == said
    with pytest.raises(ConfigError) as caught:
        Mesh(0, 4).span_or_copy("num_key_value_heads", 3)
    said = "parallel.tp is 4; it is not a multiple of the model's num_key_value_heads 3"
    assert str(caught.value) == said


def test_the_sizes_that_work_are_said(tmp_path: Path) -> None:
    sizes = dict(num_attention_heads=16, intermediate_size=104, vocab_size=200)
    model_config = make_config(tmp_path, "qwen3", num_key_value_heads=4, **sizes)
    for tp in (1, 2, 4, 8):
        check_cut(Mesh(0, tp), model_config)
    with pytest.raises(ConfigError) as caught:
        check_cut(Mesh(0, 16), model_config)
    said = "parallel.tp is 16; the model's intermediate_size 104 is not a multiple of it"
    assert str(caught.value) == f"{said}; it can be 1, 2, 4, 8"
    with pytest.raises(ConfigError) as caught:
        check_cut(Mesh(0, 2, ep_size=2), model_config)
    assert str(caught.value) == "parallel.ep is 2; the model has no experts; it can be 1"


@pytest.mark.parametrize(
    ("tp", "ep", "family", "said"),
    [
        (3, 1, "qwen3_moe", "parallel.tp is 3; the model's moe_intermediate_size 20 is not a "
         "multiple of it; it can be 1, 2, 4"),
        (4, 4, "qwen3_moe", "parallel.ep is 4; the model's num_local_experts 6 is not a multiple "
         "of it; it can be 1, 2, 3, 6"),
        (6, 1, "minimax_m2", "parallel.tp is 6; the model's intermediate_size 20 is not a multiple "
         "of it; it can be 1, 2, 4"),
        (2, 2, "minimax_m2", ""),
        (6, 6, "qwen3_moe", ""),
        (4, 1, "minimax_m2", ""),
    ],
)  # fmt: skip
def test_experts_are_cut_in_two_ways(
    tp: int, ep: int, family: str, said: str, tmp_path: Path
) -> None:
    counts = dict(num_experts=6) if family == "qwen3_moe" else dict(num_local_experts=6)
    inner = "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
    heads = dict(num_attention_heads=12, num_key_value_heads=12, **{inner: 20})
    model_config = make_config(tmp_path, family, num_experts_per_tok=3, **counts, **heads)
    if not said:
        check_cut(Mesh(0, tp, ep_size=ep), model_config)
        return
    with pytest.raises(ConfigError) as caught:
        check_cut(Mesh(0, tp, ep_size=ep), model_config)
    assert str(caught.value) == said


def make_config(folder: Path, family: str, **overrides: object) -> DecoderConfig:
    CONFIG_MAPPING[family](**{**COMMON, **overrides}).save_pretrained(folder)
    path = folder / "config.json"
    classes = {"qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "minimax_m2": "MiniMaxM2"}
    raw = json.loads(path.read_text()) | {"architectures": [f"{classes[family]}ForCausalLM"]}
    path.write_text(json.dumps(raw))
    return read_model_config(config_of(folder))[1]


def test_one_rank_by_itself_has_nobody_to_meet() -> None:
    Mesh().connect()
    with pytest.raises(ConfigError, match="parallel needs 2 ranks; only a server can have several"):
        Mesh(0, 2).connect()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_one_rank_by_itself_gathers_rows_as_wide_as_together(size: int) -> None:
    """Measurements of one rank alone then equal those with other ranks."""
    shard = Shard(Mesh(0, size), 5003)
    logits_SV = torch.arange(3.0 * shard.span.count).view(3, -1)
    rows_WV = shard.whole_rows(logits_SV, torch.tensor([0, 2]))
    assert rows_WV.shape == (2, 5003)
    assert torch.equal(rows_WV[:, : shard.span.count], logits_SV[[0, 2]])
