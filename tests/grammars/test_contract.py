"""The contract of grammars in pyproject.toml forbids every other part of nanovllm."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_contract_names_every_other_part() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (forbidden,) = (
        {*contract["forbidden_modules"]}
        for contract in contracts["contracts"]
        if contract.get("source_modules") == ["nanovllm.grammars"]
    )
    parts = {
        f"nanovllm.{path.stem}"
        for path in (ROOT / "nanovllm").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    others = parts - {"nanovllm.grammars", "nanovllm.__init__", "nanovllm.__main__"}
    assert others <= forbidden
    assert {name for name in forbidden if name.startswith("nanovllm.")} <= others
