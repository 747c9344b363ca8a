"""Adapters that cannot be served are refused with one line that names the cause."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nanovllm.adapters.folder import WEIGHTS, file_of
from nanovllm.adapters.section import located
from nanovllm.config import Adapters, ConfigError, load_config
from nanovllm.runner.build import build
from tests.adapters.peft_adapters import config_with
from tests.models.tiny import make_tiny

NO_CHANGES: Mapping[str, Tensor | None] = MappingProxyType({})
Q = "base_model.model.model.layers.0.self_attn.q_proj"
PEFT: dict[str, Any] = dict(
    peft_type="LORA",
    r=2,
    lora_alpha=4,
    target_modules=["q_proj"],
    layers_to_transform=[0],
    bias="none",
    init_lora_weights=True,
    lora_dropout=0.1,
    modules_to_save=None,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refused")
    make_tiny(folder, "qwen3")
    return folder


def write(
    folder: Path, tensors: Mapping[str, Tensor | None] = MappingProxyType({}), **changes: Any
) -> None:
    """Write an adapter of layer 0's q_proj. A tensor that is None is left out."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({**PEFT, **changes}))
    own = {f"{Q}.lora_A.weight": torch.ones(2, 64), f"{Q}.lora_B.weight": torch.ones(64, 2)}
    kept = {name: tensor for name, tensor in {**own, **tensors}.items() if tensor is not None}
    save_file(kept, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "use_dora is True; DoRA is not supported"),
        ({"bias": "lora_only"}, "bias is lora_only; biases are not supported"),
        ({"lora_bias": True}, "lora_bias is True; biases are not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']; whole modules"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is [3]; embeddings of tokens"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens is [3]; aLoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "it changes the weights of the model"),
        ({"init_lora_weights": "olora"}, "it changes the weights of the model"),
        ({"layer_replication": [[0, 2]]}, "copies of layers"),
        ({"fan_in_fan_out": True}, "transposed weights"),
        ({"use_qalora": True}, "the key use_qalora is set, but not supported"),
        ({"brand_new": {"x": 1}}, "the key brand_new is set, but not supported"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA is supported"),
        ({"r": 0}, "Expected `int` >= 1 - at `$.r`"),
        ({"r": 65}, "its rank is 65; adapters.max_rank is 64"),
        ({"rank_pattern": {"q_proj": 99}}, "its rank is 99; adapters.max_rank is 64"),
        ({"target_modules": "(", "layers_to_transform": None}, "regular expression: missing )"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"target_modules": ".*q_proj"}, "layers_to_transform needs a list"),
    ],
)  # fmt: skip
def test_a_config_is_refused_by_its_key(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    write(tmp_path / "a", **changes)
    with pytest.raises(ConfigError) as refused:
        located(Adapters(folder=str(tmp_path)), Path(), ())
    assert words in str(refused.value) and str(refused.value).startswith("adapter a: ")


NAN = torch.full((2, 64), torch.nan)
A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"


@pytest.mark.parametrize(
    ("tensors", "changes", "words"),
    [
        ({B: None}, {}, "model.layers.0.self_attn.q_proj has no lora_B.weight"),
        ({A: None, B: None}, {}, "adapter_model.safetensors has no tensors"),
        ({f"{Q}.lora_magnitude_vector": NAN}, {}, "DoRA is not supported"),
        ({f"{Q}.lora_B.bias": NAN}, {}, "biases are not supported"),
        ({f"{Q}.weight": NAN}, {}, f"the tensor {Q}.weight is unexpected"),
        ({"x": NAN}, {}, "the tensor x is unexpected"),
        (
            {A.replace("q_proj", "z_proj"): NAN, B.replace("q_proj", "z_proj"): NAN.clone()},
            {},
            "1 tensor of no product of the model: model.layers.0.self_attn.z_proj",
        ),
        ({A: torch.ones(3, 64)}, {}, "q_proj.lora_A is [3, 64], expected [2, 64]"),
        ({B: torch.ones(2, 64)}, {}, "q_proj.lora_B is [2, 64], expected [64, 2]"),
        ({A: torch.ones(2, 64, dtype=torch.int8)}, {}, "q_proj.lora_A is I8, expected BF16"),
        ({A: NAN}, {}, "model.layers.0.self_attn.q_proj has NaN or infinite numbers"),
        ({B: torch.full((64, 2), 3e38)}, {}, "its numbers are too large for torch.float32"),
        (
            {},
            {"target_modules": ["k_proj"], "layers_to_transform": [1]},
            "1 tensor of modules that the config does not target: model.layers.0.self_attn.q_proj; "
            "1 tensor missing: model.layers.1.self_attn.k_proj",
        ),
        (
            {},
            {"exclude_modules": ["q_proj"]},
            "1 tensor of modules that the config does not target: model.layers.0.self_attn.q_proj",
        ),
        (
            {},
            {"layers_to_transform": None},
            "1 tensor missing: model.layers.1.self_attn.q_proj",
        ),
    ],
)
def test_tensors_are_refused_by_name(
    tmp_path: Path, model: Path, tensors: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    write(tmp_path / "a", tensors, **changes)
    with pytest.raises(ConfigError) as refused:
        build(config_with(model, tmp_path))
    assert words in str(refused.value) and str(refused.value).startswith("adapter a")


def test_paths_lead_nowhere_else(tmp_path: Path) -> None:
    folder, outside = tmp_path / "adapters", tmp_path / "outside"
    write(outside)
    write(folder / "good")
    (folder / "linked").symlink_to(outside)
    (folder / "file").mkdir()
    (folder / "file" / "adapter_config.json").symlink_to(outside / "adapter_config.json")
    (folder / "pickled").mkdir()
    shutil.copy(outside / "adapter_config.json", folder / "pickled")
    (folder / "pickled" / "adapter_model.bin").write_bytes(b"")
    (folder / "inner").symlink_to(folder / "good")  # stays below the folder

    def refused(*names: str) -> str:
        try:
            located(Adapters(folder=str(folder), names=list(names)), Path(), ["base"])
        except ConfigError as error:
            return str(error)
        return ""

    assert refused("good") == refused("inner") == ""
    place = f"is a link to a place outside of {folder}"
    assert refused("linked") == f"adapter linked: adapter_config.json {place}"
    assert refused("file") == f"adapter file: adapter_config.json {place}"
    assert refused("none") == f"adapter none: {folder / 'none'} has no adapter_config.json"
    for name in ("../outside", "/etc", "a/b", "~", "", ".hidden", "a..b", "x" * 65, "a\nb"):
        assert "must be 1 to 64 characters" in refused(name), name
    assert refused("good", "good") == "adapters.names has a name twice"
    write(folder / "base")
    assert refused("base") == "the adapter 'base' has the model's name; rename its folder"
    with pytest.raises(ConfigError, match="which can run code"):
        file_of(folder, "pickled", WEIGHTS)


def test_the_section_is_checked(tmp_path: Path) -> None:
    for setting, words in (
        ("adapters.folder=/nowhere", "adapters.folder: /nowhere is not a folder"),
        ("adapters.folder=~nobody-at-all/x", "~nobody-at-all/x is not a folder"),
        ("adapters.folder=" + "x" * 300, "xxx is not a folder"),
        (f"adapters={{folder: {tmp_path}}}", "has no folder with an adapter_config.json"),
        ("adapters={folder: demo, names: []}", "adapters.names is empty; list adapters"),
        (f"adapters={{folder: {tmp_path}, slots: 0}}", "adapters.slots is 0; it must be between"),
        ("adapters.slots=3", "adapters.folder is missing; it must be text"),
    ):
        with pytest.raises(ConfigError) as refused:
            load_config(None, [setting])
        assert words in str(refused.value)


@pytest.mark.parametrize("name", ["x" * 100_000, "a\x1b[2J\x00\u202e", "\ud7ff\n" * 3000])
def test_a_message_is_short_and_printable(tmp_path: Path, model: Path, name: str) -> None:
    write(tmp_path / "a", {name: torch.ones(1)})
    with pytest.raises(ConfigError) as refused:
        build(config_with(model, tmp_path))
    text = str(refused.value)
    assert text.startswith("adapter a: the tensor ") and text.endswith(" is unexpected")
    assert text.isprintable() and len(text) <= 2_000


def test_the_end_of_a_long_message_stays() -> None:
    text = str(ConfigError(f"first {'x' * 5000} last"))
    assert len(text) == 1_999 and text.startswith("first x") and text.endswith("x last")
    assert " ... " in text and str(ConfigError("a\n b\x07")) == "a b\\x07"


def test_a_header_has_a_limit(tmp_path: Path, model: Path) -> None:
    write(tmp_path / "a")
    size = 100_000_001
    with (tmp_path / "a" / WEIGHTS).open("wb") as file:
        file.write(size.to_bytes(8, "little"))
        file.truncate(8 + size)  # a hole, so it takes no room on the disk
    with pytest.raises(ConfigError, match="its header has more than 100,000,000 bytes"):
        build(config_with(model, tmp_path))
