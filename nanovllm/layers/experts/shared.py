"""Shared expert: an MLP that each token passes through, next to its routed experts.

A shared expert of the same width as the routed experts is one of them; see moe.py.
"""

from __future__ import annotations

from nanovllm_kernels.activations import sigmoid
from nanovllm_kernels.fp8_reference import Quantised
from nanovllm_kernels.norms.reference import summed
from torch import Tensor

from nanovllm.attention.base import AdaptedRows
from nanovllm.layers.mlp import MLP
from nanovllm.layers.residual import Added, Pending, as_tensor


class SharedExpert(MLP):
    """MLP whose result may be multiplied by the sigmoid of a router output."""

    def result(
        self, stream: Added, gate_T1: Tensor | None, rows: AdaptedRows | None = None
    ) -> tuple[Tensor | None, Added]:
        """Return this rank's result, or None if the stream includes it, and the stream.

        `gate_T1` are logits, or None for an expert without a gate. `rows`: add the deltas of
        adapters. May overwrite the stream.
        """
        y_TF, stream = self.gate_up(stream, rows)
        if gate_T1 is not None:
            y_TF = scaled(y_TF, sigmoid(gate_T1))
        if self.down.mesh.tp_size > 1:
            if rows is not None:
                return self.down.adapted_product(y_TF, rows), stream
            return self.down.product(y_TF), stream
        after = self.down(y_TF, stream, rows)
        if isinstance(after, Added):
            return None, after
        assert isinstance(after, Pending)
        return summed(as_tensor(after.update)).to(after.stream_TD.dtype), Added(after.stream_TD)


def scaled(y: Tensor | Quantised, by_T1: Tensor) -> Tensor | Quantised:
    """Multiply each row by a number. Operations that are linear in rows may follow."""
    if isinstance(y, Quantised):
        return y._replace(scale_BX=y.scale_BX * by_T1.float().t())
    return y * by_T1


def shared_rules(source: str) -> tuple[tuple[str, str, str], ...]:
    """Return the loading rules of a shared expert, which is an MLP or one of the experts.

    `source` is its name in the checkpoint.
    """
    mlp, norm = "layers.{}.mlp", "model.layers.{}.post_attention_layernorm.weight"
    return (
        (norm, f"{mlp}.shared.gate_up.norm_weight", ""),
        (f"{source}.gate_proj.weight", f"{mlp}.shared.gate_up.weight", "gate"),
        (f"{source}.up_proj.weight", f"{mlp}.shared.gate_up.weight", "up"),
        (f"{source}.down_proj.weight", f"{mlp}.shared.down.weight", ""),
        (f"{source}.gate_proj.weight", f"{mlp}.experts.gate_up", "shared gate"),
        (f"{source}.up_proj.weight", f"{mlp}.experts.gate_up", "shared up"),
        (f"{source}.down_proj.weight", f"{mlp}.experts.down", "shared"),
    )
