"""The measurement of a prefill and a decode server: its records and its table, by fake servers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from nanovllm.bench import store
from tests.bench.test_online import fake_chat
from tests.load.pair import Servers, main, parsed, table


def test_each_run_is_a_record_and_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = "--rates 20 --seconds 0.3 --input-len 41 --output-len 6 --processes 1"
    arguments = ["demo", *sizes.split(), "--results-dir", str(tmp_path), "--commit", "c" * 40]
    monkeypatch.setattr("sys.argv", ["pair.py", *arguments])
    servers = Servers(parsed(arguments))
    with fake_chat() as p, fake_chat() as d:
        servers.run("pair", 20.0, url=d, prefill_url=p)
        servers.run("decode alone", 20.0, url=d)
    pair, alone = servers.runs.values()
    assert pair.metrics["completed"] == alone.metrics["completed"] == 6
    assert pair.workload["digest"] == alone.workload["digest"]  # the same prompts
    assert pair.workload["prefill_url"] == p and "prefill_url" not in alone.workload
    assert pair.metrics["cached_tokens"] == 0 < alone.metrics["cached_tokens"]
    assert pair.argv[:4] == ["python", "-m", "tests.load.pair", "demo"]
    slow = msgspec.structs.replace(pair, metrics={**alone.metrics})
    slow.metrics["icl_p99_ms"] = 3 * alone.metrics["icl_p99_ms"]
    rows = table({**servers.runs, ("pair", 20.0): slow}).splitlines()
    assert rows[-1] == "gap p99 of D at rate 20: 3.00 of decoding alone"
    assert rows[1].split()[:2] == ["pair", "20"] and rows[2].split()[:3] == [
        "decode",
        "alone",
        "20",
    ]
    (path,) = tmp_path.rglob(store.FILE)
    names = [entry.name for entry in store.read(path)]
    assert ["pair-rate20" in names[0], "decode-alone-rate20" in names[1]] == [True, True]
    assert capsys.readouterr().out.count("record: ") == 2


def test_the_table_and_the_plot_of_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = "94e5990f,034e9a9e,113327b2,d15819b8,7b0330c9"
    plot = tmp_path / "pair.svg"
    main(["demo", "--records", ids, "--plot", str(plot)])
    *rows, ratio_1, ratio_2, place = capsys.readouterr().out.splitlines()
    names = ["pair", "pair", "decode alone", "decode alone", "plain"]
    assert [row.split("  ")[0] for row in rows[1:]] == names
    assert ratio_1 == "gap p99 of D at rate 1: 1.04 of decoding alone"
    assert ratio_2 == "gap p99 of D at rate 2: 1.01 of decoding alone"
    assert place == f"plot: {plot}"
    text = plot.read_text()
    assert text.count(">decode alone<") == 3 and "gap between tokens (p99), ms" in text
