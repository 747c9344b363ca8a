"""Configs of EAGLE-3 heads, as the authors of EAGLE, SpecForge and speculators write them.

A head's folder has config.json and safetensors. Many configs leave facts out that the tensors show,
so the headers of the files are read first. A fact that neither gives is an error with a remedy.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from nanovllm.checkpoint import CONFIG, check, weight_files
from nanovllm.config import NOT_JSON, ConfigError
from nanovllm.layers.attention import QKNorm
from nanovllm.models.config import Spelling, lengthen, rope_parameters
from nanovllm.models.decoder import DecoderConfig
from nanovllm.models.shards import Stored, tensors_in
from nanovllm.models.support import check_only

log = logging.getLogger("engine")
USUAL_TAPS = 3
NORMS_BY_DEPTH = ("low", "mid", "high")  # other names of fc_norm.0, 1 and 2


class EagleConfig(Struct, frozen=True):
    """The section eagle_config of some config.json files."""

    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None
    layer_ids: tuple[int, ...] | None = None
    use_aux_hidden_state: bool | None = None
    norm_before_fc: bool | None = None


class Eagle3Fields(Struct, frozen=True):
    """Fields of a head's config.json that a Llama model has not."""

    speculators_model_type: str | None = None
    eagle_config: EagleConfig = EagleConfig()
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    num_aux_hidden_states: int | None = None
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    use_aux_norm: bool | None = None
    norm_output: bool | None = None
    model_type: str | None = None

    @property
    def layer_ids(self) -> tuple[int, ...] | None:
        inner = self.eagle_config
        for ids in (self.eagle_aux_hidden_state_layer_ids, inner.eagle_aux_hidden_state_layer_ids):
            if ids is not None:
                return ids
        return inner.layer_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Spec:
    """A head that fits its target. `stored` are its tensors; none if weights are random."""

    path: Path  # config.json
    config: DecoderConfig
    target_size: int  # hidden size of the target
    target_vocab: int
    taps: tuple[int, ...]  # as models.taps.Taps takes them
    draft_vocab: int
    norm_before_residual: bool  # the residual stream begins with the normalised state
    norm_before_fc: bool  # one norm over all taps
    fc_norm: bool  # a norm of each tap
    norm_output: bool  # the recycled state is normalised
    qk_norm: QKNorm
    stored: Mapping[str, Stored]  # by the name of `canonical`
    names: Mapping[str, str]  # their names in the files

    @property
    def has_embedding(self) -> bool:
        """True if the head has an embedding of its own; else it uses the target's."""
        if not self.stored:
            return self.config.hidden_size != self.target_size
        return "embed_tokens.weight" in self.stored

    @property
    def has_output(self) -> bool:
        """True if the head has an output head of its own; else it uses the target's."""
        if not self.stored:
            return not self.is_whole or self.has_embedding
        return "lm_head.weight" in self.stored or not self.is_whole

    @property
    def is_whole(self) -> bool:
        """True if the draft vocabulary is the target's."""
        return self.draft_vocab == self.target_vocab and "d2t" not in self.stored

    def target_ids(self) -> Tensor | None:
        """Return the target's id of each draft id, int64; None if they are equal.

        Raise ConfigError if they do not increase, or exceed the vocabulary.
        """
        if self.is_whole:
            return None
        draft_ids = torch.arange(self.draft_vocab, device="cpu")
        if not self.stored:
            return draft_ids * self.target_vocab // self.draft_vocab
        d2t = self.stored["d2t"]
        size = d2t.end - d2t.begin
        if d2t.shape != (self.draft_vocab,) or d2t.dtype != "I64" or size != 8 * self.draft_vocab:
            raise ConfigError(
                f"{d2t.path}: d2t is {d2t.dtype} {list(d2t.shape)}, expected I64 "
                f"[{self.draft_vocab}]"
            )
        offsets = np.fromfile(d2t.path, np.int64, self.draft_vocab, offset=d2t.begin)
        ids = draft_ids + torch.from_numpy(offsets)
        rises = len(ids) < 2 or bool((ids[1:] > ids[:-1]).all())
        if not rises or not 0 <= int(ids[0]) <= int(ids[-1]) < self.target_vocab:
            raise ConfigError(
                f"{d2t.path}: d2t must be offsets from draft ids to increasing ids of the "
                f"target, below {self.target_vocab}"
            )
        return ids


