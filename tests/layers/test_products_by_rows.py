"""Choice of products by rows for the published models on a Hopper GPU, without a GPU.

The expected choices are in products_by_rows.txt: one line per model, layer and table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace

from nanovllm.config import Kernels, load_config
from nanovllm.layers.describe import by_rows, tables_of
from nanovllm.runner.resolved import resolve_config

RECIPES = Path(__file__).parents[2] / "recipes"
EXPECTED = Path(__file__).with_name("products_by_rows.txt").read_text().splitlines()
SIZES = (1, 2, 8, 16, 17, 24, 32, 48, 64, 65, 80, 96, 112, 128, 129, 160, 192, 224, 256, 320, 384,
         385, 448, 512, 768, 1024, 2048, 4096, 8192)  # fmt: skip
MODELS = (
    ("qwen3-0.6b", 1, ()),
    ("qwen3-8b", 1, ()),
    ("qwen3-8b", 2, ()),
    ("qwen3-8b", 1, ("quantize=fp8",)),
    ("qwen3-8b", 2, ("quantize=fp8",)),
    ("qwen3-8b", 1, ("quantize=fp8", "kernels.fp8_linear=tiled")),
    ("qwen3-8b", 1, ("quantize=fp8", "dtype=float32")),
    ("qwen3-8b", 1, ("kernels.invariant=true",)),
    ("qwen3-8b", 2, ("quantize=fp8", "kernels.invariant=true")),
    ("qwen3-8b", 1, ("kernels.skinny_linear=torch",)),
    ("qwen3-8b", 1, ("kernels.sliced_linear=torch", "kernels.added_linear=torch")),
    ("qwen3-32b", 2, ()),
    ("qwen3-32b", 4, ()),
    ("qwen3-30b-a3b", 1, ()),
    ("qwen3-30b-a3b", 1, ("quantize=fp8",)),
    ("qwen3-next-80b-a3b", 1, ()),
    ("minimax-m2", 1, ()),
    ("deepseek-r1", 1, ()),
    ("deepseek-r1", 8, ()),
    ("deepseek-r1", 1, ("kernels.invariant=true",)),
    ("r1-distill-llama-8b", 1, ()),
    ("r1-distill-llama-70b", 4, ()),
    ("qwen3.5-27b", 2, ()),
)


def lines_of(name: str, tp: int, changes: tuple[str, ...]) -> Iterator[str]:
    """Yield one line for each table of the first and the last block, and of the head."""
    settings = [*changes, f"parallel.tp={tp}", "model.num_layers=4", "load.format=dummy"]
    found = resolve_config(load_config(str(RECIPES / f"{name}.yaml"), [*settings, "device=cpu"]))
    asked = dict(change.removeprefix("kernels.").split("=") for change in changes if "." in change)
    recipe = replace(found.recipe, kernels=msgspec.convert(asked, Kernels, strict=False))
    dtype = torch.float32 if "dtype=float32" in changes else torch.bfloat16
    gpu = torch.device("cuda")
    found = dataclasses.replace(found, recipe=recipe, device=gpu, dtype=dtype)
    model = found.empty_model(torch.device("meta"))
    title = " ".join((name, f"tp={tp}", *changes))
    for block in (model.layers[0], model.layers[3], torch.nn.ModuleDict({"head": model.head})):
        for part, module in block.named_modules():
            for table in tables_of(module):
                yield f"{title}: {part}: {by_rows(table, SIZES)}"


@pytest.mark.parametrize(("name", "tp", "changes"), MODELS, ids=str)
def test_products_of_a_published_model(
    name: str, tp: int, changes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.layers.kernels.obstacle", lambda device: None)
    monkeypatch.setattr("nanovllm.layers.kernels.without_workspace", lambda: None)
    title = " ".join((name, f"tp={tp}", *changes))
    expected = [line for line in EXPECTED if line.startswith(f"{title}:")]
    found = [*dict.fromkeys(lines_of(name, tp, changes))]
    assert found == expected
    if "kernels.invariant=true" in changes:  # each operation is fused for all rows or for none
        for line in found:
            choices = line.rpartition(": ")[2].split(", ")
            assert len({"gate" in choice for choice in choices}) == 1, line
            assert len({"residual" in choice for choice in choices}) == 1, line
