"""Configs of EAGLE-3 heads, as the authors of EAGLE, SpecForge and speculators write them.

A head's folder has config.json and safetensors. Many configs leave facts out that the tensors show,
so the headers of the files are read first. A fact that neither gives is an error with a remedy.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from nanovllm.checkpoint import CONFIG, check
from nanovllm.config import NOT_JSON, ConfigError
from nanovllm.layers.attention import QKNorm
from nanovllm.models.config import Spelling, lengthen, rope_parameters
from nanovllm.models.decoder import DecoderConfig
from nanovllm.models.eagle3_fields import Eagle3Fields, check_kind, flattened
from nanovllm.models.eagle3_tensors import check_format, target_ids_in, tensors_of
from nanovllm.models.shards import Stored

log = logging.getLogger("engine")
USUAL_TAPS = 3


class HeadConfig(DecoderConfig, frozen=True, kw_only=True):
    """Fields of a head's layers. A part of each head may be rotated, as in targets of Qwen3.5."""

    ROTATED = 1.0


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
    stored: Mapping[str, Stored]  # by the name of eagle3_tensors.canonical
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

        Raise ConfigError like eagle3_tensors.target_ids_in.
        """
        if self.is_whole:
            return None
        if not self.stored:
            draft_ids = torch.arange(self.draft_vocab, device="cpu")
            return draft_ids * self.target_vocab // self.draft_vocab
        return target_ids_in(self.stored, self.draft_vocab, self.target_vocab)


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
        if not is_dummy:
            check_format(place)
        check(place, has_weights=not is_dummy)
        path = place / CONFIG
    try:
        raw = flattened(msgspec.json.decode(path.read_bytes(), type=dict[str, Any]), path)
        fields = msgspec.convert(raw, Eagle3Fields)
        check_kind(raw, fields, path)
        config = config_of(raw, rope_theta, path)
    except (*NOT_JSON, OSError) as error:  # also a missing field, or one of the wrong type
        raise ConfigError(f"{path}: {error}") from None
    names, stored = ({}, {}) if is_dummy else tensors_of(place)
    norm_before_fc, fc_norm, norm_output = fields.norms(path)
    spec = Eagle3Spec(
        path=path,
        config=config,
        target_size=target.hidden_size,
        target_vocab=target.vocab_size,
        taps=tapped(fields, stored, target, stated=taps, path=path),
        draft_vocab=draft_vocab_of(fields, stored, config),
        norm_before_residual=residual_rule(fields, path),
        norm_before_fc=given_or_stored(norm_before_fc, "input_norm.weight" in stored),
        fc_norm=given_or_stored(fc_norm, "fc_norm.0.weight" in stored),
        norm_output=norm_output,
        qk_norm=qk_norm_of(fields, stored),
        stored=stored,
        names=names,
    )
    check_fits(spec, fields, target)
    return spec


def config_of(raw: dict[str, Any], rope_theta: float | None, path: Path) -> DecoderConfig:
    """Return the config of the head's layers. Raise ConfigError for one without rope_theta."""
    raw = {"architectures": [], "tie_word_embeddings": False, **raw}
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
    return msgspec.convert(raw, HeadConfig)


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


def given_or_stored(flag: bool | None, stored: bool) -> bool:
    """Return a flag of config.json, or without one whether the file has the tensor."""
    return stored if flag is None else flag


def qk_norm_of(fields: Eagle3Fields, stored: Mapping[str, Stored]) -> QKNorm:
    has = "layers.0.self_attn.q_norm.weight" in stored
    if not stored:
        has = fields.model_type == "qwen3"
    return "head" if has else "none"


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
    depth = target.num_hidden_layers
    count = count_of(fields, stored, target, path)
    usual = f"[2, {depth // 2}, {depth - 3}]"
    if stated is not None:
        taps, source = tuple(stated), "speculate.taps"
    else:
        ids = fields.layer_ids(path)
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
        return fields.num_aux_hidden_states or len(fields.layer_ids(path) or ()) or USUAL_TAPS
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
    if (head := stored.get("lm_head.weight")) is not None:
        if len(head.shape) != 2:
            shape = f"{list(head.shape)}, expected two sizes"
            raise ConfigError(f"{head.path}: lm_head.weight has the shape {shape}")
        return head.shape[0]
    return fields.draft_vocab_size or config.vocab_size


def check_fits(head: Eagle3Spec, fields: Eagle3Fields, target: DecoderConfig) -> None:
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
    if head.norm_before_fc and head.fc_norm:
        raise ConfigError(
            f"{path}: norm_before_fc and fc_norm are both true; engines differ in what they then "
            "compute, so that such a head is not supported"
        )
    is_shared = target.tie_word_embeddings and not head.has_embedding
    if config.tie_word_embeddings and head.stored and not head.has_output and not is_shared:
        raise ConfigError(
            f"{path}: tie_word_embeddings is true, but {path.parent} has no tensor lm_head.weight; "
            "add it, since it may be an embedding or the target's output head"
        )
