"""Loader of EAGLE-3 heads, for `speculate: {method: eagle3, model: FOLDER}`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

from nanovllm.config import Config, ConfigError
from nanovllm.layers.ops import Ops
from nanovllm.models.decoder import Decoder, DecoderConfig
from nanovllm.models.eagle3 import Eagle3Head
from nanovllm.models.eagle3_config import read_eagle3
from nanovllm.models.weights import filler
from nanovllm.parallel.cut import check_cut
from nanovllm.parallel.mesh import Mesh
from nanovllm.spec.model_base import DraftModel


class Eagle3Loader:
    """Loader of the head in the folder speculate.model. Implements spec.model_base.DraftLoader.

    Decision: a head never limits the context. Many are trained with 2,048 positions, and later
    drafts are merely accepted less often.
    """

    def __init__(
        self, config: Config, target: DecoderConfig, mesh: Mesh, element_bytes: int
    ) -> None:
        speculate = config.recipe.speculate
        assert speculate is not None and speculate.model is not None
        self.config, self.mesh = config, mesh
        self.folder, is_dummy = (
            Path(os.path.expanduser(speculate.model)),
            config.recipe.load.format == "dummy",
        )
        is_config = is_dummy and self.folder.suffix == ".json" and os.path.isfile(self.folder)
        if not (is_config or os.path.isdir(self.folder)):
            raise ConfigError(
                f"speculate.model: {speculate.model} is not a folder; give that of an EAGLE-3 head"
            )
        self.spec = read_eagle3(
            self.folder,
            target,
            taps=speculate.taps or None,
            rope_theta=speculate.rope_theta,
            is_dummy=is_dummy,
        )
        try:
            check_cut(Mesh(mesh.tp_rank, mesh.tp_size), self.spec.config)  # it has no experts
        except ConfigError as error:
            raise ConfigError(f"{self.spec.path}: {error}") from None
        self.fp8_shape = self.spec.config.hidden_size, len(self.spec.taps) * target.hidden_size
        self.model_config = self.spec.config
        self.layout = Decoder.cache_layout(self.spec.config, mesh, element_bytes)

    def empty(self, target: Decoder, ops: Ops, max_tokens: int, *, fp8: bool = False) -> Eagle3Head:
        """Return the head with uninitialised parameters."""
        return Eagle3Head(
            self.spec, target, mesh=self.mesh, ops=ops, max_tokens=max_tokens, fp8=fp8
        )

    def filler(self, model: DraftModel) -> Callable[[], None]:
        """Return a function that loads the weights. Raise ConfigError like weights.filler."""
        head = cast("Eagle3Head", model)
        return head.logged(filler(head, self.config, self.folder, is_made=True))
