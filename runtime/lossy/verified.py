"""What a verification of draft trees on the host gave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class Verified(NamedTuple):
    """What a target pass says of every slot [B, N+1] of the trees, and the paths it accepts.

    ``path`` [B, D+1] are the accepted slots (-1 padded), ``accepted`` [B] how many drafts are
    among them. ``root_row`` [B] is the row of each tree's root among the T rows of the pass,
    ``row_sampled`` [T] what was sampled there; ``outputs`` are the graph's, valid until it runs
    again. ``checked``: a mode had the trees verified twice, and a ``trial`` came first.
    """

    sampled: np.ndarray
    logprob: np.ndarray
    path: np.ndarray
    accepted: list[int]
    root_row: np.ndarray
    row_sampled: np.ndarray
    outputs: Mapping[str, np.ndarray]
    checked: bool
    trial: bool
