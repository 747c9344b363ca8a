"""The measurement with a folder of schemas: metrics and detection of wrong answers."""

from __future__ import annotations

import json

from nanovllm.bench import store
from tests.load.schemas import Found, arrange, judge, reasons, record_of, run, summary

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["y"],
}


def test_a_folder(tmp_path) -> None:
    files = {
        "closed": (
            POINT,
            [({"y": 1, "x": 2.0}, True), ({"y": 1, "z": 3}, True), ({"x": 1}, False)],
        ),
        "inexact": ({"type": "array", "uniqueItems": True}, [([1], True)]),
        "never": ({"type": "string", "enum": [1]}, []),
        "lying": (POINT, [({"y": 1}, False), ({"y": "a"}, True)]),
    }
    for name, (schema, tests) in files.items():
        listed = [{"data": data, "valid": valid} for data, valid in tests]
        (tmp_path / f"{name}.json").write_text(json.dumps({"schema": schema, "tests": listed}))
    found = {one.name: one for one in run(sorted(tmp_path.glob("*.json")), jobs=1)}
    closed = found["closed"]
    assert (closed.valid, closed.valid_passed, closed.closed) == (2, 1, 1)
    assert (closed.invalid, closed.invalid_refused, closed.wrong) == (1, 1, [])
    assert "'uniqueItems'" in (found["inexact"].refusal or "")
    assert found["inexact"].best_refusal is None and found["never"].best_refusal is not None
    assert [text.partition(":")[0].split(" at ")[0] for text in found["lying"].wrong] == [
        "accepted",
        "refused",
    ]
    metrics = summary(list(found.values()))
    assert (metrics["strict_percent"], metrics["best_effort_percent"]) == (50, 75)
    assert (metrics["valid_percent"], metrics["invalid_refused_percent"]) == (66.67, 50)
    assert sum(reasons(list(found.values())).values()) == 2
    made = record_of(metrics, "2026-01-01T00:00:00+00:00", 1.0, "some", None)
    place = store.write(made, tmp_path)
    (entry,) = store.read(place.path)
    assert entry.name.endswith("_some_schemas") and store.record_of(entry).metrics == metrics


def test_keys_come_in_the_order_of_the_schema() -> None:
    schema = {"allOf": [{"$ref": "#/$defs/p"}], "properties": {"z": {}}, "$defs": {"p": POINT}}
    unnamed: set[tuple[int, str]] = set()
    arranged = arrange({"w": 1, "y": 1, "z": 2, "x": 3}, schema, schema, unnamed)
    assert list(arranged) == ["z", "x", "y", "w"] and unnamed == {(id(arranged), "w")}


def test_one_file(tmp_path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"schema": True, "tests": [{"data": [None], "valid": True}]}))
    found = judge(path)
    assert isinstance(found, Found) and found.valid_passed == 1 and found.grammar_bytes > 0
