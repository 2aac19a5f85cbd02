"""Queries and keys with which every row attends only to itself.

If q and k have the same pairs of lengths a_j at rotary frequencies w_j, two rows at distance d have
the score Σ a_j² cos(d·w_j)/√D. If the fast frequencies have a share, no distance makes all cosines
1, and with a large enough amplitude only the row itself remains in its softmax.
"""

from __future__ import annotations

import math

import torch

from specbuild.builder.families.parts.rope import inverse_frequencies
from specbuild.runtime.engine_dir.drafters.record import DraftGeometry
from specbuild.runtime.errors import SpecbuildError

# The margin of the row's own score: e^32 other rows would have its weight.
MARGIN = 32.0
_PAIRS = 16
_SHARE_RATIO = 0.8  # of a pair's share and the next slower one's
_MIN_GAP = 0.02
_DISTANCES = 8192  # at once


def self_amplitudes(d: DraftGeometry, positions: int) -> torch.Tensor:
    """Return lengths a_j of the pairs, fp64 [D / 2], zero for slow frequencies.

    Every distance up to ``positions`` − 1 scores at least MARGIN less than distance 0. Raises
    SpecbuildError if the head is too narrow for that.
    """
    pairs = min(_PAIRS, d.head_dim // 2)
    shares = torch.zeros(d.head_dim // 2, dtype=torch.float64)
    shares[:pairs] = _SHARE_RATIO ** torch.arange(pairs, dtype=torch.float64)
    shares /= shares.sum()
    gap = _least_gap(shares, inverse_frequencies(d.rope, d.head_dim), positions)
    if gap < _MIN_GAP:
        raise SpecbuildError(
            f"a draft with heads of {d.head_dim} cannot attend to itself alone over {positions} "
            f"positions: some distance looks like none to {gap:.3f}, {_MIN_GAP} is needed"
        )
    scale = d.rope.attention_factor**2 / math.sqrt(d.head_dim)
    return (shares * MARGIN / (gap * scale)).sqrt()


def _least_gap(shares: torch.Tensor, frequencies: torch.Tensor, positions: int) -> float:
    """Return the minimum of Σ share·(1 − cos(d·w)) over all distances except 0."""
    least = math.inf
    for first in range(1, positions, _DISTANCES):
        distance = torch.arange(first, min(first + _DISTANCES, positions), dtype=torch.float64)
        lost = 1 - torch.outer(distance, frequencies).cos()
        least = min(least, float((lost @ shares).min()))
    return least
