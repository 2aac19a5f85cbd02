"""What a verification of draft trees gave."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specbuild.runtime.lossy.specpv.state import StepChoice


@dataclass(frozen=True)
class Verified:
    """What the target says of every slot [B, N+1], and its aux hidden states [T, aux_layers·H].

    ``root_row`` [B] is the row of each tree's root in ``aux_hidden``; ``views`` is how each
    sequence was verified, where it may be over a part of its context.
    """

    sampled: np.ndarray
    logprob: np.ndarray
    aux_hidden: np.ndarray | None
    root_row: np.ndarray
    views: list[StepChoice] | None


@dataclass(frozen=True)
class Accepted:
    """Accepted slots ``path`` [B, D+1] (-1 padded) and how many drafts are among them, [B]."""

    path: np.ndarray
    accepted: list[int]
