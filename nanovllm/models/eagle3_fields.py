"""Fields of an EAGLE-3 head's config.json, and the refusal of heads with other equations.

The authors of EAGLE, SpecForge, AngelSlim, speculators and NVIDIA's Model Optimizer write the same
facts at different places. Places that differ are an error, since engines read different ones. So is
a field that would change the head's numbers and that is not supported, because no tensor shows it.
A null field is an absent one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from nanovllm.config import ConfigError
from nanovllm.models.decoder import Count, DecoderConfig
from nanovllm.models.support import check_only

T = TypeVar("T")
SECTION, LAYER = "eagle_config", "transformer_layer_config"
# Names of architectures and types of layers that compute as Llama's or Qwen3's do. Llama 4 and the
# later families of Qwen do not.
LIKE_LLAMA = re.compile(r"llama(?!_?4)|qwen(?!3_?next|3_?5)", re.IGNORECASE)
NAMELESS = re.compile(r"Eagle3(Speculator|DraftModel)")  # architectures that name no layers
ONLY: dict[str, object] = {  # fields with a single supported value, besides those of targets
    **DecoderConfig.ONLY,
    "is_causal": True,
    "logit_scale": 1,
    "logits_scaling": 1,
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
    "parallel_drafting": False,
}
# Fields of eagle_config that tensors or their shapes show as well.
SHOWN = {
    "eagle_decoder_type",
    "eh_proj_before_attn",
    "eh_proj_bias",
    "has_lm_head",
    "next_layer_regular",
    "parallel_draft_heads_num_layers",
    "parallel_draft_step",
    "use_input_layernorm_in_first_layer",
    "use_last_layernorm",
    "use_mtp_layernorm",
}


class EagleConfig(Struct, frozen=True):
    """The section eagle_config of some config.json files."""

    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None
    layer_ids: tuple[int, ...] | None = None
    use_aux_hidden_state: bool | None = None
    norm_before_fc: bool | None = None
    return_hidden_post_norm: bool | None = None  # another name of norm_output


class Eagle3Fields(Struct, frozen=True):
    """Fields of a head's config.json besides the sizes of its layers."""

    speculators_model_type: str | None = None
    eagle_config: EagleConfig = EagleConfig()
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None
    draft_vocab_size: Count | None = None
    target_hidden_size: int | None = None
    num_aux_hidden_states: int | None = None
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    use_aux_norm: bool | None = None
    norm_output: bool | None = None
    model_type: str | None = None
    architectures: tuple[str, ...] = ()
    layer_types: tuple[str, ...] = ()

    def layer_ids(self, path: Path) -> tuple[int, ...] | None:
        """Return the ids of the tapped layers, or None without them. Raise ConfigError."""
        name, inner = "eagle_aux_hidden_state_layer_ids", self.eagle_config
        return agreed(
            path,
            {
                name: self.eagle_aux_hidden_state_layer_ids,
                f"{SECTION}.{name}": inner.eagle_aux_hidden_state_layer_ids,
                f"{SECTION}.layer_ids": inner.layer_ids,
            },
        )

    def norms(self, path: Path) -> tuple[bool | None, bool | None, bool]:
        """Return norm_before_fc, fc_norm and norm_output; None if not given. Raise ConfigError."""
        inner = self.eagle_config
        before = {
            "norm_before_fc": self.norm_before_fc,
            f"{SECTION}.norm_before_fc": inner.norm_before_fc,
        }
        each = {"fc_norm": self.fc_norm, "use_aux_norm": self.use_aux_norm}
        output = {
            "norm_output": self.norm_output,
            f"{SECTION}.return_hidden_post_norm": inner.return_hidden_post_norm,
        }
        return agreed(path, before), agreed(path, each), bool(agreed(path, output))


def agreed(path: Path, values: Mapping[str, T | None]) -> T | None:
    """Return the value that all given fields have. Raise ConfigError if two of them differ."""
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        first = next(iter(given))
        if value != given[first]:
            raise ConfigError(
                f"{path}: {first} is {shown(given[first])}, but {name} is {shown(value)}; keep the "
                "one of the head's training"
            )
    return next(iter(given.values()), None)


def shown(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def flattened(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the fields of a speculators config, and those of its decoder layer, at one level.

    Null fields are left out. Raise ConfigError if a size or a constant of the layer is given twice
    with two values.
    """
    outer = {name: value for name, value in raw.items() if value is not None}
    for name in (SECTION, LAYER):
        if isinstance(section := outer.get(name), dict):
            outer[name] = {key: value for key, value in section.items() if value is not None}
    inner = outer.get(LAYER)
    if not isinstance(inner, dict):
        return outer
    for name in {*DecoderConfig.__struct_fields__, "rope_theta"} - {"tie_word_embeddings"}:
        agreed(path, {name: outer.get(name), f"{LAYER}.{name}": inner.get(name)})
    return {**inner, **outer, "model_type": inner.get("model_type")}


def check_kind(raw: dict[str, Any], fields: Eagle3Fields, path: Path) -> None:
    """Raise ConfigError for a head of another method, and for one with other equations.

    `raw` is of `flattened`.
    """
    if fields.speculators_model_type not in (None, "eagle3"):
        raise ConfigError(
            f"{path}: speculators_model_type is {fields.speculators_model_type}; only eagle3 is "
            "supported"
        )
    if fields.eagle_config.use_aux_hidden_state is False:
        raise ConfigError(
            f"{path}: eagle_config.use_aux_hidden_state is false; only heads that read layers of "
            "the target are supported"
        )
    if raw.get("quantization_config"):
        raise ConfigError(f"{path}: a quantised head is not supported; use an unquantised one")
    check_only(raw, ONLY, path)
    if other := {*fields.layer_types} - {"full_attention"}:
        raise ConfigError(f"{path}: layer_types has {min(other)}; only full_attention is supported")
    check_layers(fields, path)
    known = {*EagleConfig.__struct_fields__, *SHOWN}
    for name, value in raw.get(SECTION, {}).items():
        if name not in known and value:
            raise ConfigError(
                f"{path}: {SECTION}.{name} is not known; drop it if it does not change what the "
                "head computes"
            )


def check_layers(fields: Eagle3Fields, path: Path) -> None:
    """Raise ConfigError unless the architecture, or else the model_type, is like Llama's."""
    names = [name for name in fields.architectures if not NAMELESS.fullmatch(name)]
    field, kind = ("architectures", names[0]) if names else ("model_type", fields.model_type)
    if kind is not None and not LIKE_LLAMA.search(kind):
        raise ConfigError(
            f"{path}: {field} is {kind}; only heads with layers of Llama or Qwen3 are supported"
        )
