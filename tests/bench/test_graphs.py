"""capture-graphs on a CPU: reasons for no graphs, and measurements with stand-ins for graphs."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from msgspec.structs import replace

from nanovllm.bench import graphs as bench, record
from nanovllm.bench.graphs import (
    GraphCost,
    context_of,
    eager_reason,
    measure,
    metrics,
    mixed_rows,
    occupy,
    rows_of,
    table,
)
from nanovllm.cli import commands
from nanovllm.cli.commands import capture_graphs, lacks_gpu
from nanovllm.config import ConfigError, Kernels, Speculate, load_config
from nanovllm.runner.batch import StepRows
from nanovllm.runner.build import Built, padding_rows
from nanovllm.runner.graphs import Captured, graph_sizes, obstacles
from nanovllm.runner.runner import Forwarded, Runner
from tests.models.tiny import CASES, config_of, make_tiny
from tests.runner.tape import capture_on_tapes
from tests.whole_engine import WholeEngine, small_demo

SLOTS = 12


class Replayed:
    """Stand-in for a CUDA graph that runs the same rows again into the same logits."""

    def __init__(
        self,
        runner: Runner,
        rows: Callable[[], StepRows],
        before: Callable[[], object] = lambda: None,
    ) -> None:
        self.runner, self.rows, self.before = runner, rows, before
        self.output = runner.forward(rows())
        self.count = 0

    def replay(self) -> None:
        self.count += 1
        self.before()
        forwarded = self.runner.forward(self.rows())
        self.output.hidden_SD.copy_(forwarded.hidden_SD)
        self.output.logits_SV.copy_(forwarded.logits_SV)


@torch.inference_mode()
def capture_pretended(
    runner: Runner,
    sizes: list[int],
    order: Callable[[torch.Tensor], torch.Tensor] = lambda r: r,
    width: int = 1,
    before: Callable[[], object] = lambda: None,
) -> None:
    """Add stand-ins for graphs of `sizes`. `order` changes the slots that they read.

    `before` runs first in each replay.
    """
    captured = runner.graphs.plain.decode.captured
    runner.builder.static_counts_R.zero_()
    for size in sizes:

        def rows(size: int = size) -> StepRows:
            decode = runner.builder.padded(size, width, runner.slots.max_tokens)
            return dataclasses.replace(decode, slots_R=order(decode.slots_R))

        replayed = Replayed(runner, rows, before)
        captured[size, width] = Captured(replayed, replayed.output, 0.25, size << 20)
    runner.graphs.plain.decode.captured = dict(sorted(captured.items()))


@pytest.fixture
def built() -> Built:
    return small_demo(SLOTS)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setattr(bench, "STEPS", 1)


def graph(rows: int, **fields: float) -> GraphCost:
    plain = dict(
        mode="FULL/decode", rows=rows, capture_ms=200.0, memory_mib=3.0, replay_ms=1.0,
        eager_ms=4.0, max_logit_difference=0.0, largest_logit=8.0, used=0.5, padding=0.0,
    )  # fmt: skip
    return GraphCost(**{**plain, **fields})


def test_on_a_cpu_one_sentence_says_so_and_that_is_no_failure(tmp_path: Path) -> None:
    path = tmp_path / "graphs.json"
    line = ["--device", "cpu", "--set", "kernels.cuda_graphs=false", "--json", str(path)]
    done = CliRunner().invoke(capture_graphs, line)
    assert done.exit_code == 0, done.output
    assert done.output == "Nothing is captured: CUDA graphs need a GPU, and device is cpu.\n"
    written = record.read(path)
    assert (written.kind, written.workload["graphs"]) == ("graphs", [])
    assert written.workload["steps"] == {"all": "device is cpu"}


def test_a_machine_without_a_gpu_is_known_without_torch() -> None:
    code = "import sys; from nanovllm.cli import main; sys.argv[1:] = ['capture-graphs']\n"
    code += "try: main()\nexcept SystemExit as end: print('torch' in sys.modules, end.code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if lacks_gpu("auto") is not None:
        sentence = "Nothing is captured: CUDA graphs need a GPU, and this machine has none."
        assert done.stdout.splitlines() == [sentence, "False None"]


def test_a_recipe_that_wants_no_graphs_gets_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "lacks_gpu", lambda device: None)
    line = ["--device", "cpu", "--set", "kernels.cuda_graphs=false"]
    done = CliRunner().invoke(capture_graphs, line)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == [
        "demo on CPU, float32, attention torch, up to 16 rows",
        "Nothing is captured: device is cpu: CUDA graphs need a CUDA device; "
        "kernels.attention is torch, which reads tensors' values on the host; "
        "kernels.experts is torch, which reads tensors' values on the host; "
        "kernels.delta is torch, which reads tensors' values on the host; "
        "kernels.cuda_graphs is false.",
    ]


def test_a_gpu_recipe_has_no_obstacle_but_its_own_wishes() -> None:
    recipe = load_config(None).recipe
    on_gpu = replace(recipe, device="cuda", kernels=Kernels(attention="triton"))
    assert obstacles(on_gpu) == []
    slow = replace(on_gpu, kernels=Kernels(attention="torch", cuda_graphs=False))
    assert [reason.split()[0] for reason in obstacles(slow)] == [
        "kernels.attention",
        "kernels.cuda_graphs",
    ]


def test_the_runner_says_which_steps_it_does_not_replay(built: Built) -> None:
    runner = built.runner
    decode = runner.builder.padded(9, 1, 256)
    assert runner.graphs.plain.eager_reason(decode) == "no graph was captured"
    capture_pretended(runner, [4, 8])
    assert runner.graphs.plain.eager_reason(decode) == "9 rows are more than the largest graph's 8"
    assert runner.graphs.plain.eager_reason(runner.builder.padded(8, 1, 256)) is None
    no_graph = "no graph was captured"
    assert runner.graphs.plain.eager_reason(padding_rows(runner, 1, 2)) == no_graph
    capture_pretended(runner, [SLOTS])
    sampling = ("sampling, after either", "its launches depend on the rows' parameters")
    assert [*eager_reason(runner, built.recipe).items()] == [
        ("decode, 1 to 12 rows", None),
        ("prefill and mixed, 2 to 64 tokens", no_graph),
        sampling,
    ]
    capture_on_tapes(runner, [16, 32])
    assert [*eager_reason(runner, built.recipe).items()] == [
        ("decode, 1 to 12 rows", None),
        ("prefill and mixed, 1 to 32 tokens", None),
        ("prefill and mixed, 33 to 64 tokens", "64 tokens are more than the largest graph's 32"),
        sampling,
    ]


def test_made_up_requests_share_no_page_and_leave_the_dead_slot_alone(built: Built) -> None:
    runner = built.runner
    assert context_of(runner) == (SLOTS, 100 // SLOTS * 8)
    occupy(runner)
    pages_NM, lengths_N = runner.slots.pages_NM, runner.slots.lengths_N
    used = pages_NM[:SLOTS, : 100 // SLOTS].flatten().tolist()
    assert sorted(used) == list(range(1, SLOTS * 8 + 1))
    assert pages_NM[:SLOTS, 8:].abs().sum() == 0 and pages_NM[SLOTS].abs().sum() == 0
    assert lengths_N[SLOTS] == 0
    assert 32 <= int(lengths_N[:SLOTS].min()) < int(lengths_N[:SLOTS].max()) < 64
    assert runner.builder.static_slots_R.tolist() == list(range(SLOTS))


def test_a_faithful_graph_gives_the_same_logits_row_by_row(built: Built) -> None:
    runner = built.runner
    capture_pretended(runner, [1, 2, 4, 8, SLOTS])
    found = list(measure(runner, range(3, 9)))
    assert [graph.rows for graph in found] == [1, 2, 4, 8, SLOTS]
    assert all(graph.max_logit_difference == 0 and graph.is_right for graph in found)
    assert all(1 < graph.largest_logit < 1000 for graph in found)
    assert all(graph.replay_ms > 0 and graph.eager_ms > 0 for graph in found)
    # Rows 3 and 4 replay the graph of 4 rows, rows 5 to 8 that of 8.
    assert [graph.used for graph in found] == pytest.approx([0, 0, 2 / 6, 4 / 6, 0])
    assert [graph.padding for graph in found] == pytest.approx([0, 0, 1 / 8, 6 / 32, 0])
    assert metrics(found)["padding_percent"] == pytest.approx(100 * (1 + 6) / (8 + 32))
    assert (found[2].capture_ms, found[2].memory_mib) == (250.0, 4.0)
    graph = runner.graphs.plain.decode.captured[4, 1].graph
    assert graph.count == 1 + 1 + 1  # comparison, warm-up, timing


def test_piecewise_graphs_are_measured_on_mixed_steps(built: Built) -> None:
    runner = built.runner
    capture_pretended(runner, [4])
    capture_on_tapes(runner, [8, 50])
    assert [mixed_rows(runner, size).num_tokens for size in (8, 50)] == [8, 50]
    assert mixed_rows(runner, 50).num_decodes == SLOTS // 2
    four, *piecewise = measure(runner, range(3, 5))
    assert four.mode == "FULL/decode"
    assert [(graph.mode, graph.rows) for graph in piecewise] == [
        ("PIECEWISE/mixed", 8),
        ("PIECEWISE/mixed", 50),
    ]
    assert all(graph.max_logit_difference < 1e-3 < 1 < graph.largest_logit for graph in piecewise)
    assert all(graph.replay_ms > 0 and graph.eager_ms > 0 for graph in piecewise)
    assert all((graph.used, graph.padding) == (0, 0) for graph in piecewise)
    runner.graphs.plain.mixed.captured[8].graphs.reverse()
    assert not list(measure(runner, range(3, 5)))[1].is_right


def test_a_graph_that_reads_other_rows_is_found_out(built: Built) -> None:
    capture_pretended(built.runner, [4, 8], lambda slots_R: slots_R.flip(0))
    capture_pretended(built.runner, [2])
    two, four, eight = measure(built.runner, range(1, 9))
    assert two.is_right and not four.is_right and not eight.is_right
    assert four.max_logit_difference > 0.05 * four.largest_logit


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_step_that_moves_states_is_compared_with_itself_from_the_same_ones(
    drafts: int, tmp_path: Path
) -> None:
    family, overrides = CASES["qwen3_next"]
    dense = dict(mlp_only_layers=[0, 1, 2, 3])  # with experts, the host would have to read results
    make_tiny(tmp_path, family, **overrides, **dense)
    speculate = Speculate(method="ngram", tokens=drafts) if drafts else None
    runner = WholeEngine(config_of(tmp_path), slots=6, speculate=speculate).runner
    (_, _, _, kept_NWX, drafting, _), *_ = runner.states.by_layer.values()

    def loses(states: torch.Tensor, value: float = 0) -> list[bool]:
        """Return which steps are right if decode steps overwrite these states."""
        for width in {1, 1 + drafts}:
            capture_pretended(runner, [3, 6], width=width, before=lambda: states.fill_(value))
        return [graph.is_right for graph in measure(runner, range(1, 7))]

    capture_on_tapes(runner, [8, 30])
    steps = 2 * len({1, 1 + drafts})
    assert loses(torch.zeros(1)) == [True] * (steps + 2)
    for layer in runner.states.by_layer.values():
        for states in (layer.conv_NCW, layer.recurrent_NHKV):
            assert loses(states) == [False] * steps + [True] * 2
    if drafts:
        assert kept_NWX is not None
        assert loses(kept_NWX) == loses(drafting.lengths_N, 200) == [False] * steps + [True] * 2
    states_NX = runner.states.rows_NX[: runner.slots.padding]
    assert states_NX.isfinite().all() and states_NX.abs().max() < 100
    runner.graphs.plain.mixed.captured[8].graphs.reverse()
    assert not [*measure(runner, range(1, 7))][-2].is_right


def test_logits_that_are_no_numbers_are_not_right() -> None:
    assert graph(8, max_logit_difference=0.3).is_right
    assert not graph(8, max_logit_difference=0.5).is_right
    assert not graph(8, max_logit_difference=float("nan")).is_right


def test_rows_of_a_load() -> None:
    assert rows_of(None, 16) == range(1, 17)
    assert rows_of("5-5", 16) == range(5, 6)
    assert rows_of("3-16", 16) == range(3, 17)
    for load, message in (
        ("3", "--load 3: write the fewest and the most rows"),
        ("5-3", "--load 5-3: a step has 1 to 16 rows"),
        ("0-3", "--load 0-3: a step has 1 to 16 rows"),
        ("17-17", r"--load 17-17: a step has 1 to 16 rows \(schedule.slots\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            rows_of(load, 16)


@pytest.mark.parametrize("most", [8, 64, 256, 512])
def test_under_a_uniform_load_less_than_a_tenth_is_padding(most: int) -> None:
    load = range(1, most + 1)
    computed = sum(min(size for size in graph_sizes(512) if size >= rows) for rows in load)
    assert 0 <= 1 - sum(load) / computed < 0.1


def test_the_table_and_its_record() -> None:
    graphs = [graph(8, padding=0.25), graph(16, used=0.5, max_logit_difference=5.0)]
    head, right, wrong, total = map(str.split, table(graphs).splitlines())
    assert head[:4] == ["mode", "rows", "capture_ms", "memory_mib"]
    assert right == [
        "FULL/decode", "8", "200.000", "3.000", "1.000", "4.000", "0.000", "8.000", "0.500",
        "0.250", "4.000",
    ]  # fmt: skip
    assert wrong[6:] == ["5.000", "8.000", "0.500", "0.000", "4.000", "FAIL"]
    assert total == ["all", "2", "400.000", "6.000"]
    found = metrics(graphs)
    assert found["padding_percent"] == pytest.approx(100 * 2 / 24)
    assert found["FULL/decode 8: eager_ms"] == 4.0
    assert found["FULL/decode 16: max_logit_difference"] == 5.0
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("load", ["3", "0-3", "3-1", "1-13"])
def test_a_wrong_load_is_refused_where_nothing_is_captured(load: str) -> None:
    given = ["--device", "cpu", "--set", "schedule.slots=12", "--load", load]
    error = CliRunner().invoke(capture_graphs, given).exception
    assert isinstance(error, ConfigError) and str(error).startswith(f"--load {load}: ")


def test_the_command_shows_and_records_what_it_measured(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_pretended(built.runner, [4, SLOTS])
    monkeypatch.setattr("nanovllm.runner.graphs.obstacles", lambda recipe: [])
    monkeypatch.setattr("nanovllm.runner.build.build", lambda config: built)
    path = tmp_path / "graphs.json"
    given = ["--device", "cpu", "--load", "3-4", "--json", str(path)]
    done = CliRunner().invoke(capture_graphs, given)
    assert done.exit_code == 0, done.exception
    assert (
        "times of forward passes and of draws for 12 synthetic requests of 32 to 64 " in done.output
    )
    assert "if 3 to 4 rows decode, equally often, 12.5% of the rows computed are" in done.output
    assert "decode, 1 to 12 rows: replayed" in done.output
    assert "prefill and mixed, 2 to 64 tokens: not captured: no graph was" in done.output
    written = record.read(path)
    assert [graph["rows"] for graph in written.workload["graphs"]] == [4, SLOTS]
    assert written.workload["rows"] == [3, 4] and written.recipe["schedule"]["slots"] == SLOTS
    assert written.workload["steps"]["decode, 1 to 12 rows"] is None


def test_eager_and_replay_are_the_runners_own(built: Built) -> None:
    """The stand-ins take the place of captured graphs, which `_run` replays."""
    runner = built.runner
    capture_pretended(runner, [SLOTS])
    occupy(runner)
    rows = runner.builder.padded(5, 1, 256)
    with torch.inference_mode():
        (replayed, mode), eager = runner._run(rows), runner.forward(rows)
    assert isinstance(replayed, Forwarded) and mode == "FULL"
    assert replayed.logits_SV.shape[0] == SLOTS and runner.padded_tokens == SLOTS - 5
    for found, own in (
        (replayed.logits_SV, eager.logits_SV),
        (replayed.hidden_SD, eager.hidden_SD),
    ):
        torch.testing.assert_close(found[:5], own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_made_up_requests_have_pages_for_their_drafts(method: str) -> None:
    """A row without such pages would write to a page of another row."""
    runner = small_demo(SLOTS, f"speculate={{method: {method}, tokens: 5}}").runner
    capture_pretended(runner, [4, 8], width=6)
    (four, eight) = measure(runner, range(1, 4))
    assert (four.mode, eight.rows) == ("FULL/decode of 6", 8)
    assert four.is_right and eight.is_right
    occupy(runner)
    slots, filled = runner.slots, context_of(runner)[0]
    last_F = slots.lengths_N[:filled] - 1 + runner.num_drafts
    assert filled == SLOTS and last_F.max() >= 40
    pages_F = slots.pages_NM[:filled].gather(1, (last_F // slots.page_tokens).long()[:, None])
    assert (pages_F > 0).all()
    assert context_of(small_demo(SLOTS).runner)[1] - context_of(runner)[1] == 5
