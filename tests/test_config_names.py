"""Values of RECIPE, and one line with a remedy for each mistake in it or in a key."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest
from hypothesis import example, given, settings, strategies as st

from nanovllm import hub, launch, recipes
from nanovllm.bench.record import hide_secrets
from nanovllm.config import (
    DEMO,
    Config,
    ConfigError,
    load_config,
    read_recipe,
    without_api_key,
)
from nanovllm.server.parsers import PARSERS
from nanovllm.server.probe import parser_of

ROOT = Path(__file__).parents[1]
SHIPPED = ", ".join(path.stem for path in sorted((ROOT / "recipes").glob("*.yaml")))


def refused(named: str | None, *overrides: str, **flags: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(named, overrides, flags)
    (line,) = str(caught.value).splitlines()
    return line


# -- RECIPE ------------------------------------------------------------------------------------


def test_a_shipped_recipe_has_a_name() -> None:
    by_name, by_path = (
        load_config(named, ["load.format=dummy"])
        for named in ("qwen3-8b", str(ROOT / "recipes" / "qwen3-8b.yaml"))
    )
    assert by_name == by_path
    assert by_name.recipe.model == "Qwen/Qwen3-8B"
    assert by_name.recipe.schedule.step_tokens == 8448
    assert by_name.config_path.endswith("configs/Qwen3-8B.json")
    assert ", ".join(recipes.shipped()) == SHIPPED


def test_a_model_s_folder_is_a_recipe(tmp_path: Path) -> None:
    copy = tmp_path / "my-model"
    shutil.copytree(DEMO, copy)
    config = load_config(str(copy), ["schedule.slots=3"])
    assert (config.model_dir, config.served_name) == (str(copy), "my-model")
    assert (config.source, config.recipe.schedule.slots) == (str(copy), 3)
    assert parser_of(config) == "qwen3"  # selected by the template
    (copy / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert parser_of(config) == "qwen3"


def test_the_current_folder_has_a_name(tmp_path: Path, monkeypatch) -> None:
    shutil.copytree(DEMO, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    assert load_config(".").served_name == "here"


def test_a_hub_id_is_a_recipe(monkeypatch) -> None:
    asked = []

    def fetched(model: str, *_: object) -> Path:
        asked.append(model)
        return DEMO

    monkeypatch.setattr(hub, "fetched", fetched)
    config = load_config("someone/Some-Model")
    assert (config.recipe.model, config.served_name) == ("someone/Some-Model", "Some-Model")
    assert asked == ["someone/Some-Model"]


def test_a_hub_id_that_a_shipped_recipe_serves_uses_that_recipe() -> None:
    for named in ("Qwen/Qwen3-8B", "qwen/qwen3-8b"):
        checked = read_recipe(named, ["schedule.slots=3"])
        assert Path(checked.source).name == "qwen3-8b.yaml"
        assert (checked.recipe.model, checked.recipe.schedule.slots) == ("Qwen/Qwen3-8B", 3)
        assert checked.recipe.schedule.step_tokens == 8448  # from the built-in recipe
    for name, path in recipes.models().items():
        assert read_recipe(name) == read_recipe(path.stem)
    assert len(recipes.models()) == len(recipes.shipped()) - len(("demo", "paper"))
    assert read_recipe("Qwen/Qwen3-8B-FP8").recipe.schedule.step_tokens == "auto"


def test_names_of_a_model(tmp_path: Path, monkeypatch) -> None:
    """Clients may use the Hub id, its last part, RECIPE, and `served_name`."""

    def names(named: str | None, *more: str) -> list[str]:
        return load_config(named, ["load.format=dummy", *more]).model_names

    full = "Qwen/Qwen3-0.6B"
    assert names("qwen3-0.6b") == [full, "Qwen3-0.6B", "qwen3-0.6b"]
    assert names("qwen3-0.6b", "server.served_name=a") == [full, "a", "Qwen3-0.6B", "qwen3-0.6b"]
    assert names(None) == names("demo") == ["demo"]
    assert names(None, "server.served_name=a") == ["demo", "a"]
    assert names("paper") == ["demo", "paper"]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DEMO, "models/my-model")
    Path("r.yaml").write_text("model: models/my-model\n")
    by_recipe, by_folder = load_config("./r.yaml"), load_config("./models/my-model/")
    assert by_recipe.model_names == ["my-model", "r"]
    assert {"r.yaml", "./r.yaml", "models/my-model"} <= by_recipe.model_paths
    assert by_folder.model_names == ["my-model"]
    assert {"./models/my-model/", "./models/my-model"} <= by_folder.model_paths


def test_what_lies_here_wins_over_what_is_shipped(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_recipe("paper").recipe.engine == "paper"
    (tmp_path / "paper").mkdir()  # without a config.json it is not a model
    assert read_recipe("paper").recipe.engine == "paper"
    shutil.copytree(DEMO, tmp_path / "paper", dirs_exist_ok=True)
    assert read_recipe("paper").recipe.model == "paper"
    assert load_config("paper").model_dir == "paper"


def test_what_is_none_of_these_is_told_what_there_is(tmp_path: Path) -> None:
    said = f"a model folder, a Hub id (owner/name) or a built-in recipe ({SHIPPED})"
    assert refused("xyz") == f"'xyz' is not a recipe file, {said}"
    assert refused("qwen3").endswith("; did you mean qwen3-8b?")
    assert refused("a/b/c").startswith("'a/b/c' is not a recipe file")
    assert refused("") == f"'' is not a recipe file, {said}"
    missing = str(tmp_path / "x.yaml")
    assert refused(missing) == f"cannot read recipe {missing}: No such file or directory"
    assert refused(str(tmp_path)) == f"{tmp_path} has no config.json, so it is not a model"


def test_the_wheel_ships_recipes_and_every_package() -> None:
    """`pip wheel .` copies only files that pyproject.toml lists."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    places = setuptools["package-dir"]
    data = {
        "demo",
        "demo.adapters.pirate",
        "demo.draft",
        "server.page",
        "server.templates",
        "shipped",
        "shipped.configs",
    }
    found = {f"nanovllm.{name}" for name in data}
    for top in ("nanovllm", "nanovllm_kernels"):
        folder = ROOT / places[top]
        for path in folder.rglob("__init__.py"):
            found.add(".".join((top, *path.parent.relative_to(folder).parts)))
    assert set(setuptools["packages"]) == found
    shipped = ROOT / places["nanovllm.shipped"]
    copied = {
        path
        for name, folder in (
            ("nanovllm.shipped", shipped),
            ("nanovllm.shipped.configs", shipped / "configs"),
        )
        for glob in setuptools["package-data"][name]
        for path in folder.glob(glob)
    }
    assert copied == {*shipped.glob("*.yaml"), *(shipped / "configs").iterdir()}
    for path in recipes.shipped().values():
        assert path in copied
        config = load_config(path.stem, ["load.format=dummy"])
        assert Path(config.config_path).parent in (DEMO, shipped / "configs")


