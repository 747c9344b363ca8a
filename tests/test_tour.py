"""Files, glossary words and drawings of nanovllm/README.md exist in the code."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOUR = (ROOT / "nanovllm" / "README.md").read_text()
CODE = "\n".join(path.read_text() for path in sorted((ROOT / "nanovllm").rglob("*.py")))
KERNELS = "\n".join(path.read_text() for path in sorted((ROOT / "kernels").rglob("*.py")))
FORMER = {  # former names, with the field's terms
    r"cells?_\w+": "slot_mapping, tokens, pages",
    r"(\w+_)?gain_[A-Z]\w*": "norm_weight",
    r"(head|k|v)_width": "head_size, k_size, v_size",
    r"floors?(_\w+)?": "thresholds",
    r"_?settle": "write_back",
    r"dead_\w+|run_dead": "padding",
    r"nanovllm\.dist": "nanovllm.parallel",
}
FILE = re.compile(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|md))`")


def glossary(text: str) -> dict[str, str]:
    """Return nanovllm's words and vLLM's words for them."""
    lines = text.partition("## Glossary")[2].partition("\n## ")[0].splitlines()
    cells = [
        [cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if "|" in line
    ]
    return dict(cells[2:])


def absent(words: dict[str, str], code: str) -> list[str]:
    return [word for word in words if not re.search(rf"\b{re.escape(word)}s?\b", code)]


def test_every_word_occurs_in_the_code() -> None:
    words = glossary(TOUR)
    assert 20 <= len(words) <= 30 and all(words.values())
    assert absent(words, CODE) == []
    assert absent({"slot": "", "cell": "", "decode row": ""}, "the slots of decode rows") == [
        "cell"
    ]


def former(code: str) -> list[str]:
    words = (re.findall(rf"(?<![\w.])({word})\b(?!\()", code) for word in FORMER)
    return sorted(
        {match[0] if isinstance(match, tuple) else match for found in words for match in found}
    )


def test_no_former_word_has_come_back() -> None:
    layers = [ROOT / "nanovllm" / name for name in ("attention", "layers", "runner", "sampling")]
    code = "\n".join(path.read_text() for folder in layers for path in sorted(folder.rglob("*.py")))
    assert former(code + KERNELS) == []
    assert former("cells_T q_gain_A dead_slot floors settle excells_T") == [
        "cells_T", "dead_slot", "floors", "q_gain_A", "settle",
    ]  # fmt: skip


def test_every_file_of_the_tour_exists() -> None:
    places = [ROOT / "nanovllm", ROOT / "kernels" / "nanovllm_kernels"]
    backends = ROOT / "nanovllm" / "attention"
    named = FILE.findall(TOUR)
    assert len(named) > 40
    assert [n for n in named if not any((p / n).exists() for p in (ROOT, *places, backends))] == []


def test_drawings_name_what_is_there() -> None:
    """GitHub renders Mermaid: a drawing of the processes and one of a step."""
    drawings = re.findall(r"```mermaid\n(.*?)```", TOUR, re.DOTALL)
    assert [drawing.split()[0] for drawing in drawings] == ["flowchart", "sequenceDiagram"]
    folders = re.findall(r"\b(\w+)/(?=[<,\"])", drawings[0])
    assert set(folders) == {p.parent.name for p in (ROOT / "nanovllm").glob("*/__init__.py")} - {
        "adapters", "bench", "cli", "ipc", "parallel", "spec", "transfer",
    }  # fmt: skip
    for name in re.findall(r"\b(\w+)\(", drawings[1]):
        assert f"def {name}(" in CODE or f"self.{name}(" in CODE, name
