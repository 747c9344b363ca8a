"""Lookup of a recipe's model: a folder, the local Hub cache, or an error."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm.config import DEMO, ConfigError, load_config, read_recipe


def test_a_hub_id_is_found_in_the_local_cache(tmp_path: Path) -> None:
    cached = tmp_path / "hub" / "models--someone--demo"
    shutil.copytree(DEMO, cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    code = (
        "from nanovllm.config import load_config\n"
        "config = load_config(None, ['model=someone/demo'])\n"
        "print(config.model_dir, config.served_name)"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert run.stdout.split() == [str(cached / "snapshots" / "abc"), "demo"], run.stderr


def test_a_folder_is_itself() -> None:
    config = load_config(None, [f"model={DEMO}"])
    assert config.model_dir == str(DEMO)
    assert config.tokenizer_dir == str(DEMO)


def test_dummy_weights_need_only_the_recipe_s_config() -> None:
    recipes = Path(__file__).parents[1] / "recipes"
    config = load_config(str(recipes / "qwen3-0.6b.yaml"), ["load.format=dummy"])
    assert config.config_path == str(recipes / "configs" / "Qwen3-0.6B.json")
    assert config.tokenizer_dir == str(DEMO)


def test_paths_start_at_the_recipe_and_those_of_set_at_the_current_folder(
    tmp_path: Path, monkeypatch
) -> None:
    for place in ("recipes", "here"):
        shutil.copytree(DEMO / "adapters", tmp_path / place / "adapters")
        shutil.copy(DEMO / "config.json", tmp_path / place / "c.json")
    files = "c.json", "adapters"
    text = "model: some/model\nload: {format: dummy}\nconfig: c.json\nadapters: {folder: adapters}"
    (tmp_path / "recipes" / "r.yaml").write_text(text)
    monkeypatch.chdir(tmp_path / "here")
    for places, settings in (
        (("../recipes", "../recipes"), ["adapters.slots=2"]),
        (("../recipes", "."), ["adapters.folder=adapters"]),
        (("../recipes", "."), ["adapters={folder: adapters}"]),
        ((".", "../recipes"), ["config=c.json"]),
    ):
        config = load_config("../recipes/r.yaml", settings)
        assert config.recipe.adapters is not None
        paths = Path(config.config_path), Path(config.recipe.adapters.folder)
        names = [Path(place, name) for place, name in zip(places, files, strict=True)]
        assert [path.resolve() for path in paths] == [name.resolve() for name in names]


@pytest.mark.parametrize("model", ["./nowhere", "no one/nothing", "nowhere", "x" * 300])
def test_a_model_that_is_nowhere_is_named(model: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot find model '{model}': it is not"):
        load_config(None, [f"model={model}"])


def test_the_first_layers_of_a_model_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("model: {name: demo, num_layers: 1}\ndevice: cpu\n")
    recipe = read_recipe(str(path)).recipe
    assert (recipe.model, recipe.num_layers) == ("demo", 1)
    recipe = read_recipe(str(path), ["model.num_layers=2", "model=Qwen/Qwen3-8B"]).recipe
    assert (recipe.model, recipe.num_layers) == ("Qwen/Qwen3-8B", 2)
    recipe = read_recipe("qwen3-8b", ["model.num_layers=4"]).recipe
    assert (recipe.model, recipe.num_layers) == ("Qwen/Qwen3-8B", 4)
    assert read_recipe("qwen3-8b").recipe.num_layers == "auto"


@pytest.mark.parametrize(
    "text, said",
    [
        (
            "model: {layers: 1}",
            "unknown key model.layers; a model has model.name, model.num_layers",
        ),
        ("model: {num_layers: x}", "num_layers is 'x'; it must be a whole number or auto"),
        ("model: {name: 3}", """model is 3; it must be text, in quotes for YAML, as in '"1"'"""),
    ],
)
def test_a_model_with_keys_that_are_wrong(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_recipe(str(path))
    assert str(caught.value) == said
