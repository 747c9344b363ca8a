"""Files of records: appended lines, ids by content, and lookup by id."""

from __future__ import annotations

import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from nanovllm.bench import record, store
from nanovllm.bench.record import Record
from nanovllm.cli.commands import profile_kv
from nanovllm.config import ConfigError
from tests.bench.test_record import RECORD, ROOT, changed


def name(made: Record) -> str:
    return store.entry_of(made).name


def entry_with(content: bytes) -> store.StoredEntry:
    """Return an entry with this content, which need not be a record."""
    given = store.id_of(content)
    return store.StoredEntry(id=given, kind="offline", name="n", record=msgspec.Raw(content))


def test_records_are_appended_and_found_by_id(tmp_path: Path) -> None:
    second = changed(metrics={"output_tokens_per_s": 90.0})
    places = [store.write(one, tmp_path) for one in (RECORD, second)]
    path = tmp_path / "h200-x1" / "records.jsonl"
    assert [place.path for place in places] == [path, path]
    lines = path.read_bytes().splitlines()
    for line, place, made in zip(lines, places, (RECORD, second), strict=True):
        content = msgspec.json.encode(made)
        assert place.id == sha256(content).hexdigest()[:8]
        head = f'{{"id":"{place.id}","kind":"offline","name":"2026-11-21_4f2c9ab_qwen3-0.6b_w1",'
        assert line == head.encode() + b'"record":' + content + b"}"
        assert store.find(place.id, tmp_path) == store.find(str(place), Path("no")) == made
    assert store.records(tmp_path) == [RECORD, second]
    assert str(places[0]) == f"{path}#{places[0].id}"


def test_a_record_that_is_there_already_stays_one(tmp_path: Path) -> None:
    first = store.write(RECORD, tmp_path)
    assert store.write(RECORD, tmp_path) == first
    assert len(first.path.read_bytes().splitlines()) == 1
    other = msgspec.structs.replace(store.text_entry("x", "offline", "n"), id=first.id)
    with pytest.raises(ConfigError, match=f"has a different record {first.id}; repeat"):
        store.append(first.path, [other])


def test_a_line_without_an_end_is_ended_first(tmp_path: Path) -> None:
    place = store.write(RECORD, tmp_path)
    place.path.write_bytes(place.path.read_bytes().rstrip())
    second = store.write(changed(duration_s=6.0), tmp_path)
    assert [one.id for one in store.read(place.path)] == [place.id, second.id]