# -- keys and values ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("cache.pages=[1", "--set cache.pages: the value is not YAML: line 1: expected ',' or "
         "']', but got '<stream end>'"),
        ("cache.pages", "--set cache.pages: write section.key=value"),
        ("cache.pages=half", "cache.pages is 'half'; it must be a whole number or auto"),
        ("cache.pages=1", "cache.pages is 1; it must be between 2 and 1073741824"),
        ("cache.prefix=3", "cache.prefix is 3; it must be true or false"),
        ("cache.cpu_gib=.nan", "cache.cpu_gib is nan; it must be between 0.001 and 4096"),
        ("cache=3", "cache is a section; write cache.<key>"),
        ("model.x=3", "unknown key model.x; a model has model.name, model.num_layers"),
        ("device=gpu", "device is 'gpu'; it must be auto, cuda or cpu"),
        ("load.format=gguf", "load.format is 'gguf'; it must be auto, safetensors or dummy"),
        ("server.api_key=12345",
         """server.api_key must be text, in quotes for YAML, as in '"1"'"""),
        ("server.host=on",
         """server.host is True; it must be text, in quotes for YAML, as in '"1"'"""),
        ("server.api_key=", "--set server.api_key: the value is empty; write null, or '\"\"' for "
         "no text"),
        ("server.port= ", "--set server.port: the value is empty; write null, or '\"\"' for no "
         "text"),
        ("server.port=null", "server.port is null; it must be a whole number"),
        ("cache.disk.gib=1", "cache.disk.path is missing; it must be text"),
        ("server.port=8e3", "server.port is 8000.0; it must be a whole number"),
        ("server.allowed_origins=[*]", "--set server.allowed_origins: the value is not YAML: line "
         "1: expected alphabetic or numeric character, but found ']'; write * and & in quotes, as "
         'in ["*"]'),
        ("server.api_key=[12345", "--set server.api_key: the value is not YAML: line 1: expected "
         "',' or ']', but got '<stream end>'"),
        ("parallel={tp: 4, ep: 2}", "parallel.ep is 2; it must be 1 or parallel.tp, which is 4; "
         "with a parallel.tp of 1 it can be any number of devices"),
        ("cpu_threads=0", "cpu_threads is 0; it must be between 1 and 1024"),
        ("parallel.ep=65", "parallel.ep is 65; it must be between 1 and 64"),
        ("experts.routing=round", "experts.routing is 'round'; it must be auto or uniform"),
        ("experts.routing=uniform",
         "experts.routing is uniform; it must be auto unless load.format is dummy"),
        ("server.port=70000", "server.port is 70000; it must be between 0 and 65535"),
        ("server.log_format=xml", "server.log_format is 'xml'; it must be text or json"),
        (
            "cache.checkpoint_host_gib=4",
            "cache.checkpoint_host_gib was removed; states share cache.host_gib: set "
            "cache.host_gib, and cache.checkpoint_fraction=0 to put recurrent states there",
        ),
        ("cache.page_token=4", "unknown key cache.page_token; did you mean cache.page_tokens?"),
        ("page_tokens=4", "unknown key page_tokens; did you mean cache.page_tokens?"),
        ("load.zzz=1", "unknown key load.zzz; load has format, seed"),
        ("zzz=1", "unknown key zzz; a recipe has model, num_layers, engine, config, device, "
         "dtype, quantize, cpu_threads, load, parallel, experts, cache, schedule, kernels, server, "
         "structured_outputs, paper, speculate, adapters, transfer, kv_events"),
        ("server.host=' '", "server.host (--host) is empty; leave it out for 127.0.0.1, or write "
         "0.0.0.0 for all addresses of this machine"),
        ('device="\\ud800"', "recipe: a value is '\\ud800'; it has a control character, or one "
         "that is not Unicode"),
        ('server.served_name="a\\ud800"', "server.served_name is 'a\\ud800'; it has a control "
         "character, or one that is not Unicode"),
        ('server.served_name="a\\nb"', "server.served_name is 'a\\nb'; it has a control character, "
         "or one that is not Unicode"),
        ('server.allowed_hosts=[a, "b\\0"]', "server.allowed_hosts is 'b\\x00'; it has a control "
         "character, or one that is not Unicode"),
        ("transfer={role: prefill, secret: 1234567890}",
         """transfer.secret must be text, in quotes for YAML, as in '"1"'"""),
        ("load={seed: 1, seed: 2}",
         "--set load: the value is not YAML: line 1: the key seed is given twice"),
    ],
)  # fmt: skip
def test_a_wrong_key_or_value_is_named(override: str, line: str) -> None:
    assert refused(None, override) == line


