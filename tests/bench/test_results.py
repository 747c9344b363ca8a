"""results/: all records in its files, links to them, and tables made of them."""

from __future__ import annotations

import re
from collections import Counter
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from nanovllm.bench import record, store
from nanovllm.config import ConfigError
from results import records, tables
from results.records import COMMENT, LINK, RESULTS, Records
from tests.bench.test_record import RECORD

ROOT = Path(__file__).parents[2]
MOST_FILES, MOST_BYTES = 60, 5_500_000
# Entries that were separate files until November 2026: number by kind, number of texts, and a
# digest of their ids in order. They are the first lines of their files and never change.
CONVERTED = {
    "cpu-x2": ({"serve": 3, "clients": 3, "demo": 6, "page": 1}, {}, "671214ae0758f950"),
    "h200-x1": (
        {"serve": 49, "offline": 183, "demo": 1, "graphs": 1, "kernels": 5},
        {"serve": 3, "offline": 42, "kernels": 18, "kv": 1},
        "0d95d76ee6d3a5f7",
    ),
    "h200-x2": (
        {"serve": 24, "offline": 75, "kernels": 9, "kv": 3},
        {"serve": 6, "offline": 26, "kernels": 1},
        "384d058ebce49863",
    ),
    "h200-x4": (
        {"serve": 22, "offline": 64},
        {"serve": 3, "offline": 9, "kernels": 1},
        "3a1401d4f7b6fb13",
    ),
}
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(page for folder in ("nanovllm", "recipes", "results", ".github")
      for page in sorted((ROOT / folder).rglob("*.md"))),
]  # fmt: skip


@pytest.fixture(scope="module")
def all_records() -> Records:
    return Records()


# -- the files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", CONVERTED)
def test_the_first_lines_are_the_files_of_before(machine: str) -> None:
    made, texts, digest = CONVERTED[machine]
    count = sum(made.values()) + sum(texts.values())
    entries = store.read(RESULTS / machine / store.FILE)[:count]
    assert Counter(one.kind for one in entries if one.is_record) == made
    assert Counter(one.kind for one in entries if not one.is_record) == texts
    assert sha256("".join(one.id for one in entries).encode()).hexdigest()[:16] == digest


def test_every_entry_is_what_its_id_says_and_where_it_belongs(all_records: Records) -> None:
    assert len(all_records.lines) >= 559
    assert len(all_records.by_id) == len(all_records.lines)
    for line in all_records.lines:
        entry = line.entry
        assert store.id_of(entry.content) == entry.id, line
        assert records.TEXT_NAME.fullmatch(entry.name), line
        if entry.is_record:
            made = msgspec.json.decode(bytes(entry.record), type=record.Record)
            assert made.is_publishable and made.kind == entry.kind, line
            assert made.machine.slug == line.machine, line
            assert entry.name.startswith(f"{made.started_at[:10]}_{made.commit[:7]}_"), line


def test_results_stay_small() -> None:
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    kept = [path for path in files if not {"scratch", "__pycache__"} & {*path.parts}]
    assert len(kept) <= MOST_FILES and sum(path.stat().st_size for path in kept) <= MOST_BYTES
    assert not [path for path in kept if path.suffix == ".json" and path.name != "schema.json"]


# -- links -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_record_leads_to_its_line(page: Path, all_records: Records) -> None:
    text = page.read_text()
    assert all_records.rewritten(text, page) == text, f"python -m results.records links {page}"
    for target, title in LINK.findall(COMMENT.sub("", text)):
        path, _, fragment = target.partition("#")
        if re.match(r"[a-z]+:", target) or not path:
            continue
        assert (page.parent / path).exists(), target
        if path.endswith(store.FILE) and fragment:
            line = all_records.by_id[title]
            assert fragment == f"L{line.number}", target
            assert (page.parent / path).resolve() == RESULTS / line.path, target


@pytest.mark.parametrize("page", [RESULTS / "README.md", RESULTS / "LOG.md"])
def test_every_anchor_is_a_heading(page: Path) -> None:
    for target, _ in LINK.findall(page.read_text()):
        path, _, fragment = target.partition("#")
        if fragment and not path.endswith(store.FILE):
            text = (page.parent / path if path else page).read_text()
            heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert fragment in slugs, target


def small(folder: Path) -> Records:
    """Return two records and a text of one machine type, in a checkout in `folder`."""
    results = folder / "results"
    for at, rate in enumerate((100.0, 250.0)):
        metrics = {"output_tokens_per_s": rate, "duration_s": 8.0 - at, "ttft_p50_ms": 12.345}
        workload = {"name": f"bs{at}", "cases": [{"kernel": "k", "case": "T=1: a", "us": 2.5}]}
        store.write(replace(RECORD, metrics=metrics, workload=workload), results)
    text = store.text_entry("a profile\n", "offline", "2026-11-21_4f2c9ab_profile")
    store.append(results / "h200-x1" / store.FILE, [text])
    (results / "h200-x1" / "plot.svg").touch()
    return Records(results)


