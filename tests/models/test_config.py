"""Accepted config.json files, and one-line refusals of others."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from nanovllm.config import ConfigError
from nanovllm.layers.rope import Llama3Rope, PlainRope, YarnRope
from nanovllm.models import MODELS
from nanovllm.models.config import read_model_config
from tests.models.tiny import CASES, COMMON, config_of

RECIPES = Path(__file__).parents[2] / "recipes"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
HUB_LLAMA: dict[str, Any] = dict(  # with the Hub's spelling
    architectures=["LlamaForCausalLM"],
    attention_bias=False,
    mlp_bias=False,
    hidden_act="silu",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-05,
    rope_theta=500000,
    rope_scaling=dict(
        factor=8,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
        rope_type="llama3",
    ),
    tie_word_embeddings=False,
    quantization_config=None,
)
INSTEAD = (
    ", which is not supported; serve the unquantised meta-llama/Llama-3.1-8B-Instruct (with --set "
    "quantize=fp8 if that is too large)"
)
LLAMA3 = Llama3Rope(
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def read(folder: Path, raw: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(raw))
    return read_model_config(config_of(folder))[1]


def test_hub_spelling(tmp_path: Path) -> None:
    config = read(tmp_path, HUB_LLAMA)
    assert config.rope_parameters == LLAMA3
    assert config.head_size == 128
    assert not config.tie_word_embeddings


def test_older_names_of_the_rope_type(tmp_path: Path) -> None:
    scaling = {**HUB_LLAMA["rope_scaling"], "type": "llama3"}
    del scaling["rope_type"]
    assert read(tmp_path, {**HUB_LLAMA, "rope_scaling": scaling}).rope_parameters == LLAMA3
    plain = read(tmp_path, {**HUB_LLAMA, "rope_scaling": None}).rope_parameters
    assert plain == PlainRope(rope_theta=500000.0)
    null = {"rope_theta": 500000, "partial_rotary_factor": None}
    raw = {**HUB_LLAMA, "rope_scaling": None, "rope_parameters": null}
    assert read(tmp_path, raw).rope_parameters == plain


TOLD_BY_TENSORS = {"head_dim", "layer_types"}
M2 = dict(architectures=["MiniMaxM2ForCausalLM"], head_dim=128, num_local_experts=8)


@pytest.mark.parametrize(
    "case",
    [
        *("qwen3", "llama", "qwen3_moe", "minimax_m2", "deepseek_v3", "qwen3_next"),
        *("qwen3_5_text", "qwen3_5_moe_text", "glm4_moe_lite"),
    ],
)
def test_what_a_config_leaves_out_is_what_transformers_takes_it_for(
    case: str, tmp_path: Path
) -> None:
    """A field that is left out has the default of transformers, or is refused.

    Excluded are fields that the names or shapes of tensors show. Partial rotation has a separate
    test.
    """
    family, sizes = CASES[case]
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**{**COMMON, **sizes}))
    raw = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    path, compared = tmp_path / "config.json", set[str]()
    for name in {*raw, *raw["rope_parameters"]} - TOLD_BY_TENSORS - {"partial_rotary_factor"}:
        rope = {key: value for key, value in raw["rope_parameters"].items() if key != name}
        left = {key: value for key, value in raw.items() if key != name}
        path.write_text(json.dumps(left if name in raw else {**raw, "rope_parameters": rope}))
        with suppress(ConfigError):
            config = read_model_config(config_of(tmp_path))[1]
            of = config if name in raw else config.rope_parameters
            theirs = CONFIG_MAPPING[family].from_pretrained(tmp_path)
            expected = (vars(theirs) if name in raw else theirs.rope_parameters).get(name)
            if expected is not None and (found := getattr(of, name, None)) is not None:
                assert msgspec.to_builtins(found) == expected, name
                compared.add(name)
    assert "tie_word_embeddings" in compared


def test_transformers_5_spelling(tmp_path: Path) -> None:
    rope = {**HUB_LLAMA["rope_scaling"], "rope_theta": 500000.0}
    raw = {k: v for k, v in HUB_LLAMA.items() if k not in ("rope_theta", "rope_scaling")}
    assert read(tmp_path, {**raw, "rope_parameters": rope}).rope_parameters == LLAMA3


@pytest.mark.parametrize(
    ("own", "outside"),
    [
        ({}, {"rope_theta": 7e4}),
        ({"rope_type": "default"}, {"rope_theta": 7e4}),
        ({"rope_type": "default", "rope_theta": 7e4}, {}),
        ({"rope_type": "default", "rope_theta": 7e4}, {"rope_theta": 5.0}),
    ],
)
def test_scaling_beside_the_newer_spelling_is_heeded(
    own: dict[str, Any], outside: dict[str, Any], tmp_path: Path
) -> None:
    """A model card adds such fields to a file written by transformers 5."""
    raw = {k: v for k, v in HUB_LLAMA.items() if k not in ("rope_theta", "rope_scaling")}
    raw |= {**outside, "rope_parameters": own, "partial_rotary_factor": 0.5}
    raw |= {**M2, "num_experts_per_tok": 2}
    plain = PlainRope(rope_theta=7e4, partial_rotary_factor=0.5)
    assert read(tmp_path, raw).rope_parameters == plain
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    yarn = YarnRope(
        rope_theta=7e4,
        partial_rotary_factor=0.5,
        factor=4.0,
        original_max_position_embeddings=32768,
    )
    assert read(tmp_path, {**raw, "rope_scaling": scaling}).rope_parameters == yarn


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({}, 128),
        ({"num_local_experts": 128}, 128),
        ({"num_local_experts": 127, "num_experts": None}, 127),
        ({"num_local_experts": 127}, None),
        ({"num_experts": None}, None),
    ],
)
def test_experts_are_counted_under_either_name(
    change: dict[str, Any], count: int | None, tmp_path: Path
) -> None:
    raw = json.loads((RECIPES / "configs" / "Qwen3-30B-A3B.json").read_text()) | change
    if count is not None:
        assert read(tmp_path, raw).experts[1] == count
        return
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, raw)
    said = "num_experts or num_local_experts must be given; if both are, they must be equal"
    assert str(caught.value) == f"{tmp_path / 'config.json'}: {said}"


@pytest.mark.parametrize("family", ["minimax_m2", "qwen3_5_text", "qwen3_next", "llama"])
@pytest.mark.parametrize(
    ("change", "rope"),
    [
        ({"rope_theta": 1e4}, None),
        ({"rotary_dim": 8}, {}),
        ({"rope_theta": 1e4, "rotary_dim": 8}, None),
        ({"rope_theta": 1e4, "rotary_dim": 8, "partial_rotary_factor": 0.25}, None),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.25}, None),
        ({"rope_theta": 1e4, "rotary_dim": 8, "partial_rotary_factor": 1.0}, None),
        ({"rotary_dim": 8}, {"partial_rotary_factor": 1.0}),
        ({"rotary_dim": 8, "partial_rotary_factor": 0.25}, {"partial_rotary_factor": 1.0}),
        ({"rotary_dim": 8}, {"partial_rotary_factor": 0.75}),
        ({"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 0.75}),
    ],
)
def test_as_much_of_a_head_is_rotated_as_transformers_rotates(
    family: str, change: dict[str, Any], rope: dict[str, Any] | None, tmp_path: Path
) -> None:
    """transformers ignores partial rotation for Llama, so it is refused."""
    sizes = {**CASES[family][1], "rotary_dim": None, "rope_parameters": None}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**{**COMMON, **sizes}))
    raw = {**model.config.to_dict(), "architectures": [type(model).__name__], **change}
    raw["rope_parameters"] = rope if rope is None else {"rope_theta": 1e4, **rope}
    if family == "llama" and {**change, **(rope or {})}.get("partial_rotary_factor", 1) < 1:
        with pytest.raises(ConfigError, match=r"or rotary_dim, is .* even, from 16 to head_dim 16"):
            read(tmp_path, raw)
        return
    ours = read(tmp_path, raw).rotary_size
    theirs = CONFIG_MAPPING[family].from_pretrained(tmp_path)
    table = AutoModelForCausalLM.from_config(theirs).model.rotary_emb.inv_freq
    assert ours == 2 * len(table)


def test_the_family_is_the_architecture(tmp_path: Path) -> None:
    for name in ("Llama", "Qwen3"):
        raw = {**HUB_LLAMA, "architectures": [f"{name}ForCausalLM"], "head_dim": 128}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        assert read_model_config(config_of(tmp_path))[0].__name__ == name


@pytest.mark.parametrize(
    "change, said",
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            f"architectures is GPT2LMHeadModel (a text generator's name ends with ForCausalLM); "
            f"supported are {', '.join(sorted(MODELS))}; the nearest supported model is "
            "Qwen/Qwen3-8B",
        ),
        (
            {"architectures": []},
            f"architectures is empty (a text generator's name ends with ForCausalLM); "
            f"supported are {', '.join(sorted(MODELS))}; the nearest supported model is "
            "Qwen/Qwen3-8B",
        ),
        ({"architectures": ...}, "Object missing required field `architectures`"),
        ({"hidden_size": ...}, "Object missing required field `hidden_size`"),
        ({"hidden_size": "big"}, "Expected `int`, got `str` - at `$.hidden_size`"),
        ({"hidden_size": 0}, "Expected `int` >= 1 - at `$.hidden_size`"),
        (
            {"max_position_embeddings": 1},
            "Expected `int` >= 2 - at `$.max_position_embeddings`",
        ),
        ({"vocab_size": 1 << 40}, "Expected `int` <= 16777216 - at `$.vocab_size`"),
        ({"num_hidden_layers": 10**7}, "Expected `int` <= 1024 - at `$.num_hidden_layers`"),
        ({"vocab_size": 3.5}, "Expected `int`, got `float` - at `$.vocab_size`"),
        ({"num_attention_heads": 30}, "num_attention_heads 30 is not a multiple of "
         "num_key_value_heads 8"),
        ({"partial_rotary_factor": 0.5}, "head_dim * partial_rotary_factor, or rotary_dim, is 64; "
         "it must be even, from 128 to head_dim 128"),
        ({"head_dim": 5}, "head_dim * partial_rotary_factor, or rotary_dim, is 5; it must be even, "
         "from 5 to head_dim 5"),
        ({"attention_bias": True}, "attention_bias is true; only false is supported"),
        ({"mlp_bias": True}, "mlp_bias is true; only false is supported"),
        ({"use_sliding_window": True}, "use_sliding_window is true; only false is supported"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"; only "silu" is supported'),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "the weights are quantised with FP8 scales of other blocks than 128 x 128" + INSTEAD,
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 128]}},
            "the weights are quantised with FP8 scales of other blocks than 128 x 128" + INSTEAD,
        ),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "the weights are quantised with AWQ" + INSTEAD,
        ),
        (
            {"quantization_config": {"bits": 4}},
            "the weights are quantised with an unnamed method (4 bits)" + INSTEAD,
        ),
        (
            {"quantization_config": {**FP8, "fmt": "e5m2"}},
            'fmt is "e5m2"; only "e4m3" or "float8_e4m3fn" is supported - at '
            "`$.quantization_config`",
        ),
        (
            {"quantization_config": {**FP8, "activation_scheme": "static"}},
            'activation_scheme is "static"; only "dynamic" is supported - at '
            "`$.quantization_config`",
        ),
        ({"rope_theta": ...}, "missing field rope_theta (or rope_parameters)"),
        ({"rope_theta": 0}, "Expected `float` > 1.0 - at `$.rope_parameters.rope_theta`"),
        ({"rms_norm_eps": -1e-6}, "Expected `float` >= 0.0 - at `$.rms_norm_eps`"),
        ({"rope_scaling": "llama3"}, "Expected `object | null`, got `str` - at `$.rope_scaling`"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "Expected `bool | int | float | str | array | null`, got `object` - at "
            "`$.rope_parameters[...]`",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            "rope_type of rope_scaling is longrope; supported are default, llama3, yarn",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            "rope_type of rope_scaling is linear; supported are default, llama3, yarn",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}, "rope_scaling": None},
            "rope_type of rope_parameters is dynamic; supported are default, llama3, yarn",
        ),
        (
            {"rope_scaling": {"rope_type": None}},
            "rope_type of rope_scaling is None; supported are default, llama3, yarn",
        ),
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 0},
            "Expected `float` > 0.0 - at `$.rope_parameters.partial_rotary_factor`",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}},
            "Object missing required field `low_freq_factor` - at `$.rope_parameters`",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"]},
            "Object missing required field `head_dim`",
        ),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_named(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    raw = {**HUB_LLAMA, **change}
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, {key: value for key, value in raw.items() if value is not ...})
    assert str(caught.value) == f"{tmp_path / 'config.json'}: {said}"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null"])
def test_not_json_at_all(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"^\S+/config\.json: [A-Z].*") as caught:
        read_model_config(config_of(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"architectures": ["\xe9"]}', "(?i:.*utf-8.*)"),
        (b'{"a": ' + b"[" * 100_000, "maximum recursion depth exceeded.*"),
    ],
)
def test_text_of_another_encoding_and_text_without_an_end(
    content: bytes, said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^\S+/config\.json: {said}$"):
        read_model_config(config_of(tmp_path))


def test_no_config_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_model_config(config_of(tmp_path))
    assert str(caught.value) == f"cannot read {tmp_path / 'config.json'}: No such file or directory"


@pytest.mark.parametrize("asked, given", [("auto", 32), (1, 1), (32, 32)])
def test_the_first_layers_alone(asked: int | str, given: int, tmp_path: Path) -> None:
    read(tmp_path, HUB_LLAMA)
    config = config_of(tmp_path)
    recipe = replace(config.recipe, num_layers=asked)
    assert read_model_config(replace(config, recipe=recipe))[1].num_hidden_layers == given


@pytest.mark.parametrize("asked", [0, 33])
def test_layers_that_a_model_has_not(asked: int, tmp_path: Path) -> None:
    read(tmp_path, HUB_LLAMA)
    config = config_of(tmp_path)
    config = replace(config, recipe=replace(config.recipe, num_layers=asked))
    with pytest.raises(ConfigError) as caught:
        read_model_config(config)
    most = f"32, the number in {tmp_path}/config.json"
    assert str(caught.value) == f"model.num_layers is {asked}; it must be between 1 and {most}"


R1 = json.loads((RECIPES / "configs" / "DeepSeek-R1.json").read_text())


def test_r1_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, R1)
    assert config.sizes == (7168, 128, 1536, 512, 128, 64, 128)
    assert (config.rotary_size, config.head_size) == (64, 128)
    rope = config.rope_parameters
    assert rope.amplitude == 1.0  # of cosines and sines; scores are scaled instead
    assert config.score_scale == pytest.approx(192**-0.5 * 1.8738, rel=1e-4)
    lite = replace(rope, mscale=0.707, mscale_all_dim=0.707)
    assert lite.score_scale == pytest.approx(1.590, rel=1e-3)
    assert replace(rope, factor=1.0).score_scale == 1.0
    assert config.evenly_cut(1) == (
        "num_attention_heads",
        "intermediate_size",
        "moe_intermediate_size",
    )
    assert "n_routed_experts" in config.evenly_cut(8)
    plain = {**R1, "q_lora_rank": None, "n_shared_experts": None, "first_k_dense_replace": 0}
    lacking = read(tmp_path, plain)
    assert lacking.sizes.query_rank is None
    assert lacking.evenly_cut(8) == ("num_attention_heads", "n_routed_experts")


def test_what_r1_could_leave_out(tmp_path: Path) -> None:
    """Missing fields of groups, shared experts and dense layers get transformers' defaults."""
    others = dict(n_group=16, topk_group=5, n_shared_experts=3, first_k_dense_replace=2)
    others |= dict(q_lora_rank=77, routed_scaling_factor=3.5, norm_topk_prob=False)
    theirs = CONFIG_MAPPING["deepseek_v3"]()
    for name, value in others.items():
        config = read(tmp_path, {**R1, **others, "num_experts_per_tok": 4})
        assert getattr(config, name) == value
        config = read(tmp_path, {key: value for key, value in R1.items() if key != name})
        assert getattr(config, name) == getattr(theirs, name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_key_value_heads": 64}, "num_key_value_heads is 64; it must be num_attention_heads, "
         "128, since each head has its own keys and values"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63; it must be even"),
        ({"head_dim": 128}, "head_dim is 128; it must be qk_rope_head_dim, 64"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; only 1 is supported"),
        ({"rope_scaling": {**R1["rope_scaling"], "partial_rotary_factor": 0.25}},
         "partial_rotary_factor is 0.25; only 1 is supported"),
        ({"n_group": 7}, "num_experts_per_tok is 8, of topk_group 4 of n_group 7 equal groups, but "
         "n_routed_experts is 256"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok is 129, of topk_group 4 of n_group 8 "
         "equal groups, but n_routed_experts is 256"),
        ({"topk_group": 9}, "topk_group is 9; there are n_group 8"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2; only 1 is supported"),
        ({"scoring_func": "softmax"}, 'scoring_func is "softmax"; only "sigmoid" is supported'),
        ({"topk_method": "greedy"}, 'topk_method is "greedy"; only "noaux_tc" is supported'),
        ({"kv_lora_rank": ...}, "Object missing required field `kv_lora_rank`"),
        ({"first_k_dense_replace": -1}, "Expected `int` >= 0 - at `$.first_k_dense_replace`"),
        ({"n_shared_experts": -1}, "Expected `int` >= 0 - at `$.n_shared_experts`"),
        ({"n_shared_experts": 1 << 40}, "Expected `int` <= 1024 - at `$.n_shared_experts`"),
        ({"rope_theta": 1}, "Expected `float` > 1.0 - at `$.rope_parameters.rope_theta`"),
        *(
            (
                {"rope_scaling": {**R1["rope_scaling"], name: 0}},
                f"Expected {what} - at `$.rope_parameters.{name}`",
            )
            for name, what in (
                ("factor", "`float` > 0.0"),
                ("original_max_position_embeddings", "`int` >= 1"),
                ("beta_fast", "`float` > 0.0"),
                ("beta_slow", "`float` > 0.0"),
            )
        ),
    ],
)  # fmt: skip
def test_what_latent_attention_cannot_be(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    raw = {**R1, **change}
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, {key: value for key, value in raw.items() if value is not ...})
    assert str(caught.value) == f"{tmp_path / 'config.json'}: {said}"
