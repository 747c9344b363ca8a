"""Scales and drawing to the pixel; which records make one curve; the table of ratios."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from nanovllm.bench import sweep
from nanovllm.bench.plot import (
    COLOURS,
    HEIGHT,
    LEFT,
    WIDTH,
    Panel,
    Point,
    Series,
    draw,
    round_step,
    scale_of,
    shown,
)
from nanovllm.bench.record import Record, write_to
from nanovllm.cli.bench import Options, bench, loads_of
from nanovllm.config import ConfigError
from tests.unit.test_record import RECORD

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


# -- scales ----------------------------------------------------------------------------------


def test_a_linear_axis_starts_at_zero_and_ends_at_a_round_number() -> None:
    scale = scale_of([30.0, 470.0], 100.0, 600.0)
    assert (scale.low, scale.high, scale.is_log) == (0.0, 500.0, False)
    assert scale.ticks == (0, 100, 200, 300, 400, 500)
    assert [scale.at(value) for value in (0, 250, 500)] == [100, 350, 600]
    assert scale_of([1.7], 0, 1).ticks == (0, 0.5, 1, 1.5, 2)
    assert scale_of([0.0], 0, 1).ticks == (0, 1)


def test_values_that_differ_by_much_get_a_logarithmic_axis() -> None:
    scale = scale_of([605.0, 46007.0], 330.0, 0.0)
    assert (scale.low, scale.high, scale.is_log) == (500, 50000, True)
    assert scale.ticks == (500, 1000, 2000, 5000, 10000, 20000, 50000)
    assert scale.at(500) == pytest.approx(330) and scale.at(50000) == pytest.approx(0)
    assert scale.at(5000) == pytest.approx(165)  # halfway: a factor of ten of a hundred
    wide = scale_of([1.0, 1e6], 0.0, 1.0)
    assert wide.ticks == (1, 10, 100, 1000, 10000, 100000, 1000000)
    assert not scale_of([0.0, 1e6], 0.0, 1.0).is_log
    assert not scale_of([10.0, 200.0], 0.0, 1.0).is_log


def test_steps_and_tick_labels_are_round() -> None:
    assert [round_step(n) for n in (0.7, 1.0, 1.1, 2.1, 3.0, 70.0, 0.0)] == [
        1.0, 1.0, 2.0, 2.5, 5.0, 100.0, 1.0,
    ]  # fmt: skip
    assert [shown(n) for n in (0, 0.5, 2.5, 333.3, 1000, 20000, 12500, 2e6, 3e9)] == [
        "0", "0.5", "2.5", "333", "1000", "20k", "12.5k", "2M", "3G",
    ]  # fmt: skip


# -- drawing ---------------------------------------------------------------------------------


def panel(**fields: object) -> Panel:
    points = (Point(1.0, 100.0, "1"), Point(4.0, 500.0, "64"))
    plain = dict(title="T", x_label="ms", y_label="tok/s", series=(Series("a < b", points),))
    return Panel(**{**plain, **fields})


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in ET.fromstring(svg).iter(f"{SVG}text")]


def test_points_are_where_their_values_say() -> None:
    root = ET.fromstring(draw("Title", "sub & title", [panel()]))
    (curve,) = root.iter(f"{SVG}polyline")
    (x1, y1), (x2, y2) = (map(float, pair.split(",")) for pair in curve.attrib["points"].split())
    bottom = float(root.attrib["height"]) - 62
    assert (x1, x2) == (LEFT + WIDTH * 1 / 5, LEFT + WIDTH * 4 / 5)  # the axis ends at 5
    assert (y1, y2) == (bottom - HEIGHT * 100 / 600, bottom - HEIGHT * 500 / 600)
    assert curve.attrib["stroke"] == COLOURS[0]


def test_words_are_shown_and_escaped() -> None:
    svg = draw("Title", "sub & title", [panel(also=lambda ms: 1000 / ms, also_label="tok/s/user")])
    found = texts(svg)
    assert found[:3] == ["Title", "sub & title", "a < b"]
    for words in ("T", "ms", "tok/s", "tok/s/user", "1", "64"):
        assert words in found
    assert [word for word in found if word in ("1000", "500", "333", "250", "200")][-5:] == [
        "1000", "500", "333", "250", "200",
    ]  # fmt: skip
    hints = [node.text for node in ET.fromstring(svg).iter(f"{SVG}title")]
    assert hints == ["Title", "a < b, 1: 100.0 at 1.00", "a < b, 64: 500.0 at 4.00"]


def test_a_series_looks_the_same_in_every_panel_and_in_the_legend() -> None:
    one, other = (Series(name, (Point(1.0, 1.0, "1"),)) for name in ("one", "other"))
    root = ET.fromstring(draw("", "", [panel(series=(one, other)), panel(series=(other,))]))
    colours = [curve.attrib["stroke"] for curve in root.iter(f"{SVG}polyline")]
    assert colours == [COLOURS[0], COLOURS[1], COLOURS[1]]
    shapes = [node.attrib["d"] for node in root.iter(f"{SVG}path") if "transform" in node.attrib]
    assert len(shapes) == 2 + 2 + 1 and shapes[1] == shapes[3] == shapes[4] != shapes[0]


def test_labels_do_not_cover_each_other() -> None:
    crowd = tuple(Series(f"s{i}", (Point(1.0, 1.0, "64"),)) for i in range(9))
    root = ET.fromstring(draw("", "", [panel(series=crowd)]))
    labels = [node for node in root.iter(f"{SVG}text") if node.attrib["class"] == "label"]
    assert len(labels) == 4  # what has room beside the point; the others are tooltips
    assert len({(n.attrib["y"], n.attrib["text-anchor"]) for n in labels}) == 4
    assert len([n for n in root.iter(f"{SVG}title") if n.text]) == 9


def test_a_long_legend_takes_more_lines_and_moves_the_panels_down() -> None:
    def height(count: int) -> float:
        many = tuple(Series("n" * 40 + str(i), (Point(1.0, 1.0, ""),)) for i in range(count))
        return float(ET.fromstring(draw("", "", [panel(series=many)])).attrib["height"])

    assert height(4) - height(1) == 3 * 20


# -- curves ----------------------------------------------------------------------------------


def test_runs_that_differ_in_concurrency_alone_are_one_curve() -> None:
    shared, (curve,) = sweep.curves(PLAIN)
    assert shared == "Qwen3-0.6B, h200-x1, 4f2c9ab, over HTTP, 1000 + 256 tokens"
    assert curve.name == "Qwen3-0.6B"
    assert [sweep.intensity(one) for one in curve.records] == [("1", 1), ("8", 8), ("64", 64)]


def test_curves_are_named_after_their_difference() -> None:
    shared, found = sweep.curves([*PLAIN, *SLOWER])
    assert shared == "Qwen3-0.6B, h200-x1, 4f2c9ab, over HTTP, 1000 + 256 tokens"
    assert [curve.name for curve in found] == ["unchanged", "schedule.depth=0"]
    on_cpu = [replace(one, changed={"device": "cpu"} | one.changed) for one in (*PLAIN, *SLOWER)]
    again, same = sweep.curves(on_cpu)
    assert again == f"{shared}, device=cpu" and same[1].name == found[1].name
    newer = [replace(one, commit="b" * 40, dirty=True) for one in PLAIN]
    assert [curve.name for curve in sweep.curves([*PLAIN, *newer])[1]] == [
        "4f2c9ab",
        "bbbbbbb-dirty",
    ]
    twice = [*PLAIN, at_load(8, 3600, 2.4, 19.0)]
    assert [(c.name, len(c.records)) for c in sweep.curves(twice)[1]] == [
        ("run 1", 3),
        ("run 2", 1),
    ]


def test_an_open_loop_is_labelled_by_its_rate() -> None:
    rated = replace(RECORD, workload={"name": "rate2.5", "concurrency": None, "request_rate": 2.5})
    assert sweep.intensity(rated) == ("2.5/s", 2.5)
    offline = {"name": "w1", "concurrency": 256, "request_rate": None}
    assert sweep.facts(replace(RECORD, workload=offline))["work"] == "w1"


def test_the_table_has_ratios_to_the_first_curve() -> None:
    lines = sweep.table(sweep.curves([*PLAIN, *SLOWER])[1]).splitlines()
    assert lines[:2] == ["A  unchanged", "B  schedule.depth=0"]
    assert [line.split() for line in lines[3:]] == [
        ["1", "A", "500.00", "500.0", "2.00", "10.00"],
        ["1", "B", "250.00", "0.500", "250.0", "4.00", "2.000", "15.00", "1.500"],
        ["8", "A", "3,500.00", "400.0", "2.50", "20.00"],
        ["64", "A", "16,000.00", "250.0", "4.00", "50.00"],
        ["64", "B", "8,000.00", "0.500", "125.0", "8.00", "2.000", "75.00", "1.500"],
    ]


def test_the_plot_has_both_latencies_and_leaves_out_what_was_not_measured() -> None:
    shared, found = sweep.curves([*PLAIN, *SLOWER])
    svg = sweep.plot(shared, found)
    assert len(list(ET.fromstring(svg).iter(f"{SVG}polyline"))) == 4
    for words in ("TPOT p50 (ms)", "TTFT p50 (ms)", "tokens per second and user"):
        assert words in texts(svg)
    one_token = [replace(one, metrics={"output_tokens_per_s": 9.0, "ttft_p50_ms": 3.0})
                 for one in PLAIN]  # fmt: skip
    svg = sweep.plot(*sweep.curves(one_token))
    assert "TTFT p50 (ms)" in texts(svg) and "TPOT p50 (ms)" not in texts(svg)
    assert "-" in sweep.table(sweep.curves(one_token)[1]).splitlines()[2].split()
    with pytest.raises(ConfigError, match="nothing to plot"):
        sweep.plot(*sweep.curves([replace(PLAIN[0], metrics={"output_tokens_per_s": 1.0})]))
    with pytest.raises(ConfigError, match="a record of kind kernels has no throughput"):
        sweep.curves([replace(RECORD, kind="kernels")])


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
    assert f"plot: {plot}" in done.output and "B  schedule.depth=0" in done.output
    assert "metric" not in done.output
    assert len(list(ET.fromstring(plot.read_text()).iter(f"{SVG}polyline"))) == 4

    two = CliRunner().invoke(bench, ["--compare", paths[1], "--plot", str(plot), paths[3]])
    assert two.exit_code == 0, two.exception
    assert "changed.schedule.depth: - -> 0" in two.output
    assert "output_tokens_per_s        500.000        250.000    0.500" in two.output
    assert texts(plot.read_text())[2:4] == ["unchanged", "schedule.depth=0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "0.json"], "--compare needs two records or more"),
        (["--compare", "0.json", "1.json", "--seed", "1"], "--seed has no effect"),
        (["--compare", "0.json", "1.json", "--plot", "no/x.svg"], "--plot no/x.svg: No such file"),
        (["a.yaml", "b.yaml"], "one RECIPE, not also b.yaml"),
        (["--plot", "x.svg"], "--plot draws a --sweep"),
        (["--sweep", "1,2", "--concurrency", "3"], "--sweep says the concurrencies"),
        (["--sweep", "1,2", "--json-out", "x"], "--json-out holds one run"),
        (["--offline", "--sweep", "1,2"], "--sweep has no effect"),
        (["--sweep", "1,x"], "--sweep 1,x: write concurrencies"),
        (["--sweep", "0"], "--sweep 0: write concurrencies, 1 or more"),
        (["--sweep", "4,1,4"], "--sweep 4,1,4: names a concurrency twice"),
    ],
)
def test_senseless_combinations_are_refused(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, PLAIN)
    error = CliRunner().invoke(bench, arguments).exception
    assert isinstance(error, ConfigError) and message in str(error)


def test_no_two_runs_of_a_sweep_send_the_same_prompts() -> None:
    given = {parameter.name: parameter.default for parameter in bench.params}
    options = Options(**{**given, "sweep": "1,4,256", "num_prompts": None, "request_rate": None})
    loads = loads_of(options)
    assert [(one.concurrency, one.num_prompts, one.seed) for one in loads] == [
        (1, 8, 1), (4, 32, 4), (256, 1024, 256),
    ]  # fmt: skip