def test_arguments_may_have_any_bytes() -> None:
    """An argument that is not UTF-8 has surrogates in Python."""
    assert refused(None, device="cp\udcff").startswith(r"recipe: a value is 'cp\udcff'; ")
    assert refused(None, **{"server.host": ""}).startswith("server.host (--host) is empty; ")


def test_a_number_may_have_an_exponent_without_a_point() -> None:
    found = load_config(None, ["cache.cpu_gib=2e-1", "schedule.ageing_s=+1E2"]).recipe
    assert (found.cache.cpu_gib, found.schedule.ageing_s) == (0.2, 100.0)


def test_the_last_of_two_settings_counts() -> None:
    assert read_recipe(None, ["cache.pages=7", "cache.pages=8"]).recipe.cache.pages == 8


def test_a_recipe_is_text_without_double_keys(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"model: \xff")
    assert refused(str(path)) == f"recipe {path} is not text in UTF-8"
    path.write_text("cache: {pages: 3}\nmodel: demo\ncache: {pages: 4}\n")
    assert refused(str(path)) == f"recipe {path} is not YAML: line 1: the key cache is given twice"
    path.write_text("- model\n")
    assert refused(str(path)).endswith("expected sections such as 'model:' at the top")
    path.write_text("[" * 5000)
    assert refused(str(path)) == f"recipe {path} is nested too deeply"


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60) | st.binary(max_size=40))
@example("model: 'x\ny'")
@example("? {a: 1}\n: 2")
@example("model: 2020-13-45")
@example("model: \x00")
@example("<<: 3")
@example("&a [*a]")
@example(f"cpu_threads: {'9' * 5000}")
def test_any_recipe_gives_a_config_or_one_line(tmp_path_factory, text: str | bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "r.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    for named, overrides in ((str(path), []), (None, [f"x.{text!s}"]), (None, [f"model={text!s}"])):
        try:
            config = load_config(named, [*overrides, "load.format=dummy"])
        except ConfigError as error:
            assert len(str(error).splitlines()) == 1
        else:
            assert isinstance(config, Config)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=st.characters(exclude_characters="/"), max_size=300))
