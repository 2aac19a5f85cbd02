"""The result of verifying draft trees on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class Verified(NamedTuple):
    """The tokens that a target pass samples at each slot [B, N+1] of the trees, and the paths.

    ``path`` [B, D+1] has the accepted slots (padded with -1), and ``accepted`` [B] the number of
    draft tokens among them. ``root_row`` [B] is the row of each tree's root among the T rows of the
    pass, and ``row_sampled`` [T] the token sampled at each row. ``outputs`` are the graph's, valid
    until its next run. ``checked``: a mode verifies the trees twice, and this pass is the second or
    the ``trial`` before it.
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
