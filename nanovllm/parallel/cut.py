"""How a model is cut over ranks, and whether it can be, said before anything of it is loaded."""

from __future__ import annotations

from typing import Protocol

from nanovllm_kernels.sampling_reference import BLOCK

from nanovllm.config import ConfigError
from nanovllm.parallel.mesh import EXPERTS, Mesh, Span

MOST_RANKS = 64
INPUTS = 128  # that share a scale, where weights are fp8


class Cut(Protocol):
    """What a model's config says of itself."""

    @property
    def num_key_value_heads(self) -> int: ...

    def inputs_of(self, name: str) -> int: ...

    @property
    def quantization_config(self) -> object: ...

    def evenly_cut(self, ep: int) -> tuple[str, ...]:
        """The fields of which each rank takes an equal share; of experts, among `ep` ranks."""
        ...


def check_cut(mesh: Mesh, model_config: Cut) -> None:
    """Raises ConfigError, which names the sizes that would work, if it cannot."""
    try:
        cut(mesh, model_config)
    except ConfigError as error:
        found = (size for size in range(1, MOST_RANKS + 1) if fits(mesh, size, model_config))
        raise ConfigError(f"{error}; it can be {', '.join(map(str, found))}") from None


def fits(mesh: Mesh, size: int, model_config: Cut) -> bool:
    """Whether so many ranks can share the model as those of `mesh` do."""
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
    """The rank's tokens: whole blocks of the draw, which is the same over any number of ranks.

    Earlier ranks have one block more, the last block may be partial. Of a vocabulary of fewer
    blocks than ranks, every rank keeps all.
    """
    each, more = divmod(-(-vocab_size // BLOCK), mesh.tp_size)
    if each == 0:
        return Span(vocab_size, 0, vocab_size)
    start = BLOCK * (mesh.tp_rank * each + min(mesh.tp_rank, more))
    count = BLOCK * (each + (mesh.tp_rank < more))
    return Span(vocab_size, start, min(count, vocab_size - start))