def test_two_processes_append_whole_lines(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from nanovllm.bench import store
for nth in range(20):
    text = sys.argv[1] * 50_000 + str(nth)
    store.append(Path(sys.argv[2]), [store.text_entry(text, "kernels", "long")])
"""
    path = tmp_path / "records.jsonl"
    lines = [[sys.executable, "-c", code, letter, str(path)] for letter in "ab"]
    running = [subprocess.Popen(line, cwd=ROOT) for line in lines]
    assert [process.wait() for process in running] == [0, 0]
    texts = [entry.text for entry in store.read(path)]
    assert sorted(texts) == sorted(c * 50_000 + str(nth) for c in "ab" for nth in range(20))


def test_numbers_stay_as_they_were_written(tmp_path: Path) -> None:
    """An integer in a metric stays an integer, so that old records keep their ids."""
    raw = msgspec.json.encode(RECORD).replace(b"100.0", b"100")
    entry = entry_with(raw)
    path = tmp_path / "m" / "records.jsonl"
    store.append(path, [entry])
    (there,) = store.read(path)
    assert there.content == raw and store.id_of(there.content) == there.id
    assert store.find(there.id, tmp_path) == RECORD


def test_an_ablation_shows_in_the_name() -> None:
    ablated = changed(changed={"load.format": "dummy", "cache.prefix": False, "schedule.depth": 0})
    assert name(ablated) == "2026-11-21_4f2c9ab_qwen3-0.6b_w1_prefixfalse_depth0"


def test_another_engine_shows_in_the_name_and_its_port_does_not() -> None:
    recipe = {"model": "/tmp/m/Qwen3-0.6B", "served_by": "vllm 0.26.0", "command": "vllm serve"}
    flags = {"load-format": "dummy", "port": "8000", "api-server-count": "4"}
    peer = changed(recipe=recipe, changed=flags)
    assert (peer.engine, RECORD.engine) == ("vllm 0.26.0", "nanovllm")
    assert name(peer) == "2026-11-21_4f2c9ab_qwen3-0.6b_w1_vllm-0.26.0_api-server-count4"


@pytest.mark.parametrize(
    "fields", [{"dirty": True}, {"commit": ""}, {"notes": "invalid: 9 of 10 requests failed"}]
)
def test_what_cannot_be_repeated_goes_to_scratch(tmp_path: Path, fields: dict[str, object]) -> None:
    made = changed(**fields)
    place = store.write(made, tmp_path)
    assert place.path == tmp_path / "scratch" / "h200-x1" / "records.jsonl"
    assert store.find(place.id, tmp_path) == made
    plot = store.plot_path(made, tmp_path)
    assert plot.parent == place.path.parent and plot.suffix == ".svg"


def test_a_plot_never_replaces_another(tmp_path: Path) -> None:
    first = store.plot_path(RECORD, tmp_path)
    assert first == tmp_path / "h200-x1" / "2026-11-21_4f2c9ab_qwen3-0.6b_w1.svg"
    first.touch()
    assert store.plot_path(RECORD, tmp_path).name == "2026-11-21_4f2c9ab_qwen3-0.6b_w1_2.svg"


def test_a_record_goes_to_a_file_or_below_a_folder(tmp_path: Path) -> None:
    store.put(RECORD, tmp_path)
    assert store.records(tmp_path) == [RECORD]
    store.put(RECORD, tmp_path / "a.json")
    assert record.read(tmp_path / "a.json") == store.find(f"{tmp_path}/a.json", Path("no"))


def test_commands_append_to_a_folder_of_results(tmp_path: Path) -> None:
    given = ["qwen3-0.6b", "--gpu", "h200", "--tp", "1"]
    done = CliRunner().invoke(profile_kv, [*given, "--json", str(tmp_path)])
    assert done.exit_code == 0, done.exception
    (made,) = store.records(tmp_path)
    assert made.kind == "kv" and made.workload["name"] == "profile-kv"
    plot = CliRunner().invoke(profile_kv, [*given, "--plot", str(tmp_path)]).exception
    assert str(plot) == f"--plot {tmp_path}: no file can be written there"


def test_what_is_not_found_is_named(tmp_path: Path) -> None:
    place = store.write(RECORD, tmp_path)
    store.append(place.path, [text := store.text_entry("t", "offline", "2026-11-21_4f2c9ab_t")])
    for wanted, message in (
        ("12345678", rf"^no record 12345678 in {tmp_path}; give an id or a JSON file$"),
        (f"{place.path}#12345678", rf"^no record 12345678 in {place.path}; give an id or a JSON"),
        (f"{tmp_path}/none.jsonl#12345678", r"^cannot read .*none\.jsonl: No such file"),
        (text.id, rf"^{text.id} is a text without metrics; only records can be compared$"),
        ("none.json", r"^none\.json is not a record: .*No such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            store.find(wanted, tmp_path)


@pytest.mark.parametrize("line", [b"{", b'{"id": "a"}', b'{"id": "\xe9"}', b""])
def test_a_broken_line_is_named_by_its_number(tmp_path: Path, line: bytes) -> None:
    place = store.write(RECORD, tmp_path)
    place.path.write_bytes(place.path.read_bytes() + line + b"\n")
    with pytest.raises(ConfigError, match=r"records\.jsonl:2 is not an entry: "):
        store.read(place.path)


def test_a_broken_record_is_named_by_its_id(tmp_path: Path) -> None:
    entry = entry_with(b'{"kind": "offline", "speed": 3}')
    store.append(tmp_path / "m" / "records.jsonl", [entry])
    with pytest.raises(ConfigError, match=rf"^record {entry.id} is broken: .*speed"):
        store.find(entry.id, tmp_path)