def test_links_are_made_right(tmp_path: Path) -> None:
    found = small(tmp_path)
    one, two, text = (line.entry.id for line in found.lines)
    page = tmp_path / "docs" / "page.md"
    base = "../results/h200-x1"
    web = "https://example.org/o/nanovllm/blob/main/"
    for old, new in (
        (one, f'{base}/records.jsonl#L1 "{one}"'),
        (f'{base}/records.jsonl#L7 "{two}"', f'{base}/records.jsonl#L2 "{two}"'),
        (
            f"{base}/offline/2026-11-21_4f2c9ab_qwen3-0.6b_bs1.json",
            f'{base}/records.jsonl#L2 "{two}"',
        ),
        (f"{base}/offline/2026-11-21_4f2c9ab_profile.txt", f'{base}/records.jsonl#L3 "{text}"'),
        (f"{base}/serve/plot.svg", f"{base}/plot.svg"),
        (f"{base}/offline", f"{base}/records.jsonl"),
        (f"{base}/records.jsonl", f"{base}/records.jsonl"),
        (f"{base}/offline/none.json", f"{base}/offline/none.json"),
        ("page.md#head", "page.md#head"),
        (f"<!-- [b]({one}) -->", f"<!-- [b]({one}) -->"),
        ("https://example.org/a", "https://example.org/a"),
        (
            f'{web}results/h200-x1/records.jsonl#L9 "{one}"',
            f'{web}results/h200-x1/records.jsonl#L1 "{one}"',
        ),
        (
            f"{web}results/h200-x1/offline/2026-11-21_4f2c9ab_qwen3-0.6b_bs0.json",
            f'{web}results/h200-x1/records.jsonl#L1 "{one}"',
        ),
    ):
        assert found.rewritten(f"a [b]({old}) c", page) == f"a [b]({new}) c"
    with pytest.raises(ConfigError, match="no record 00000000; python -m results"):
        found.rewritten("[b](00000000)", page)


def test_the_command_lists_shows_adds_and_links(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, text = (line.entry.id for line in small(tmp_path).lines)
    folder = ["--results-dir", str(tmp_path / "results")]
    records.main(["list", "h200-x1", "bs1", *folder])
    named = "2026-11-21_4f2c9ab_qwen3-0.6b_bs1"
    assert capsys.readouterr().out == f"{two}  h200-x1  offline  {named}  250.0 tok/s\n"
    records.main(["show", text, *folder])
    assert capsys.readouterr().out == "a profile\n"
    records.main(["show", one, *folder])
    assert (
        msgspec.json.decode(capsys.readouterr().out, type=record.Record).metrics["duration_s"] == 8
    )

    other = replace(RECORD, duration_s=9.0)
    record.write_to(tmp_path / "a.json", other)
    place = store.write(replace(RECORD, duration_s=10.0), tmp_path / "elsewhere")
    profile = tmp_path / "2026-11-22_4f2c9ab_more.txt"
    profile.write_text("more\n")
    added = [str(tmp_path / "a.json"), str(place.path), str(profile)]
    given = ["--machine", "cpu-x2", "--kind", "kernels", *folder]
    records.main(["add", *given, *added])  # flags before the names, as the page has them
    rows = [row.split()[1:] for row in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["h200-x1", "2026-11-21_4f2c9ab_qwen3-0.6b_w1"],
        ["h200-x1", "2026-11-21_4f2c9ab_qwen3-0.6b_w1"],
        ["cpu-x2", "2026-11-22_4f2c9ab_more"],
    ]
    records.main(["add", added[0], *folder])
    assert "a.json: nothing new" in capsys.readouterr().out
    found = Records(tmp_path / "results")
    assert [line.machine for line in found.lines] == ["cpu-x2", *["h200-x1"] * 5]
    assert found.lines[0].entry.text == "more\n" and found.lines[0].entry.kind == "kernels"
    with pytest.raises(ConfigError, match="a text needs --machine, --kind and a name"):
        records.main(["add", str(profile), *folder])

    page = tmp_path / "page.md"
    page.write_text(f"[x]({one})")
    records.main(["links", str(page), *folder])
    assert page.read_text() == f'[x](results/h200-x1/records.jsonl#L1 "{one}")'


# -- tables ----------------------------------------------------------------------------------------


def test_the_tables_of_readme_are_those_of_the_records(all_records: Records) -> None:
    text = tables.PAGE.read_text()
    assert len(tables.TABLE.findall(text)) >= 40
    assert text.count("<!-- table") == text.count(tables.END) == len(tables.TABLE.findall(text))
    new = tables.generated(text, tables.PAGE, all_records)
    assert new == text, "python -m results.tables"


def test_a_table_is_made_of_records(tmp_path: Path) -> None:
    found = small(tmp_path)
    one, two, text = (line.entry.id for line in found.lines)
    source = f"""| load | one | two | ratio |
| `w1`, tok/s | {{{one} tok/s}} | {{{two} tok/s}} | {{speedup 1}} |
| time, s | {{{one} s}} | {{{two} s}} | {{speedup 1 .3f}} |
| first | {{{one} ttft}} ms | {{{two} ttft_p50_ms .1f}} | |
| kernel, [text]({text}) | {{{one} k: T=1: a: us}} | 3 | |
"""
    page = tmp_path / "results" / "README.md"
    page.write_text(f"Before.\n\n<!-- table\n{source}-->\nold\n{tables.END}\n\nAfter.\n")
    made = tables.generated(page.read_text(), page, found)
    head, table = made.split(f"{source}-->\n\n")
    assert head == "Before.\n\n<!-- table\n" and table.endswith(f"\n\n{tables.END}\n\nAfter.\n")
    links = [
        f'h200-x1/records.jsonl#L{nth} "{name}"' for nth, name in ((1, one), (2, two), (3, text))
    ]
    assert table.split("\n\n")[0].splitlines() == [
        "| load | one | two | ratio |",
        "| --- | --: | --: | --: |",
        f"| `w1`, tok/s | [100]({links[0]}) | [250]({links[1]}) | 2.50 |",
        f"| time, s | [8.000]({links[0]}) | [7.000]({links[1]}) | 1.143 |",
        f"| first | [12.3]({links[0]}) ms | [12.3]({links[1]}) |  |",
        f"| kernel, [text]({links[2]}) | [2.50]({links[0]}) | 3 |  |",
    ]
    assert tables.generated(made, page, found) == made


def test_a_stale_page_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"<!-- table\n| a | b |\n| 1 | 2 |\n-->\n{tables.END}\n")
    with pytest.raises(ConfigError, match=r"page\.md is stale; run python -m results\.tables"):
        tables.main(["--check", str(page)])
    tables.main([str(page)])
    assert "| --- | --: |\n| 1 | 2 |\n" in page.read_text()
    tables.main(["--check", str(page)])
    assert capsys.readouterr().out == f"{page}: 1 tables\n" * 2


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"), (0.0153, "0.0153"), (0.9163, "0.916"), (1.0, "1.00"), (9.994, "9.99"),
        (9.996, "10.0"), (57.14, "57.1"), (99.94, "99.9"), (99.96, "100"), (4864.7, "4,865"),
    ],
)  # fmt: skip
def test_numbers_have_three_digits_or_all(value: float, shown: str) -> None:
    assert tables.formatted(value, "") == shown