@example("~nobody")
@example("a" * 300)
@example("\x00")
def test_any_name_gives_a_config_or_one_line(named: str) -> None:
    try:
        load_config(named, ["load.format=dummy"])
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1


# -- before loading ----------------------------------------------------------------------------


def test_a_parser_is_known_before_anything_is_started() -> None:
    with pytest.raises(ConfigError) as caught:
        launch.serve(load_config(None, ["server.parser=qwen4"]))
    assert str(caught.value) == f"server.parser is 'qwen4'; it must be auto, {', '.join(PARSERS)}"
    assert parser_of(load_config(None)) == "qwen3"


@pytest.mark.parametrize("empty", ["", " ", "\n", "\r\n\t "])
def test_an_empty_key_is_refused(empty, monkeypatch) -> None:
    """An empty key comes from an unset variable, and would leave the server open."""
    said = r"^server\.api_key \(--api-key\) is empty; leave it out, and the server needs no key"
    with pytest.raises(ConfigError, match=said):
        load_config(None, (), {"server.api_key": empty})
    if empty:
        monkeypatch.setenv("NANOVLLM_API_KEY", empty)
        with pytest.raises(ConfigError, match=r"^NANOVLLM_API_KEY is empty; leave it out"):
            load_config(None)
        assert load_config(None, ["server.api_key=mine"]).recipe.server.api_key == "mine"


def test_a_key_has_no_white_space_around_it(monkeypatch) -> None:
    """Files end with a newline, which headers cannot contain."""
    for key in ("s3 cr\u00e9t\n", "s3 cr\u00e9t\r\n", " \ts3 cr\u00e9t \n\n"):
        config = load_config(None, (), {"server.api_key": key})
        monkeypatch.setenv("NANOVLLM_API_KEY", key)
        for found in (config, load_config(None)):
            assert found.recipe.server.api_key == "s3 cr\u00e9t"
    for key in ("two\nlines", "a\0b", "a\x1b[2J"):
        with pytest.raises(ConfigError, match="has control characters") as caught:
            load_config(None, (), {"server.api_key": key})
        assert "lines" not in str(caught.value) and "2J" not in str(caught.value)


def test_a_key_of_the_environment_is_used_and_never_shown(monkeypatch) -> None:
    monkeypatch.setenv("NANOVLLM_API_KEY", "of-the-night")
    config = load_config(None)
    assert config.recipe.server.api_key == "of-the-night"
    assert load_config(None, ["server.api_key=mine"]).recipe.server.api_key == "mine"
    hidden = without_api_key(config)  # for the engine, its `Ready` message and records
    assert hidden.recipe.server.api_key == "..."
    assert "of-the-night" not in repr(hidden) + repr(config.changed)
    assert hide_secrets({"server": {"api_key": "of-the-night"}}) == {"server": {"api_key": "..."}}
    monkeypatch.setenv("NANOVLLM_API_KEY", "")
    assert load_config(None).recipe.server.api_key is None
    assert without_api_key(load_config(None)).recipe.server.api_key is None
