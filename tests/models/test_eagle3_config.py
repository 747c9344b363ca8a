"""Configs of EAGLE-3 heads: taps, rotary positions, norms, and heads that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from nanovllm.config import ConfigError
from nanovllm.layers.rope import PlainRope
from nanovllm.layers.stretched_rope import YarnRope
from nanovllm.models.decoder import DecoderConfig
from nanovllm.models.eagle3_config import Eagle3Spec, read_eagle3
from tests.models.heads import EAGLE3, eagle3_tensors, save_head

TARGET = DecoderConfig(
    vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=8,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-6,
    rope_parameters=PlainRope(rope_theta=1e6),
)  # fmt: skip
SPECULATORS = dict(speculators_model_type="eagle3", norm_before_residual=True)
Tensors = dict[str, Tensor]


def read(
    folder: Path,
    change: Callable[[Tensors], object] = lambda _: None,
    target: DecoderConfig = TARGET,
    asked: Mapping[str, Any] = MappingProxyType({}),
    **fields: object,
) -> Eagle3Spec:
    """Return the head with these fields of config.json, after a change of its tensors."""
    tensors = eagle3_tensors(**{k: v for k, v in fields.items() if k in EAGLE3 and v is not None})
    change(tensors)
    save_head(folder, tensors, {"layers.0": "midlayer"}, **fields)
    return read_eagle3(folder, target, **asked)


def ids(*layers: int) -> dict[str, object]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [*layers]}}


@pytest.mark.parametrize(
    ("fields", "asked", "taps", "source"),
    [
        (ids(1, 3, 4), {}, (2, 4, 5), "ids [1, 3, 4] of outputs"),
        (ids(2, 4, 5), {}, (2, 4, 5), "ids [2, 4, 5] of inputs"),
        (ids(2, 4, 8), {}, (2, 4, 8), "ids [2, 4, 8] of inputs"),
        (ids(1, 3, 7), {}, (2, 4, 8), "ids [1, 3, 7] of outputs"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}, {}, (2, 3, 4), "of inputs"),
        ({"eagle_config": {"layer_ids": [1, 2, 3]}}, {}, (2, 3, 4), "of outputs"),
        ({"eagle_config": None}, {"taps": [2, 4, 5]}, (2, 4, 5), "speculate.taps"),
        (ids(1, 3, 4), {"taps": [1, 3, 4]}, (1, 3, 4), "speculate.taps"),
        (ids(4, 5, 6), {"taps": [4, 5, 6]}, (4, 5, 6), "speculate.taps"),
    ],
)
def test_taps(
    fields: dict[str, object],
    asked: dict[str, Any],
    taps: tuple[int, ...],
    source: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """SpecForge counts outputs, vLLM inputs. The log names the layers and the source."""
    caplog.set_level("INFO", "engine")
    assert read(tmp_path, asked=asked, **{"eagle_config": None, **fields}).taps == taps
    (line,) = [each for each in caplog.messages if "taps" in each]
    assert line.startswith(f"EAGLE-3 taps the inputs of layers {list(taps)} of 8 (")
    assert line.endswith(f"{source})")


UNCLEAR = (
    "FOLDER/config.json: eagle_aux_hidden_state_layer_ids {} may count outputs or inputs of "
    "layers; set speculate.taps to the layers whose inputs the head takes"
)


@pytest.mark.parametrize(
    ("fields", "asked", "said"),
    [
        (
            {"eagle_config": None},
            {},
            "FOLDER/config.json: no eagle_aux_hidden_state_layer_ids; set speculate.taps to the "
            "layers whose inputs the head takes (EAGLE's own heads: [2, 4, 5])",
        ),
        (ids(3, 4, 5), {}, UNCLEAR.format([3, 4, 5])),
        (ids(0, 4, 5), {}, UNCLEAR.format([0, 4, 5])),
        (ids(1, 4, 8), {}, UNCLEAR.format([1, 4, 8])),
        (ids(), {}, UNCLEAR.format([])),
        (
            ids(1, 3),
            {},
            "FOLDER/config.json: ids [1, 3] of outputs: 2 layers; the head takes 3",
        ),
        (ids(1, 2, 3), {"taps": [2]}, "speculate.taps: 1 layers; the head takes 3"),
        (
            ids(2, 4, 9),
            {},
            "FOLDER/config.json: ids [2, 4, 9] of inputs: taps [2, 4, 9] must increase from 1 or "
            "more to at most 8, the target's number of layers",
        ),
        (
            {},
            {"taps": [2, 2, 4]},
            "speculate.taps: taps [2, 2, 4] must increase from 1 or more to at most 8, the "
            "target's number of layers",
        ),
        (
            {},
            {"taps": [0, 2, 4]},
            "speculate.taps: taps [0, 2, 4] must increase from 1 or more to at most 8, the "
            "target's number of layers",
        ),
    ],
)
def test_unclear_taps_are_refused(
    fields: dict[str, object], asked: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Trap 2: no engine may guess, since other layers give drafts that are never accepted."""
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, asked=asked, **fields)
    assert str(caught.value).replace(str(tmp_path), "FOLDER") == said


