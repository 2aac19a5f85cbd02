"""A stage of a schedule: its parameters, losses and steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from specbuild.builder.training.schedule import LearningRateSchedule


@dataclass(frozen=True)
class Stage:
    """``losses`` maps terms to weights; ``heads`` has all parameters that the stage trains.

    ``enter`` prepares the heads. ``extra_terms`` returns terms that heads computed in the last
    forward pass, each a sum over its positions.
    """

    name: str
    rates: LearningRateSchedule
    losses: Mapping[str, float]
    heads: nn.Module
    enter: Callable[[], None] = lambda: None
    extra_terms: Callable[[], Mapping[str, torch.Tensor]] = dict

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters of the optimiser."""
        return list(self.heads.parameters())


@dataclass(frozen=True)
class Schedule:
    """A sequence of stages."""

    stages: tuple[Stage, ...]

    @property
    def steps(self) -> int:
        """Return the steps of all stages."""
        return sum(stage.rates.steps for stage in self.stages)

    def at(self, step: int) -> tuple[Stage, int]:
        """Return the stage of ``step``, and the step's index in it."""
        for stage in self.stages:
            if step < stage.rates.steps:
                return stage, step
            step -= stage.rates.steps
        raise IndexError(step)
