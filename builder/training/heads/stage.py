"""A stage of a schedule: what it trains, by which losses, for how long."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from specbuild.builder.training.schedule import LearningRateSchedule


@dataclass(frozen=True)
class Stage:
    """``losses`` maps terms to weights; ``heads`` holds all parameters that it trains.

    ``enter`` prepares the heads for it. ``beside`` gives terms that heads computed themselves in
    the last forward pass, each a sum over its positions.
    """

    name: str
    pace: LearningRateSchedule
    losses: Mapping[str, float]
    heads: nn.Module
    enter: Callable[[], None] = lambda: None
    beside: Callable[[], Mapping[str, torch.Tensor]] = dict

    def trained(self) -> list[nn.Parameter]:
        """What its optimiser holds."""
        return list(self.heads.parameters())


@dataclass(frozen=True)
class Schedule:
    """Stages one after another."""

    stages: tuple[Stage, ...]

    @property
    def steps(self) -> int:
        """Of all stages together."""
        return sum(stage.schedule.steps for stage in self.stages)

    def at(self, step: int) -> tuple[Stage, int]:
        """The stage of ``step``, and which of the stage's steps that is."""
        for stage in self.stages:
            if step < stage.schedule.steps:
                return stage, step
            step -= stage.schedule.steps
        raise IndexError(step)