def test_the_number_of_taps_is_that_of_the_tensor(tmp_path: Path) -> None:
    """Config.json says 3 taps, but fc takes 4."""
    wide = eagle3_tensors(num_taps=4)["fc.weight"]
    found = read(
        tmp_path,
        lambda tensors: tensors.update({"fc.weight": wide}),
        asked={"taps": [1, 2, 3, 4]},
        num_aux_hidden_states=3,
    )
    assert found.taps == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("fields", "asked", "theta"),
    [
        ({"rope_theta": 500.0}, {}, 500.0),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 700.0}}, {}, 700.0),
        (
            {"rope_theta": None, "transformer_layer_config": {"rope_theta": 800.0}, **SPECULATORS},
            {},
            800.0,
        ),
        ({"rope_theta": 500.0}, {"rope_theta": 1e4}, 1e4),
        ({"rope_theta": None}, {"rope_theta": 1e4}, 1e4),
        (
            {"rope_theta": 500.0, "rope_parameters": {"rope_theta": 700.0}},
            {"rope_theta": 1e4},
            1e4,
        ),
    ],
)
def test_theta(
    fields: dict[str, object], asked: dict[str, Any], theta: float, tmp_path: Path
) -> None:
    """Trap 9: it is read at every place, and speculate.rope_theta replaces it."""
    rope = read(tmp_path, asked=asked, **fields).config.rope_parameters
    assert rope == PlainRope(rope_theta=theta)


def test_scaling_remains_with_another_theta(tmp_path: Path) -> None:
    """Trap 8: rope_scaling of a converted head is not lost."""
    scaling = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
    found = read(tmp_path, asked={"rope_theta": 1e4}, rope_scaling=scaling).config
    assert found.rope_parameters == YarnRope(
        rope_theta=1e4, factor=4.0, original_max_position_embeddings=32
    )


