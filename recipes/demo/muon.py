"""Muon for the matrices and Adam for all other parameters, in one optimizer.

Muon (Jordan et al. 2024) steps along the orthogonalised momentum: every direction of a matrix
learns at the same pace. Small transformers need about half of Adam's steps with it.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

MATRIX_LR, MATRIX_DECAY = 0.02, 0.02
OTHER_LR = 0.003
MOMENTUM = 0.95


def orthogonal(x: Tensor) -> Tensor:
    """Return approximately orthogonalised matrices [n, rows, columns]: five Newton-Schulz steps."""
    wide = x.shape[1] <= x.shape[2]
    x = x.bfloat16() if x.is_cuda else x.float()  # many CPUs multiply float32 faster
    x = x if wide else x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x if wide else x.mT


class Optimizer:
    def __init__(self, model: nn.Module) -> None:
        groups: dict[torch.Size, list[Tensor]] = defaultdict(list)
        others: list[Tensor] = []
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                groups[parameter.shape].append(parameter)
            else:
                others.append(parameter)
        self.groups = [
            (matrices, torch.zeros(len(matrices), *shape, device=matrices[0].device))
            for shape, matrices in groups.items()
        ]
        on_gpu = others[0].device.type == "cuda"
        self.orthogonal = torch.compile(orthogonal, dynamic=False) if on_gpu else orthogonal
        self.adam = torch.optim.Adam(others, betas=(0.9, 0.95), fused=on_gpu)

    @torch.no_grad()
    def step(self, pace: float) -> None:
        """Take one step with `pace` of the full learning rates, and clear the gradients."""
        for matrices, momentum in self.groups:
            gradient = torch.stack([m.grad for m in matrices if m.grad is not None])
            momentum.lerp_(gradient, 1 - MOMENTUM)
            update = self.orthogonal(gradient.lerp(momentum, MOMENTUM)).float()
            rows, columns = update.shape[1:]
            scale = MATRIX_LR * pace * max(1, rows / columns) ** 0.5
            torch._foreach_mul_(matrices, 1 - MATRIX_LR * pace * MATRIX_DECAY)
            torch._foreach_add_(matrices, list(update.unbind()), alpha=-scale)
            for matrix in matrices:
                matrix.grad = None
        for group in self.adam.param_groups:
            group["lr"] = OTHER_LR * pace
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