def read_eagle3(
    place: Path,
    target: DecoderConfig,
    *,
    taps: Sequence[int] | None = None,
    rope_theta: float | None = None,
    is_dummy: bool = False,
) -> Eagle3Spec:
    """Return the head in a folder, or with `is_dummy` perhaps that of a config.json alone.

    `taps` and `rope_theta` take precedence over the file. Raise ConfigError with the file and the
    field if the head is not clear or does not fit.
    """
    path = place
    if not is_dummy or place.is_dir():
        check(place, has_weights=not is_dummy)
        path = place / CONFIG
    try:
        raw = flattened(msgspec.json.decode(path.read_bytes(), type=dict[str, Any]))
        fields = msgspec.convert(raw, Eagle3Fields)
        check_kind(fields, path)
        config = config_of(raw, rope_theta, path)
    except NOT_JSON as error:  # also a missing field, or one of the wrong type
        raise ConfigError(f"{path}: {error}") from None
    names, stored = ({}, {}) if is_dummy else tensors_of(place)
    spec = Eagle3Spec(
        path=path,
        config=config,
        target_size=target.hidden_size,
        target_vocab=target.vocab_size,
        taps=tapped(fields, stored, target, stated=taps, path=path),
        draft_vocab=draft_vocab_of(fields, stored, config),
        norm_before_residual=residual_rule(fields, path),
        norm_before_fc=given_or_stored(
            (fields.norm_before_fc, fields.eagle_config.norm_before_fc),
            "input_norm.weight" in stored,
        ),
        fc_norm=given_or_stored(
            (fields.fc_norm, fields.use_aux_norm), "fc_norm.0.weight" in stored
        ),
        norm_output=bool(fields.norm_output),
        qk_norm=qk_norm_of(fields, stored),
        stored=stored,
        names=names,
    )
    check_fits(spec, fields)
    return spec


