"""Muon: momentum whose update is orthogonalised, for the weight matrices of the hidden layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Keller Jordan's quintic: five steps bring every singular value near 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return matrices [n, rows, columns] with their singular values replaced by about 1."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Update parameters [(n,) rows, columns], all matrices of one shape at once."""

    def __init__(
        self, parameters: list[nn.Parameter], *, weight_decay: float, momentum: float = 0.95
    ) -> None:
        self.weight_decay, self.momentum = weight_decay, momentum
        by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for parameter in parameters:
            by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
        self.groups = list(by_shape.values())
        self.buffers = [
            torch.zeros_like(torch.stack([p.detach() for p in group])) for group in self.groups
        ]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Apply one update from the parameters' gradients."""
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            gradient = torch.stack([p.grad for p in group])
            buffer.lerp_(gradient, 1 - self.momentum)
            nesterov = gradient.lerp(buffer, self.momentum)
            rows, columns = nesterov.shape[-2:]
            update = (
                orthogonalise(nesterov.reshape(-1, rows, columns)).reshape(nesterov.shape).float()
            )
            shrink = 1 - learning_rate * self.weight_decay
            torch._foreach_mul_(group, shrink)
            torch._foreach_add_(
                group, list(update.unbind()), alpha=-learning_rate * max(1, rows / columns) ** 0.5
            )
