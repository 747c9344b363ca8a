"""Engines with draft heads: texts are those without drafts, and drafts those of the oracles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace as struct_with
from torch import Tensor

from nanovllm.attention.base import ForwardContext
from nanovllm.config import Config, Speculate
from nanovllm.models.eagle3 import Eagle3Head
from nanovllm.parallel.mesh import Mesh
from nanovllm.spec.base import DraftStep
from nanovllm.spec.model_base import StreamTaps
from nanovllm.spec.model_drafter import ModelDrafter
from nanovllm.wire import Sampling
from tests.end_to_end.test_speculation import PROMPTS as SPOKEN, WISHES, check_batched
from tests.models.heads import EAGLE3, eagle3_tensors, save_head
from tests.models.steps import Steps, load
from tests.models.test_eagle3 import Oracle
from tests.models.test_mtp import make_mtp, states_of_mtp
from tests.models.tiny import EXPERTS, HYBRID, M2, NEXT, V3, config_of, make_tiny
from tests.whole_engine import GREEDY, WholeEngine, prompts_of

HOT = Sampling(temperature=1.0, seed=3)
NUM_DRAFTS, PAGE_TOKENS, MAX_NEW, MARGIN = 3, 4, 12, 1e-3
PROMPTS = prompts_of(5, 3)
EAGLE_TARGETS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "qwen3_moe": EXPERTS,
    "minimax_m2": M2,
}
SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v3": V3,
    "glm4_moe_lite": dict(V3, n_group=1, topk_group=1),
    "qwen3_next": NEXT,
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": NEXT,
}


@dataclass
class Pair:
    """A target with a head, and the oracle of the head."""

    config: Config
    speculate: Speculate
    given: Callable[[Tensor], Tensor]  # of a text
    states: Callable[[Tensor, Tensor], Tensor]  # of pairs
    logits: Callable[[Tensor], Tensor]


def eagle3(folder: Path, family: str) -> Pair:
    reference = make_tiny(folder / "target", family, num_hidden_layers=5, **EAGLE_TARGETS[family])
    tensors = eagle3_tensors()
    save_head(folder / "head", tensors)
    tensors["embed_tokens.weight"] = reference.get_input_embeddings().weight.data
    oracle = Oracle(tensors, EAGLE3)

    def given_of(text: Tensor) -> Tensor:
        found = reference(text[None], output_hidden_states=True).hidden_states
        return oracle.given([found[layer][0] for layer in (2, 3, 4)])

    head = str(folder / "head")
    speculate = Speculate(method="eagle3", model=head, tokens=NUM_DRAFTS, adapt=False)
    config = config_of(folder / "target")
    return Pair(config, speculate, given_of, oracle.states, oracle.logits)


def mtp(folder: Path, family: str) -> Pair:
    reference, module = make_mtp(folder, family, **SIZES[family])

    def given_of(text: Tensor) -> Tensor:
        return reference.model(text[None]).last_hidden_state[0]

    def states(ids: Tensor, given: Tensor) -> Tensor:
        return states_of_mtp(module, ids, given)

    speculate = Speculate(method="mtp", tokens=NUM_DRAFTS, adapt=False)
    return Pair(config_of(folder), speculate, given_of, states, module.shared_head)


CASES = {
    **{f"eagle3 {family}": (eagle3, family) for family in EAGLE_TARGETS},
    **{f"mtp {family}": (mtp, family) for family in SIZES},
}

BATCHED = "eagle3 qwen3", "mtp deepseek_v3", "mtp qwen3_next", "mtp qwen3_5_text"


class Recorder:
    """Recorder of the drafts that a drafter proposes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drafts: list[tuple[list[int], list[int]]] = []  # text so far, drafts
        propose = ModelDrafter.propose

        def recorded(drafter: ModelDrafter, step: DraftStep) -> Tensor:
            drafts_RX = propose(drafter, step)
            for slot, (count, *drafts) in zip(
                step.slots_R.tolist(), drafts_RX.tolist(), strict=True
            ):
                if count:
                    length = int(step.lengths_N[slot])
                    self.drafts.append((step.tokens_NL[slot, : length + 1].tolist(), drafts))
            return drafts_RX

        monkeypatch.setattr(ModelDrafter, "propose", recorded)

    def wrong(
        self, pair: Pair, most: int = NUM_DRAFTS, max_new: int = MAX_NEW
    ) -> list[tuple[int, list[int], list[int]]]:
        """Return (length of the text, drafts, those of the oracle) where the first `most` differ.

        Drafts after the end of a request are not compared. Right after a prompt, a draft beyond the
        prompt's last page has no place for its keys.
        """
        found = []
        for text, drafts in self.drafts:
            length = len(text) - 1
            (end,) = {len(prompt) + max_new for prompt in PROMPTS if text[: len(prompt)] == prompt}
            room = -length % PAGE_TOKENS if text[:-1] in PROMPTS else most
            expected = drafts_of(text, pair, min(most, 1 + room, end - len(text)))
            if drafts[: len(expected)] != expected:
                found.append((length, drafts, expected))
        return found


@torch.inference_mode()
def drafts_of(text: list[int], pair: Pair, count: int) -> list[int]:
    """Return the oracle's drafts, up to a near tie: a margin that rounding could exceed."""
    ids = torch.tensor(text)
    given, ids = pair.given(ids[:-1]), ids[1:]
    drafts: list[int] = []
    while len(drafts) < count:
        state = pair.states(ids, given)[-1:]
        (best, second), (draft, _) = pair.logits(state)[0].topk(2)
        if best - second < MARGIN:
            break
        drafts.append(int(draft))
        given, ids = torch.cat([given, state]), torch.cat([ids, draft[None]])
    return drafts


