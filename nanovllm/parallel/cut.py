"""How a model is cut over ranks, and whether it can be, said before anything of it is loaded."""

from __future__ import annotations

from nanovllm_kernels.sampling_reference import BLOCK

from nanovllm.config import ConfigError
from nanovllm.parallel.mesh import Mesh, Span

EVEN = ("num_attention_heads", "intermediate_size")
EVEN_OR_COPIED = ("num_key_value_heads",)
MOST_RANKS = 64


def check_cut(tp: int, model_config: object) -> None:
    """Raises ConfigError, which names the sizes that would work, if it cannot."""
    try:
        cut(tp, model_config)
    except ConfigError as error:
        sizes = ", ".join(
            str(size) for size in range(1, MOST_RANKS + 1) if fits(size, model_config)
        )
        raise ConfigError(f"{error}; it can be {sizes}") from None


def fits(tp: int, model_config: object) -> bool:
    try:
        cut(tp, model_config)
    except ConfigError:
        return False
    return True


def cut(tp: int, model_config: object) -> None:
    mesh = Mesh(0, tp)
    for field in EVEN:
        mesh.span(field, getattr(model_config, field))
    for field in EVEN_OR_COPIED:
        mesh.span_or_copy(field, getattr(model_config, field))


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
