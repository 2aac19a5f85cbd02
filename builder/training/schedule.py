"""The learning rate by step."""

from __future__ import annotations

import math
from dataclasses import dataclass

FINAL_RATE = 0.02  # relative to the peak, at the end of the cosine


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warm-up in a share of the ``steps``, then a cosine to ``FINAL_RATE``."""

    steps: int
    peak: float
    warmup_fraction: float

    def rate(self, step: int) -> float:
        """Return the learning rate of ``step``, counted from 0."""
        warmup = round(self.warmup_fraction * self.steps)
        if step < warmup:
            return self.peak * (step + 1) / warmup
        progress = (step - warmup) / max(1, self.steps - warmup)
        share = FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak * share