def flattened(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a speculators config, and those of its decoder layer, at one level."""
    inner = raw.get("transformer_layer_config")
    return {**inner, **raw} if isinstance(inner, dict) else raw


def check_kind(fields: Eagle3Fields, path: Path) -> None:
    """Raise ConfigError for a head of another method."""
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


def config_of(raw: dict[str, Any], rope_theta: float | None, path: Path) -> DecoderConfig:
    """Return the config of the head's layers. Raise ConfigError for one without rope_theta."""
    raw = {"architectures": [], "tie_word_embeddings": False, **raw}
    check_only(raw, DecoderConfig.ONLY, path)
    if raw.get("quantization_config"):
        raise ConfigError(f"{path}: a quantised head is not supported; use an unquantised one")
    spelling = msgspec.convert(raw, Spelling)
    if rope_theta is not None:
        raw["rope_parameters"] = {**(spelling.rope_parameters or {}), "rope_theta": rope_theta}
        raw["rope_scaling"] = scaled_by(spelling, rope_theta)
        spelling = msgspec.convert(raw, Spelling)
    elif not has_theta(spelling):
        raise ConfigError(
            f"{path}: no rope_theta; set speculate.rope_theta to that of the head's training"
        )
    raw["rope_parameters"] = rope = rope_parameters(spelling, path)
    lengthen(raw, rope)
    return msgspec.convert(raw, DecoderConfig)


def scaled_by(spelling: Spelling, rope_theta: float) -> dict[str, Any] | None:
    scaling = spelling.rope_scaling
    return {**scaling, "rope_theta": rope_theta} if scaling else None


def has_theta(spelling: Spelling) -> bool:
    inner = (spelling.rope_parameters, spelling.rope_scaling)
    return spelling.rope_theta is not None or any(one and one.get("rope_theta") for one in inner)


def residual_rule(fields: Eagle3Fields, path: Path) -> bool:
    """Return norm_before_residual. Readers of speculators' configs differ in its default."""
    if fields.norm_before_residual is None and fields.speculators_model_type is not None:
        raise ConfigError(
            f"{path}: no norm_before_residual, whose default differs between readers; add true or "
            "false, as in the head's training"
        )
    return bool(fields.norm_before_residual)


def given_or_stored(choices: tuple[bool | None, ...], stored: bool) -> bool:
    """Return a flag of config.json, or without one whether the file has the tensor."""
    return next((flag for flag in choices if flag is not None), stored)


def qk_norm_of(fields: Eagle3Fields, stored: Mapping[str, Stored]) -> QKNorm:
    has = "layers.0.self_attn.q_norm.weight" in stored
    if not stored:
        has = fields.model_type == "qwen3"
    return "head" if has else "none"


# -- tensors -------------------------------------------------------------------------------------


def canonical(name: str) -> str:
    """Return the name that speculators would give a head's tensor."""
    name = name.removeprefix("model.")
    name = re.sub(r"^midlayer\.", "layers.0.", name)
    for place, depth in enumerate(NORMS_BY_DEPTH):
        name = name.replace(f"aux_norm_{depth}.", f"fc_norm.{place}.")
    return name


def tensors_of(folder: Path) -> tuple[dict[str, str], dict[str, Stored]]:
    """Return the names in the files and the tensors, both by canonical name.

    The norm before a further layer is its input_layernorm, or its hidden_norm if it has no other.
    Raise ConfigError if two tensors have one canonical name.
    """
    names: dict[str, str] = {}
    stored: dict[str, Stored] = {}
    for path in weight_files(folder)[1]:
        for name, tensor in tensors_in(path):
            ours = canonical(name)
            if ours in names:
                raise ConfigError(f"{path}: {name} and {names[ours]} are the same tensor")
            names[ours], stored[ours] = name, tensor
    for name in [
        name for name in names if re.fullmatch(r"layers\.[1-9]\d*\.hidden_norm\.\w+", name)
    ]:
        usual = name.replace("hidden_norm", "input_layernorm")
        if usual not in names:
            names[usual], stored[usual] = names.pop(name), stored.pop(name)
    if "mask_hidden" in stored:
        raise ConfigError(f"{folder}: mask_hidden: heads for parallel drafting are not supported")
    return names, stored


# -- taps ----------------------------------------------------------------------------------------


def tapped(
    fields: Eagle3Fields,
    stored: Mapping[str, Stored],
    target: DecoderConfig,
    *,
    stated: Sequence[int] | None,
    path: Path,
) -> tuple[int, ...]:
    """Return the taps, and log them. `stated` is speculate.taps.

    Published ids count the layers whose output is tapped (SpecForge), or those whose input is
    (vLLM). The usual first tap is the output of layer 1, so a first id of 1 means outputs, and 2
    inputs. The number of layers can only be an input's id. Raise ConfigError for all others.
    """
    depth, ids = target.num_hidden_layers, fields.layer_ids
    count = count_of(fields, stored, target, path)
    usual = f"[2, {depth // 2}, {depth - 3}]"
    if stated is not None:
        taps, source = tuple(stated), "speculate.taps"
    else:
        if ids is None:
            raise ConfigError(
                f"{path}: no eagle_aux_hidden_state_layer_ids; set speculate.taps to the layers "
                f"whose inputs the head takes (EAGLE's own heads: {usual})"
            )
        first = ids[0] if ids else 0
        if first not in (1, 2) or (first == 1 and depth in ids):
            raise ConfigError(
                f"{path}: eagle_aux_hidden_state_layer_ids {list(ids)} may count outputs or inputs "
                "of layers; set speculate.taps to the layers whose inputs the head takes"
            )
        taps, source = tuple(i + (first == 1) for i in ids), f"{path}: ids {list(ids)}"
        source += " of outputs" if first == 1 else " of inputs"
    if len(taps) != count:
        raise ConfigError(f"{source}: {len(taps)} layers; the head takes {count}")
    rises = all(a < b for a, b in pairwise(taps))
    if not rises or not 1 <= taps[0] <= taps[-1] <= depth:
        raise ConfigError(
            f"{source}: taps {list(taps)} must increase from 1 or more to at most {depth}, the "
            "target's number of layers"
        )
    log.info("EAGLE-3 taps the inputs of layers %s of %d (%s)", list(taps), depth, source)
    return taps


def count_of(
    fields: Eagle3Fields, stored: Mapping[str, Stored], target: DecoderConfig, path: Path
) -> int:
    """Return the number of taps, by the tensor fc if there is one."""
    if not stored:
        usual = len(fields.layer_ids) if fields.layer_ids else USUAL_TAPS
        return fields.num_aux_hidden_states or usual
    if "fc.weight" not in stored:
        raise ConfigError(f"{path.parent} has no tensor fc.weight, so it is not an EAGLE-3 head")
    fc, width = stored["fc.weight"], target.hidden_size
    if len(fc.shape) != 2 or fc.shape[1] % width:
        raise ConfigError(
            f"{fc.path}: fc.weight has the shape {list(fc.shape)}; the target's hidden_size is "
            f"{width}, so the head is for another target"
        )
    return fc.shape[1] // width


# -- checks --------------------------------------------------------------------------------------


def draft_vocab_of(
    fields: Eagle3Fields, stored: Mapping[str, Stored], config: DecoderConfig
) -> int:
    if "lm_head.weight" in stored:
        return stored["lm_head.weight"].shape[0]
    return fields.draft_vocab_size or config.vocab_size


def check_fits(head: Eagle3Spec, fields: Eagle3Fields) -> None:
    """Raise ConfigError if the head is for another target, or lacks a tensor that it needs."""
    path, config = head.path, head.config
    if fields.target_hidden_size not in (None, head.target_size):
        raise ConfigError(
            f"{path}: target_hidden_size is {fields.target_hidden_size}; the target's hidden_size "
            f"is {head.target_size}, so the head is for another target"
        )
    if config.vocab_size != head.target_vocab:
        raise ConfigError(
            f"{path}: vocab_size is {config.vocab_size}; the target's is {head.target_vocab}, so "
            "the head is for another target"
        )
    if head.draft_vocab > head.target_vocab:
        raise ConfigError(
            f"{path}: draft_vocab_size is {head.draft_vocab}, more than the target's vocab_size "
            f"{head.target_vocab}"
        )
    if fields.draft_vocab_size not in (None, head.draft_vocab):
        raise ConfigError(
            f"{path}: draft_vocab_size is {fields.draft_vocab_size}, but lm_head.weight has "
            f"{head.draft_vocab} rows"
        )
    missing = "d2t" if head.stored and not head.is_whole and "d2t" not in head.stored else ""
    narrow = config.hidden_size != head.target_size
    if narrow and not head.has_output:
        missing = "lm_head.weight"
    if narrow and not head.has_embedding:
        missing = "embed_tokens.weight"
    if missing:
        raise ConfigError(
            f"{path.parent} has no tensor {missing}, which a head with hidden_size "
            f"{config.hidden_size} and {head.draft_vocab} draft tokens needs; the target has "
            f"{head.target_size} and {head.target_vocab}"
        )
