"""Cut of a model over ranks, checked before anything is loaded."""

from __future__ import annotations

from typing import Protocol

from nanovllm_kernels.sampling.reference import BLOCK

from nanovllm.config import ConfigError
from nanovllm.parallel.mesh import Mesh, Span
from nanovllm.parallel.places import EXPERTS

MOST_RANKS = 64
INPUTS = 128  # inputs per scale of fp8 weights


class Cut(Protocol):
    """The part of a model config that a cut depends on."""

    @property
    def num_key_value_heads(self) -> int: ...

    def inputs_of(self, name: str) -> int: ...

    @property
    def quantization_config(self) -> object: ...

    def evenly_cut(self, ep: int) -> tuple[str, ...]:
        """Return the fields that are cut evenly over ranks; those of experts over `ep` ranks."""
        ...


def check_cut(mesh: Mesh, model_config: Cut) -> None:
    """Raise ConfigError, which names the sizes that would work, if the cut is not even."""
    try:
        cut(mesh, model_config)
    except ConfigError as error:
        sizes = (size for size in range(1, MOST_RANKS + 1) if fits(mesh, size, model_config))
        raise ConfigError(f"{error}; it can be {', '.join(map(str, sizes))}") from None


def fits(mesh: Mesh, size: int, model_config: Cut) -> bool:
    """Return True if `size` ranks can share the model in the way of `mesh`."""
    try:
        cut(mesh.first_of(size), model_config)
    except ConfigError:
        return False
    return True


def cut(mesh: Mesh, model_config: Cut) -> None:
    even = model_config.evenly_cut(mesh.ep_size)
    if mesh.ep_size > 1 and not {*even} & {*EXPERTS}:
        raise ConfigError(f"parallel.ep is {mesh.ep_size}; the model has no experts")
    for name in even:
        full = getattr(model_config, name)
        span = mesh.span(name, full)
        share = span.count * model_config.inputs_of(name)
        is_cut = not span.is_whole and name not in EXPERTS
        if is_cut and model_config.quantization_config is not None and share % INPUTS:
            raise ConfigError(
                f"parallel.tp is {mesh.tp_size}; it would cut the model's {name} {full} into "
                f"shares of {share} inputs of weights in fp8, and {share} is not a multiple of "
                f"{INPUTS}"
            )
    mesh.span_or_copy("num_key_value_heads", model_config.num_key_value_heads)


def span_of_vocabulary(mesh: Mesh, vocab_size: int) -> Span:
    """Return the rank's part of the vocabulary, in whole sampling blocks.

    Random draws are made by block, so that they do not depend on the number of ranks. The first
    ranks may have one more block, and the last block may be partial. If there are fewer blocks than
    ranks, every rank has the whole vocabulary.
    """
    each, remainder = divmod(-(-vocab_size // BLOCK), mesh.tp_size)
    if each == 0:
        return Span(vocab_size, 0, vocab_size)
    start = BLOCK * (mesh.tp_rank * each + min(mesh.tp_rank, remainder))
    count = BLOCK * (each + (mesh.tp_rank < remainder))
    return Span(vocab_size, start, min(count, vocab_size - start))
