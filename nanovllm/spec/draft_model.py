"""A small model of its own that drafts, whole on every rank.

It reads the same tokens at the same places as the target, in layers of its own, and takes nothing
from it. The ranks draw together, each from its span of the vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from msgspec.structs import replace
from torch import Tensor, nn

from nanovllm import checkpoint
from nanovllm.attention.base import ForwardContext
from nanovllm.config import DEMO, Config, ConfigError
from nanovllm.layers.linear import Layer
from nanovllm.layers.ops import Ops
from nanovllm.models.config import read_model_config
from nanovllm.models.decoder import Decoder, DecoderConfig
from nanovllm.models.weights import filler
from nanovllm.parallel.cut import span_of_vocabulary
from nanovllm.parallel.mesh import Mesh, Span

KEY = "speculate.model"


class WholeModel(Layer):
    """Implements model_base.DraftModel. Its state is the normalised hidden state."""

    lag = 0
    taps = ()
    takes_hidden = False

    def __init__(self, decoder: Decoder, span: Span) -> None:
        super().__init__()
        self.decoder, self.span = decoder, span

    @property
    def layers(self) -> nn.ModuleList:
        return self.decoder.layers

    @property
    def output(self) -> nn.Module:
        head: nn.Module = self.decoder.head
        return head

    @property
    def read_by_pass(self) -> Sequence[nn.Module]:
        return (self.layers,)

    @property
    def read_by_given(self) -> Sequence[nn.Module]:
        return ()

    def bind_caches(self, caches: Mapping[int, Any]) -> None:
        self.decoder.bind_caches(caches)

    def given(self, hidden_TD: Tensor, taps: object) -> NoReturn:
        raise AssertionError("a model of its own takes nothing from the target")

    def forward(self, token_ids_T: Tensor, _: Tensor | None, ctx: ForwardContext) -> Tensor:
        state_SD: Tensor = self.decoder(token_ids_T, ctx)
        return state_SD

    def logits(self, state_SX: Tensor) -> Tensor:
        logits_SV = self.decoder.logits(state_SX)
        if self.span.is_whole:
            return logits_SV
        return logits_SV[:, self.span.start : self.span.start + self.span.count]


class DraftModelLoader:
    """Implements model_base.DraftLoader for the model in the folder `speculate.model`."""

    fp8_shape = None

    def __init__(
        self, config: Config, target: DecoderConfig, mesh: Mesh, element_bytes: int
    ) -> None:
        folder, path = found_at(config)
        self.config = replace(
            config,
            recipe=replace(config.recipe, model=str(folder), num_layers="auto", quantize=None),
            model_dir=str(folder),
            config_path=str(path),
        )
        self.family, self.model_config = read_model_config(self.config)
        own, vocab_size = self.model_config.vocab_size, target.vocab_size
        if own != vocab_size:
            raise ConfigError(
                f"{KEY}: {folder} has a vocabulary of {own} tokens, the model one of {vocab_size}; "
                "give a model of the same tokenizer"
            )
        check_tokenizer(folder, Path(config.tokenizer_dir))
        self.span = span_of_vocabulary(mesh, vocab_size)
        self.mesh = Mesh()
        self.layout = self.family.cache_layout(self.model_config, self.mesh, element_bytes)
        if self.layout.state is not None:
            raise ConfigError(
                f"{KEY}: {folder} has recurrent layers, which a draft model cannot have; give a "
                "model with attention in all layers"
            )

    def empty(self, target: Decoder, ops: Ops, max_tokens: int, *, fp8: bool = False) -> WholeModel:
        return WholeModel(self.family(self.model_config, self.mesh, ops, max_tokens), self.span)

    def filler(self, model: WholeModel) -> Callable[[], None]:
        return filler(model.decoder, self.config)


def found_at(config: Config) -> tuple[Path, Path]:
    """Return the draft model's folder and config.json. Raise ConfigError if it cannot be one."""
    speculate, is_dummy = config.recipe.speculate, config.recipe.load.format == "dummy"
    assert speculate is not None
    if speculate.model is None:
        if config.recipe.model == "demo":
            return DEMO / "draft", DEMO / "draft/config.json"
        raise ConfigError(f"{KEY} is missing; give the folder of a small model")
    path = Path(os.path.expanduser(speculate.model))
    if is_dummy and path.suffix == ".json" and os.path.isfile(path):
        return path.parent, path
    if not os.path.isdir(path):
        raise ConfigError(f"{KEY}: {speculate.model} is not a folder; give that of a small model")
    checkpoint.check(path, has_weights=not is_dummy)
    return path, path / "config.json"


def check_tokenizer(folder: Path, target: Path) -> None:
    """Raise ConfigError if both folders have a tokenizer and the ids of tokens differ."""
    ours, other = (path / "tokenizer.json" for path in (folder, target))
    if not (ours.is_file() and other.is_file()) or ours.read_bytes() == other.read_bytes():
        return
    if ids_of(ours) != ids_of(other):
        raise ConfigError(
            f"{KEY}: the tokens of {ours} are not those of {other}; give a model of the same "
            "tokenizer"
        )


def ids_of(path: Path) -> object:
    """Return the part of a tokenizer.json that maps tokens to ids. Raise ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])["model"].get("vocab")
    except (msgspec.MsgspecError, KeyError, AttributeError) as error:
        raise ConfigError(f"{KEY}: {path} is not a tokenizer: {error}") from None