@pytest.mark.parametrize(
    ("fields", "own", "flags"),
    [
        ({}, (), (False, False, False, False)),
        ({"norm_before_residual": True}, (), (True, False, False, False)),
        (SPECULATORS, (), (True, False, False, False)),
        ({**SPECULATORS, "norm_before_residual": False}, (), (False, False, False, False)),
        ({"norm_before_fc": True}, (), (False, True, False, False)),
        ({"eagle_config": {**ids(1, 2, 3)["eagle_config"], "norm_before_fc": True}}, (),
         (False, True, False, False)),
        ({}, ("input_norm",), (False, True, False, False)),
        ({"use_aux_norm": True, "norm_output": True}, (), (False, False, True, True)),
        ({}, ("fc_norm",), (False, False, True, False)),
    ],
)  # fmt: skip
def test_norms(
    fields: dict[str, object], own: tuple[str, ...], flags: tuple[bool, ...], tmp_path: Path
) -> None:
    """Trap 3: norms before fc that config.json or the file has are applied."""
    more = {k: v for k, v in eagle3_tensors(own=own).items() if k.split(".")[0] in own}
    found = read(tmp_path, lambda tensors: tensors.update(more), **fields)
    assert flags == (
        found.norm_before_residual, found.norm_before_fc, found.fc_norm, found.norm_output
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"rope_theta": None},
            "FOLDER/config.json: no rope_theta; set speculate.rope_theta to that of the head's "
            "training",
        ),
        (
            {"speculators_model_type": "eagle3"},
            "FOLDER/config.json: no norm_before_residual, whose default differs between readers; "
            "add true or false, as in the head's training",
        ),
        (
            {"speculators_model_type": "dflash"},
            "FOLDER/config.json: speculators_model_type is dflash; only eagle3 is supported",
        ),
        (
            {"eagle_config": {"use_aux_hidden_state": False}},
            "FOLDER/config.json: eagle_config.use_aux_hidden_state is false; only heads that read "
            "layers of the target are supported",
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "FOLDER/config.json: a quantised head is not supported; use an unquantised one",
        ),
        (
            {"attention_bias": True},
            "FOLDER/config.json: attention_bias is true; only false is supported",
        ),
        (
            {"target_hidden_size": 32},
            "FOLDER/config.json: target_hidden_size is 32; the target's hidden_size is 64, so the "
            "head is for another target",
        ),
        (
            {"vocab_size": 300},
            "FOLDER/config.json: vocab_size is 300; the target's is 200, so the head is for "
            "another target",
        ),
        (
            {"hidden_size": 32},
            "FOLDER has no tensor embed_tokens.weight, which a head with hidden_size 32 and 40 "
            "draft tokens needs; the target has 64 and 200",
        ),
        (
            {"hidden_size": "wide"},
            "FOLDER/config.json: Expected `int`, got `str` - at `$.hidden_size`",
        ),
    ],
)
def test_configs_that_do_not_fit(fields: dict[str, object], said: str, tmp_path: Path) -> None:
    tensors = eagle3_tensors(
        **{k: v for k, v in fields.items() if k in EAGLE3 and isinstance(v, int)}
    )
    save_head(tmp_path, tensors, **fields)
    with pytest.raises(ConfigError) as caught:
        read_eagle3(tmp_path, TARGET)
    assert str(caught.value).replace(str(tmp_path), "FOLDER") == said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda tensors: tensors.pop("fc.weight"),
            "FOLDER has no tensor fc.weight, so it is not an EAGLE-3 head",
        ),
        (
            lambda tensors: tensors.update({"fc.weight": torch.zeros(64, 3 * 80)}),
            "FOLDER/model.safetensors: fc.weight has the shape [64, 240]; the target's hidden_size "
            "is 64, so the head is for another target",
        ),
        (
            lambda tensors: tensors.pop("d2t"),
            "FOLDER has no tensor d2t, which a head with hidden_size 64 and 40 draft tokens needs; "
            "the target has 64 and 200",
        ),
        (
            lambda tensors: tensors.update({"lm_head.weight": torch.zeros(50, 64)}),
            "FOLDER/config.json: draft_vocab_size is 40, but lm_head.weight has 50 rows",
        ),
        (
            lambda tensors: tensors.update({"lm_head.weight": torch.zeros(())}),
            "FOLDER/model.safetensors: lm_head.weight has the shape [], expected two sizes",
        ),
        (
            lambda tensors: tensors.update({"mask_hidden": torch.zeros(192)}),
            "FOLDER: mask_hidden: heads for parallel drafting are not supported",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64)}),
            "FOLDER/model.safetensors: norm.weight and model.norm.weight are the same tensor",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    change: Callable[[Tensors], object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, change)
    assert str(caught.value).replace(str(tmp_path), "FOLDER") == said


def test_a_narrow_head_without_weights_has_everything_of_its_own(tmp_path: Path) -> None:
    save_head(tmp_path, {}, hidden_size=32, draft_vocab_size=None)
    (tmp_path / "model.safetensors").unlink()
    found = read_eagle3(tmp_path, TARGET, is_dummy=True)
    assert found.has_embedding and found.has_output and found.target_ids() is None
    assert read_eagle3(tmp_path, replace(TARGET, hidden_size=32), is_dummy=True).has_output is False


def test_a_config_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    save_head(tmp_path, eagle3_tensors())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"^\S+/config\.json: .* Is a directory: \S+$"):
        read_eagle3(tmp_path, TARGET)
