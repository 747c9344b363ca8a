"""Labels of plots, records that form a curve, and the table of ratios."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from nanovllm.bench import store, sweep
from nanovllm.bench.record import Record, write_to
from nanovllm.bench.sweep import draw, scale
from nanovllm.cli.bench import Options, bench, loads_of
from nanovllm.config import ConfigError
from tests.bench.test_record import RECORD

SVG = "{http://www.w3.org/2000/svg}"


def at_load(concurrency: int, rate: float, tpot: float, ttft: float, **fields: object) -> Record:
    workload = {
        "name": f"c{concurrency}", "concurrency": concurrency, "request_rate": None,
        "input_len": 1000, "output_len": 256, "seed": concurrency,
    }  # fmt: skip
    metrics = {"output_tokens_per_s": rate, "tpot_p50_ms": tpot, "ttft_p50_ms": ttft}
    return replace(RECORD, kind="serve", workload=workload, metrics=metrics, **fields)


PLAIN = [at_load(64, 16000, 4.0, 50.0), at_load(1, 500, 2.0, 10.0), at_load(8, 3500, 2.5, 20.0)]
SLOWER = [
    at_load(1, 250, 4.0, 15.0, changed={"schedule.depth": 0}),
    at_load(64, 8000, 8.0, 75.0, changed={"schedule.depth": 0, "load.format": "dummy"}),
]


# -- drawing ---------------------------------------------------------------------------------


def texts(path: Path) -> list[str]:
    return [node.text or "" for node in ET.parse(path).iter(f"{SVG}text")]


def test_values_that_differ_by_much_get_a_logarithmic_axis() -> None:
    assert [scale(v) for v in ([10.0, 200.0], [10.0, 201.0], [0.0, 1e6], [3.0])] == [
        "linear", "log", "linear", "linear",
    ]  # fmt: skip


def test_a_drawing_says_what_it_shows_and_has_its_suffix_s_format(tmp_path: Path) -> None:
    lines = {"a < b": [at_load(13, 100, 1.0, 2.0), at_load(57, 500, 4.0, 5.0)]}
    draw(tmp_path / "out.svg", "Title & more", lines)
    found = texts(tmp_path / "out.svg")
    for words in (
        "Throughput against latency: Title & more", "Against time per output token",
        "Against time to first token", "TPOT p50 (ms)", "TTFT p50 (ms)", "a < b",
    ):  # fmt: skip
        assert words in found
    assert found.count("output tokens per second") == found.count("13") == found.count("57") == 2
    draw(tmp_path / "out.png", "Title", lines)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"--plot .*out\.doc: Format 'doc' is not supported"):
        draw(tmp_path / "out.doc", "Title", lines)


def test_without_matplotlib_the_user_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install nanovllm\[plot\]"):
        draw(tmp_path / "out.svg", "Title", {"a": [at_load(13, 100, 1.0, 2.0)]})


# -- curves ----------------------------------------------------------------------------------


def test_runs_that_differ_in_concurrency_alone_are_one_curve() -> None:
    shared, found = sweep.curves(PLAIN)
    assert shared == "nanovllm, Qwen3-0.6B, h200-x1, 4f2c9ab, over HTTP, 1000 + 256 tokens"
    assert [*found] == ["Qwen3-0.6B"]
    assert [sweep.intensity(one) for one in found["Qwen3-0.6B"]] == [("1", 1), ("8", 8), ("64", 64)]


def test_curves_are_named_after_their_difference() -> None:
    shared, found = sweep.curves([*PLAIN, *SLOWER])
    assert shared == "nanovllm, Qwen3-0.6B, h200-x1, 4f2c9ab, over HTTP, 1000 + 256 tokens"
    assert [*found] == ["unchanged", "schedule.depth=0"]
    on_cpu = [replace(one, changed={"device": "cpu"} | one.changed) for one in (*PLAIN, *SLOWER)]
    again, same = sweep.curves(on_cpu)
    assert again == f"{shared}, device=cpu" and [*same] == [*found]
    newer = [replace(one, commit="b" * 40, dirty=True) for one in PLAIN]
    assert [*sweep.curves([*PLAIN, *newer])[1]] == [
        "4f2c9ab",
        "bbbbbbb-dirty",
    ]
    twice = [*PLAIN, at_load(8, 3600, 2.4, 19.0)]
    assert [(name, len(found)) for name, found in sweep.curves(twice)[1].items()] == [
        ("run 1", 3),
        ("run 2", 1),
    ]


def test_an_open_loop_is_labelled_by_its_rate() -> None:
    rated = replace(RECORD, workload={"name": "rate2.5", "concurrency": None, "request_rate": 2.5})
    assert sweep.intensity(rated) == ("2.5/s", 2.5)
    offline = {"name": "w1", "concurrency": 256, "request_rate": None}
    assert sweep.facts(replace(RECORD, workload=offline))["work"] == "w1"


def test_the_table_has_ratios_to_the_first_curve() -> None:
    lines = sweep.table(*sweep.curves([*PLAIN, *SLOWER])).splitlines()
    assert lines[0] == "nanovllm, Qwen3-0.6B, h200-x1, 4f2c9ab, over HTTP, 1000 + 256 tokens"
    assert [line.split() for line in lines[2:]] == [
        ["1", "500.00", "2.00", "10.00", "unchanged"],
        ["1", "250.00", "0.500", "4.00", "2.000", "15.00", "1.500", "schedule.depth=0"],
        ["8", "3,500.00", "2.50", "20.00", "unchanged"],
        ["64", "16,000.00", "4.00", "50.00", "unchanged"],
        ["64", "8,000.00", "0.500", "8.00", "2.000", "75.00", "1.500", "schedule.depth=0"],
    ]


def test_engines_are_told_apart_and_loads_of_other_lengths_are_not_compared() -> None:
    served_by = {"model": "/tmp/m/Qwen3-0.6B", "served_by": "vllm 0.26.0"}
    peer = at_load(64, 8000, 5.0, 100.0, recipe=served_by, changed={"load-format": "dummy"})
    four = replace(peer, changed={"api-server-count": "4"}, metrics=PLAIN[0].metrics)
    mixed = [
        replace(one, workload=one.workload | {"name": "c64-mixed"}) for one in (PLAIN[0], peer)
    ]
    shared, found = sweep.curves([peer, four, PLAIN[0]])
    assert shared == "Qwen3-0.6B, h200-x1, 4f2c9ab, over HTTP, 1000 + 256 tokens"
    assert [*found] == [
        "vllm 0.26.0, unchanged", "vllm 0.26.0, api-server-count=4", "nanovllm, unchanged",
    ]  # fmt: skip
    lines = sweep.table(*sweep.curves([peer, PLAIN[0], *mixed])).splitlines()
    assert [line.split()[1:3] for line in lines[2:]] == [
        ["8,000.00", "5.00"], ["16,000.00", "2.000"], ["16,000.00", "4.00"], ["8,000.00", "0.500"],
    ]  # fmt: skip
    assert lines[-1].endswith("  vllm 0.26.0, 1000 + 256 mixed tokens")


def test_the_plot_has_both_latencies_and_leaves_out_what_was_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "out.svg"
    sweep.draw(path, *sweep.curves([*PLAIN, *SLOWER]))
    found = texts(path)
    assert found.count("unchanged") == found.count("schedule.depth=0") == 1  # one legend
    assert found.count("64") == 4 and found.count("8") >= 2  # a label at each point
    assert "TPOT p50 (ms)" in found and "TTFT p50 (ms)" in found
    one_token = [replace(one, metrics={"output_tokens_per_s": 9.0, "ttft_p50_ms": 3.0})
                 for one in PLAIN]  # fmt: skip
    sweep.draw(path, *sweep.curves(one_token))
    assert "TTFT p50 (ms)" in texts(path) and "TPOT p50 (ms)" not in texts(path)
    assert sweep.table(*sweep.curves(one_token)).splitlines()[2].split() == [
        "1", "9.00", "-", "3.00", "Qwen3-0.6B",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="nothing to plot"):
        sweep.draw(path, *sweep.curves([replace(PLAIN[0], metrics={"output_tokens_per_s": 1.0})]))
    with pytest.raises(ConfigError, match="a record of kind kernels has no throughput"):
        sweep.curves([replace(RECORD, kind="kernels")])


def test_structured_answers_are_other_work() -> None:
    load = PLAIN[0].workload | {"name": "c64-structured", "structured": True}
    assert sweep.facts(replace(PLAIN[0], workload=load))["work"] == "1000 + 256 structured tokens"


# -- the command -----------------------------------------------------------------------------


def written(folder: Path, records: list[Record]) -> list[str]:
    paths = [folder / f"{at}.json" for at in range(len(records))]
    for path, one in zip(paths, records, strict=True):
        write_to(path, one)
    return [str(path) for path in paths]


def test_records_are_compared_and_plotted(tmp_path: Path) -> None:
    paths, plot = written(tmp_path, [*PLAIN, *SLOWER]), tmp_path / "out.svg"
    done = CliRunner().invoke(bench, ["--compare", *paths, "--plot", str(plot)])
    assert done.exit_code == 0, done.exception
    assert f"plot: {plot}" in done.output and "1.500  schedule.depth=0" in done.output
    assert "metric" not in done.output
    assert "schedule.depth=0" in texts(plot)

    two = CliRunner().invoke(bench, ["--compare", paths[1], "--plot", str(plot), paths[3]])
    assert two.exit_code == 0, two.exception
    assert "changed.schedule.depth: - -> 0" in two.output
    rows = [line.split() for line in two.output.splitlines()]
    assert ["output_tokens_per_s", "500.000", "250.000", "0.500"] in rows
    first = next(line for line in two.output.splitlines() if "higher is better" in line)
    assert first.split()[:5] == ["output_tokens_per_s", "500.000", "250.000", "0.500", "A"]
    assert {"unchanged", "schedule.depth=0"} <= {*texts(plot)}


def test_records_are_compared_by_id_in_a_folder_of_results(tmp_path: Path) -> None:
    ids = [store.write(one, tmp_path).id for one in (PLAIN[1], SLOWER[0])]
    given = [*ids, "--results-dir", str(tmp_path)]
    done = CliRunner().invoke(bench, ["--compare", *given])
    assert done.exit_code == 0, done.exception
    rows = [line.split() for line in done.output.splitlines()]
    assert ["output_tokens_per_s", "500.000", "250.000", "0.500"] in rows
    again = sweep.command([PLAIN[1], SLOWER[0]], tmp_path)
    assert again.split() == ["nanovllm", "bench", "--compare", *given]
    assert sweep.command([PLAIN[1]], Path("results")) == f"nanovllm bench --compare {ids[0]}"
    place = store.write(SLOWER[1], tmp_path / "other")  # a file is accepted, too
    mixed = CliRunner().invoke(bench, ["--compare", str(place), *given])
    assert mixed.exit_code == 0 and "schedule.depth=0" in mixed.output, mixed.exception
    wrong = CliRunner().invoke(bench, ["--compare", "00000000", *given]).exception
    assert str(wrong) == f"no record 00000000 in {tmp_path}; give an id or a JSON file"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "0.json"], "--compare needs two records or more"),
        (["--compare", "0.json", "1.json", "--seed", "1"], "--seed has no effect"),
        (
            ["--compare", "0.json", "1.json", "--plot", "no/x.svg"],
            "--plot no/x.svg: no file can be written there",
        ),
        (["a.yaml", "b.yaml"], "bench takes one RECIPE"),
        (["--plot", "x.svg"], "--plot draws a --sweep"),
        (["--sweep", "1,2", "--concurrency", "3"], "--sweep sets the concurrencies"),
        (["--offline", "--sweep", "1,2"], "--sweep has no effect"),
        (["--sweep", "1,x"], "--sweep 1,x: write numbers from 1"),
        (["--sweep", "0"], "--sweep 0: write numbers from 1"),
        (["--sweep", "4,1,4"], "--sweep 4,1,4: write numbers from 1, none twice"),
    ],
)
def test_senseless_combinations_are_refused(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, PLAIN)
    error = CliRunner().invoke(bench, arguments).exception
    assert isinstance(error, ConfigError) and re.search(message, str(error))


def test_no_two_runs_of_a_sweep_send_the_same_prompts() -> None:
    given = bench.make_context("bench", ["--sweep", "1,4,256", "--structured"]).params
    loads = loads_of(Options(**given))
    assert {(one.input_len, one.output_len, one.structured) for one in loads} == {(1000, 256, True)}
    assert [(one.concurrency, one.num_prompts, one.seed) for one in loads] == [
        (1, 8, 1), (4, 32, 4), (256, 1024, 256),
    ]  # fmt: skip
