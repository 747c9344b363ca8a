"""Whether a model can be cut over so many ranks, said before anything of it is loaded."""

from __future__ import annotations

from nanovllm.config import ConfigError
from nanovllm.parallel.mesh import Mesh

EVEN = ("num_attention_heads", "intermediate_size", "vocab_size")
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
