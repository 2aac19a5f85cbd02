"""Estimates the time and memory of a training run before it starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

# A parameter, its gradient and AdamW's two moments, in fp32.
BYTES_PER_TRAINED = 16


@dataclass(frozen=True)
class TrainingEstimate:
    """The estimate of a run.

    A trial step measures ``activation_bytes``, which a micro batch saves for its backward pass, and
    the time from which ``device_hours`` follow.
    """

    trained_parameters: int
    frozen_parameters: int
    processes: int
    backbone_bytes: int
    state_bytes: int
    activation_bytes: int
    tokens: int
    step_s: float
    device_hours: float

    @property
    def bytes_per_device(self) -> int:
        """Return the total bytes per device."""
        return self.backbone_bytes + self.state_bytes + self.activation_bytes

    def lines(self) -> tuple[str, ...]:
        """Return the estimate as text."""
        gigabyte = 1e9
        return (
            f"estimate: {self.trained_parameters:,} parameters to train, "
            f"{self.frozen_parameters:,} frozen; {self.tokens:,} tokens",
            f"estimate: {self.bytes_per_device / gigabyte:.2f} GB per device (backbone "
            f"{self.backbone_bytes / gigabyte:.2f}, new parameters with their optimiser "
            f"{self.state_bytes / gigabyte:.2f}, activations "
            f"{self.activation_bytes / gigabyte:.2f})",
            f"estimate: {self.step_s:.2f} s a step on {self.processes} "
            f"device{'s' if self.processes > 1 else ''}, {self.device_hours:.2f} device-hours",
        )


@dataclass(frozen=True)
class Trial:
    """The time of a step, and the bytes that its first micro batch saved."""

    step_s: float
    activation_bytes: int


class SavedBytes:
    """Counts the bytes that a forward pass saves for the backward pass, without parameters."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count the storage of a saved tensor, once."""
        owner = tensor if tensor._base is None else tensor._base
        if not isinstance(owner, nn.Parameter):
            storage = tensor.untyped_storage()
            self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def total(self) -> int:
        """Return the counted bytes."""
        return sum(self._sizes.values())


def estimate_training(
    backbone: nn.Module, trained: list[nn.Parameter], *, processes: int, tokens: int, steps: int,
    trial: Trial,
) -> TrainingEstimate:  # fmt: skip
    """Estimate a run of ``steps`` with ``tokens`` tokens in total."""
    trained_ids = {id(p) for p in trained}
    frozen = [p for p in backbone.parameters() if id(p) not in trained_ids]
    return TrainingEstimate(
        trained_parameters=sum(p.numel() for p in trained),
        frozen_parameters=sum(p.numel() for p in frozen),
        processes=processes,
        backbone_bytes=sum(_local_bytes(p) for p in frozen),
        state_bytes=BYTES_PER_TRAINED * sum(p.numel() for p in trained),
        activation_bytes=trial.activation_bytes,
        tokens=tokens,
        step_s=trial.step_s,
        device_hours=trial.step_s * steps * processes / 3600,
    )


def _local_bytes(parameter: nn.Parameter) -> int:
    """Return the bytes of a parameter on this device: all, or those of its shard."""
    shard = getattr(parameter, "to_local", None)
    local = parameter if shard is None else shard()
    return math.prod(local.shape) * local.element_size()