def test_a_ratio_to_another_row(tmp_path: Path) -> None:
    found = small(tmp_path)
    one, two = (line.entry.id for line in found.lines[:2])
    rows = [f"| {{{two} {name}}}, {{speedup over {one} .3f}} |" for name in ("tok/s", "s")]
    link = f'h200-x1/records.jsonl#L2 "{two}"'
    shown = tables.table("\n".join(["| a |", *rows]), found).replace(f"({two})", f"({link})")
    assert shown.splitlines()[2:] == [f"| [250]({link}), 2.500 |", f"| [7.000]({link}), 1.143 |"]
    rates = "requests_per_minute", "tokens_per_second_of_a_user_p50", "tflops", "tb_per_s"
    assert all(map(tables.is_rate, rates)) and not tables.is_rate("ttft_p50_ms")


def test_numbers_of_two_kinds_of_gpu_have_no_ratio(tmp_path: Path) -> None:
    results = tmp_path / "results"
    for gpu in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        store.write(replace(RECORD, machine=replace(RECORD.machine, gpu=gpu)), results)
    found = Records(results)
    one, two = (line.entry.id for line in found.lines)
    for other in ("1", f"over {one}"):
        row = f"| | {{{one} s}} | {{{two} s}} | {{speedup {other}}} |"
        with pytest.raises(ConfigError, match=r"NVIDIA H.* and NVIDIA H.* have no ratio"):
            tables.table(f"| a | b | c | d |\n{row}", found)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{ID speed}", "a record of Qwen3-0.6B has no speed: output_tokens_per_s, duration_s"),
        ("{00000000 tok/s}", "no record 00000000"),
        ("{speedup 1}", "{speedup 1}: no value stands before it"),
        ("{ID tok/s} | {speedup x}", "{speedup x}: no value stands in column x"),
        ("{ID tok/s} | {speedup over 00000000}", "no record 00000000"),
        ("{ID tok/s} | {ID s} | {speedup 0}", "output_tokens_per_s and duration_s have no ratio"),
        ("1 | 2 | 3 | 4", "has 4 cells; 1 in all"),
    ],
)
def test_a_wrong_cell_is_refused(row: str, message: str, tmp_path: Path) -> None:
    found = small(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(message)):
        tables.table(f"head\n{row.replace('ID', found.lines[0].entry.id)}\n", found)
