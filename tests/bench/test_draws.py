"""capture-graphs finds each fault of a graph that draws, with stand-ins for graphs on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from nanovllm.bench import draws, graphs as bench, record
from nanovllm.bench.graphs import GraphCost, measure, metrics, occupy, table
from nanovllm.cli.commands import capture_graphs
from nanovllm.config import Config, Speculate, load_config
from nanovllm.runner.graphs import Captured, DecodeGraphs
from nanovllm.runner.runner import Runner
from tests.runner.tape import capture_on_tapes
from tests.spec.test_heads import Pair, eagle3, mtp
from tests.whole_engine import WholeEngine, small_demo

SLOTS, DRAFTS = 6, 3
METHODS = {
    "none": None,
    "ngram": Speculate(method="ngram", tokens=DRAFTS),
    "synthetic": Speculate(method="synthetic", tokens=DRAFTS, accept=[0.8, 0.6, 0.3]),
    "draft_model": Speculate(method="draft_model", tokens=DRAFTS),
}
HEADS: dict[str, tuple[Callable[[Path, str], Pair], str]] = {
    "eagle3": (eagle3, "qwen3"),
    "mtp": (mtp, "glm4_moe_lite"),  # latent attention
    "mtp of a hybrid": (mtp, "qwen3_next"),  # with recurrent states
}
MODELS = ("draft_model", *HEADS)
DRAFTING = ("ngram", "synthetic", *MODELS)
FEW_ROWS = "draw, 1/2 rows", "draw, 1/4 rows"


def tensors_of(made: object) -> Iterator[Tensor]:
    if isinstance(made, Tensor):
        yield made
    elif is_dataclass(made):
        for field in fields(made):
            yield from tensors_of(getattr(made, field.name))
    elif isinstance(made, tuple):
        for part in made:
            yield from tensors_of(part)


@dataclass
class Again:
    """Stand-in for a CUDA graph: a replay runs the function again, into its first results."""

    run: Callable[[], Any]
    fault: Callable[[Any], object]  # takes the results, after each replay

    def __post_init__(self) -> None:
        self.output = self.run()

    def replay(self) -> None:
        for old, new in zip(tensors_of(self.output), tensors_of(self.run()), strict=True):
            old.copy_(new)
        self.fault(self.output)


@torch.inference_mode()
def capture(
    graphs: DecodeGraphs,
    sizes: list[tuple[int, int]],
    max_tokens: int,
    fault: Callable[[Any], object] = lambda made: None,
) -> None:
    """Capture stand-ins whose replays end with a fault."""
    for size in sizes:
        again = Again(partial(graphs.run, graphs.padded(size, max_tokens)), fault)
        graphs.captured[size] = Captured(again, again.output, 0.25, 3 << 20)


def captured(
    runner: Runner,
    faults: Mapping[str, Callable[[Any], object]] = MappingProxyType({}),
    tokens: Sequence[int] = (5, 12),
    *,
    adapted: bool = False,
) -> Runner:
    """Return the runner with stand-ins for graphs of up to `tokens`. `faults` are by name."""
    runner.builder.static_counts_R.zero_()
    sizes = [(min(SLOTS, num), 1) for num in tokens]
    if runner.num_drafts:
        sizes += [(num, 1 + DRAFTS) for num in tokens]
    graphs = runner.graphs.of(adapted=adapted)
    for name, each in {"decode": graphs.decode, **graphs.draws}.items():
        each.captured.clear()
        capture(
            each, each.distinct(sizes), runner.slots.max_tokens, faults.get(name, lambda made: None)
        )
    return runner


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take no times, since they are more than half of a comparison."""
    monkeypatch.setattr(bench, "seconds_of", lambda step, device: 0.001)


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Runner]:
    """Return a function of a method's name. Runners are made once."""
    made: dict[str, Runner] = {}

    def config(method: str) -> tuple[Config, Speculate | None]:
        if method in METHODS:
            return load_config(None, ["device=cpu"]), METHODS[method]
        make, family = HEADS[method]
        pair = make(tmp_path_factory.mktemp("head"), family)
        return pair.config, pair.speculate

    def runner_of(method: str) -> Runner:
        if method not in made:
            own, speculate = config(method)
            made[method] = WholeEngine(
                own, speculate=speculate, slots=SLOTS, page_tokens=8, pages=100, max_tokens=96
            ).runner
        return captured(made[method])

    return runner_of


