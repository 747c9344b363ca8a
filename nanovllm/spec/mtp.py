"""Loader of a checkpoint's own layer of MTP, for `speculate: {method: mtp}`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

from msgspec.structs import replace as replace_struct

from nanovllm.checkpoint import weight_files
from nanovllm.config import Config, ConfigError
from nanovllm.kv.layout import CacheLayout
from nanovllm.layers.ops import Ops
from nanovllm.models.config import read_model_config
from nanovllm.models.decoder import Decoder, DecoderConfig, MtpSpec
from nanovllm.models.destination import FLOATS
from nanovllm.models.mtp import MtpHead
from nanovllm.models.names import text_tensors
from nanovllm.models.weights import filler
from nanovllm.parallel.cut import span_of_vocabulary
from nanovllm.parallel.mesh import Mesh
from nanovllm.spec.model_base import DraftModel


class MtpLoader:
    """Loader of the target's MTP layer. Implements spec.model_base.DraftLoader."""

    def __init__(
        self, config: Config, target: DecoderConfig, mesh: Mesh, element_bytes: int
    ) -> None:
        self.config, self.mesh = config, mesh
        self.spec = mtp_of(config, target)
        self.model_config = self.spec.config
        family = read_model_config(config)[0]
        group = family.cache_layout(self.spec.config, mesh, element_bytes).paged[0]
        self.layout = CacheLayout((replace_struct(group, layers=(0,)),))
        self.fp8_shape = span_of_vocabulary(mesh, target.vocab_size).count, target.hidden_size

    def empty(self, target: Decoder, ops: Ops, max_tokens: int, *, fp8: bool = False) -> MtpHead:
        """Return the head with uninitialised parameters."""
        return MtpHead(self.spec, target, self.mesh, ops, fp8_head=fp8)

    def filler(self, model: DraftModel) -> Callable[[], None]:
        """Return a function that loads the weights. Raise ConfigError like weights.filler."""
        head = cast("MtpHead", model)
        return head.logged(filler(head, self.config, prefix=self.spec.prefix))


def mtp_of(config: Config, target: DecoderConfig) -> MtpSpec:
    """Return the target's MTP layer. Raise ConfigError if the checkpoint has none."""
    spec = target.mtp()
    if spec is None:
        raise ConfigError(
            f"speculate.method is mtp, but {config.config_path} has no MTP layer; use ngram, "
            "eagle3 or draft_model"
        )
    if config.recipe.load.format == "dummy":
        return spec
    assert config.model_dir is not None
    source, paths = weight_files(Path(config.model_dir))
    dtypes = {
        name: tensor.dtype
        for path in paths
        for name, tensor in text_tensors(path)
        if name.startswith(spec.prefix)
    }
    if not dtypes:
        raise ConfigError(
            f"speculate.method is mtp, but {source} has no tensor {spec.prefix}*: some repackaged "
            "checkpoints drop them; use the original checkpoint, or another method"
        )
    return with_stored_types(spec, dtypes, is_made=config.recipe.quantize is not None)


def with_stored_types(spec: MtpSpec, dtypes: dict[str, str], *, is_made: bool) -> MtpSpec:
    """Return the layer with fp8 for those weights that are fp8 in the file.

    The file decides, since repackaged checkpoints often leave MTP in bfloat16 without listing it in
    modules_to_not_convert, or list it although it is fp8. `dtypes` are by name. `is_made`: weights
    are quantised while loading.
    """
    quantised = spec.config.quantization_config
    if quantised is None or is_made:
        return spec
    floats = frozenset(
        name.removesuffix(".weight")
        for name, dtype in dtypes.items()
        if name.endswith(".weight") and dtype in FLOATS
    )
    stored = replace_struct(quantised, modules_to_not_convert=floats, ignored_layers=None)
    return replace(spec, config=replace_struct(spec.config, quantization_config=stored))
