"""The identity changes with every tensor's values, the config and the settings, and only then."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from nanovllm.checkpoint import CONFIG
from nanovllm.model_identity import MAX_SAMPLES, digest_of, model_identity
from nanovllm.typed_yaml import ConfigError

TENSOR_BYTES = 6000
SETTINGS: dict[str, object] = {"quantise": None}


def write_weights(path: Path, values: list[bytes], names: str = "layer") -> None:
    header, at = {}, 0
    for number, value in enumerate(values):
        header[f"{names}.{number}"] = {
            "dtype": "U8", "shape": [len(value)], "data_offsets": [at, at + len(value)],
        }  # fmt: skip
        at += len(value)
    head = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(values))


def values(*changed: int, count: int = 5) -> list[bytes]:
    return [bytes([i % 200 + (i in changed)]) * TENSOR_BYTES for i in range(count)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / CONFIG).write_text('{"model_type": "qwen3"}')
    write_weights(folder / "model-1.safetensors", values())
    write_weights(folder / "model-2.safetensors", values(count=300))
    return folder


def test_a_copy_with_other_times_is_the_same_model(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    for path in other.iterdir():
        os.utime(path, (0, 0))
    assert model_identity(model, SETTINGS) == model_identity(other, SETTINGS)
    assert len(model_identity(model, SETTINGS)) == 32


def test_any_change_is_another_model(model: Path) -> None:
    seen = {model_identity(model, SETTINGS), model_identity(model, {"quantise": "fp8"})}
    for number in range(5):  # one tensor, equal size and time
        write_weights(model / "model-1.safetensors", values(number))
        os.utime(model / "model-1.safetensors", (0, 0))
        seen.add(model_identity(model, SETTINGS))
    write_weights(model / "model-1.safetensors", values(), names="renamed")
    seen.add(model_identity(model, SETTINGS))
    write_weights(model / "model-1.safetensors", values(count=6))
    seen.add(model_identity(model, SETTINGS))
    (model / "model-1.safetensors").rename(model / "model-0.safetensors")
    seen.add(model_identity(model, SETTINGS))
    (model / CONFIG).write_text('{"model_type": "qwen4"}')
    seen.add(model_identity(model, SETTINGS))
    seen.add(model_identity(model, SETTINGS, has_weights=False))
    assert len(seen) == 12


def test_many_tensors_are_sampled_evenly(model: Path) -> None:
    def changed(first: int, last: int) -> bytes:
        write_weights(model / "model-2.safetensors", values(*range(first, last), count=300))
        return model_identity(model, SETTINGS)

    runs = [changed(at, at + 3) for at in range(0, 300, 3)]  # 300 / 128 tensors are 2.3
    assert len({*runs, changed(0, 0)}) == 101 and MAX_SAMPLES == 128


@pytest.mark.parametrize("head", [b"", b"\xff" * 8, (4).to_bytes(8, "little") + b"nojs"])
def test_a_malformed_header_is_sampled_too(head: bytes, model: Path) -> None:
    found = set()
    for fill in (b"a", b"b"):
        (model / "model-1.safetensors").write_bytes(head + fill * 5000)
        found.add(model_identity(model, SETTINGS))
    assert len(found) == 2


def test_no_weights_are_an_error(model: Path) -> None:
    for path in model.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors"):
        model_identity(model, SETTINGS)


def test_parts_do_not_run_together() -> None:
    assert digest_of("ab", "c") != digest_of("a", "bc") != digest_of("a", b"bc")
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