def draws_of(runner: Runner) -> list[GraphCost]:
    return [graph for graph in measure(runner, range(1, 7)) if graph.differences is not None]


@dataclass
class Faithful:
    """Costs of draws without a fault, which are timed, and the results that were compared."""

    costs: list[GraphCost]
    results: list[list[Tensor]]
    changes_lengths: bool  # of prompts


@pytest.fixture(scope="module")
def faithful(runners: Callable[[str], Runner]) -> Callable[[str], Faithful]:
    """Return a function of a method's name. Draws are measured once."""
    made: dict[str, Faithful] = {}
    seconds_of, results = bench.seconds_of, draws.results

    def measured(method: str) -> Faithful:
        runner, compared = runners(method), []
        before = runner.slots.prompt_lengths_N.clone()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bench, "ROUNDS", 1)
            patch.setattr(bench, "STEPS", 1)
            patch.setattr(bench, "seconds_of", seconds_of)
            patch.setattr(
                draws, "results", lambda *given: compared.append(results(*given)) or compared[-1]
            )
            costs = draws_of(runner)
        return Faithful(costs, compared, not torch.equal(runner.slots.prompt_lengths_N, before))

    def faithful_of(method: str) -> Faithful:
        if method not in made:
            made[method] = measured(method)
        return made[method]

    return faithful_of


@pytest.mark.parametrize("method", [*METHODS, *HEADS])
def test_faithful_draws_have_no_differences(
    faithful: Callable[[str], Faithful], method: str
) -> None:
    found = faithful(method).costs
    names = ["draw", "draw without drafts"] if method in MODELS else ["draw"]
    if method in DRAFTING:
        names += [f"{name} of {1 + DRAFTS}" for name in (*names, *FEW_ROWS)]
    assert sorted(graph.mode for graph in found) == sorted(2 * [f"FULL/{name}" for name in names])
    assert [graph.rows for graph in found[:2]] == [5, SLOTS]
    assert all(graph.differences == 0 and graph.is_right for graph in found)
    assert all(graph.replay_ms > 0 and graph.eager_ms > 0 for graph in found)
    assert (found[0].capture_ms, found[0].memory_mib) == (250.0, 3.0)
    assert not faithful(method).changes_lengths


@pytest.mark.parametrize("method", DRAFTING)
def test_rows_accept_and_reject_and_find_drafts_and_do_not(
    faithful: Callable[[str], Faithful], method: str
) -> None:
    """Otherwise equal drafts would mean little."""
    wide = [found for found in faithful(method).results if found[0].shape[1] == 1 + DRAFTS]
    new_R = torch.cat([(tokens_RW >= 0).sum(1) for tokens_RW, *_ in wide])
    assert len(wide) >= 4
    if method != "synthetic":  # accepts by chance
        each = [(tokens_RW >= 0).sum(1).tolist() for tokens_RW, *_ in wide]
        all_rows, quarter = [[1, 2]] * 2 + [[1, 2, 3, 1, 1]] * 2, [[1, 2]] * 2 + [[1, 2, 3]] * 2
        without_drafts = all_rows if method in MODELS else []
        assert each == all_rows + quarter + all_rows + without_drafts
    assert {1, 3} <= set(new_R.tolist())
    drafts_RX = torch.cat([found[3] for found in wide if found[3][:, 0].any()])
    fed_R = drafts_RX[new_R[: len(drafts_RX)] > 0, 0]
    assert set(drafts_RX[:, 0].tolist()) <= {0, DRAFTS} and (fed_R == DRAFTS).any()
    if method == "ngram":  # rows that draw, without a match
        assert (fed_R == 0).any()
    assert len(drafts_RX[:, 1:].unique()) >= 6