def texts(
    pair: Pair,
    speculate: Speculate | None,
    sampling: Sampling,
    max_new: int = MAX_NEW,
    **sizes: Any,
) -> tuple[dict[int, list[int]], WholeEngine]:
    engine = WholeEngine(pair.config, speculate=speculate, page_tokens=PAGE_TOKENS, **sizes)
    for i, prompt in enumerate(PROMPTS):
        engine.submit(i, prompt, max_new, sampling)
    engine.run()
    return engine.text, engine


@pytest.mark.parametrize("case", CASES)
def test_drafts_are_those_of_the_oracle(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are in chunks next to decode rows. Each draft of each step is compared.

    It would find faults in recycled states, shifted tokens of prompts, and keys of rejected drafts.
    """
    make, family = CASES[case]
    pair = make(tmp_path, family)
    plain = texts(pair, None, GREEDY, step_tokens=24)[0]
    recorder = Recorder(monkeypatch)
    assert texts(pair, pair.speculate, GREEDY, step_tokens=24)[0] == plain
    assert len(recorder.drafts) >= 50
    assert recorder.wrong(pair) == []


@pytest.mark.parametrize("case", ["eagle3 minimax_m2", "mtp deepseek_v3", "mtp qwen3_5_text"])
@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
def test_preempted_requests_write_the_same_text(
    case: str, sampling: Sampling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, family = CASES[case]
    pair = make(tmp_path, family)
    plain = texts(pair, None, sampling, max_new=30)[0]
    recorder = Recorder(monkeypatch)
    found, engine = texts(pair, pair.speculate, sampling, max_new=30, pages=34)
    assert found == plain
    assert engine.scheduler.stats().num_preemptions > 0
    if sampling is GREEDY:  # further drafts need pages ahead, which are granted if there are any
        assert recorder.wrong(pair, most=1, max_new=30) == []


@pytest.mark.parametrize("case", ["eagle3 qwen3", "mtp deepseek_v3"])
@pytest.mark.parametrize(("dtype", "drafts_by"), [("fp8", "shared"), ("auto", "argmax")])
def test_other_recipes_write_their_text(
    case: str, dtype: str, drafts_by: str, tmp_path: Path
) -> None:
    make, family = CASES[case]
    pair = make(tmp_path, family)
    config = struct_with(pair.speculate, drafts_by=drafts_by, adapt=True)
    plain = texts(pair, None, HOT, cache_dtype=dtype)[0]
    assert texts(pair, config, HOT, cache_dtype=dtype)[0] == plain


@pytest.mark.parametrize("family", EAGLE_TARGETS)
def test_taps_are_streams_with_all_products(family: str, tmp_path: Path) -> None:
    """Tap n is the output of transformers' layer n - 1, before any norm, for each n."""
    reference = make_tiny(tmp_path, family, num_hidden_layers=3, **EAGLE_TARGETS[family])
    expected: list[Tensor] = []
    for layer in reference.model.layers:
        layer.register_forward_hook(lambda *found: expected.append(found[-1][0]))
    text = torch.tensor(PROMPTS[0])
    with torch.inference_mode():
        reference(text[None])
    steps = Steps(tmp_path, load(tmp_path), [text], Mesh())
    batch, taps = steps.batch((len(text),)), StreamTaps((1, 2, 3))
    with torch.inference_mode():
        ctx = ForwardContext(batch, steps.backend.bind(batch), all_hidden=True, taps=taps)
        with_taps = steps.model(batch.token_ids_T, ctx)
        plain = steps.hidden(batch, all_hidden=True)
    assert torch.equal(with_taps, plain)
    for ours, theirs in zip(taps.streams, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_tap_after_the_last_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs all tokens of a chunk after the last layer, not only the sampled ones."""
    pair = eagle3(tmp_path, "qwen3")
    fed: list[list[Tensor]] = []
    given = Eagle3Head.given
    monkeypatch.setattr(
        Eagle3Head,
        "given",
        lambda head, x, taps: (fed.append([x, *taps]), given(head, x, taps))[1],
    )
    plain = texts(pair, None, GREEDY)[0]
    for taps, is_of_all in (([1, 2, 4], False), ([1, 2, 5], True)):
        fed.clear()
        assert texts(pair, struct_with(pair.speculate, taps=taps), GREEDY)[0] == plain
        sizes = [(len(x), {len(tap) for tap in streams}) for x, *streams in fed]
        assert all((streams == {x}) or not is_of_all for x, streams in sizes)
        assert any(streams != {x} for x, streams in sizes) != is_of_all


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    found = {}
    for case in BATCHED:
        make, family = CASES[case]
        found[case] = make(tmp_path_factory.mktemp(family), family)
    return found


@settings(max_examples=5, deadline=None)
@given(
    case=st.sampled_from(BATCHED),
    wish=st.sampled_from(list(WISHES)),
    pages=st.integers(30, 60),
    page_tokens=st.sampled_from([4, 8]),
    slots=st.integers(1, 8),
    step_tokens=st.integers(8, 80),
    depth=st.integers(0, 2),
    prefix=st.booleans(),
    tokens=st.integers(1, 7),
    adapt=st.booleans(),
    abort=st.integers(0, len(SPOKEN) - 1),
)
def test_however_it_is_batched(
    pairs: dict[str, Pair],
    case: str,
    wish: str,
    tokens: int,
    adapt: bool,
    abort: int,
    **sizes: int,
) -> None:
    pair = pairs[case]
    speculate = struct_with(pair.speculate, tokens=tokens, adapt=adapt)
    check_batched(pair.config, wish, speculate, abort, **sizes)
