"""Folders that are not loadable checkpoints get one sentence each. Files must stay inside."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nanovllm import checkpoint
from nanovllm.config import DEMO, ConfigError, load_config

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 16060617592\n"
INDEX = "model.safetensors.index.json"


def demo(folder: Path, without: str = "") -> Path:
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns(without, "draft"))
    return folder


def line_of(named: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(str(named))
    return str(caught.value)


def adapter(folder: Path) -> None:
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B"}')
    (folder / "adapter_model.safetensors").write_bytes(b"x")


def adapter_with_config(folder: Path) -> None:
    adapter(folder)
    shutil.copy(DEMO / "config.json", folder)


def pickled(folder: Path) -> None:
    demo(folder, "model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"x")


def gguf(folder: Path) -> None:
    folder.mkdir()
    (folder / "Qwen3-8B-Q4_K_M.gguf").write_bytes(b"GGUF")


def pointer(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        demo(folder)
        (folder / name).write_text(LFS)

    return make


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Path.mkdir, "FOLDER has no config.json, so it is not a model"),
        (adapter, "FOLDER is a PEFT adapter, not a model: merge it into Qwen/Qwen3-8B"),
        (adapter_with_config, "FOLDER is a PEFT adapter, not a model: merge it into Qwen/Qwen3-8B"),
        (pickled, "FOLDER has only pickled weights (such as pytorch_model.bin)"),
        (gguf, "FOLDER has GGUF files, which nanovllm cannot read: serve the original model"),
        (
            lambda folder: demo(folder, "*.safetensors"),
            "FOLDER has no *.safetensors; --load-format dummy runs without weights",
        ),
        (
            pointer("model.safetensors"),
            "FOLDER/model.safetensors is a Git LFS pointer instead of the file itself: run `git "
            "lfs pull` in FOLDER",
        ),
        (pointer("tokenizer.json"), "FOLDER/tokenizer.json is a Git LFS pointer"),
        (pointer("config.json"), "FOLDER/config.json is a Git LFS pointer"),
    ],
)
def test_every_folder_that_is_no_checkpoint_has_a_sentence(tmp_path, make, said) -> None:
    folder = tmp_path / "model"
    make(folder)
    line = line_of(folder)
    assert line.replace(str(folder), "FOLDER").startswith(said)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Qwen3-8B-Q4_K_M.gguf", "is a GGUF file, which nanovllm cannot read: serve the "
         "original model, Qwen3-8B, by its Hub id"),
        ("renamed.yaml", "is a GGUF file"),
        ("model.safetensors", "is a file of weights: name its folder, which has a config.json"),
        ("pytorch_model.bin", "is a file of weights: name its folder"),
    ],
)  # fmt: skip
def test_a_file_of_weights_is_no_recipe(tmp_path, name, said) -> None:
    path = tmp_path / name
    path.write_bytes(b"GGUF\3\0" if name.endswith(("gguf", "yaml")) else b"x")
    assert line_of(path).startswith(f"{path} {said}")
    if not name.endswith(".yaml"):
        with pytest.raises(ConfigError, match=r"is a (GGUF file|file of weights)"):
            load_config(None, [f"model={path}"])


def test_adapter_files_next_to_a_whole_model_do_no_harm(tmp_path) -> None:
    folder = demo(tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"x")
    assert load_config(str(folder)).model_dir == str(folder)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert checkpoint.weight_files(folder)[1] == [folder / "other.safetensors"]


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "a/../../secret.safetensors", "..", "."]
)
def test_an_index_stays_inside_of_its_folder(tmp_path, name) -> None:
    folder = demo(tmp_path / "model")
    shutil.copy(folder / "model.safetensors", tmp_path / "secret.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
    line = line_of(folder)
    assert line.startswith(f"{folder / INDEX}: names ")
    assert ("is outside the folder" in line) == (name != ".")


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
    ],
)
def test_links_out_of_the_folder_are_refused(tmp_path, name) -> None:
    folder = demo(tmp_path / "model")
    outside = tmp_path / name
    (folder / name).rename(outside)
    for target in (outside, f"../{name}"):
        (folder / name).symlink_to(target)
        assert line_of(folder) == (
            f"{folder / name} is a link to {outside}, outside the model's folder: "
            "copy the file there"
        )
        (folder / name).unlink()
    (folder / "real").mkdir()
    outside.rename(folder / "real" / name)
    (folder / name).symlink_to(f"real/{name}")
    assert load_config(str(folder)).model_dir == str(folder)


def test_an_index_may_not_name_a_link_that_leads_out(tmp_path) -> None:
    folder = demo(tmp_path / "model")
    (folder / "part").symlink_to(tmp_path)
    shutil.copy(folder / "model.safetensors", tmp_path / "x.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "part/x.safetensors"}}))
    assert "outside the model's folder" in line_of(folder)


def test_the_folder_itself_may_be_a_link(tmp_path) -> None:
    demo(tmp_path / "model")
    (tmp_path / "link").symlink_to("model")
    assert load_config(str(tmp_path / "link")).served_name == "link"


def test_links_of_the_hubs_cache_lead_to_blobs_of_the_same_model(tmp_path) -> None:
    cache = tmp_path / "models--me--demo"
    snapshot = demo(cache / "snapshots" / "abc")
    blobs = cache / "blobs"
    blobs.mkdir()
    for at, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(at))
        path.symlink_to(os.path.relpath(blobs / str(at), snapshot))
    assert load_config(str(snapshot)).model_dir == str(snapshot)
    other = tmp_path / "models--you--demo" / "blobs"
    other.mkdir(parents=True)
    (snapshot / "config.json").resolve().rename(other / "0")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(other / "0")
    assert "outside the model's folder" in line_of(snapshot)
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(blobs / "gone")
    assert line_of(snapshot).endswith("blobs/gone, which does not exist")


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("Qwen/Qwen3-8B-AWQ", "Qwen3-8B"),
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "Qwen3-8B"),
        ("Qwen/Qwen3-8B-GPTQ-Int4", "Qwen3-8B"),
        ("RedHatAI/Qwen3-8B-quantized.w4a16", "Qwen3-8B"),
        ("RedHatAI/Qwen3-8B-FP8-dynamic", "Qwen3-8B"),
        ("Qwen3-8B-Q4_K_M.gguf", "Qwen3-8B"),
        ("mlx-community/Qwen3-30B-A3B-4bit", "Qwen3-30B-A3B"),
        ("Qwen/Qwen3-30B-A3B", "Qwen3-30B-A3B"),
        ("Qwen/Qwen3-4B-Instruct-2507", "Qwen3-4B-Instruct-2507"),
    ],
)
def test_a_quantised_models_name_has_that_of_its_base(name, base) -> None:
    assert checkpoint.made_from(name) == base