def wrong_after(runner: Runner, **faults: Callable[[Any], object]) -> set[str]:
    """Return the names of draws that are found wrong. Those of a name are wrong in all widths."""
    graphs = runner.graphs.plain.draws
    for name, each in graphs.items():
        for one in each.captured.values():
            one.graph.fault = faults.get(name, lambda made: None)
    is_right = dict[str, set[bool]]()
    for cost in draws_of(runner):
        name = cost.mode.removeprefix("FULL/").removesuffix(f" of {1 + DRAFTS}")
        is_right.setdefault(name, set()).add(cost.is_right)
    assert is_right.keys() <= graphs.keys() and all(len(each) == 1 for each in is_right.values())
    return {name for name, each in is_right.items() if each == {False}}


@pytest.mark.parametrize("method", [*METHODS, *HEADS])
def test_each_fault_of_a_draw_is_found(runners: Callable[[str], Runner], method: str) -> None:
    """A draw loses a result, or all of them."""
    runner = captured(runners(method), tokens=[12])
    slots = runner.slots
    lengths_N, tokens_NL = torch.zeros_like(slots.lengths_N), torch.zeros_like(slots.tokens_NL)
    faults: list[Callable[[Any], object]] = [
        lambda made: made.tokens_RW.fill_(3),
        lambda made: slots.lengths_N.copy_(lengths_N),
        lambda made: slots.tokens_NL.copy_(tokens_NL),
    ]
    if method in DRAFTING:
        faults.append(lambda made: made.drafts_RX[:, -1].fill_(7))
    for fault in faults:
        assert wrong_after(runner, draw=fault) == {"draw"}
    if method in MODELS:
        last = runner.caches.by_layer[max(runner.caches.by_layer)]
        names = list(runner.graphs.plain.draws)
        clear: list[Callable[[Any], object]] = [
            lambda made: last.k_PSGA.zero_(),
            lambda made: last.v_PSGA.zero_(),
        ]
        for odd in (0, 1):  # each name loses keys in one comparison, and values in the other
            given = {name: clear[(nth + odd) % 2] for nth, name in enumerate(names)}
            found = {name for nth, name in enumerate(names) if (nth + odd) % 2 == 0}
            # Latents have no values.
            assert wrong_after(runner, **given) == (set(names) if last.v_PSGA.numel() else found)


def test_a_draw_that_reads_other_rows_or_does_nothing_is_found(
    runners: Callable[[str], Runner],
) -> None:
    runner = runners("draft_model")
    plain = runner.graphs.plain
    run = plain.draw[0].run
    for each in plain.draw:
        each.run = lambda rows: run(replace(rows, slots_R=rows.slots_R.flip(0)))
    captured(runner)
    for each in plain.draw:
        each.run = run  # of the eager draw
    flipped = draws_of(runner)
    assert [graph.is_right for graph in flipped] == ["without" in g.mode for g in flipped]
    captured(runner)
    for one in plain.draw_without_drafts.captured.values():
        one.graph.replay = lambda: None
    idle = draws_of(runner)
    assert [graph.is_right for graph in idle] == ["without" not in g.mode for g in idle]


