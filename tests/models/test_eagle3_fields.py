"""Fields of EAGLE-3 heads: all spellings are read, and what would change the numbers is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nanovllm.config import ConfigError
from nanovllm.models.eagle3_config import read_eagle3
from tests.models.heads import eagle3_tensors, save_head
from tests.models.test_eagle3_config import SPECULATORS, TARGET, read

IDS = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
# config.json as NVIDIA's Model Optimizer writes it. Fields that the target lacks are null.
MODEL_OPTIMIZER: dict[str, Any] = dict(
    model_type="llama", hidden_act="silu", attention_bias=False, mlp_bias=None, rope_scaling=None,
    tie_word_embeddings=False, pretraining_tp=None, torch_dtype="bfloat16", use_cache=True,
    eagle_config=dict(
        IDS, use_aux_hidden_state=True, use_input_layernorm_in_first_layer=True,
        use_last_layernorm=True, use_mtp_layernorm=False, next_layer_regular=True,
        parallel_draft_step=1, parallel_draft_heads_num_layers=None,
    ),
)  # fmt: skip


def line_of(folder: Path, fields: dict[str, Any], **asked: Any) -> str:
    """Return the error of a head with these fields."""
    with pytest.raises(ConfigError) as caught:
        read(folder, asked=asked, **fields)
    text = str(caught.value)
    assert text.startswith(f"{folder}/config.json: ") and "\n" not in text
    return text.removeprefix(f"{folder}/config.json: ")


def save(folder: Path, fields: dict[str, Any]) -> Path:
    """Save a head whose config.json has null fields, too."""
    save_head(folder, eagle3_tensors())
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


def test_null_fields_are_absent_ones(tmp_path: Path) -> None:
    found = read_eagle3(save(tmp_path, {**MODEL_OPTIMIZER, "logit_scale": None}), TARGET)
    assert found.taps == (2, 3, 4) and not found.norm_output
    assert found.config.tie_word_embeddings is False


@pytest.mark.parametrize(
    ("fields", "normed"),
    [
        ({"norm_output": True}, True),
        ({"eagle_config": {**IDS, "return_hidden_post_norm": True}}, True),
        ({"eagle_config": {**IDS, "return_hidden_post_norm": True}, "norm_output": True}, True),
        ({"eagle_config": {**IDS, "return_hidden_post_norm": False}}, False),
    ],
)
def test_both_names_of_a_normed_state(fields: dict[str, Any], normed: bool, tmp_path: Path) -> None:
    """No tensor shows it. Without it, later drafts come from a state that was never trained."""
    assert read(tmp_path, **fields).norm_output == normed


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 4]},
         "eagle_aux_hidden_state_layer_ids is [2, 3, 4], but "
         "eagle_config.eagle_aux_hidden_state_layer_ids is [1, 2, 3]"),
        ({"eagle_config": {**IDS, "layer_ids": [1, 2, 4]}},
         "eagle_config.eagle_aux_hidden_state_layer_ids is [1, 2, 3], but eagle_config.layer_ids "
         "is [1, 2, 4]"),
        ({"eagle_config": {**IDS, "norm_before_fc": False}, "norm_before_fc": True},
         "norm_before_fc is True, but eagle_config.norm_before_fc is False"),
        ({"eagle_config": {**IDS, "return_hidden_post_norm": True}, "norm_output": False},
         "norm_output is False, but eagle_config.return_hidden_post_norm is True"),
        ({"fc_norm": True, "use_aux_norm": False}, "fc_norm is True, but use_aux_norm is False"),
        ({**SPECULATORS, "transformer_layer_config": {"rms_norm_eps": 1e-6}},
         "rms_norm_eps is 1e-05, but transformer_layer_config.rms_norm_eps is 1e-06"),
        ({**SPECULATORS, "transformer_layer_config": {"rope_theta": 1e6}},
         "rope_theta is 500.0, but transformer_layer_config.rope_theta is 1000000.0"),
    ],
)  # fmt: skip
def test_fields_that_differ_are_refused(fields: dict[str, Any], error: str, tmp_path: Path) -> None:
    """Engines read different ones of them."""
    assert line_of(tmp_path, fields) == f"{error}; keep the one of the head's training"


def test_stated_taps_settle_a_difference(tmp_path: Path) -> None:
    fields = {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}
    assert read(tmp_path, asked={"taps": [2, 3, 4]}, **fields).taps == (2, 3, 4)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"logit_scale": 0.0625}, "logit_scale is 0.0625; only 1 is supported"),
        ({"is_causal": False}, "is_causal is false; only true is supported"),
        ({"residual_multiplier": 0.22}, "residual_multiplier is 0.22; only 1 is supported"),
        ({"parallel_drafting": True}, "parallel_drafting is true; only false is supported"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 128},
         "layer_types has sliding_attention; only full_attention is supported"),
        ({"eagle_config": {**IDS, "scaled_residual": 0.5}},
         "eagle_config.scaled_residual is not known; drop it if it does not change what the head "
         "computes"),
        ({"architectures": ["Qwen3NextForCausalLMEagle3"]},
         "architectures is Qwen3NextForCausalLMEagle3; only heads with layers of Llama or Qwen3 "
         "are supported"),
        ({"architectures": ["Eagle3Llama4ForCausalLM"]},
         "architectures is Eagle3Llama4ForCausalLM; only heads with layers of Llama or Qwen3 are "
         "supported"),
        ({**SPECULATORS, "architectures": ["Eagle3Speculator"],
          "transformer_layer_config": {"model_type": "ernie4_5"}},
         "model_type is ernie4_5; only heads with layers of Llama or Qwen3 are supported"),
        ({"fc_norm": True, "norm_before_fc": True},
         "norm_before_fc and fc_norm are both true; engines differ in what they then compute, so "
         "that such a head is not supported"),
    ],
)  # fmt: skip
def test_what_changes_the_numbers_is_refused(
    fields: dict[str, Any], error: str, tmp_path: Path
) -> None:
    """No tensor shows these, so that the head would be loaded and draft other tokens."""
    assert line_of(tmp_path, fields) == error


@pytest.mark.parametrize("field", ["architectures", "layer_types"])
def test_lists_that_are_none_are_one_line(field: str, tmp_path: Path) -> None:
    assert line_of(tmp_path, {field: 5}) == f"Expected `array`, got `int` - at `$.{field}`"
    error = f"Expected `str`, got `int` - at `$.{field}[0]`"
    assert line_of(tmp_path, {field: [5]}) == error


@pytest.mark.parametrize("count", [0, -1])
def test_a_draft_vocabulary_without_tokens_is_one_line(count: int, tmp_path: Path) -> None:
    """Random weights have no output head whose rows differ from it."""
    save_head(tmp_path, eagle3_tensors(), draft_vocab_size=count)
    with pytest.raises(ConfigError) as caught:
        read_eagle3(tmp_path, TARGET, is_dummy=True)
    assert str(caught.value) == (
        f"{tmp_path}/config.json: Expected `int` >= 1 - at `$.draft_vocab_size`"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_scale": 1.0, "layer_types": ["full_attention"]},
        {"architectures": ["EAGLE3LlamaForCausalLM"], "model_type": "llama"},
        {"architectures": ["Qwen3Eagle3Model"]},
        {"architectures": ["Eagle3DraftModel"], **SPECULATORS,
         "transformer_layer_config": {"model_type": "qwen3", "tie_word_embeddings": True}},
        {"architectures": [], "eagle_config": {**IDS, "unknown": False}},
    ],
)  # fmt: skip
def test_what_changes_nothing_is_accepted(fields: dict[str, Any], tmp_path: Path) -> None:
    assert read(tmp_path, **fields).draft_vocab == 40


def test_a_tied_head_without_an_output_head_is_clear_only_for_a_tied_target(
    tmp_path: Path,
) -> None:
    """With the target's embedding and a tied target, both readings are the same tensor."""
    tied = dict(tie_word_embeddings=True, draft_vocab_size=None)
    target = replace(TARGET, tie_word_embeddings=True)
    error = (
        f"{tmp_path}/config.json: tie_word_embeddings is true, but {tmp_path} has no tensor "
        "lm_head.weight; add it, since it may be an embedding or the target's output head"
    )
    for own, untied in (((), TARGET), (("embed_tokens",), TARGET), (("embed_tokens",), target)):
        save_head(tmp_path, eagle3_tensors(own=own, draft_vocab_size=None), **tied)
        with pytest.raises(ConfigError) as caught:
            read_eagle3(tmp_path, untied)
        assert str(caught.value) == error
    save_head(tmp_path, eagle3_tensors(draft_vocab_size=None), **tied)
    assert not read_eagle3(tmp_path, target).has_output
    whole = eagle3_tensors(own=("embed_tokens",), draft_vocab_size=200)
    assert read_eagle3(save_head(tmp_path, whole, **tied), TARGET).has_output