def test_a_graph_of_one_row_finds_drafts_too(
    runners: Callable[[str], Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared, results = [], draws.results
    monkeypatch.setattr(
        draws, "results", lambda *given: compared.append(results(*given)) or compared[-1]
    )
    found = draws_of(captured(runners("ngram"), tokens=[1]))
    assert [graph.rows for graph in found] == [1, 1] and all(graph.is_right for graph in found)
    assert [drafts_RX[:, 0].tolist() for *_, drafts_RX in compared] == [[DRAFTS]] * 4


def test_a_draw_that_leaves_former_keys_is_found(runners: Callable[[str], Runner]) -> None:
    """The eager draw before has left right ones in the same places."""
    runner = captured(runners("eagle3"), tokens=[12])
    keys = runner.caches.by_layer[max(runner.caches.by_layer)].k_PSGA

    def forgetting(replay: Callable[[], None]) -> None:
        before = keys.clone()
        replay()
        keys.copy_(before)

    for each in runner.graphs.plain.draw:
        for one in each.captured.values():
            one.graph.replay = partial(forgetting, one.graph.replay)
    found = draws_of(runner)
    assert [graph.is_right for graph in found] == ["without" in graph.mode for graph in found]


def test_the_command_fails_if_a_draw_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = small_demo(SLOTS, f"speculate={{method: ngram, tokens: {DRAFTS}}}")
    monkeypatch.setattr("nanovllm.runner.graphs.obstacles", lambda recipe: [])
    monkeypatch.setattr("nanovllm.runner.build.build", lambda config: built)
    path = tmp_path / "graphs.json"
    given = ["--device", "cpu", "--load", "1-6", "--json", str(path)]
    captured(built.runner)
    done = CliRunner().invoke(capture_graphs, given)
    assert done.exit_code == 0, done.exception
    lines = [line.split() for line in done.output.splitlines() if "FULL/draw" in line]
    modes = ["FULL/draw"] * 4 + ["FULL/draw,"] * 4  # the latter have few rows
    assert [line[0] for line in lines] == modes and "FAIL" not in done.output
    values = record.read(path).metrics
    assert values["FULL/draw of 4 12: differences"] == 0 and values["graphs"] == 12
    assert "FULL/draw of 4 12: max_logit_difference" not in values
    captured(built.runner, {"draw": lambda made: made.drafts_RX.fill_(9)})
    done = CliRunner().invoke(capture_graphs, given)
    assert done.exit_code == 1
    assert "FAIL: the results of a graph differ from those of the eager step" in done.output
    failed = [line.split() for line in done.output.splitlines() if line.endswith("FAIL")]
    assert [line[0] for line in failed] == ["FULL/draw"] * 4
    assert record.read(path).metrics["FULL/draw of 4 12: differences"] > 12


def test_a_draw_in_the_table_and_its_record() -> None:
    """A forward pass has no number of differences, and a draw has one."""
    times = dict(rows=8, capture_ms=200.0, memory_mib=3.0, replay_ms=1.0, eager_ms=4.0)
    graphs = [
        GraphCost(mode="FULL/decode", max_logit_difference=0.25, largest_logit=8.0, **times),
        GraphCost(mode="FULL/draw", differences=2, **times),
    ]
    assert [graph.is_right for graph in graphs] == [True, False]
    head, forward, draw, _ = map(str.split, table(graphs).splitlines())
    at = head.index("differences")
    assert draw[at] == "2" and draw[-1] == "FAIL" and len(draw) == len(forward) + 2
    found = metrics(graphs)
    assert found["FULL/decode 8: max_logit_difference"] == 0.25
    assert found["FULL/draw 8: differences"] == 2.0
    assert found["FULL/draw 8: eager_ms"] == 4.0 and "FULL/decode 8: differences" not in found


def test_an_fp8_cache_is_filled_with_finite_numbers() -> None:
    runner = captured(small_demo(SLOTS, "cache.dtype=fp8").runner)
    occupy(runner)
    keys = runner.caches.by_layer[0].k_PSGA[1:49].float()
    assert 0.5 <= keys.min() < 0.6 and 1.8 < keys.max() <= 1.875
    found = list(measure(runner, range(1, 7)))
    assert len(found) == 4 and all(graph.is_right for graph in found)
    for dtype in (torch.bfloat16, torch.float32):
        words = torch.arange(0x30, 0x40, dtype=torch.uint8).repeat(4, 1).T.contiguous().view(dtype)
        assert words.isfinite().all() and words.min() > 0 and words.max() < 1


# -- steps with adapters --------------------------------------------------------------------------

END = " with adapters"


@pytest.fixture(scope="module")
def adapters() -> Runner:
    """Return a runner that drafts by a model. All its graphs are captured."""
    runner = small_demo(
        SLOTS,
        "model.num_layers=2",
        "load.format=dummy",
        "adapters={folder: dummy, slots: 3, max_rank: 16}",
        f"speculate={{method: draft_model, tokens: {DRAFTS}}}",
    ).runner
    captured(runner)
    capture_on_tapes(runner, [16])
    return runner


def adapted_of(runner: Runner) -> dict[str, bool]:
    """Return whether graphs of steps with adapters are right, by mode. The others must be."""
    costs = list(measure(runner, range(1, 7)))
    assert all(cost.is_right for cost in costs if not cost.mode.endswith(END))
    assert all(cost.used == 0 for cost in costs if cost.mode.endswith(END))
    return {cost.mode.removesuffix(END): cost.is_right for cost in costs if cost.mode.endswith(END)}


def capture_adapted(
    runner: Runner, faults: Mapping[str, Callable[[Any], object]] = MappingProxyType({})
) -> Runner:
    capture_on_tapes(runner, [16], adapted=True)
    return captured(runner, faults, [12], adapted=True)


def test_graphs_with_adapters_are_compared_like_the_others(adapters: Runner) -> None:
    found = adapted_of(capture_adapted(adapters))
    names = ["FULL/decode", "FULL/draw", "FULL/draw without drafts"]
    modes = {name + width for name in names for width in ("", f" of {1 + DRAFTS}")}
    modes |= {f"FULL/{name} of {1 + DRAFTS}" for name in FEW_ROWS}
    assert found == dict.fromkeys([*modes, "PIECEWISE/mixed"], True)
    bank = adapters.adapters
    assert bank is not None and bank.adapter_N.tolist() == [-1, 0, 1, 2, -1, 0, -1]
    assert bank.owner_P.tolist() == [0, 1, 2]


def wrong_of(runner: Runner) -> set[str]:
    return {mode for mode, is_right in adapted_of(runner).items() if not is_right}


FAULTS: dict[str, Callable[[Any], object]] = {
    "decode": lambda made: made.logits_SV[1].neg_(),
    "draw": lambda made: made.tokens_RW.fill_(3),
    "draw without drafts": lambda made: made.tokens_RW.fill_(3),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_graph_with_adapters_that_differs_is_found(adapters: Runner, name: str) -> None:
    runner = capture_adapted(adapters, {name: FAULTS[name]})
    assert wrong_of(runner) == {f"FULL/{name}", f"FULL/{name} of {1 + DRAFTS}"}


def test_a_graph_that_was_captured_without_its_adapters_is_found(
    adapters: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = adapters.graphs.adapted
    with monkeypatch.context() as patch:
        patch.setattr(graphs.decode, "run", adapters.forward)
        patch.setattr(graphs.mixed, "run", adapters.hidden)
        capture_adapted(adapters)
    found = wrong_of(adapters)
    assert found == {"FULL/decode", f"FULL/decode of {1 + DRAFTS}", "PIECEWISE/mixed"}


def test_a_graph_that_reads_the_adapters_of_other_rows_is_found(
    adapters: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank, decode = adapters.adapters, adapters.graphs.adapted.decode
    assert bank is not None
    adapter_N, forward = bank.adapter_N, decode.run

    def of_others(rows: Any) -> object:
        before = adapter_N.clone()
        adapter_N[:SLOTS] = before[:SLOTS].roll(1)
        forwarded = forward(rows)
        adapter_N.copy_(before)
        return forwarded

    with monkeypatch.context() as patch:
        patch.setattr(decode, "run", of_others)
        capture_adapted(adapters)
    assert wrong_of(adapters) == {"FULL/decode", f"FULL/decode of {1 + DRAFTS}"}
